"""The speed of a job on a cluster: a pure model of its compute and transfers; see docs/plan.md.

Compute is divided by the vCPUs of a machine (no serial part), a vCPU being half a core. A transfer is as
fast as the slowest network on its way, and does not overlap with compute. `fab plan --job` shows the error of the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# vCPU-seconds to move a byte between two hosts of one machine: both ends, with gRPC and the conversion to 16 bits.
COPY_SECONDS = 3e-9
# Seconds for a small message to another host of the zone, including gRPC at both ends.
HOP_SECONDS = 2.5e-4
_EXCHANGE_HOPS = 4  # a read and a write, each with an answer
_BITS = 8
_GIGA = 1e9


@dataclass(frozen=True)
class Work:
    """The measured cost of the steps of one process.

    Attributes:
        cpu_seconds: seconds of one vCPU per step.
        parameters: bytes of the parameters as float32.
        period: local steps between two exchanges.
        share: the part of `parameters` that an exchange with the parameter servers moves each way: 0.5 for numbers of 16 bits.
    """

    cpu_seconds: float
    parameters: float
    period: int
    share: float


@dataclass(frozen=True)
class PlannedMachine:
    """A host: its vCPUs, and the most bytes a second that its network sends, and also receives."""

    cpus: float
    bandwidth: float = math.inf

    @classmethod
    def of(cls, cpus: float, gbits: float) -> PlannedMachine:
        """Return a machine with a network in Gbit/s."""
        return cls(cpus, gbits * _GIGA / _BITS)


@dataclass(frozen=True)
class ClusterShape:
    """The machines of replicas, the master first, and of parameter servers; all share `shared_vcpus`, unless it is None."""

    trainers: Sequence[PlannedMachine]
    servers: Sequence[PlannedMachine] = ()
    shared_vcpus: float | None = None


@dataclass(frozen=True)
class Prediction:
    """A predicted speed.

    Attributes:
        rate: steps/s of all replicas together.
        alone: steps/s of one process on the master's machine.
        replicas: the number of training replicas.
        bottleneck: the resource that limits the rate, such as `compute`.
    """

    rate: float
    alone: float
    replicas: int
    bottleneck: str

    @property
    def speed_up(self) -> float:
        return self.rate / self.alone

    @property
    def efficiency(self) -> float:
        return self.speed_up / self.replicas


def asynchronous(work: Work, shape: ClusterShape) -> Prediction:
    """Model asynchronous replicas: rounds of `period` steps, after which parameters are transferred once each way."""
    each_way = work.parameters * work.share if shape.servers else 0.0
    compute = [work.period * work.cpu_seconds / machine.cpus for machine in shape.trainers]
    hops = _EXCHANGE_HOPS * HOP_SECONDS if each_way else 0.0
    transfer = [2 * each_way / machine.bandwidth + hops for machine in shape.trainers]
    limits = {
        # The rate of the replicas if nothing else were slow, named after the longest part of a round.
        "compute" if sum(compute) >= sum(transfer) else "a worker's network": sum(
            1 / (busy + waits) for busy, waits in zip(compute, transfer, strict=True)
        ),
        "the ps' network": _rounds(sum(machine.bandwidth for machine in shape.servers), each_way),
        "shared cpus": _rounds(shape.shared_vcpus, work.period * work.cpu_seconds + 2 * each_way * COPY_SECONDS),
    }
    bottleneck = min(limits, key=lambda name: limits[name])
    return Prediction(work.period * limits[bottleneck], _alone(work, shape), len(shape.trainers), bottleneck)


def synchronous(work: Work, shape: ClusterShape) -> Prediction:
    """Model synchronous replicas: rounds of `period` steps each, then a float32 ring all-reduce of the parameters."""
    count = len(shape.trainers)
    sent = 2 * (count - 1) / count * work.parameters
    compute = max(work.period * work.cpu_seconds / machine.cpus for machine in shape.trainers)
    transfer = sent / min(machine.bandwidth for machine in shape.trainers) + 2 * (count - 1) * HOP_SECONDS
    limits = {
        "compute" if compute >= transfer else "a worker's network": 1 / (compute + transfer),
        "shared cpus": _rounds(shape.shared_vcpus, count * (work.period * work.cpu_seconds + sent * COPY_SECONDS)),
    }
    bottleneck = min(limits, key=lambda name: limits[name])
    return Prediction(count * work.period * limits[bottleneck], _alone(work, shape), count, bottleneck)


def _rounds(capacity: float | None, needed: float) -> float:
    """Return the rounds per second that a resource allows, by its capacity and what a round needs."""
    return math.inf if capacity is None or not needed else capacity / needed


def _alone(work: Work, shape: ClusterShape) -> float:
    """Return the steps/s of one process alone on the master's machine."""
    cpus = shape.trainers[0].cpus
    return (cpus if shape.shared_vcpus is None else min(cpus, shape.shared_vcpus)) / work.cpu_seconds
