"""The cluster as pure data: scale tiers, roles and machine types.

Nothing here knows a target. Source of the tiers: AI Platform Training, `projects.jobs#ScaleTier`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

PYTHON, PYTHON_WITH_GPUS = "3.11", "3.12"
"""The versions of Python in the images: Debian 12, and Ubuntu 24.04, which all hosts of a stack with GPUs have."""


class SpecError(ValueError):
    """An invalid configuration or cluster: the message is one line that says what is wrong and what is valid."""


class TargetError(RuntimeError):
    """A refusal of a target, or of this machine: the message is one line with a remedy."""


class Role(StrEnum):
    """Cloud ML's roles of hosts, and the role of model servers, in the order of the list of hosts."""

    PS = "ps"
    MASTER = "master"
    WORKER = "worker"
    EVALUATOR = "evaluator"
    SERVING = "serving"

    @property
    def runs_jobs(self) -> bool:
        """True if jobs run on its hosts; tiers, jobs and plans have no other roles."""
        return self is not Role.SERVING


JOB_ROLES = tuple(role for role in Role if role.runs_jobs)


class ScaleTier(StrEnum):
    """`scaleTier` of a Cloud ML training input; spelling as in its API."""

    BASIC = "BASIC"
    STANDARD_1 = "STANDARD_1"
    PREMIUM_1 = "PREMIUM_1"
    BASIC_GPU = "BASIC_GPU"
    CUSTOM = "CUSTOM"

    @classmethod
    def parse(cls, text: str) -> ScaleTier:
        """Return the tier of `STANDARD_1`, as in the API, or `standard-1`, as in gcloud's flag; SpecError if it is neither."""
        try:
            return cls(text.strip().upper().replace("-", "_"))
        except ValueError:
            raise SpecError(f"scaleTier {text!r} is unknown; valid are {', '.join(cls)}") from None


@dataclass(frozen=True)
class Accelerator:
    """GPUs of one host: Compute Engine's accelerator type and their number."""

    type: str
    count: int = 1


@dataclass(frozen=True)
class RoleSpec:
    """Properties of a role's hosts; `machine_type` is Compute Engine's name."""

    count: int
    machine_type: str
    accelerator: Accelerator | None = None
    spot: bool = False


def vcpus(machine_type: str) -> int:
    """Return the vCPUs in the name of a Compute Engine machine type: `n1-highcpu-8`; SpecError if there are none."""
    match = re.search(r"-(\d+)$", machine_type)
    if not match:
        raise SpecError(f"machine type {machine_type!r} does not tell its vCPUs; n1-highcpu-8 does")
    return int(match[1])


def network_gbits(machine_type: str) -> float:
    """Return the maximal egress of an N1 host in Gbit/s: 2 for one vCPU, 10 up to 4, 16 for 8, 32 from 16.

    Source: Compute Engine documentation, "Network bandwidth" and "N1 machine series"; 32 on Skylake or later. Other series
    count as N1.
    """
    cpus = vcpus(machine_type)
    return 2.0 if cpus == 1 else float(min(max(2 * cpus, 10), 32))


@dataclass(frozen=True)
class HostId:
    """The identity of a host in its cluster: its role and its index, which make its name, such as `worker-0`."""

    role: Role
    index: int

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"


_GPU = Accelerator("nvidia-tesla-t4")
_TIERS: Mapping[ScaleTier, Mapping[Role, RoleSpec]] = {
    ScaleTier.BASIC: {Role.MASTER: RoleSpec(1, "n1-standard-4")},
    ScaleTier.STANDARD_1: {
        Role.PS: RoleSpec(3, "n1-standard-4"),
        Role.MASTER: RoleSpec(1, "n1-highcpu-8"),
        Role.WORKER: RoleSpec(4, "n1-highcpu-8"),
    },
    ScaleTier.PREMIUM_1: {
        Role.PS: RoleSpec(11, "n1-highmem-8"),
        Role.MASTER: RoleSpec(1, "n1-highcpu-16"),
        Role.WORKER: RoleSpec(19, "n1-highcpu-16"),
    },
    ScaleTier.BASIC_GPU: {Role.MASTER: RoleSpec(1, "n1-standard-8", _GPU)},
}


@dataclass(frozen=True)
class ClusterSpec:
    """A whole cluster. `roles` has only roles with a host; there is always exactly one master."""

    scale_tier: ScaleTier
    roles: Mapping[Role, RoleSpec]

    @property
    def has_gpus(self) -> bool:
        return any(role_spec.accelerator for role_spec in self.roles.values())

    @property
    def hosts(self) -> tuple[HostId, ...]:
        """Every host in the order of Role, then index."""
        return tuple(HostId(role, index) for role in Role if role in self.roles for index in range(self.roles[role].count))


def preset(tier: ScaleTier) -> ClusterSpec:
    """Return the cluster of a tier other than CUSTOM."""
    return ClusterSpec(tier, dict(_TIERS[tier]))


def custom(roles: Mapping[Role, RoleSpec]) -> ClusterSpec:
    """Return a CUSTOM cluster of the roles that have hosts; SpecError if there is not exactly one master."""
    present = {role: roles[role] for role in Role if role in roles and roles[role].count > 0}
    if present.get(Role.MASTER, RoleSpec(0, "")).count != 1:
        raise SpecError("scaleTier CUSTOM needs exactly one master: set masterType, such as n1-highcpu-8")
    return ClusterSpec(ScaleTier.CUSTOM, present)


def parse_replica(text: str, valid: Iterable[str]) -> str:
    """Return a replica's name, from `worker-0` or Cloud ML's `worker-replica-0`; SpecError lists the valid names."""
    names = list(valid)
    name = text.strip().replace("-replica-", "-")
    if name not in names:
        raise SpecError(f"replica {text!r} is unknown; valid are {', '.join(names)}")
    return name


def suggest(word: str, valid: Iterable[str], cutoff: float = 0.6) -> str:
    """Return `; did you mean worker-0?`, empty if no valid word is as similar as `cutoff` (difflib)."""
    matches = difflib.get_close_matches(word, list(valid), cutoff=cutoff)
    return f"; did you mean {matches[0]}?" if matches else ""
