"""Check manifest.json: its content, its summary in a record, and how arguments are read and changed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from infra.inventory import Inventory
from jobs.records import JobRecord
from ops.package import package
from ops.submit import arguments, manifest
from ops.submit.config import JobFlags, build_job
from ops.submit.job_plan import plan

TINY = Path(__file__).resolve().parents[1] / "trainers" / "tiny"


def test_the_manifest_has_all_inputs_of_a_job(inventory: Inventory) -> None:
    job = build_job(JobFlags("job01", more_args=["--a", "\udcff"], labels=["owner=ann"]), inventory, "tiny")
    built = package.build(TINY, "tiny.task")
    content = manifest.manifest(inventory, job, built)
    assert manifest.to_json(content) == json.dumps(content, indent=1).encode() + b"\n"
    full = json.loads(manifest.to_json(content))
    assert (full["job"], full["module"], full["args"]) == ("job01", "tiny.task", ["--a", "\udcff"])
    assert full["package"]["sha256"] == built.sha256
    assert full["package"]["dependencies"] == []
    wheels = {"tabulate-0.9.0.dist-info/METADATA": b"", "tabulate-0.9.0.dist-info/RECORD": b"", "tabulate.py": b""}
    with_wheels = manifest.manifest(inventory, job, replace(built, dependency_files=wheels))
    assert with_wheels["package"]["dependencies"] == ["tabulate-0.9.0"]
    assert set(full["package"]["files"]) == set(built.files)
    assert full["cluster"] == {
        "scaleTier": "CUSTOM",
        "replicas": {"ps": 1, "master": 1, "worker": 2, "evaluator": 1},
        "machineTypes": {
            "ps": "n1-standard-4",
            "master": "n1-highcpu-8",
            "worker": "n1-highcpu-8",
            "evaluator": "n1-highcpu-8",
        },
    }
    assert full["labels"] == {"owner": "ann"}
    assert set(full["versions"]) == {"scaletier"}
    again = manifest.manifest(inventory, replace(job, reproduces="job00", environment={"A": "b"}), built)
    assert again == {**content, "reproduces": "job00", "environment": {"A": "b"}}
    config = {key: value for key, value in job.training_input.items() if key not in manifest._OWN_KEYS}
    assert content == {
        "job": "job01",
        "package": full["package"],
        "module": "tiny.task",
        "command": [],
        "folder": "",
        "args": ["--a", "\udcff"],
        "jobDir": "/bucket/jobs/job01/output",
        "labels": {"owner": "ann"},
        "environment": {},
        "secrets": [],
        "config": config,
        "cluster": full["cluster"],
        "versions": full["versions"],
    }
    assert config == {}


def test_config_keeps_keys_that_the_manifest_lacks(inventory: Inventory, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "trainingInput: {scaleTier: CUSTOM, masterType: n1-highcpu-8, pythonModule: tiny.task, args: [x],"
        " useChiefInTfConfig: false, scheduling: {maxRestarts: 1}}"
    )
    job = build_job(JobFlags("job01", config=str(tmp_path / "config.yaml")), inventory, "tiny")
    full = manifest.manifest(inventory, job, package.build(TINY, "tiny.task"))
    assert full["config"] == {"useChiefInTfConfig": False, "scheduling": {"maxRestarts": 1}}


def test_a_record_has_the_short_form_and_formats_it(inventory: Inventory) -> None:
    job = build_job(JobFlags("job01"), inventory, "tiny")
    full = manifest.manifest(inventory, job, package.build(TINY, "tiny.task"))
    short = manifest.summarize(full)
    assert set(short) == {"package", "cluster", "versions"}
    assert "files" not in short["package"]
    assert JobRecord.from_json(JobRecord("job01", manifest=short).to_json()).manifest == short
    data = {"sha256": "ab" * 32, "files": 2, "bytes": 58_900_000, "paths": []}
    assert manifest.format_lines({**short, "data": data}) == {
        "package": f"tiny sha256:{full['package']['sha256'][:16]}",
        "cluster": "CUSTOM: 1 ps (n1-standard-4), 1 master (n1-highcpu-8), 2 worker (n1-highcpu-8), 1 evaluator (n1-highcpu-8)",
        "versions": f"scaletier {short['versions']['scaletier']}",
        "data": "sha256:abababababababab (2 files, 58.9 MB)",
    }
    assert manifest.format_lines({"data": {"notHashed": "gone"}})["data"] == "not hashed: gone"
    assert (
        manifest.versions_line({"versions": {"python": "3.11", "tensorflow": None, "torch": "2.9"}}) == "python 3.11, torch 2.9"
    )
    assert manifest.summarize({**full, "data": data, "reproduces": "job00"}) == {**short, "data": data, "reproduces": "job00"}


def test_a_record_of_an_older_version_is_read() -> None:
    record = JobRecord.from_json('{"jobId": "old", "state": "SUCCEEDED", "createTime": "2026-01-01T00:00:00Z"}')
    assert record.manifest == {}
    assert set(manifest.format_lines(record.manifest).values()) == {""}


@pytest.mark.parametrize(
    ("args", "paths"),
    [
        ([], []),
        (["--train-data", "/a,/b", "--eval_data_paths=/c"], ["/a", "/b", "/c"]),
        (["--data-dir=/d", "--metadata", "x", "--data-format=nchw", "--data"], ["/d"]),
        (["--train-files", "/t", "--eval_dir=/e", "--test-path", "/p", "--dataset", "/s"], ["/t", "/e", "/p", "/s"]),
        (["--log-file", "/l", "--output-path=/o", "--train-steps", "5", "--files", "/f"], []),
    ],
)
def test_data_paths_are_read_from_arguments(inventory: Inventory, args: list[str], paths: list[str]) -> None:
    assert arguments.data_paths(args) == paths
    assert plan(inventory, build_job(JobFlags("job01", more_args=args), inventory, "tiny"), "").data == paths
    declares = {"tiny/__init__.py": b"", "tiny/scaletier.yaml": b"data: {name: mnist, flags: [--train-data]}"}
    declared_plan = plan(inventory, build_job(JobFlags("job01", more_args=args), inventory, "tiny", declares), "")
    assert declared_plan.data == (paths or ["/bucket/data/mnist"]), "the declared data is the default"


def test_output_folders_are_redirected() -> None:
    args = ["--job-dir", "/bucket/x", "--steps=3", "--output_path=/bucket/y", "--job-dir"]
    assert arguments.redirect_output(args, "/new") == ["--job-dir", "/new", "--steps=3", "--output_path=/new", "--job-dir"]


def test_flags_with_a_value_are_read() -> None:
    args = ["--a", "-b", "--c=", "--d=e=f", "x", "--g=h", "y", "--last"]
    assert list(arguments.flags(args)) == [("--a", "-b"), ("--c", ""), ("--d", "e=f"), ("--g", "h")]
    assert list(arguments.flags(["--only"])) == list(arguments.flags([])) == []
    assert [arguments.has_output_flag([arg]) for arg in ("--job-dir=/x", "--output-path", "--job", "job-dir")] == [
        True,
        True,
        False,
        False,
    ]


def test_flags_and_paths_are_dropped_with_their_values() -> None:
    args = ["--model", "cnn", "--max-steps", "5", "--job-dir=/x", "--train-data", "/d", "--max-steps=6", "last"]
    assert arguments.drop_flags_and_paths(args, ["--max-steps"]) == ["--model", "cnn", "last"]


@given(some.lists(some.text(alphabet="-=ab/ ", max_size=8)))
def test_other_arguments_stay_unchanged(args: list[str]) -> None:
    assert arguments.redirect_output(args, "/new") == args
    assert arguments.drop_flags_and_paths(args, []) == args
