"""`fab delete`, `fab prune` and `fab data` against a bucket that is a directory: what goes, what stays, and who is asked."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from opsdata import inventory_json, put_job

from jobs.folder import Folder
from jobs.ledger import Ledger
from jobs.records import JobRecord
from jobs.states import JobState
from ops.cluster.bucket import open_bucket
from ops.cluster.cluster import Cluster
from ops.cluster.inventory import parse
from ops.errors import UsageError
from ops.train import delete as module
from ops.train.config import Flags
from ops.train.data import data
from ops.train.delete import delete, prune
from ops.train.train import resumed

STATES = (JobState.SUCCEEDED, JobState.FAILED, JobState.RUNNING, JobState.CANCELLED)


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    return tmp_path / "bucket"


@pytest.fixture
def cluster(bucket: Path, tmp_path: Path) -> Cluster:
    """A cluster with job00 to job03, the later the newer, each with a model of 3 bytes; job02 runs."""
    bucket.mkdir()
    inventory = parse(inventory_json(bucket=str(bucket), operatorBucket=str(bucket)), tmp_path)
    ledger = Ledger(Folder(bucket))
    for n, state in enumerate(STATES):
        put_job(ledger, JobRecord(f"job0{n}", state, createTime=f"2026-01-31T12:00:0{n}.000Z"))
        model = bucket / "jobs" / f"job0{n}" / "output" / "deep" / "model"
        model.parent.mkdir(parents=True)
        model.write_bytes(b"123")
    return Cluster(inventory, object(), open_bucket(str(bucket), lambda: None), ledger)  # type: ignore[arg-type]


def there(bucket: Path) -> list[str]:
    return sorted(path.name for path in (bucket / "jobs").iterdir())


def test_a_job_is_deleted_with_all_that_is_its(cluster: Cluster, bucket: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert delete(cluster, ["job00"], sure=True) == 0
    assert there(bucket) == ["job01", "job02", "job03"]
    assert capsys.readouterr().out.startswith("job00 deleted, ")


@pytest.mark.parametrize(
    ("jobs", "says"),
    [
        ([], "delete which job? fab jobs lists them"),
        (["job02"], "job job02 is RUNNING: fab cancel job02 ends it first"),
        (["job00", "job02"], "job job02 is RUNNING"),
        (["job09"], "there is no job 'job09'; did you mean job0"),
        (["job00"], "this would delete job00, "),
    ],
)
def test_what_is_not_deleted(cluster: Cluster, bucket: Path, jobs: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        delete(cluster, jobs, sure=says.startswith("job"))
    assert len(there(bucket)) == 4


@pytest.mark.parametrize(("answer", "gone"), [("y\n", True), ("Yes\n", True), ("n\n", False), ("\n", False), ("", False)])
def test_it_asks_first(cluster: Cluster, bucket: Path, monkeypatch: pytest.MonkeyPatch, answer: str, gone: bool) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(module.sys, "stdin", Terminal(answer))
    if gone:
        assert delete(cluster, ["job00"], sure=False) == 0
    else:
        with pytest.raises(UsageError, match="nothing was deleted"):
            delete(cluster, ["job00"], sure=False)
    assert ("job00" in there(bucket)) is not gone


def test_an_output_that_another_job_goes_on_in_stays(cluster: Cluster, bucket: Path) -> None:
    put_job(cluster.ledger, JobRecord("later", JobState.FAILED, trainingInput={"jobDir": f"{bucket}/jobs/job00/output"}))
    put_job(cluster.ledger, JobRecord("other", JobState.FAILED, trainingInput={"jobDir": f"{bucket}/jobs/job001/output"}))
    with pytest.raises(UsageError, match="job later has its output in that of job00: delete it, too, or keep both"):
        delete(cluster, ["job00"], sure=True)
    assert delete(cluster, ["job00", "later", "job00"], sure=True) == 0
    assert there(bucket) == ["job01", "job02", "job03", "other"]


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        ("0", ["job02"]),
        ("1", ["job02", "job03"]),
        ("2", ["job01", "job02", "job03"]),
        ("9", ["job00", "job01", "job02", "job03"]),
    ],
)
def test_all_but_the_newest_that_have_ended(cluster: Cluster, bucket: Path, keep: str, left: list[str]) -> None:
    assert prune(cluster, keep, sure=True) == 0
    assert there(bucket) == left


def test_what_others_go_on_in_is_not_pruned(cluster: Cluster, bucket: Path, capsys: pytest.CaptureFixture[str]) -> None:

    put_job(cluster.ledger, JobRecord("job02", JobState.RUNNING, trainingInput={"jobDir": f"{bucket}/jobs/job00/output"}))
    assert prune(cluster, "0", sure=True) == 0
    assert there(bucket) == ["job00", "job02"]
    assert "job00 stays: a job that stays has its output there" in capsys.readouterr().err


@pytest.mark.parametrize(("keep", "says"), [(None, "how many are to stay?"), ("few", "--keep 'few' is no number of jobs")])
def test_a_number_that_is_none(cluster: Cluster, keep: str | None, says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        prune(cluster, keep, sure=True)


def test_a_job_that_goes_on_where_another_ended(cluster: Cluster, bucket: Path) -> None:
    assert resumed(cluster, Flags("new", resume="job00")).job_dir == f"{bucket}/jobs/job00/output"
    with pytest.raises(UsageError, match="job job02 is RUNNING, and two jobs cannot write to one output"):
        resumed(cluster, Flags("new", resume="job02"))
    with pytest.raises(UsageError, match="--resume goes on in the output of that job, and --job-dir names another"):
        resumed(cluster, Flags("new", resume="job00", job_dir="/bucket/x"))
    put_job(cluster.ledger, JobRecord("empty", JobState.FAILED))
    with pytest.raises(
        UsageError, match=r"job empty left no checkpoint in .*/jobs/empty/output: there is nothing to go on from"
    ):
        resumed(cluster, Flags("new", resume="empty"))


def test_data_is_put_listed_and_removed(
    cluster: Cluster, bucket: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "pictures"
    (mine / "train").mkdir(parents=True)
    (mine / "train" / "a").write_bytes(b"12")
    (mine / "b").write_bytes(b"3")
    assert data(cluster, None, None, None, as_json=False) == 0
    assert "fab data put PATH" in capsys.readouterr().err
    assert data(cluster, "put", str(mine), None, as_json=False) == 0
    assert capsys.readouterr().out == f"2 files: {bucket}/data/pictures\n"
    (mine / "b").write_bytes(b"345")
    assert data(cluster, "put", str(mine), None, as_json=False) == 0
    assert capsys.readouterr().out == f"2 files, 1 were there in their size: {bucket}/data/pictures\n"
    assert data(cluster, "put", str(mine / "b"), "other/name", as_json=False) == 0
    assert (bucket / "data" / "other" / "name").read_bytes() == b"345"
    capsys.readouterr()
    assert data(cluster, "ls", "pictures", None, as_json=True) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed == {
        "folder": f"{bucket}/data/pictures",
        "files": [{"name": "b", "bytes": 3}, {"name": "train/a", "bytes": 2}],
    }
    assert data(cluster, "rm", "pictures", None, as_json=False) == 0
    assert data(cluster, "rm", "other/name", None, as_json=False) == 0
    assert not (bucket / "data" / "pictures").exists()
    assert not (bucket / "data" / "other" / "name").exists()


@pytest.mark.parametrize(
    ("action", "what", "name", "says"),
    [
        ("lst", None, None, "fab data lst is unknown; did you mean ls?; valid are ls, put, rm"),
        ("put", None, None, "fab data put needs the PATH of a file or folder"),
        ("rm", None, None, "fab data rm needs a NAME"),
        ("rm", "nothing", None, "there is no nothing in the bucket's data; there are none"),
        ("put", "/nowhere", None, "/nowhere is not there: give the path of a file or a folder"),
        ("rm", "../jobs", None, "'../jobs' is no name below data/"),
        ("rm", ".", None, "'.' is no name below data/"),
        ("rm", "/jobs", None, "'/jobs' is no name below data/"),
        ("put", __file__, "a/../../jobs", "'a/../../jobs' is no name below data/"),
    ],
)
def test_data_that_is_wrong(cluster: Cluster, bucket: Path, action: str, what: str | None, name: str | None, says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        data(cluster, action, what, name, as_json=False)
    assert len(there(bucket)) == 4
