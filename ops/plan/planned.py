"""`fab plan --job ID`: compare the plan of a job with the speed that its chief logged."""

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
from ops.plan.plan import find_speed_models, prediction_to_dict, read, resolve_strategy, rounded, sync_period
from ops.plan.scaling import ClusterShape, PlannedMachine, Prediction, Work
from ops.plan.show import format_time_to_target
from ops.plan.time_to_target import TimeToTargetModel, crossing
from ops.submit import manifest
from ops.submit.arguments import STRATEGY, drop_flags_and_paths
from ops.submit.config import chosen_strategy
from ops.submit.reproduce import read_manifest

_TRAINING_ROLES = (Role.MASTER, Role.WORKER)


@dataclass(frozen=True)
class PlanCheck:
    """A job's plan, its prediction for this cluster, and the measured steps/s.

    If the plan has a target for jobs with these arguments, `time_model` predicts the time to it. `reached_seconds` is how
    long the job trained until it reached the target, None if its log does not show it.
    """

    plan: dict[str, Any]
    prediction: Prediction
    measured: float
    time_model: TimeToTargetModel | None = None
    reached_seconds: float | None = None

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
    """Compare the speed in the messages of a job's chief with the plan for the arguments in its manifest."""
    recorded = manifest_content["cluster"]
    inventory = cluster.subset(recorded.get("replicas", {}), recorded.get("scaleTier"))
    if recorded != (current := manifest.cluster(inventory)):
        lines = (manifest.cluster_line({"cluster": content}) for content in (recorded, current))
        raise UsageError(f"{job_id} ran on another cluster: {' - now it is '.join(lines)}")
    content, declared = read(manifest_content["module"], manifest_content["args"], manifest_content.get("environment"))
    messages = [message for message in read_messages() if progress.is_progress_line(message)]
    measured = profile.mean_rate(profile.train_points(messages))
    if measured is None:
        raise UsageError(f"{job_id} logged too few Train lines to measure its speed: compare a job of more steps")
    planned = Work(**content["work"])
    # An automatic period is chosen while the job runs: only its log has it.
    work = replace(planned, period=sync_period(manifest_content["args"], messages, declared.plan))
    prediction = predict(work, inventory, chosen_strategy(manifest_content["args"]), content["vcpusPerCpu"], declared)
    time_model = find_time_model(content, manifest_content["args"], declared)
    reached_seconds = seconds_to_target(time_model, messages) if time_model else None
    return PlanCheck(content, prediction, measured, time_model, reached_seconds)


def find_time_model(plan: Mapping[str, Any], args: Sequence[str], declared: TrainerConfig) -> TimeToTargetModel | None:
    """Return a plan's model of the steps to a target, for a job with these arguments.

    The number of steps does not change the cost of a step, but it changes the steps to a target: learning rates decay over it.

    Returns:
        None if the plan has no target, or was made for arguments by which the job learns otherwise.
    """
    if not plan.get("until"):
        return None
    ignored = [STRATEGY, *([declared.plan.evaluate] if declared.plan.evaluate else [])]
    if drop_flags_and_paths(plan["args"], ignored) != drop_flags_and_paths(args, ignored):
        return None
    return TimeToTargetModel.of(plan["until"]).for_strategy(resolve_strategy(declared, chosen_strategy(args)))


def seconds_to_target(time_model: TimeToTargetModel, messages: Sequence[str]) -> float | None:
    """Return the seconds of training to the target, by the chief's Eval and Train lines.

    Returns:
        None if the lines do not show it, or if the job was restarted: its lines then count seconds from 0 again.
    """
    train_points = [*filter(None, map(progress.parse_train_point, messages))]
    point = crossing(time_model.target, [*filter(None, map(progress.parse_eval_metrics, messages))])
    if point is None or any(after.seconds < before.seconds for before, after in pairwise(train_points)):
        return None
    for before, after in pairwise(train_points):
        if before.step <= point.step <= after.step and after.step > before.step:
            part = (point.step - before.step) / (after.step - before.step)
            return before.seconds + part * (after.seconds - before.seconds)
    return None


def predict(
    work: Work, inventory: Inventory, strategy: str | None, vcpus_per_cpu: float, declared: TrainerConfig
) -> Prediction:
    """Predict the job's steps/s on this cluster. A trainer without strategies uses parameter servers."""
    return find_speed_models(declared)[resolve_strategy(declared, strategy)](work, cluster_shape(inventory, vcpus_per_cpu))


def cluster_shape(inventory: Inventory, vcpus_per_cpu: float) -> ClusterShape:
    """Return the machines of a running cluster.

    Local hosts share this machine's processors, of `vcpus_per_cpu` vCPUs each, and send data by copies in its memory. Other
    hosts have the vCPUs and the network of their machine type.
    """
    shared = inventory.shared_cpus

    def machine(host: Host) -> PlannedMachine:
        if shared is not None:
            return PlannedMachine(host.cpus * vcpus_per_cpu)
        return PlannedMachine.of(host.cpus, network_gbits(host.machine_type))

    trainers = [machine(inventory.host(name)) for name in inventory.replicas if inventory.host(name).role in _TRAINING_ROLES]
    servers = [machine(host) for host in inventory.hosts if host.role is Role.PS]
    return ClusterShape(trainers, servers, None if shared is None else shared * vcpus_per_cpu)


def _show(job_id: str, checked: PlanCheck, as_json: bool) -> None:
    content, prediction, measured, error = checked.plan, checked.prediction, checked.measured, checked.error
    if as_json:
        plan = {key: content[key] for key in ("createTime", "package", "work")}
        predicted, seconds = prediction_to_dict(prediction, checked.time_model), checked.reached_seconds
        figures = {"predicted": predicted, "measured": rounded(measured), "errorPercent": round(error, 1)}
        until = {"untilSeconds": None if seconds is None else rounded(seconds)}
        terminal.print_json({"job": job_id, "plan": plan, **figures, **until})
        return
    heads, rows = ["", "STEPS/S", "SPEED-UP", "EFFICIENCY"], []
    for what, rate in (("predicted", prediction.rate), ("measured", measured)):
        gain = rate / prediction.alone
        rows.append([what, terminal.rate(rate), f"{gain:.2f}", f"{gain / prediction.replicas:.2f}"])
    if checked.time_model and checked.reached_seconds is not None:
        heads.append(f"TO {checked.time_model.target}")
        rows[0].append(format_time_to_target(checked.time_model.seconds(prediction)))
        rows[1].append(format_time_to_target(checked.reached_seconds))
    terminal.table(heads, rows)
    terminal.out()
    way = "high" if error >= 0 else "low"
    terminal.out(f"{job_id}: the prediction is {abs(error):.0f} % too {way}, bound by {prediction.bottleneck}")
