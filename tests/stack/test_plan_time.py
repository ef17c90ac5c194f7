"""How long a plan takes: no more than 5 s for PREMIUM_1, and in proportion to the number of hosts."""

from __future__ import annotations

import time

from stackmocks import Program


def _seconds(program: Program, workers: int) -> tuple[int, float]:
    config = {"scaleTier": "CUSTOM", "masterType": "n1-highcpu-8", "workerType": "n1-highcpu-8", "workerCount": str(workers)}
    # CPU time of this process: a busy machine is no slow program.
    start = time.process_time()
    stack = program("gcp", **config)
    return len(stack.of("Instance")), time.process_time() - start


def test_premium_1_is_planned_in_five_seconds(program: Program) -> None:
    program("gcp", scaleTier="BASIC")
    start = time.process_time()
    stack = program("gcp", scaleTier="PREMIUM_1")
    seconds = time.process_time() - start
    print(f"PREMIUM_1: 31 hosts, {len(stack.resources)} resources, {seconds:.2f} s, chain of {stack.chain}")
    assert len(stack.of("Instance")) == 31
    assert stack.chain == 5
    assert seconds <= 5


def test_plan_time_grows_in_proportion_to_the_hosts(program: Program) -> None:
    _seconds(program, 1)
    points = [_seconds(program, hosts - 1) for hosts in (8, 75, 300)]
    print("; ".join(f"{hosts} hosts: {seconds:.2f} s" for hosts, seconds in points))
    (few, fast), (_, _), (many, slow) = points
    assert (few, many) == (8, 300)
    # 37 times the hosts; a plan whose time grew with their square would take 1400 times as long.
    assert slow / fast <= 1.5 * many / few
