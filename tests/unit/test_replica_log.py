"""The log on a host: whole lines, in order, through deaths and full disks."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from replicahosts import until

from jobs.folder import Folder
from jobs.store import StoreError
from replica import archive
from replica.archive import Archive
from replica.lines import Line
from replica.log import Log

NAME = "jobs/job01/logs/ps-0.jsonl"


def read(log: Log) -> list[dict[str, str]]:
    return [json.loads(line) for line in log.path.read_text().splitlines()]


def test_a_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = Log(tmp_path, "job01", "ps-0")
    log.write([Line(1769860800.25, "WARNING", 'é "quoted"\t')])
    assert read(log) == [
        {"time": "2026-01-31T12:00:00.250Z", "severity": "WARNING", "replica": "ps-0", "message": 'é "quoted"\t'}
    ]
    assert capfd.readouterr().out == '<4>é "quoted"\t\n'


def test_the_log_goes_on_after_half_a_line(tmp_path: Path) -> None:
    Log(tmp_path, "job01", "ps-0").say("one")
    with (tmp_path / "job01.jsonl").open("a") as file:
        file.write('{"time": "20')
    log = Log(tmp_path, "job01", "ps-0")
    log.say("two")
    lines = log.path.read_text().splitlines()
    assert lines[1] == '{"time": "20'
    assert json.loads(lines[2])["message"] == "two"


def test_newest_follows_the_newest_job(tmp_path: Path) -> None:
    for job in ("job01", "job02"):
        Log(tmp_path, job, "ps-0").say(job)
    assert json.loads((tmp_path / "newest").read_text())["message"] == "job02"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job01.jsonl", "job02.jsonl", "newest"]


def archived(root: Path) -> bytes:
    path = root / NAME
    return path.read_bytes() if path.exists() else b""


def test_the_archive_follows_and_has_all_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "SECONDS", 0.05)
    log = Log(tmp_path / "logs", "job01", "ps-0")
    copies = Archive(log, Folder(tmp_path), NAME)
    log.say("one")
    until(lambda: archived(tmp_path) == log.path.read_bytes())
    log.say("two")
    until(lambda: archived(tmp_path) == log.path.read_bytes())
    monkeypatch.setattr(archive, "SECONDS", 3600.0)
    log.say("three")
    until(copies.finish)
    assert archived(tmp_path) == log.path.read_bytes()
    assert len(log.path.read_bytes().splitlines()) == 3


def test_the_end_of_a_log_is_waited_for_until_the_bucket_is_back_or_a_minute_has_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(tmp_path / "logs", "job01", "ps-0")
    log.say("one")
    copies = Archive(log, Folder(tmp_path / "away"), NAME)
    assert not copies.finish()
    time.sleep(0.1)
    assert not copies.finish()
    (tmp_path / "away").mkdir()
    until(copies.finish)
    assert archived(tmp_path / "away") == log.path.read_bytes()
    never = Archive(log, Folder(tmp_path / "never"), NAME)
    assert not never.finish()
    later = time.monotonic() + 61.0
    monkeypatch.setattr(archive.time, "monotonic", lambda: later)
    assert never.finish()


def test_a_log_that_has_not_grown_is_not_copied_again(tmp_path: Path) -> None:
    store, log = Folder(tmp_path), Log(tmp_path / "logs", "job01", "ps-0")
    log.say("one")
    with pytest.raises(StoreError):
        log.archive(Folder(tmp_path / "away"), NAME)
    log.archive(store, NAME)
    (tmp_path / NAME).unlink()
    log.archive(store, NAME)
    assert archived(tmp_path) == b""
    log.say("two")
    log.archive(store, NAME)
    assert archived(tmp_path) == log.path.read_bytes()


def test_a_new_host_takes_over_the_archive(tmp_path: Path) -> None:
    bucket, old = Folder(tmp_path), Log(tmp_path / "old", "job01", "ps-0")
    old.say("one")
    old.archive(bucket, NAME)
    log = Log(tmp_path / "new", "job01", "ps-0")
    log.say("two")
    log.adopt(bucket, NAME)
    log.say("three")
    assert [line["message"] for line in read(log)] == ["one", "two", "three"]
    log.adopt(bucket, NAME)
    again = Log(tmp_path / "old", "job01", "ps-0")
    again.adopt(bucket, NAME)
    assert [line["message"] for line in read(again)] == ["one"]


def test_a_full_disk_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, write = Log(tmp_path, "job01", "ps-0"), os.write

    def full(descriptor: int, content: bytes) -> int:
        if descriptor == 1:
            return write(descriptor, content)
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "write", full)
    log.say("lost")
    monkeypatch.undo()
    log.say("kept")
    assert [line["message"] for line in read(log)] == ["kept"]
