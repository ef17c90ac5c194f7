"""Check `fab bundle`: its content for a failed job, for another one, and if little or nothing is readable."""

from __future__ import annotations

import json
import subprocess
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from opsdata import make_cluster, put_job, put_log, write_files

from jobs import paths
from jobs.bucket import BucketError
from jobs.firsterror import FirstError
from jobs.folder_bucket import FolderBucket
from jobs.records import JobRecord, Plan, ReplicaRecord
from jobs.states import JobState, ReplicaState
from ops.cluster.fanout import Outcome, fan_out
from ops.cluster.remote import CommandResult
from ops.errors import HostError, UsageError
from ops.logs.lines import LogLine
from ops.report import bundle as module
from ops.report.bundle import bundle, host_state_command, redact

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
    """Let only worker-1 answer."""

    def __init__(self) -> None:
        self.commands: list[tuple[str, str]] = []

    def connection(self, name: str) -> None:
        if name != "worker-1":
            raise HostError(name, "does not answer")

    def stream(self, name: str, command: str) -> None:
        raise HostError(name, "does not answer")

    def run(self, name: str, command: str) -> CommandResult:
        self.commands.append((name, command))
        return CommandResult(name, 0, "4000000000.5\n# uptime\nup 3 days\n")

    def each(self, names: Iterable[str], work: Callable[[str], Any], seconds: float) -> Outcome[Any]:
        return fan_out(names, work, seconds)


class Job:
    """Write job01, which has FAILED on a master and a worker, to a bucket that is a folder."""

    def __init__(self, tmp_path: Path) -> None:
        self.bucket, self.fleet = tmp_path / "bucket", Fleet()
        self.cluster = make_cluster(tmp_path, self.fleet)
        self.ledger = self.cluster.ledger
        self.set_state(JobState.FAILED, errorMessage="The replica worker 0 exited with a non-zero status of 137.\nand more")
        error = FirstError(NOON, "MemoryError: too much")
        killed = ReplicaRecord(
            "worker-0", ReplicaState.EXITED, 137, outOfMemory=True, memoryLimit=1_900_000_000, restarts=2, firstError=error
        )
        self.put_replica(killed)
        self.put_replica(ReplicaRecord("master-0", ReplicaState.EXITED, 143))
        self.put(paths.plan("job01"), b'{"plan": 1}')
        self.put_diagnosis("worker-0", **DIAGNOSIS)
        put_log(
            self.bucket / paths.log("job01", "master-0"), [LogLine(NOON, "INFO", "master-0", f"line {n}") for n in range(300)]
        )

    def set_state(self, state: JobState, **changes: Any) -> None:
        hosts = [hosts[0] for hosts in HOSTS.values()]
        put_job(self.ledger, JobRecord("job01", state, hosts=hosts, candidates=HOSTS, createTime=NOON, **changes))

    def put(self, name: str, content: bytes) -> None:
        write_files(self.bucket, {name: content})

    def put_replica(self, record: ReplicaRecord) -> None:
        self.ledger.write_replica("job01", record, self.ledger.replica_version("job01", record.name))

    def put_diagnosis(self, name: str, **diagnosis: Any) -> None:
        self.put(paths.diagnosis("job01", name), json.dumps(diagnosis).encode())

    def bundle(self, dest: str | None = None, force: bool = False, as_json: bool = False) -> int:
        return bundle(self.cluster, "job01", dest, force, as_json)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    (working_dir := tmp_path / "here").mkdir()
    monkeypatch.chdir(working_dir)
    return Job(tmp_path)


def read_bundle(file: str = "job01-bundle.tar.gz") -> dict[str, str]:
    with tarfile.open(file) as tar:
        members = {member.name: tar.extractfile(member) for member in tar.getmembers()}
        return {name.partition("/")[2]: content.read().decode() for name, content in members.items() if content}


def test_an_unreadable_record_of_a_replica_is_noted_and_bundled(job: Job) -> None:
    job.put(paths.replica("job01", "master-0"), b"{")
    assert job.bundle() == 0
    files = read_bundle()
    assert (files["replicas/master-0.json"], "line 299" in files["logs/master-0.log"]) == ("{", True)
    assert "Note: not read: master-0: the record of a replica is no JSON" in files["summary.txt"]
    assert files["summary.txt"].count("not read: master-0") == 1


def test_the_content_of_a_failed_jobs_bundle(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    assert job.bundle() == 0
    files = read_bundle()
    assert sorted(files) == [
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
    assert json.loads(files["diagnosis/worker-0.json"]) == DIAGNOSIS
    assert JobRecord.from_json(files["job.json"].encode()).jobId == "job01"
    assert files["logs/worker-0.log"] == f"{NOON} ERROR    write: No space left on device␛[2J\n"
    assert files["logs/master-0.log"].splitlines()[::199] == [f"{NOON} INFO     line {n}" for n in (100, 299)]
    assert "up 3 days" in files["hosts/worker-1.txt"]
    assert files["describe.txt"].startswith("job:           job01\nstate:         FAILED\n")
    assert "fab bundle" not in files["describe.txt"]
    out, err = capsys.readouterr()
    size = Path("job01-bundle.tar.gz").stat().st_size
    assert out == f"job01-bundle.tar.gz: {size / 1000:.1f} kB, begin with its summary.txt\n"
    assert "no diagnosis by master-0: it never started, was lost, had no bucket, or has not finished it" in err.splitlines()
    assert "master-0 does not answer: it was not queried" in err.splitlines()
    assert [path.name for path in Path().iterdir()] == ["job01-bundle.tar.gz"]
    assert job.fleet.commands == [("worker-1", host_state_command(NOON))]


def test_the_summary_has_the_first_error_and_a_line_per_replica(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "time", lambda: 4000000000.0)
    assert job.bundle() == 0
    lines = read_bundle()["summary.txt"].splitlines()
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


def test_a_full_disk_shows_even_without_a_log(job: Job) -> None:
    job.put_diagnosis("master-0", lines=[])
    job.put_replica(ReplicaRecord("master-0", ReplicaState.EXITED, 1, errorMessage="OSError: [Errno 122] Disk quota exceeded"))
    assert job.bundle() == 0
    assert 'master-0: EXITED with 1; it ran out of disk, "Disk quota exceeded"' in read_bundle()["summary.txt"].splitlines()


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.SUCCEEDED, JobState.CANCELLED])
def test_the_bundle_of_a_job_that_did_not_fail(job: Job, capsys: pytest.CaptureFixture[str], state: JobState) -> None:
    (job.bucket / paths.diagnosis("job01", "worker-0")).unlink()
    job.set_state(state)
    assert job.bundle() == 0
    note = f"job job01 is {state}: no diagnosis was made, as hosts make one when a job FAILED"
    assert note in capsys.readouterr().err.splitlines()
    assert f"Note: {note}" in read_bundle()["summary.txt"]
    assert {"job.json", "logs/master-0.log", "replicas/worker-0.json"} <= set(read_bundle())


def test_a_secret_that_a_host_redacted_is_redacted_everywhere(job: Job) -> None:
    secret = 'sesam"ö\x1b[2J'
    error = FirstError(NOON, f"KeyError: {secret}!")
    text = f"with {secret}\nand {secret}"
    job.put_replica(ReplicaRecord("master-0", ReplicaState.EXITED, 1, errorMessage=text, firstError=error))
    redacted = {"errorMessage": "with [secret]\nand [secret]", "firstError": {"message": "KeyError: [secret]!"}}
    job.put_diagnosis("master-0", lines=[], trainer=redacted)
    job.set_state(JobState.FAILED, errorMessage=f"master 0 failed {secret}")
    assert job.bundle() == 0
    files = read_bundle()
    assert not [name for name, text in files.items() if "sesam" in text]
    assert "Job job01 FAILED: master 0 failed [secret]" in files["summary.txt"]
    assert json.loads(files["replicas/master-0.json"])["firstError"]["message"] == "KeyError: [secret]!"
    assert json.loads(files["job.json"])["errorMessage"] == "master 0 failed [secret]"
    assert files["plan.json"] == '{"plan": 1}'


@pytest.mark.parametrize(
    ("printed", "redacted", "others"),
    [
        ("pass word pass word", "[secret] [secret]", {"with pass word!": "with [secret]!"}),
        ("key pass word0", "key [secret]0", {"with pass word!": "with [secret]!"}),
        ("one hush, two hash", "one [secret], two [secret]", {"one hush": "one hush"}),
        ("[secret] hush", "[secret] [secret]", {"one hush": "one hush"}),
        ("pass word then hush\npass word", "[secret] then [secret]\n[secret]", {"a pass word then": "a [secret] then"}),
    ],
)
def test_a_secrets_value_is_inferred_only_if_certain(job: Job, printed: str, redacted: str, others: dict[str, str]) -> None:
    job.put_diagnosis("master-0", lines=[], trainer={"errorMessage": redacted})
    job.put_replica(ReplicaRecord("master-0", ReplicaState.EXITED, 1, errorMessage=printed))
    job.put(paths.plan("job01"), json.dumps([*others]).encode())
    assert job.bundle() == 0
    files = read_bundle()
    assert json.loads(files["replicas/master-0.json"])["errorMessage"] == redacted
    assert json.loads(files["plan.json"]) == [*others.values()]


@pytest.mark.parametrize("plan", ['{"secrets": ["TOKEN"]}', "[]", '{"secrets"'])
def test_a_log_without_a_diagnosis_is_left_out_if_the_job_has_secrets(
    job: Job, capsys: pytest.CaptureFixture[str], plan: str
) -> None:
    job.put(paths.plan("job01"), plan.encode())
    assert job.bundle() == 0
    files = read_bundle()
    reason = "omitted: the job has secrets, which only a diagnosis hides"
    assert files["logs/master-0.log"] == f"{reason}\n"
    assert "No space left" in files["logs/worker-0.log"]
    note = f"the log of master-0 is {reason}; fab logs job01 shows it"
    assert note in capsys.readouterr().err.splitlines()
    assert f"Note: {note}" in files["summary.txt"]


def test_a_log_is_left_out_if_the_plan_is_unreadable(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    read_all = FolderBucket.read_all

    def fail(store: FolderBucket, names: Iterable[str]) -> Any:
        if paths.plan("job01") in (names := list(names)):
            raise BucketError("it hangs")
        return read_all(store, names)

    monkeypatch.setattr(FolderBucket, "read_all", fail)
    assert job.bundle() == 0
    assert read_bundle()["logs/master-0.log"].startswith("omitted: ")


@pytest.mark.parametrize(
    ("time", "ended", "kept"),
    [
        ("2026-01-31T11:59:59.999Z", "2026-01-31T11:50:00.000Z", False),
        ("2026-01-31T11:59:59.999Z", "2026-01-31T12:09:00.000Z", True),  # this job's own, by a slow clock
        ("2026-01-31T12:00:00.001Z", "2026-01-31T11:50:00.000Z", True),
    ],
)
def test_a_diagnosis_of_an_earlier_job_of_this_id_is_left_out(job: Job, time: str, ended: str, kept: bool) -> None:
    job.set_state(JobState.FAILED, endTime="2026-01-31T12:09:00.000Z")
    job.put_diagnosis("worker-0", **DIAGNOSIS | {"time": time, "clock": {"leader": "master-0", "leaderTime": ended}})
    assert job.bundle() == 0
    files = read_bundle()
    assert ("diagnosis/worker-0.json" in files) == kept
    assert ("logs/worker-0.log" in files) == kept
    note = "Note: the diagnosis by the host of worker-0 is of an earlier job of this id: it is omitted"
    assert (note in files["summary.txt"]) != kept


@pytest.mark.parametrize("redacted", ["[secret]", "a[secret]c[secret]", 7, None])
def test_an_ambiguous_redaction_hides_nothing(job: Job, redacted: object) -> None:
    printed = "abcd" if redacted != "[secret]" else "[secret]"
    job.put_replica(ReplicaRecord("master-0", ReplicaState.EXITED, 1, errorMessage=printed))
    job.put_diagnosis("master-0", lines=[], trainer={"errorMessage": redacted})
    assert job.bundle() == 0
    assert "[secret]" not in read_bundle()["describe.txt"]


def test_the_bundle_of_a_job_with_only_its_record(job: Job) -> None:
    put_job(job.ledger, JobRecord("job00", JobState.QUEUED, createTime=NOON, candidates=HOSTS))
    assert bundle(job.cluster, "job00", "x.tar.gz", False, False) == 0
    files = read_bundle("x.tar.gz")
    assert sorted(files) == ["describe.txt", "job.json", "summary.txt"]
    assert files["summary.txt"].startswith("No replica printed an error.\nJob job00 QUEUED\n\nmaster-0: PREPARING\n")


@pytest.mark.parametrize(
    ("seconds_ago", "lost", "waits"), [(3, [], True), (-500, [], True), (40, [], False), (3, ["master-0"], False)]
)
def test_diagnoses_that_hosts_still_write_are_awaited(
    job: Job, monkeypatch: pytest.MonkeyPatch, seconds_ago: float, lost: list[str], waits: bool
) -> None:
    ended = datetime.now(UTC) - timedelta(seconds=seconds_ago)
    job.set_state(JobState.FAILED, endTime=ended.isoformat(), lostReplicas=lost)
    monkeypatch.setattr("ops.report.bundle.time.sleep", lambda _: job.put_diagnosis("master-0", lines=[]))
    assert job.bundle() == 0
    assert ("diagnosis/master-0.json" in read_bundle()) is waits


def test_diagnoses_are_not_awaited_for_good(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    time = [0.0]
    job.set_state(JobState.FAILED, endTime=datetime.now(UTC).isoformat())
    monkeypatch.setattr("ops.report.bundle.time.monotonic", lambda: time[0])
    monkeypatch.setattr("ops.report.bundle.time.sleep", lambda seconds: time.append(time.pop() + seconds))
    assert job.bundle() == 0
    assert "no diagnosis by master-0: " in read_bundle()["summary.txt"]


@pytest.mark.parametrize("damaged", ['{"lines": [{"time": 1}]', "[]"])
def test_a_damaged_diagnosis_is_a_note_and_the_log_is_used(job: Job, damaged: str) -> None:
    job.put(paths.diagnosis("job01", "master-0"), damaged.encode())
    job.put(paths.diagnosis("job01", "worker-0"), b'{"lines": "left out", "disks": "left out", "clock": 7}')
    assert job.bundle() == 0
    files = read_bundle()
    assert "Note: the diagnosis by the host of master-0 is damaged" in files["summary.txt"]
    assert "logs/master-0.log" in files
    assert files["diagnosis/master-0.json"] == damaged


def test_the_json_output(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    assert job.bundle("b.tgz", as_json=True) == 0
    with tarfile.open("b.tgz") as tar:
        assert {(member.mode, member.name.partition("/")[0]) for member in tar.getmembers()} == {(0o644, "job01-bundle")}
    output = json.loads(capsys.readouterr().out)
    assert (output["jobId"], output["state"], output["dest"], output["diagnosed"]) == ("job01", "FAILED", "b.tgz", ["worker-0"])
    assert output["bytes"] == Path("b.tgz").stat().st_size
    assert sorted(output["files"]) == sorted(read_bundle("b.tgz"))
    assert "master-0 does not answer: it was not queried" in output["notes"]


def test_a_file_is_overwritten_only_with_force(job: Job) -> None:
    Path("b").write_text("mine")
    with pytest.raises(UsageError, match=r"^b is there already: give another --dest, or --force to write over it$"):
        job.bundle("b")
    assert Path("b").read_text() == "mine"
    assert job.bundle("b", force=True) == 0
    assert "summary.txt" in read_bundle("b")


@pytest.mark.parametrize(
    ("dest", "message"),
    [
        (".", r"^\. is a folder: --dest is the file to write$"),
        ("no/b", "^no/b cannot be written: there is no folder no$"),
        ("mine/b", "^mine/b cannot be written: "),
        ("a" * 300, "cannot be written: File name too long$"),
    ],
)
@pytest.mark.parametrize("force", [False, True])
def test_an_invalid_dest_is_refused(job: Job, dest: str, message: str, force: bool) -> None:
    Path("mine").write_text("")
    with pytest.raises(UsageError, match=message):
        job.bundle(dest, force)
    assert job.fleet.commands == []  # refused before anything is read
    assert [path.name for path in Path().iterdir()] == ["mine"]


def test_an_unknown_job_is_refused(job: Job) -> None:
    with pytest.raises(UsageError, match=r"^there is no job .jb01.; did you mean job01[?]; fab jobs lists job01$"):
        bundle(job.cluster, "jb01", None, False, False)


def test_a_bucket_error_is_a_note(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> bytes:
        raise BucketError("it hangs")

    monkeypatch.setattr(job.cluster.bucket, "sizes", fail)
    assert job.bundle() == 0
    assert "Note: the diagnoses were not read: it hangs" in read_bundle()["summary.txt"]


def test_each_encoding_of_a_secret_is_redacted() -> None:
    secret = 'sesam"\xf6\x1b'
    forms = [secret, 'sesam"\xf6␛', json.dumps(secret), json.dumps(secret, ensure_ascii=False)]
    content = "\n".join(forms).encode()
    assert redact({"a": content, "b": b"open"}, {secret: "[secret]"}) == {
        "a": b'[secret]\n[secret]\n"[secret]"\n"[secret]"',
        "b": b"open",
    }
    line = {"abcd": "[secret]", "with abcd": "all [secret]"}
    assert redact({"a": b"with abcd, abcd"}, line) == {"a": b"all [secret], [secret]"}, "the longest first"


def test_the_clock_of_a_host_is_compared_with_this_machines(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.put_diagnosis("worker-0", **DIAGNOSIS | {"clock": {"leader": "master-0", "aheadSeconds": -7.6}})
    monkeypatch.setattr(module.time, "time", lambda: 3999999990.0)
    assert job.bundle() == 0
    line = read_bundle()["summary.txt"].splitlines()[4]
    assert line.endswith("; its clock was 8 s behind that of master-0; its clock is now +10 s off that of this machine")


def test_only_full_disks_and_a_limit_that_was_reached_are_described(job: Job) -> None:
    disks = [
        {"path": "/full", "totalBytes": 100, "freeBytes": 10},
        {"path": "/free", "totalBytes": 100, "freeBytes": 11},
        {"path": "/odd", "totalBytes": "x", "freeBytes": 0},
        "odd",
    ]
    job.put_diagnosis("worker-0", lines=[], disks=disks, trainer=7)
    ended = ReplicaRecord("worker-0", ReplicaState.EXITED, 1, terminationReason="timed out", memoryLimit=1_900_000_000)
    job.put_replica(ended)
    assert job.bundle() == 0
    lines = read_bundle()["summary.txt"].splitlines()
    assert lines[0] == "No replica printed an error."
    assert lines[4].partition("; its clock")[0] == "worker-0 on worker-1: EXITED with 1, timed out; /full is 90 % full"


@pytest.mark.parametrize(
    ("printed", "redacted"),
    [
        ("key abcdefgh", "key [secret]!"),
        ("my key abcdefgh", "key [secret]"),
        ("key abc", "key [secret]"),
        ("a hidden, b hidden.", "a [secret], b [secret]!"),
    ],
)
def test_a_line_that_does_not_match_its_redacted_form_hides_nothing(printed: str, redacted: str) -> None:
    assert module._match_redacted(printed, redacted) == {}


def test_the_shortest_value_that_is_hidden() -> None:
    assert module._match_redacted("key abcd", "key [secret]") == {"key abcd": "key [secret]", "abcd": "[secret]"}
    assert module._match_redacted("a1234 b5678", "a[secret] b[secret]") == {"a1234 b5678": "a[secret] b[secret]"}


def test_the_host_command_is_valid_shell() -> None:
    command = host_state_command("2026-01-31T12:00:00.000Z")
    assert [part.partition("; ")[0] for part in command.split("; echo; echo ")] == [
        "date +%s.%N",
        "'# date -u",
        "'# systemctl list-units --failed --plain --no-legend --no-pager'",
        "'# systemctl show --no-pager -p Id,ActiveState,SubState,Result,ExecMainStatus,NRestarts,StatusText,MemoryCurrent "
        "scaletier.service scaletier-trainer.service'",
        "'# df -h",
        "'# free -m'",
        "'# journalctl -k --no-pager -q --since '\"'\"'2026-01-31 12:00:00 UTC'\"'\"' | grep -iE '\"'\"'out of memory|oom|"
        "killed process'\"'\"' | tail -n 50'",
    ]
    assert command.count(" 2>&1") == 6
    result = subprocess.run(["sh", "-n", "-c", command], capture_output=True, check=False)
    assert (result.returncode, result.stderr) == (0, b"")


def test_the_notify_target_is_redacted(job: Job) -> None:
    plan = Plan("job01", ["master-0"], "task", [], {}, notify='https://example.com/"hidden"')
    job.put(paths.plan("job01"), plan.to_json())
    assert job.bundle() == 0
    assert Plan.from_json(read_bundle()["plan.json"]) == replace(plan, notify="[secret]")
