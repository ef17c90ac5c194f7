"""The growth of a plan with its hosts: one instance each, and no longer chain.

`make bench ONLY=program-300` has the times.
"""

from __future__ import annotations

import pytest
from stackmocks import Program


def test_premium_1_has_31_hosts_side_by_side(program: Program) -> None:
    stack = program("gcp", scaleTier="PREMIUM_1")
    assert len(stack.of("Instance")) == 31
    assert stack.chain == 5


@pytest.mark.parametrize("hosts", [8, 75, 300])
def test_a_plan_of_any_size_has_an_instance_a_host(program: Program, hosts: int) -> None:
    config = {"scaleTier": "CUSTOM", "masterType": "n1-highcpu-8", "workerType": "n1-highcpu-8"}
    stack = program("gcp", **config, workerCount=str(hosts - 1))
    assert len(stack.of("Instance")) == hosts
