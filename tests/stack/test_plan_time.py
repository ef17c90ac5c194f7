"""How a plan grows with its hosts: one instance each, and no longer a chain. `pytest -s` shows how long it takes."""

from __future__ import annotations

import time

from stackmocks import Program


def _seconds(program: Program, workers: int) -> tuple[int, float]:
    config = {"scaleTier": "CUSTOM", "masterType": "n1-highcpu-8", "workerType": "n1-highcpu-8", "workerCount": str(workers)}
    # CPU time of this process: a busy machine is no slow program.
    start = time.process_time()
    stack = program("gcp", **config)
    return len(stack.of("Instance")), time.process_time() - start


def test_premium_1_has_31_hosts_side_by_side(program: Program) -> None:
    program("gcp", scaleTier="BASIC")
    start = time.process_time()
    stack = program("gcp", scaleTier="PREMIUM_1")
    seconds = time.process_time() - start
    print(f"PREMIUM_1: 31 hosts, {len(stack.resources)} resources, {seconds:.2f} s, chain of {stack.chain}")
    assert len(stack.of("Instance")) == 31
    assert stack.chain == 5


def test_a_plan_of_any_size_has_an_instance_a_host(program: Program) -> None:
    _seconds(program, 1)
    points = [_seconds(program, hosts - 1) for hosts in (8, 75, 300)]
    print("; ".join(f"{hosts} hosts: {seconds:.2f} s" for hosts, seconds in points))
    assert [hosts for hosts, _ in points] == [8, 75, 300]
