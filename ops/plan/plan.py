"""`fab plan`: what a cluster would make of a job, from a minute of it on this machine; and how right that was."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infra.spec import ClusterSpec, Role, ScaleTier, network_gbits, preset, vcpus
from jobs.times import now
from ops import terminal
from ops.cluster.inventory import ROOT
from ops.errors import DONE, UsageError
from ops.logs import progress
from ops.package import package
from ops.package.declared import Declared, Pace
from ops.plan import rehearsal
from ops.plan.scaling import Machine, Prediction, Shape, Work, asynchronous, synchronous
from ops.train import program, train
from ops.train.arguments import STRATEGY, dropped, flags, redirected, without
from ops.train.config import RUNTIME_KEYS, arguments_of, read_config

PLANS = ROOT / ".cache" / "plans"
TIERS = (ScaleTier.STANDARD_1, ScaleTier.PREMIUM_1)
Model = Callable[[Work, Shape], Prediction]
# By what a strategy declares as its exchange.
MODELS: dict[str, Model] = {"servers": asynchronous, "all-reduce": synchronous}
_TOPOLOGY = Path("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list")
_SHORTEST_SECONDS = 5.0
_MEGA = 1e6
_ENDLESS = "1000000000"  # steps: --seconds ends it
_FLOAT_BITS = 32


@dataclass(frozen=True)
class Call:
    """What is to be planned, as `fab train` would be told; `parameters_mb` in MB as float32, None to count them."""

    folder: str | None
    module: str | None
    config: str | None
    args: str | None
    more_args: Sequence[str]
    seconds: float
    parameters_mb: float | None


def number(text: str, flag: str) -> float:
    """A flag's number above 0; UsageError for anything else."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UsageError(f"{flag} {text!r} is no number above 0")
    return value


def plan(call: Call, as_json: bool) -> int:
    """Run the job here, predict, show and keep it."""
    if call.seconds < _SHORTEST_SECONDS:
        raise UsageError(
            f"--seconds {call.seconds:g} is too short to see a step; valid are {_SHORTEST_SECONDS:g} and above, such as 60"
        )
    found = program.find(call.folder, call.module, None, None).source
    given = read_config(call.config).get("trainingInput", {})
    module = call.module or given.get("pythonModule") or f"{found.name}.task"
    typed, written = arguments_of(given, call.args, call.more_args)
    args = typed or written
    if asked := [key for key in RUNTIME_KEYS if key in given]:
        terminal.note(f"{', '.join(asked)} in {call.config}: ignored, a plan is made with the Python that is here")
    built = package.build(found, module)
    declared = built.declared
    if declared.wants(args) and not train.mnist():
        raise train.no_data(declared)
    work = measure(built, module, args, call)
    made = {
        "module": module,
        "args": args,
        "package": built.sha256,
        "createTime": now(),
        "cpus": os.cpu_count(),
        "vcpusPerCpu": vcpus_per_cpu(),
        "work": asdict(work),
    }
    known = models(declared)
    predicted = {tier: {name: model(work, tier_shape(preset(tier))) for name, model in known.items()} for tier in TIERS}
    made["predictions"] = {tier: {name: as_dict(each) for name, each in known.items()} for tier, known in predicted.items()}
    PLANS.mkdir(parents=True, exist_ok=True)
    path(module, args, declared).write_text(json.dumps(made, indent=1) + "\n")
    if as_json:
        terminal.as_json(made)
        return DONE
    _show(work, predicted)
    return DONE


def measure(built: package.Package, module: str, args: Sequence[str], call: Call) -> Work:
    """What a step of the job costs, by running it here; see ops.plan.rehearsal for what can go wrong."""
    declared, pace = built.declared, built.declared.plan
    with tempfile.TemporaryDirectory(prefix="scaletier-plan-") as place:
        folder, output = Path(place), Path(place, "output")
        with tarfile.open(fileobj=io.BytesIO(built.archive)) as tar:
            tar.extractall(folder)  # noqa: S202  we have just packed it
        env = {key: value for key, value in os.environ.items() if key != "TF_CONFIG"}
        env |= {"PYTHONPATH": str(folder), "SCALETIER_DATA": str(train.MNIST), "JOB_DIR": str(output)}
        env |= {"TYPE": str(Role.MASTER), "INDEX": "0", "JOB_ID": "plan"}
        # One process has nobody to be in step with.
        alone = dropped(args, [STRATEGY]) if declared.strategies else args
        argv = [module, *redirected(alone, str(output)), *((pace.steps, _ENDLESS) if pace.steps else ())]
        lines = rehearsal.rehearse(argv, env, folder, call.seconds)
        seconds = rehearsal.step_seconds(rehearsal.marks(lines))
        if not seconds:
            raise UsageError(f"{module} came no further between its Train lines: give --seconds more than {call.seconds:g}")
        size = call.parameters_mb * _MEGA if call.parameters_mb is not None else rehearsal.parameter_bytes(output)
    cpus = len(os.sched_getaffinity(0)) * vcpus_per_cpu()
    return Work(seconds * cpus, size, period_of(args, lines, pace), pace.wire_bits / _FLOAT_BITS)


def models(declared: Declared) -> dict[str, Model]:
    """What there is a model of: the trainer's strategies of which it says how they exchange, else every way of exchanging."""
    known = {name: MODELS[strategy.exchange] for name, strategy in declared.strategies.items() if strategy.exchange}
    return known or MODELS


def period_of(args: Sequence[str], lines: Sequence[str], pace: Pace) -> int:
    """Local steps between two exchanges: as the log says, else as the arguments do, else as is usual."""
    told = next((value for flag, value in flags(args) if flag == pace.period and value.isdecimal()), None)
    return progress.period(lines) or int(told or pace.usual_period)


def vcpus_per_cpu() -> int:
    """1 where a processor of this machine is a hyperthread, as a vCPU is, and 2 where it is a whole core."""
    try:
        siblings = _TOPOLOGY.read_text().strip()
    except OSError:
        return 1
    return 1 if "," in siblings or "-" in siblings else 2


def tier_shape(spec: ClusterSpec) -> Shape:
    """A cluster of Google's machine types."""

    def machines(role: Role) -> list[Machine]:
        made = spec.roles.get(role)
        return [Machine.of(vcpus(made.machine_type), network_gbits(made.machine_type))] * made.count if made else []

    return Shape([*machines(Role.MASTER), *machines(Role.WORKER)], machines(Role.PS))


def path(module: str, args: Sequence[str], declared: Declared) -> Path:
    """Where the plan of a job is kept: the same for arguments that change nothing of its work.

    How long a job runs, how it shares the work and where its files are changes nothing of what a step costs.
    """
    pace = declared.plan
    key = json.dumps([module, without(args, [flag for flag in (STRATEGY, pace.steps, pace.period) if flag])])
    return PLANS / f"{module}-{hashlib.sha256(key.encode()).hexdigest()[:8]}.json"


def as_dict(found: Prediction) -> dict[str, Any]:
    """A prediction for programs, rates in steps/s."""
    return {
        "stepsPerSecond": round(found.rate, 2),
        "alone": round(found.alone, 2),
        "speedUp": round(found.speed_up, 3),
        "efficiency": round(found.efficiency, 3),
        "replicas": found.replicas,
        "bound": found.bound,
    }


def _show(work: Work, predicted: Mapping[ScaleTier, Mapping[str, Prediction]]) -> None:
    kind = "hyperthreads" if vcpus_per_cpu() == 1 else "whole cores"
    here = len(os.sched_getaffinity(0))
    seconds = work.cpu_seconds / (here * vcpus_per_cpu())
    terminal.out(
        f"one process here: {1 / seconds:.1f} steps/s, {1000 * seconds:.1f} ms a step on {here} cpus, taken for {kind}"
    )
    often = f"every {work.period} steps" if work.period > 1 else "every step"
    moved = f"{work.parameters * work.share / _MEGA:.1f} MB each way to and from parameter servers, {often}"
    terminal.out(f"parameters: {work.parameters / _MEGA:.1f} MB as float32; {moved}")
    terminal.out()
    rows = []
    for tier, of_tier in predicted.items():
        spec = preset(tier)
        servers = spec.roles[Role.PS].count if Role.PS in spec.roles else 0
        for strategy, found in of_tier.items():
            figures = (f"{found.rate:.1f}", f"{found.alone:.1f}", f"{found.speed_up:.2f}", f"{found.efficiency:.2f}")
            rows.append((tier, strategy, found.replicas, servers, *figures, found.bound))
    terminal.table(
        ("TIER", "STRATEGY", "REPLICAS", "PS", "STEPS/S", "MASTER ALONE", "SPEED-UP", "EFFICIENCY", "BOUND BY"), rows
    )
    terminal.note("a model, not a measurement: fab plan --job ID compares it with a job that ran (docs/plan.md)")
