"""Runs of a job as processes on loopback with N replicas until a target, which count its steps.

The processes share this machine's processors, which does not matter: steps are counted, not seconds.
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
from ops.plan.profile import ProcessGroup, ProcessStart, failure, start_processes
from ops.plan.time_to_target import AccuracyTarget, Crossing, crossing, nearest

_EVAL_LINE = "Eval, step 990: loss: 0.400, accuracy: 0.890"
# The result is discarded, so there is no wait for a long save.
_GRACE_SECONDS = 5.0
_REPLICA = re.compile(r"Train \[(\w+/\d+)\]")
_LATE = 0.25
_TASK_TYPES = {Role.MASTER: "chief", Role.WORKER: "worker", Role.PS: "ps"}


@dataclass(frozen=True)
class TrialRun:
    """A run that reached its target; `late` steps were taken before the last replica began."""

    replicas: int
    crossing: Crossing
    late: int

    def as_dict(self, metric: str) -> dict[str, Any]:
        """Return for programs the steps of all replicas together, and the two evaluations around them."""
        around = (("before", self.crossing.before), ("after", self.crossing.after))
        ends = {name: {"step": point.step, "value": point.values[metric]} for name, point in around}
        return {"replicas": self.replicas, "steps": round(self.crossing.step, 1), **ends, "lateSteps": self.late}


@dataclass(frozen=True)
class RunSetup:
    """A run to a target, of `seconds` at most; with `servers` its replicas meet at a parameter server.

    `own` are the names in `env` that the job itself sets.
    """

    target: AccuracyTarget
    argv: Sequence[str]
    env: Mapping[str, str]
    servers: bool
    seconds: float
    own: Collection[str] = ()


def run(course: RunSetup, replicas: int, folder: Path) -> TrialRun:
    """Run the job in `folder`, which has the package; UsageError if it does not reach the target."""
    module, goal = course.argv[0], course.target
    evaluations: list[MetricPoint] = []
    first_steps: dict[str, int] = {}
    began = time.monotonic()
    with start_processes(replica_commands(course, replicas), folder, _GRACE_SECONDS) as processes:
        here = "one process" if replicas == 1 else terminal.plural(replicas, "replica")
        with terminal.ProgressLine(f"{module} as {here} here, to {goal}:", always=True) as progress_line:
            for line in processes.lines(lambda: began + course.seconds):
                if (train := progress.parse_train_point(line)) and (replica := _REPLICA.search(line)):
                    first_steps.setdefault(replica[1], train.step)
                point = progress.parse_eval_metrics(line)
                if point and (goal.metric in point.values or not evaluations):
                    evaluations.append(point)
                    _check(module, goal, evaluations)
                    progress_line.count = f"{point.values[goal.metric]:g} at step {point.step}"
                    if goal.reached(point.values[goal.metric]):
                        break
        took = time.monotonic() - began
    target_crossing = crossing(goal, evaluations)
    if target_crossing is None:
        raise _missed_target_error(course, replicas, evaluations, processes, took)
    late = max(first_steps.values(), default=0) if replicas > 1 else 0
    return TrialRun(replicas, target_crossing, late)


def is_too_late(late: int, steps: float) -> bool:
    """Return whether the last replica began too late for the run to count."""
    return late > _LATE * steps


def replica_commands(course: RunSetup, replicas: int) -> list[ProcessStart]:
    """Return the start commands of the replicas, the chief first; a single replica has no cluster."""
    if replicas == 1:
        return [ProcessStart.of_replica(Role.MASTER, 0, course.argv, course.env, course.own)]
    roles = [(Role.MASTER, 0), *((Role.WORKER, index) for index in range(replicas - 1))]
    if course.servers:
        roles.append((Role.PS, 0))
    cluster: dict[str, list[str]] = {}
    for (role, _), port in zip(roles, _free_ports(len(roles)), strict=True):
        cluster.setdefault(_TASK_TYPES[role], []).append(f"127.0.0.1:{port}")
    commands = []
    for role, index in roles:
        config = {"cluster": cluster, "task": {"type": _TASK_TYPES[role], "index": index}}
        env = {**course.env, "TF_CONFIG": json.dumps(config)}
        commands.append(ProcessStart.of_replica(role, index, course.argv, env, course.own))
    return commands


def _free_ports(count: int) -> list[int]:
    """Return different free ports of 127.0.0.1."""
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [server.getsockname()[1] for server in servers]
    finally:
        for server in servers:
            server.close()


def _check(module: str, goal: AccuracyTarget, evaluations: Sequence[MetricPoint]) -> None:
    """Check that the first Eval line has the metric, and is not at the target already."""
    point = evaluations[-1]
    if goal.metric not in point.values:
        has = ", ".join(point.values) or "none"
        raise UsageError(f"--until {goal}: the Eval lines of {module} have no {goal.metric!r}; they have {has}")
    if len(evaluations) == 1 and goal.reached(point.values[goal.metric]):
        value = f"{point.values[goal.metric]:g}"
        raise UsageError(
            f"--until {goal} is too easy to measure: the first evaluation, at step {point.step}, has {goal.metric} {value}"
        )


def _missed_target_error(
    course: RunSetup, replicas: int, evaluations: Sequence[MetricPoint], processes: ProcessGroup, took: float
) -> OpsError:
    """Return the error of a run that did not reach its target."""
    module = course.argv[0]
    if processes.failed:
        return OpsError(failure(module, processes, took))
    by = f"with {terminal.plural(replicas, 'replica')}"
    if not (closest := nearest(course.target, evaluations)):
        return UsageError(f"{module} {by} printed no line of the form {_EVAL_LINE!r} in {terminal.duration(took)}")
    best_value = f"the best was {closest.values[course.target.metric]:g} at step {closest.step}"
    over = took < course.seconds
    where = f"by its end at step {evaluations[-1].step}" if over else f"in {terminal.duration(took)}"
    fix = "give it more steps" if over else "give --until-seconds more"
    return UsageError(f"{module} {by} did not reach {course.target} {where}, {best_value}: {fix}, or an easier target")
