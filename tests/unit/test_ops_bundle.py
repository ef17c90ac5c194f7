"""`fab bundle`: its content for a failed job, for another one, and if little or nothing is readable."""

from __future__ import annotations

import json
import subprocess
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from opsdata import inventory_json, put_job, put_log

from jobs import paths
from jobs.bucket import BucketError
from jobs.firsterror import FirstError
from jobs.folder import FolderBucket, open_bucket
from jobs.ledger import Ledger
from jobs.records import JobRecord, Plan, ReplicaRecord
from jobs.states import JobState, ReplicaState
from ops.cluster.cluster import ClusterClient
from ops.cluster.fanout import Outcome, fan_out
from ops.cluster.inventory import parse
from ops.cluster.remote import CommandResult
from ops.errors import HostError, UsageError
from ops.logs.lines import LogLine
from ops.report import bundle as module
from ops.report.bundle import bundle, host_state_command

NOON = "2026-01-31T12:00:00.000Z"
HOSTS = {"master-0": ["master-0"], "worker-0": ["worker-1"]}
DIAGNOSIS: dict[str, Any] = {
    "schema": 1,
    "trainer": {"ended": "signal 9 (SIGKILL), out of memory"},
    "lines": [{"time": NOON, "severity": "ERROR", "message": "write: No space left on device\x1b[2J"}],
    "disks": [{"path": "/", "totalBytes": 100, "freeBytes": 4}, {"path": "/b", "totalBytes": 100, "freeBytes": 50}],
    "clock": {"leader": "master-0", "aheadSeconds": 600.2},
}


class Fleet:
    """Hosts of which worker-1 answers what is asked of hosts, and no other does."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def connection(self, name: str) -> None:
        if name != "worker-1":
            raise HostError(name, "does not answer")

    def stream(self, name: str, command: str) -> None:
        raise HostError(name, "does not answer")

    def run(self, name: str, command: str) -> CommandResult:
        self.asked.append((name, command))
        return CommandResult(name, 0, "4000000000.5\n# uptime\nup 3 days\n")

    def each(self, names: Iterable[str], work: Callable[[str], Any], seconds: float) -> Outcome[Any]:
        return fan_out(names, work, seconds)


class Job:
    """job01, which has FAILED on a master and a worker, in a bucket that is a folder."""

    def __init__(self, tmp_path: Path) -> None:
        self.bucket = tmp_path / "bucket"
        self.bucket.mkdir()
        self.ledger = Ledger(FolderBucket(self.bucket))
        self.fleet = Fleet()
        inventory = parse(inventory_json(bucket=str(self.bucket), operatorBucket=str(self.bucket)), tmp_path)
        files = open_bucket(str(self.bucket))
        self.cluster = ClusterClient(inventory, self.fleet, files, self.ledger)  # type: ignore[arg-type]
        self.becomes(JobState.FAILED, errorMessage="The replica worker 0 exited with a non-zero status of 137.\nand more")
        error = FirstError(NOON, "MemoryError: too much")
        killed = ReplicaRecord(
            "worker-0", ReplicaState.EXITED, 137, outOfMemory=True, memoryLimit=1_900_000_000, restarts=2, firstError=error
        )
        self.ledger.write_replica("job01", killed, None)
        self.ledger.write_replica("job01", ReplicaRecord("master-0", ReplicaState.EXITED, 143), None)
        self.put(paths.plan("job01"), b'{"plan": 1}')
        self.put(paths.diagnosis("job01", "worker-0"), json.dumps(DIAGNOSIS).encode())
        put_log(
            self.bucket / paths.log("job01", "master-0"), [LogLine(NOON, "INFO", "master-0", f"line {n}") for n in range(300)]
        )

    def becomes(self, state: JobState, **changes: Any) -> None:
        hosts = [hosts[0] for hosts in HOSTS.values()]
        put_job(self.ledger, JobRecord("job01", state, hosts=hosts, candidates=HOSTS, createTime=NOON, **changes))

    def put(self, name: str, content: bytes) -> None:
        (path := self.bucket / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def bundle(self, dest: str | None = None, force: bool = False, as_json: bool = False) -> int:
        return bundle(self.cluster, "job01", dest, force, as_json)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    return Job(tmp_path)


def content(file: str = "job01-bundle.tar.gz") -> dict[str, str]:
    with tarfile.open(file) as tar:
        read = {member.name: tar.extractfile(member) for member in tar.getmembers()}
        return {name.removeprefix("job01-bundle/"): found.read().decode() for name, found in read.items() if found}


def test_all_that_tells_why_a_job_failed(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    assert job.bundle() == 0
    found = content()
    assert sorted(found) == [
        "describe.txt",
        "diagnosis/worker-0.json",
        "hosts/worker-1.txt",
        "job.json",
        "logs/master-0.log",
        "logs/worker-0.log",
        "plan.json",
        "replicas/master-0.json",
        "replicas/worker-0.json",
        "summary.txt",
    ]
    assert json.loads(found["diagnosis/worker-0.json"]) == DIAGNOSIS
    assert JobRecord.from_json(found["job.json"].encode()).jobId == "job01"
    assert found["logs/worker-0.log"] == f"{NOON} ERROR    write: No space left on device␛[2J\n"
    assert found["logs/master-0.log"].splitlines()[::199] == [f"{NOON} INFO     line {n}" for n in (100, 299)]
    assert "up 3 days" in found["hosts/worker-1.txt"]
    assert found["describe.txt"].startswith("job:           job01\nstate:         FAILED\n")
    assert "fab bundle" not in found["describe.txt"]
    out, err = capsys.readouterr()
    size = Path("job01-bundle.tar.gz").stat().st_size
    assert out == f"job01-bundle.tar.gz: {size / 1000:.1f} kB, begin with its summary.txt\n"
    assert "no diagnosis by master-0: it never started, was lost, had no bucket, or has not finished it" in err.splitlines()
    assert "master-0 does not answer: it was not queried" in err.splitlines()
    assert [path.name for path in Path().iterdir()] == ["job01-bundle.tar.gz"]
    assert job.fleet.asked == [("worker-1", host_state_command(NOON))]


def test_the_summary_begins_with_the_first_error_and_has_a_line_a_replica(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "time", lambda: 4000000000.0)
    assert job.bundle() == 0
    lines = content()["summary.txt"].splitlines()
    assert lines[:5] == [
        f"First error: worker-0, {NOON}: MemoryError: too much",
        "Job job01 FAILED: The replica worker 0 exited with a non-zero status of 137.",
        "",
        "master-0: EXITED with 143",
        "worker-0 on worker-1: EXITED with 137, signal 9 (SIGKILL), out of memory of 1.9 GB; 2 restarts; / is 96 % full; "
        'it ran out of disk, "No space left on device"; its first error: MemoryError: too much; its clock was 600 s '
        "ahead of that of master-0",
    ]
    assert "Note: no diagnosis by master-0: it never started, was lost, had no bucket, or has not finished it" in lines
    assert "Contents:" in lines


def test_a_full_disk_shows_where_the_log_could_not_be_written_either(job: Job) -> None:
    job.put(paths.diagnosis("job01", "master-0"), b'{"lines": []}')
    full = ReplicaRecord("master-0", ReplicaState.EXITED, 1, errorMessage="OSError: [Errno 122] Disk quota exceeded")
    job.ledger.write_replica("job01", full, job.ledger.replica_version("job01", "master-0"))
    assert job.bundle() == 0
    assert 'master-0: EXITED with 1; it ran out of disk, "Disk quota exceeded"' in content()["summary.txt"].splitlines()


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.SUCCEEDED, JobState.CANCELLED])
def test_of_a_job_that_did_not_fail_there_is_what_there_is(
    job: Job, capsys: pytest.CaptureFixture[str], state: JobState
) -> None:
    (job.bucket / paths.diagnosis("job01", "worker-0")).unlink()
    job.becomes(state)
    assert job.bundle() == 0
    said = f"job job01 is {state}: no diagnosis was made, as hosts make one when a job FAILED"
    assert said in capsys.readouterr().err.splitlines()
    assert f"Note: {said}" in content()["summary.txt"]
    assert {"job.json", "logs/master-0.log", "replicas/worker-0.json"} <= set(content())


def test_a_secret_that_a_host_has_hidden_is_hidden_in_the_rest_too(job: Job) -> None:
    secret = 'sesam"ö\x1b[2J'
    error = FirstError(NOON, f"KeyError: {secret}!")
    printed = ReplicaRecord("master-0", ReplicaState.EXITED, 1, errorMessage=f"with {secret}\nand {secret}", firstError=error)
    told = {"errorMessage": "with [secret]\nand [secret]", "firstError": {"message": "KeyError: [secret]!"}}
    job.ledger.write_replica("job01", printed, job.ledger.replica_version("job01", "master-0"))
    job.put(paths.diagnosis("job01", "master-0"), json.dumps({"lines": [], "trainer": told}).encode())
    job.becomes(JobState.FAILED, errorMessage=f"master 0 failed {secret}")
    assert job.bundle() == 0
    found = content()
    assert not [name for name, text in found.items() if "sesam" in text]
    assert "Job job01 FAILED: master 0 failed [secret]" in found["summary.txt"]
    assert json.loads(found["replicas/master-0.json"])["firstError"]["message"] == "KeyError: [secret]!"
    assert json.loads(found["job.json"])["errorMessage"] == "master 0 failed [secret]"
    assert found["plan.json"] == '{"plan": 1}'


@pytest.mark.parametrize(
    ("printed", "written", "others"),
    [
        ("pass word pass word", "[secret] [secret]", {"with pass word!": "with [secret]!"}),
        ("key pass word0", "key [secret]0", {"with pass word!": "with [secret]!"}),
        ("one hush, two hash", "one [secret], two [secret]", {"one hush": "one hush"}),
        ("[secret] hush", "[secret] [secret]", {"one hush": "one hush"}),
        ("pass word then hush\npass word", "[secret] then [secret]\n[secret]", {"a pass word then": "a [secret] then"}),
    ],
)
def test_a_value_is_taken_only_where_it_is_certain(job: Job, printed: str, written: str, others: dict[str, str]) -> None:
    told = {"lines": [], "trainer": {"errorMessage": written}}
    job.put(paths.diagnosis("job01", "master-0"), json.dumps(told).encode())
    record = ReplicaRecord("master-0", ReplicaState.EXITED, 1, errorMessage=printed)
    job.ledger.write_replica("job01", record, job.ledger.replica_version("job01", "master-0"))
    job.put(paths.plan("job01"), json.dumps([*others]).encode())
    assert job.bundle() == 0
    found = content()
    assert json.loads(found["replicas/master-0.json"])["errorMessage"] == written
    assert json.loads(found["plan.json"]) == [*others.values()]


@pytest.mark.parametrize("plan", ['{"secrets": ["TOKEN"]}', "[]", '{"secrets"'])
def test_where_a_job_has_secrets_a_log_that_no_host_looked_through_is_left_out(
    job: Job, capsys: pytest.CaptureFixture[str], plan: str
) -> None:
    job.put(paths.plan("job01"), plan.encode())
    assert job.bundle() == 0
    found = content()
    why = "left out: the job has secrets, which only a diagnosis hides"
    assert found["logs/master-0.log"] == f"{why}\n"
    assert "No space left" in found["logs/worker-0.log"]
    said = f"the log of master-0 is {why}; fab logs job01 shows it"
    assert said in capsys.readouterr().err.splitlines()
    assert f"Note: {said}" in found["summary.txt"]


def test_where_the_plan_is_not_read_the_log_is_left_out(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    read_all = FolderBucket.read_all

    def fails(store: FolderBucket, names: Iterable[str]) -> Any:
        if paths.plan("job01") in (names := list(names)):
            raise BucketError("it hangs")
        return read_all(store, names)

    monkeypatch.setattr(FolderBucket, "read_all", fails)
    assert job.bundle() == 0
    assert content()["logs/master-0.log"].startswith("left out: ")


@pytest.mark.parametrize(
    ("time", "ended", "stays"),
    [
        ("2026-01-31T11:59:59.999Z", "2026-01-31T11:50:00.000Z", False),
        ("2026-01-31T11:59:59.999Z", "2026-01-31T12:09:00.000Z", True),  # the job's own, by a clock that is behind
        ("2026-01-31T12:00:00.001Z", "2026-01-31T11:50:00.000Z", True),
    ],
)
def test_a_diagnosis_of_an_earlier_job_of_this_id_is_left_out(job: Job, time: str, ended: str, stays: bool) -> None:
    job.becomes(JobState.FAILED, endTime="2026-01-31T12:09:00.000Z")
    told = {**DIAGNOSIS, "time": time, "clock": {"leader": "master-0", "leaderTime": ended}}
    job.put(paths.diagnosis("job01", "worker-0"), json.dumps(told).encode())
    assert job.bundle() == 0
    found = content()
    assert ("diagnosis/worker-0.json" in found) == stays
    assert ("logs/worker-0.log" in found) == stays
    note = "Note: the diagnosis by the host of worker-0 is of an earlier job of this id: it is left out"
    assert (note in found["summary.txt"]) != stays


@pytest.mark.parametrize("written", ["[secret]", "a[secret]c[secret]", 7, None])
def test_what_is_no_secret_hides_nothing(job: Job, written: object) -> None:
    printed = ReplicaRecord("master-0", ReplicaState.EXITED, 1, errorMessage="abcd" if written != "[secret]" else "[secret]")
    job.ledger.write_replica("job01", printed, job.ledger.replica_version("job01", "master-0"))
    job.put(paths.diagnosis("job01", "master-0"), json.dumps({"lines": [], "trainer": {"errorMessage": written}}).encode())
    assert job.bundle() == 0
    assert "[secret]" not in content()["describe.txt"]


def test_a_job_of_which_there_is_nothing_but_its_record(tmp_path: Path, job: Job) -> None:
    put_job(job.ledger, JobRecord("job00", JobState.QUEUED, createTime=NOON, candidates=HOSTS))
    assert bundle(job.cluster, "job00", "x.tar.gz", False, False) == 0
    with tarfile.open("x.tar.gz") as tar:
        assert sorted(tar.getnames()) == [f"job00-bundle/{name}" for name in ("describe.txt", "job.json", "summary.txt")]
        summary = tar.extractfile("job00-bundle/summary.txt")
        assert summary
        assert summary.read().decode().startswith("No replica printed an error.\nJob job00 QUEUED\n\nmaster-0: PREPARING\n")


@pytest.mark.parametrize("garbled", ['{"lines": [{"time": 1}]', "[]"])
def test_a_diagnosis_that_is_garbled_is_named_and_the_log_is_read_instead(job: Job, garbled: str) -> None:
    job.put(paths.diagnosis("job01", "master-0"), garbled.encode())
    job.put(paths.diagnosis("job01", "worker-0"), b'{"lines": "left out", "disks": "left out", "clock": 7}')
    assert job.bundle() == 0
    found = content()
    assert "Note: the diagnosis by the host of master-0 is damaged" in found["summary.txt"]
    assert "logs/master-0.log" in found
    assert found["diagnosis/master-0.json"] == garbled


def test_for_programs(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    assert job.bundle("b.tgz", as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["jobId"], told["state"], told["dest"], told["diagnosed"]) == ("job01", "FAILED", "b.tgz", ["worker-0"])
    assert told["bytes"] == Path("b.tgz").stat().st_size
    assert sorted(told["files"]) == sorted(content("b.tgz"))
    assert "master-0 does not answer: it was not queried" in told["notes"]


def test_nothing_is_written_over_unless_that_is_said(job: Job) -> None:
    Path("b").write_text("mine")
    with pytest.raises(UsageError, match=r"^b is there already: give another --dest, or --force to write over it$"):
        job.bundle("b")
    assert Path("b").read_text() == "mine"
    assert job.bundle("b", force=True) == 0
    assert "summary.txt" in content("b")


@pytest.mark.parametrize(
    ("dest", "says"),
    [
        (".", r"^\. is a folder: --dest is the file to write$"),
        ("no/b", "^no/b cannot be written: there is no folder no$"),
        ("mine/b", "^mine/b cannot be written: "),
        ("a" * 300, "cannot be written: File name too long$"),
    ],
)
@pytest.mark.parametrize("force", [False, True])
def test_a_place_that_is_none(job: Job, dest: str, says: str, force: bool) -> None:
    Path("mine").write_text("")
    with pytest.raises(UsageError, match=says):
        job.bundle(dest, force)
    assert job.fleet.asked == []  # before anything is read
    assert [path.name for path in Path().iterdir()] == ["mine"]


def test_a_job_that_is_not_there(job: Job) -> None:
    with pytest.raises(UsageError, match=r"^there is no job .jb01.; did you mean job01[?]; fab jobs lists job01$"):
        bundle(job.cluster, "jb01", None, False, False)


def test_a_bucket_that_fails_in_between_is_a_note(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> bytes:
        raise BucketError("it hangs")

    monkeypatch.setattr(job.cluster.bucket, "sizes", fails)
    assert job.bundle() == 0
    assert "Note: the diagnoses were not read: it hangs" in content()["summary.txt"]


def test_it_goes_with_its_job() -> None:
    assert paths.diagnosis("job01", "ps-0").startswith(f"{paths.folder('job01')}/")


def test_what_is_asked_of_a_host_is_one_line_of_a_shell() -> None:
    command = host_state_command("2026-01-31T12:00:00.000Z")
    assert "--since '2026-01-31 12:00:00 UTC'" in command
    ran = subprocess.run(["sh", "-n", "-c", command], capture_output=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, b"")


def test_where_the_end_is_reported_is_not_in_it(job: Job) -> None:
    plan = Plan("job01", ["master-0"], "task", [], {}, notify='https://example.com/"hidden"')
    job.put(paths.plan("job01"), plan.to_json())
    assert job.bundle() == 0
    assert Plan.from_json(content()["plan.json"]) == replace(plan, notify="[secret]")
