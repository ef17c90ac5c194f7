"""Check `fab predict --batch`: the effect of its flags, and every call that is refused before the start."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launcherhost import load_program
from opsdata import MODEL_PB, make_cluster, write_files

from hosts.agent.launcher_client import request
from hosts.agent.process import ProgramSpec
from infra.scale_tiers import Role
from jobs.batch_request import FILE, RESTART_EXIT, Request
from jobs.bucket import BucketError
from jobs.folder_bucket import FolderBucket
from jobs.model_records import Version
from jobs.records import Plan, Task
from jobs.token_access import access
from ops.cluster.cluster import ClusterClient
from ops.errors import UsageError
from ops.models.batch import BatchOptions, batch, check_flags, count_replicas, match_files, prepare
from ops.models.lookup import catalog_of
from ops.submit import job_plan
from ops.submit.submit import Submission

launch = load_program("launch")

DIGITS = {"saved_model.pb": "00", "variables/variables.index": "11"}


@pytest.fixture
def cluster(tmp_path: Path) -> ClusterClient:
    """Return a cluster with model `digits` (v1 the default, v2 being created, v3 failed) and three data files."""
    client = make_cluster(tmp_path)
    names = ("data/in/b.json", "data/in/a.json", "data/in/.hidden.json", "data/in/deep/c.json", "data/out.json")
    write_files(tmp_path / "bucket", {**dict.fromkeys(names, "1\n"), "models/digits/versions/v1/saved_model.pb": MODEL_PB})
    catalog = catalog_of(client)
    for name in ("v1", "v2", "v3"):
        version = Version(name, files=DIGITS, token=name)
        catalog.change("digits", lambda record, version=version: record.add_version(version), create=True)  # type: ignore[misc]
    catalog.change("digits", lambda record: record.mark_ready("v1", "v1"))
    catalog.change("digits", lambda record: record.mark_failed("v3", "v3", "why"))
    return client


def make_options(cluster: ClusterClient, **changes: str | None) -> BatchOptions:
    bucket = cluster.inventory.bucket
    paths = {"pattern": f"{bucket}/data/in/*.json", "output": f"{bucket}/predicted"}
    options = {"model": None, "version": None, **paths, **changes}
    return BatchOptions(**{key: value.replace("BUCKET", bucket) if value else value for key, value in options.items()})


def test_the_submitted_job(cluster: ClusterClient) -> None:
    bucket = cluster.inventory.bucket
    submission = prepare(cluster, make_options(cluster, job_id="batch1", signature="serving_default", replicas="3"))
    job = submission.job
    assert (job.id, job.module, job.job_dir) == ("batch1", "hosts.batch.task", f"{bucket}/predicted")
    assert list(job.args) == [
        *("--data", f"{bucket}/data/in/*.json", "--model", f"{bucket}/models/digits/versions/v1"),
        *("--signature", "serving_default", "--job-dir", f"{bucket}/predicted"),
    ]
    assert list(submission.subset.replicas) == ["master-0", *(host.name for host in cluster.inventory.of_role(Role.WORKER))]
    request = Request.from_json(submission.package.files[FILE])
    assert request == Request((f"{bucket}/data/in/a.json", f"{bucket}/data/in/b.json"), DIGITS)
    assert json.loads(submission.package.files[FILE])["inputs"] == list(request.inputs)
    shared = {path for path in submission.package.files if path.startswith(("hosts/serving/", "jobs/"))}
    assert shared == {
        *(f"hosts/serving/{name}.py" for name in ("__init__", "rest", "saved")),
        *(f"jobs/{name}.py" for name in ("__init__", "batch_request", "model_download", "model_signatures")),
    }
    assert submission.data == {}, "it has no training data"
    assert submission.job.policy["restartCodes"] == [RESTART_EXIT], "an unresponsive bucket does not end it"
    assert re.fullmatch(r"predict_\d{8}_\d{6}_[0-9a-f]{6}", prepare(cluster, make_options(cluster)).job.id)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pattern": None}, "--input is missing: files in the bucket, such as BUCKET/data/digits/*.json"),
        ({"output": None}, "--output is missing: a folder in the bucket"),
        ({"model": "digit"}, "there is no model 'digit'; did you mean digits?; there are digits"),
        ({"version": "v11"}, "model digits has no version 'v11'; there are v1, v2, v3; did you mean v1?"),
        ({"version": "v2"}, "version v2 of model digits is CREATING, and only a READY one predicts; READY are v1"),
        ({"version": "v3"}, "version v3 of model digits is FAILED"),
        ({"signature": "serving"}, "--signature 'serving' is not in the model; did you mean serving_default?; it has serving_"),
        ({"pattern": "request.json"}, "--input 'request.json' is not in the bucket, where hosts find it: fab data put PATH"),
        ({"pattern": "gs://other/*"}, "--input 'gs://other/*' is not in the bucket"),
        ({"pattern": "BUCKET/../x"}, "is not in the bucket"),
        ({"pattern": "BUCKET/data/none*"}, "BUCKET/data/none* matches no file of the bucket: fab data ls lists them"),
        ({"pattern": "BUCKET/data/in"}, "is a folder: give files in it, such as BUCKET/data/in/*"),
        ({"output": "/tmp/x"}, "--output '/tmp/x' is not in the bucket: take a path below BUCKET/, such as BUCKET/predictions"),
        ({"output": "BUCKET/data/x"}, "--output 'BUCKET/data/x' is where the bucket keeps other things"),
        ({"output": "BUCKET/full/"}, "--output BUCKET/full is not empty"),
        ({"pattern": "BUCKET/full/*", "output": "BUCKET/full"}, "--input BUCKET/full/x is in --output BUCKET/full"),
        ({"job_id": "1"}, "'1'"),
    ],
)
def test_invalid_calls_are_refused(cluster: ClusterClient, changes: dict[str, Any], message: str) -> None:
    bucket = write_files(Path(cluster.inventory.bucket), {"full/x": "1\n"})
    with pytest.raises(UsageError, match=re.escape(message.replace("BUCKET", str(bucket)))):
        prepare(cluster, make_options(cluster, **changes))


def test_several_inputs_are_separated_by_commas(cluster: ClusterClient) -> None:
    bucket, both = cluster.inventory.bucket, "BUCKET/data/out.json,BUCKET/data/in/*.json,BUCKET/data/in/a.json"
    submission = prepare(cluster, make_options(cluster, pattern=both))
    inputs = Request.from_json(submission.package.files[FILE]).inputs
    assert inputs == tuple(f"{bucket}/data/{name}.json" for name in ("in/a", "in/b", "out"))
    with pytest.raises(UsageError, match=r"^--input BUCKET/data/none\* matches no file".replace("BUCKET", bucket)):
        prepare(cluster, make_options(cluster, pattern=f"{both},BUCKET/data/none*"))


def test_several_inputs_may_be_longer_than_a_path(cluster: ClusterClient, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{number:03}{'x' * 40}.json" for number in range(120)]
    write_files(Path(cluster.inventory.bucket), {f"data/many/{name}": "1\n" for name in names})
    many = make_options(cluster, pattern=",".join(f"BUCKET/data/many/{name}" for name in names))
    assert len(Request.from_json(prepare(cluster, many).package.files[FILE]).inputs) == 120

    def fail(_: str) -> dict[str, int]:
        raise BucketError("the bucket does not answer")

    monkeypatch.setattr(cluster.bucket, "walk", fail)
    with pytest.raises(BucketError, match="does not answer"):
        prepare(cluster, many)


def plan_of(submission: Submission) -> Plan:
    return job_plan.plan(submission.inventory, submission.job, "")


def test_a_file_whose_name_has_a_comma_is_one_input(cluster: ClusterClient) -> None:
    bucket = cluster.inventory.bucket
    write_files(Path(bucket), {"data/in/a.json,b c.json": "1\n"})
    submission = prepare(cluster, make_options(cluster, pattern="BUCKET/data/in/a.json,b c.json"))
    assert Request.from_json(submission.package.files[FILE]).inputs == (f"{bucket}/data/in/a.json,b c.json",)
    # So hosts find the file, which is hashed, and the right to read it.
    assert plan_of(submission).data == [f"{bucket}/data/in/a.json?b?c.json"]


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("BUCKET/*/x.json", "in/x.json"),
        ("BUCKET/i*/x.json", "in/x.json"),
        ("BUCKET/*.json", "x.json"),
        ("BUCKET/jobs/*/output/x.json", "jobs/job01/output/x.json"),
        ("BUCKET/jobs/job01/*/x.json", "jobs/job01/output/x.json"),
        ("BUCKET/jobs/job01/plan.json", "jobs/job01/plan.json"),
        ("BUCKET/cluster/x.json", "cluster/x.json"),
        ("BUCKET/my files/x.json", "my files/x.json"),
    ],
)
def test_inputs_that_a_job_may_not_read_are_refused(cluster: ClusterClient, pattern: str, name: str) -> None:
    bucket = Path(cluster.inventory.bucket)
    write_files(bucket, {name: "1\n", "data/x.json": "1\n"})
    with pytest.raises(UsageError, match=r"is invalid: a job may read data/, and outside it only files of a folder that"):
        prepare(cluster, make_options(cluster, pattern=pattern))
    with pytest.raises(UsageError, match=r"; the first folder may hold no space, comma or similar character\. Valid: "):
        prepare(cluster, make_options(cluster, pattern=pattern))
    (bucket / name).unlink()
    if pattern == "BUCKET/*/x.json":  # it matches only files of data/
        assert prepare(cluster, make_options(cluster, pattern=pattern))


@pytest.mark.parametrize(
    "pattern", ["in/x*.json", "in/deep/*/x.json", "jobs/job01/output/*/x", "jobs/job01/output/x", "in/a b.json"]
)
def test_a_host_shows_the_folder_that_an_input_names(cluster: ClusterClient, pattern: str) -> None:
    name, bucket = pattern.replace("*", "1"), cluster.inventory.bucket
    write_files(Path(bucket), {name: "1\n"})
    plan = plan_of(prepare(cluster, make_options(cluster, pattern=f"BUCKET/{pattern}")))
    google = replace(plan, args=[word.replace(bucket, "gs://mine") for word in plan.args])
    reads = access(google, Task("{}", {"JOB_DIR": "gs://mine/predicted"}), "mine").reads
    named = request(ProgramSpec("job02", plan.args, Path("/x"), {}), bucket)["names"]
    shown = [folder.removeprefix(f"{bucket}/") for path in named if (folder := launch.readable(path, bucket))]
    for folders in (reads, shown):
        assert any(f"{name}/".startswith(f"{folder}/") for folder in folders), folders


def test_a_model_without_a_default_needs_a_version(cluster: ClusterClient) -> None:
    catalog_of(cluster).change("digits", lambda record: replace(record, default=""))
    with pytest.raises(UsageError, match="model digits has no default: give --version; READY are v1"):
        prepare(cluster, make_options(cluster))


@pytest.mark.parametrize(
    ("size", "host_count", "shared_cpus", "count"),
    [
        (0, 5, None, 1),
        (8_420_000, 5, None, 1),
        (16_000_000, 5, None, 2),
        (1_000_000_000, 5, None, 5),
        (1_000_000_000, 5, 2, 2),
        (1_000_000_000, 1, 2, 1),
        (8_000_000, 5, 2, 1),
    ],
)
def test_replicas_are_limited_by_input_size_hosts_and_cpus(
    size: int, host_count: int, shared_cpus: int | None, count: int
) -> None:
    assert count_replicas(size, host_count, shared_cpus) == count


def replicas_of(cluster: ClusterClient, replicas: str | None = None) -> list[str]:
    return list(prepare(cluster, make_options(cluster, replicas=replicas)).subset.replicas)


def test_the_hosts_that_predict(
    cluster: ClusterClient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replicas_of(cluster) == ["master-0"]
    assert capsys.readouterr().err == "1 replica of 3, as 4 B of input need no more: --replicas 3 takes all\n"
    assert replicas_of(cluster, "2") == ["master-0", "worker-0"]
    assert replicas_of(cluster, "1") == ["master-0"]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("ops.models.batch._BYTES_PER_REPLICA", 1)
    cluster.inventory = replace(cluster.inventory, shared_cpus=2)
    capsys.readouterr()
    assert replicas_of(cluster) == ["master-0", "worker-0"]
    assert capsys.readouterr().err == "2 replicas of 3, as the hosts share 2 processors: --replicas 3 takes all\n"
    hosts = tuple(host for host in cluster.inventory.hosts if host.role is not Role.WORKER)
    cluster.inventory = replace(cluster.inventory, hosts=hosts)
    assert replicas_of(cluster) == ["master-0"]
    assert capsys.readouterr().err == "", "the master is the only host"
    for invalid in ("0", "2", "worker=2"):
        with pytest.raises(
            UsageError, match=re.escape(f"--replicas {invalid!r} is invalid. Valid: 1 to 1, the master and workers of stack")
        ):
            replicas_of(cluster, invalid)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("data/in/a.json", ["data/in/a.json"]),
        ("data/*/?.json", ["data/in/a.json", "data/in/b.json"]),
        ("data/in/[bc].json", ["data/in/b.json"]),
        ("data/in/.*.json", ["data/in/.hidden.json"]),
        ("*/*.json", ["data/out.json"]),
        ("data/in/*/*", ["data/in/deep/c.json"]),
    ],
)
def test_a_pattern_matches_files_of_the_bucket(cluster: ClusterClient, pattern: str, names: list[str]) -> None:
    bucket = cluster.inventory.bucket
    assert match_files(cluster, f"{bucket}/{pattern}") == {f"{bucket}/{name}": 2 for name in names}


def test_another_bucket_of_google_is_searched(cluster: ClusterClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_other(url: str) -> FolderBucket:
        assert url == "gs://other"
        return FolderBucket(tmp_path / "bucket")

    monkeypatch.setattr("ops.models.batch.open_bucket", open_other)
    cluster.inventory = replace(cluster.inventory, bucket="gs://mine")
    assert match_files(cluster, "gs://other/data/in/a*") == {"gs://other/data/in/a.json": 2}
    assert match_files(cluster, "gs://mine/data/in/a*") == {"gs://mine/data/in/a.json": 2}


def test_a_batch_waits_for_hosts(cluster: ClusterClient, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr("ops.models.batch.run_submission", lambda _, prepare, *rest: calls.append((prepare(), *rest)) or 3)
    assert batch(cluster, make_options(cluster, job_id="batch1"), follow=False, as_json=True) == 3
    ((submission, *rest),) = calls
    assert (submission.job.id, rest) == ("batch1", [True, False, True, False])


def test_conflicting_flags_are_refused() -> None:
    check_flags(True, None, {"--input": "in", "--no-follow": True})
    check_flags(False, "request.json", {"--input": None, "--no-follow": False})
    with pytest.raises(UsageError, match="--json-instances is for the model server, and --batch runs a job"):
        check_flags(True, "request.json", {})
    with pytest.raises(UsageError, match="--output is valid only with --batch"):
        check_flags(False, None, {"--input": None, "--output": "out"})
