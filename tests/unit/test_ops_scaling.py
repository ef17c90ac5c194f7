"""Check the model of `fab plan`, by properties that hold for all figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as some

from infra.scale_tiers import ScaleTier, SpecError, network_gbits, preset, vcpus
from ops.plan.plan import tier_shape
from ops.plan.scaling import (
    COPY_SECONDS,
    HOP_SECONDS,
    ClusterShape,
    PlannedMachine,
    Prediction,
    Work,
    asynchronous,
    synchronous,
)

Model = Callable[[Work, ClusterShape], Prediction]
MODELS = pytest.mark.parametrize("model", [asynchronous, synchronous])
works = some.builds(Work, some.floats(1e-4, 100), some.floats(1, 1e10), some.integers(1, 1000), some.just(1.0))
machines = some.builds(PlannedMachine.of, some.integers(1, 96), some.floats(0.1, 100))
counts = some.integers(1, 30)
shared = some.none() | some.floats(1, 64)


def shape(machine: PlannedMachine, count: int, servers: int = 3, cpus: float | None = None) -> ClusterShape:
    return ClusterShape([machine] * count, [machine] * servers, cpus)


@MODELS
@given(works, machines, counts, counts, shared)
def test_a_cluster_is_no_faster_than_the_sum_of_its_replicas(
    model: Model, work: Work, machine: PlannedMachine, count: int, servers: int, cpus: float | None
) -> None:
    prediction = model(work, shape(machine, count, servers, cpus))
    assert 0 < prediction.rate <= prediction.alone * count * (1 + 1e-9)
    assert prediction.efficiency <= 1 + 1e-9
    if cpus is not None:
        assert prediction.rate <= cpus / work.cpu_seconds * (1 + 1e-9)


@MODELS
@given(works, machines)
def test_one_replica_has_a_speed_up_of_one(model: Model, work: Work, machine: PlannedMachine) -> None:
    assert model(work, shape(machine, 1, 0)).speed_up == pytest.approx(1)


@MODELS
@given(works, machines, counts, counts, some.floats(1, 100))
def test_more_network_is_never_slower(
    model: Model, work: Work, machine: PlannedMachine, count: int, servers: int, factor: float
) -> None:
    faster = replace(machine, bandwidth=machine.bandwidth * factor)
    slow, quick = (model(work, shape(each_machine, count, servers)).rate for each_machine in (machine, faster))
    assert quick >= slow * (1 - 1e-9)


@MODELS
@given(works, machines, counts, counts)
def test_a_longer_period_is_never_slower(model: Model, work: Work, machine: PlannedMachine, count: int, servers: int) -> None:
    rarer = replace(work, period=work.period + 1)
    cluster_shape = shape(machine, count, servers)
    assert model(rarer, cluster_shape).rate >= model(work, cluster_shape).rate * (1 - 1e-9)


@given(works, machines, counts, counts)
def test_more_servers_are_never_slower(work: Work, machine: PlannedMachine, count: int, servers: int) -> None:
    fewer = asynchronous(work, shape(machine, count, servers)).rate
    assert asynchronous(work, shape(machine, count, servers + 1)).rate >= fewer * (1 - 1e-9)


@given(works, machines, counts)
def test_async_gains_by_a_replica_and_sync_waits_for_the_slowest(work: Work, machine: PlannedMachine, count: int) -> None:
    assert asynchronous(work, shape(machine, count + 1)).rate >= asynchronous(work, shape(machine, count)).rate * (1 - 1e-9)
    slower = replace(machine, cpus=machine.cpus / 2)
    mixed = synchronous(work, ClusterShape([machine] * count + [slower]))
    assert mixed.rate <= synchronous(work, shape(machine, count + 1)).rate * (1 + 1e-9)


def test_the_bound_of_a_prediction() -> None:
    machine = PlannedMachine.of(8, 16)
    assert asynchronous(Work(1, 13e6, 4, 0.5), shape(machine, 5)).bottleneck == "compute"
    assert asynchronous(Work(1e-3, 1e9, 4, 0.5), shape(machine, 5, 5)).bottleneck == "a worker's network"
    crowded = asynchronous(Work(1e-3, 1e9, 4, 0.5), shape(machine, 20, 1))
    assert crowded.bottleneck == "the ps' network"
    assert crowded.rate == pytest.approx(4 * 2e9 / 0.5e9)  # 4 steps for each half GB that a ps sends at 16 Gbit/s
    assert synchronous(Work(1e-3, 1e9, 4, 0.5), shape(machine, 5)).bottleneck == "a worker's network"
    assert asynchronous(Work(1, 0.0, 1, 1.0), ClusterShape([PlannedMachine(2)] * 3, [], 2)).bottleneck == "shared cpus"


def test_predictions_agree_with_a_calculation_by_hand() -> None:
    machine = PlannedMachine.of(8, 16)  # 2 GB/s
    work = Work(cpu_seconds=0.8, parameters=40e6, period=4, share=0.5)  # 0.1 s a step; 20 MB each way, 10 ms
    assert asynchronous(work, shape(machine, 5)).rate == pytest.approx(5 * 4 / (4 * 0.1 + 2 * 0.01 + 4 * HOP_SECONDS))
    reduced = 2 * 4 / 5 * 40e6 / 2e9 + 2 * 4 * HOP_SECONDS
    assert synchronous(work, shape(machine, 5)).rate == pytest.approx(5 * 4 / (4 * 0.1 + reduced))
    assert synchronous(replace(work, period=1), shape(machine, 5)).rate == pytest.approx(5 / (0.1 + reduced))
    local_prediction = asynchronous(work, ClusterShape([PlannedMachine(4)] * 3, [PlannedMachine(4)], 4))
    assert local_prediction.rate == pytest.approx(4 * 4 / (4 * 0.8 + 2 * 20e6 * COPY_SECONDS))


def test_the_shapes_of_the_tiers() -> None:
    standard = tier_shape(preset(ScaleTier.STANDARD_1))
    assert (len(standard.trainers), len(standard.servers), standard.shared_vcpus) == (5, 3, None)
    assert standard.trainers[0] == PlannedMachine(8, 2e9)
    assert standard.servers[0] == PlannedMachine(4, 1.25e9)
    premium = tier_shape(preset(ScaleTier.PREMIUM_1))
    assert (len(premium.trainers), len(premium.servers)) == (20, 11)
    assert premium.trainers[0] == PlannedMachine(16, 4e9)
    assert tier_shape(preset(ScaleTier.BASIC)) == ClusterShape([PlannedMachine(4, 1.25e9)], [])


def test_the_network_of_a_machine_type() -> None:
    types = ("n1-standard-1", "n1-standard-2", "n1-highmem-8", "n1-highcpu-96")
    assert [network_gbits(machine_type) for machine_type in types] == [2, 10, 16, 32]
    with pytest.raises(SpecError, match="'f1-micro' does not tell its vCPUs"):
        vcpus("f1-micro")
