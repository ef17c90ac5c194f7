"""Check `fab jobs` and `fab describe`: for jobs that are running, queued, restarted, or unreadable."""

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


def parse_facts(text: str) -> dict[str, str]:
    """Return the first part of a description."""
    lines = text.partition("\n\n")[0].splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def table_rows(text: str, head: str) -> list[list[str]]:
    """Return the rows of the table that begins with this head."""
    (part,) = [part for part in text.split("\n\n") if part.startswith(head)]
    return [line.split() for line in part.splitlines()[1:]]


def test_jobs_are_listed_and_unreadable_ones_are_named(
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
    table = [line.split() for line in out.splitlines()[1:]]
    assert [(row[0], row[1]) for row in table] == [("job01", "QUEUED"), ("job00", "FAILED")]
    assert table[1][-3:] == ["out", "of", "memory"]
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
    ("job_filter", "limit", "ids"),
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
def test_jobs_are_filtered(
    cluster: ClusterClient,
    ledger: Ledger,
    capsys: pytest.CaptureFixture[str],
    job_filter: str | None,
    limit: str | None,
    ids: list[str],
) -> None:
    for n in range(4):
        state = JobState.QUEUED if n % 2 else JobState.FAILED
        by, labels = ("bob@desk", "ann@laptop")[n % 2 == 0], {"owner": "ann"} if n > 1 else {}
        put_job(ledger, JobRecord(f"job0{n}", state, createTime=NOON.format(n), submittedBy=by, labels=labels))
    assert jobs(cluster, job_filter, limit, as_json=True) == 0
    assert [job["jobId"] for job in json.loads(capsys.readouterr().out)] == ids
    assert jobs(cluster, job_filter, limit, as_json=False) == 0
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()[1:]] == ids
    assert err == ("" if ids else "none of 4 jobs is owner=nobody\n")


@pytest.mark.parametrize(
    ("job_filter", "limit", "message"),
    [
        ("state=FALED", None, "CANCELLED; did you mean FAILED?"),
        (None, "0", "--limit '0' is invalid. Valid: 1 and above"),
        (None, "few", "--limit 'few' is invalid"),
    ],
)
def test_an_invalid_filter_is_refused(cluster: ClusterClient, job_filter: str | None, limit: str | None, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        jobs(cluster, job_filter, limit, as_json=False)


def test_the_newest_job_is_described_by_default(
    cluster: ClusterClient, ledger: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match="no job has run on this cluster yet: start one with fab train"):
        describe(cluster, None, as_json=False)
    for n in range(2):
        put_job(ledger, JobRecord(f"job0{n}", JobState.FAILED, createTime=NOON.format(n)))
    assert describe(cluster, None, as_json=False) == 0
    out, err = capsys.readouterr()
    assert parse_facts(out)["job"] == "job01"
    assert err == "fab bundle job01 collects the evidence in one file\n"
    put_job(ledger, JobRecord("job01", JobState.CANCELLED, createTime=NOON.format(1)))
    assert describe(cluster, None, as_json=False) == 0
    assert capsys.readouterr().err == ""
    with pytest.raises(UsageError, match=r"there is no job .jb01.; did you mean job01[?]; fab jobs lists job01, job00"):
        describe(cluster, "jb01", as_json=False)


def test_a_restarted_job_is_described(cluster: ClusterClient, ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    record = JobRecord(
        "job01",
        JobState.RUNNING,
        hosts=["master-0", "worker-0", "worker-1"],
        priority=3,
        startTime=NOON.format(1),
        attempt=1,
        droppedReplicas=["worker-1"],
        events=[Event(NOON.format(7), "worker-1 is lost; the job continues without it"), Event(NOON.format(3), "oom", 12.5)],
        replicas=[{"name": "worker-1", "state": "LOST"}],
        submittedBy="ann@laptop",
        trainingInput={"args": ["--a", "b c"]},
    )
    put_job(ledger, record)
    event = Event(NOON.format(5), "killed by signal 9", 3.2)
    running = ReplicaRecord("worker-0", ReplicaState.RUNNING, starts=8, restarts=1, startTime=NOON.format(2), events=[event])
    running = replace(running, lastStartTime=NOON.format(6))
    ledger.write_replica("job01", running, None)
    assert describe(cluster, "job01", as_json=False) == 0
    out = capsys.readouterr().out
    output = parse_facts(out)
    assert (output["state"], output["retries"], output["continues without"], output["priority"]) == (
        "RUNNING",
        "1",
        "worker-1",
        "3",
    )
    assert output["args"] == "--a 'b c'"
    assert [row[:5] for row in table_rows(out, "REPLICA")] == [
        ["master-0", "master-0", "PREPARING", "-", "0"],
        ["worker-0", "worker-0", "RUNNING", "-", "8"],
        ["worker-1", "worker-1", "LOST", "-", "0"],
    ]
    assert table_rows(out, "REPLICA")[1][5:7] == terminal.local_time(NOON.format(6)).split()
    events = [(row[2], " ".join(row[3:-1]), row[-1]) for row in table_rows(out, "TIME")]
    assert events == [
        ("job", "oom", "12.5"),
        ("worker-0", "killed by signal 9", "3.2"),
        ("job", "worker-1 is lost; the job continues without it", "-"),
    ]
    assert table_rows(out, "TIME")[0][:2] == terminal.local_time(NOON.format(3)).split()


def test_only_running_replicas_have_a_report_age(
    cluster: ClusterClient, ledger: Ledger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_module, "seconds_between", lambda *_: 2.5)
    running = JobRecord("job01", JobState.RUNNING, hosts=["master-0", "worker-0", "worker-1"], startTime=NOON.format(0))
    put_job(ledger, running)
    running_replica = ReplicaRecord("master-0", ReplicaState.RUNNING, heartbeatTime=NOON.format(1), incarnation="a")
    for record in (
        running_replica,
        replace(running_replica, name="worker-0", state=ReplicaState.EXITED),
        replace(running_replica, name="worker-1", incarnation=""),
    ):
        ledger.write_replica("job01", record, None)
    assert describe(cluster, "job01", as_json=False) == 0
    assert [" ".join(row[6:]) for row in table_rows(capsys.readouterr().out, "REPLICA")] == ["2.5 s ago", "-", "-"]
    put_job(ledger, running.to(JobState.CANCELLING).to(JobState.CANCELLED))
    assert describe(cluster, "job01", as_json=False) == 0
    assert [row[-1] for row in table_rows(capsys.readouterr().out, "REPLICA")] == ["-", "-", "-"]


def test_a_queued_job_lists_the_jobs_ahead(cluster: ClusterClient, ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    host = ["master-0"]
    put_job(ledger, JobRecord("job03", hosts=host))
    waiting = [QueueEntry("job02", host, priority=2), QueueEntry("job03", host)]
    ledger.change_queue(lambda _: Queue([QueueEntry("job01", host, held=True), *waiting]))
    describe(cluster, "job03", as_json=False)
    output = parse_facts(capsys.readouterr().out)
    assert output["state"] == "QUEUED behind job01, job02"
    assert "priority" not in output
    assert "retries" not in output
    ledger.change_queue(lambda _: Queue([QueueEntry("job03", host, held=True)]))
    describe(cluster, "job03", as_json=False)
    assert parse_facts(capsys.readouterr().out)["state"] == "QUEUED"


def test_a_failed_job_shows_its_error(cluster: ClusterClient, ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    running = JobRecord("job01", JobState.RUNNING, hosts=["master-0"], startTime=NOON.format(0))
    put_job(ledger, running.to(JobState.FAILED, endTime=NOON.format(9), errorMessage="out of memory\nlast lines\n"))
    error = FirstError(NOON.format(5), "ValueError: \x1b[2Jbad")
    ledger.write_replica("job01", ReplicaRecord("master-0", ReplicaState.EXITED, exitCode=137, firstError=error), None)
    describe(cluster, "job01", as_json=False)
    out = capsys.readouterr().out
    assert parse_facts(out)["took"] == "9.0 s"
    assert parse_facts(out)["first error"].endswith(":05: ValueError: ␛[2Jbad")
    assert parse_facts(out)["first error"].startswith("master-0, ")
    assert out.endswith("\n\nout of memory\nlast lines\n")
    assert table_rows(out, "REPLICA") == [["master-0", "master-0", "EXITED", "137", "0", "-", "-"]]
    describe(cluster, "job01", as_json=True)
    output: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert JobRecord.from_dict({**output, "replicas": []}).errorMessage == "out of memory\nlast lines\n"
    assert [(r["name"], r["exitCode"]) for r in output["replicas"]] == [("master-0", 137)]
    assert output["firstError"] == {"replica": "master-0", "time": NOON.format(5), "message": "ValueError: \x1b[2Jbad"}


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.CANCELLING, JobState.CANCELLED])
def test_a_job_that_did_not_fail_has_no_first_error(
    cluster: ClusterClient, ledger: Ledger, capsys: pytest.CaptureFixture[str], state: JobState
) -> None:
    put_job(ledger, JobRecord("job01", state, hosts=["master-0"]))
    error = FirstError(NOON.format(5), "KeyboardInterrupt")
    ledger.write_replica("job01", ReplicaRecord("master-0", ReplicaState.EXITED, firstError=error), None)
    describe(cluster, "job01", as_json=False)
    assert "first error" not in parse_facts(capsys.readouterr().out)
    describe(cluster, "job01", as_json=True)
    assert "firstError" not in json.loads(capsys.readouterr().out)


def test_hosts_and_their_answers_are_listed(served: Inventory, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Fleet:
        def each(self, names: Any, work: Any, seconds: float) -> Outcome[CommandResult]:
            unreachable = {"ps-0": HostError("ps-0", "does not answer")}
            return Outcome({name: work(name) for name in names if name not in unreachable}, unreachable)

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
    row_by_host = {line.split()[0]: line for line in out.splitlines()[1:]}
    assert "no answer" in row_by_host["ps-0"]
    assert row_by_host["master-0"].split()[-4:] == ["answers", "inactive", "-", "-"]
    assert row_by_host["serving-1"].split()[-4:] == ["answers", "inactive", "-", "-"]
    assert row_by_host["worker-1"].split()[-4:] == ["answers", "inactive", "one", "master-0"]
    assert err.splitlines()[-1] == "ps-0 does not answer"
    assert hosts(cluster, as_json=True) == 0
    output = json.loads(capsys.readouterr().out)
    assert [(host["name"], host["answers"]) for host in output["hosts"]][:2] == [("ps-0", False), ("master-0", True)]
    assert [(host["job"], host["replica"]) for host in output["hosts"]][2:4] == [(None, None), ("one", "master-0")]


def test_unreachable_hosts_are_listed_with_exit_code_1(inventory: Inventory, capsys: pytest.CaptureFixture[str]) -> None:
    class Fleet:
        def each(self, names: Any, work: Any, seconds: float) -> Outcome[CommandResult]:
            return Outcome({}, {name: HostError(name, "does not answer") for name in names})

    for as_json in (False, True):
        assert hosts(ClusterClient(inventory, Fleet()), as_json) == 1  # type: ignore[arg-type]
        assert "ps-0" in capsys.readouterr().out


@pytest.mark.parametrize("empty", [True, False])
def test_files_outside_job_dir_are_described(
    cluster: ClusterClient, ledger: Ledger, capsys: pytest.CaptureFixture[str], empty: bool
) -> None:
    put_job(ledger, JobRecord("job01", JobState.SUCCEEDED, hosts=["master-0", "worker-0"]))
    unsaved = UnsavedFiles(True, ["model/a"], 3, 9, ["big (2.1 GB)"], 1, "it took too long") if empty else UnsavedFiles()
    for name, unsaved_files in (("master-0", UnsavedFiles(jobDirEmpty=empty)), ("worker-0", unsaved)):
        record = ReplicaRecord(name, ReplicaState.EXITED, startTime=NOON.format(1), unsaved=unsaved_files)
        ledger.write_replica("job01", record, None)
    assert describe(cluster, "job01", as_json=False) == 0
    out = capsys.readouterr().out
    assert parse_facts(out).get("output") == ("the job wrote nothing to JOB_DIR" if empty else None)
    saved_text, unsaved_text = "kept in JOB_DIR/left/worker-0: model/a and 2 more", "not kept: big (2.1 GB); it took too long"
    assert (f"worker-0 wrote beside JOB_DIR, {saved_text}; {unsaved_text}" in out.splitlines()) is empty


def test_progress_is_shown(cluster: ClusterClient, ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    progress = JobProgress(348, 5000, 200.4, 23.21, 0.7291234, {"accuracy": 0.834}, NOON.format(0))
    put_job(ledger, JobRecord("job01", JobState.RUNNING, progress=progress))
    assert describe(cluster, None, as_json=False) == 0
    output = parse_facts(capsys.readouterr().out)
    assert output["progress"] == "step 348 of 5000 (6 %), 200.4 steps/s, 23.2 s left"
    assert output["metrics"] == "loss 0.7291, accuracy 0.834"
    put_job(ledger, JobRecord("job02", JobState.SUCCEEDED, startTime=NOON.format(1), progress=JobProgress(9)))
    assert describe(cluster, "job02", as_json=False) == 0
    output = parse_facts(capsys.readouterr().out)
    assert (output["progress"], "metrics" in output) == ("step 9", False)
    for read in (lambda: describe(cluster, "job01", True), lambda: jobs(cluster, "job01", None, True)):
        assert read() == 0
        data = json.loads(capsys.readouterr().out)
        assert (data[0] if isinstance(data, list) else data)["progress"]["step"] == 348


@pytest.mark.parametrize(
    ("notification", "state", "expected"),
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
def test_the_notification_is_shown(
    cluster: ClusterClient,
    ledger: Ledger,
    capsys: pytest.CaptureFixture[str],
    notification: Notification,
    state: JobState,
    expected: str,
) -> None:
    put_job(ledger, JobRecord("job01", state, notification=notification))
    assert describe(cluster, "job01", as_json=False) == 0
    output = parse_facts(capsys.readouterr().out)["notify"]
    assert output.startswith(notification.target)
    assert expected in output
