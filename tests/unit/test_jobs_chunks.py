"""A log in chunks: no cut and no position loses or repeats a line, and gaps are reported."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import limit

from jobs import chunks
from jobs.chunks import (
    BEGINNING,
    Chunk,
    ChunkFolder,
    ChunkReader,
    LogEntry,
    LogFilter,
    Position,
    SlowError,
    chunks_of,
    chunks_to_remove,
    first_position,
    last_entries,
)

INCARNATION = 1769860800


def text(number: int, severity: str = "INFO", message: str = "x") -> bytes:
    """Return a line whose time is its number, in seconds."""
    time = f"2026-01-31T12:{number // 60:02}:{number % 60:02}.000Z"
    return json.dumps({"time": time, "severity": severity, "replica": "ps-0", "message": message}).encode()


class ChunksInMemory:
    """Chunks in memory; `bytes_read` counts the bytes that were read."""

    def __init__(self, lines: list[bytes], sizes: list[int], rest: bytes = b"") -> None:
        """Write lines in chunks of these sizes, followed by an incomplete line."""
        self.files: dict[str, bytes] = {}
        self.bytes_read = 0
        at = number = 0
        for size in sizes:
            content = b"".join(line + b"\n" for line in lines[number : number + size])
            self.files[Chunk(INCARNATION, at, number, 0).name] = content
            at, number = at + len(content), number + len(lines[number : number + size])
        if self.files:
            self.files[max(self.files)] += rest

    def sizes(self) -> Mapping[str, int]:
        return {name: len(content) for name, content in self.files.items()}

    def read(self, name: str, start: int, end: int) -> bytes:
        content = self.files.get(name, b"")[start:end]
        self.bytes_read += len(content)
        return content


def chunk_sizes(count: int) -> list[int]:
    return [count // 3, 0, count // 3, count - 2 * (count // 3)]


def lines_of(entries: list[LogEntry] | Iterator[LogEntry]) -> list[bytes]:
    return [entry.line for entry in entries]


logs = st.lists(st.binary(max_size=30).map(lambda line: line.replace(b"\n", b" ")), max_size=40)


@given(logs, st.integers(0, 50), st.integers(1, 9))
@settings(max_examples=60)
def test_the_newest_lines_and_later_ones_are_the_whole_log(log: list[bytes], count: int, step: int) -> None:
    source = ChunksInMemory(log, chunk_sizes(len(log)), b"half")
    chunks._FROM_THE_END, before = step, chunks._FROM_THE_END
    try:
        entries, position = last_entries(source, LogFilter(count))
    finally:
        chunks._FROM_THE_END = before
    assert lines_of(entries) == log[max(len(log) - count, 0) :]
    reader = ChunkReader(source, position)
    assert list(reader.entries()) == []
    source.files[max(source.files)] += b" done\n"
    assert lines_of(reader.entries()) == [b"half done"]
    assert list(reader.entries()) == []


@given(logs, st.integers(0, 40))
@settings(max_examples=60)
def test_a_position_yields_all_later_lines_once(log: list[bytes], at: int) -> None:
    source = ChunksInMemory(log, chunk_sizes(len(log)))
    every = list(ChunkReader(source).entries())
    assert lines_of(every) == log
    position = every[at].position if at < len(every) else BEGINNING
    assert lines_of(ChunkReader(source, position).entries()) == (log[at + 1 :] if at < len(every) else log)


@pytest.mark.parametrize("block", [1, 2, 7, 20])
def test_a_log_is_read_in_blocks(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "_BLOCK", block)
    monkeypatch.setattr(chunks, "_FROM_THE_END", block)
    log = [b"", b"one", b"longer than a block", b"x" * 20, b""]
    source = ChunksInMemory(log, [4, 1], b"half")
    assert lines_of(ChunkReader(source).entries()) == lines_of(last_entries(source, LogFilter(9))[0]) == log
    assert last_entries(source, LogFilter(1))[1] == list(ChunkReader(source).entries())[-1].position


def test_another_host_s_log_follows_the_earlier_one() -> None:
    source = ChunksInMemory([b"one", b"two"], [2])
    reader = ChunkReader(source)
    assert lines_of(reader.entries()) == [b"one", b"two"]
    source.files = {Chunk(INCARNATION + 9, 0, 0, 0).name: b"three\n"}  # its second chunk is missing in the bucket
    assert lines_of(reader.entries()) == [b"three"]


def test_a_late_chunk_of_an_earlier_host_is_not_followed() -> None:
    source = ChunksInMemory([b"two"], [1])
    reader = ChunkReader(source)
    assert lines_of(reader.entries()) == [b"two"]
    source.files[Chunk(INCARNATION - 9, 0, 0, 0).name] = b"one\n"
    assert list(reader.entries()) == []
    source.files[max(source.files)] += b"three\n"
    assert lines_of(reader.entries()) == [b"three"]
    assert lines_of(ChunkReader(source).entries()) == [b"one", b"two", b"three"]


sizes = st.lists(st.integers(1, 1000), max_size=30)


@given(sizes, st.integers(1, 8000))
def test_a_cut_keeps_the_beginning_and_the_newest_lines(chunk_lengths: list[int], limit: int) -> None:
    log = [Chunk(INCARNATION, 1000 * n, n, size) for n, size in enumerate(chunk_lengths)]
    removed = chunks_to_remove(log, limit)
    kept = [chunk for chunk in log if chunk not in removed]
    assert removed == log[log.index(removed[0]) : log.index(removed[-1]) + 1] if removed else True, (
        "the removed chunks are consecutive"
    )
    if sum(chunk_lengths) <= limit:
        assert not removed
    elif removed:
        assert sum(chunk.size for chunk in kept) <= limit or kept[-1] is log[-1]
        assert sum(chunk.size for chunk in log[: log.index(removed[0])]) <= limit / 8
        assert sum(chunk.size for chunk in kept) + removed[-1].size > limit, "no more is removed than necessary"
    assert log[-1:] == kept[-1:]


@pytest.mark.parametrize(
    ("lengths", "limit", "removed"),
    [
        ([1, 1, 1], 3, []),
        ([1, 1, 1], 2, [0]),
        ([1, 1, 1], 1, [0, 1]),
        ([2, 1, 1, 5, 5], 16, []),
        ([2, 1, 1, 6, 7], 16, [1]),
        ([2, 1, 1, 6, 8], 16, [1, 2]),
        ([3, 1, 1, 6, 7], 16, [0]),
        ([9], 1, []),
        ([1, 9], 1, [0]),
    ],
)
def test_the_chunks_that_are_cut(lengths: list[int], limit: int, removed: list[int]) -> None:
    log = [Chunk(INCARNATION, 100 * n, n, size) for n, size in enumerate(lengths)]
    assert [chunk.line for chunk in chunks_to_remove(log, limit)] == removed


def test_a_cut_is_reported_in_its_place() -> None:
    log = [text(n) for n in range(30)]
    source = ChunksInMemory(log, [5, 10, 10, 5])
    names = sorted(source.files)
    size = sum(len(source.files.pop(name)) for name in names[1:3])
    gap = {
        "time": "2026-01-31T12:00:25.000Z",
        "severity": "WARNING",
        "replica": "",
        "message": f"… 20 lines, {size} bytes cut …",
    }
    lines = lines_of(ChunkReader(source).entries())
    assert lines == [*log[:5], json.dumps(gap, ensure_ascii=False).encode(), *log[25:]]
    assert lines_of(last_entries(source, LogFilter(100))[0]) == lines
    assert lines_of(last_entries(source, LogFilter(5))[0]) == log[25:]
    assert [lines_of(last_entries(source, LogFilter(count))[0]) for count in (6, 7)] == [lines[-6:], lines[-7:]]
    time = json.loads(log[26])["time"]
    assert lines_of(last_entries(source, LogFilter(100, since=time))[0]) == log[26:], "the gap is earlier than that"
    source.files.pop(names[0])
    assert "25 lines" in json.loads(lines_of(ChunkReader(source).entries())[0])["message"]
    assert lines_of(last_entries(source, LogFilter(100))[0]) == lines_of(ChunkReader(source).entries())


def messages_of(entries: list[LogEntry] | Iterator[LogEntry]) -> list[str]:
    return [json.loads(entry.line)["message"] for entry in entries]


def test_a_reader_from_the_middle_counts_lines_from_the_next_chunk_on() -> None:
    log = [text(n, message=str(n)) for n in range(50)]
    source = ChunksInMemory(log, [10] * 5)
    position = list(ChunkReader(source).entries())[4].position
    names = sorted(source.files)
    sizes = [len(source.files.pop(names[number])) for number in (1, 3)]
    assert messages_of(ChunkReader(source, position).entries()) == [
        *"56789",
        f"… {sizes[0]} bytes cut …",
        *map(str, range(20, 30)),
        f"… 10 lines, {sizes[1]} bytes cut …",
        *map(str, range(40, 50)),
    ]


@pytest.mark.parametrize(("size", "shown"), [(49_999, "49999 bytes"), (60_000, "0.1 MB"), (1_250_001, "1.3 MB")])
def test_the_size_of_what_was_cut(size: int, shown: str) -> None:
    source = ChunksInMemory([], [])
    source.files = {Chunk(INCARNATION, size, 9, 0).name: text(1, message="last") + b"\n"}
    for entries in (ChunkReader(source).entries(), last_entries(source, LogFilter(5))[0]):
        assert messages_of(entries) == [f"… 9 lines, {shown} cut …", "last"]


def test_a_chunk_s_empty_first_line_counts() -> None:
    source = ChunksInMemory([b"", b"one"], [2])
    source.files[Chunk(INCARNATION, 20, 7, 0).name] = text(1, message="last") + b"\n"
    for entries in (list(ChunkReader(source).entries()), last_entries(source, LogFilter(9))[0]):
        assert lines_of(entries)[:2] == [b"", b"one"]
        assert messages_of(entries[2:]) == ["… 5 lines, 15 bytes cut …", "last"]


def test_a_new_incarnation_is_no_gap() -> None:
    source = ChunksInMemory([b"one"], [1])
    source.files[Chunk(INCARNATION + 1, 0, 0, 0).name] = b"two\n"
    assert lines_of(last_entries(source, LogFilter(9))[0]) == lines_of(ChunkReader(source).entries()) == [b"one", b"two"]


def test_an_empty_log() -> None:
    source = ChunksInMemory([], [])
    assert last_entries(source, LogFilter(5)) == ([], BEGINNING) == ([], (0, 0))
    assert (
        first_position(source, LogFilter(since="2026")) == first_position(ChunksInMemory([b"x"], [1]), LogFilter()) == BEGINNING
    )
    assert list(ChunkReader(source).entries()) == []


def test_a_reader_at_the_end_considers_only_the_last_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    source = ChunksInMemory([text(n) for n in range(30)], [10] * 3)
    reader = ChunkReader(source, last_entries(source, LogFilter(0))[1])
    considered = list[int]()
    monkeypatch.setattr(chunks, "chunks_of", lambda sizes: considered.append(len(sizes)) or chunks_of(sizes))
    assert [list(reader.entries()) for _ in range(2)] == [[], []]
    assert considered == [3, 1]


def test_a_reader_continues_after_a_concurrent_cut() -> None:
    log = [text(n) for n in range(30)]
    source = ChunksInMemory(log, [10, 10, 10])
    entries = ChunkReader(source).entries()
    before = [next(entries) for _ in range(5)]
    source.files.pop(sorted(source.files)[1])
    after = lines_of(entries)
    assert lines_of(before) + after[:5] == log[:10]
    assert after[6:] == log[20:]
    assert "10 lines" in json.loads(after[5])["message"]


@given(st.integers(0, 70), st.integers(0, 70), st.integers(1, 70) | st.none())
@settings(max_examples=60)
def test_lines_between_two_times(since: int, until: int, count: int | None) -> None:
    log = [text(n) for n in range(60)]
    source = ChunksInMemory(log, [6] * 10)
    log_filter = LogFilter(count, json.loads(text(since))["time"], json.loads(text(until))["time"])
    expected = log[since : until + 1]
    if count:
        entries, behind = last_entries(source, log_filter)
        assert lines_of(entries) == expected[-count:]
        assert behind == Position(INCARNATION, sum(len(line) + 1 for line in log)), "it is behind the whole log"
    else:
        assert lines_of(ChunkReader(source, first_position(source, log_filter), log_filter).entries()) == expected


@pytest.mark.parametrize("sizes", [[5, 5, 5, 5], [4, 3, 7, 6], [20], [6, 14]])
@pytest.mark.parametrize("until", [9, 13, 54, 59])
def test_lines_before_a_time_are_found_although_a_clock_was_set_back(sizes: list[int], until: int) -> None:
    log = [text(n) for n in (*range(50, 60), *range(10, 20))]
    source, log_filter = ChunksInMemory(log, sizes), LogFilter(until=json.loads(text(until))["time"])
    expected = [line for line in log if log_filter.matches(line)]
    assert lines_of(ChunkReader(source, log_filter=log_filter).entries()) == expected
    assert lines_of(last_entries(source, log_filter._replace(lines=99))[0]) == expected


def test_no_chunk_behind_the_last_time_is_read() -> None:
    source = ChunksInMemory([text(n) for n in range(60)], [10] * 6)
    chunks_read = chunks.span(source, chunks_of(source.sizes()), until=json.loads(text(25))["time"])
    assert [chunk.line for chunk in chunks_read] == [0, 10, 20]


def test_only_the_end_of_a_long_log_is_read() -> None:
    source = ChunksInMemory([text(n % 60) for n in range(50_000)], [10_000] * 5)
    assert len(last_entries(source, LogFilter(100))[0]) == 100
    assert source.bytes_read <= 1 << 15
    source.bytes_read = 0
    list(ChunkReader(source, first_position(source, LogFilter(since="2027")), LogFilter(since="2027")).entries())
    assert source.bytes_read <= len(source.files[min(source.files)]) + 5 * 256


def test_severities_and_patterns() -> None:
    log = [text(n, severity, f"step {n} é") for n, severity in enumerate(chunks.SEVERITIES * 2)]
    source = ChunksInMemory(log, [4, 6])
    assert lines_of(ChunkReader(source, log_filter=LogFilter(severity="ERROR")).entries()) == [log[3], log[4], log[8], log[9]]
    assert lines_of(last_entries(source, LogFilter(3, severity="ERROR"))[0]) == [log[4], log[8], log[9]]
    assert lines_of(last_entries(source, LogFilter(9, pattern=r"step [27] é"))[0]) == [log[2], log[7]]
    assert LogFilter(severity="CRITICAL").matches(text(1, "ODD")), "an unknown severity is above all"
    assert LogFilter(severity="ERROR", pattern="no").matches(b"no line of a log")
    assert not LogFilter(pattern="no").matches(b"yes")


def test_a_filter_is_active_by_any_field_but_the_count() -> None:
    assert [LogFilter(*values).is_active for values in ((), (5,), (None, "x"), (None, "", "x"))] == [False, False, True, True]
    assert LogFilter(severity="INFO").is_active
    assert LogFilter(pattern="x").is_active


@pytest.mark.parametrize(("pattern", "matches"), [("a+", True), ("b", False)])
def test_a_pattern_leaves_an_alarm_as_it_was_and_works_on_any_thread(pattern: str, matches: bool) -> None:
    results = list[bool]()
    handler = signal.signal(signal.SIGALRM, before := lambda *_: None)
    seconds_left, _ = signal.setitimer(signal.ITIMER_REAL, 1000.0)

    def match() -> None:
        results.append(LogFilter(pattern=pattern).matches(text(1, message="aa")))

    try:
        match()
        assert signal.getsignal(signal.SIGALRM) is before
        assert 2.0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 1000.0, "that of its caller goes on"
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, seconds_left)
    thread = threading.Thread(target=match)
    thread.start()
    thread.join()
    assert results == [matches, matches]


def test_a_slow_pattern_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chunks.PATTERN_SECONDS == 1.0
    with monkeypatch.context() as patch:
        patch.setattr(chunks, "PATTERN_SECONDS", 0.05)
        with pytest.raises(SlowError):
            LogFilter(pattern="(a+)+$").matches(text(1, message="a" * 60 + "b"))
    monkeypatch.setattr(chunks, "PATTERN_SECONDS", limit())
    assert LogFilter(pattern="a+").matches(text(1, message="aa"))


def run_program(*arguments: str, stdin: bytes = b"") -> tuple[int, list[bytes]]:
    argv = [sys.executable, "-I", "-S", chunks.__file__, *arguments]
    done = subprocess.run(argv, input=stdin, capture_output=True, check=False)
    assert done.stderr == b""
    assert done.stdout[:1] in (b"", b"\n"), "the first newline reports that there is a log, before the search"
    return done.returncode, done.stdout[1:].splitlines()


def test_the_program_on_a_host(tmp_path: Path) -> None:
    log, folder = [text(n) for n in range(6)], tmp_path / "job01"
    assert run_program(str(folder), "[2]", "read") == (chunks.NO_LOG, [])
    assert run_program(str(folder), "[2]", "follow") == (0, [b"0 0 "])
    folder.mkdir()
    (folder / ".part").write_text("x")
    for name, content in ChunksInMemory(log, [3, 3]).files.items():
        (folder / name).write_bytes(content)
    every = [b"%d %d %b" % (*entry.position, entry.line) for entry in ChunkReader(ChunkFolder(folder)).entries()]
    end = b" ".join(every[-1].split()[:2]) + b" "
    assert run_program(str(folder), "[2]", "read") == (0, [*every[4:], end])
    assert run_program(str(folder), "[2]", "follow") == (0, [*every[4:], end])
    assert run_program(str(folder), "[null]", "read") == (0, [b"0 0 ", *every])
    start = " ".join(every[1].decode().split()[:2])
    assert run_program(str(folder), "[2]", "follow", start) == (0, [start.encode() + b" ", *every[2:]])
    assert run_program(str(folder), '[null, "", "", "ERROR"]', "read") == (0, [b"0 0 "])
    assert run_program(str(folder), json.dumps([9, "", "", "", "x"]), "read")[1] == [*every, end]


def test_the_program_reports_a_slow_pattern(tmp_path: Path) -> None:
    folder = tmp_path / "job01"
    folder.mkdir()
    (folder / Chunk(INCARNATION, 0, 0, 0).name).write_bytes(text(1, message="a" * 60 + "b") + b"\n")
    assert run_program(str(folder), json.dumps([9, "", "", "", "(a+)+$"]), "read")[0] == chunks.SLOW_PATTERN


def test_the_program_ends_without_an_error_if_its_pipe_is_closed(tmp_path: Path) -> None:
    folder = tmp_path / "job01"
    folder.mkdir()
    (folder / Chunk(INCARNATION, 0, 0, 0).name).write_bytes(b"x\n" * 100_000)
    argv = [sys.executable, "-I", "-S", chunks.__file__, str(folder), "[null]", "follow"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin
        assert process.stderr
        process.stdout.close()
        assert (process.wait(limit()), process.stderr.read()) == (0, b"")


def test_a_folder_with_new_and_growing_chunks(tmp_path: Path) -> None:
    folder, one, two = ChunkFolder(tmp_path), Chunk(INCARNATION, 0, 0, 0).name, Chunk(INCARNATION, 8, 2, 0).name
    reader = ChunkReader(folder)
    (tmp_path / "x").write_text("no chunk")
    (tmp_path / one).write_bytes(b"one\n")
    assert lines_of(reader.entries()) == [b"one"]
    assert list(reader.entries()) == []
    with (tmp_path / one).open("ab") as file:
        file.write(b"two\n")
    (tmp_path / two).write_bytes(b"three\nfo")
    assert lines_of(reader.entries()) == [b"two", b"three"]
    (tmp_path / one).unlink()
    with (tmp_path / two).open("ab") as file:
        file.write(b"ur\n")
    assert lines_of(reader.entries()) == [b"four"]
    assert reader.position == Position(INCARNATION, 19)


def test_lines_that_were_written_just_before_the_end_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    path = tmp_path / Chunk(INCARNATION, 0, 0, 0).name
    path.write_bytes(b"one\n")
    polled = threading.Event()

    class SlowDisk(threading.Event):
        """The line appears in the last moments."""

        def wait(self, timeout: float | None = None) -> bool:
            if timeout == chunks._LAST_SECONDS:
                path.write_bytes(b"one\ntwo\n")
                return True
            if timeout == chunks._POLL_SECONDS:
                polled.set()
            return super().wait(timeout)

    def read_to_the_end(*_: int) -> bytes:
        polled.wait()
        return b""

    monkeypatch.setattr(chunks.threading, "Event", SlowDisk)
    monkeypatch.setattr(chunks.os, "read", read_to_the_end)
    assert chunks.main([str(tmp_path), "[5]", "follow"]) == 0
    assert capfdbinary.readouterr().out.splitlines()[-1] == b"%d 8 two" % INCARNATION


def test_an_unchanged_folder_is_not_listed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listings = list[str]()

    def listdir(path: str, of: Callable[[str], list[str]] = os.listdir) -> list[str]:
        listings.append(str(path))
        return of(path)

    def sizes_at(nanoseconds: int) -> list[int]:
        os.utime(tmp_path, ns=(nanoseconds, nanoseconds))
        return [size for _, size in sorted(folder.sizes().items())]

    monkeypatch.setattr(chunks.os, "listdir", listdir)
    monkeypatch.setattr(chunks.time, "time_ns", lambda: 10**18)
    old, new = 10**18 - 10**8 - 1, 10**18 - 10**8
    folder, names = ChunkFolder(tmp_path), [Chunk(INCARNATION, at, 0, 0).name for at in (0, 10, 20)]
    for name in names[:2]:
        (tmp_path / name).write_bytes(b"x" * 10)
    assert (sizes_at(old), len(listings)) == ([10, 10], 1)
    (tmp_path / names[0]).write_bytes(b"")  # only the last chunk grows
    (tmp_path / names[1]).write_bytes(b"x" * 12)
    assert (sizes_at(old), len(listings)) == ([10, 12], 1)
    (tmp_path / names[2]).write_bytes(b"x")
    assert (sizes_at(new), len(listings)) == ([10, 12, 1], 2)
    assert (sizes_at(new), len(listings)) == ([10, 12, 1], 3), "a change at the same time may not be in the listing"
    assert (sizes_at(old), sizes_at(old), len(listings)) == ([10, 12, 1], [10, 12, 1], 4)
    folder._path = tmp_path / "none"
    assert folder.sizes() == {}
    folder._path = tmp_path
    assert (sizes_at(old), len(listings)) == ([10, 12, 1], 5)
    assert (folder.read(names[1], 2, 5), folder.read("none", 0, 1)) == (b"xxx", b"")


def test_names_of_chunks() -> None:
    chunk = Chunk(INCARNATION, 12, 3, 4)
    assert chunk.name == "1769860800-000000000000012-000000000003.jsonl"
    assert chunks_of({chunk.name: 4, "x": 1, ".1769860800-000000000000012-000000000003.jsonl": 2}) == [chunk]
    assert re.fullmatch(r"[a-zA-Z0-9._-]+", chunk.name)
