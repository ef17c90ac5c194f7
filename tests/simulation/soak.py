"""`make soak`, or `python tests/simulation/soak.py --seconds N`: play schedules on all processors.

Prints how many were played and each seed that broke an invariant; exit code 1 if one did. `--replay SEED` plays one of them
again, and prints what happened.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[depth]) for depth in range(3)]

from cluster import play  # noqa: E402
from simulated import Violation  # noqa: E402

_BATCH = 200
_SHOWN = 10


def batch(first: int, count: int) -> tuple[int, list[str]]:
    """Play some schedules; return their number and the violations."""
    violations = []
    for seed in range(first, first + count):
        try:
            play(seed)
        except Violation as violation:
            violations.append(str(violation))
        except Exception as error:  # noqa: BLE001  a crash of the code under test counts too
            violations.append(f"seed {seed}: {type(error).__name__}: {error}")
    return count, violations


def replay(seed: int) -> int:
    """Play one schedule, and print what happened."""
    trace: list[str] = []
    try:
        play(seed, trace=trace)
    except Violation as violation:
        trace.append(str(violation))
        return 1
    finally:
        print("\n".join(trace))
    return 0


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--schedules", type=int, default=10**9)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--replay", type=int)
    options = parser.parse_args()
    if options.replay is not None:
        return replay(options.replay)
    deadline, schedules, violations, seed = time.monotonic() + options.seconds, 0, [], options.first
    with ProcessPoolExecutor(options.processes) as pool:
        last = options.first + options.schedules
        running = set()
        while seed < last or running:
            while seed < last and len(running) < 2 * options.processes and time.monotonic() < deadline:
                count = min(_BATCH, last - seed)
                running.add(pool.submit(batch, seed, count))
                seed += count
            if not running:
                break
            finished = next(as_completed(running))
            running.remove(finished)
            count, new_violations = finished.result()
            schedules += count
            for line in new_violations[: max(_SHOWN - len(violations), 0)]:
                print(line[:400], flush=True)
            violations += new_violations
    print(f"{schedules} schedules from seed {options.first}, {len(violations)} with a violation")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
