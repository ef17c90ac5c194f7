"""Check `fab train --dry-run`: it shows all files and commands, and sends nothing."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_ops_dependencies import make_wheel

from infra import templates
from infra.inventory import Inventory
from jobs.folder_bucket import FolderBucket
from jobs.ledger import Ledger
from jobs.records import Plan
from ops.cluster.cluster import ClusterClient
from ops.errors import UsageError
from ops.package import dependencies, host_stream, runtimes
from ops.submit import train
from ops.submit.config import JobFlags
from ops.submit.runner import dry_run


@pytest.fixture(autouse=True)
def own_cache(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dependencies, "CACHE", tmp_path / "cache")


@pytest.fixture
def package_folder(tmp_path: Path, index: Path) -> str:
    (root := tmp_path / "mine").mkdir()
    for name, text in {"__init__.py": "", "task.py": "import far\n", "model.h5": "x", "requirements.txt": "far\n"}.items():
        (root / name).write_text(text)
    (root / ".gitignore").write_text("*.h5\n")
    make_wheel(index)
    return str(root)


class InventoryOnly:
    """Allow no access except to the inventory."""

    def __init__(self, inventory: Inventory) -> None:
        self.inventory = inventory

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was accessed")


def test_dry_run_shows_all_and_sends_nothing(
    inventory: Inventory, package_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = JobFlags("job01", args="--a 'b c'", replicas="worker=1", env=["A=${JOB_DIR}"])
    assert dry_run(InventoryOnly(inventory), flags, package_folder, as_json=False) == 0  # type: ignore[arg-type]
    lines = capsys.readouterr().out.splitlines()
    assert lines[:6] == [
        "FILE                   SIZE",
        "mine/.gitignore        5 B",
        "mine/__init__.py       0 B",
        "mine/requirements.txt  4 B",
        "mine/task.py           11 B",
        "ignored: model.h5",
    ]
    size = r"\d+\.\d MB"
    sent = rf"to be sent: {size} to each of 2 hosts \({size}\), 0\.0 MB into the bucket; nothing was sent"
    assert re.fullmatch(sent, lines[7])
    assert [lines[6], *lines[8:12]] == [
        "dependencies: far-1.0",
        "",
        "REPLICA   HOST",
        "master-0  master-0",
        "worker-0  worker-0",
    ]
    rules = (
        "rules: successPolicy chief, optionalRoles evaluator, restartPolicy replica, restartCodes 42, permanentCodes none, "
        "maxRestarts 5, maxRetries 3, gracePeriod 30.0, stopSignal main, stopSeconds 10.0"
    )
    assert lines[12:14] == [rules, ""]
    headings = [place for place, line in enumerate(lines) if line.startswith("# ")]
    python = "/opt/scaletier/venv/bin/python -m mine.task --a 'b c'"
    assert [lines[place - 1 : place + 1] for place in headings] == [
        ["", f"# master-0 on master-0 (10.0.0.2): {python}"],
        ["", f"# worker-0 on worker-0 (10.0.0.64): {python}"],
    ]
    environments = [dict(line.split("=", 1) for line in lines[place + 1 : place + 23]) for place in headings]
    assert all(len(environment) == 22 for environment in environments)
    configs = [json.loads(environment["TF_CONFIG"]) for environment in environments]
    assert [config["task"]["type"] for config in configs] == ["chief", "worker"]
    assert configs[0]["cluster"]["worker"] == ["10.0.0.64:2222"]
    assert [(e["TYPE"], e["RANK"], e["JOB_DIR"], e["A"]) for e in environments] == [
        ("master", "0", "/bucket/jobs/job01/output", "${JOB_DIR}"),
        ("worker", "1", "/bucket/jobs/job01/output", "${JOB_DIR}"),
    ]


def test_dry_run_counts_the_data(
    inventory: Inventory,
    package_folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(train, "ROOT", tmp_path)
    (tmp_path / "x.tfrecord").write_bytes(b"1" * 260_000)
    (tmp_path / "mine/scaletier.yaml").write_text("data: {name: x, files: x.tfrecord}")
    (tmp_path / "mine/requirements.txt").unlink()
    (tmp_path / "mine/task.py").write_text("")
    (tmp_path / "mine/.gitignore").unlink()
    content = b"".join(hashlib.sha256(bytes([number])).digest() for number in range(250))  # which no compression makes smaller
    (tmp_path / "mine/model.h5").write_bytes(content)
    for as_json in (False, True):
        assert dry_run(InventoryOnly(inventory), JobFlags("job01", replicas="master"), package_folder, as_json) == 0  # type: ignore[arg-type]
    output = capsys.readouterr().out
    text, _, document = output.partition("\n{")
    assert " to each of 1 host (" in text
    assert " into the bucket, and 0.3 MB of data, unless they are there; nothing was sent\n" in text
    assert "left out" not in text
    assert "dependencies" not in text
    data = json.loads("{" + document)
    assert data["sent"]["data"] == 260_000
    files = {file["path"]: file["bytes"] for file in data["files"]}
    without_package = host_stream.shared_stream(host_stream.code(templates.ROOT)[0], None, "0" * 64, frozenset())
    assert data["sent"]["eachHost"] > len(without_package) + len(content)
    assert files == {"mine/__init__.py": 0, "mine/model.h5": len(content), "mine/scaletier.yaml": 34, "mine/task.py": 0}
    assert (data["ignored"], data["dependencies"], data["hosts"]) == ([], [], {"master-0": "master-0"})


def test_the_json_output(inventory: Inventory, package_folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run(InventoryOnly(inventory), JobFlags("job01", args="--a 'b c'"), package_folder, as_json=True) == 0  # type: ignore[arg-type]
    data = json.loads(capsys.readouterr().out)
    assert {file["path"]: file["bytes"] for file in data["files"]}["mine/task.py"] == 11
    assert (data["ignored"], data["dependencies"]) == (["model.h5"], ["far-1.0"])
    assert data["sent"]["hosts"] == 5 * data["sent"]["eachHost"] > 0
    assert data["hosts"] == {name: name for name in Plan.from_dict(data["plan"]).replicas}
    assert data["tfConfig"]["evaluator-0"]["task"] == {"type": "evaluator", "index": 0}
    assert Plan.from_dict(data["plan"]).args == ["--a", "b c"]


def test_dry_run_prints_what_it_ignores(
    inventory: Inventory, package_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (config := tmp_path / "config.yaml").write_text("trainingInput: {region: x}")
    (tmp_path / "mine/requirements.txt").unlink()
    (tmp_path / "mine/task.py").write_text("")
    flags = JobFlags("job01", config=str(config))
    assert dry_run(InventoryOnly(inventory), flags, package_folder, as_json=True) == 0  # type: ignore[arg-type]
    note = f"region in {config}: ignored, the stack defines region and Python"
    assert note in capsys.readouterr().err.splitlines()
    with pytest.raises(UsageError, match="--resume continues in the output of that job, and --job-dir names another"):
        dry_run(InventoryOnly(inventory), replace(flags, resume="old", job_dir="/bucket/x"), package_folder, as_json=True)  # type: ignore[arg-type]


def test_dry_run_shows_each_file_in_one_line(
    inventory: Inventory, package_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("two\nlines.txt", "two\nlines.h5"):
        (tmp_path / "mine" / name).touch()
    assert dry_run(InventoryOnly(inventory), JobFlags("job01"), package_folder, as_json=False) == 0  # type: ignore[arg-type]
    lines = capsys.readouterr().out.splitlines()
    assert "mine/two␊lines.txt" in [line.split()[0] for line in lines if line]
    assert "ignored: model.h5, two␊lines.h5" in lines


def test_dry_run_refuses_invalid_flags(inventory: Inventory, package_folder: str) -> None:
    with pytest.raises(UsageError, match="did you mean JOB_DIR"):
        dry_run(InventoryOnly(inventory), JobFlags("job01", more_args=["${JOBDIR}"]), package_folder, as_json=False)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"module 'mine\.nothing' is not in the package"):
        dry_run(InventoryOnly(inventory), JobFlags("job01", module="mine.nothing"), package_folder, as_json=False)  # type: ignore[arg-type]


def test_dry_run_builds_no_runtime(
    inventory: Inventory, package_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    local = replace(inventory, runtimes="/opt/scaletier/runtimes", operator_runtimes=str(tmp_path / "runtimes"))
    (requirements := tmp_path / "asked.txt").write_text("far\n")
    cluster, flags = ClusterClient(local), JobFlags("job01", runtime=str(requirements))
    assert dry_run(cluster, flags, package_folder, as_json=True) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["dependencies"] == []
    assert "the runtime asked would be built first; what the package needs besides it is not shown\n" in err
    assert not (tmp_path / "runtimes").exists()
    runtimes.build(local, runtimes.from_file(str(requirements), "--runtime"))
    assert dry_run(cluster, flags, package_folder, as_json=True) == 0
    assert "would be built" not in capsys.readouterr().err


def test_dry_run_looks_up_the_job_whose_trials_go_on(inventory: Inventory, package_folder: str, tmp_path: Path) -> None:
    parameter = "{parameterName: units, type: INTEGER, minValue: 1, maxValue: 4}"
    tuned = f"hyperparameters: {{goal: MAXIMIZE, params: [{parameter}], resumePreviousJobId: nope}}"
    (tmp_path / "config.yaml").write_text(f"trainingInput: {{{tuned}}}")
    cluster = ClusterClient(inventory, ledger=Ledger(FolderBucket(tmp_path)))
    with pytest.raises(UsageError, match=r"^there is no job 'nope'; none was started yet$"):
        dry_run(cluster, JobFlags("job01", config=str(tmp_path / "config.yaml")), package_folder, as_json=False)
