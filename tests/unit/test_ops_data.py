"""Check `fab data` with a bucket that is a directory: uploads, lists, removals, and refused paths."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from opsdata import inventory_json

from jobs.folder_bucket import open_bucket
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
    empty = f"nothing is in {bucket}/data: fab data put PATH puts a file or a folder there\n"
    assert capsys.readouterr() == ("", empty)
    assert data(cluster, "put", str(mine), None, sure=True, as_json=False) == 0
    assert capsys.readouterr().out == f"2 files: {bucket}/data/pictures\n"
    assert data(cluster, "ls", "pictures", None, sure=True, as_json=False) == 0
    table = "FILE     SIZE\nb        1 B\ntrain/a  2 B\n"
    assert capsys.readouterr() == (table, f"2 files, 3 B, in {bucket}/data/pictures\n")
    (mine / "b").write_bytes(b"345")
    assert data(cluster, "put", str(mine), None, sure=True, as_json=False) == 0
    printed = capsys.readouterr()
    assert (printed.out, "still there" in printed.err) == (f"2 files, 1 unchanged: {bucket}/data/pictures\n", False)
    (mine / "train" / "a").rename(mine / "c")
    assert data(cluster, "put", str(mine), None, sure=True, as_json=False) == 0
    gone = f"not in {mine}, but still there: train/a; fab data rm removes all\n"
    assert capsys.readouterr().err.endswith(f"\n{gone}")
    (mine / "c").rename(mine / "train" / "a")
    (bucket / "data/pictures/c").unlink()
    assert data(cluster, "put", str(mine / "b"), "other/name", sure=True, as_json=False) == 0
    assert (bucket / "data" / "other" / "name").read_bytes() == b"345"
    capsys.readouterr()
    assert data(cluster, "put", str(mine / "b"), "other/name", sure=True, as_json=False) == 0
    assert capsys.readouterr().out == f"1 file, 1 unchanged: {bucket}/data/other/name\n"
    assert data(cluster, "ls", "other/name", None, sure=True, as_json=True) == 0
    files = [{"name": "name", "bytes": 3}]
    assert json.loads(capsys.readouterr().out) == {"folder": f"{bucket}/data/other/name", "files": files}
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
    capsys.readouterr()
    assert data(cluster, "rm", "other/name", None, sure=True, as_json=False) == 0
    assert capsys.readouterr() == ("", f"1 file, 3 B removed: {bucket}/data/other/name\n")
    assert not (bucket / "data" / "pictures").exists()
    assert not (bucket / "data" / "other" / "name").exists()


def test_put_uploads_a_file_of_the_same_size_that_changed(
    cluster: ClusterClient, bucket: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (mine := tmp_path / "pictures").mkdir()
    for name in ("a", "b", "older"):
        (mine / name).write_bytes(b"1")
    data(cluster, "put", str(mine), None, sure=True, as_json=False)
    (mine / "b").write_bytes(b"2")
    os.utime(mine / "b", (2, 2))
    (restored := tmp_path / "restored").write_bytes(b"0")
    os.utime(restored, (1, 1))
    restored.rename(mine / "older")
    data(cluster, "put", str(mine), None, sure=True, as_json=False)
    assert {path.name: path.read_bytes() for path in (bucket / "data/pictures").iterdir()} == {
        "a": b"1",
        "b": b"2",
        "older": b"0",
    }
    assert capsys.readouterr().out == "".join(f"3 files{more}: {bucket}/data/pictures\n" for more in ("", ", 1 unchanged"))


def test_put_obeys_the_folder_s_own_ignore_files(
    cluster: ClusterClient, bucket: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".gitignore").write_text("*.npz\n")
    (mine := tmp_path / "pictures").mkdir()
    (mine / ".gitignore").write_text("*.tmp\nkept\n")
    (mine / ".scaletierignore").write_text("!kept\nraw\n")
    for name in ("a.npz", "b.tmp", "kept", "raw"):
        (mine / name).write_bytes(b"1")
    assert data(cluster, "put", str(mine), None, sure=True, as_json=False) == 0
    out, err = capsys.readouterr()
    assert out == f"3 files, 2 ignored: {bucket}/data/pictures\n"
    assert f"{mine}: .gitignore excludes b.tmp; a line such as !b.tmp in .scaletierignore includes it" in err
    assert sorted(path.name for path in (bucket / "data/pictures").iterdir()) == [".gitignore", "a.npz", "kept"]


def test_a_file_goes_into_a_folder_and_a_folder_not_over_a_file(
    cluster: ClusterClient, bucket: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (mine := tmp_path / "pictures").mkdir()
    (mine / "a").write_bytes(b"12")
    (other := tmp_path / "b").write_bytes(b"3")
    for source, printed in (
        (mine, "1 file: {}/data/pictures\n"),
        (other, "1 file: {}/data/pictures/b\n"),
        (other, "1 file, 1 unchanged: {}/data/pictures/b\n"),
    ):
        assert data(cluster, "put", str(source), "pictures", sure=True, as_json=False) == 0
        assert capsys.readouterr().out == printed.format(bucket)
    assert sorted(path.name for path in (bucket / "data" / "pictures").iterdir()) == ["a", "b"]
    (more := tmp_path / "more" / "b").mkdir(parents=True)
    (more / "c").write_bytes(b"3")
    (one := tmp_path / "deep").write_bytes(b"3")
    (both := tmp_path / "both").mkdir()
    (both / "deep").write_bytes(b"3")
    assert data(cluster, "put", str(more), "pictures/deep", sure=True, as_json=False) == 0
    for source, name, problem in (
        (more.parent, "pictures", f"pictures/b is a file, and {more} a folder: give it another NAME"),
        (one, "pictures", f"pictures/deep is a folder, and {one} a file: give it another NAME"),
        (both, "pictures", f"pictures/deep is a folder, and {both}/deep a file: give it another NAME"),
        (one, "pictures/b/d/e", "pictures/b is a file: give a NAME that is not below it"),
    ):
        with pytest.raises(UsageError, match=rf"^{bucket}/data/{problem}$"):
            data(cluster, "put", str(source), name, sure=True, as_json=False)
    with pytest.raises(UsageError, match=rf"^{bucket}/data/pictures/b is a file, and {mine} a folder: give it another NAME$"):
        data(cluster, "put", str(mine), "pictures/b", sure=True, as_json=False)
    assert (bucket / "data" / "pictures" / "b").read_bytes() == b"3"
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"/empty holds no file: give the path of a file or a folder$"):
        data(cluster, "put", str(tmp_path / "empty"), None, sure=True, as_json=False)
    (mine / "link").symlink_to(mine / "gone")
    capsys.readouterr()
    assert data(cluster, "put", str(mine), None, sure=True, as_json=False) == 0
    assert f"{mine}: " in capsys.readouterr().err, "a link that leads nowhere is noted"
    with pytest.raises(
        UsageError, match=r"^there is no picture in the bucket's data; did you mean pictures\?; there are pictures$"
    ):
        data(cluster, "rm", "picture", None, sure=True, as_json=False)


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
        ("put", __file__, "a\nb", "'a\\nb' is no name below data/: take one such as pictures or pictures/train"),
        ("ls", "pictures", "more", "fab data ls takes one NAME, and 'more' is a second one"),
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
