"""The terminal output of `fab plan`: the local measurements, and a table of predictions for the tiers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infra.scale_tiers import Role, ScaleTier, preset
from jobs import cgroup
from ops import terminal
from ops.plan import runs
from ops.plan.scaling import Prediction, Work
from ops.plan.time_to_target import TimeToTargetModel

_MEGA = 1e6


def show(
    work: Work,
    vcpus_per_cpu: float,
    predicted: Mapping[ScaleTier, Mapping[str, Prediction]],
    time_model: TimeToTargetModel | None,
) -> None:
    """Print the plan; each processor of this machine counts as `vcpus_per_cpu` vCPUs."""
    kind = "hyperthreads" if vcpus_per_cpu == 1 else "whole cores"
    cpus = cgroup.available_cpus()
    seconds = work.cpu_seconds / (cpus * vcpus_per_cpu)
    rate = terminal.rate(1 / seconds)
    terminal.out(f"one process here: {rate} steps/s, {1000 * seconds:.1f} ms a step on {cpus:g} cpus, counted as {kind}")
    often = f"every {work.period} steps" if work.period > 1 else "every step"
    # `share` is the part of the bytes that moves each way per exchange.
    moved = f"{work.parameters * work.share / _MEGA:.1f} MB each way to and from parameter servers, {often}"
    terminal.out(f"parameters: {work.parameters / _MEGA:.1f} MB as float32; {moved}")
    if time_model:
        _show_steps_model(time_model)
    terminal.out()
    rows = []
    for tier, by_strategy in predicted.items():
        spec = preset(tier)
        servers = spec.roles[Role.PS].count if Role.PS in spec.roles else 0
        for strategy, prediction in by_strategy.items():
            rates = terminal.rate(prediction.rate), terminal.rate(prediction.alone)
            gains = f"{prediction.speed_up:.2f}", f"{prediction.efficiency:.2f}"
            target = ["", ""] if time_model else []
            if model := time_model and time_model.for_strategy(strategy):
                target = [format_time_to_target(model.seconds(prediction)), f"{model.speed_up(prediction):.2f}"]
            rows.append((tier, strategy, prediction.replicas, servers, *rates, *gains, prediction.bottleneck, *target))
    heads = ("TIER", "STRATEGY", "REPLICAS", "PS", "STEPS/S", "MASTER ALONE", "SPEED-UP", "EFFICIENCY", "BOUND BY")
    terminal.table((*heads, f"TO {time_model.target}", "SPEED-UP TO IT") if time_model else heads, rows)
    if time_model:
        _note_late_replicas(time_model.measurement)
        _note_extrapolated(time_model, predicted)
        _note_too_few_steps(time_model, predicted)
    terminal.note("a model, not a measurement: fab plan --job ID compares it with a job that ran (docs/plan.md)")


def format_time_to_target(seconds: float) -> str:
    """Format a time: `0.034 s`, and like other durations from about a second."""
    return terminal.duration(seconds) if seconds >= 0.95 else f"{seconds:.2g} s"


def _show_steps_model(time_model: TimeToTargetModel) -> None:
    """Print the steps to the target: measured, and by the model."""
    steps_model, measurement = time_model.steps_model, time_model.measurement
    measured = ", ".join(f"{run['steps']:.0f} with {run['replicas']}" for run in measurement["runs"])
    terminal.out(f"steps of all replicas to {time_model.target}, by {time_model.strategy}: {measured}")
    least, noise, error = f"{steps_model.least:.0f}", f"{steps_model.noise:.0f}", f"{measurement['errorPercent']:.0f}"
    terminal.out(f"model: {least} steps by each replica, and {noise} divided among all; off by {error} % at most")


def _note_late_replicas(measurement: Mapping[str, Any]) -> None:
    for run in measurement["runs"]:
        if runs.is_too_late(run["lateSteps"], run["steps"]):
            terminal.note(
                f"of {run['replicas']} replicas the last one began at step {run['lateSteps']}: "
                "choose a target that takes more steps, to measure it better"
            )


def _note_extrapolated(time_model: TimeToTargetModel, predicted: Mapping[ScaleTier, Mapping[str, Prediction]]) -> None:
    most = time_model.max_replicas
    larger = [tier for tier, by_strategy in predicted.items() if max(each.replicas for each in by_strategy.values()) > most]
    if larger:
        verb = "has" if len(larger) == 1 else "have"
        terminal.note(f"{' and '.join(larger)} {verb} more replicas than the {most} that were tried: extrapolated")


def _note_too_few_steps(time_model: TimeToTargetModel, predicted: Mapping[ScaleTier, Mapping[str, Prediction]]) -> None:
    if (steps := time_model.measurement["jobSteps"]) is None:
        return
    for tier, predictions in predicted.items():
        models = ((time_model.for_strategy(name), each.replicas) for name, each in predictions.items())
        needed = [model.steps_model.steps(replicas) for model, replicas in models if model]
        if needed and max(needed) > steps:
            terminal.note(f"{tier} would take {max(needed):.0f} steps to {time_model.target}, and the job has {steps}")
