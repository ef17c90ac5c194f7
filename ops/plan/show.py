"""The terminal output of `fab plan`: the local measurements, and a table of predictions for the tiers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hosts.agent import cgroup
from infra.scale_tiers import Role, ScaleTier, preset
from ops import terminal
from ops.plan import runs
from ops.plan.scaling import Prediction, Work
from ops.plan.time_to_target import TargetModel

_MEGA = 1e6


def show(
    work: Work, per_cpu: float, predicted: Mapping[ScaleTier, Mapping[str, Prediction]], learned: TargetModel | None
) -> None:
    """Print the plan; a processor of this machine is `per_cpu` vCPUs."""
    kind = "hyperthreads" if per_cpu == 1 else "whole cores"
    here = cgroup.available_cpus()
    seconds = work.cpu_seconds / (here * per_cpu)
    rate = terminal.rate(1 / seconds)
    terminal.out(f"one process here: {rate} steps/s, {1000 * seconds:.1f} ms a step on {here:g} cpus, counted as {kind}")
    often = f"every {work.period} steps" if work.period > 1 else "every step"
    # `share` is the part of the bytes that moves each way per exchange.
    moved = f"{work.parameters * work.share / _MEGA:.1f} MB each way to and from parameter servers, {often}"
    terminal.out(f"parameters: {work.parameters / _MEGA:.1f} MB as float32; {moved}")
    if learned:
        _show_steps_model(learned)
    terminal.out()
    rows = []
    for tier, of_tier in predicted.items():
        spec = preset(tier)
        servers = spec.roles[Role.PS].count if Role.PS in spec.roles else 0
        for strategy, prediction in of_tier.items():
            rates = terminal.rate(prediction.rate), terminal.rate(prediction.alone)
            gains = f"{prediction.speed_up:.2f}", f"{prediction.efficiency:.2f}"
            target = ["", ""] if learned else []
            if there := learned and learned.by(strategy):
                target = [time_to(there.seconds(prediction)), f"{there.speed_up(prediction):.2f}"]
            rows.append((tier, strategy, prediction.replicas, servers, *rates, *gains, prediction.bound, *target))
    heads = ("TIER", "STRATEGY", "REPLICAS", "PS", "STEPS/S", "MASTER ALONE", "SPEED-UP", "EFFICIENCY", "BOUND BY")
    terminal.table((*heads, f"TO {learned.target}", "SPEED-UP TO IT") if learned else heads, rows)
    if learned:
        _note_late(learned.until)
        _note_extrapolated(learned, predicted)
        _note_short(learned, predicted)
    terminal.note("a model, not a measurement: fab plan --job ID compares it with a job that ran (docs/plan.md)")


def time_to(seconds: float) -> str:
    """Format a time: `0.034 s`, and from about a second on like other durations."""
    return terminal.duration(seconds) if seconds >= 0.95 else f"{seconds:.2g} s"


def _show_steps_model(learned: TargetModel) -> None:
    """Print the steps to the target: `least` of each replica plus `noise` divided among all (`time_to_target`)."""
    law, until = learned.law, learned.until
    measured = ", ".join(f"{run['steps']:.0f} with {run['replicas']}" for run in until["runs"])
    terminal.out(f"steps of all replicas to {learned.target}, by {learned.strategy}: {measured}")
    least, noise, error = f"{law.least:.0f}", f"{law.noise:.0f}", f"{until['errorPercent']:.0f}"
    terminal.out(f"model: {least} steps by each replica, and {noise} divided among all; off by {error} % at most")


def _note_late(until: Mapping[str, Any]) -> None:
    for run in until["runs"]:
        if runs.is_too_late(run["lateSteps"], run["steps"]):
            terminal.note(
                f"of {run['replicas']} replicas the last one began at step {run['lateSteps']}: "
                "choose a target that takes more steps, to measure it better"
            )


def _note_extrapolated(learned: TargetModel, predicted: Mapping[ScaleTier, Mapping[str, Prediction]]) -> None:
    further = [tier for tier, of_tier in predicted.items() if max(each.replicas for each in of_tier.values()) > learned.most]
    if further:
        verb = "has" if len(further) == 1 else "have"
        terminal.note(f"{' and '.join(further)} {verb} more replicas than the {learned.most} that were tried: extrapolated")


def _note_short(learned: TargetModel, predicted: Mapping[ScaleTier, Mapping[str, Prediction]]) -> None:
    if (steps := learned.until["jobSteps"]) is None:
        return
    for tier, predictions in predicted.items():
        needed = [learned.law.steps(prediction.replicas) for name, prediction in predictions.items() if learned.by(name)]
        if needed and max(needed) > steps:
            terminal.note(f"{tier} would take {max(needed):.0f} steps to {learned.target}, and the job has {steps}")
