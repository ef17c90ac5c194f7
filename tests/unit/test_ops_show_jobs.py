"""Check `fab jobs` and `fab describe`: for jobs that are running, queued, restarted, or unreadable."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from opsdata import put_job

from infra.inventory import Inventory
from jobs import paths
from jobs.firsterror import FirstError
from jobs.folder_bucket import FolderBucket
from jobs.ledger import Ledger
from jobs.notification import Notification
from jobs.progress import JobProgress
from jobs.queue import Queue, QueueEntry
from jobs.records import CancelRequest, Event, JobRecord, ReplicaRecord, UnsavedFiles
from jobs.states import JobState, ReplicaState
from jobs.study import Trial, TrialState
from ops import terminal
from ops.cluster.cluster import ClusterClient
from ops.cluster.fanout import Outcome
from ops.cluster.remote import CommandResult
from ops.errors import HostError, UsageError
from ops.show import jobs as jobs_module
from ops.show.hosts import hosts
from ops.show.jobs import describe, jobs

WITH_STATUS = ("name", "sshHost", "answers", "unit", "job", "replica")
NOON = "2026-01-31T12:00:0{}.000Z"


@pytest.fixture
def described(cluster: ClusterClient, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that returns the description of a job, by default the newest."""

    def describe_job(job_id: str | None = None) -> str:
        capsys.readouterr()
        assert describe(cluster, job_id, as_json=False) == 0
        return capsys.readouterr().out

    return describe_job


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
        ("state", None, []),
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
    assert err == ("" if ids else f"none of 4 jobs is {job_filter}\n")


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


def test_a_restarted_job_is_described(ledger: Ledger, described: Callable[..., str]) -> None:
    record = JobRecord(
        "job01",
        JobState.RUNNING,
        hosts=["worker-2", "worker-3", "worker-1"],
        candidates={name: [name] for name in ("master-0", "worker-0", "worker-1")},
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
    out = described("job01")
    output = parse_facts(out)
    facts = ("state", "retries", "continues without", "priority")
    assert [output[fact] for fact in facts] == ["RUNNING", "1", "worker-1", "3"]
    assert output["args"] == "--a 'b c'"
    assert [row[:5] for row in table_rows(out, "REPLICA")] == [
        ["master-0", "worker-2", "PREPARING", "-", "0"],
        ["worker-0", "worker-3", "RUNNING", "-", "8"],
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
    ledger: Ledger, described: Callable[..., str], monkeypatch: pytest.MonkeyPatch
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
    assert [" ".join(row[6:]) for row in table_rows(described("job01"), "REPLICA")] == ["2.5 s ago", "-", "-"]
    monkeypatch.setattr(jobs_module, "seconds_between", lambda *_: -1.0)  # by a clock that is ahead
    assert " ".join(table_rows(described("job01"), "REPLICA")[0][6:]) == "0.0 s ago"
    put_job(ledger, running.to(JobState.CANCELLING).to(JobState.CANCELLED))
    assert [row[-1] for row in table_rows(described("job01"), "REPLICA")] == ["-", "-", "-"]


def test_everything_of_a_cancelled_job_is_described(ledger: Ledger, described: Callable[..., str]) -> None:
    record = JobRecord(
        "job01",
        JobState.CANCELLED,
        hosts=["master-0"],
        createTime=NOON.format(0),
        startTime=NOON.format(1),
        endTime=NOON.format(9),
        submittedBy="ann@laptop",
        labels={"owner": "ann", "run": "1"},
        hourlyCost=1.0,
        cost=0.5,
        trainingInput={"args": ["--x", "a b"], "strategy": "sync", "note": None},
    )
    put_job(ledger, record)
    replica = ReplicaRecord("master-0", ReplicaState.EXITED, exitCode=0, starts=1, startTime=NOON.format(2))
    ledger.write_replica("job01", replica, None)
    created, started, ended, last = (terminal.local_time(NOON.format(n)) for n in (0, 1, 9, 2))

    def check(cancelled: str | None) -> None:
        assert described("job01").splitlines() == [
            "job:           job01",
            "state:         CANCELLED",
            f"created:       {created} by ann@laptop",
            f"started:       {started}",
            f"ended:         {ended}",
            *([f"cancelled:     {cancelled}"] if cancelled else []),
            "took:          8.0 s",
            "cost:          0.5000 USD",
            "labels:        owner=ann, run=1",
            "args:          --x 'a b'",
            "strategy:      sync",
            "note:          None",
            "",
            "REPLICA   HOST      STATE   EXIT CODE  STARTS  LAST START           HEARTBEAT",
            f"master-0  master-0  EXITED          0       1  {last}          -",
        ]

    check(None)
    request = CancelRequest("bob@desk", NOON.format(8))
    for content, expected in (
        (request.to_json(), "by bob@desk"),
        (replace(request, reason="too slow").to_json(), "by bob@desk: too slow"),
        (b"{", None),
    ):
        cast(FolderBucket, ledger.store).upload(paths.cancel("job01"), content)
        check(expected)
    put_job(ledger, replace(record, state=JobState.SUCCEEDED))
    assert "cancelled" not in parse_facts(described("job01"))


@pytest.mark.parametrize(
    ("state", "codes"),
    [(JobState.SUCCEEDED, ["0", "143 (stopped)"]), (JobState.FAILED, ["0", "143"])],
    ids=["SUCCEEDED", "FAILED"],
)
def test_replicas_that_a_success_has_stopped_are_named_so(
    ledger: Ledger, described: Callable[..., str], state: JobState, codes: list[str]
) -> None:
    put_job(ledger, JobRecord("job01", state, hosts=["master-0", "ps-0"]))
    for name, code in (("master-0", 0), ("ps-0", 143)):
        ledger.write_replica("job01", ReplicaRecord(name, ReplicaState.EXITED, exitCode=code), None)
    assert re.findall(r"EXITED +(\d+(?: \(\w+\))?)", described("job01")) == codes


def test_the_trials_of_a_tuning_job_are_described(
    cluster: ClusterClient, ledger: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    parameter = {"parameterName": "x", "type": "INTEGER", "minValue": 1, "maxValue": 9}
    tuned = {"params": [parameter], "maxTrials": 3, "hyperparameterMetricTag": "score"}
    put_job(ledger, JobRecord("job01", JobState.RUNNING, trainingInput={"hyperparameters": tuned}))
    ledger.create_trial("job01", Trial(1, {"x": "4"}, "master-0", state=TrialState.SUCCEEDED))
    assert describe(cluster, "job01", as_json=False) == 0
    out = capsys.readouterr().out
    facts = parse_facts(out)
    assert "hyperparameters" not in facts
    assert (facts["tunes"], facts["trials"]) == ("MAXIMIZE score over x from 1 to 9", "1 of 3 done")
    assert table_rows(out, "TRIAL")[0][:2] == ["1", "SUCCEEDED"]
    assert describe(cluster, "job01", as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["trainingOutput"]["completedTrialCount"] == 1


def test_a_queued_job_lists_the_jobs_ahead(ledger: Ledger, described: Callable[..., str]) -> None:
    host = ["master-0"]
    put_job(ledger, JobRecord("job03", hosts=host, createTime=NOON.format(3), submittedBy="ann@laptop"))
    waiting = [QueueEntry("job02", host, priority=2), QueueEntry("job03", host)]
    ledger.change_queue(lambda _: Queue([QueueEntry("job01", host, has_hosts=True), *waiting]))
    assert described("job03").splitlines() == [
        "job:           job03",
        "state:         QUEUED behind job01, job02",
        "waits for:     1 host, 0 free and reserved for it",
        f"created:       {terminal.local_time(NOON.format(3))} by ann@laptop",
    ]
    ledger.change_queue(lambda _: Queue([QueueEntry("job01", ["ps-0"], has_hosts=True), QueueEntry("job03", [*host, "ps-0"])]))
    assert parse_facts(described("job03"))["waits for"] == "1 host, 1 free and reserved for it"
    ledger.change_queue(lambda _: Queue([QueueEntry("job03", host, has_hosts=True)]))
    assert parse_facts(described("job03"))["state"] == "QUEUED"


def test_a_failed_job_shows_its_error(
    cluster: ClusterClient, ledger: Ledger, capsys: pytest.CaptureFixture[str], described: Callable[..., str]
) -> None:
    running = JobRecord("job01", JobState.RUNNING, hosts=["master-0"], startTime=NOON.format(0))
    put_job(ledger, running.to(JobState.FAILED, endTime=NOON.format(9), errorMessage="out of memory\nlast lines\n"))
    error = FirstError(NOON.format(5), "ValueError: \x1b[2Jbad")
    ledger.write_replica("job01", ReplicaRecord("master-0", ReplicaState.EXITED, exitCode=137, firstError=error), None)
    out = described("job01")
    assert parse_facts(out)["took"] == "9.0 s"
    assert re.fullmatch(r"master-0, .*:05: ValueError: ␛\[2Jbad", parse_facts(out)["first error"])
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


def test_hosts_and_their_answers_are_listed(
    served: Inventory, ledger: Ledger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Fleet:
        def each(self, names: Any, work: Any, seconds: float) -> Outcome[CommandResult]:
            unreachable = {"ps-0": HostError("ps-0", "does not answer")}
            return Outcome({name: work(name) for name in names if name not in unreachable}, unreachable)

        def run(self, name: str, command: str) -> CommandResult:
            unit = "scaletier-serving.service" if name.startswith("serving") else "scaletier.service"
            assert command == f"systemctl is-active {unit}"
            return CommandResult(name, 3, "inactive\n")

    part = QueueEntry("one", [], candidates={"master-0": ["worker-1", "master-0"]})
    ledger.change_queue(lambda queue: queue.added(part).added(QueueEntry("waits", ["worker-1"])))
    ledger.change_queue(lambda queue: queue.added(QueueEntry("wide", ["worker-1", "evaluator-0"])))
    accelerators = {"worker-0": {"count": 2, "type": "T4"}, "worker-1": {"type": "T4"}}
    served = replace(served, hosts=tuple(replace(host, accelerator=accelerators.get(host.name)) for host in served.hosts))
    cluster = ClusterClient(served, Fleet(), ledger=ledger)  # type: ignore[arg-type]
    assert hosts(cluster, as_json=False) == 0
    out, err = capsys.readouterr()
    assert [re.split(r"  +", line) for line in out.splitlines()] == [
        ["HOST", "ADDRESS", "MACHINE TYPE", "CPUS", "MEMORY", "ACCELERATOR", "SSH", "UNIT", "JOB", "REPLICA"],
        ["ps-0", "10.0.0.32", "n1-standard-4", "1", "2.0 GB", "-", "no answer", "-", "-", "-"],
        ["master-0", "10.0.0.2", "n1-highcpu-8", "1", "2.0 GB", "-", "answers", "inactive", "-", "-"],
        ["worker-0", "10.0.0.64", "n1-highcpu-8", "1", "2.0 GB", "2 x T4", "answers", "inactive", "-", "-"],
        ["worker-1", "10.0.0.65", "n1-highcpu-8", "1", "2.0 GB", "1 x T4", "answers", "inactive", "one", "master-0"],
        ["evaluator-0", "10.0.0.96", "n1-highcpu-8", "1", "2.0 GB", "-", "answers", "inactive", "reserved for wide", "-"],
        ["serving-0", "10.0.0.192", "n1-highcpu-8", "1", "2.0 GB", "-", "answers", "inactive", "-", "-"],
        ["serving-1", "10.0.0.193", "n1-highcpu-8", "1", "2.0 GB", "-", "answers", "inactive", "-", "-"],
    ]
    assert err.splitlines() == ["stack test, scaleTier CUSTOM, bucket /bucket", "ps-0 does not answer"]
    assert hosts(cluster, as_json=True) == 0
    output = json.loads(capsys.readouterr().out)
    assert (output["stack"], output["scaleTier"], output["bucket"], len(output["hosts"])) == ("test", "CUSTOM", "/bucket", 7)
    silent, answering = ({key: host.get(key) for key in WITH_STATUS} for host in output["hosts"][:4:3])
    assert silent == {"name": "ps-0", "sshHost": None, "answers": False, "unit": None, "job": None, "replica": None}
    assert list(answering.values()) == ["worker-1", None, True, "inactive", "one", "master-0"]
    assert [(host["job"], host["replica"], host["reservedFor"]) for host in output["hosts"][3:5]] == [
        ("one", "master-0", None),
        (None, None, "wide"),
    ]
    (tmp_path / paths.QUEUE).write_bytes(b'{"schema": 99}')
    assert hosts(cluster, as_json=False) == 0
    out, err = capsys.readouterr()
    assert [line.split()[-2:] for line in out.splitlines()[1:]] == [["-", "-"]] * 7
    assert err.splitlines()[0].startswith("which job has which host cannot be read: the queue was written by a newer ")


def test_unreachable_hosts_are_listed_with_exit_code_1(
    inventory: Inventory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Fleet:
        def each(self, names: Any, work: Any, seconds: float) -> Outcome[CommandResult]:
            return Outcome({}, {name: HostError(name, "does not answer") for name in names})

    for as_json in (False, True):
        assert hosts(ClusterClient(inventory, Fleet()), as_json) == 1  # type: ignore[arg-type]
        assert "ps-0" in capsys.readouterr().out
    cluster = ClusterClient(replace(inventory, operator_bucket=str(tmp_path)), Fleet())  # type: ignore[arg-type]
    cluster.ledger.change_queue(lambda queue: queue.added(QueueEntry("runs", ["ps-0"])))
    assert hosts(cluster, as_json=False) == 1
    listed = {line.split()[0]: line.split()[-4:] for line in capsys.readouterr().out.splitlines()}
    assert listed["ps-0"] == ["answer", "-", "runs", "ps-0"]


@pytest.mark.parametrize(
    ("reports", "expected"),
    [([True, True], True), ([True, None], True), ([True, False], False), ([None, None], False), ([], False)],
)
def test_an_empty_job_dir_is_described_if_all_that_looked_say_so(reports: list[bool | None], expected: bool) -> None:
    unsaved = [None if empty is None else UnsavedFiles(jobDirEmpty=empty) for empty in reports]
    replicas = [ReplicaRecord(f"worker-{n}", startTime=NOON.format(1), unsaved=each) for n, each in enumerate(unsaved)]
    never_started = ReplicaRecord("ps-0", unsaved=UnsavedFiles(jobDirEmpty=not expected))
    assert jobs_module._wrote_nothing([*replicas, never_started]) is expected


@pytest.mark.parametrize("empty", [True, False])
def test_files_outside_job_dir_are_described(ledger: Ledger, described: Callable[..., str], empty: bool) -> None:
    put_job(ledger, JobRecord("job01", JobState.SUCCEEDED, hosts=["master-0", "worker-0"]))
    unsaved = UnsavedFiles(True, ["model/a"], 3, 9, ["big (2.1 GB)"], 1, "it took too long") if empty else UnsavedFiles()
    for name, unsaved_files in (("master-0", UnsavedFiles(jobDirEmpty=empty)), ("worker-0", unsaved)):
        record = ReplicaRecord(name, ReplicaState.EXITED, startTime=NOON.format(1), unsaved=unsaved_files)
        ledger.write_replica("job01", record, None)
    out = described("job01")
    assert parse_facts(out).get("output") == ("the job wrote nothing to JOB_DIR" if empty else None)
    saved_text, unsaved_text = "kept in JOB_DIR/left/worker-0: model/a and 2 more", "not kept: big (2.1 GB); it took too long"
    assert (f"worker-0 wrote outside JOB_DIR, {saved_text}; {unsaved_text}" in out.splitlines()) is empty


def test_progress_is_shown(
    cluster: ClusterClient, ledger: Ledger, capsys: pytest.CaptureFixture[str], described: Callable[..., str]
) -> None:
    progress = JobProgress(348, 5000, 200.4, 23.21, 0.7291234, {"accuracy": 0.834}, NOON.format(0))
    put_job(ledger, JobRecord("job01", JobState.RUNNING, progress=progress))
    output = parse_facts(described())
    assert output["progress"] == "step 348 of 5000 (6 %), 200.4 steps/s, 23.2 s left"
    assert output["metrics"] == "loss 0.7291, accuracy 0.834"
    for progress, expected in (
        (JobProgress(9), "step 9"),
        (JobProgress(9, stepsPerSecond=0.0323), "step 9, 0.0323 steps/s"),
        (JobProgress(12, 10, 0.0, 0.0), "step 12 of 10 (100 %), 0.0 s left"),
        (JobProgress(1, 0, None, None), "step 1"),
    ):
        put_job(ledger, JobRecord("job02", JobState.SUCCEEDED, startTime=NOON.format(1), progress=progress))
        output = parse_facts(described("job02"))
        assert (output["progress"], "metrics" in output) == (expected, False)
    for read in (lambda: describe(cluster, "job01", True), lambda: jobs(cluster, "job01", None, True)):
        assert read() == 0
        data = json.loads(capsys.readouterr().out)
        assert (data[0] if isinstance(data, list) else data)["progress"]["step"] == 348


@pytest.mark.parametrize(
    ("notification", "state", "expected"),
    [
        (Notification("POST https://x/…"), JobState.RUNNING, "POST https://x/… when it ends"),
        (Notification("POST https://x/…"), JobState.CANCELLED, "POST https://x/… is not reported yet"),
        (Notification("command ./a", NOON.format(1), 1, "status 1"), JobState.FAILED, "command ./a failed: status 1"),
        (Notification("POST x", NOON.format(1), 3, "timed out"), JobState.FAILED, "POST x failed: timed out (3 attempts)"),
        (
            Notification("POST x", NOON.format(1), 2),
            JobState.SUCCEEDED,
            f"POST x {terminal.local_time(NOON.format(1))} (2 attempts)",
        ),
    ],
)
def test_the_notification_is_shown(
    ledger: Ledger, described: Callable[..., str], notification: Notification, state: JobState, expected: str
) -> None:
    put_job(ledger, JobRecord("job01", state, notification=notification))
    assert parse_facts(described("job01"))["notify"] == expected
