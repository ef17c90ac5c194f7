"""`fab cost`: the cost so far of existing hosts, and of each job.

Hosts cost their list price since their creation, also while they are stopped. Deleted hosts, the network, traffic and the
bucket are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from infra.inventory import Host, Inventory, sum_if_known
from jobs.bucket import BucketError
from jobs.records import JobRecord
from jobs.times import now, seconds_between
from ops import terminal
from ops.cluster.cluster import ClusterClient
from ops.cluster.ledger import format_elapsed, readable_jobs
from ops.errors import DONE, OpsError

_NOT_COUNTED = "not counted: hosts that are gone, the network, traffic, the bucket; a host that was stopped counts as if it ran"


@dataclass(frozen=True)
class CostShare:
    """The cost of some hosts in US dollars; hoursUp is their average age. None is an unknown value."""

    hosts: int
    hourlyCost: float | None
    hoursUp: float | None
    accruedCost: float | None


def cost_of(hosts: Sequence[Host], moment: str) -> CostShare:
    """Return the cost of these hosts per hour, and until a moment."""
    hours = [max(seconds_between(host.create_time, moment), 0) / 3600 if host.create_time else None for host in hosts]
    costs = [
        None if price is None or up is None else price * up
        for price, up in zip((host.hourly_cost for host in hosts), hours, strict=True)
    ]
    up = sum_if_known(hours)
    return CostShare(
        hosts=len(hosts),
        hourlyCost=sum_if_known(host.hourly_cost for host in hosts),
        hoursUp=None if up is None else round(up / len(hosts), 4),
        accruedCost=sum_if_known(costs),
    )


def cost(cluster: ClusterClient, as_json: bool) -> int:
    """Print the cost of each role, of the stack and of its jobs; read the jobs only if all hosts have prices."""
    inventory = cluster.inventory
    moment, priced = now(), inventory.hourly_cost is not None
    hosts_by_role: dict[str, list[Host]] = {}
    for host in inventory.hosts:
        hosts_by_role.setdefault(str(host.role), []).append(host)
    roles = {role: cost_of(hosts, moment) for role, hosts in hosts_by_role.items()}
    stack = cost_of(inventory.hosts, moment)
    records = None
    try:
        if priced:
            records = readable_jobs(cluster.ledger)
    except (BucketError, OpsError) as error:
        terminal.note(f"the cost of jobs cannot be read: {error}")
    if as_json:
        terminal.print_json(_json(inventory, stack, roles, records))
    elif not priced:
        why = "local hosts have none, nor has what infra/prices.yaml does not list"
        terminal.note(f"not every host of stack {inventory.stack} has a price: {why}")
    else:
        _show({**roles, "all": stack}, records)
    return DONE


def _json(
    inventory: Inventory, stack: CostShare, roles: dict[str, CostShare], records: list[JobRecord] | None
) -> dict[str, Any]:
    jobs = ("jobId", "state", "createTime", "startTime", "endTime", "cost")
    return {
        "stack": inventory.stack,
        **asdict(stack),
        "roles": [{"role": role, **asdict(share)} for role, share in roles.items()],
        "jobs": records and [{key: getattr(record, key) for key in jobs} for record in records],
    }


def _show(roles: dict[str, CostShare], records: list[JobRecord] | None) -> None:
    rows: list[tuple[object, ...]] = []
    for role, share in roles.items():
        up = "" if share.hoursUp is None else f"{share.hoursUp:.2f}"
        rows.append((role, share.hosts, terminal.dollars(share.hourlyCost), up, terminal.dollars(share.accruedCost)))
    terminal.table(("ROLE", "HOSTS", "USD AN HOUR", "HOURS UP", "USD"), rows)
    if roles["all"].accruedCost is None:
        terminal.note("inventory.json lacks the creation time of some hosts: run pulumi up")
    terminal.note(_NOT_COUNTED)
    if records:
        terminal.out()
        rows = [(record.jobId, record.state, format_elapsed(record), terminal.dollars(record.cost)) for record in records]
        terminal.table(("JOB", "STATE", "TIME", "USD"), rows)
