"""Check `fab data` with a bucket that is a directory: uploads, lists, removals, and refused paths."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from opsdata import inventory_json

from jobs.folder import open_bucket
from ops.cluster.cluster import ClusterClient
from ops.cluster.inventory import parse
from ops.errors import UsageError
from ops.submit.data import data


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    (tmp_path / "bucket").mkdir()
    return tmp_path / "bucket"


@pytest.fixture
def cluster(bucket: Path, tmp_path: Path) -> ClusterClient:
    inventory = parse(inventory_json(bucket=str(bucket), operatorBucket=str(bucket)), tmp_path)
    return ClusterClient(inventory, object(), open_bucket(str(bucket)), object())  # type: ignore[arg-type]


def test_put_ls_and_rm(cluster: ClusterClient, bucket: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "pictures"
    (mine / "train").mkdir(parents=True)
    (mine / "train" / "a").write_bytes(b"12")
    (mine / "b").write_bytes(b"3")
    assert data(cluster, None, None, None, sure=True, as_json=False) == 0
    assert "fab data put PATH" in capsys.readouterr().err
    assert data(cluster, "put", str(mine), None, sure=True, as_json=False) == 0
    assert capsys.readouterr().out == f"2 files: {bucket}/data/pictures\n"
    (mine / "b").write_bytes(b"345")
    assert data(cluster, "put", str(mine), None, sure=True, as_json=False) == 0
    assert capsys.readouterr().out == f"2 files, 1 already there with this size: {bucket}/data/pictures\n"
    assert data(cluster, "put", str(mine / "b"), "other/name", sure=True, as_json=False) == 0
    assert (bucket / "data" / "other" / "name").read_bytes() == b"345"
    capsys.readouterr()
    assert data(cluster, "put", str(mine / "b"), "other/name", sure=True, as_json=False) == 0
    assert capsys.readouterr().out == f"1 file, 1 already there with this size: {bucket}/data/other/name\n"
    assert data(cluster, "ls", "other/name", None, sure=True, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["files"] == [{"name": "name", "bytes": 3}]
    capsys.readouterr()
    assert data(cluster, "ls", "pictures", None, sure=True, as_json=True) == 0
    output = json.loads(capsys.readouterr().out)
    assert output == {
        "folder": f"{bucket}/data/pictures",
        "files": [{"name": "b", "bytes": 3}, {"name": "train/a", "bytes": 2}],
    }
    assert data(cluster, "put", str(mine), None, sure=True, as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == {"folder": f"{bucket}/data/pictures", "uploaded": []}
    assert data(cluster, "rm", "pictures", None, sure=True, as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == {"folder": f"{bucket}/data/pictures", "removed": 2}
    assert data(cluster, "rm", "other/name", None, sure=True, as_json=False) == 0
    assert not (bucket / "data" / "pictures").exists()
    assert not (bucket / "data" / "other" / "name").exists()


@pytest.mark.parametrize(
    ("action", "argument", "name", "message"),
    [
        ("lst", None, None, "fab data lst is unknown; did you mean ls?; valid are ls, put, rm"),
        ("put", None, None, "fab data put needs the PATH of a file or folder"),
        ("rm", None, None, "fab data rm needs a NAME"),
        ("rm", "nothing", None, "there is no nothing in the bucket's data; there are none"),
        ("put", "/nowhere", None, "/nowhere is not there: give the path of a file or a folder"),
        ("rm", "../jobs", None, "'../jobs' is no name below data/"),
        ("rm", "pictures", "more", "fab data rm takes one NAME, and 'more' is a second one"),
        ("rm", ".", None, "'.' is no name below data/"),
        ("rm", "/jobs", None, "'/jobs' is no name below data/"),
        ("put", __file__, "a/../../jobs", "'a/../../jobs' is no name below data/"),
    ],
)
def test_invalid_calls_are_refused(
    cluster: ClusterClient, bucket: Path, action: str, argument: str | None, name: str | None, message: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        data(cluster, action, argument, name, sure=True, as_json=False)
    assert not (bucket / "data").exists()


def test_rm_asks_for_confirmation(cluster: ClusterClient, bucket: Path) -> None:
    (bucket / "data").mkdir()
    (bucket / "data" / "mine").write_bytes(b"1")
    with pytest.raises(UsageError, match=r"this would remove .*/data/mine, 1 file, 1 B: say --yes"):
        data(cluster, "rm", "mine", None, sure=False, as_json=False)
    assert (bucket / "data" / "mine").exists()
