"""Run a job with N replicas, as processes on loopback, until a metric reaches a value, and count its steps.

The processes share the CPUs of this machine, which does not matter: steps are counted, not seconds.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.scale_tiers import Role
from jobs import progress
from jobs.progress import MetricPoint
from ops import terminal
from ops.errors import OpsError, UsageError
from ops.plan.profile import ProcessGroup, ProcessStart, describe_failure, start_processes
from ops.plan.time_to_target import Crossing, MetricTarget, crossing, nearest

_EVAL_LINE = "Eval, step 990: loss: 0.400, accuracy: 0.890"
# The result is discarded, so there is no wait for a long save.
_GRACE_SECONDS = 5.0
_REPLICA = re.compile(r"Train \[(\w+/\d+)\]")
_LATE_SHARE = 0.25
_TASK_TYPES = {Role.MASTER: "chief", Role.WORKER: "worker", Role.PS: "ps"}


@dataclass(frozen=True)
class MeasuredRun:
    """A run that reached its target; `late_steps` is the number of steps before the last replica began."""

    replicas: int
    crossing: Crossing
    late_steps: int

    def as_dict(self, metric: str) -> dict[str, Any]:
        """Return for JSON the steps of all replicas together, and the evaluations before and after the target."""
        around = (("before", self.crossing.before), ("after", self.crossing.after))
        ends = {name: {"step": point.step, "value": point.values[metric]} for name, point in around}
        return {"replicas": self.replicas, "steps": round(self.crossing.step, 1), **ends, "lateSteps": self.late_steps}


@dataclass(frozen=True)
class RunSetup:
    """A run until `target` is reached, of `seconds` at most; with `servers`, it has a parameter server.

    `job_variables` are the names of the variables in `env` that the job sets.
    """

    target: MetricTarget
    argv: Sequence[str]
    env: Mapping[str, str]
    servers: bool
    seconds: float
    job_variables: Collection[str] = ()


def run(setup: RunSetup, replicas: int, folder: Path) -> MeasuredRun:
    """Run the job in `folder`, where its package is unpacked; UsageError if it does not reach the target."""
    module, target = setup.argv[0], setup.target
    evaluations: list[MetricPoint] = []
    first_steps: dict[str, int] = {}
    start_time = time.monotonic()
    with start_processes(replica_commands(setup, replicas), folder, _GRACE_SECONDS) as processes:
        here = "one process" if replicas == 1 else terminal.plural(replicas, "replica")
        with terminal.ProgressLine(f"{module} as {here} here, to {target}:", always=True) as progress_line:
            for line in processes.lines(lambda: start_time + setup.seconds):
                if (train := progress.parse_train_point(line)) and (replica := _REPLICA.search(line)):
                    first_steps.setdefault(replica[1], train.step)
                point = progress.parse_eval_metrics(line)
                if point and (target.metric in point.values or not evaluations):
                    evaluations.append(point)
                    _check_evaluation(module, target, evaluations)
                    progress_line.detail = f"{point.values[target.metric]:g} at step {point.step}"
                    if target.reached(point.values[target.metric]):
                        break
        elapsed = time.monotonic() - start_time
    target_crossing = crossing(target, evaluations)
    if target_crossing is None:
        raise _missed_target_error(setup, replicas, evaluations, processes, elapsed)
    late_steps = max(first_steps.values(), default=0) if replicas > 1 else 0
    return MeasuredRun(replicas, target_crossing, late_steps)


def is_too_late(late_steps: int, steps: float) -> bool:
    """Return whether the last replica began too late for a good measurement."""
    return late_steps > _LATE_SHARE * steps


def replica_commands(setup: RunSetup, replicas: int) -> list[ProcessStart]:
    """Return the start commands of the replicas, the chief first; a single replica has no cluster."""
    if replicas == 1:
        return [ProcessStart.of_replica(Role.MASTER, 0, setup.argv, setup.env, setup.job_variables)]
    roles = [(Role.MASTER, 0), *((Role.WORKER, index) for index in range(replicas - 1))]
    if setup.servers:
        roles.append((Role.PS, 0))
    cluster: dict[str, list[str]] = {}
    for (role, _), port in zip(roles, _free_ports(len(roles)), strict=True):
        cluster.setdefault(_TASK_TYPES[role], []).append(f"127.0.0.1:{port}")
    commands = []
    for role, index in roles:
        config = {"cluster": cluster, "task": {"type": _TASK_TYPES[role], "index": index}}
        env = {**setup.env, "TF_CONFIG": json.dumps(config)}
        commands.append(ProcessStart.of_replica(role, index, setup.argv, env, setup.job_variables))
    return commands


def _free_ports(count: int) -> list[int]:
    """Return different free ports of 127.0.0.1."""
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [server.getsockname()[1] for server in servers]
    finally:
        for server in servers:
            server.close()


def _check_evaluation(module: str, target: MetricTarget, evaluations: Sequence[MetricPoint]) -> None:
    """Check that the first Eval line has the metric, and is not at the target already."""
    point = evaluations[-1]
    if target.metric not in point.values:
        has = ", ".join(point.values) or "none"
        raise UsageError(f"--until {target}: the Eval lines of {module} have no {target.metric!r}; they have {has}")
    if len(evaluations) == 1 and target.reached(point.values[target.metric]):
        first = f"the first evaluation, at step {point.step}, has {target.metric} {point.values[target.metric]:g}"
        fix = "choose a target that takes more steps, or set the evaluation interval in --args"
        raise UsageError(f"--until {target} is too easy to measure: {first}; {fix}")


def _missed_target_error(
    setup: RunSetup, replicas: int, evaluations: Sequence[MetricPoint], processes: ProcessGroup, elapsed: float
) -> OpsError:
    """Return the error of a run that did not reach its target."""
    module = setup.argv[0]
    if processes.failed:
        return OpsError(describe_failure(module, processes, elapsed))
    by = f"with {terminal.plural(replicas, 'replica')}"
    if not (closest := nearest(setup.target, evaluations)):
        return UsageError(f"{module} {by} printed no line of the form {_EVAL_LINE!r} in {terminal.duration(elapsed)}")
    best_value = f"the best was {closest.values[setup.target.metric]:g} at step {closest.step}"
    ended = elapsed < setup.seconds
    where = f"by its end at step {evaluations[-1].step}" if ended else f"in {terminal.duration(elapsed)}"
    fix = "give it more steps" if ended else "give --until-seconds more"
    return UsageError(f"{module} {by} did not reach {setup.target} {where}, {best_value}: {fix}, or an easier target")
