"""Check the output of a job: where it is, what of it is what, and that nothing is written elsewhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from opsdata import write_files

from infra.inventory import Inventory
from jobs.folder_bucket import open_bucket
from jobs.records import JobRecord
from jobs.study import Trial
from ops.cluster.cluster import ClusterClient
from ops.cluster.output import JobOutput, find, require_new_or_empty
from ops.errors import OpsError, UsageError

FILES = {
    "model-7": 1,
    "metrics.json": 2,
    "evaluation.json": 3,
    "summaries/events.out.tfevents.1": 4,
    "tfevents/notes.txt": 5,
    "export/Servo/1/saved_model.pb": 6,
    "left/worker-0/model-9": 7,
}


@pytest.fixture
def cluster(inventory: Inventory, tmp_path: Path) -> ClusterClient:
    """Return a cluster whose bucket is a folder, in which job01 has FILES."""
    bucket = tmp_path / "bucket"
    fill(bucket / "jobs/job01/output")
    return ClusterClient(replace(inventory, operator_bucket=str(bucket)))


def fill(folder: Path) -> None:
    write_files(folder, {name: "x" * size for name, size in FILES.items()})


def record(job_dir: str | None = None) -> JobRecord:
    return JobRecord("job01", trainingInput={} if job_dir is None else {"jobDir": job_dir})


@pytest.mark.parametrize("job_dir", [None, "/bucket/jobs/job01/output", "/bucket/jobs/job01/output/"])
def test_the_output_is_in_the_bucket(cluster: ClusterClient, job_dir: str | None) -> None:
    output = find(cluster, record(job_dir))
    assert (output.job_dir, output.files) == ("/bucket/jobs/job01/output", FILES)
    assert output.summaries == ["summaries/events.out.tfevents.1"]
    assert output.checkpoints == ["model-7", "tfevents/notes.txt"]
    assert (output.read("metrics.json"), output.read("none")) == (b"xx", b"")


def test_the_output_may_be_in_another_bucket(cluster: ClusterClient, tmp_path: Path) -> None:
    fill(tmp_path / "other")
    output = find(cluster, record(f"file://{tmp_path}/other"))
    assert (output.job_dir, output.files, output.read("metrics.json")) == (f"file://{tmp_path}/other", FILES, b"xx")
    trial = output.of_trial(Trial(7, {}, "worker-0"))
    assert (trial.job_dir, trial.files, trial._folder) == (f"file://{tmp_path}/other/7", {}, "7")
    output.fetch(["metrics.json"], tmp_path / "fetched")
    assert (tmp_path / "fetched/metrics.json").read_bytes() == b"xx"


@pytest.mark.parametrize("job_dir", ["/bucket2/x", "/elsewhere"])
def test_a_path_outside_the_bucket_cannot_be_read(cluster: ClusterClient, job_dir: str) -> None:
    with pytest.raises(OpsError) as error:
        find(cluster, record(job_dir))
    assert str(error.value) == f"the output of job01 is in {job_dir}, which is not in the bucket of stack test"


def test_a_trial_has_a_folder_of_the_output(cluster: ClusterClient, tmp_path: Path) -> None:
    write_files(tmp_path / "bucket/jobs/job01/output", {"7/metrics.json": "seven", "77/metrics.json": "more"})
    output = find(cluster, record())
    assert output.of_trial(None) is output
    trial = output.of_trial(Trial(7, {}, "worker-0"))
    assert (trial.job_dir, trial.files) == ("/bucket/jobs/job01/output/7", {"metrics.json": 5})
    assert trial.read("metrics.json") == b"seven"


def test_files_are_fetched_below_a_folder_or_to_a_name(cluster: ClusterClient, tmp_path: Path) -> None:
    output, target = find(cluster, record()), tmp_path / "target"
    output.fetch(["export/Servo/1/saved_model.pb", "export/Servo/1/saved_model.pb"], target, "export/Servo/")
    output.fetch(["metrics.json"], target / "mine.json", "metrics.json")
    assert {path.relative_to(target).as_posix(): path.stat().st_size for path in target.rglob("*") if path.is_file()} == {
        "1/saved_model.pb": 6,
        "mine.json": 2,
    }
    cluster.bucket.delete("jobs/job01/output/model-7")
    with pytest.raises(OpsError, match=r"^/bucket/jobs/job01/output/model-7 is gone$"):
        output.fetch(["model-7"], target)


@pytest.mark.parametrize("name", ["/etc/passwd", "../up", "a/../../up", ".."])
def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    output = JobOutput(record(), "/bucket/x", {"ok": 1, name: 1}, open_bucket(str(tmp_path)), "x")
    with pytest.raises(OpsError) as error:
        output.fetch(["ok", name], tmp_path / "target")
    assert str(error.value) == f"the output of job01 has a file of the name {name!r}, which would leave {tmp_path}/target"
    assert not (tmp_path / "target").exists()


def test_no_more_of_a_file_is_read_than_was_listed(tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_bytes(b"{}" + b"grows")
    output = JobOutput(record(), "/bucket/x", {"metrics.json": 2}, open_bucket(str(tmp_path)), "")
    assert (output.read("metrics.json", 2), output.read("none", 2)) == (b"{}", b"")
    with pytest.raises(OpsError, match=r"^metrics.json has 2 B; 1 B is the most$"):
        output.read("metrics.json", 1)


def test_only_a_missing_or_empty_target_is_free(tmp_path: Path) -> None:
    require_new_or_empty(tmp_path / "none")
    (tmp_path / "folder").mkdir()
    require_new_or_empty(tmp_path / "folder")
    (tmp_path / "folder/file").touch()
    for target in (tmp_path / "folder", tmp_path / "folder/file"):
        with pytest.raises(UsageError, match=f"^{target} is there already: remove it, or give another --dest$"):
            require_new_or_empty(target)
