"""Check `fab delete`, `fab prune` and `--resume` with a bucket that is a directory: effects and questions."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from opsdata import inventory_json, put_job

from jobs.bucket import BucketError
from jobs.folder_bucket import FolderBucket, open_bucket
from jobs.ledger import Ledger
from jobs.queue import QueueEntry
from jobs.records import JobRecord
from jobs.states import JobState
from ops import terminal
from ops.cluster.cluster import ClusterClient
from ops.cluster.fanout import Outcome
from ops.cluster.inventory import parse
from ops.errors import HostError, OpsError, UsageError
from ops.submit.config import JobFlags
from ops.submit.end import delete, prune
from ops.submit.train import resume_flags

STATES = (JobState.SUCCEEDED, JobState.FAILED, JobState.RUNNING, JobState.CANCELLED)


class FakeFleet:
    """Run commands on all hosts except ps-0, which does not answer."""

    def __init__(self) -> None:
        self.commands: list[tuple[str, str]] = []

    def check_output(self, name: str, command: str, what: str) -> str:
        self.commands.append((name, command))
        return ""

    def each(self, names: Iterable[str], work: Callable[[str], str], seconds: float) -> Outcome[str]:
        unreachable = {"ps-0": HostError("ps-0", "does not answer")}
        return Outcome({name: work(name) for name in names if name not in unreachable}, unreachable)


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    return tmp_path / "bucket"


@pytest.fixture
def cluster(bucket: Path, tmp_path: Path) -> ClusterClient:
    """Return a cluster with job00 to job03, in order of creation, each with a 3-byte model; job02 is running."""
    bucket.mkdir()
    inventory = parse(inventory_json(bucket=str(bucket), operatorBucket=str(bucket)), tmp_path)
    ledger = Ledger(FolderBucket(bucket))
    for n, state in enumerate(STATES):
        put_job(ledger, JobRecord(f"job0{n}", state, createTime=f"2026-01-31T12:00:0{n}.000Z"))
        model = bucket / "jobs" / f"job0{n}" / "output" / "deep" / "model"
        model.parent.mkdir(parents=True)
        model.write_bytes(b"123")
    return ClusterClient(inventory, FakeFleet(), open_bucket(str(bucket)), ledger)  # type: ignore[arg-type]


def job_folders(bucket: Path) -> list[str]:
    return sorted(path.name for path in (bucket / "jobs").iterdir())


def test_delete_removes_all_of_a_job(cluster: ClusterClient, bucket: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = 3 + (bucket / "jobs" / "job00" / "job.json").stat().st_size
    assert delete(cluster, "job00", sure=True) == 0
    assert job_folders(bucket) == ["job01", "job02", "job03"]
    notice = "ps-0 does not answer; take another id for the next job\n"
    assert capsys.readouterr() == (f"job00 deleted, {size} B\n", notice)
    line = "sudo -n /usr/lib/scaletier/root-helper forget job00"
    answering = ("master-0", "worker-0", "worker-1", "evaluator-0")
    assert cluster.fleet.commands == [(name, line) for name in answering]  # type: ignore[attr-defined]


def test_a_hosts_root_deletes_a_job_in_a_bucket_on_hosts(cluster: ClusterClient, bucket: Path) -> None:
    failures: dict[str, HostError] = {}
    commands: list[tuple[str, str]] = []

    def check_output(name: str, command: str, what: str) -> str:
        commands.append((name, command))
        if " remove " in command and name in failures:
            assert what == "could not delete job00, it ended"
            raise failures[name]
        return ""

    cluster.fleet.check_output = check_output  # type: ignore[method-assign]
    cluster.inventory = replace(cluster.inventory, operator_bucket=f"sftp://{bucket}")
    line = "sudo -n /usr/lib/scaletier/root-helper remove job00"
    assert delete(cluster, "job00", sure=True) == 0
    assert [name for name, command in commands if command == line] == ["master-0"]
    assert "job00" in job_folders(bucket), "the host removes it"
    names = cluster.inventory.replicas
    failures |= {name: HostError(name, "does not answer") for name in names[:2]}
    commands.clear()
    assert delete(cluster, "job00", sure=True) == 0
    assert [name for name, command in commands if command == line] == list(names[:3])
    failures[names[2]] = HostError(names[2], "could not delete job00, it ended with exit code 1", 1)
    with pytest.raises(HostError, match="it ended with exit code 1"):
        delete(cluster, "job00", sure=True)
    failures |= {name: HostError(name, "does not answer") for name in names}
    with pytest.raises(HostError, match=f"{names[-1]} does not answer"):
        delete(cluster, "job00", sure=True)


def test_a_record_whose_id_is_not_its_folder_is_not_deleted(cluster: ClusterClient, bucket: Path) -> None:
    """Check that a copied record, or an id that leads elsewhere, deletes nothing else: any trainer can write to the bucket."""
    (bucket / "data").mkdir()
    (bucket / "data" / "mine").write_bytes(b"1")
    shutil.copytree(bucket / "jobs" / "job00", bucket / "jobs" / "copy")
    for n, evil in enumerate(("../data", "..", "", "job01")):
        (bucket / "jobs" / f"evil{n}").mkdir()
        record = JobRecord("x", JobState.FAILED, createTime="2026-01-01T12:00:00.000Z")
        (bucket / "jobs" / f"evil{n}" / "job.json").write_bytes(record.to_json().replace(b'"x"', b'"' + evil.encode() + b'"'))
    before = job_folders(bucket)
    with pytest.raises(UsageError, match=r"records are unreadable: copy: job\.json says"):
        prune(cluster, "0", sure=True)
    for name in ("copy", "evil0", "job01", "../data", ""):
        with pytest.raises((UsageError, OpsError)):
            delete(cluster, name, sure=True)
    assert (job_folders(bucket), (bucket / "data" / "mine").exists()) == (before, True)


def test_only_jobs_whose_records_are_damaged_can_be_deleted_beside_others(cluster: ClusterClient, bucket: Path) -> None:
    for name, content in (("half", b'{"jobId": "ha'), ("torn", b"")):
        cluster.ledger.store.create(f"jobs/{name}/job.json", content)
    refused = r"^nothing can be deleted while records are unreadable: half: job\.json is no JSON.*; fab delete JOB deletes a"
    for delete_others in (lambda: delete(cluster, "job00", sure=True), lambda: prune(cluster, "0", sure=True)):
        with pytest.raises(UsageError, match=refused):
            delete_others()
    put_job(cluster.ledger, JobRecord("later", JobState.FAILED, trainingInput={"jobDir": f"{bucket}/jobs/half/output"}))
    with pytest.raises(UsageError, match="job later has its output in that of half"):
        delete(cluster, "half", sure=True)
    put_job(cluster.ledger, JobRecord("later", JobState.FAILED))
    cluster.ledger.change_queue(lambda queue: queue.added(QueueEntry("half", ["master-0"])))
    with pytest.raises(
        UsageError, match="job half is in the queue, but its replicas have not all stopped: try again in a moment"
    ):
        delete(cluster, "half", sure=True)
    cluster.ledger.free_hosts("half")
    (bucket / "data").mkdir()
    (bucket / "data" / "job.json").write_bytes(b"no record")
    with pytest.raises(UsageError, match=r"there is no job '\.\./data'"):
        delete(cluster, "../data", sure=True)
    assert delete(cluster, "half", sure=True) == delete(cluster, "torn", sure=True) == 0
    assert prune(cluster, "0", sure=True) == 0
    assert job_folders(bucket) == ["job02"]


@pytest.mark.parametrize("content", ['{"schema": 99, "jobId": "new"}', '{"jobId": "job00"}'])
def test_a_record_of_a_newer_scaletier_or_of_another_job_is_not_damaged(
    cluster: ClusterClient, bucket: Path, content: str
) -> None:
    for name, text in (("new", content), ("half", "{}")):
        cluster.ledger.store.create(f"jobs/{name}/job.json", text.encode())
    with pytest.raises(OpsError, match=r"the record of job new cannot be read: job\.json (was written by|says)"):
        delete(cluster, "new", sure=True)
    with pytest.raises(UsageError, match=r"records are unreadable: new: job\.json (was written by|says)"):
        delete(cluster, "half", sure=True)
    assert job_folders(bucket) == ["half", "job00", "job01", "job02", "job03", "new"]


def test_changes_during_the_confirmation_are_checked(
    cluster: ClusterClient, bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def confirm(question: str) -> None:
        put_job(cluster.ledger, JobRecord("late", JobState.RUNNING, trainingInput={"jobDir": f"{bucket}/jobs/job00/output"}))

    monkeypatch.setattr(terminal, "confirm", confirm)
    with pytest.raises(UsageError, match="job late has its output in that of job00"):
        delete(cluster, "job00", sure=False)
    assert "job00" in job_folders(bucket)
    monkeypatch.setattr(terminal, "confirm", lambda _: shutil.rmtree(bucket / "jobs" / "job01"))
    with pytest.raises(UsageError, match=r"^job job01 is gone: another user has deleted it$"):
        delete(cluster, "job01", sure=False)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (None, "delete which job? fab jobs lists them"),
        ("job02", "job job02 is RUNNING: fab cancel job02 ends it first"),
        ("job09", "there is no job 'job09'; did you mean job0"),
        ("job03", "job job03 is CANCELLED, but its replicas have not all stopped: try again in a moment"),
        ("job00", "this would delete job00 with logs and output, "),
    ],
)
def test_jobs_that_cannot_be_deleted_are_refused(cluster: ClusterClient, bucket: Path, job: str | None, message: str) -> None:
    cluster.ledger.change_queue(lambda queue: queue.added(QueueEntry("job03", ["master-0"])))
    with pytest.raises(UsageError, match=re.escape(message)):
        delete(cluster, job, sure=not message.startswith("this"))
    assert len(job_folders(bucket)) == 4


def test_the_record_is_deleted_last(cluster: ClusterClient, bucket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink = Path.unlink

    def fail_on_record(path: Path, missing_ok: bool = False) -> None:
        if len(list((bucket / "jobs" / "job00").rglob("*.json"))) == 1 and path == bucket / "jobs/job00/job.json":
            raise OSError("the connection broke off")
        unlink(path, missing_ok)

    (bucket / "jobs" / "job00" / "replicas").mkdir()
    (bucket / "jobs" / "job00" / "replicas" / "master-0.json").write_text("{}")
    with monkeypatch.context() as broken:
        broken.setattr(Path, "unlink", fail_on_record)
        with pytest.raises(OSError, match="broke off"):
            delete(cluster, "job00", sure=True)
    assert delete(cluster, "job00", sure=True) == 0
    assert "job00" not in job_folders(bucket)


@pytest.mark.parametrize("error", [HostError("master-0", "broke off"), KeyboardInterrupt()])
def test_hosts_forget_what_an_interrupted_prune_has_begun_to_delete(
    cluster: ClusterClient, bucket: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    remove = cluster.bucket.remove

    def break_off(folder: str, last: str) -> None:
        if folder == "jobs/job01":
            raise error
        remove(folder, last)

    monkeypatch.setattr(cluster.bucket, "remove", break_off)
    with pytest.raises(type(error)):
        prune(cluster, "0", sure=True)
    assert job_folders(bucket) == ["job00", "job01", "job02"]
    command = "sudo -n /usr/lib/scaletier/root-helper forget job03 job01"
    assert {command for _, command in cluster.fleet.commands} == {command}  # type: ignore[attr-defined]


def test_a_job_whose_folders_cannot_be_read_is_deleted_with_the_others(
    cluster: ClusterClient, bucket: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    walk, questions = cluster.bucket.walk, list[str]()

    def refuse(folder: str) -> dict[str, int]:
        if folder in ("jobs/job00", "jobs/job01"):
            raise BucketError("/bucket: File name too long")
        return walk(folder)

    monkeypatch.setattr(cluster.bucket, "walk", refuse)
    monkeypatch.setattr(terminal, "confirm", questions.append)
    size = terminal.size(sum(walk("jobs/job03").values()))
    assert delete(cluster, "job00", sure=False) == 0
    out, err = capsys.readouterr()
    assert out == "job00 deleted, size unknown\n"
    assert err.startswith("the size of job00 is unknown: /bucket: File name too long\n")
    assert prune(cluster, "0", sure=False, as_json=True) == 0
    assert questions == [
        "delete job00 with logs and output, size unknown",
        f"delete 2 jobs (job03, job01) with logs and output, {size} and more",
    ]
    assert [item["bytes"] is None for item in json.loads(capsys.readouterr().out)["deleted"]] == [False, True]
    assert job_folders(bucket) == ["job02"]


@pytest.mark.parametrize(("answer", "deleted"), [("y\n", True), ("Yes\n", True), ("n\n", False), ("\n", False), ("", False)])
def test_delete_asks_for_confirmation(
    cluster: ClusterClient, bucket: Path, monkeypatch: pytest.MonkeyPatch, answer: str, deleted: bool
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(terminal.sys, "stdin", Terminal(answer))
    if deleted:
        assert delete(cluster, "job00", sure=False) == 0
    else:
        with pytest.raises(UsageError, match="nothing was changed"):
            delete(cluster, "job00", sure=False)
    assert ("job00" in job_folders(bucket)) is not deleted


@pytest.mark.parametrize("folder", ["output", "more", "output/deep", "/output", "./output"])
def test_an_output_that_another_job_uses_is_not_deleted(cluster: ClusterClient, bucket: Path, folder: str) -> None:
    put_job(cluster.ledger, JobRecord("later", JobState.FAILED, trainingInput={"jobDir": f"{bucket}/jobs/job00/{folder}"}))
    for n, elsewhere in enumerate((f"{bucket}/jobs/job001/output", "gs://b/jobs/job00/output", f"{bucket}/old/jobs/job00/x")):
        put_job(cluster.ledger, JobRecord(f"other{n}", JobState.FAILED, trainingInput={"jobDir": elsewhere}))
    with pytest.raises(UsageError, match="job later has its output in that of job00: delete it first, or keep both"):
        delete(cluster, "job00", sure=True)
    assert delete(cluster, "later", sure=True) == 0
    assert delete(cluster, "job00", sure=True) == 0
    assert job_folders(bucket) == ["job01", "job02", "job03", "other0", "other1", "other2"]


@pytest.mark.parametrize(
    ("keep", "remaining"),
    [
        ("0", ["job02"]),
        ("1", ["job02", "job03"]),
        ("2", ["job01", "job02", "job03"]),
        ("9", ["job00", "job01", "job02", "job03"]),
    ],
)
def test_prune_keeps_the_newest_and_active_jobs(
    cluster: ClusterClient, bucket: Path, keep: str, remaining: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert prune(cluster, keep, sure=True) == 0
    assert job_folders(bucket) == remaining
    nothing = f"nothing to delete: of 4 jobs the newest {keep} that have ended stay\n"
    assert (nothing in capsys.readouterr().err) == (len(remaining) == 4)


def test_several_jobs_are_deleted_after_one_question(
    cluster: ClusterClient, bucket: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {name: 3 + (bucket / "jobs" / name / "job.json").stat().st_size for name in ("job01", "job00")}
    questions: list[str] = []
    monkeypatch.setattr(terminal, "confirm", questions.append)
    assert prune(cluster, "1", sure=False) == 0
    assert questions == [f"delete 2 jobs (job01, job00) with logs and output, {terminal.size(sum(sizes.values()))}"]
    assert capsys.readouterr().out == "".join(f"{name} deleted, {size} B\n" for name, size in sizes.items())
    assert job_folders(bucket) == ["job02", "job03"]


def test_a_job_that_waits_for_its_replicas_is_not_pruned(cluster: ClusterClient, bucket: Path) -> None:
    cluster.ledger.change_queue(lambda queue: queue.added(QueueEntry("job03", ["master-0"])))
    assert prune(cluster, "0", sure=True) == 0
    assert job_folders(bucket) == ["job02", "job03"]


def test_the_json_output_lists_deleted_jobs(cluster: ClusterClient, bucket: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = 3 + (bucket / "jobs" / "job00" / "job.json").stat().st_size
    assert delete(cluster, "job00", sure=True, as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == {"deleted": [{"job": "job00", "bytes": size}]}
    assert prune(cluster, "1", sure=True, as_json=True) == 0
    assert [item["job"] for item in json.loads(capsys.readouterr().out)["deleted"]] == ["job01"]
    assert prune(cluster, "1", sure=True, as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == {"deleted": []}
    assert job_folders(bucket) == ["job02", "job03"]


def test_prune_keeps_an_output_that_another_job_uses(
    cluster: ClusterClient, bucket: Path, capsys: pytest.CaptureFixture[str]
) -> None:

    put_job(cluster.ledger, JobRecord("job02", JobState.RUNNING, trainingInput={"jobDir": f"{bucket}/jobs/job00/output"}))
    assert prune(cluster, "0", sure=True) == 0
    assert job_folders(bucket) == ["job00", "job02"]
    assert "job00 stays, as job02 has its output there" in capsys.readouterr().err


def test_prune_keeps_a_chain_of_outputs_in_use(cluster: ClusterClient, bucket: Path) -> None:
    for job_id, folder in (("job01", "job00/output"), ("job02", "job01/output/deep")):
        put_job(cluster.ledger, JobRecord(job_id, JobState.FAILED, trainingInput={"jobDir": f"{bucket}/jobs/{folder}"}))
    put_job(cluster.ledger, JobRecord("job02", JobState.RUNNING, trainingInput={"jobDir": f"{bucket}/jobs/job01/output/deep"}))
    assert prune(cluster, "0", sure=True) == 0
    assert job_folders(bucket) == ["job00", "job01", "job02"]


@pytest.mark.parametrize(("keep", "message"), [(None, "how many are to stay?"), ("few", "--keep 'few' is no number of jobs")])
def test_an_invalid_keep_is_refused(cluster: ClusterClient, keep: str | None, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        prune(cluster, keep, sure=True)


def test_resume_continues_in_another_jobs_output(cluster: ClusterClient, bucket: Path) -> None:
    assert resume_flags(cluster, JobFlags("new", resume="job00")).job_dir == f"{bucket}/jobs/job00/output"
    with pytest.raises(UsageError, match="job job02 is RUNNING, and two jobs cannot write to one output"):
        resume_flags(cluster, JobFlags("new", resume="job02"))
    with pytest.raises(UsageError, match="--resume continues in the output of that job, and --job-dir names another"):
        resume_flags(cluster, JobFlags("new", resume="job00", job_dir="/bucket/x"))
    for training_input in ({"pythonModule": "mine.main"}, {"command": ["./run.sh", "-v"]}):
        put_job(cluster.ledger, JobRecord("mine", JobState.FAILED, trainingInput=training_input))
        with pytest.raises(UsageError, match=r"job mine ran (mine.main|./run.sh -v), and package trainer would continue it"):
            resume_flags(cluster, JobFlags("new", resume="mine"))
        for flags, folder in (
            (JobFlags("new", resume="mine"), "mine"),
            (JobFlags("new", resume="mine", command="./run.sh"), None),
            (JobFlags("new", resume="mine", script="run.py"), None),
        ):
            with pytest.raises(UsageError, match="left no checkpoint"):
                resume_flags(cluster, flags, folder)
    put_job(cluster.ledger, JobRecord("tuned", JobState.FAILED, trainingInput={"hyperparameters": {}}))
    with pytest.raises(UsageError, match="job tuned tuned hyperparameters: --job-dir with the folder of a trial continues"):
        resume_flags(cluster, JobFlags("new", resume="tuned"))
    put_job(cluster.ledger, JobRecord("empty", JobState.FAILED))
    with pytest.raises(
        UsageError, match=r"job empty left no checkpoint in .*/jobs/empty/output: there is nothing to resume from"
    ):
        resume_flags(cluster, JobFlags("new", resume="empty"))
    output = bucket / "jobs/empty/output"
    for name in ("export/Servo/1/saved_model.pb", "events.out.tfevents.1.master-0", "metrics.json", "evaluation.json"):
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).touch()
    with pytest.raises(UsageError, match="job empty left no checkpoint"):
        resume_flags(cluster, JobFlags("new", resume="empty"))
    (output / "model.keras").touch()
    assert resume_flags(cluster, JobFlags("new", resume="empty")).resume == "empty"
