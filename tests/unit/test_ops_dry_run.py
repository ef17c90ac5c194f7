"""`fab train --dry-run`: all that would be sent is shown, and nothing is sent."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_ops_dependencies import wheel

from infra.inventory import Inventory
from jobs.records import Plan
from ops.cluster.cluster import ClusterClient
from ops.errors import UsageError
from ops.package import dependencies, runtimes
from ops.submit.config import JobFlags
from ops.submit.train import dry_run


@pytest.fixture(autouse=True)
def own_cache(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dependencies, "CACHE", tmp_path / "cache")


@pytest.fixture
def mine(tmp_path: Path, index: Path) -> str:
    (root := tmp_path / "mine").mkdir()
    for name, text in {"__init__.py": "", "task.py": "import far\n", "model.h5": "x", "requirements.txt": "far\n"}.items():
        (root / name).write_text(text)
    (root / ".gitignore").write_text("*.h5\n")
    wheel(index)
    return str(root)


class Nothing:
    """A cluster of which nothing but the inventory may be asked."""

    def __init__(self, inventory: Inventory) -> None:
        self.inventory = inventory

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for")


def test_it_shows_all_and_sends_nothing(inventory: Inventory, mine: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = JobFlags("job01", args="--a 'b c'", replicas="worker=1", env=["A=${JOB_DIR}"])
    assert dry_run(Nothing(inventory), flags, mine, as_json=False) == 0  # type: ignore[arg-type]
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert lines[0].split() == ["FILE", "SIZE"]
    assert ["mine/task.py", "11", "B"] in [line.split() for line in lines]
    assert "left out: model.h5" in lines
    assert "dependencies: far-1.0" in lines
    (sent,) = [line for line in lines if line.startswith("to be sent: ")]
    assert sent.endswith("; nothing was sent")
    assert "to each of 2 hosts" in sent
    assert ["worker-0", "worker-0"] in [line.split() for line in lines]
    python = "/opt/scaletier/venv/bin/python -m mine.task --a 'b c'"
    assert f"# worker-0 on worker-0 (10.0.0.64): {python}" in lines
    configs = [json.loads(line.removeprefix("TF_CONFIG=")) for line in lines if line.startswith("TF_CONFIG=")]
    assert [config["task"]["type"] for config in configs] == ["chief", "worker"]
    assert configs[0]["cluster"]["worker"] == ["10.0.0.64:2222"]
    assert "JOB_DIR=/bucket/jobs/job01/output" in lines


def test_it_shows_programs_the_same(inventory: Inventory, mine: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run(Nothing(inventory), JobFlags("job01", args="--a 'b c'"), mine, as_json=True) == 0  # type: ignore[arg-type]
    told = json.loads(capsys.readouterr().out)
    assert {file["path"]: file["bytes"] for file in told["files"]}["mine/task.py"] == 11
    assert (told["ignored"], told["dependencies"]) == (["model.h5"], ["far-1.0"])
    assert told["sent"]["hosts"] == 5 * told["sent"]["eachHost"] > 0
    assert told["hosts"] == {name: name for name in Plan.from_dict(told["plan"]).replicas}
    assert told["tfConfig"]["evaluator-0"]["task"] == {"type": "evaluator", "index": 0}
    assert Plan.from_dict(told["plan"]).args == ["--a", "b c"]


def test_what_is_wrong_is_refused_as_by_the_real_one(inventory: Inventory, mine: str) -> None:
    with pytest.raises(UsageError, match="did you mean JOB_DIR"):
        dry_run(Nothing(inventory), JobFlags("job01", more_args=["${JOBDIR}"]), mine, as_json=False)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"module 'mine\.nothing' is not in the package"):
        dry_run(Nothing(inventory), JobFlags("job01", module="mine.nothing"), mine, as_json=False)  # type: ignore[arg-type]


def test_no_python_is_built(
    inventory: Inventory, mine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    local = replace(inventory, runtimes="/opt/scaletier/runtimes", operator_runtimes=str(tmp_path / "runtimes"))
    (asked := tmp_path / "asked.txt").write_text("far\n")
    cluster, flags = ClusterClient(local), JobFlags("job01", runtime=str(asked))
    assert dry_run(cluster, flags, mine, as_json=True) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["dependencies"] == []
    assert "the runtime asked would be built first" in err
    assert not (tmp_path / "runtimes").exists()
    runtimes.build(local, runtimes.from_file(str(asked), "--runtime"))
    assert dry_run(cluster, flags, mine, as_json=True) == 0
    assert "would be built" not in capsys.readouterr().err
