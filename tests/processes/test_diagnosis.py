"""A host's diagnosis of a FAILED job by the real agent, and what it reads by commands."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from replicahosts import Make
from waiting import until

from hosts.agent import diagnosis
from hosts.agent.job_files import JobFiles
from jobs import paths
from jobs.folder_bucket import FolderBucket
from jobs.ledger import Ledger
from jobs.records import HostConfig, JobRecord, Plan, ReplicaRecord, Task
from jobs.states import JobState

SECRET = "correct horse battery staple"
RAISES = (
    "import os, pathlib, time\n"
    "print('up', flush=True)\n"
    "if 'worker' in os.environ['TF_CONFIG']:\n"
    "    while not pathlib.Path('up').exists():\n"
    "        time.sleep(0.02)\n"
    "    print('my token is', os.environ['TOKEN'], flush=True)\n"
    "    raise ValueError('no such column, with ' + os.environ['TOKEN'])\n"
    "pathlib.Path('up').touch()\n"
    "time.sleep(600)\n"
)


def read_diagnosis(cluster: Any, name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((cluster.bucket / paths.diagnosis("job01", name)).read_bytes())
    return record


def test_each_host_of_a_failed_job_writes_a_diagnosis(make: Make) -> None:
    cluster = make(RAISES, "master-0", "worker-0", secrets=["TOKEN"])
    for name in cluster.replicas:
        (secrets := cluster.host(name) / "state" / "secrets").mkdir()
        (secrets / "job01.json").write_text(json.dumps({"TOKEN": SECRET}))
    (cluster.package / "brought-1.2.dist-info").mkdir()
    cluster.run()
    assert cluster.job.state == "FAILED"
    worker, master = read_diagnosis(cluster, "worker-0"), read_diagnosis(cluster, "master-0")
    assert (worker["jobId"], worker["replica"], worker["host"]) == ("job01", "worker-0", "worker-0")
    assert (worker["trainer"]["exitCode"], worker["trainer"]["ended"]) == (1, None)
    assert (master["trainer"]["exitCode"], master["trainer"]["ended"]) == (143, "signal 15 (SIGTERM)")
    assert worker["trainer"]["firstError"]["message"] == "ValueError: no such column, with [secret]"
    messages = [line["message"] for line in worker["lines"]]
    assert {"my token is [secret]", "trainer exited with status 1"} <= set(messages)
    assert worker["tfConfig"] == {"task": {"type": "worker", "index": 0}}
    assert worker["python"]["packages"]["brought"] == "1.2"
    assert worker["python"]["packages"]["fabric"]
    assert worker["clock"]["leader"] in cluster.replicas
    assert 0 <= worker["clock"]["aheadSeconds"] < 60
    assert [disk["path"] for disk in worker["disks"]] == ["/", str(cluster.host("worker-0") / "state"), str(cluster.bucket)]
    assert all(disk["freeBytes"] <= disk["totalBytes"] for disk in worker["disks"])
    assert "memoryEvents" in worker["kernel"]
    assert worker["memory"]["machineBytes"] > 0
    for name in cluster.replicas:
        text = (cluster.bucket / paths.diagnosis("job01", name)).read_text()
        assert SECRET not in text
        assert "PATH" not in text


@pytest.mark.parametrize("code", [0, None])
def test_a_job_that_did_not_fail_has_no_diagnosis(make: Make, code: int | None) -> None:
    cluster = make("print('up', flush=True)\nimport time\n" + ("" if code == 0 else "time.sleep(600)\n"))
    cluster.start()
    if code is None:
        until(lambda: cluster.runs("master-0"))
        cluster.cancel()
    assert cluster.wait() == [0]
    assert cluster.job.state == ("SUCCEEDED" if code == 0 else "CANCELLED")
    assert not (cluster.job_folder / "diagnosis").exists()


def test_a_diagnosis_that_cannot_be_written_is_logged_and_the_job_ends(make: Make) -> None:
    cluster = make("raise SystemExit(3)\n")
    (cluster.job_folder / "diagnosis").write_text("a file in the way")
    cluster.run()
    assert cluster.job.state == "FAILED"
    (line,) = [line for line in cluster.log("master-0", "WARNING") if "diagnosis" in line]
    assert line.startswith("no diagnosis for fab bundle: ")
    assert "\n" not in line


class Slow(FolderBucket):
    """A bucket whose uploads of a diagnosis wait for an event."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.released, self.uploads = threading.Event(), list[str]()

    def upload(self, name: str, source: Path) -> None:
        if "/diagnosis/" in name:
            self.released.wait()
            self.uploads.append(name)
        super().upload(name, source)


def test_a_host_writes_a_diagnosis_once_and_then_starts_the_next_job(tmp_path: Path) -> None:
    store = Slow(tmp_path)
    site = JobFiles(HostConfig("worker-1", str(tmp_path)), tmp_path / "state", Ledger(store), store, {})
    failed = JobRecord("job01", JobState.FAILED)
    site.diagnose(failed, ReplicaRecord("ps-0"), "")
    assert site.finish()  # there is no diagnosis to write
    for job_id in ("job01", "job02"):
        store.create(paths.job(job_id), b"{}")
        (folder := tmp_path / "state" / "jobs" / job_id).mkdir(parents=True)
        (folder / "package.sha256").write_text("abc")
        site.prepare(Plan(job_id, ["master-0", "ps-0"], "task", [], {"ps-0": Task("{}")}, "abc", folder="a/b"), "ps-0")
        store.released.clear()
        for _ in range(3):
            site.diagnose(replace(failed, jobId=job_id), ReplicaRecord("ps-0"), "")
            assert not site.finish()
        time.sleep(0.2)  # long enough for everything else
        assert not site.finish()
        store.released.set()
        until(site.finish)
    assert store.uploads == [paths.diagnosis("job01", "ps-0"), paths.diagnosis("job02", "ps-0")]
    record = json.loads((tmp_path / paths.diagnosis("job02", "ps-0")).read_bytes())
    assert (record["jobId"], record["replica"], record["host"]) == ("job02", "ps-0", "worker-1")


def test_a_missing_systemctl_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert diagnosis.units()["notReadable"].startswith("systemctl: ")
    program = tmp_path / "systemctl"
    program.touch()
    program.chmod(0o755)

    def units(script: str) -> dict[str, Any]:
        program.write_text(f"#!/bin/sh\n{script}\n")
        return diagnosis.units()

    first, second = (
        "Id=a.service\\nResult=oom-kill\\nStatusText=a=b=c\\n",
        "Id=b.service\\nLoadState=not-found\\nResult=success",
    )
    assert units(f"printf '{first}\\n{second}\\n\\nResult=x\\n'") == {
        "a.service": {"Result": "oom-kill", "StatusText": "a=b=c"},
        "b.service": {"LoadState": "not-found"},
    }
    assert units("echo ' no bus ' >&2; exit 1") == {"notReadable": "systemctl: no bus"}
    assert units("exit 4") == {"notReadable": "systemctl: 4"}
