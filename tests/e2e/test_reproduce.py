"""A job's manifest, the job again from the bucket alone, and its plan beside what it did."""

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
    declared = read(find(str(ROOT / "trainer")).files, "trainer")
    plan.path("trainer.task", ORIGINAL.split(), declared).unlink(missing_ok=True)


def test_the_manifest_has_what_the_hosts_found(cluster: Stack, original: str) -> None:
    whole = json.loads(cluster.ssh("master-0", f"cat /bucket/jobs/{original}/manifest.json").out)
    hashed = cluster.ssh("worker-0", "cd /bucket/data/mnist && sha256sum * | sha256sum").out.split()[0]
    assert whole["data"]["sha256"] == hashed
    assert whole["data"]["paths"] == ["/bucket/data/mnist"]
    packed = cluster.ssh("worker-0", f"sha256sum /bucket/jobs/{original}/package.tar.gz").out.split()[0]
    assert whole["package"]["sha256"] == packed
    assert whole["args"] == ORIGINAL.split()
    found = cluster.ssh("master-0", "/opt/scaletier/venv/bin/python -c 'import platform; print(platform.python_version())'").out
    assert whole["versions"]["python"] == found.strip()
    assert whole["versions"]["tensorflow"]
    record = cluster.describe(original)
    assert record["manifest"]["data"] == whole["data"]
    assert record["manifest"]["versions"] == whole["versions"]
    assert record["manifest"]["cluster"]["replicas"] == {"ps": 2, "master": 1, "worker": 2, "evaluator": 1}
    shown = cluster.fab("describe", original).out
    assert f"sha256:{hashed[:16]}" in shown
    assert f"trainer sha256:{packed[:16]}" in shown


def test_a_job_runs_again_from_the_bucket_and_what_differs_is_said(cluster: Stack, original: str) -> None:
    result = cluster.must_json("reproduce", original)
    assert (result["original"], result["job"]) == (original, f"{original}_2")
    compared = {row["what"]: row for row in result["compared"]}
    for what in ("package", "data", "python", "tensorflow", "scaleTier", "ps", "worker", "state"):
        assert compared[what]["same"], compared[what]
    for what in ("steps", "loss", "accuracy"):
        assert float(compared[what]["original"]) > 0
        assert float(compared[what]["again"]) > 0
    assert set(result["differs"]) <= {"steps", "loss", "accuracy"}
    record = cluster.describe(f"{original}_2")
    assert record["manifest"]["reproduces"] == original
    assert record["trainingInput"]["jobDir"] == f"/bucket/jobs/{original}_2/output"
    again = cluster.must("reproduce", original, "--job", f"{original}_2")
    assert "differs from original in" in again.out or "has the inputs and the results of original" in again.out


@pytest.mark.usefixtures("_plan")
def test_a_plan_is_compared_with_the_job(cluster: Stack, original: str) -> None:
    early = cluster.fab("plan", "--job", original)
    assert early.code == 2
    assert "no plan was made of trainer.task" in early.err
    made = cluster.must("plan", "--args", ORIGINAL, "--seconds", "30")
    assert "PREMIUM_1" in made.out
    compared = cluster.must_json("plan", "--job", original)
    assert compared["predicted"]["replicas"] == 3
    assert compared["predicted"]["bound"] == "shared cpus"
    assert compared["measured"] > 0
