"""Run the tests, phase after phase: `python tests/run.py test`, or `all` with `--shard NAME` for some of its shards.

A phase is lint or one call of pytest, whose output is live. The run ends with a summary, whichever way it ends.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn
from xml.etree import ElementTree

from shards import SHARDS, STACKS, Shard
from waiting import scale

from scaletier.tensorflow_setup import available_cpus, available_memory

ROOT = Path(__file__).resolve().parents[1]
BIN = ROOT / ".venv" / "bin"
CACHE = ROOT / ".cache" / "tests"
MARKS = CACHE / "stacks"
"""A folder with one file for each stack that tests created and have not removed."""
QUICK = Shard(
    paths=("tests/unit", "tests/stack", "tests/contract", "tests/simulation", "tests/processes"),
    options=("-m", "not full"),
    parallel=True,
)
STORY = SHARDS["story"]
_LEAST_GIB, _LEAST_TEMPORARY_GIB = 4, 1
_SLOWEST = 10
_NO_TESTS = 5
"""Pytest's exit code if it finds no test."""


@dataclass
class Outcome:
    """Hold how a phase ended.

    Attributes:
        seconds: of each test that ran, by its name.
        failed: the names of those that failed.
        skipped: the reason for each test that was skipped.
    """

    name: str
    code: int = 0
    minutes: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    skipped: dict[str, str] = field(default_factory=dict)

    def read(self, report: Path) -> None:
        """Read pytest's report of this phase, which is missing if pytest was killed."""
        with contextlib.suppress(OSError, ElementTree.ParseError):
            for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314  written by our own pytest
                name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
                if (skip := case.find("skipped")) is not None:
                    self.skipped[name] = skip.get("message") or "no reason"
                else:
                    self.seconds[name] = float(case.get("time", 0))
                    self.failed |= {name} if any(case.find(kind) is not None for kind in ("failure", "error")) else set()

    def split(self, shards: Mapping[str, Shard]) -> list[Outcome]:
        """Return the outcome of each shard of this phase; the first includes the time outside tests."""
        parts = []
        for name, shard in shards.items():
            seconds = {test: duration for test, duration in self.seconds.items() if test.startswith(shard.paths)}
            skipped = {test: reason for test, reason in self.skipped.items() if test.startswith(shard.paths)}
            parts.append(Outcome(name, 0, sum(seconds.values()) / 60, seconds, self.failed & seconds.keys(), skipped))
        # The first has also what belongs to no test, such as a file that cannot be imported.
        parts[0].failed |= self.failed.difference(*(part.failed for part in parts))
        for part in parts:
            part.code = self.code if part.failed or not self.failed else 0
        parts[0].minutes += self.minutes - sum(part.minutes for part in parts)
        return parts


def cores() -> int:
    """Return how many processes of tests run side by side: one a core that this process may use, if each has 2 GiB."""
    return max(1, min(available_cpus(), available_memory() // 2**31))


class _Linter(subprocess.Popen[bytes]):
    """A process that has nothing to clean up: any signal kills it, and all that it has started."""

    def send_signal(self, sig: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.poll() is None:
                os.killpg(self.pid, signal.SIGKILL)


class Run:
    """Run phases until all have run or a signal ends it."""

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self.outcomes: list[Outcome] = []
        self.signal = 0
        self._children: list[subprocess.Popen[bytes]] = []
        self._changing = threading.Lock()  # of the children and of the file that lists them

    def interrupt(self, number: int, _: FrameType | None) -> None:
        """End the run: pytest is interrupted, so that its fixtures clean up, and no further phase begins."""
        if self.signal:
            return
        self.signal = number
        for child in list(self._children):
            child.send_signal(signal.SIGINT)
        with contextlib.suppress(RuntimeError):  # it comes while a line is printed, as to a full pipe
            say(f"\n{signal.Signals(number).name}: cleaning up")

    def phase(
        self,
        name: str,
        *commands: Sequence[str],
        environment: Mapping[str, str] | None = None,
        log: IO[bytes] | None = None,
        start: type[subprocess.Popen[bytes]] = subprocess.Popen,
    ) -> Outcome:
        """Run the commands of a phase, all of them even if one fails.

        Args:
            name: names its report.
            commands: of programs in the virtual environment.
            environment: further variables.
            log: what they print goes there, if given.
            start: their class, which decides how a signal ends them.
        """
        outcome = Outcome(name)
        report = CACHE / f"{name}.xml"
        report.unlink(missing_ok=True)
        began = time.monotonic()
        for command in commands:
            if self.signal:
                break
            say(f"\n== {name}: {' '.join(command)}{f' >{log.name}' if log else ''}")
            # In its own session: Ctrl-C reaches pytest from here, once, and no process that its tests have started.
            child = start(
                [str(BIN / command[0]), *command[1:]],
                cwd=ROOT,
                env={**os.environ, **(environment or {})},
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=(self._lock.descriptor,),
            )
            with self._changing:
                self._children.append(child)
                self._lock.write(each.pid for each in self._children)
            if self.signal:
                child.send_signal(signal.SIGINT)
            outcome.code = child.wait() or outcome.code
            with self._changing:
                self._children.remove(child)
        outcome.minutes = (time.monotonic() - began) / 60
        outcome.read(report)
        return outcome

    def shards(self, shards: Mapping[str, Shard], log: IO[bytes] | None = None) -> None:
        """Run shards by one call of pytest, in which they share their cluster; on all cores if they are `parallel`."""
        first = next(iter(shards.values()))
        options = ["-n", str(cores()), "--dist", "worksteal"] if first.parallel else ["--durations=5", "--durations-min=10"]
        name, paths = " ".join(shards), [path for shard in shards.values() for path in shard.paths]
        command = ["pytest", *options, f"--junitxml={CACHE / f'{name}.xml'}", *first.options, *paths]
        environment = {**first.environment, **({"CLUSTER": first.cluster} if first.cluster else {})}
        self.outcomes += self.phase(name, command, environment=environment, log=log).split(shards)

    def clusters(self, clusters: Mapping[str, Mapping[str, Shard]]) -> None:
        """Run the shards of each cluster side by side with those of the others, as hosts use little processor time.

        The output of the first cluster's tests is shown live, that of the others at their end.
        """
        (_, first), *others = clusters.items()
        with contextlib.ExitStack() as logs, ThreadPoolExecutor(max(len(others), 1)) as pool:
            files = [logs.enter_context((CACHE / f"{cluster}.log").open("w+b")) for cluster, _ in others]
            running = [pool.submit(self.shards, shards, file) for (_, shards), file in zip(others, files, strict=True)]
            self.shards(first)
            for future, file in zip(running, files, strict=True):
                future.result()
                file.seek(0)
                say(file.read().decode(errors="replace"))

    def lint(self) -> None:
        """Run ruff and mypy."""
        commands = (["ruff", "format", "--check", "."], ["ruff", "check", "."], ["mypy"], ["python", "tests/names.py"])
        self.outcomes.append(self.phase("lint", *commands, start=_Linter))

    @property
    def failed(self) -> list[str]:
        return [outcome.name for outcome in self.outcomes if outcome.code]

    @property
    def tests(self) -> int:
        return sum(len(outcome.seconds) for outcome in self.outcomes)


def count_all(run: Run) -> tuple[int, list[str]]:
    """Count the tests that `make test-all` runs: pytest collects them, like shards together, until a signal ends the run.

    Returns:
        their number, and what pytest printed for the shards that it cannot collect.
    """
    groups: dict[str, list[str]] = {}
    for name, shard in SHARDS.items():
        groups.setdefault(repr((shard.cluster, shard.parallel, shard.options, shard.environment)), []).append(name)
    count, errors = 0, []
    for names in groups.values():
        if run.signal:
            break
        shards = [SHARDS[name] for name in names]
        command = [
            str(BIN / "pytest"),
            "--collect-only",
            "-qq",
            *shards[0].options,
            *(path for each in shards for path in each.paths),
        ]
        environment = os.environ | shards[0].environment
        result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        count += sum(int(number) for number in re.findall(r"^tests/\S+: (\d+)$", result.stdout, re.MULTILINE))
        if result.returncode not in (0, _NO_TESTS) and not run.signal:
            errors.append(f"the tests of {', '.join(names)} cannot be collected:\n{result.stdout}{result.stderr}")
    return count, errors


def table(run: Run) -> Iterator[str]:
    """Yield the lines of the summary: each phase, the slowest tests, and the reasons for what was skipped."""
    yield f"{'shard':<12} {'tests':>6} {'failed':>6} {'skipped':>7} {'minutes':>7}"
    for each in run.outcomes:
        yield f"{each.name:<12} {len(each.seconds):>6} {len(each.failed):>6} {len(each.skipped):>7} {each.minutes:>7.1f}"
    seconds = {name: duration for each in run.outcomes for name, duration in each.seconds.items()}
    yield f"\nslowest {_SLOWEST}"
    for name in sorted(seconds, key=lambda name: -seconds[name])[:_SLOWEST]:
        yield f"{seconds[name]:>7.1f} s {name}"
    skipped = {name: reason for each in run.outcomes for name, reason in each.skipped.items()}
    if skipped:
        yield "\nskipped"
        yield from (f"  {name}: {reason}" for name, reason in skipped.items())


def say(text: str) -> None:
    """Print text, or nothing more once the output is closed: Ctrl-C in `make test | tee log` ends tee too."""
    try:
        print(text, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def refuse(reason: str) -> NoReturn:
    """Exit with 2 and one line."""
    print(f"error: {reason}", file=sys.stderr)
    sys.exit(2)


class Lock:
    """Hold the lock of this checkout's test runs; exit with 2, naming the other run, if there is one.

    Child processes share it: if this run is killed, the lock is free once they have ended too.
    """

    def __init__(self, what: str) -> None:
        self._what, self._since, self._holder = what, time.strftime("%H:%M:%S"), CACHE / "holder.json"
        try:
            CACHE.mkdir(parents=True, exist_ok=True)
            self._file = (CACHE / "lock").open("a")
        except PermissionError:
            refuse(f"{CACHE} belongs to another user, perhaps by `sudo make test`. Run: sudo chown -R $(id -u) {CACHE}")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            text = self._holder.read_text() if self._holder.exists() else ""
            refuse(f"another test run of this checkout is active: {describe_holder(text)}")
        self.write()

    @property
    def descriptor(self) -> int:
        return self._file.fileno()

    def write(self, children: Iterable[int] = ()) -> None:
        """Replace the file that names its holders: this process and its current children. A full disk ends no run."""
        new = self._holder.with_suffix(".new")
        with contextlib.suppress(OSError):
            new.write_text(json.dumps({"what": self._what, "since": self._since, "processes": [os.getpid(), *children]}))
            new.replace(self._holder)


def describe_holder(text: str) -> str:
    """Describe the run that holds the lock, and how to end it: its first living process, as the run may have been killed."""
    try:
        holder = json.loads(text)
        alive = [process for process in holder["processes"] if process and Path(f"/proc/{process}").exists()]
    except (ValueError, KeyError):
        alive = []
    if not alive:  # the text is of an earlier run
        return "it starts just now. Wait for it"
    return f"{holder['what']}, since {holder['since']}. Wait for it, or end it by `kill -INT {alive[0]}`"


_LOOP = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): pass"


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Keep this many processes busy while in the context, and no longer than this process lives."""
    command = [sys.executable, "-c", _LOOP, str(os.getpid())]
    loops = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
    try:
        yield loops
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def check_disk() -> None:
    """Exit with 2 if a disk has too little space, or the temporary folder a space in its path: many tests would fail."""
    if " " in tempfile.gettempdir():
        refuse(f"TMPDIR is invalid: {tempfile.gettempdir()} has a space, which the scripts of tests do not quote. Set another")
    for folder, least in ((ROOT, _LEAST_GIB), (Path(tempfile.gettempdir()), _LEAST_TEMPORARY_GIB)):
        free = shutil.disk_usage(folder).free / 2**30
        if free < least:
            refuse(f"{free:.1f} GiB of disk are free in {folder}, and the tests need {least}: make room first")


def check_stacks(names: Iterable[str]) -> None:
    """Exit with 2 if a stack of one of these names exists that no test created, so that tests would refuse, minutes later."""
    listed = subprocess.run(
        [str(BIN / "pulumi"), "stack", "ls", "--json"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    existing = {stack["name"] for stack in json.loads(listed.stdout)} if listed.returncode == 0 else set[str]()
    for name in sorted(existing.intersection(names)):
        if not (MARKS / name).exists():
            refuse(
                f"stack {name} exists, and tests create one of that name: `pulumi stack rename --stack {name} OTHER` keeps "
                f"yours; `pulumi destroy --stack {name}` and `pulumi stack rm {name}` remove it"
            )


def remove_leftovers(run: Run, names: Container[str]) -> None:
    """Remove what killed runs left of the stacks of these names; others may be in use, by a call of pytest."""
    left = sorted(name for stacks in STACKS.values() for name in stacks if (MARKS / name).exists())
    for name in left:
        removed = "removed first" if name in names else f"remove it by `.venv/bin/python tests/leftovers.py {name}`"
        say(f"stack {name} is left by a killed test run: {removed}")
    if mine := [name for name in left if name in names]:
        run.outcomes.append(run.phase("leftovers", ["python", "tests/leftovers.py", *mine]))


def set_up(shards: Sequence[Shard]) -> None:
    """Make what the shards need beyond `make test`'s own set-up; exit with 2 if that fails or is impossible."""
    if os.geteuid() != 0 and any("root" in shard.needs for shard in shards):
        names = [name for name, shard in SHARDS.items() if "root" not in shard.needs]
        refuse(f"the emulated Google needs root. Without: make test-all SHARD='{' '.join(names)}'")
    targets = {"browser": "browser", "go": "gcs"}
    for need in sorted({targets[need] for shard in shards for need in shard.needs if need in targets}):
        if code := subprocess.run(["make", "--no-print-directory", need], cwd=ROOT, check=False).returncode:
            sys.exit(code)


def test(run: Run) -> int:
    """Run what `make test` runs, and return how many tests there are in all."""
    run.lint()
    run.shards({"here": QUICK})
    if run.signal:
        return 0
    with ThreadPoolExecutor(1) as pool:
        test_count = pool.submit(count_all, run)  # the story waits for hosts most of the time
        run.shards({"story": STORY})
        count, errors = test_count.result()
    if errors:
        say("\n" + "\n".join(errors))
        run.outcomes.append(Outcome("count", 1))
    return count


def test_all(run: Run, names: Sequence[str]) -> int:
    """Run shards with their needs made first, those of clusters last, and return 0."""
    shards = {name: SHARDS[name] for name in names}
    set_up([*shards.values()])
    if names == [*SHARDS]:
        run.lint()
    clusters: dict[str, dict[str, Shard]] = {}
    for name, shard in shards.items():
        if shard.cluster:
            clusters.setdefault(shard.cluster, {})[name] = shard
        elif not run.signal:
            run.shards({name: shard})
    if clusters and not run.signal:
        run.clusters(clusters)
    return 0


def named(name: str) -> list[str]:
    """Return the shard of this name, or those whose names begin with it, as `gcp` is three; exit with 2 if none does."""
    names = [name] if name in SHARDS else [each for each in SHARDS if each.startswith(f"{name}-")]
    return names or refuse(f"--shard {name!r} is no shard. Valid: {', '.join(SHARDS)}")


def main() -> int:
    """Run as the command line says; the exit code is 0 if all passed, 1 if not, 130 or 143 after a signal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["test", "all"])
    parser.add_argument("--shard", action="append", default=[], help="one shard of all; may be repeated")
    parser.add_argument("--load", type=int, default=0, help="busy loops a core beside the tests")
    options = parser.parse_args()
    names = [name for shard in options.shard for name in named(shard)]
    check_disk()
    chosen = (names or [*SHARDS]) if options.what == "all" else ["story"]
    run = Run(Lock(f"make {'test' if options.what == 'test' else 'test-all'}"))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as set by nohup
            signal.signal(number, run.interrupt)  # handled even if the parent shell ignores it
    stacks = {stack for name in chosen for stack in STACKS.get(SHARDS[name].cluster, ())}
    check_stacks(stacks)
    with busy_loops(options.load * available_cpus()):
        start = time.monotonic()
        say(f"{cores()} cores, load {os.getloadavg()[0]:.1f}, calibration {scale():.2f}")
        remove_leftovers(run, stacks)
        everything = test(run) if options.what == "test" else test_all(run, chosen)
    say(summary(run, everything, (time.monotonic() - start) / 60))
    return 128 + run.signal if run.signal else 1 if run.failed else 0


def summary(run: Run, everything: int, minutes: float) -> str:
    """Return the table of phases, and a line that says how many tests ran of how many."""
    if run.signal:
        result = f"ended by {signal.Signals(run.signal).name}"
    else:
        result = f"failed: {', '.join(run.failed)}" if run.failed else "all passed"
    of, more = "", ""
    if everything > run.tests:
        of, more = f" of {everything:,}", f"; `make test-all` runs the other {everything - run.tests:,} too"
    lines = "\n".join(table(run))
    return f"\n{lines}\n\n{run.tests:,}{of} tests ran in {minutes:.1f} min, {result}{more}"


if __name__ == "__main__":
    sys.exit(main())
