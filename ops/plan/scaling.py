"""The speed of a job on a cluster: a pure model of its compute and transfers; see docs/plan.md.

Compute is divided by the vCPUs of a machine (no serial part), a vCPU being half a core. Transfers wait only for the slowest
network on their way, and do not overlap with compute. Both err for different reasons; `fab plan --job` shows by how much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# vCPU-seconds to move a byte between two hosts of one machine: both ends, with gRPC and the conversion to 16 bits.
COPY_SECONDS = 3e-9
# Seconds for a small message from one host to another of its zone, gRPC at both ends included.
HOP_SECONDS = 2.5e-4
_EXCHANGE_HOPS = 4  # read, answer, write, answer
_BITS = 8
_GIGA = 1e9


@dataclass(frozen=True)
class Work:
    """The measured needs of one process.

    Attributes:
        cpu_seconds: seconds of one vCPU per step.
        parameters: bytes of the parameters as float32.
        period: local steps between two exchanges.
        share: the part of these bytes that an exchange with the parameter servers moves each way: 0.5 for numbers of 16 bits.
    """

    cpu_seconds: float
    parameters: float
    period: int
    share: float


@dataclass(frozen=True)
class PlannedMachine:
    """A host: vCPUs, and the bytes a second that its network sends, and takes, at most."""

    cpus: float
    bandwidth: float = math.inf

    @classmethod
    def of(cls, cpus: float, gbits: float) -> PlannedMachine:
        """Return a machine with a network in Gbit/s."""
        return cls(cpus, gbits * _GIGA / _BITS)


@dataclass(frozen=True)
class Shape:
    """The machines that train, the master first, and the servers; `shared_vcpus` is None if each has its own."""

    trainers: Sequence[PlannedMachine]
    servers: Sequence[PlannedMachine] = ()
    shared_vcpus: float | None = None


@dataclass(frozen=True)
class Prediction:
    """A predicted speed.

    Attributes:
        rate: steps/s of all replicas together.
        alone: steps/s of one process on the master's machine.
        replicas: how many train.
        bound: what limits the rate, such as `compute`.
    """

    rate: float
    alone: float
    replicas: int
    bound: str

    @property
    def speed_up(self) -> float:
        return self.rate / self.alone

    @property
    def efficiency(self) -> float:
        return self.speed_up / self.replicas


def asynchronous(work: Work, shape: Shape) -> Prediction:
    """Model independent replicas: a round of `period` steps, then parameters once each way."""
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
    bound = min(limits, key=lambda name: limits[name])
    return Prediction(work.period * limits[bound], _alone(work, shape), len(shape.trainers), bound)


def synchronous(work: Work, shape: Shape) -> Prediction:
    """Model replicas in step: `period` steps each, then a float32 ring all-reduce of their parameters."""
    count = len(shape.trainers)
    sent = 2 * (count - 1) / count * work.parameters
    compute = max(work.period * work.cpu_seconds / machine.cpus for machine in shape.trainers)
    transfer = sent / min(machine.bandwidth for machine in shape.trainers) + 2 * (count - 1) * HOP_SECONDS
    limits = {
        "compute" if compute >= transfer else "a worker's network": 1 / (compute + transfer),
        "shared cpus": _rounds(shape.shared_vcpus, count * (work.period * work.cpu_seconds + sent * COPY_SECONDS)),
    }
    bound = min(limits, key=lambda name: limits[name])
    return Prediction(count * work.period * limits[bound], _alone(work, shape), count, bound)


def _rounds(capacity: float | None, needed: float) -> float:
    """Return the rounds per second of a resource, by its capacity and a round's need of it."""
    return math.inf if capacity is None or not needed else capacity / needed


def _alone(work: Work, shape: Shape) -> float:
    """Return the steps/s of one process on the master's machine, and nothing else there."""
    cpus = shape.trainers[0].cpus
    return (cpus if shape.shared_vcpus is None else min(cpus, shape.shared_vcpus)) / work.cpu_seconds
