"""`fab plan --job ID`: how right the plan of a job was, by the log of its chief."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from infra.inventory import Host, Inventory
from infra.scale_tiers import Role, network_gbits
from jobs import progress
from jobs.chunks import LogFilter
from ops import terminal
from ops.cluster.cluster import ClusterClient
from ops.cluster.ledger import existing_job
from ops.errors import DONE, UsageError
from ops.logs.read import read_logs
from ops.package.trainer_config import TrainerConfig
from ops.plan import profile
from ops.plan.plan import models, prediction_to_dict, read, resolve_strategy, rounded, sync_period
from ops.plan.scaling import PlannedMachine, Prediction, Shape, Work
from ops.plan.show import time_to
from ops.plan.time_to_target import TargetModel, crossing
from ops.submit import manifest
from ops.submit.arguments import STRATEGY, drop_run_flags
from ops.submit.config import chosen_strategy
from ops.submit.reproduce import read_manifest

_TRAINS = (Role.MASTER, Role.WORKER)


@dataclass(frozen=True)
class PlanCheck:
    """A job's plan, its prediction for this cluster, and the measured steps/s.

    If the plan has a target for jobs like this, `learned` is its law, and `reached` the seconds of training after which the job
    was there, None if its log does not say.
    """

    plan: dict[str, Any]
    prediction: Prediction
    measured: float
    learned: TargetModel | None = None
    reached: float | None = None

    @property
    def error(self) -> float:
        """The percentage by which the prediction is too high."""
        return 100 * (self.prediction.rate / self.measured - 1)


def compare_with_plan(cluster: ClusterClient, job_id: str, as_json: bool) -> int:
    """Compare the job's measured steps/s with the prediction of its plan for this cluster."""
    record = existing_job(cluster.ledger, job_id)
    chief = cluster.inventory.chief.name

    def messages() -> list[str]:
        return [line.message for line in read_logs(cluster, record, [chief], LogFilter())[chief]]

    _show(job_id, compare(cluster.inventory, job_id, read_manifest(cluster.bucket, job_id), messages), as_json)
    return DONE


def compare(
    cluster: Inventory, job_id: str, manifest_content: Mapping[str, Any], read_messages: Callable[[], Sequence[str]]
) -> PlanCheck:
    """Compare a job, by its manifest and the messages of its chief, with its plan."""
    then = manifest_content["cluster"]
    inventory = cluster.subset(then.get("replicas", {}), then.get("scaleTier"))
    if then != (today := manifest.cluster(inventory)):
        lines = (manifest.cluster_line({"cluster": content}) for content in (then, today))
        raise UsageError(f"{job_id} ran on another cluster: {' - now it is '.join(lines)}")
    content, declared = read(manifest_content["module"], manifest_content["args"], manifest_content.get("environment"))
    messages = [message for message in read_messages() if progress.is_progress_line(message)]
    measured = profile.mean_rate(profile.marks(messages))
    if measured is None:
        raise UsageError(f"{job_id} logged too few Train lines to measure its speed: compare a job of more steps")
    planned = Work(**content["work"])
    # A period that was chosen while the job ran is only in its log.
    work = replace(planned, period=sync_period(manifest_content["args"], messages, declared.plan))
    prediction = predict(work, inventory, chosen_strategy(manifest_content["args"]), content["vcpusPerCpu"], declared)
    learned = find_target_model(content, manifest_content["args"], declared)
    return PlanCheck(content, prediction, measured, learned, seconds_to_target(learned, messages) if learned else None)


def find_target_model(plan: Mapping[str, Any], args: Sequence[str], declared: TrainerConfig) -> TargetModel | None:
    """Return a plan's law of the job's way to a target.

    A step costs the same however many a job has, but a law depends on that number: learning rates fall by it.

    Returns:
        None if the plan has none, or if the job learns by other arguments.
    """
    if not plan.get("until"):
        return None
    ignored = [STRATEGY, *([declared.plan.evaluate] if declared.plan.evaluate else [])]
    if drop_run_flags(plan["args"], ignored) != drop_run_flags(args, ignored):
        return None
    return TargetModel.of(plan["until"]).by(resolve_strategy(declared, chosen_strategy(args)))


def seconds_to_target(learned: TargetModel, messages: Sequence[str]) -> float | None:
    """Return the seconds of training to the target, by the chief's Eval and Train lines.

    Returns:
        None if the lines do not report it, or if the job was restarted, as its seconds then begin at 0 again.
    """
    marks = [*filter(None, map(progress.parse_train_point, messages))]
    point = crossing(learned.target, [*filter(None, map(progress.parse_eval_metrics, messages))])
    if point is None or any(after.seconds < before.seconds for before, after in pairwise(marks)):
        return None
    for before, after in pairwise(marks):
        if before.step <= point.step <= after.step and after.step > before.step:
            part = (point.step - before.step) / (after.step - before.step)
            return before.seconds + part * (after.seconds - before.seconds)
    return None


def predict(work: Work, inventory: Inventory, strategy: str | None, per_cpu: float, declared: TrainerConfig) -> Prediction:
    """Predict the job's steps/s on this cluster. A trainer without strategies uses parameter servers."""
    return models(declared)[resolve_strategy(declared, strategy)](work, shape(inventory, per_cpu))


def shape(inventory: Inventory, per_cpu: float) -> Shape:
    """Return the shape of a running cluster.

    Hosts that share processors share this machine's, of `per_cpu` vCPUs each, and their network is its memory. Others have the
    vCPUs and the network of their machine type.
    """
    shared = inventory.shared_cpus

    def machine(host: Host) -> PlannedMachine:
        if shared is not None:
            return PlannedMachine(host.cpus * per_cpu)
        return PlannedMachine.of(host.cpus, network_gbits(host.machine_type))

    trainers = [machine(inventory.host(name)) for name in inventory.replicas if inventory.host(name).role in _TRAINS]
    servers = [machine(host) for host in inventory.hosts if host.role is Role.PS]
    return Shape(trainers, servers, None if shared is None else shared * per_cpu)


def _show(job_id: str, checked: PlanCheck, as_json: bool) -> None:
    content, prediction, measured, error = checked.plan, checked.prediction, checked.measured, checked.error
    if as_json:
        plan = {key: content[key] for key in ("createTime", "package", "work")}
        predicted, seconds = prediction_to_dict(prediction, checked.learned), checked.reached
        figures = {"predicted": predicted, "measured": rounded(measured), "errorPercent": round(error, 1)}
        until = {"untilSeconds": None if seconds is None else rounded(seconds)}
        terminal.print_json({"job": job_id, "plan": plan, **figures, **until})
        return
    heads, rows = ["", "STEPS/S", "SPEED-UP", "EFFICIENCY"], []
    for what, rate in (("predicted", prediction.rate), ("measured", measured)):
        gain = rate / prediction.alone
        rows.append([what, terminal.rate(rate), f"{gain:.2f}", f"{gain / prediction.replicas:.2f}"])
    if checked.learned and checked.reached is not None:
        heads.append(f"TO {checked.learned.target}")
        rows[0].append(time_to(checked.learned.seconds(prediction)))
        rows[1].append(time_to(checked.reached))
    terminal.table(heads, rows)
    terminal.out()
    terminal.out(
        f"{job_id}: the prediction is {abs(error):.0f} % too {'high' if error >= 0 else 'low'}, bound by {prediction.bound}"
    )
