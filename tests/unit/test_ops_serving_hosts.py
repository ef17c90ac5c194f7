"""Check that no job, tier or plan counts hosts that serve models."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from infra.inventory import Inventory
from infra.scale_tiers import JOB_ROLES, Role, ScaleTier, preset
from jobs.ledger import Ledger
from jobs.queue import Queue
from ops.cluster.cluster import ClusterClient
from ops.cluster.host_files import render
from ops.cluster.shell import argv
from ops.config_values import OptionalRole
from ops.errors import UsageError
from ops.logs.read import resolve_selection
from ops.package import trainer_config
from ops.plan import planned
from ops.show.cost import cost_of
from ops.show.snapshot import ClusterSnapshot, build_overview
from ops.show.top import frame
from ops.submit.config import JobFlags, JobSpec, build_job
from ops.submit.job_plan import plan
from ops.submit.manifest import cluster
from ops.submit.resources import candidate_hosts, counts, describe_counts

FILES = {"mine/__init__.py": b""}


def build(inventory: Inventory, **flags: str) -> JobSpec:
    return build_job(JobFlags("j", **flags), inventory, "mine", FILES)  # type: ignore[arg-type]


@pytest.mark.parametrize("flags", [{}, {"replicas": "worker=1,ps"}, {"scale_tier": "BASIC"}, {"strategy": "any"}])
def test_a_job_is_the_same_with_serving_hosts(inventory: Inventory, served: Inventory, flags: dict[str, str]) -> None:
    without, with_serving = build(inventory, **flags), build(served, **flags)
    assert plan(served, with_serving, "").to_json() == plan(inventory, without, "").to_json(), "TF_CONFIG, ranks, addresses"
    assert candidate_hosts(with_serving.counts, served) == candidate_hosts(without.counts, inventory)
    assert candidate_hosts({}, served) == candidate_hosts({}, inventory)
    assert served.subset({}).hosts == inventory.hosts
    assert cluster(with_serving.subset(served)) == cluster(without.subset(inventory))
    assert with_serving.training_input == without.training_input
    assert with_serving.subset(served).hosts == without.subset(inventory).hosts


def test_no_tier_has_serving_hosts(inventory: Inventory, served: Inventory) -> None:
    assert counts(served) == counts(inventory)
    named = replace(served, scale_tier="STANDARD_1")
    assert describe_counts(counts(named), named) == {"scaleTier": "STANDARD_1"}
    assert not any(Role.SERVING in preset(tier).roles for tier in ScaleTier if tier is not ScaleTier.CUSTOM)
    assert served.cluster() == inventory.cluster()
    assert {*get_args(OptionalRole), Role.MASTER} == {*JOB_ROLES}
    assert planned.cluster_shape(served, 2.0) == planned.cluster_shape(inventory, 2.0)


def test_serving_hosts_get_no_files_of_a_job(inventory: Inventory, served: Inventory) -> None:
    assert list(render(served)) == list(inventory.names)


@pytest.mark.parametrize("replicas", ["serving", "serving=1", "worker,serving"])
def test_serving_hosts_cannot_be_requested_by_a_job(served: Inventory, replicas: str) -> None:
    with pytest.raises(UsageError, match=r"'serving.*' is no role; valid are ps, master, worker, evaluator, such as"):
        build(served, replicas=replicas)
    with pytest.raises(UsageError, match=r"usedRoles.*serving.*valid are ps, master, worker, evaluator"):
        trainer_config.read({"mine/scaletier.yaml": b"strategies: {s: {usedRoles: [serving]}}"}, "mine")


def test_serving_hosts_have_no_replica(inventory: Inventory, served: Inventory, ledger: Ledger) -> None:
    assert (served.replicas, served.job_hosts) == (inventory.replicas, inventory.hosts)
    cluster = ClusterClient(served, object(), ledger=ledger)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"no replica and no job 'serving'.*; replicas are ps-0, .*, evaluator-0, all, and "):
        resolve_selection(cluster, "serving", None)
    assert "serving-0" in argv(served, "serving-0"), "a login is possible"


def test_serving_hosts_have_a_cost_and_are_listed(served: Inventory) -> None:
    assert cost_of(served.hosts, "2026-01-31T12:00:00.000Z").hosts == 7
    snapshot_overview = build_overview(served, ClusterSnapshot(Queue(), {}, {}), "2026-01-31T12:00:00.000Z")
    assert [host.name for host in snapshot_overview.hosts][-2:] == ["serving-0", "serving-1"]
    assert "0 of 5 hosts busy" in frame(snapshot_overview)[0].plain, "a host without jobs is never busy"
