"""The chief's part of a manifest: what is hashed, what is not and why, and how it gets into manifest.json."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from replica import facts
from replica.bucket import open_bucket
from replica.decide import View, decide
from replica.ledger import Ledger
from replica.manifest import Manifest
from replica.record import JobRecord, JobState, Plan, ReplicaRecord, ReplicaState, now

PATIENCE = 30.0


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    (folder / "more").mkdir(parents=True)
    for name, content in (("b.rec", b"two"), ("a.rec", b"one"), ("more/c.rec", b"three"), (".a.rec.part", b"half")):
        (folder / name).write_bytes(content)
    return folder


def by_hand(folder: Path, *names: str) -> str:
    listed = subprocess.run(["sha256sum", *names], cwd=folder, capture_output=True, check=True).stdout
    return subprocess.run(["sha256sum"], input=listed, capture_output=True, check=True).stdout.split()[0].decode()


def test_the_hash_is_that_of_sha256sum(data: Path) -> None:
    assert facts.digest([str(data)]) == {
        "paths": [str(data)],
        "sha256": by_hand(data, "a.rec", "b.rec", "more/c.rec"),
        "files": 3,
        "bytes": 11,
    }


@pytest.mark.parametrize("paths", [["{}/*.rec"], ["{}/a.rec", "{}/b.rec"], ["{}/b.rec", "{}/[a].rec"], ["file://{}/?.rec"]])
def test_globs_lists_and_urls_name_the_same_files(data: Path, paths: list[str]) -> None:
    found = facts.digest([path.format(data) for path in paths])
    assert (found["sha256"], found["files"]) == (by_hand(data, "a.rec", "b.rec"), 2)


@pytest.mark.parametrize("change", ["content", "name", "more"])
def test_another_content_or_name_is_another_hash(data: Path, change: str) -> None:
    before = facts.digest([str(data)])["sha256"]
    if change == "name":
        (data / "a.rec").rename(data / "aa.rec")
    else:
        (data / ("a.rec" if change == "content" else "d.rec")).write_bytes(b"eno")
    assert facts.digest([str(data)])["sha256"] != before


def test_what_is_not_hashed_says_why(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (data / "empty").mkdir()
    for path in (f"{data}/none", f"{data}/*.csv", f"{data}/empty"):
        assert facts.digest([f"{data}/a.rec", path]) == {
            "paths": [f"{data}/a.rec", path],
            "notHashed": f"the chief's host finds no file {path}",
        }
    assert facts.digest(["nowhere://x"])["notHashed"].startswith("nowhere://x cannot be read: ")
    monkeypatch.setattr(facts, "LIMIT", 10)
    assert "are more than the" in facts.digest([str(data)])["notHashed"]


def plan(tmp_path: Path, **changes: Any) -> Plan:
    told = {"replica": "master-0", "python": sys.executable, "data": [str(tmp_path / "data")], **changes}
    return Plan(
        jobId="job01",
        replicas=["master-0", "ps-0"],
        module="m",
        args=[],
        bucket=str(tmp_path),
        packageDir=str(tmp_path),
        **told,
    )


def until(answer: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    deadline = time.monotonic() + PATIENCE
    while not (found := answer()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return found


def test_the_chief_completes_the_manifest_once_it_is_there(tmp_path: Path, data: Path) -> None:
    made = plan(tmp_path)
    bucket = open_bucket(made.bucket, "master-0")
    ledger, manifest = Ledger(made, bucket), Manifest(made)
    manifest.start()
    time.sleep(0.5)
    assert manifest.told(ledger) == {}
    bucket.write("jobs/job01/manifest.json", b'{"module": "m", "versions": {"scaletier": "9"}}')
    found = until(lambda: manifest.told(ledger))
    written = json.loads(bucket.read("jobs/job01/manifest.json") or b"")
    assert written["data"] == found["data"] == facts.digest([str(data)])
    assert written["module"] == "m"
    assert written["versions"] == {"scaletier": "9", **found["versions"]}
    assert found["versions"]["python"].startswith("3.")
    assert "tensorflow" in found["versions"]
    manifest.start()
    assert manifest.told(ledger) == {}
    manifest.close()


def test_only_the_chief_looks_and_a_python_that_is_not_there_is_no_error(tmp_path: Path) -> None:
    for made in (plan(tmp_path, replica="ps-0"), plan(tmp_path, python="/nonexistent/python")):
        manifest = Manifest(made)
        manifest.start()
        assert manifest.told(Ledger(made, open_bucket(made.bucket, "x"))) == {}
        manifest.close()


def test_the_leader_puts_the_facts_into_the_record_once(tmp_path: Path) -> None:
    found = {"versions": {"python": "3.11.2"}, "data": {"notHashed": "gone", "paths": []}}
    chief = ReplicaRecord("master-0", state=ReplicaState.RUNNING, facts=found)
    view = View(plan(tmp_path), {"master-0": chief, "ps-0": replace(chief, name="ps-0", facts={})}, now(), now())
    job = JobRecord("job01", state=JobState.RUNNING, manifest={"versions": {"scaletier": "9"}})
    told = decide(job, view)
    assert told is not None
    assert told.manifest == {"versions": {"scaletier": "9", "python": "3.11.2"}, "data": found["data"]}
    assert decide(told, view) is None
    ended = replace(job, state=JobState.CANCELLING)
    assert getattr(decide(ended, view), "manifest", None) == told.manifest
