"""The record of a cluster, `inventory.json`: `pulumi up`, `fab connect` and the first `fab` in a checkout write it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from infra.ports import TENSORFLOW_PORT
from infra.scale_tiers import PYTHON, Role, parse_replica
from jobs import records
from jobs.serialization import Record

SCHEMA = 1
JOBS_UNIT, SERVING_UNIT = "scaletier.service", "scaletier-serving.service"


def camel_case(name: str) -> str:
    """Return the key of a field: `machineType` of `machine_type`."""
    head, *tail = name.split("_")
    return head + "".join(map(str.title, tail))


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host, named after its role; a replica of that name may run on another host.

    Attributes:
        ssh_host: the name or address that ssh connects to; `host_key` is its public key.
        hourly_cost: US dollars, None without a price.
        create_time: RFC 3339, None if unknown.
        start: path of the request that starts the host, below the URL of `PowerAccess`; None if only `pulumi up` starts it.
    """

    json_key: ClassVar = staticmethod(camel_case)

    name: str
    role: Role
    index: int
    address: str
    ssh_host: str = ""
    host_key: str | None = None
    machine_type: str
    cpus: float
    memory_bytes: int
    accelerator: dict[str, Any] | None = None
    hourly_cost: float | None = None
    create_time: str | None = None
    start: str | None = None

    @property
    def unit(self) -> str:
        """The systemd unit that runs on it."""
        return JOBS_UNIT if self.role.runs_jobs else SERVING_UNIT

    @property
    def hardware(self) -> tuple[object, ...]:
        """The properties that interchangeable hosts share; only the cost tells spot hosts from others."""
        gpu = self.accelerator and tuple(sorted(self.accelerator.items()))
        return self.machine_type, self.cpus, self.memory_bytes, gpu, self.hourly_cost


@dataclass(frozen=True, kw_only=True)
class PowerAccess:
    """Access to the API that starts a stopped host: a POST to `url` with the host's `start` path.

    Attributes:
        url, operator_url: the URL as hosts and as the operator reach it.
        token: a URL from which a host gets its token.
        token_command: a command that prints the operator's token.
        preempted: a URL that answers TRUE on a host that is being preempted.
        headers: HTTP headers of the requests to `token` and `preempted`.
    """

    json_key: ClassVar = staticmethod(camel_case)

    url: str
    operator_url: str
    token: str
    token_command: str
    preempted: str
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Inventory(Record):
    """A cluster that is up, the same for every target.

    Attributes:
        bucket, operator_bucket: the bucket as hosts and as the operator name it.
        proxy_command: ssh's ProxyCommand, None if the operator reaches the hosts' addresses.
        poll_seconds: time between two polls of the bucket, by the agent of a host with a job or by a model server.
        shared_cpus: number of processors that the hosts share, None if each has its own.
        runtimes, operator_runtimes: the folder of the jobs' own Python environments as hosts and as the operator name it; None
            if jobs can have none.
        tensorflow: its version on the hosts; None for the version in trainer/requirements.txt.
        python: minor version of the hosts' Python.
        power: None if only `pulumi up` starts hosts.
        folder: the folder of the operator's files, from which it was read; not in the JSON.
    """

    kind: ClassVar[str] = "inventory"
    json_key: ClassVar = staticmethod(camel_case)

    schema: int = SCHEMA
    stack: str
    target: str = ""
    scale_tier: str
    hosts: tuple[Host, ...]
    bucket: str
    operator_bucket: str
    proxy_command: str | None = None
    poll_seconds: float = 1.0
    shared_cpus: int | None = None
    runtimes: str | None = None
    operator_runtimes: str | None = None
    tensorflow: str | None = None
    python: str = PYTHON
    power: PowerAccess | None = None
    labels: dict[str, str] = field(default_factory=dict)
    folder: Path = field(default=Path(), metadata={"stored": False})

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(host.name for host in self.hosts)

    @property
    def chief(self) -> Host:
        return next(host for host in self.hosts if host.role is Role.MASTER)

    @property
    def job_hosts(self) -> tuple[Host, ...]:
        """The hosts on which jobs run."""
        return tuple(host for host in self.hosts if host.role.runs_jobs)

    @property
    def replicas(self) -> tuple[str, ...]:
        """The replicas of a job on all job hosts, named like these hosts; in the order in which they may become leader."""
        return (self.chief.name, *(host.name for host in self.job_hosts if host.role is not Role.MASTER))

    @property
    def bucket_on_hosts(self) -> bool:
        """True if the operator reaches the bucket through the hosts alone."""
        return self.operator_bucket.startswith("sftp://")

    @property
    def hourly_cost(self) -> float | None:
        """US dollars an hour of all hosts; None if one of them has no price."""
        return sum_if_known(host.hourly_cost for host in self.hosts)

    def start_requests(self, operator: bool = False) -> records.Power | None:
        """Return the requests with which hosts, or the operator, start a host; None if only `pulumi up` starts hosts."""
        if (power := self.power) is None:
            return None
        url = power.operator_url if operator else power.url
        starts = {host.name: f"{url}{host.start}" for host in self.hosts if host.start}
        return records.Power(starts, power.token, power.preempted, power.headers)

    def of_role(self, role: Role) -> tuple[Host, ...]:
        """Return the hosts of a role by index."""
        return tuple(host for host in self.hosts if host.role is role)

    def subset(self, counts: Mapping[Role, int], scale_tier: str | None = None) -> Inventory:
        """Return the first hosts of each role as a cluster of its own; all job hosts if `counts` is empty."""
        hosts = tuple(host for host in self.job_hosts if not counts or host.index < counts.get(host.role, 0))
        return replace(self, hosts=hosts, scale_tier=scale_tier or self.scale_tier)

    def host(self, name: str) -> Host:
        """Return a host of any role by its name; raise a SpecError that lists the valid names if there is none."""
        valid_name = parse_replica(name, self.names)
        return next(host for host in self.hosts if host.name == valid_name)

    def cluster(self, chief_key: str = "chief") -> dict[str, list[str]]:
        """Return TF_CONFIG's `cluster`: role to `host:2222`, the same on every host, without the evaluator."""
        addresses: dict[str, list[str]] = {}
        for host in self.job_hosts:
            if host.role is not Role.EVALUATOR:
                key = chief_key if host.role is Role.MASTER else str(host.role)
                addresses.setdefault(key, []).append(f"{host.address}:{TENSORFLOW_PORT}")
        return addresses


def sum_if_known(numbers: Iterable[float | None]) -> float | None:
    """Return the sum to 4 places, as prices have; None if one of the numbers is unknown."""
    items = list(numbers)
    return None if None in items else round(sum(filter(None, items)), 4)
