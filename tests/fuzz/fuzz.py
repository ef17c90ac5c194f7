"""`make fuzz`, or `python tests/fuzz/fuzz.py --seconds N`: nearly valid text into every parser of untrusted text.

Each parser has a process of its own, in which atheris generates the cases, and the same share of the time. It prints their
number. A case that ends in an error that its parser does not declare is kept below --found, and the exit code is 1. `--only
NAME` selects one parser, with `--replay FILE` for that case. Source: libFuzzer's documentation, for flags and the counts.
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


def fuzz_parser(name: str, seconds: float, found: Path) -> tuple[int, str]:
    """Fuzz a parser; return the number of its cases, and the output of a failure, "" for none."""
    with tempfile.TemporaryDirectory() as corpus:
        flags = {"inside": name, "corpus": corpus, "found": found, "seconds": seconds}
        command = [sys.executable, __file__, *(f"--{flag}={value}" for flag, value in flags.items())]
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    output = result.stdout + result.stderr
    counts = [int(first or second) for first, second in _DONE.findall(output)]
    return max(counts, default=0), "" if result.returncode == 0 else output


def inside(name: str, corpus: Path, found: Path, seconds: float, replay: str | None) -> None:
    """Fuzz one parser in this process; never return."""
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
    prefix = f"-artifact_prefix={found}/{re.sub('[^a-z0-9]+', '-', name.lower())}-"
    atheris.Setup(
        [sys.argv[0], f"-max_len={_LONGEST}", f"-timeout={limit(20):.0f}", "-rss_limit_mb=4096", prefix, *cases], case
    )
    atheris.Fuzz()


def _traceback(output: str) -> str:
    """Return the traceback and the place of the case in the output of a process."""
    start = output.find(" === Uncaught Python exception: ===")
    return output[max(start, 0) :][:4000]


def main() -> int:
    """Run the command and return its exit code."""
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
        for name, (count, output) in zip(
            names, pool.map(lambda name: fuzz_parser(name, share, options.found), names), strict=True
        ):
            print(f"{count:>10,}  {name}{': FAILED' if output else ''}", flush=True)
            total += count
            if output:
                wrong += 1
                print(_traceback(output), flush=True)
    print(f"{total:>10,}  cases, {wrong} parsers with a case that they do not refuse properly")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
