"""The cost of logs: merging many lines, following a loud job, and the last lines of a large log."""

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
from functools import cache
from pathlib import Path

from benchmarks.measure import high_water, running
from benchmarks.registry import Figure, benchmark, in_turn
from benchmarks.stack import ROOT, BenchStack, say
from infra.scale_tiers import ScaleTier
from jobs.chunks import CHUNK_BYTES, Chunk, ChunkFolder, LogFilter, last_entries
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
    """Add and take lines one by one."""
    return in_turn(5, lambda: _merged(_MANY), lambda: _merged(_FEW))


def _merged(waiting: int) -> float:
    """Return µs per line while `waiting` others wait."""
    names = [f"worker-{n}" for n in range(_LOGS)]
    lines = follow.Merge(names, window=0.0)
    total = waiting + _TAKEN
    added = [(0, LogLine(f"{n:012}", "INFO", names[n % _LOGS], "x")) for n in range(total)]
    for place, name in enumerate(names):
        lines.put(name, added[place:waiting:_LOGS])
    batch, follow._BATCH_LINES = follow._BATCH_LINES, 1
    try:
        began = time.perf_counter()
        for n in range(waiting, total):
            lines.put(names[n % _LOGS], added[n : n + 1])
            lines.take(0)
        return (time.perf_counter() - began) / _TAKEN * 1e6
    finally:
        follow._BATCH_LINES = batch


@dataclass(frozen=True)
class _Followed:
    """The result of following: lines, wrong (lost or repeated) ones, peak MB of `fab`, and the longest delay of a heartbeat."""

    lines: int
    wrong: int
    peak: float
    late: float


_NUMBER = re.compile(r" (\S+-\d+)  number (\d+) of so many")
_CUT = "for p in $(pgrep -f '^python3 -I -S -c '); do sudo -n kill -9 $(ps -o ppid= -p $p); done; true"
# Prints the longest time for which a running replica's record did not change, until its stdin ends.
_BEATS = """
import glob, json, select, sys, time
beats, longest = {}, 0.0
while not select.select([0], [], [], 0.05)[0]:
    for path in glob.glob(sys.argv[1]):
        try:
            record = json.load(open(path))
        except (OSError, ValueError):
            continue
        now = time.monotonic()
        beat, since = beats.get(path, (None, now))
        if record["state"] == "RUNNING":
            longest = max(longest, now - since)
        if beat != record["heartbeatSeq"]:
            beats[path] = record["heartbeatSeq"], now
print(longest)
"""


@cache
def _followed(stack: BenchStack) -> _Followed:
    """Follow one job of 8 replicas once for all rows; every connection is killed on its host every _CUT_SECONDS."""
    names = stack.require(ScaleTier.STANDARD_1).replicas
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
    """Return the numbers of the shown lines by replica, and the peak MB of the process."""
    numbers: dict[str, list[int]] = defaultdict(list)
    peak = 0.0
    assert fab.stdout is not None
    for count, line in enumerate(fab.stdout):
        if match := _NUMBER.search(line.decode()):
            numbers[match[1]].append(int(match[2]))
        if count % 10_000 == 0:
            peak = max(peak, high_water(Path(f"/proc/{fab.pid}/status").read_text()))
    return numbers, peak


_LOUD = f"8 replicas that print 10,000 lines/s each for {_SECONDS} s, every connection killed each {_CUT_SECONDS} s"


@benchmark(
    "logs-follow", what=f"lines lost or shown twice by `fab logs --follow` of {_LOUD}", against=None, bar=0, unit="lines"
)
def logs_follow(stack: BenchStack) -> Figure:
    """Count the numbers of the lines, in any order."""
    return Figure(_followed(stack).wrong)


@benchmark("logs-memory", what=f"MB of `fab logs --follow` at its peak, of {_LOUD}", against=None, bar=150, aim=80, unit="MB")
def logs_memory(stack: BenchStack) -> Figure:
    """Measure the same run as logs-follow."""
    return Figure(_followed(stack).peak)


@benchmark("logs-heartbeat", what=f"seconds by which the latest heartbeat was late, of {_LOUD}", against=None, bar=5, aim=1)
def logs_heartbeat(stack: BenchStack) -> Figure:
    """Read the bucket's records on a host."""
    return Figure(_followed(stack).late)


class _Counting(ChunkFolder):
    """Chunks in a directory that count the bytes read."""

    bytes_read = 0

    def read(self, name: str, start: int, end: int) -> bytes:
        content = super().read(name, start, end)
        self.bytes_read += len(content)
        return content


@benchmark(
    "logs-bytes",
    what="bytes of a log of 5 GB that are read for its last 100 lines, of some 150 bytes each",
    against="tail -n 100 of the same in one file, all bytes that it reads",
    bar=24,
    aim=2.4,
    tier=None,
    unit="bytes",
)
def logs_bytes(_: BenchStack) -> Figure:
    """Read a log whose beginning is a hole in the file: it must not be read."""
    line = LogLine(
        "2026-01-31T12:00:00.000Z", "INFO", "master-0", "Train [master/0], step 348: loss: 0.729 (1.037 sec)"
    ).to_json()
    content = f"{line}\n".encode() * (CHUNK_BYTES // (len(line) + 1))
    with tempfile.TemporaryDirectory(prefix="st") as name:
        folder, whole = Path(name) / "job01", Path(name) / "whole"
        folder.mkdir()
        for at in range(0, _HUGE, CHUNK_BYTES):
            _truncate(folder / Chunk(1, at, at // len(line), 0).name, CHUNK_BYTES)
        last = Chunk(1, -(-_HUGE // CHUNK_BYTES) * CHUNK_BYTES, _HUGE // len(line), 0)
        (folder / last.name).write_bytes(content)
        _truncate(whole, _HUGE)
        with whole.open("ab") as file:
            file.write(content)
        source = _Counting(folder)
        assert len(last_entries(source, LogFilter(100))[0]) == 100
        before = _read_by_children()
        subprocess.run(["tail", "-n", "100", str(whole)], check=True, stdout=subprocess.DEVNULL)
        peer = _read_by_children() - before
    say(f"{source.bytes_read} bytes, and the names of {len(source.sizes())} chunks; tail reads {peer} bytes, itself too")
    return Figure(source.bytes_read, peer)


def _truncate(path: Path, size: int) -> None:
    path.touch()
    os.truncate(path, size)


def _read_by_children() -> int:
    """Return the bytes that this process and its ended children have read."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])
