"""`fab plan --job ID`: how right the plan of a job was, by the log of its chief."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from infra.spec import Role, network_gbits
from jobs.chunks import Wanted
from jobs.records import JobRecord
from ops import terminal
from ops.cluster.cluster import Cluster
from ops.cluster.inventory import Host, Inventory
from ops.cluster.ledger import existing_job
from ops.errors import DONE, UsageError
from ops.logs import progress
from ops.logs.read import read_logs
from ops.package.declared import Declared
from ops.plan import rehearsal
from ops.plan.plan import as_dict, models, path, period_of
from ops.plan.scaling import Machine, Prediction, Shape, Work
from ops.train import manifest
from ops.train.config import chosen_strategy
from ops.train.reproduce import read_manifest, read_package

_TRAINS = (Role.MASTER, Role.WORKER)


@dataclass(frozen=True)
class Checked:
    """A job's plan, the prediction that it comes to on this cluster, and the steps/s that the job had."""

    made: dict[str, Any]
    found: Prediction
    measured: float

    @property
    def error(self) -> float:
        """By how many percent the prediction is too high."""
        return 100 * (self.found.rate / self.measured - 1)


def check(cluster: Cluster, job_id: str, as_json: bool) -> int:
    """Predict the job's steps/s on this cluster from the plan that was made of it, and compare with what it did."""
    record = existing_job(cluster.ledger, job_id)
    _show(job_id, compared(cluster, record), as_json)
    return DONE


def compared(cluster: Cluster, record: JobRecord) -> Checked:
    """A job and its plan; UsageError where none was made, where the cluster is another today, or for too few Train lines."""
    job_id = record.jobId
    whole = read_manifest(cluster.bucket, job_id)
    then = whole["cluster"]
    inventory = cluster.inventory.part(then.get("replicas", {}), then.get("scaleTier"))
    if then != (today := manifest.cluster(inventory)):
        lines = (manifest.cluster_line({"cluster": made}) for made in (then, today))
        raise UsageError(f"{job_id} ran on another cluster: {' - now it is '.join(lines)}")
    declared = read_package(cluster.bucket, job_id, whole).declared
    made = read_plan(whole["module"], whole["args"], declared)
    chief = inventory.chief.name
    log = read_logs(cluster, record, [chief], Wanted())[chief]
    messages = [line.message for line in log if progress.tells(line.message)]
    measured = rehearsal.mean_rate(rehearsal.marks(messages))
    if measured is None:
        raise UsageError(f"{job_id} logged too few Train lines to tell its speed: compare a job of more steps")
    planned = Work(**made["work"])
    # A period that was chosen as the job ran is known from its log alone.
    work = replace(planned, period=period_of(whole["args"], messages, declared.plan))
    return Checked(made, predict(work, inventory, chosen_strategy(whole["args"]), made["vcpusPerCpu"], declared), measured)


def read_plan(module: str, args: Sequence[str], declared: Declared) -> dict[str, Any]:
    """The newest plan of a job; UsageError where none was made of the same work."""
    try:
        found: dict[str, Any] = json.loads(path(module, args, declared).read_bytes())
    except FileNotFoundError:
        raise UsageError(
            f"no plan was made of {module} with these arguments: run fab plan with the job's --package, --module and --args"
        ) from None
    return found


def predict(work: Work, inventory: Inventory, strategy: str | None, per_cpu: float, declared: Declared) -> Prediction:
    """The job's steps/s on a cluster that is up. A trainer that declares no strategies is one with parameter servers."""
    known = models(declared)
    name = (strategy or declared.default or next(iter(known))) if declared.strategies else next(iter(known))
    if name not in known:
        raise UsageError(f"there is no model of --strategy {name}; there is one of {', '.join(known)}")
    return known[name](work, shape(inventory, per_cpu))


def shape(inventory: Inventory, per_cpu: float) -> Shape:
    """A cluster that is up. Hosts that share processors share this machine's, of `per_cpu` vCPUs each, and have no network
    between them but its memory; others have vCPUs and the network of their machine type."""
    shared = inventory.shared_cpus

    def machine(host: Host) -> Machine:
        return Machine.of(host.cpus, network_gbits(host.machine_type)) if shared is None else Machine(host.cpus * per_cpu)

    trainers = [machine(inventory.host(name)) for name in inventory.replicas if inventory.host(name).role in _TRAINS]
    servers = [machine(host) for host in inventory.hosts if host.role is Role.PS]
    return Shape(trainers, servers, None if shared is None else shared * per_cpu)


def _show(job_id: str, checked: Checked, as_json: bool) -> None:
    made, found, measured, error = checked.made, checked.found, checked.measured, checked.error
    if as_json:
        plan = {key: made[key] for key in ("createTime", "package", "work")}
        figures = {"predicted": as_dict(found), "measured": round(measured, 2), "errorPercent": round(error, 1)}
        terminal.as_json({"job": job_id, "plan": plan, **figures})
        return
    terminal.table(
        ("", "STEPS/S", "SPEED-UP", "EFFICIENCY"),
        [
            ("predicted", f"{found.rate:.1f}", f"{found.speed_up:.2f}", f"{found.efficiency:.2f}"),
            ("measured", f"{measured:.1f}", f"{measured / found.alone:.2f}", f"{measured / found.alone / found.replicas:.2f}"),
        ],
    )
    terminal.out()
    terminal.out(
        f"{job_id}: the prediction is {abs(error):.0f} % too {'high' if error >= 0 else 'low'}, bound by {found.bound}"
    )
