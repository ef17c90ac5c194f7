"""Check the Python client: what it returns, and that each failure is one class of errors and one line."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from opsdata import put_job
from shared_fakes import Clock

import fabfile
from jobs.bucket import BucketError, Conflict
from jobs.chunks import LogFilter
from jobs.firsterror import FirstError
from jobs.ledger import Ledger
from jobs.progress import JobProgress
from jobs.queue import QueueEntry
from jobs.queue_monitor import QueueMonitor
from jobs.records import JobRecord, Plan, ReplicaRecord
from jobs.serialization import RecordError
from jobs.states import JobState, ReplicaState
from ops import client as module
from ops.client import Client
from ops.cluster.cluster import ClusterClient
from ops.errors import OpsError, UsageError
from ops.logs import read
from ops.logs.follow import Note
from ops.logs.lines import LogLine
from ops.submit import submit, train
from ops.submit.submit import Submission

DOCS = Path(__file__).resolve().parents[2] / "docs" / "python.md"
LINES = [LogLine(f"2026-01-31T12:00:0{n}.000Z", "INFO", "master-0", f"line {n}") for n in range(3)]


def test_get_returns_a_job_with_its_replicas(cluster: ClusterClient, ledger: Ledger) -> None:
    progress = JobProgress(5, 10)
    record = JobRecord(
        "job01", JobState.FAILED, candidates={"master-0": ["master-0"]}, errorMessage="why\nmore", progress=progress
    )
    put_job(ledger, record)
    error = FirstError("2026-01-31T12:00:00.000Z", "ValueError: x")
    ledger.write_replica("job01", ReplicaRecord("master-0", ReplicaState.EXITED, 1, firstError=error), None)
    job = Client(cluster).get()
    assert (job.id, job.state, job.ended, job.error, job.progress) == ("job01", JobState.FAILED, True, "why", progress)
    assert [(replica.name, replica.exitCode) for replica in job.replicas] == [("master-0", 1)]
    data = job.to_dict()
    assert (data["state"], data["replicas"][0]["exitCode"]) == ("FAILED", 1)
    assert data["firstError"] == {"replica": "master-0", "time": error.time, "message": error.message}
    assert Client(cluster).wait("job01") == job
    put_job(ledger, JobRecord("job02", createTime="2999-01-31T12:00:00.000Z"))
    newest = Client(cluster).get()
    assert (newest.id, newest.ended, newest.error, newest.progress, newest.replicas) == ("job02", False, "", None, ())
    assert "firstError" not in newest.to_dict()


def test_wait_has_a_timeout(cluster: ClusterClient, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    put_job(ledger, JobRecord("job01", JobState.RUNNING))
    monkeypatch.setattr(module, "time", clock := Clock(0.0))
    with pytest.raises(OpsError, match=r"^job job01 is RUNNING after 5 s: wait again, or cancel it$"):
        Client(cluster).wait("job01", timeout=5)
    assert clock.now == 5.0


@pytest.mark.parametrize("state", [JobState.QUEUED, JobState.RUNNING])
def test_wait_ends_a_job_whose_hosts_are_all_gone(
    cluster: ClusterClient, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, state: JobState
) -> None:
    put_job(ledger, JobRecord("job01", state, hosts=["master-0"]))
    rules = {"lostAfterSeconds": 20.0, "maxWaitTime": 10.0, "preparingSeconds": 30.0}
    ledger.create_plan(Plan("job01", ["master-0"], "task", [], {}, **rules))
    ledger.change_queue(lambda queue: queue.added(QueueEntry("job01", ["master-0"])))
    monkeypatch.setattr(module, "time", Clock())
    job = Client(cluster).wait("job01", timeout=100)
    assert (job.state, ledger.queue().entries) == (JobState.FAILED, [])


def test_wait_outlasts_errors_of_the_queue(
    cluster: ClusterClient, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_job(ledger, JobRecord("job01", JobState.QUEUED))
    errors = [Conflict("queue"), RecordError("newer"), BucketError("away")]

    def fail_sometimes(_: QueueMonitor, job: JobRecord) -> None:
        if not errors:
            put_job(ledger, replace(job, state=JobState.SUCCEEDED))
            return
        raise errors.pop(0)

    monkeypatch.setattr(QueueMonitor, "run_for", fail_sometimes)
    monkeypatch.setattr(module, "time", Clock())
    assert Client(cluster).wait("job01", timeout=100).state is JobState.SUCCEEDED
    assert capsys.readouterr().err.count("the bucket does not answer (away)") == 1


@pytest.mark.parametrize("call", ["get", "wait", "cancel", "logs"])
def test_each_failure_is_one_class_and_one_line(
    cluster: ClusterClient, ledger: Ledger, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call_client(job_id: str) -> Any:
        result = getattr(Client(cluster), call)(job_id)
        return list(result) if call == "logs" else result

    with pytest.raises(UsageError, match=r"^there is no job 'nope'; none was started yet$") as error:
        call_client("nope")
    assert error.value.code == 2

    def fail(_: str) -> None:
        raise BucketError("the disk is away")

    monkeypatch.setattr(ledger.store, "read", fail)
    with pytest.raises(OpsError, match=r"^the bucket fails: the disk is away$") as failed:
        call_client("job01")
    assert failed.value.code == 1


def test_submit_passes_its_arguments(
    cluster: ClusterClient, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    submissions: list[tuple[Submission, bool]] = []

    def record_submission(_: ClusterClient, submission: Submission, queue: bool) -> list[Any]:
        submissions.append((submission, queue))
        put_job(ledger, JobRecord(submission.job.id))
        return []

    monkeypatch.setattr(submit, "submit", record_submission)
    monkeypatch.setattr(train, "check_hosts", lambda _, submission: submission)
    script = tmp_path / "mine.py"
    script.write_text("print(1)")
    job = Client(cluster).submit(
        "job01",
        script=str(script),
        args=["--rate", 0.5],  # type: ignore[list-item]
        labels={"owner": "ann", "run": "1"},
        env={"A": "b,c=d"},
        priority=3,
        notify="./done.sh",
        queue=False,
    )
    assert (job.id, job.state) == ("job01", JobState.QUEUED)
    ((submission, queue),) = submissions
    spec = submission.job
    assert (spec.args, spec.labels, spec.environment) == (("--rate", "0.5"), {"owner": "ann", "run": "1"}, {"A": "b,c=d"})
    assert (spec.priority, spec.notify, spec.start_hosts, queue) == (3, "./done.sh", False, False)
    Client(cluster).submit("job02", script=str(script), start_hosts=True)
    assert (submissions[1][0].job.priority, submissions[1][0].job.start_hosts, submissions[1][1]) == (0, True, True)
    entry = QueueEntry("job01", [])
    monkeypatch.setattr(submit, "submit", lambda _, *args: [entry] if args == (submission, True) else [])
    assert Client(cluster).start(submission) == [entry]
    with pytest.raises(UsageError, match=r"^there is no job 'gone'; "):
        Client(cluster).submit("job03", script=str(script), resume="gone")
    with pytest.raises(UsageError, match="job id '1' breaks the rule"):
        Client(cluster).submit("1", script=str(script))
    with pytest.raises(UsageError, match=r"^--notify 'ftp://x' is invalid: its scheme is ftp. Valid: "):
        Client(cluster).submit("job03", script=str(script), notify="ftp://x")


def test_submit_has_the_flags_of_fab_train() -> None:
    flags = set(inspect.signature(fabfile.train.body.__wrapped__).parameters)
    cli_only = {"_", "job", "follow", "plain", "json", "dry_run", "env_file", "secret_file"}
    assert set(inspect.signature(Client.submit).parameters) - {"self", "job_id"} == flags - cli_only


def test_logs_are_read_and_followed(cluster: ClusterClient, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    put_job(ledger, JobRecord("job01", JobState.RUNNING, candidates={"master-0": ["master-0"]}))
    calls: list[Any] = []

    def read_logs(_: ClusterClient, record: JobRecord, names: list[str], log_filter: Any) -> dict[str, Any]:
        calls.append((record.jobId, names, log_filter.lines))
        return {"master-0": iter(LINES)}

    class Follower:
        def __init__(self, *args: Any) -> None:
            calls.append(args[3:])

        def events(self) -> Any:
            return iter([Note("x"), *LINES[1:], JobRecord("job01")])

    monkeypatch.setattr(read, "read_logs", read_logs)
    monkeypatch.setattr(module, "Follower", Follower)
    assert list(Client(cluster).logs("job01", "master", lines=5)) == LINES
    assert list(Client(cluster).logs("job01", follow=True)) == LINES[1:]
    assert calls == [("job01", ["master-0"], 5), (["master-0"], LogFilter(), False)]


def test_the_examples_compile() -> None:
    text = DOCS.read_text()
    examples = text.split("```python\n")[1:]
    assert examples
    for example in examples:
        compile(example.partition("```")[0], str(DOCS), "exec")
