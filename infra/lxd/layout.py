"""Compute names, addresses and sizes of a local stack, so that stacks never collide; pure functions."""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from infra.scale_tiers import ClusterSpec, HostId, Role

# Where each role's block of addresses begins in the stack's /24. A role has at most 60 hosts; .1 is the bridge.
_BLOCK: Mapping[Role, int] = {Role.MASTER: 2, Role.EVALUATOR: 4, Role.PS: 64, Role.WORKER: 128, Role.SERVING: 192}
_MIN_MEMORY = 2**30
PREFIX = "scaletier-"
"""The prefix of the LXD projects of all stacks."""
BUCKET = "/bucket"
"""The folder of the bucket on every host."""
RUNTIMES = "/opt/scaletier/runtimes"
"""The folder of the jobs' own Python environments on every host."""


@dataclass(frozen=True)
class LxdNames:
    """Names of a stack's objects in LXD and nftables, all derived from its LXD project's name."""

    project: str
    bucket: ClassVar[str] = "bucket"

    @property
    def stack_id(self) -> str:
        """The six hexadecimal digits at the end of the project's name, unique to the stack."""
        return self.project.rpartition("-")[2]

    @property
    def bridge(self) -> str:
        return f"st{self.stack_id}"

    @property
    def table(self) -> str:
        return f"scaletier_{self.stack_id}"


def names(stack: str, stack_id: str) -> LxdNames:
    """Return the names of a stack: `stack_id`, 6 hexadecimal digits, identifies it; the rest is for people."""
    plain = re.sub(r"[^a-z0-9]+", "-", stack.lower()).strip("-")[:24]
    return LxdNames(f"{PREFIX}{plain}-{stack_id}")


def candidate_network(project: str, attempt: int) -> ipaddress.IPv4Network:
    """Return the `attempt`-th private /24 to try for a project; the sequence is always the same."""
    digest = hashlib.sha256(f"{project}\0{attempt}".encode()).digest()
    return ipaddress.IPv4Network((f"10.{64 + digest[0] % 128}.{digest[1]}.0", 24))


def address(network: ipaddress.IPv4Network, host_id: HostId) -> ipaddress.IPv4Address:
    """Return the address of a host, which does not depend on other hosts."""
    return network[_BLOCK[host_id.role] + host_id.index]


def block(network: ipaddress.IPv4Network, role: Role) -> tuple[ipaddress.IPv4Address, ipaddress.IPv4Address]:
    """Return the first and the last address of a role's hosts."""
    begin = _BLOCK[role]
    end = min((other for other in _BLOCK.values() if other > begin), default=255)
    return network[begin], network[end - 1]


def interface_name(bridge: str, host_id: HostId) -> str:
    """Return the name of a host's network interface on this machine: the bridge's name, a letter of the role, the index."""
    return f"{bridge}{host_id.role[0]}{host_id.index}"


@dataclass(frozen=True)
class Size:
    """Limits of one host: a number of processors, which may be a fraction, and memory in bytes."""

    cpus: float
    memory: int


def machine_spec(machine_type: str) -> tuple[int, float]:
    """Return (vCPUs, memory in GiB) of a machine type named like N1's; other types count as (4, 16.0).

    Source: Compute Engine documentation, "General-purpose machine family", N1 machine series.
    """
    match = re.fullmatch(r"[a-z0-9]+-(standard|highmem|highcpu)-(\d+)", machine_type)
    if not match:
        return 4, 16.0
    kind, cpus = match[1], int(match[2])
    return cpus, cpus * {"standard": 3.75, "highmem": 6.5, "highcpu": 0.9}[kind]


def sizes(spec: ClusterSpec, machine_cpus: int, cpus: Mapping[Role, float], memory: Mapping[Role, int]) -> dict[Role, Size]:
    """Return limits by role: the tier's machines, scaled so that the largest host has all processors of this machine.

    Serving hosts are scaled by the same factor, but are not used to compute it. Limits are not reservations, so their sum may
    exceed the machine. `cpus` and `memory` override the limits of a role.
    """
    machines = {role: machine_spec(spec.roles[role].machine_type) for role in spec.roles}
    scale = min(1.0, machine_cpus / max(vcpus for role, (vcpus, _) in machines.items() if role.runs_jobs))
    return {
        role: Size(
            cpus=cpus.get(role, min(machine_cpus, max(1, round(vcpus * scale)))),
            memory=memory.get(role, max(_MIN_MEMORY, round(gibibytes * scale * 2**30))),
        )
        for role, (vcpus, gibibytes) in machines.items()
    }
