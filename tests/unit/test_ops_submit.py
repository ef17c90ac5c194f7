"""How a job is handed over: what each host is told, and that a failure or an interrupt leaves nothing behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ops.cluster.bucket import open_bucket
from ops.cluster.cluster import Cluster
from ops.cluster.fanout import Outcome, fan_out
from ops.cluster.inventory import Inventory
from ops.cluster.remote import Ran
from ops.errors import HostError, HostsError, UsageError
from ops.ledger import Ledger
from ops.package import package
from ops.train import push, train
from ops.train.config import Flags, build_job
from ops.train.submit import Submission, submit
from replica.record import JobState

TINY = Path(__file__).resolve().parents[1] / "trainers" / "tiny"


class FakeFleet:
    """Hosts that remember what they were told; `answers` says what becomes of a command."""

    def __init__(self, inventory: Inventory, answers: Callable[[str, str], Ran | None] = lambda *_: None) -> None:
        self.inventory, self.answers = inventory, answers
        self.told: list[tuple[str, str]] = []
        self._lock = threading.Lock()

    def run(self, name: str, command: str, stdin: bytes | None = None) -> Ran:
        with self._lock:
            self.told.append((name, command))
        return self.answers(name, command) or Ran(name, 0, "")

    def must(self, name: str, command: str, what: str, stdin: bytes | None = None) -> str:
        ran = self.run(name, command, stdin)
        if ran.exited:
            raise HostError(name, what, ran.exited, ran.output)
        return ran.output

    def each(self, names: Any, work: Any, seconds: float, done: Any = None) -> Outcome[Any]:
        return fan_out(names, work, seconds, done)

    def connect_all(self, names: Any, done: Any = None) -> None: ...

    def any_connection(self) -> None:
        raise AssertionError("the bucket is a directory")

    connection = any_connection


@pytest.fixture
def submission(inventory: Inventory, tmp_path: Path) -> Submission:
    inventory = replace(inventory, operator_bucket=str(tmp_path / "bucket"))
    (tmp_path / "bucket").mkdir()
    return Submission(inventory, build_job(Flags("job01"), inventory, "tiny"), package.build(TINY, "tiny.task"), {})


@pytest.fixture
def ledger(submission: Submission) -> Ledger:
    return Ledger(open_bucket(submission.inventory.operator_bucket, lambda: None))


def on(fleet: FakeFleet, ledger: Ledger | None = None) -> Cluster:
    return Cluster(fleet.inventory, fleet, ledger=ledger)  # type: ignore[arg-type]


def state(ledger: Ledger) -> tuple[str, str]:
    record = ledger.job("job01")
    assert record is not None
    return record.state, record.errorMessage


def test_every_host_is_told_once(submission: Submission, ledger: Ledger) -> None:
    fleet = FakeFleet(submission.inventory)
    submit(on(fleet, ledger), submission)
    assert sorted(fleet.told) == sorted((name, push.take_in_command("job01")) for name in submission.inventory.names)
    assert state(ledger) == ("PREPARING", "")
    assert ledger.bucket.read("jobs/job01/package.tar.gz") == submission.package.archive
    assert b'"module": "tiny.task"' in (ledger.bucket.read("jobs/job01/manifest.json") or b"")
    assert ledger.newest() == "job01"


def test_data_is_there_before_a_host_starts(submission: Submission, ledger: Ledger, tmp_path: Path) -> None:
    (tmp_path / "train.tfrecord").write_bytes(b"12345")
    submission = replace(submission, data={"train.tfrecord": tmp_path / "train.tfrecord"})
    seen: list[int | None] = []
    fleet = FakeFleet(submission.inventory, lambda *_: seen.append(ledger.bucket.names("data/mnist").get("train.tfrecord")))
    submit(on(fleet, ledger), submission)
    assert seen == [5] * 5


def test_data_in_another_number_of_files_goes(submission: Submission, ledger: Ledger, tmp_path: Path) -> None:
    new = "train-00000-of-00001.tfrecord"
    (tmp_path / new).write_bytes(b"12345")
    for name in ("train-00000-of-00002.tfrecord", "train-00001-of-00002.tfrecord.gz", "train-mine.tfrecord"):
        ledger.bucket.upload(f"data/mnist/{name}", b"1")
    submit(on(FakeFleet(submission.inventory), ledger), replace(submission, data={new: tmp_path / new}))
    assert ledger.bucket.names("data/mnist") == {new: 5, "train-mine.tfrecord": 1}


def test_a_host_that_fails_ends_the_job(submission: Submission, ledger: Ledger) -> None:
    def answers(name: str, command: str) -> Ran | None:
        return Ran(name, 2, "noise\ntar: No space left\n") if name == "worker-1" and "tar" in command else None

    fleet = FakeFleet(submission.inventory, answers)
    with pytest.raises(
        HostsError, match=r"worker-1 could not start its replica.*No space left: job job01 is FAILED, nothing runs"
    ):
        submit(on(fleet, ledger), submission)
    assert state(ledger)[0] == JobState.FAILED
    assert "No space left" in state(ledger)[1]
    stopped = {name for name, command in fleet.told if command == push.stop_command()}
    assert stopped == set(submission.inventory.names)
    ledger.acquire("job02")


def test_an_interrupt_is_undone(submission: Submission, ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    class Interrupted(FakeFleet):
        def each(self, names: Any, work: Any, seconds: float, done: Any = None) -> Outcome[Any]:
            if done:
                raise KeyboardInterrupt
            return super().each(names, work, seconds)

    fleet = Interrupted(submission.inventory)
    with pytest.raises(KeyboardInterrupt):
        submit(on(fleet, ledger), submission)
    assert state(ledger) == ("CANCELLED", "fab train was stopped before the replicas had started")
    assert {command for _, command in fleet.told} == {push.stop_command()}
    assert "job01 is CANCELLED, and nothing runs" in capsys.readouterr().err
    ledger.acquire("job02")


def test_a_job_that_has_the_cluster_is_left_alone(submission: Submission, ledger: Ledger) -> None:
    fleet = FakeFleet(submission.inventory)
    submit(on(fleet, ledger), submission)
    second = replace(submission, job=replace(submission.job, id="job02"))
    fleet.told.clear()
    with pytest.raises(UsageError, match="job job01 is PREPARING"):
        submit(on(fleet, ledger), second)
    assert fleet.told == []
    assert ledger.job("job02") is None
    assert state(ledger)[0] == "PREPARING"


def checks(room: int, lacking: str = "") -> Callable[[str, str], Ran | None]:
    return lambda name, command: Ran(name, 0, f"{room}\n{room}\n{lacking}\n") if command.startswith("df") else None


def test_hosts_are_checked_before_anything_is_changed(submission: Submission, ledger: Ledger) -> None:
    fleet = FakeFleet(submission.inventory, checks(10**10))
    train._check_hosts(on(fleet), submission)
    assert ledger.bucket.walk("") == {}
    with pytest.raises(UsageError, match=r"ps-0 has only 50.0 MB free in /var/lib/scaletier, a job needs 100"):
        train._check_hosts(on(FakeFleet(submission.inventory, checks(50_000_000))), submission)
    wanting = replace(submission, package=replace(submission.package, imports={"pandas": "tiny/task.py:3"}))
    with pytest.raises(UsageError, match=r"tiny/task.py:3 imports pandas, which neither the package tiny nor the hosts have"):
        train._check_hosts(on(FakeFleet(submission.inventory, checks(10**10, "pandas"))), wanting)
    ledger.create(submission.record())
    with pytest.raises(UsageError, match="job id 'job01' was used before"):
        train._check_hosts(on(fleet), submission)


def test_the_shipped_trainer_needs_data(inventory: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "MNIST", tmp_path)
    inventory = replace(inventory, operator_bucket=str(tmp_path))
    fleet = FakeFleet(inventory, checks(10**10))
    with pytest.raises(UsageError, match="there is no MNIST to train on: run make data"):
        train._check_hosts(on(fleet), train.prepare(inventory, Flags("job01"), str(train.SHIPPED)))
    told = train.prepare(inventory, Flags("job01", args="--train-data=x --eval-data=y"), str(train.SHIPPED))
    assert told.data == {}
    train._check_hosts(on(fleet), told)
    (tmp_path / "train-0.tfrecord").write_bytes(b"")
    assert list(train.prepare(inventory, Flags("job01"), None).data) == ["train-0.tfrecord"]


def test_arguments_that_are_no_utf_8_are_shown_but_sent_as_they_are(inventory: Inventory) -> None:
    made = build_job(Flags("job01", more_args=["\udcff"]), inventory, "tiny")
    submission = Submission(inventory, made, package.build(TINY, "tiny.task"), {})
    assert submission.record().trainingInput["args"] == ["\ufffd"]
    assert submission.record().to_json().encode()
    assert made.plan(inventory, "ps-0").args == ["\udcff"]
    assert submission.streams()("ps-0")
