"""Check the part of a cluster that a job requests, by flags or config.yaml, and its candidate hosts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from infra.inventory import Inventory
from infra.scale_tiers import Role
from ops.errors import UsageError
from ops.submit.config import JobFlags, JobSpec, build_job
from ops.submit.resources import candidate_hosts

# The cluster of the fixture: a parameter server, a master, two workers of one machine type, an evaluator.
ALL = {"ps": 1, "master": 1, "worker": 2, "evaluator": 1}
DECLARES = {
    "mine/__init__.py": b"",
    "mine/scaletier.yaml": b"strategies: {alone: {usedRoles: []}, all: {}, "
    b"peers: {requiredRoles: [worker], usedRoles: [worker]}}",
}


def build(inventory: Inventory, config: str | None = None, **flags: str) -> JobSpec:
    return build_job(JobFlags("j", config=config, **flags), inventory, "mine", DECLARES)  # type: ignore[arg-type]


def counts_of(job: JobSpec) -> dict[str, int]:
    return {str(role): count for role, count in job.counts.items()}


@pytest.mark.parametrize(
    ("flags", "counts"),
    [
        ({}, ALL),
        ({"replicas": "master"}, {"master": 1}),
        ({"replicas": "worker"}, {"master": 1, "worker": 2}),
        ({"replicas": " master, worker=1 ,ps"}, {"master": 1, "worker": 1, "ps": 1}),
        ({"replicas": "worker=0"}, {"master": 1}),
        ({"scale_tier": "basic"}, {"master": 1}),
        ({"strategy": "alone"}, {"master": 1}),
        ({"strategy": "peers"}, {"master": 1, "worker": 2}),
        ({"strategy": "all"}, ALL),
        ({"strategy": "peers", "replicas": "worker=1,ps"}, {"master": 1, "worker": 1, "ps": 1}),
    ],
)
def test_flags_and_strategies_set_the_counts(inventory: Inventory, flags: dict[str, str], counts: dict[str, int]) -> None:
    assert counts_of(build(inventory, **flags)) == counts


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("{scaleTier: BASIC}", {"master": 1}),
        ("{scaleTier: CUSTOM, masterType: n1-highcpu-8, workerCount: 1}", {"master": 1, "worker": 1}),
        ("{workerCount: 2, parameterServerCount: 1}", {"master": 1, "worker": 2, "ps": 1}),
        ("{workerCount: 0}", {"master": 1}),
        ("{}", ALL),
    ],
)
def test_config_sets_the_counts(inventory: Inventory, tmp_path: Path, text: str, counts: dict[str, int]) -> None:
    (tmp_path / "config.yaml").write_text(f"trainingInput: {text}")
    path = str(tmp_path / "config.yaml")
    assert counts_of(build(inventory, path)) == counts
    assert counts_of(build(inventory, path, replicas="worker=1")) == {"master": 1, "worker": 1}, "a flag overrides config"


def test_the_custom_tier_flag_uses_configs_counts(inventory: Inventory, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("trainingInput: {workerCount: 1}")
    path = str(tmp_path / "config.yaml")
    assert counts_of(build(inventory, path, scale_tier="CUSTOM")) == {"master": 1, "worker": 1}
    assert counts_of(build(inventory, path, scale_tier="BASIC")) == {"master": 1}


def test_all_or_none_roles_are_requested_together(inventory: Inventory) -> None:
    files = {"mine/scaletier.yaml": b"{strategy: s, strategies: {s: {allOrNone: [ps, worker]}}}"}
    for replicas in ("master", "worker=1,ps=1"):
        assert build_job(JobFlags("j", replicas=replicas), inventory, "mine", files).counts
    with pytest.raises(UsageError, match=r"^--strategy s needs a ps where it has a worker: --replicas worker,ps$"):
        build_job(JobFlags("j", replicas="worker"), inventory, "mine", files)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"replicas": "worker=3"}, "--replicas worker=3 needs 3 workers, and stack test (CUSTOM) has 2: take no more"),
        ({"replicas": "boss"}, "--replicas 'boss' is no role; valid are ps, master, worker, evaluator, such as"),
        ({"replicas": "workers"}, "--replicas 'workers' is no role; did you mean worker?; valid are"),
        ({"replicas": "worker=many"}, "--replicas 'worker=many' has no valid number"),
        ({"replicas": "worker=1,worker=2"}, "--replicas names worker twice: say it once"),
        ({"replicas": "worker=2 ps=1"}, "--replicas 'worker=2 ps=1' has no valid number: worker=2 is two workers,"),
        ({"replicas": f"worker={'9' * 5000}"}, "has no valid number"),
        ({"replicas": "master=2"}, "--replicas master=2: a job has one master"),
        ({"replicas": "master=0"}, "--replicas master=0: a job has one master"),
        ({"replicas": " ,"}, "--replicas names no role"),
        ({"replicas": "master", "scale_tier": "BASIC"}, "--scale-tier and --replicas both say"),
        ({"scale_tier": "STANDARD_1"}, "--scale-tier STANDARD_1 needs 3 ps, and stack test (CUSTOM) has 1: run pulumi config"),
        ({"scale_tier": "BASIC_GPU"}, "--scale-tier BASIC_GPU needs a GPU, and the master of stack test has none: run pulumi"),
        ({"scale_tier": "HUGE"}, "scaleTier 'HUGE' is unknown; valid are BASIC, "),
        ({"replicas": "ps", "strategy": "peers"},
         "--strategy peers needs a worker, and the job asks for none: --replicas master,worker does"),
    ],
)  # fmt: skip
def test_an_invalid_request_is_refused(inventory: Inventory, flags: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as error:
        build(inventory, **flags)
    assert message in str(error.value)


def test_a_role_that_the_cluster_lacks_is_refused(inventory: Inventory) -> None:
    master_only = inventory.subset({Role.MASTER: 1})
    with pytest.raises(UsageError, match=r"--replicas evaluator needs 1 evaluator, and stack test \(CUSTOM\) has none"):
        build(master_only, replicas="evaluator")
    with pytest.raises(UsageError, match=r"^--replicas evaluator needs 1 evaluator, and stack test \(CUSTOM\) has none: take"):
        build(inventory.subset({Role.MASTER: 1, Role.WORKER: 1}), replicas="worker,evaluator")
    with pytest.raises(UsageError, match=r"--scale-tier CUSTOM does not say how many"):
        build(replace(master_only, scale_tier="BASIC"), scale_tier="custom")


def test_a_role_that_the_cluster_lacks_may_be_named_for_none(inventory: Inventory, tmp_path: Path) -> None:
    master_only = inventory.subset({Role.MASTER: 1})
    assert counts_of(build(master_only, replicas="evaluator=0")) == {"master": 1}
    (config := tmp_path / "config.yaml").write_text("trainingInput: {workerType: n1-highmem-8, workerCount: 0}")
    assert counts_of(build(master_only, str(config))) == {"master": 1}
    for key, count, needs in (
        ("workerCount", 1, "1 worker"),
        ("parameterServerCount", 2, "2 ps"),
        ("evaluatorCount", 3, "3 evaluators"),
    ):
        config.write_text(f"trainingInput: {{{key}: {count}}}")
        fix = f"run pulumi config set {key} {count} && pulumi up, or take no more than it has"
        with pytest.raises(UsageError) as error:
            build(master_only, str(config))
        problem = f"{config}: trainingInput.{key} needs {needs}, and stack test (CUSTOM) has none"
        assert str(error.value) == f"{problem}: {fix}"


@pytest.mark.parametrize(
    ("text", "tier", "message"),
    [
        (
            "{scaleTier: CUSTOM}",
            "CUSTOM",
            "masterType is missing: scaleTier CUSTOM needs it, stack test has n1-highcpu-8; leave scaleTier and the types out, "
            "to choose hosts of it by the counts alone",
        ),
        (
            "{workerType: n1-highmem-8}",
            "CUSTOM",
            "workerType is n1-highmem-8, but stack test has n1-highcpu-8: run pulumi config set workerType n1-highmem-8 && "
            "pulumi up, or leave scaleTier and the types out, to choose hosts of it by the counts alone",
        ),
        (
            "{workerType: n1-highmem-8}",
            "STANDARD_1",
            "workerType is n1-highmem-8, but stack test has n1-highcpu-8: leave scaleTier and the types out, to choose hosts "
            "of it by the counts alone",
        ),
        (
            "{scaleTier: BASIC, workerCount: 4, evaluatorCount: 1}",
            "CUSTOM",
            "workerCount goes with scaleTier CUSTOM only, and this is BASIC: take it out",
        ),
    ],
)
def test_a_refused_shape_is_one_line(inventory: Inventory, tmp_path: Path, text: str, tier: str, message: str) -> None:
    (config := tmp_path / "config.yaml").write_text(f"trainingInput: {text}")
    with pytest.raises(UsageError) as error:
        build(replace(inventory, scale_tier=tier), str(config))
    assert str(error.value) == f"{config}: trainingInput.{message}"


def test_a_gpu_decides_between_basic_tiers(inventory: Inventory) -> None:
    gpu = {"type": "nvidia-tesla-k80", "count": 1}
    hosts = tuple(replace(host, accelerator=gpu) if host.role is Role.MASTER else host for host in inventory.hosts)
    with_gpu = replace(inventory, hosts=hosts)
    assert build(with_gpu, replicas="master").training_input["scaleTier"] == "BASIC_GPU"
    assert build(inventory, replicas="master").training_input["scaleTier"] == "BASIC"
    assert counts_of(build(with_gpu, scale_tier="BASIC_GPU")) == {"master": 1}
    assert counts_of(build(with_gpu, scale_tier="BASIC")) == {"master": 1}
    fix = "run pulumi config set scaleTier BASIC_GPU && pulumi up"
    message = f"--scale-tier BASIC_GPU needs a GPU, and the master of stack test has none: {fix}"
    with pytest.raises(UsageError, match=f"^{message}$"):
        build(inventory, scale_tier="BASIC_GPU")


def test_the_training_input_has_cloud_mls_names(inventory: Inventory) -> None:
    def cluster_fields(job: JobSpec) -> dict[str, object]:
        return {key: value for key, value in job.training_input.items() if key not in ("pythonModule", "args", "jobDir")}

    assert cluster_fields(build(inventory, replicas="master")) == {"scaleTier": "BASIC"}
    assert cluster_fields(build(inventory, replicas="worker=1")) == {
        "scaleTier": "CUSTOM",
        "masterType": "n1-highcpu-8",
        "workerType": "n1-highcpu-8",
        "workerCount": 1,
    }
    standard = replace(inventory, scale_tier="STANDARD_1")
    assert cluster_fields(build(standard)) == {"scaleTier": "STANDARD_1"}
    part = build(inventory, replicas="worker=1").subset(inventory)
    assert (part.names, part.scale_tier) == (("master-0", "worker-0"), "CUSTOM")


def test_candidate_hosts_of_each_replica(inventory: Inventory) -> None:
    def candidates(inventory: Inventory, **counts: int) -> dict[str, list[str]]:
        return candidate_hosts({Role(role): count for role, count in counts.items()}, inventory)

    same_names = {name: [name] for name in inventory.replicas}
    assert candidates(inventory) == candidates(inventory, **ALL) == same_names
    assert list(candidates(inventory)) == list(inventory.replicas)
    assert candidates(inventory, master=1) == {"master-0": ["master-0", "worker-0", "worker-1"]}
    assert candidates(inventory, master=1, worker=1) == {
        "master-0": ["master-0", "worker-0", "worker-1"],
        "worker-0": ["worker-0", "worker-1"],
    }
    one_worker = inventory.subset({Role.MASTER: 1, Role.WORKER: 1})
    assert candidates(one_worker, master=1) == {"master-0": ["master-0", "worker-0"]}
    assert candidates(inventory, master=1, worker=2) == {"master-0": ["master-0"], **{n: [n] for n in ("worker-0", "worker-1")}}
    for changes in ({"machine_type": "n1-highmem-8"}, {"hourly_cost": 0.01}, {"accelerator": {"type": "t4", "count": 1}}):
        cheaper = tuple(replace(host, **changes) if host.role is Role.WORKER else host for host in inventory.hosts)  # type: ignore[arg-type]
        assert candidates(replace(inventory, hosts=cheaper), master=1) == {"master-0": ["master-0"]}
