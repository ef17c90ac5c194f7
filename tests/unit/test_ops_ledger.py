"""The bucket and its records: nothing is seen half written, an id is used once, and one job has the cluster."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import fsspec
import pytest

from ops.cluster.bucket import Bucket, Reopening, missing, open_bucket
from ops.errors import OpsError, UsageError
from ops.ledger import CURRENT, Ledger
from ops.train.cancel import wait
from replica.record import JobRecord, JobState, ReplicaRecord, ReplicaState


def never() -> None:
    raise AssertionError("no connection is needed")


@pytest.fixture(params=["directory", "objects"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> Bucket:
    """A directory, and an object store, where what is written shows at once and whole."""
    if request.param == "directory":
        return open_bucket(str(tmp_path), never)
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    return Bucket(fs, "/b", renames=False)


@pytest.fixture
def ledger(bucket: Bucket) -> Ledger:
    return Ledger(bucket)


def ago(seconds: float) -> str:
    return (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def beat(ledger: Ledger, job: str, name: str, seconds_ago: float, state: ReplicaState = ReplicaState.RUNNING) -> None:
    record = ReplicaRecord(name, state=str(state), heartbeatTime=ago(seconds_ago))
    ledger.bucket.write(f"jobs/{job}/replicas/{name}.json", record.to_json().encode())


def test_objects(bucket: Bucket, tmp_path: Path) -> None:
    assert bucket.read("a/b/c.json") is None
    assert bucket.names("a/b") == {}
    assert bucket.walk("a") == {}
    bucket.write("a/b/c.json", b"1")
    bucket.write("a/b/c.json", b"22")
    assert bucket.read("a/b/c.json") == b"22"
    assert bucket.names("a/b") == {"c.json": 2}
    big = tmp_path / "big"
    big.write_bytes(b"x" * 3_000_000)
    sizes: list[int] = []
    bucket.upload("a/d/big", big, sizes.append)
    assert sum(sizes) == 3_000_000
    assert bucket.walk("a") == {"b/c.json": 2, "d/big": 3_000_000}
    bucket.download("a/d/big", tmp_path / "out" / "deep" / "big")
    assert (tmp_path / "out" / "deep" / "big").read_bytes() == big.read_bytes()
    assert list((tmp_path / "out" / "deep").iterdir()) == [tmp_path / "out" / "deep" / "big"]


def test_what_is_not_there_in_full() -> None:
    assert missing({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 1}) == ["b", "c"]


def at_once(count: int, work: Callable[[int], bool]) -> list[bool]:
    barrier, won = threading.Barrier(count), [False] * count

    def run(n: int) -> None:
        barrier.wait()
        won[n] = work(n)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return won


def test_of_several_creators_one_wins(tmp_path: Path) -> None:
    won = at_once(8, lambda n: open_bucket(str(tmp_path), never).create("jobs/job01/job.json", b"%d" % n))
    assert sum(won) == 1
    assert open_bucket(str(tmp_path), never).read("jobs/job01/job.json") == b"%d" % won.index(True)
    assert [path.name for path in (tmp_path / "jobs/job01").iterdir()] == ["job.json"]


def test_an_id_is_used_once(ledger: Ledger) -> None:
    assert ledger.create(JobRecord("job01", submittedBy="ann"))
    assert not ledger.create(JobRecord("job01", submittedBy="bob"))
    record = ledger.job("job01")
    assert record is not None
    assert record.submittedBy == "ann"


def test_a_job_that_is_not_there(ledger: Ledger) -> None:
    with pytest.raises(UsageError, match="no job 'job01'; none was started yet"):
        ledger.existing_job("job01")
    for n in range(7):
        ledger.create(JobRecord(f"job0{n}", createTime=ago(100 - n)))
    with pytest.raises(UsageError, match=r"there are job06, job05, job04, job03, job02, and 2 more \(fab jobs\)"):
        ledger.existing_job("nope")


def take(ledger: Ledger, job: str) -> bool:
    try:
        ledger.acquire(job)
    except UsageError:
        return False
    return ledger.create(JobRecord(job))


def test_the_cluster_is_one_jobs_at_a_time(ledger: Ledger) -> None:
    assert take(ledger, "job01")
    with pytest.raises(UsageError, match=r"job job01 is QUEUED, started by .*@.* at .*: wait for it .* or fab cancel job01"):
        ledger.acquire("job02")
    assert ledger.newest() == "job01"
    ledger.write(JobRecord("job01").to(JobState.FAILED))
    assert take(ledger, "job02")
    assert ledger.newest() == "job02"
    assert json.loads(ledger.bucket.read(CURRENT) or b"")["jobId"] == "job02"


def test_a_job_that_is_about_to_be_written_has_the_cluster(ledger: Ledger) -> None:
    ledger.acquire("job01")
    with pytest.raises(UsageError, match="job job01 is being submitted"):
        ledger.acquire("job02")
    assert ledger.job("job01") is None


@pytest.mark.parametrize("before", [None, JobState.FAILED])
def test_of_several_in_the_same_second_one_gets_the_cluster(tmp_path: Path, before: JobState | None) -> None:
    if before:
        first = Ledger(open_bucket(str(tmp_path), never))
        first.acquire("job00")
        first.create(JobRecord("job00").to(before))
    won = at_once(8, lambda n: take(Ledger(open_bucket(str(tmp_path), never)), f"job{n + 1}"))
    assert sum(won) == 1
    assert Ledger(open_bucket(str(tmp_path), never)).newest() == f"job{won.index(True) + 1}"


def test_one_who_died_before_telling_has_the_cluster_all_the_same(ledger: Ledger) -> None:
    take(ledger, "job01")
    ledger.write(JobRecord("job01").to(JobState.FAILED))
    current = ledger.bucket.read(CURRENT) or b""
    take(ledger, "job02")
    ledger.bucket.write(CURRENT, current)
    with pytest.raises(UsageError, match="job02 is QUEUED"):
        ledger.acquire("job03")


def test_a_job_of_which_nothing_is_heard_gives_the_cluster_up(ledger: Ledger) -> None:
    ledger.acquire("job01")
    ledger.create(JobRecord("job01", createTime=ago(1000)).to(JobState.PREPARING))
    beat(ledger, "job01", "ps-0", 200)
    with pytest.raises(UsageError, match="job01 is PREPARING"):
        ledger.acquire("job02")
    beat(ledger, "job01", "ps-0", 900)
    ledger.acquire("job02")
    record = ledger.job("job01")
    assert record is not None
    assert record.state == JobState.FAILED
    assert "nothing was heard of its replicas for 15 minutes" in record.errorMessage


def test_the_replicas_of_a_job(ledger: Ledger) -> None:
    record = JobRecord("job01", replicas=[{"name": "master-0", "exitCode": 0}, {"name": "ps-0", "exitCode": 143}])
    beat(ledger, "job01", "ps-0", 1)
    assert [(replica.name, replica.exitCode) for replica in ledger.replicas(record)] == [("master-0", 0), ("ps-0", None)]
    assert ledger.last_sign(JobRecord("job01", createTime=ago(100))) == pytest.approx(1, abs=0.5)


def test_cancelling_waits_for_the_leader(ledger: Ledger) -> None:
    running = JobRecord("job01").to(JobState.PREPARING).to(JobState.RUNNING)
    ledger.create(running)
    beat(ledger, "job01", "ps-0", 0)
    assert ledger.request_cancel("job01")
    assert not ledger.request_cancel("job01")
    with pytest.raises(OpsError, match="is RUNNING after 0 s; its replicas know that they are to stop"):
        wait(ledger, running, seconds=0.05, poll=0.01)
    ledger.write(running.to(JobState.CANCELLING).to(JobState.CANCELLED))
    assert wait(ledger, running, seconds=5, poll=0.01).state == JobState.CANCELLED


@pytest.mark.parametrize("state", [JobState.PREPARING, JobState.RUNNING, JobState.CANCELLING])
def test_cancelling_without_a_living_replica(ledger: Ledger, state: JobState) -> None:
    record = replace(JobRecord("job01", createTime=ago(500)), state=str(state))
    ledger.create(record)
    beat(ledger, "job01", "ps-0", 100)
    ended = wait(ledger, record, seconds=5, poll=0.01)
    assert (ended.state, ended.errorMessage) == (JobState.CANCELLED, "cancelled; no replica was alive")
    assert ledger.job("job01") == ended


def test_a_bucket_is_opened_again_once() -> None:
    opened: list[Bucket] = []

    def opener() -> Bucket:
        opened.append(Bucket(None, "", renames=False))
        return opened[-1]

    def work(bucket: Bucket) -> int:
        if len(opened) == 1:
            raise OSError("Socket is closed")
        return len(opened)

    reopening = Reopening(opener)
    with pytest.raises(OSError, match="closed"):
        reopening.call(work)
    assert reopening.call(work) == 2
    assert reopening.call(work) == 2
