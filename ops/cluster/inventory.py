"""The hosts of a stack: its outputs in `.scaletier/<stack>/inventory.json`, typed and frozen."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from infra.spec import JOB_ROLES, PYTHON, TENSORFLOW_PORT, Role, SpecError, parse_replica
from infra.templates import ROOT as HERE
from jobs.records import Power
from ops import terminal
from ops.cluster import state
from ops.errors import DONE, UsageError, meant

ROOT = Path(os.environ.get("SCALETIER_PROJECT") or HERE).resolve()
"""The project: the state of its stacks, and what set-up keeps."""
EVERY = "all"
JOBS_UNIT, SERVING_UNIT = "scaletier.service", "scaletier-serving.service"
SCHEMA = 1


@dataclass(frozen=True)
class Host:
    """One host, and the replica that runs on it: both have the same name.

    `create_time` is RFC 3339, if known. `start` is the path below the URL of `Powers` that starts it; None if nothing can.
    """

    name: str
    role: Role
    index: int
    address: str
    machine_type: str
    cpus: float
    memory_bytes: int
    accelerator: Mapping[str, Any] | None = None
    hourly_cost: float | None = None
    create_time: str | None = None
    start: str | None = None

    @property
    def unit(self) -> str:
        """The unit of systemd that does what the host is for."""
        return JOBS_UNIT if self.role.runs_jobs else SERVING_UNIT

    @property
    def make(self) -> tuple[object, ...]:
        """The properties that an equal host must share; a spot host costs less."""
        gpu = self.accelerator and tuple(sorted(self.accelerator.items()))
        return self.machine_type, self.cpus, self.memory_bytes, gpu, self.hourly_cost


@dataclass(frozen=True)
class Runtimes:
    """The folder of jobs' Python runtimes: its path here, where they are built, and its path on the hosts."""

    here: Path
    on_hosts: str


@dataclass(frozen=True)
class Powers:
    """The API that starts stopped hosts; `token_command` prints the operator's token."""

    url: str
    operator_url: str
    token: str
    token_command: str
    preempted: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Inventory:
    """A cluster that is up. `bucket` is as the hosts see it, `operator_bucket` as we do.

    `shared_cpus` is how many processors the hosts share, None where each has its own. `runtimes` is the folder with the Pythons
    that jobs bring along, None where hosts can have none. `tensorflow` is the version that they have, None for ours,
    `python` that of their Python. `powers` is None where `pulumi up` alone starts hosts.
    """

    stack: str
    scale_tier: str
    hosts: tuple[Host, ...]
    bucket: str
    operator_bucket: str
    poll_seconds: float
    labels: Mapping[str, str]
    folder: Path
    shared_cpus: int | None = None
    runtimes: Runtimes | None = None
    tensorflow: str | None = None
    python: str = PYTHON
    powers: Powers | None = None

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
        """Every replica's name, the chief first: that is the order in which they lead."""
        return (self.chief.name, *(host.name for host in self.job_hosts if host.role is not Role.MASTER))

    @property
    def hourly_cost(self) -> float | None:
        """US dollars an hour of all hosts; None where one of them has no price."""
        return whole_sum(host.hourly_cost for host in self.hosts)

    def power(self, operator: bool = False) -> Power | None:
        """Return the API and the hosts it starts, for a host or for the operator; None if there is none."""
        powers = self.powers
        if powers is None:
            return None
        url = powers.operator_url if operator else powers.url
        starts = {host.name: f"{url}{host.start}" for host in self.hosts if host.start}
        return Power(starts, powers.token, powers.preempted, dict(powers.headers))

    def of_role(self, role: Role) -> tuple[Host, ...]:
        """Return the hosts of a role, by index."""
        return tuple(host for host in self.hosts if host.role is role)

    def part(self, counts: Mapping[Role, int], scale_tier: str | None = None) -> Inventory:
        """Return the first hosts of each role as a cluster of their own; without counts all that run jobs."""
        hosts = tuple(host for host in self.job_hosts if not counts or host.index < counts.get(host.role, 0))
        return replace(self, hosts=hosts, scale_tier=scale_tier or self.scale_tier)

    def require_runtimes(self, what: str) -> Runtimes:
        """Return the folder of runtimes.

        Raises:
            UsageError: if the hosts can have none.
        """
        if self.runtimes is None and self.operator_bucket.startswith("sftp:"):
            raise UsageError(f"{what}: the hosts of stack {self.stack} were made before they could have any: run pulumi up")
        if self.runtimes is None:
            raise UsageError(
                f"{what}: the hosts of stack {self.stack} have the Python of their image only, with TensorFlow "
                f"{self.tensorflow or 'as it was made'}; what else a program wants goes into its package's requirements.txt"
            )
        return self.runtimes

    def host(self, name: str) -> Host:
        """Return a host of any role by its name.

        Raises:
            SpecError: with the valid names.
        """
        replica = parse_replica(name, self.names)
        return next(host for host in self.hosts if host.name == replica)

    def select(self, text: str) -> tuple[Host, ...]:
        """Return the hosts of `all` replicas, of a role such as `worker`, or of one replica.

        Raises:
            UsageError: with the valid names.
        """
        if text == EVERY:
            return self.job_hosts
        if text in JOB_ROLES and (of_role := self.of_role(Role(text))):
            return of_role
        names = [host.name for host in self.job_hosts]
        try:
            return (self.host(parse_replica(text, names)),)
        except SpecError:
            roles = dict.fromkeys(str(host.role) for host in self.job_hosts)
            valid = (*names, *roles, EVERY)
            raise UsageError(f"there is no replica {text!r}{meant(text, valid)}; valid are {', '.join(valid)}") from None

    def cluster(self, chief_key: str = "chief") -> dict[str, list[str]]:
        """TF_CONFIG's `cluster`: role to `host:2222`, the same on every host. The evaluator is never in it."""
        of_role: dict[str, list[str]] = {}
        for host in self.job_hosts:
            if host.role is not Role.EVALUATOR:
                key = chief_key if host.role is Role.MASTER else str(host.role)
                of_role.setdefault(key, []).append(f"{host.address}:{TENSORFLOW_PORT}")
        return of_role


def whole_sum(numbers: Iterable[float | None]) -> float | None:
    """Return the sum, to 4 places like prices; None if one of the numbers is unknown."""
    addends = list(numbers)
    return None if None in addends else round(sum(filter(None, addends)), 4)


def parse(text: str | bytes, folder: Path) -> Inventory:
    """Parse the inventory of a stack from its JSON.

    Raises:
        UsageError: if the schema is another, or the content no inventory.
    """
    try:
        data = json.loads(text)
        if data["schema"] != SCHEMA:
            raise UsageError(f"{folder}/inventory.json has schema {data['schema']}, this version reads {SCHEMA}: run pulumi up")
        hosts = tuple(
            Host(
                name=host["name"],
                role=Role(host["role"]),
                index=host["index"],
                address=host["address"],
                machine_type=host["machineType"],
                cpus=host["cpus"],
                memory_bytes=host["memoryBytes"],
                accelerator=host.get("accelerator"),
                hourly_cost=host.get("hourlyCost"),
                create_time=host.get("createTime"),
                start=host.get("start"),
            )
            for host in data["hosts"]
        )
        inventory = Inventory(
            stack=data["stack"],
            scale_tier=data["scaleTier"],
            hosts=hosts,
            bucket=data["bucket"].rstrip("/"),
            operator_bucket=data["operatorBucket"].rstrip("/"),
            poll_seconds=data.get("pollSeconds", 1.0),
            labels=data.get("labels") or {},
            folder=folder,
            shared_cpus=data.get("sharedCpus"),
            runtimes=Runtimes(Path(data["operatorRuntimes"]), data["runtimes"]) if data.get("runtimes") else None,
            tensorflow=data.get("tensorflow"),
            python=data.get("python") or PYTHON,
            powers=_powers(data["power"]) if data.get("power") else None,
        )
        inventory.chief  # noqa: B018  a cluster without a master is no cluster
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        raise UsageError(f"{folder}/inventory.json cannot be read ({error!r}): run pulumi up") from None
    return inventory


def _powers(data: Mapping[str, Any]) -> Powers:
    return Powers(
        data["url"], data["operatorUrl"], data["token"], data["tokenCommand"], data["preempted"], data.get("headers") or {}
    )


def choose_stack(folders: Sequence[str], wanted: str, selected: Callable[[], str | None]) -> str | None:
    """Return the stack in use: the wanted one, else Pulumi's selected one, else the only one known here.

    Returns:
        None if that one is not known here.

    Raises:
        UsageError: if there are several, and none is named or selected.
    """
    if stack := wanted or selected():
        return stack if stack in folders else None
    if len(folders) > 1:
        raise UsageError(f"more than one stack is up: say --stack, or set PULUMI_STACK, to one of {', '.join(folders)}")
    return folders[0] if folders else None


def load(root: Path = ROOT) -> Inventory:
    """Return the inventory of the stack in use, fetched from its state if it is not here yet.

    Raises:
        UsageError: if none is up.
    """
    folders = sorted(path.parent.name for path in root.glob(".scaletier/*/inventory.json"))
    stack = choose_stack(folders, state.named(), lambda: state.selected(root))
    if stack is None:
        inventory = state.fetch(root, parse)
        terminal.note(
            f"stack {inventory.stack} was made elsewhere: {len(inventory.hosts)} hosts, by its state (fab connect looks again)"
        )
        return inventory
    folder = root / ".scaletier" / stack
    return parse((folder / "inventory.json").read_bytes(), folder)


def connect(as_json: bool, root: Path = ROOT) -> int:
    """Fetch the inventory of the stack in use from its state, whatever is known of it here."""
    stack = state.fetch(root, parse)
    if as_json:
        names = list(stack.names)
        terminal.as_json({"stack": stack.stack, "scaleTier": stack.scale_tier, "hosts": names, "folder": str(stack.folder)})
        return DONE
    terminal.out(
        f"stack {stack.stack}: {stack.scale_tier}, {len(stack.hosts)} hosts, by its state; ssh -F {stack.folder}/ssh_config"
    )
    return DONE
