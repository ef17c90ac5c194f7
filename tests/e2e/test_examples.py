"""Anyone's trainer on real hosts: every kind in examples/, and dependencies that cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from stacks import ROOT, Stack

from ops.package import hostpython

_TRAINERS = ("master-0", "worker-0", "worker-1")
_OTHERS = ("ps-0", "ps-1", "evaluator-0")
_VERSIONS = (
    "import importlib.metadata as m, json, re; "
    'print(json.dumps({re.sub("[-_.]+", "-", d.name).lower(): d.version for d in m.distributions()}))'
)


def run(cluster: Stack, job: str, example: str, *more: str) -> dict[str, list[str]]:
    """Run an example to its end; each replica's lines."""
    result = cluster.fab("train", "--job", job, "--package", f"examples/{example}", *more)
    assert result.code == 0, result.text
    record = cluster.describe(job)
    assert record["state"] == "SUCCEEDED"
    assert all(replica["exitCode"] in (0, None) or replica["exitCode"] >= 128 for replica in record["replicas"]), record
    lines: dict[str, list[str]] = {name: [] for name in (*_TRAINERS, *_OTHERS)}
    for text in cluster.fab("logs", "all", "--job", job, "--lines", "all", "--json").out.splitlines():
        line = json.loads(text)
        lines[line["replica"]].append(line["message"])
    return lines


def having(lines: list[str], start: str) -> list[str]:
    found = [line for line in lines if line.startswith(start)]
    assert found, f"no line begins with {start!r}: {lines[-20:]}"
    return found


def accuracy(lines: list[str], steps: int) -> float:
    final = having(lines, "Final metrics after ")[0]
    assert int(final.split()[3]) >= steps
    return float(final.rpartition("accuracy: ")[2])


def test_code_of_2017_for_cloud_ml(cluster: Stack, tmp_path: Path) -> None:
    config = ("--config", "examples/cloudml/config.yaml")
    lines = run(cluster, "ex_cloudml", "cloudml", *config, "--args", "--model cnn --max-steps 60")
    for name in (*_TRAINERS, "ps-0", "ps-1"):
        having(lines[name], f"Started [{name.replace('-', '/')}]")
    having(lines["evaluator-0"], "the evaluator has nothing to do")
    having(lines["master-0"], "Train [master/0], step ")
    assert accuracy(lines["master-0"], 60) > 0.8
    assert cluster.fab("get", "ex_cloudml", str(tmp_path / "out")).code == 0
    # Each parameter server wrote its part of the last checkpoint.
    assert len(list((tmp_path / "out").glob("model.ckpt-6*.data-0000?-of-00002"))) == 2


def test_code_in_the_way_of_gradient(cluster: Stack, tmp_path: Path) -> None:
    lines = run(cluster, "ex_gradient", "gradient", "--", "--max-steps", "2000")
    for name in _TRAINERS:
        having(lines[name], f"Train [{name.replace('-', '/')}], step ")
    for name in ("ps-0", "ps-1"):
        having(lines[name], f"Started [{name.replace('-', '/')}]")
    assert accuracy(lines["master-0"], 2000) > 0.8
    assert cluster.fab("get", "ex_gradient", str(tmp_path / "out")).code == 0
    assert list((tmp_path / "out").glob("model.ckpt-2*.index"))


def test_tf_keras_with_its_dependency(cluster: Stack, tmp_path: Path) -> None:
    lines = run(cluster, "ex_mwms", "mwms", "--", "--model", "mlp", "--max-steps", "900")
    for name, label in (("master-0", "chief/0"), ("worker-0", "worker/0"), ("worker-1", "worker/1")):
        assert all(line.endswith(" examples/s") for line in having(lines[name], f"Train [{label}], step "))
    for name in _OTHERS:
        having(lines[name], f"{name.replace('-', '/')} has nothing to do")
    assert 0.8 < accuracy(lines["master-0"], 900) <= 1
    assert cluster.fab("get", "ex_mwms", str(tmp_path / "out")).code == 0
    assert (tmp_path / "out" / "weights.npz").stat().st_size > 100_000


def test_a_project_with_a_dependency(cluster: Stack, tmp_path: Path) -> None:
    lines = run(cluster, "ex_packaged", "packaged")
    for name in (*_TRAINERS, *_OTHERS):
        having(lines[name], f"Started [{name.replace('-', '/')}], packaged-trainer 1.0, tabulate ")
    having(lines["master-0"], "Final metrics after 200 steps")
    assert cluster.fab("get", "ex_packaged", str(tmp_path / "out")).code == 0
    assert "slope" in (tmp_path / "out" / "table.txt").read_text()
    assert not list((ROOT / "examples" / "packaged").rglob("*.egg-info")), "a build leaves nothing behind"


@pytest.mark.parametrize("name", ["master-0", "ps-0"])
def test_the_hosts_have_what_pip_is_told(cluster: Stack, name: str) -> None:
    there = json.loads(cluster.ssh(name, f"/opt/scaletier/venv/bin/python -c '{_VERSIONS}'").out)
    told = dict(hostpython.hosts())
    assert told.pop("tensorflow") == told["tensorflow-cpu"]
    there.pop("pip", None)
    assert there == told


def test_dependencies_that_cannot_be_change_nothing(cluster: Stack, tmp_path: Path) -> None:
    (package := tmp_path / "mine").mkdir()
    for name in ("__init__.py", "task.py"):
        (package / name).touch()
    before = cluster.fab("jobs", "--json").out
    for requirement, says in [
        ("scaletier-has-no-such-dependency", "dependency scaletier-has-no-such-dependency cannot be found"),
        ("./old-1.0-cp39-cp39-manylinux2014_x86_64.whl", "is not a wheel for the hosts' Python 3.11"),
        ("tensorflow==1.15", "the hosts have tensorflow 2."),
    ]:
        (package / "requirements.txt").write_text(requirement)
        (package / "old-1.0-cp39-cp39-manylinux2014_x86_64.whl").touch()
        result = cluster.fab("train", "--job", "ex_bad", "--package", str(package))
        assert result.code == 2, result.text
        assert says in result.err
        assert len(result.err.strip().splitlines()) == 1, result.err
    assert cluster.fab("jobs", "--json").out == before
    assert cluster.ssh("ps-0", "ls /var/lib/scaletier/jobs/ex_bad").code != 0
