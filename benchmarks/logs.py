"""What logs cost: the merging of many lines, and the last lines of a log that is large."""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks.registry import Figure, benchmark
from benchmarks.stack import BenchStack, say
from jobs.chunks import LARGEST, Chunk, Folder, Wanted, newest
from ops.logs import merge
from ops.logs.lines import Line

_FEW, _MANY, _LOGS, _TAKEN = 10, 100_000, 8, 20_000
_HUGE = 5_000_000_000


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
    return Figure(*(statistics.median(pair[place] for pair in pairs) for place in (0, 1)))


def _merged(waiting: int) -> float:
    """µs a line where so many wait all the time."""
    names = [f"worker-{n}" for n in range(_LOGS)]
    lines: merge.Merge[Line, None] = merge.Merge(names, window=0.0)
    total = waiting + _TAKEN
    made = [(0, Line(f"{n:012}", "INFO", names[n % _LOGS], "x")) for n in range(total)]
    for place, name in enumerate(names):
        lines.put(name, made[place:waiting:_LOGS])
    at_once, merge._AT_ONCE = merge._AT_ONCE, 1
    try:
        began = time.perf_counter()
        for n in range(waiting, total):
            lines.put(names[n % _LOGS], made[n : n + 1])
            lines.take(0)
        return (time.perf_counter() - began) / _TAKEN * 1e6
    finally:
        merge._AT_ONCE = at_once


class _Counting(Folder):
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
    line = Line("2026-01-31T12:00:00.000Z", "INFO", "master-0", "Train [master/0], step 348: loss: 0.729 (1.037 sec)").to_json()
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
        found, _behind = newest(source, Wanted(100))
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
