"""Check `fab get` with a bucket that is a directory: all of an output or a part, and no overwriting."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from opsdata import make_cluster, put_job, write_files

from jobs.records import JobRecord
from jobs.states import JobState
from ops import terminal
from ops.cluster.cluster import ClusterClient
from ops.errors import OpsError, UsageError
from ops.show.fetch import get

NOT_FETCHED = "not fetched, as they are links to elsewhere, pipes, sockets or not readable:"
FILES = {"checkpoint": b"1", "model-5.index": b"22", "export/Servo/17/saved_model.pb": b"333"}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterClient:
    """Return a cluster with job00, without output, and job01, the newest, with FILES; in an empty folder."""
    (working_dir := tmp_path / "here").mkdir()
    monkeypatch.chdir(working_dir)
    cluster = make_cluster(tmp_path)
    for n in range(2):
        put_job(cluster.ledger, JobRecord(f"job0{n}", JobState.SUCCEEDED, createTime=f"2026-01-31T12:00:0{n}.000Z"))
    write_files(tmp_path / "bucket/jobs/job01/output", FILES)
    return cluster


def local_files(folder: str = ".") -> dict[str, bytes]:
    root = Path(folder)
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("job", "path", "dest", "target", "files"),
    [
        (None, None, None, "job01", {f"job01/{name}": content for name, content in FILES.items()}),
        ("job01", None, "a/b", "a/b", {f"a/b/{name}": content for name, content in FILES.items()}),
        ("job01", "a/b", None, "a/b", {f"a/b/{name}": content for name, content in FILES.items()}),
        ("job01", "export", None, "export", {"export/Servo/17/saved_model.pb": b"333"}),
        ("job01", "export/Servo", None, "Servo", {"Servo/17/saved_model.pb": b"333"}),
        ("job01", "export/Servo/", "m", "m", {"m/17/saved_model.pb": b"333"}),
        ("job01", "checkpoint", None, "checkpoint", {"checkpoint": b"1"}),
        ("job01", "export/Servo/17/saved_model.pb", "x.pb", "x.pb", {"x.pb": b"333"}),
    ],
)
def test_get_fetches_all_or_a_part_to_dest(
    cluster: ClusterClient,
    capsys: pytest.CaptureFixture[str],
    job: str | None,
    path: str | None,
    dest: str | None,
    target: str,
    files: dict[str, bytes],
) -> None:
    assert get(cluster, job, path, dest, as_json=False) == 0
    assert local_files() == files
    size = f"{sum(map(len, files.values()))} B"
    assert capsys.readouterr().out == f"{terminal.plural(len(files), 'file')}, {size}: {target}\n"


def test_a_file_is_fetched_into_an_existing_folder(cluster: ClusterClient) -> None:
    Path("mine").mkdir()
    Path("mine", "own").write_bytes(b"own")
    assert get(cluster, "job01", "checkpoint", "mine", as_json=False) == 0
    assert get(cluster, "job01", "export/Servo/17/saved_model.pb", "mine", as_json=False) == 0
    assert local_files() == {"mine/own": b"own", "mine/checkpoint": b"1", "mine/saved_model.pb": b"333"}


def test_dest_may_be_absolute(cluster: ClusterClient, tmp_path: Path) -> None:
    assert get(cluster, "job01", f"{tmp_path}/out", None, as_json=False) == 0
    assert local_files(f"{tmp_path}/out") == FILES


@pytest.mark.parametrize(("path", "dest"), [(None, "mine"), ("mine", None), ("export", "mine"), ("checkpoint", "mine/own")])
def test_existing_files_are_never_changed(cluster: ClusterClient, path: str | None, dest: str | None) -> None:
    Path("mine").mkdir()
    Path("mine", "own").write_bytes(b"own")
    with pytest.raises(UsageError, match="is there already: remove it, or give another --dest"):
        get(cluster, "job01", path, dest, as_json=False)
    assert local_files() == {"mine/own": b"own"}


def test_the_json_output(cluster: ClusterClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert get(cluster, "job01", "export", "m", as_json=True) == 0
    output = json.loads(capsys.readouterr().out)
    files = ["export/Servo/17/saved_model.pb"]
    assert output == {"jobId": "job01", "dest": "m", "files": files, "leftOut": [], "bytes": 3}


def test_links_within_the_output_are_followed_and_other_ones_named(
    cluster: ClusterClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "bucket/jobs/job01/output"
    (output / "latest").symlink_to("export")
    (output / "export/Servo/passwd").symlink_to("/etc/passwd")
    assert get(cluster, "job01", "latest", None, as_json=False) == 0
    assert local_files() == {"latest/Servo/17/saved_model.pb": b"333"}
    assert capsys.readouterr().err == ""
    assert get(cluster, "job01", "export", None, as_json=False) == 0
    assert capsys.readouterr().err.strip() == f"{NOT_FETCHED} export/Servo/passwd"
    with pytest.raises(UsageError, match=f"^{NOT_FETCHED} export/Servo/passwd$"):
        get(cluster, "job01", "export/Servo/passwd", None, as_json=False)
    os.mkfifo(output / "checkpoint.x")
    assert get(cluster, "job01", "checkpoint", None, as_json=True) == 0
    printed = capsys.readouterr()
    assert (json.loads(printed.out)["leftOut"], printed.err) == ([], "")


def test_an_output_without_a_file_is_named_with_what_it_has(cluster: ClusterClient, tmp_path: Path) -> None:
    write_files(tmp_path / "bucket/jobs/job00/output", {})
    (tmp_path / "bucket/jobs/job00/output").mkdir(parents=True, exist_ok=True)
    (tmp_path / "bucket/jobs/job00/output/model").symlink_to("/tmp/model")
    with pytest.raises(OpsError, match=rf"has no output in .*; {NOT_FETCHED} model$"):
        get(cluster, "job00", None, None, as_json=False)


def test_what_a_running_job_removes_meanwhile_is_named(
    cluster: ClusterClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_job(cluster.ledger, JobRecord("job02", JobState.RUNNING, createTime="2026-01-31T12:00:03.000Z"))
    download = cluster.bucket.download

    def download_late(name: str, *arguments: Any) -> bool:
        (tmp_path / "bucket" / Path(name).parent / "checkpoint").unlink(missing_ok=True)
        return download(name, *arguments)

    monkeypatch.setattr(cluster.bucket, "download", download_late)
    write_files(tmp_path / "bucket/jobs/job02/output", FILES)
    assert get(cluster, "job02", None, None, as_json=False) == 0
    printed = capsys.readouterr()
    assert printed.out == "2 files, 5 B: job02\n"
    assert "job job02 has removed checkpoint meanwhile" in printed.err
    with pytest.raises(OpsError, match="/output/checkpoint is gone"):
        get(cluster, "job01", None, None, as_json=False)


def test_a_missing_output_or_path_is_an_error(cluster: ClusterClient) -> None:
    with pytest.raises(OpsError, match=r"job job00 \(SUCCEEDED\) has no output in "):
        get(cluster, "job00", None, None, as_json=False)
    with pytest.raises(
        UsageError, match=r"has no exprt/Servo in its output; did you mean export/Servo[?]; .* --dest exprt/Servo"
    ):
        get(cluster, "job01", "exprt/Servo", None, as_json=False)
    message = "job job01 has no checkpont in its output; did you mean checkpoint?; there are checkpoint, export, model-5.index"
    with pytest.raises(UsageError) as error:
        get(cluster, "job01", "checkpont", "m", as_json=False)
    assert str(error.value) == message
    for path in ("exprt", "export/Servo/17/saved_model.p"):
        with pytest.raises(UsageError, match=f"^job job01 has no {path} in its output; did you mean export"):
            get(cluster, "job01", path, None, as_json=False)
    assert local_files() == {}
