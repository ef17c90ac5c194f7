"""The chief's part of a manifest: hashed files, omitted ones with the reason, and the write itself."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_for

from hosts.agent import facts
from hosts.agent.job_rules import View, decide
from hosts.agent.manifest import ManifestCompletion
from jobs import paths
from jobs.folder_bucket import FolderBucket
from jobs.ledger import Ledger
from jobs.records import JobRecord, Plan, ReplicaRecord
from jobs.states import JobState, ReplicaState
from jobs.times import now


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    (folder / "more").mkdir(parents=True)
    for name, content in (("b.rec", b"two"), ("a.rec", b"one"), ("more/c.rec", b"three"), (".a.rec.part", b"half")):
        (folder / name).write_bytes(content)
    return folder


def hash_with_sha256sum(folder: Path, *names: str) -> str:
    listed = subprocess.run(["sha256sum", *names], cwd=folder, capture_output=True, check=True).stdout
    return subprocess.run(["sha256sum"], input=listed, capture_output=True, check=True).stdout.split()[0].decode()


def test_the_hash_equals_sha256sum_s(data: Path) -> None:
    assert facts.digest([str(data)]) == {
        "paths": [str(data)],
        "sha256": hash_with_sha256sum(data, "a.rec", "b.rec", "more/c.rec"),
        "files": 3,
        "bytes": 11,
    }


@pytest.mark.parametrize("paths", [["{}/*.rec"], ["{}/a.rec", "{}/b.rec"], ["{}/b.rec", "{}/[a].rec"], ["file://{}/?.rec"]])
def test_globs_lists_and_urls_name_the_same_files(data: Path, paths: list[str]) -> None:
    digest = facts.digest([path.format(data) for path in paths])
    assert (digest["sha256"], digest["files"]) == (hash_with_sha256sum(data, "a.rec", "b.rec"), 2)


@pytest.mark.parametrize("change", ["content", "name", "more"])
def test_another_content_or_name_changes_the_hash(data: Path, change: str) -> None:
    before = facts.digest([str(data)])["sha256"]
    if change == "name":
        (data / "a.rec").rename(data / "aa.rec")
    else:
        (data / ("a.rec" if change == "content" else "d.rec")).write_bytes(b"eno")
    assert facts.digest([str(data)])["sha256"] != before


def test_unhashed_data_has_a_reason(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (data / "empty").mkdir()
    for path in (f"{data}/none", f"{data}/*.csv", f"{data}/empty"):
        assert facts.digest([f"{data}/a.rec", path]) == {
            "paths": [f"{data}/a.rec", path],
            "notHashed": f"the chief's host finds no file {path}",
        }
    assert facts.digest(["nowhere://x"])["notHashed"].startswith("nowhere://x cannot be read: ")
    monkeypatch.setattr(facts, "LIMIT", 10)
    assert "'**' can only be an entire path component" in facts.digest([f"{data}/**.csv"])["notHashed"]
    assert facts.digest(["/"])["notHashed"] == "Unacceptable pattern: ''"
    assert facts.digest([]) == {"paths": [], "notHashed": "no argument of the trainer names any"}
    assert facts.digest([str(data)])["notHashed"] == "0.0 GB are more than the 0 GB that are hashed at most"
    monkeypatch.setattr(facts, "LIMIT", 11)
    assert facts.digest([str(data)])["bytes"] == 11


def plan(*data: Path) -> Plan:
    return Plan("job01", ["master-0", "ps-0"], "m", [], {}, data=[str(path) for path in data])


def test_the_chief_completes_the_manifest_once_it_exists(tmp_path: Path, data: Path) -> None:
    store = FolderBucket(tmp_path)
    manifest = ManifestCompletion(plan(data), sys.executable, Ledger(store))
    wait_for(lambda: manifest.write_facts() is not None or bool(manifest._facts), "what the chief's host knows")
    assert manifest.write_facts() is None
    store.create(paths.manifest("job01"), b'{"module": "m", "versions": {"scaletier": "9"}}')
    new_facts = wait_for(manifest.write_facts, "the manifest")
    item = store.read(paths.manifest("job01"))
    written = json.loads(item.content)
    assert item.content == (json.dumps(written, indent=1) + "\n").encode()
    assert written["data"] == new_facts["data"] == facts.digest([str(data)])
    assert written["module"] == "m"
    assert written["versions"] == {"scaletier": "9", **new_facts["versions"]}
    assert new_facts["versions"]["python"].startswith("3.")
    assert "tensorflow" in new_facts["versions"]
    assert manifest.write_facts() is None
    manifest.close()


@pytest.mark.parametrize("garbled", [b"", b"[]", b'{"versions": 1}'])
def test_a_garbled_manifest_is_unchanged(tmp_path: Path, data: Path, garbled: bytes) -> None:
    store = FolderBucket(tmp_path)
    store.create(paths.manifest("job01"), garbled)
    new_facts = wait_for(ManifestCompletion(plan(data), sys.executable, Ledger(store)).write_facts, "the manifest")
    assert new_facts["data"]["files"] == 3
    item = store.read(paths.manifest("job01"))
    assert item.content == garbled


def test_no_code_of_a_job_s_own_python_runs_as_the_agent(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (site,) = (tmp_path / "venv/lib").glob("python3*/site-packages")
    touch = f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).touch()\n"
    for name in ("evil.pth", "sitecustomize.py", "json.py", "evil.py"):
        (site / name).write_text(touch)
    (site / "fsspec").mkdir()
    (site / "fsspec/__init__.py").write_text(touch)
    (site / "evil-1.dist-info").mkdir()
    (site / "evil-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1\n")
    (site / "evil-1.dist-info/entry_points.txt").write_text("[fsspec.specs]\nfile = evil:FileSystem\n")
    (site / "tensorflow-2.99.dist-info").mkdir()
    (site / "tensorflow-2.99.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: tensorflow\nVersion: 2.99\n")
    (store := FolderBucket(tmp_path)).create("jobs/job01/manifest.json", b"{}")
    (tmp_path / "data").write_bytes(b"one")
    python, data = str(tmp_path / "venv/bin/python"), [f"file://{tmp_path}/data"]
    job_plan = Plan("job01", ["master-0"], "task", [], {}, data=data, python=python)
    new_facts = wait_for(ManifestCompletion(job_plan, sys.executable, Ledger(store)).write_facts, "the manifest")
    assert (new_facts["versions"]["tensorflow"], new_facts["data"]["bytes"]) == ("2.99", 3)
    assert not (tmp_path / "ran").exists()


def test_a_missing_or_failing_python_is_no_error(ledger: Ledger, tmp_path: Path) -> None:
    manifest = ManifestCompletion(plan(), "/nonexistent/python", ledger)
    assert manifest.write_facts() is None
    manifest.close()
    ledger.store.create(paths.manifest("job01"), b"{}")
    new_facts = wait_for(ManifestCompletion(plan(tmp_path), "false", ledger).write_facts, "the manifest")
    assert new_facts == {"data": {"paths": [str(tmp_path)], "notHashed": "hashing ended with 1"}}


def test_a_process_that_no_signal_ends_delays_nothing(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck:
        killed = False

        def __init__(self, argv: list[str], **_: object) -> None:
            self.argv = argv

        def kill(self) -> None:
            Stuck.killed = True

        def communicate(self, timeout: float) -> None:
            raise subprocess.TimeoutExpired(self.argv, timeout)

    monkeypatch.setattr("hosts.agent.manifest.subprocess.Popen", Stuck)
    ManifestCompletion(plan(), sys.executable, ledger).close()
    assert Stuck.killed


@pytest.mark.parametrize(
    ("script", "new_facts"),
    [
        ("""echo noise; echo '{"a": 1}'""", {"a": 1}),
        ("""echo '{"a": 1}'; exit 3""", {"data": {"paths": [], "notHashed": "hashing ended with 3"}}),
        ("echo '[1]'", {"data": {"paths": [], "notHashed": "hashing ended with 0"}}),
    ],
)
def test_the_last_line_of_a_python_that_succeeded_has_the_facts(tmp_path: Path, script: str, new_facts: dict[str, Any]) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    ledger = Ledger(FolderBucket(tmp_path / "bucket"))
    manifest = ManifestCompletion(plan(), str(python), ledger)
    wait_for(lambda: manifest.write_facts() is not None or bool(manifest._facts), "what the chief's host knows")
    assert manifest.write_facts() is None, "the bucket fails"
    (tmp_path / "bucket").mkdir()
    ledger.store.create(paths.manifest("job01"), b"{}")
    assert manifest.write_facts() == new_facts
    assert manifest.write_facts() is None


def test_the_program_prints_the_facts_of_the_job_s_python_at_a_low_priority(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site = tmp_path / "hosts/lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    site.mkdir(parents=True)
    info = tmp_path / "venv/lib" / f"python3.{sys.version_info.minor}" / "site-packages/tensorflow_cpu-2.99.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorflow-cpu\nVersion: 2.99\n")
    (other := info.with_name("torch-2.9.0+cpu.dist-info")).mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.9.0+cpu\n")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "hosts/bin/python"))
    monkeypatch.setattr(sys, "argv", ["facts", str(tmp_path / "venv/bin/python"), str(data)])
    monkeypatch.setattr(sys, "path", [])
    nice: list[int] = []
    monkeypatch.setattr(facts.os, "nice", nice.append)
    facts.main()
    assert (sys.path, nice) == ([str(site)], [10])
    versions = {"python": platform.python_version(), "tensorflow": "2.99", "torch": "2.9.0+cpu"}
    assert json.loads(capsys.readouterr().out) == {"versions": versions, "data": facts.digest([str(data)])}


def test_the_leader_adds_the_facts_to_the_record_once() -> None:
    new_facts = {"versions": {"python": "3.11.2"}, "data": {"notHashed": "gone", "paths": []}}
    chief = ReplicaRecord("master-0", state=ReplicaState.RUNNING, facts=new_facts)
    view = View(plan(), {"master-0": chief, "ps-0": replace(chief, name="ps-0", facts={})}, now())
    job = JobRecord("job01", state=JobState.RUNNING, manifest={"versions": {"scaletier": "9"}})
    updated = decide(job, view)
    assert updated.manifest == {"versions": {"scaletier": "9", "python": "3.11.2"}, "data": new_facts["data"]}
    assert decide(updated, view) is None
    for state in (JobState.CANCELLING, JobState.PREPARING):
        other = decide(replace(job, state=state), replace(view, replicas={"master-0": chief}))
        assert other.manifest == updated.manifest
