"""`make fuzz`, or `python tests/fuzz/fuzz.py --seconds N`: text that is nearly right into every parser of other people's text.

Each has a process of its own, in which atheris makes the cases, and the same share of the time. Prints how many there were; one
that ends in an error that its parser does not declare is kept below --found, and the exit code is 1. `--only NAME` takes one
parser, with `--replay FILE` it gets that case again. Source: libFuzzer's documentation, for flags and the line of counts.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[above]) for above in range(3)]

from waiting import limit  # noqa: E402

_DONE = re.compile(r"Done (\d+) runs|^#(\d+)", re.MULTILINE)
_LONGEST = 4096


def one(name: str, seconds: float, found: Path) -> tuple[int, str]:
    """Fuzz a parser; how many cases it had, and what it did wrong, "" for nothing."""
    with tempfile.TemporaryDirectory() as corpus:
        command = [
            sys.executable,
            __file__,
            "--inside",
            name,
            "--corpus",
            corpus,
            "--found",
            str(found),
            "--seconds",
            str(seconds),
        ]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    said = done.stdout + done.stderr
    counts = [int(first or second) for first, second in _DONE.findall(said)]
    return max(counts, default=0), "" if done.returncode == 0 else said


def inside(name: str, corpus: Path, found: Path, seconds: float, replay: str | None) -> None:
    """The process of one parser; it does not return."""
    import atheris

    with atheris.instrument_imports(include=["infra", "jobs", "ops", "hosts", "scaletier", "trainer"]):
        from parsers import PARSERS
    parser = PARSERS[name]
    for number, seed in enumerate(parser.seeds):
        (corpus / f"seed-{number}").write_bytes(seed)

    def case(data: bytes) -> None:
        with suppress(parser.refuses):
            parser.of(data)

    cases = [replay] if replay else [f"-max_total_time={seconds:.0f}", str(corpus)]
    kept = f"-artifact_prefix={found}/{re.sub('[^a-z0-9]+', '-', name.lower())}-"
    atheris.Setup([sys.argv[0], f"-max_len={_LONGEST}", f"-timeout={limit(20):.0f}", "-rss_limit_mb=4096", kept, *cases], case)
    atheris.Fuzz()


def _shown(said: str) -> str:
    """Of what a process said, its traceback and where the case is."""
    start = said.find(" === Uncaught Python exception: ===")
    return said[max(start, 0) :][:4000]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="for all of them together")
    parser.add_argument("--found", type=Path, default=Path(".cache", "fuzz"))
    parser.add_argument("--only")
    parser.add_argument("--replay")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--corpus", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.replay and not options.only:
        parser.error("--replay needs --only NAME")
    options.found.mkdir(parents=True, exist_ok=True)
    if options.inside or options.replay:
        with tempfile.TemporaryDirectory() as scratch:
            inside(
                options.inside or options.only, options.corpus or Path(scratch), options.found, options.seconds, options.replay
            )
    from parsers import PARSERS

    names = [options.only] if options.only else list(PARSERS)
    processes = len(os.sched_getaffinity(0))
    share = max(options.seconds * processes / len(names), 1.0)
    total = wrong = 0
    with ThreadPoolExecutor(processes) as pool:
        for name, (count, said) in zip(names, pool.map(lambda name: one(name, share, options.found), names), strict=True):
            print(f"{count:>10,}  {name}{'' if not said else ': FAILED'}", flush=True)
            total += count
            if said:
                wrong += 1
                print(_shown(said), flush=True)
    print(f"{total:>10,}  cases, {wrong} parsers with a case that they do not refuse properly")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
