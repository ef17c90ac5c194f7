"""`fab jobs` and `fab describe`: of a job that runs, waits, was restarted, or cannot be read."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from opsdata import put_job

from infra.inventory import Inventory
from jobs import paths
from jobs.firsterror import FirstError
from jobs.folder import FolderBucket
from jobs.ledger import Ledger
from jobs.notification import Notification
from jobs.progress import JobProgress
from jobs.queue import Queue, QueueEntry
from jobs.records import Event, JobRecord, ReplicaRecord, UnsavedFiles
from jobs.states import JobState, ReplicaState
from ops import terminal
from ops.cluster.cluster import ClusterClient
from ops.cluster.fanout import Outcome
from ops.cluster.remote import CommandResult
from ops.errors import HostError, UsageError
from ops.show import jobs as jobs_module
from ops.show.hosts import hosts
from ops.show.jobs import describe, jobs

NOON = "2026-01-31T12:00:0{}.000Z"


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(FolderBucket(tmp_path))


@pytest.fixture
def cluster(inventory: Inventory, ledger: Ledger) -> ClusterClient:
    return ClusterClient(inventory, object(), ledger=ledger)  # type: ignore[arg-type]


def facts(shown: str) -> dict[str, str]:
    """Return the first part of a description."""
    lines = shown.partition("\n\n")[0].splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def rows(shown: str, head: str) -> list[list[str]]:
    """Return the table that begins with this head, without it."""
    (part,) = [part for part in shown.split("\n\n") if part.startswith(head)]
    return [line.split() for line in part.splitlines()[1:]]


def test_the_jobs_are_listed_and_the_unreadable_are_named(
    cluster: ClusterClient, ledger: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    assert jobs(cluster, None, None, as_json=False) == 0
    assert capsys.readouterr().err == "no job was started on this cluster yet: fab train\n"
    for n, state in enumerate((JobState.FAILED, JobState.QUEUED)):
        record = JobRecord(f"job0{n}", state, createTime=NOON.format(n), submittedBy="ann@laptop", labels={"a": "b"})
        put_job(ledger, replace(record, errorMessage="out of memory\nmore" if record.final else ""))
    ledger.store.create(paths.job("torn"), b'{"jobId": "to')
    ledger.store.create(paths.job("newer"), b'{"schema": 9, "jobId": "newer"}')
    assert jobs(cluster, None, None, as_json=False) == 0
    out, err = capsys.readouterr()
    listed = [line.split() for line in out.splitlines()[1:]]
    assert [(row[0], row[1]) for row in listed] == [("job01", "QUEUED"), ("job00", "FAILED")]
    assert listed[1][-3:] == ["out", "of", "memory"]
    newer, torn = err.splitlines()
    assert torn.startswith("not shown: torn: job.json is no JSON: ")
    assert newer == (
        "not shown: newer: job.json was written by a newer scaletier (schema 9, this one reads 4): bring this one up to date"
    )
    assert jobs(cluster, None, None, as_json=True) == 0
    out, err = capsys.readouterr()
    assert [job["jobId"] for job in json.loads(out)] == ["job01", "job00"]
    assert len(err.splitlines()) == 2


@pytest.mark.parametrize(
    ("wanted", "limit", "ids"),
    [
        (None, "2", ["job03", "job02"]),
        ("state=failed", None, ["job02", "job00"]),
        ("state=FAILED,owner=ann", None, ["job02"]),
        ("by=bob", None, ["job03", "job01"]),
        ("by=bob@desk", "1", ["job03"]),
        ("job0,by=ann", None, ["job02", "job00"]),
        ("b02", None, ["job02"]),
        ("owner=nobody", None, []),
    ],
)
def test_the_jobs_that_are_wanted(
    cluster: ClusterClient,
    ledger: Ledger,
    capsys: pytest.CaptureFixture[str],
    wanted: str | None,
    limit: str | None,
    ids: list[str],
) -> None:
    for n in range(4):
        state = JobState.QUEUED if n % 2 else JobState.FAILED
        by, labels = ("bob@desk", "ann@laptop")[n % 2 == 0], {"owner": "ann"} if n > 1 else {}
        put_job(ledger, JobRecord(f"job0{n}", state, createTime=NOON.format(n), submittedBy=by, labels=labels))
    assert jobs(cluster, wanted, limit, as_json=True) == 0
    assert [job["jobId"] for job in json.loads(capsys.readouterr().out)] == ids
    assert jobs(cluster, wanted, limit, as_json=False) == 0
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()[1:]] == ids
    assert err == ("" if ids else "none of 4 jobs is owner=nobody\n")


@pytest.mark.parametrize(
    ("wanted", "limit", "says"),
    [
        ("state=FALED", None, "CANCELLED; did you mean FAILED?"),
        (None, "0", "--limit '0' is invalid. Valid: 1 and above"),
        (None, "few", "--limit 'few' is invalid"),
    ],
)
def test_a_wish_that_is_none(cluster: ClusterClient, wanted: str | None, limit: str | None, says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        jobs(cluster, wanted, limit, as_json=False)


def test_the_newest_job_is_described_where_none_is_named(
    cluster: ClusterClient, ledger: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match="no job has run on this cluster yet: start one with fab train"):
        describe(cluster, None, as_json=False)
    for n in range(2):
        put_job(ledger, JobRecord(f"job0{n}", JobState.FAILED, createTime=NOON.format(n)))
    assert describe(cluster, None, as_json=False) == 0
    out, err = capsys.readouterr()
    assert facts(out)["job"] == "job01"
    assert err == "fab bundle job01 collects the evidence in one file\n"
    put_job(ledger, JobRecord("job01", JobState.CANCELLED, createTime=NOON.format(1)))
    assert describe(cluster, None, as_json=False) == 0
    assert capsys.readouterr().err == ""
    with pytest.raises(UsageError, match=r"there is no job .jb01.; did you mean job01[?]; fab jobs lists job01, job00"):
        describe(cluster, "jb01", as_json=False)


def test_a_job_that_was_started_again(cluster: ClusterClient, ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    record = JobRecord(
        "job01",
        JobState.RUNNING,
        hosts=["master-0", "worker-0", "worker-1"],
        priority=3,
        startTime=NOON.format(1),
        attempt=1,
        droppedReplicas=["worker-1"],
        events=[Event(NOON.format(7), "worker-1 is lost; the job goes on without it"), Event(NOON.format(3), "oom", 12.5)],
        replicas=[{"name": "worker-1", "state": "LOST"}],
        submittedBy="ann@laptop",
        trainingInput={"args": ["--a", "b c"]},
    )
    put_job(ledger, record)
    killed = Event(NOON.format(5), "killed by signal 9", 3.2)
    running = ReplicaRecord("worker-0", ReplicaState.RUNNING, starts=8, restarts=1, startTime=NOON.format(2), events=[killed])
    running = replace(running, lastStartTime=NOON.format(6))
    ledger.write_replica("job01", running, None)
    assert describe(cluster, "job01", as_json=False) == 0
    out = capsys.readouterr().out
    shown = facts(out)
    assert (shown["state"], shown["retries"], shown["goes on without"], shown["priority"]) == ("RUNNING", "1", "worker-1", "3")
    assert shown["args"] == "--a 'b c'"
    assert [row[:5] for row in rows(out, "REPLICA")] == [
        ["master-0", "master-0", "PREPARING", "-", "0"],
        ["worker-0", "worker-0", "RUNNING", "-", "8"],
        ["worker-1", "worker-1", "LOST", "-", "0"],
    ]
    assert rows(out, "REPLICA")[1][5:7] == terminal.local_time(NOON.format(6)).split()
    told = [(row[2], " ".join(row[3:-1]), row[-1]) for row in rows(out, "TIME")]
    assert told == [
        ("job", "oom", "12.5"),
        ("worker-0", "killed by signal 9", "3.2"),
        ("job", "worker-1 is lost; the job goes on without it", "-"),
    ]
    assert rows(out, "TIME")[0][:2] == terminal.local_time(NOON.format(3)).split()


def test_only_what_runs_is_heard_of(
    cluster: ClusterClient, ledger: Ledger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_module, "seconds_between", lambda *_: 2.5)
    running = JobRecord("job01", JobState.RUNNING, hosts=["master-0", "worker-0", "worker-1"], startTime=NOON.format(0))
    put_job(ledger, running)
    heard = ReplicaRecord("master-0", ReplicaState.RUNNING, heartbeatTime=NOON.format(1), incarnation="a")
    for record in (
        heard,
        replace(heard, name="worker-0", state=ReplicaState.EXITED),
        replace(heard, name="worker-1", incarnation=""),
    ):
        ledger.write_replica("job01", record, None)
    assert describe(cluster, "job01", as_json=False) == 0
    assert [" ".join(row[6:]) for row in rows(capsys.readouterr().out, "REPLICA")] == ["2.5 s ago", "-", "-"]
    put_job(ledger, running.to(JobState.CANCELLING).to(JobState.CANCELLED))
    assert describe(cluster, "job01", as_json=False) == 0
    assert [row[-1] for row in rows(capsys.readouterr().out, "REPLICA")] == ["-", "-", "-"]


def test_a_job_that_waits_says_for_whom(cluster: ClusterClient, ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    host = ["master-0"]
    put_job(ledger, JobRecord("job03", hosts=host))
    waiting = [QueueEntry("job02", host, priority=2), QueueEntry("job03", host)]
    ledger.change_queue(lambda _: Queue([QueueEntry("job01", host, held=True), *waiting]))
    describe(cluster, "job03", as_json=False)
    shown = facts(capsys.readouterr().out)
    assert shown["state"] == "QUEUED behind job01, job02"
    assert "priority" not in shown
    assert "retries" not in shown
    ledger.change_queue(lambda _: Queue([QueueEntry("job03", host, held=True)]))
    describe(cluster, "job03", as_json=False)
    assert facts(capsys.readouterr().out)["state"] == "QUEUED"


def test_a_job_that_failed_says_why(cluster: ClusterClient, ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    running = JobRecord("job01", JobState.RUNNING, hosts=["master-0"], startTime=NOON.format(0))
    put_job(ledger, running.to(JobState.FAILED, endTime=NOON.format(9), errorMessage="out of memory\nlast lines\n"))
    error = FirstError(NOON.format(5), "ValueError: \x1b[2Jbad")
    ledger.write_replica("job01", ReplicaRecord("master-0", ReplicaState.EXITED, exitCode=137, firstError=error), None)
    describe(cluster, "job01", as_json=False)
    out = capsys.readouterr().out
    assert facts(out)["took"] == "9.0 s"
    assert facts(out)["first error"].endswith(":05: ValueError: ␛[2Jbad")
    assert facts(out)["first error"].startswith("master-0, ")
    assert out.endswith("\n\nout of memory\nlast lines\n")
    assert rows(out, "REPLICA") == [["master-0", "master-0", "EXITED", "137", "0", "-", "-"]]
    describe(cluster, "job01", as_json=True)
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert JobRecord.from_dict({**shown, "replicas": []}).errorMessage == "out of memory\nlast lines\n"
    assert [(r["name"], r["exitCode"]) for r in shown["replicas"]] == [("master-0", 137)]
    assert shown["firstError"] == {"replica": "master-0", "time": NOON.format(5), "message": "ValueError: \x1b[2Jbad"}


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.CANCELLING, JobState.CANCELLED])
def test_a_job_that_did_not_fail_has_no_first_error(
    cluster: ClusterClient, ledger: Ledger, capsys: pytest.CaptureFixture[str], state: JobState
) -> None:
    put_job(ledger, JobRecord("job01", state, hosts=["master-0"]))
    error = FirstError(NOON.format(5), "KeyboardInterrupt")
    ledger.write_replica("job01", ReplicaRecord("master-0", ReplicaState.EXITED, firstError=error), None)
    describe(cluster, "job01", as_json=False)
    assert "first error" not in facts(capsys.readouterr().out)
    describe(cluster, "job01", as_json=True)
    assert "firstError" not in json.loads(capsys.readouterr().out)


def test_hosts_and_which_of_them_answer(served: Inventory, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Fleet:
        def each(self, names: Any, work: Any, seconds: float) -> Outcome[CommandResult]:
            gone = {"ps-0": HostError("ps-0", "does not answer")}
            return Outcome({name: work(name) for name in names if name not in gone}, gone)

        def run(self, name: str, command: str) -> CommandResult:
            unit = "scaletier-serving.service" if name.startswith("serving") else "scaletier.service"
            assert command == f"systemctl is-active {unit}"
            return CommandResult(name, 3, "inactive\n")

    ledger = Ledger(FolderBucket(tmp_path))
    part = QueueEntry("one", [], candidates={"master-0": ["worker-1", "master-0"]})
    ledger.change_queue(lambda queue: queue.added(part).added(QueueEntry("waits", ["worker-1"])))
    cluster = ClusterClient(served, Fleet(), ledger=ledger)  # type: ignore[arg-type]
    assert hosts(cluster, as_json=False) == 0
    out, err = capsys.readouterr()
    listed = {line.split()[0]: line for line in out.splitlines()[1:]}
    assert "no answer" in listed["ps-0"]
    assert listed["master-0"].split()[-4:] == ["answers", "inactive", "-", "-"]
    assert listed["serving-1"].split()[-4:] == ["answers", "inactive", "-", "-"]
    assert listed["worker-1"].split()[-4:] == ["answers", "inactive", "one", "master-0"]
    assert err.splitlines()[-1] == "ps-0 does not answer"
    assert hosts(cluster, as_json=True) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [(host["name"], host["answers"]) for host in shown["hosts"]][:2] == [("ps-0", False), ("master-0", True)]
    assert [(host["job"], host["replica"]) for host in shown["hosts"]][2:4] == [(None, None), ("one", "master-0")]


def test_hosts_of_which_none_answers(inventory: Inventory, capsys: pytest.CaptureFixture[str]) -> None:
    class Fleet:
        def each(self, names: Any, work: Any, seconds: float) -> Outcome[CommandResult]:
            return Outcome({}, {name: HostError(name, "does not answer") for name in names})

    for as_json in (False, True):
        assert hosts(ClusterClient(inventory, Fleet()), as_json) == 1  # type: ignore[arg-type]
        assert "ps-0" in capsys.readouterr().out


@pytest.mark.parametrize("empty", [True, False])
def test_what_a_job_wrote_beside_its_output_is_described(
    cluster: ClusterClient, ledger: Ledger, capsys: pytest.CaptureFixture[str], empty: bool
) -> None:
    put_job(ledger, JobRecord("job01", JobState.SUCCEEDED, hosts=["master-0", "worker-0"]))
    left = UnsavedFiles(True, ["model/a"], 3, 9, ["big (2.1 GB)"], 1, "it took too long") if empty else UnsavedFiles()
    for name, found in (("master-0", UnsavedFiles(jobDirEmpty=empty)), ("worker-0", left)):
        record = ReplicaRecord(name, ReplicaState.EXITED, startTime=NOON.format(1), unsaved=found)
        ledger.write_replica("job01", record, None)
    assert describe(cluster, "job01", as_json=False) == 0
    out = capsys.readouterr().out
    assert facts(out).get("output") == ("the job wrote nothing to JOB_DIR" if empty else None)
    kept, more = "kept in JOB_DIR/left/worker-0: model/a and 2 more", "not kept: big (2.1 GB); it took too long"
    assert (f"worker-0 wrote beside JOB_DIR, {kept}; {more}" in out.splitlines()) is empty


def test_progress_is_shown(cluster: ClusterClient, ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    progress = JobProgress(348, 5000, 200.4, 23.21, 0.7291234, {"accuracy": 0.834}, NOON.format(0))
    put_job(ledger, JobRecord("job01", JobState.RUNNING, progress=progress))
    assert describe(cluster, None, as_json=False) == 0
    shown = facts(capsys.readouterr().out)
    assert shown["progress"] == "step 348 of 5000 (6 %), 200.4 steps/s, 23.2 s left"
    assert shown["metrics"] == "loss 0.7291, accuracy 0.834"
    put_job(ledger, JobRecord("job02", JobState.SUCCEEDED, startTime=NOON.format(1), progress=JobProgress(9)))
    assert describe(cluster, "job02", as_json=False) == 0
    shown = facts(capsys.readouterr().out)
    assert (shown["progress"], "metrics" in shown) == ("step 9", False)
    for read in (lambda: describe(cluster, "job01", True), lambda: jobs(cluster, "job01", None, True)):
        assert read() == 0
        told = json.loads(capsys.readouterr().out)
        assert (told[0] if isinstance(told, list) else told)["progress"]["step"] == 348


@pytest.mark.parametrize(
    ("told", "state", "shows"),
    [
        (Notification("POST https://x/…"), JobState.RUNNING, "POST https://x/… when it ends"),
        (Notification("POST https://x/…"), JobState.CANCELLED, "POST https://x/… is not reported yet"),
        (
            Notification("command ./a …", NOON.format(1), 1, "it exited with status 1"),
            JobState.FAILED,
            "failed: it exited with",
        ),
        (Notification("POST https://x/…", NOON.format(1), 3, "timed out"), JobState.FAILED, "failed: timed out (3 attempts)"),
        (
            Notification("POST https://x/…", NOON.format(1), 2),
            JobState.SUCCEEDED,
            f"{terminal.local_time(NOON.format(1))} (2",
        ),
    ],
)
def test_what_became_of_the_report_is_shown(
    cluster: ClusterClient, ledger: Ledger, capsys: pytest.CaptureFixture[str], told: Notification, state: JobState, shows: str
) -> None:
    put_job(ledger, JobRecord("job01", state, notification=told))
    assert describe(cluster, "job01", as_json=False) == 0
    shown = facts(capsys.readouterr().out)["notify"]
    assert shown.startswith(told.target)
    assert shows in shown
