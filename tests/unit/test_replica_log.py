"""The log on a host: whole lines, in order, through deaths and full disks."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from replica.bucket import Directory
from replica.lines import Line
from replica.log import ARCHIVE_SECONDS, Log

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


def test_the_archive_follows_when_it_is_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket, log = Directory(tmp_path, "ps-0"), Log(tmp_path / "logs", "job01", "ps-0")
    log.say("one")
    log.archive(bucket, NAME, at_once=False)
    first = bucket.read(NAME)
    assert first == log.path.read_bytes()
    log.say("two")
    log.archive(bucket, NAME, at_once=False)
    assert bucket.read(NAME) == first
    later = time.monotonic() + ARCHIVE_SECONDS + 1
    monkeypatch.setattr(time, "monotonic", lambda: later)
    log.archive(bucket, NAME, at_once=False)
    assert bucket.read(NAME) == log.path.read_bytes() != first
    log.say("three")
    log.archive(bucket, NAME, at_once=True)
    assert bucket.read(NAME) == log.path.read_bytes()


def test_a_new_host_takes_over_the_archive(tmp_path: Path) -> None:
    bucket, old = Directory(tmp_path, "ps-0"), Log(tmp_path / "old", "job01", "ps-0")
    old.say("one")
    old.archive(bucket, NAME, at_once=True)
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
