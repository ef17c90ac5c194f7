"""The log on a host and in the bucket: complete lines, in order, once, despite kills and full disks."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

import pytest
from waiting import until

from hosts.agent import log as log_module
from hosts.agent.lines import OutputLine
from hosts.agent.log import Log, LogArchive
from jobs.bucket import BucketError
from jobs.chunks import Chunk, ChunkReader, chunks_of
from jobs.chunks import ChunkFolder as Chunks
from jobs.folder_bucket import FolderBucket

NAME = "jobs/job01/logs/ps-0"


def read(log: Log) -> list[dict[str, str]]:
    return [json.loads(entry.line) for entry in ChunkReader(Chunks(log.path)).entries()]


def messages(path: Path) -> list[str]:
    return [json.loads(entry.line)["message"] for entry in ChunkReader(Chunks(path)).entries()]


def test_the_format_of_a_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = Log(tmp_path, "job01", "ps-0")
    log.write([OutputLine(1769860800.25, "WARNING", 'é "quoted"\t')])
    assert read(log) == [
        {"time": "2026-01-31T12:00:00.250Z", "severity": "WARNING", "replica": "ps-0", "message": 'é "quoted"\t'}
    ]
    assert capfd.readouterr().out == '<4>é "quoted"\t\n'


def test_the_log_continues_after_half_a_line(tmp_path: Path) -> None:
    Log(tmp_path, "job01", "ps-0").write_message("one")
    (chunk,) = (tmp_path / "job01").iterdir()
    with chunk.open("a") as file:
        file.write('{"time": "20')
    again = Log(tmp_path, "job01", "ps-0")
    again.write_message("two")
    lines = [entry.line for entry in ChunkReader(Chunks(again.path)).entries()]
    assert lines[1] == b'{"time": "20'
    assert json.loads(lines[2])["message"] == "two"
    assert [chunk.line for chunk in chunks_of(Chunks(again.path).sizes())] == [0, 2]


def test_chunks_are_named_by_their_place_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module.time, "time", lambda: 1769860800.0)
    log, sizes = Log(tmp_path, "job01", "ps-0"), list[int]()
    log.roll()
    for count in (2, 1):
        log.write([OutputLine(1769860800.0, "INFO", "text")] * count)
        sizes.append(sum(path.stat().st_size for path in log.path.iterdir()) - sum(sizes))
        log.roll()
    chunks = [Chunk(1769860800, 0, 0, sizes[0]), Chunk(1769860800, sizes[0], 2, sizes[1])]
    assert log.closed() == chunks_of(Chunks(log.path).sizes()) == chunks
    again = Log(tmp_path, "job01", "ps-0")
    again.write_message("three\nfour")
    again.roll()
    size = (log.path / again.closed()[-1].name).stat().st_size
    assert again.closed() == chunks_of(Chunks(log.path).sizes()) == [*chunks, Chunk(1769860800, sum(sizes), 3, size)]
    assert not [link for link in Path("/proc/self/fd").iterdir() if os.path.realpath(link).startswith(str(tmp_path))]


def test_lines_are_written_in_pieces_of_a_limited_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "_PIECE", 401)
    lines = [OutputLine(float(n), "INFO", "x" * 100) for n in range(7)]
    assert list(log_module._pieces(lines)) == [lines[:3], lines[3:6], lines[6:]]


def test_only_lines_that_were_not_written_are_counted_as_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "_PIECE", 1)
    log, write, writes = Log(tmp_path, "job01", "ps-0"), os.write, list[bytes]()

    def full(descriptor: int, content: bytes) -> int:
        if descriptor != 1:
            writes.append(content)
            if len(writes) > 1:
                raise OSError(28, "No space left on device")
        return write(descriptor, content)

    monkeypatch.setattr(os, "write", full)
    log.write([OutputLine(1769860800.0 + n, "INFO", f"{n}") for n in range(4)])
    monkeypatch.setattr(os, "write", write)
    log.write_message("kept")
    gap = "… 3 lines lost from 2026-01-31T12:00:01.000Z to 2026-01-31T12:00:03.000Z: No space left on device …"
    assert [line["message"] for line in read(log)] == ["0", gap, "kept"]


def test_newest_links_to_the_newest_job(tmp_path: Path) -> None:
    (tmp_path / ".newest").symlink_to("of a start that was interrupted")
    for job in ("job01", "job02"):
        Log(tmp_path, job, "ps-0").write_message(job)
    assert messages(tmp_path / "newest") == ["job02"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job01", "job02", "newest"]


def start_archive(log: Log, store: FolderBucket) -> LogArchive:
    with suppress(BucketError):
        store.create("jobs/job01/job.json", b"{}")
    return LogArchive(log, store, NAME, chunks_of(store.sizes(NAME)))


def test_the_archive_grows_with_the_log_and_is_complete_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "ARCHIVE_SECONDS", 0.05)
    log = Log(tmp_path / "logs", "job01", "ps-0")
    archive = start_archive(log, FolderBucket(tmp_path))
    log.write_message("one")
    until(lambda: messages(tmp_path / NAME) == ["one"])
    log.write_message("two")
    until(lambda: messages(tmp_path / NAME) == ["one", "two"])
    monkeypatch.setattr(log_module, "ARCHIVE_SECONDS", 3600.0)
    log.write_message("three")
    until(archive.finish)
    assert messages(tmp_path / NAME) == messages(log.path) == ["one", "two", "three"]


def test_late_lines_do_not_recreate_a_deleted_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "_LAST_SECONDS", math.inf)  # it does not give up as for an unresponsive bucket
    log, store, name = Log(tmp_path / "logs", "job01", "ps-0"), FolderBucket(tmp_path / "bucket"), "jobs/job01/logs/ps-0"
    (tmp_path / "bucket").mkdir()
    store.create("jobs/job01/job.json", b"{}")
    log.write_message("one")
    until(LogArchive(log, store, name, chunks_of(store.sizes(name))).finish)
    assert messages(tmp_path / "bucket" / name) == ["one"]
    shutil.rmtree(tmp_path / "bucket" / "jobs" / "job01")
    log.write_message("two")
    until(LogArchive(log, store, name, chunks_of(store.sizes(name))).finish)
    assert list((tmp_path / "bucket" / "jobs").iterdir()) == []


class WriteOnceBucket(FolderBucket):
    """A bucket that refuses to overwrite."""

    def upload(self, name: str, source: Path) -> None:
        assert not (self._root / name).exists()
        super().upload(name, source)


def test_no_chunk_is_written_twice_and_none_is_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "ARCHIVE_SECONDS", 0.01)
    monkeypatch.setattr("hosts.agent.log.CHUNK_BYTES", 1000)
    monkeypatch.setattr("hosts.agent.log._PIECE", 300)
    expected = []
    for incarnation in range(3):
        log = Log(tmp_path / "logs", "job01", "ps-0")
        archive = start_archive(log, WriteOnceBucket(tmp_path))
        for n in range(50):
            log.write([OutputLine(1.0, "INFO", text := f"{incarnation} {n}")] * 2)
            expected += [text] * 2
        until(archive.finish)
    assert messages(tmp_path / NAME) == expected
    chunks = chunks_of(FolderBucket(tmp_path).sizes(NAME))
    assert max(chunk.size for chunk in chunks) < 2000
    assert len(chunks) > 10


def test_a_long_job_has_few_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "ARCHIVE_SECONDS", 0.01)
    monkeypatch.setattr(log_module, "_AGE_DIVISOR", 0.001)
    monkeypatch.setattr(log_module, "_MOST_SECONDS", 3600.0)
    log = Log(tmp_path / "logs", "job01", "ps-0")
    archive = start_archive(log, FolderBucket(tmp_path))
    log.write_message("one")
    time.sleep(0.1)
    assert chunks_of(FolderBucket(tmp_path).sizes(NAME)) == []
    until(archive.finish)
    assert messages(tmp_path / NAME) == ["one"]


def test_the_last_lines_wait_up_to_a_minute_for_the_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(tmp_path / "logs", "job01", "ps-0")
    log.write_message("one")
    archive = LogArchive(log, FolderBucket(tmp_path / "away"), NAME, [])
    assert not archive.finish()
    time.sleep(0.1)
    assert not archive.finish()
    FolderBucket(tmp_path).create("comes/jobs/job01/job.json", b"{}")
    (tmp_path / "comes").rename(tmp_path / "away")
    until(archive.finish)
    assert messages(tmp_path / "away" / NAME) == ["one"]
    never = LogArchive(log, FolderBucket(tmp_path / "never"), NAME, [])
    assert not never.finish()
    later = time.monotonic() + 61.0
    monkeypatch.setattr(log_module.time, "monotonic", lambda: later)
    assert never.finish()


def test_an_unreachable_bucket_is_not_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(BucketError):
        chunks_of(FolderBucket(tmp_path / "away").sizes(NAME))
    assert chunks_of(FolderBucket(tmp_path).sizes(NAME)) == []


def test_a_log_beyond_its_limit_keeps_its_first_and_newest_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "ARCHIVE_SECONDS", 0.02)
    log = Log(tmp_path / "logs", "job01", "ps-0", 20_000)
    archive = start_archive(log, WriteOnceBucket(tmp_path))
    for n in range(1000):
        log.write_message(f"line {n}")
        if n % 100 == 0:
            time.sleep(0.03)  # some of it is archived before it is cut, some never
    until(archive.finish)
    assert {chunk.name for chunk in log.closed()} == set(Chunks(log.path).sizes())
    for path in (log.path, tmp_path / NAME):
        assert sum(Chunks(path).sizes().values()) <= 20_000 + 1_300
        lines = messages(path)
        assert lines[:10] == [f"line {n}" for n in range(10)]
        assert lines[-50:] == [f"line {n}" for n in range(950, 1000)]
        cut = [int(text.split()[1]) for text in lines if text.endswith(" cut …")]
        assert len(lines) - len(cut) + sum(cut) == 1000


def test_a_new_host_continues_the_archived_log_and_fetches_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "ARCHIVE_SECONDS", 0.01)
    bucket, old = WriteOnceBucket(tmp_path), Log(tmp_path / "old", "job01", "ps-0")
    old.write_message("one")
    until(start_archive(old, bucket).finish)
    old.write_message("not archived")
    new = Log(tmp_path / "new", "job01", "ps-0", archived=chunks_of(bucket.sizes(NAME)))
    new.write_message("two")
    archive = start_archive(new, bucket)
    until(lambda: messages(new.path) == ["one", "two"])
    new.write_message("three")
    until(archive.finish)
    assert messages(tmp_path / NAME) == messages(new.path) == ["one", "two", "three"]
    again = Log(tmp_path / "new", "job01", "ps-0", archived=chunks_of(bucket.sizes(NAME)))
    again.write_message("four")
    until(start_archive(again, bucket).finish)
    assert messages(tmp_path / NAME) == ["one", "two", "three", "four"]
    assert len({chunk.incarnation for chunk in chunks_of(bucket.sizes(NAME))}) == 2


@pytest.mark.parametrize("cut", ["empty", "shorter", "gone"])
def test_a_log_whose_end_a_power_cut_took_is_archived_on(tmp_path: Path, cut: str) -> None:
    """Check an archive, whose writes are synced, that has more of the log than the host."""
    store, folder = FolderBucket(tmp_path), tmp_path / "state" / "job01"
    for lines in (("one", "two"), ("three",)):
        log = Log(tmp_path / "state", "job01", "ps-0", archived=chunks_of(store.sizes(NAME)))
        log.write([OutputLine(1.0, "INFO", line) for line in lines])
        until(start_archive(log, store).finish)
    *_, last = sorted(folder.iterdir())
    if cut == "gone":
        last.unlink()
    else:
        os.truncate(last, 0 if cut == "empty" else 9)
    log = Log(tmp_path / "state", "job01", "ps-0", archived=chunks_of(store.sizes(NAME)))
    archive = start_archive(log, store)
    log.write([OutputLine(1.0, "INFO", line) for line in ("four", "five")])
    until(archive.finish)
    assert messages(tmp_path / NAME) == ["one", "two", "three", "four", "five"]


def test_an_empty_chunk_that_a_killed_agent_left_is_closed_only_with_its_lines(tmp_path: Path) -> None:
    former = Log(tmp_path, "job01", "ps-0")
    former.write_message("one")
    former.roll()
    (former.path / former._open_chunk.name).touch()
    log = Log(tmp_path, "job01", "ps-0")
    assert log.closed() == former.closed()
    log.write_message("two")
    log.roll()
    assert [(chunk.name, chunk.size) for chunk in log.closed()] == sorted(Chunks(log.path).sizes().items())


class Unsteady(FolderBucket):
    """A bucket whose first downloads fail."""

    def __init__(self, root: Path, failures: int) -> None:
        super().__init__(root)
        self.failures = failures

    def download(self, name: str, target: Path) -> bool:
        if self.failures:
            self.failures -= 1
            raise BucketError("no route to the bucket")
        return super().download(name, target)


@pytest.mark.parametrize(("seconds", "failures"), [(3600.0, 0), (0.01, 1)])
def test_a_new_host_fetches_the_log_at_once_or_as_soon_as_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, failures: int
) -> None:
    old = Log(tmp_path / "old", "job01", "ps-0")
    old.write_message("one")
    until(start_archive(old, FolderBucket(tmp_path)).finish)
    monkeypatch.setattr(log_module, "ARCHIVE_SECONDS", seconds)
    bucket = Unsteady(tmp_path, failures)
    new = Log(tmp_path / "new", "job01", "ps-0", archived=chunks_of(bucket.sizes(NAME)))
    archive = start_archive(new, bucket)
    until(lambda: messages(new.path) == ["one"])
    until(archive.finish)


def test_a_chunk_that_is_gone_is_cut_without_an_error(tmp_path: Path) -> None:
    log = Log(tmp_path, "job01", "ps-0", 2000)
    for n in range(50):
        log.write_message(f"line {n}")
        for path in sorted(log.path.iterdir())[2:-2]:
            path.unlink()
    assert not [text for text in messages(log.path) if "lost" in text]
    assert messages(log.path)[-1] == "line 49"


def test_a_clock_that_was_set_back_keeps_the_order_of_logs(tmp_path: Path) -> None:
    earlier = Chunk(1 << 40, 0, 0, 5)
    log = Log(tmp_path, "job01", "ps-0", archived=[earlier])
    log.write_message("one")
    (chunk,) = chunks_of(Chunks(log.path).sizes())
    assert chunk[:3] == (earlier.incarnation + 1, 0, 0)


def test_the_oldest_logs_beyond_the_limit_are_removed(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "chunk").write_text("x" * 900)
    os.utime(tmp_path / "old", (1, 1))
    for n, job in enumerate(("job01", "job02")):
        Log(tmp_path, job, "ps-0", 1000).write_message("x" * 500)
        os.utime(tmp_path / job, (n + 2, n + 2))
    Log(tmp_path, "job03", "ps-0", 1000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job02", "job03", "newest"]


def test_a_log_within_the_limit_is_kept(tmp_path: Path) -> None:
    (tmp_path / "job01").mkdir()
    (tmp_path / "job01/chunk").write_text("x" * 10)
    log_module._remove_old_logs(tmp_path / "job02", 10)
    assert (tmp_path / "job01").exists()
    log_module._remove_old_logs(tmp_path / "job02", 9)
    assert not (tmp_path / "job01").exists()


def test_a_full_disk_blocks_nothing_and_lost_lines_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, write = Log(tmp_path, "job01", "ps-0"), os.write
    log.write_message("before")

    def full(descriptor: int, content: bytes) -> int:
        if descriptor == 1:
            return write(descriptor, content)
        if len(content) > 10:
            return write(descriptor, content[:10])
        raise OSError(28, "No space left on device")

    for round_ in range(2):
        monkeypatch.setattr(os, "write", full)
        log.write([OutputLine(1769860800.0, "INFO", "lost")])
        log.write([OutputLine(1769860801.0 + n, "INFO", "lost") for n in range(3)])
        monkeypatch.setattr(os, "write", write)
        log.write_message(f"kept {round_}")
    gap = "… 4 lines lost from 2026-01-31T12:00:00.000Z to 2026-01-31T12:00:03.000Z: No space left on device …"
    assert [line["message"] for line in read(log)] == ["before", gap, "kept 0", gap, "kept 1"]
    log.roll()
    assert [chunk.size for chunk in log.closed()] == list(Chunks(log.path).sizes().values())


def test_a_chunk_without_a_line_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, write = Log(tmp_path, "job01", "ps-0"), os.write

    def full(descriptor: int, content: bytes) -> int:
        if descriptor != 1:
            raise OSError(28, "No space left on device")
        return write(descriptor, content)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        log.write_message("lost")
    log.roll()
    assert log.closed() == []


def test_an_unwritable_folder_only_loses_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(tmp_path, "job01", "ps-0")

    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(log_module.os, "open", refuse)
    log.write_message("lost")
    monkeypatch.undo()
    log.write_message("kept")
    assert [line["message"] for line in read(log)][1:] == ["kept"]
    assert "1 lines lost" in read(log)[0]["message"]


def test_a_restarted_agent_opens_its_log_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the job is not refused, and that the rest of its log still goes to the bucket."""
    Log(tmp_path, "job01", "ps-0").write_message("one")

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(log_module.Path, "symlink_to", refuse)
    assert [chunk.line for chunk in Log(tmp_path, "job01", "ps-0").closed()] == [0]


def test_a_chunk_that_cannot_be_continued_is_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Log(tmp_path, "job01", "ps-0").write_message("one")

    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(log_module.Path, "open", refuse)
    again = Log(tmp_path, "job01", "ps-0")
    again.write_message("two")
    monkeypatch.undo()
    assert messages(again.path) == ["one", "two"]
    first, second = chunks_of(Chunks(again.path).sizes())
    assert second[:3] == (first.incarnation + 1, 0, 0)
    again.roll()
    assert again.closed()[-1] == second
