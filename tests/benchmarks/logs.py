"""What logs cost: the merging of many lines, and the last lines of a log that is large."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import running
from benchmarks.registry import Figure, benchmark
from benchmarks.stack import ROOT, BenchStack, say
from infra.spec import ScaleTier
from jobs.chunks import LARGEST, Chunk, ChunkFolder, LogFilter, newest
from jobs.records import Plan
from ops.logs import follow
from ops.logs.lines import LogLine

_FEW, _MANY, _LOGS, _TAKEN = 10, 100_000, 8, 20_000
_HUGE = 5_000_000_000
_SECONDS, _CUT_SECONDS = 60, 10


@benchmark(
    "logs-merge",
    what=f"µs to put a line of {_LOGS} logs in its place while {_MANY:,} wait, median of 5",
    against=f"the same while {_FEW} wait",
    bar=2.0,
    aim=1.2,
    tier=None,
    unit="µs",
)
def logs_merge(_: BenchStack) -> Figure:
    """One line comes and one is taken, again and again."""
    pairs = [(_merged(_MANY), _merged(_FEW)) for _ in range(5)]
    many, few = zip(*pairs, strict=True)
    return Figure.of(many, few)


def _merged(waiting: int) -> float:
    """µs a line where so many wait all the time."""
    names = [f"worker-{n}" for n in range(_LOGS)]
    lines: follow.Merge[LogLine, None] = follow.Merge(names, window=0.0)
    total = waiting + _TAKEN
    made = [(0, LogLine(f"{n:012}", "INFO", names[n % _LOGS], "x")) for n in range(total)]
    for place, name in enumerate(names):
        lines.put(name, made[place:waiting:_LOGS])
    batch, follow._BATCH_LINES = follow._BATCH_LINES, 1
    try:
        began = time.perf_counter()
        for n in range(waiting, total):
            lines.put(names[n % _LOGS], made[n : n + 1])
            lines.take(0)
        return (time.perf_counter() - began) / _TAKEN * 1e6
    finally:
        follow._BATCH_LINES = batch


@dataclass(frozen=True)
class _Followed:
    """What came of following: lines, those of them that were lost or came twice, MB of `fab` at its peak, and by how many
    seconds the latest heartbeat was late."""

    lines: int
    wrong: int
    peak: float
    late: float


_RUNS: dict[int, _Followed] = {}
_NUMBER = re.compile(r" (\S+-\d+)  number (\d+) of so many")
_CUT = "for p in $(pgrep -f '^python3 -I -S -c '); do sudo -n kill -9 $(ps -o ppid= -p $p); done; true"
# Until its stdin ends: how long the record of each replica stayed as it was, at most, once the job runs.
_BEATS = """
import glob, json, select, sys, time
seen, worst = {}, 0.0
while not select.select([0], [], [], 0.05)[0]:
    for path in glob.glob(sys.argv[1]):
        try:
            told = json.load(open(path))
        except (OSError, ValueError):
            continue
        now = time.monotonic()
        beat, since = seen.get(path, (None, now))
        if told["state"] == "RUNNING":
            worst = max(worst, now - since)
        if beat != told["beat"]:
            seen[path] = told["beat"], now
print(worst)
"""


def _followed(stack: BenchStack) -> _Followed:
    """One job of 8 replicas, of each of which every connection is killed on its host every _CUT_SECONDS; followed once for all
    rows."""
    if id(stack) not in _RUNS:
        stack.require(ScaleTier.STANDARD_1)
        _RUNS[id(stack)] = _follow(stack)
    return _RUNS[id(stack)]


def _follow(stack: BenchStack) -> _Followed:
    names = stack.inventory.replicas
    over = threading.Event()

    def cut() -> None:
        while not over.wait(_CUT_SECONDS):
            for name in names:
                subprocess.run(stack.ssh(name, _CUT), env=stack.env, check=False, capture_output=True)

    with stack.tiny_job("follow", f"--seconds {_SECONDS} --rate 100 --burst 100") as job:
        folder = f"{stack.inventory.bucket}/jobs/{job}/replicas/*.json"
        watch = stack.ssh(names[-1], shlex.join(["python3", "-c", _BEATS, folder]))
        follow = ["fab", "logs", "all", "--job", job, "--follow", "--plain", "--lines", "all"]
        with (
            subprocess.Popen(watch, env=stack.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as beats,
            running(follow, stack.env, ROOT, subprocess.DEVNULL) as fab,
        ):
            threading.Thread(target=cut, daemon=True).start()
            shown, peak = _numbers(fab)
            over.set()
            late = float(beats.communicate(b"x", timeout=60)[0]) - Plan.heartbeatSeconds
        read = ["fab", "logs", "all", "--job", job, "--lines", "all"]
        with running(read, stack.env, ROOT, subprocess.DEVNULL) as fab:
            there, _ = _numbers(fab)
    wrong = sum(len(shown[name]) - len(set(shown[name])) + len(set(shown[name]) ^ set(there[name])) for name in names)
    lines = sum(map(len, there.values()))
    say(f"{lines} lines, {wrong} lost or twice, {peak:.0f} MB, the latest heartbeat {late:.1f} s late")
    return _Followed(lines, wrong, peak, max(late, 0.0))


def _numbers(fab: subprocess.Popen[bytes]) -> tuple[dict[str, list[int]], float]:
    """By replica the numbers of the lines that it shows, and MB that it had at most."""
    numbers: dict[str, list[int]] = defaultdict(list)
    peak = 0.0
    assert fab.stdout is not None
    for count, line in enumerate(fab.stdout):
        if found := _NUMBER.search(line.decode()):
            numbers[found[1]].append(int(found[2]))
        if count % 10_000 == 0:
            peak = max(peak, _peak(fab.pid))
    return numbers, peak


def _peak(pid: int) -> float:
    """MB that a process had at most so far."""
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 / 1e6 if found else 0.0


_LOUD = f"8 replicas that print 10,000 lines/s each for {_SECONDS} s, every connection killed each {_CUT_SECONDS} s"


@benchmark(
    "logs-follow", what=f"lines lost or shown twice by `fab logs --follow` of {_LOUD}", against=None, bar=0, unit="lines"
)
def logs_follow(stack: BenchStack) -> Figure:
    """Each line has a number: what is there is counted, whatever the order."""
    return Figure(_followed(stack).wrong)


@benchmark("logs-memory", what=f"MB of `fab logs --follow` at its peak, of {_LOUD}", against=None, bar=150, aim=80, unit="MB")
def logs_memory(stack: BenchStack) -> Figure:
    """As logs-follow."""
    return Figure(_followed(stack).peak)


@benchmark("logs-heartbeat", what=f"seconds by which the latest heartbeat was late, of {_LOUD}", against=None, bar=5, aim=1)
def logs_heartbeat(stack: BenchStack) -> Figure:
    """As the bucket had them, seen from a host."""
    return Figure(_followed(stack).late)


class _Counting(ChunkFolder):
    """Chunks in a directory; `bytes_read` of them."""

    bytes_read = 0

    def read(self, name: str, start: int, end: int) -> bytes:
        found = super().read(name, start, end)
        self.bytes_read += len(found)
        return found


@benchmark(
    "logs-bytes",
    what="bytes of a log of 5 GB that are read for its last 100 lines, of some 150 bytes each",
    against="tail -n 100 of the same in one file, all that it reads",
    bar=24,
    aim=2.4,
    tier=None,
    unit="bytes",
)
def logs_bytes(_: BenchStack) -> Figure:
    """A log whose beginning is a hole in the file, as nobody is to read that."""
    line = LogLine(
        "2026-01-31T12:00:00.000Z", "INFO", "master-0", "Train [master/0], step 348: loss: 0.729 (1.037 sec)"
    ).to_json()
    content = f"{line}\n".encode() * (LARGEST // (len(line) + 1))
    with tempfile.TemporaryDirectory(prefix="st") as name:
        folder, whole = Path(name) / "job01", Path(name) / "whole"
        folder.mkdir()
        for at in range(0, _HUGE, LARGEST):
            os.truncate(_made(folder / Chunk(1, at, at // len(line), 0).name), LARGEST)
        last = Chunk(1, -(-_HUGE // LARGEST) * LARGEST, _HUGE // len(line), 0)
        (folder / last.name).write_bytes(content)
        os.truncate(_made(whole), _HUGE)
        with whole.open("ab") as file:
            file.write(content)
        source = _Counting(folder)
        found, _behind = newest(source, LogFilter(100))
        assert len(found) == 100
        before = _read_by_children()
        subprocess.run(["tail", "-n", "100", str(whole)], check=True, stdout=subprocess.DEVNULL)
        peer = _read_by_children() - before
    say(f"{source.bytes_read} bytes, and the names of {len(source.sizes())} chunks; tail reads {peer} bytes, itself too")
    return Figure(source.bytes_read, peer)


def _made(path: Path) -> Path:
    path.touch()
    return path


def _read_by_children() -> int:
    """Bytes that this process and those of its children that have ended have read."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])
