"""A job's manifest, its reproduction from the bucket alone, and its plan compared with the run."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from stacks import ORIGINAL, ROOT, Stack

from ops.package.package import find
from ops.package.trainer_config import read
from ops.plan import plan


@pytest.fixture
def _plan() -> Iterator[None]:
    """Delete the plans with this seed, which no other test uses."""
    yield
    config = read(find(str(ROOT / "trainer")).files, "trainer")
    plan.path("trainer.task", ORIGINAL.split(), config).unlink(missing_ok=True)


def test_the_manifest_matches_the_data_and_versions_on_hosts(cluster: Stack, original: str) -> None:
    manifest = json.loads(cluster.ssh("master-0", f"cat /bucket/jobs/{original}/manifest.json").out)
    data_digest = cluster.ssh("worker-0", "cd /bucket/data/mnist && sha256sum * | sha256sum").out.split()[0]
    assert manifest["data"]["sha256"] == data_digest
    assert manifest["data"]["paths"] == ["/bucket/data/mnist"]
    package_digest = cluster.ssh("worker-0", f"sha256sum /bucket/jobs/{original}/package.tar.gz").out.split()[0]
    assert manifest["package"]["sha256"] == package_digest
    assert manifest["args"] == ORIGINAL.split()
    python_version = cluster.ssh(
        "master-0", "/opt/scaletier/venv/bin/python -c 'import platform; print(platform.python_version())'"
    ).out
    assert manifest["versions"]["python"] == python_version.strip()
    assert manifest["versions"]["tensorflow"]
    record = cluster.describe(original)
    assert record["manifest"]["data"] == manifest["data"]
    assert record["manifest"]["versions"] == manifest["versions"]
    assert record["manifest"]["cluster"]["replicas"] == {"ps": 2, "master": 1, "worker": 2, "evaluator": 1}
    description = cluster.fab("describe", original).out
    assert f"sha256:{data_digest[:16]}" in description
    assert f"trainer sha256:{package_digest[:16]}" in description


def test_reproduce_reruns_a_job_and_lists_differences(cluster: Stack, original: str) -> None:
    result = cluster.must_json("reproduce", original)
    assert (result["original"], result["job"]) == (original, f"{original}_2")
    compared = {row["what"]: row for row in result["compared"]}
    for key in ("package", "data", "python", "tensorflow", "scaleTier", "ps", "worker", "state"):
        assert compared[key]["same"], compared[key]
    for key in ("steps", "loss", "accuracy"):
        assert float(compared[key]["original"]) > 0
        assert float(compared[key]["again"]) > 0
    assert set(result["differs"]) <= {"steps", "loss", "accuracy"}
    record = cluster.describe(f"{original}_2")
    assert record["manifest"]["reproduces"] == original
    assert record["trainingInput"]["jobDir"] == f"/bucket/jobs/{original}_2/output"
    comparison = cluster.must("reproduce", original, "--job", f"{original}_2")
    assert "differs from original in" in comparison.out or "has the inputs and the results of original" in comparison.out


@pytest.mark.usefixtures("_plan")
def test_a_plan_is_compared_with_the_job(cluster: Stack, original: str) -> None:
    refused = cluster.fab("plan", "--job", original)
    assert refused.code == 2
    assert "no plan was made of trainer.task" in refused.err
    planned = cluster.must("plan", "--args", ORIGINAL, "--seconds", "30")
    assert "PREMIUM_1" in planned.out
    compared = cluster.must_json("plan", "--job", original)
    assert compared["predicted"]["replicas"] == 3
    assert compared["predicted"]["bound"] == "shared cpus"
    assert compared["measured"] > 0
