"""`fab plan`: run a job on this machine for a minute, predict its throughput on clusters, and store the plan."""

from __future__ import annotations

import glob
import hashlib
import io
import json
import math
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infra.scale_tiers import ClusterSpec, Role, ScaleTier, network_gbits, preset, vcpus
from jobs import cgroup, progress
from jobs.times import now
from ops import terminal
from ops.cluster.inventory import ROOT
from ops.config_values import validate
from ops.errors import DONE, UsageError
from ops.package import package, trainer_config
from ops.package.trainer_config import DeclaredFlags, TrainerConfig
from ops.plan import profile, runs, time_to_target
from ops.plan.profile import ProcessStart
from ops.plan.scaling import ClusterShape, PlannedMachine, Prediction, Work, asynchronous, synchronous
from ops.plan.show import show
from ops.plan.time_to_target import MetricTarget, TimeToTargetModel
from ops.submit import program
from ops.submit.arguments import STRATEGY, drop_flags, drop_flags_and_paths, flags, last_step, redirect_output, whole_number
from ops.submit.config import RUNTIME_KEYS, chosen_strategy, detect_job_dir_flag, read_config, split_arguments
from ops.submit.environment import merge_environment

PLANS = ROOT / ".cache" / "plans"
TIERS = (ScaleTier.STANDARD_1, ScaleTier.PREMIUM_1)
SpeedModel = Callable[[Work, ClusterShape], Prediction]
# By the kind of exchange that a strategy declares.
SPEED_MODELS: dict[str, SpeedModel] = {"servers": asynchronous, "all-reduce": synchronous}
# The keys of the trainer's scaletier.yaml that a plan stores: a job is compared without its package.
_TRAINER_KEYS = ("plan", "strategies", "strategy")
_TOPOLOGY = Path("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list")
_SHORTEST_SECONDS = 5.0
_MEGA = 1e6
_ENDLESS = "1000000000"  # steps: --seconds ends the run
_FLOAT_BITS = 32
# The evaluations of a run to a target; they are _EVALUATION_STEPS apart if the job's steps are unknown. All replicas pause at
# each: if they were closer, replicas would exchange more often than in a job, and reach the target in fewer steps.
_EVALUATIONS = 25
_UNTIL_SECONDS = 300.0
_EVALUATION_STEPS = 25


@dataclass(frozen=True)
class TargetRuns:
    """A target, the numbers of replicas with which to measure the steps to it, and the most seconds of a run."""

    target: MetricTarget
    replicas: Sequence[int]
    seconds: float


@dataclass(frozen=True)
class PlanRequest:
    """The flags of `fab plan`; `parameters_mb` is the size of the parameters as float32, None to count them."""

    folder: str | None
    module: str | None
    config: str | None
    args: str | None
    more_args: Sequence[str]
    seconds: float
    parameters_mb: float | None
    until: TargetRuns | None = None
    env: Sequence[str] = ()
    env_file: str | None = None


def number(text: str, flag: str) -> float:
    """Parse a flag's number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UsageError(f"{flag} {text!r} is no number above 0")
    return value


def parse_target_flags(target: str | None, replicas: str | None, seconds: str | None) -> TargetRuns | None:
    """Parse `--until`, `--replicas` and `--until-seconds`."""
    if target is None:
        if alone := [name for name, value in (("--replicas", replicas), ("--until-seconds", seconds)) if value is not None]:
            raise UsageError(f"{alone[0]} needs a target: give --until, such as --until accuracy=0.97")
        return None
    counts = time_to_target.parse_replicas(time_to_target.REPLICAS if replicas is None else replicas)
    run_seconds = _UNTIL_SECONDS if seconds is None else number(seconds, "--until-seconds")
    return TargetRuns(time_to_target.parse_target(target), counts, run_seconds)


def plan(request: PlanRequest, as_json: bool) -> int:
    """Run the job here, predict its speed on clusters, print and store the plan."""
    if request.seconds < _SHORTEST_SECONDS:
        raise UsageError(
            f"--seconds {request.seconds:g} is too short to see a step; valid are {_SHORTEST_SECONDS:g} and above, such as 60"
        )
    source = program.find(request.folder, request.module, None, None).source
    training_input = read_config(request.config).get("trainingInput", {})
    module = request.module or training_input.get("pythonModule") or f"{source.name}.task"
    command_line_args, config_args = split_arguments(training_input, request.args, request.more_args)
    args = command_line_args or config_args
    extra_env = merge_environment(
        training_input.get("environment", {}), request.env_file, request.env, request.config or "config.yaml"
    )
    if runtime_keys := [key for key in RUNTIME_KEYS if key in training_input]:
        terminal.note(f"{', '.join(runtime_keys)} in {request.config}: ignored, a plan is made with the Python that is here")
    built = package.build(source, module)
    declared = trainer_config.read(built.files, built.name, report_old_keys=True)
    if (data := declared.data_for(args)) and not data.local_files(ROOT):
        raise data.missing_error()
    if request.until:
        resolve_strategy(declared, chosen_strategy(args))
        if declared.plan.evaluate is None:
            raise UsageError(
                f"--until: package {built.name} declares no flag for the steps between two evaluations: "
                "say it as plan.evaluate in its scaletier.yaml"
            )
    work = measure(built, declared, module, args, extra_env, request)
    measurement = measure_steps_to_target(built, declared, module, args, extra_env, request.until) if request.until else None
    time_model = TimeToTargetModel.of(measurement) if measurement else None
    content = {
        "module": module,
        "args": args,
        "package": built.sha256,
        "createTime": now(),
        "cpus": os.cpu_count(),
        "vcpusPerCpu": vcpus_per_cpu(),
        "work": asdict(work),
        "until": measurement,
    }
    shapes = {tier: tier_shape(preset(tier)) for tier in TIERS}
    models = find_speed_models(declared).items()
    predicted = {tier: {name: model(work, shape) for name, model in models} for tier, shape in shapes.items()}
    content["predictions"] = {
        tier: {
            name: prediction_to_dict(each, time_model and time_model.for_strategy(name)) for name, each in by_strategy.items()
        }
        for tier, by_strategy in predicted.items()
    }
    PLANS.mkdir(parents=True, exist_ok=True)
    trainer = declared.model_dump(mode="json", include=set(_TRAINER_KEYS))
    stored = {**content, "trainer": trainer, "environment": sorted(extra_env)}  # no values: some are secret
    path(module, args, declared, extra_env).write_text(json.dumps(stored, indent=1) + "\n")
    if as_json:
        terminal.print_json(content)
        return DONE
    show(work, vcpus_per_cpu(), predicted, time_model)
    return DONE


def measure(
    built: package.Package,
    declared: TrainerConfig,
    module: str,
    args: Sequence[str],
    extra_env: Mapping[str, str],
    request: PlanRequest,
) -> Work:
    """Measure the cost of a step by running the job here, with `extra_env`; UsageError if its output does not show it."""
    declared_flags = declared.plan
    with _unpack(built) as folder:
        output = folder / "output"
        alone = _single_process_args(args, declared)
        job_args = _with_output(alone, built, declared, str(output))
        argv = [module, *job_args, *((declared_flags.steps, _ENDLESS) if declared_flags.steps else ())]
        start = ProcessStart.of_replica(Role.MASTER, 0, argv, _environment(folder, output, declared, extra_env), extra_env)
        lines = profile.profile_job(start.argv, start.env, folder, request.seconds)
        seconds = profile.step_seconds(profile.train_points(lines))
        if not seconds:
            raise UsageError(
                f"the Train lines of {module} cover no steps, or less than {profile.APART_SECONDS:g} s: "
                f"give it more steps, or --seconds more than {request.seconds:g}"
            )
        size = request.parameters_mb * _MEGA if request.parameters_mb is not None else profile.parameter_bytes(output)
    cpus = cgroup.available_cpus() * vcpus_per_cpu()
    return Work(seconds * cpus, size, sync_period(args, lines, declared_flags), declared_flags.parameterBits / _FLOAT_BITS)


def measure_steps_to_target(
    built: package.Package,
    declared: TrainerConfig,
    module: str,
    args: Sequence[str],
    extra_env: Mapping[str, str],
    target_runs: TargetRuns,
) -> dict[str, Any]:
    """Measure the steps to a target with each number of replicas, and return the `until` of a plan.

    Each of n replicas is predicted to take `leastSteps` + `noiseSteps` / n steps.
    """
    declared_flags, target = declared.plan, target_runs.target
    strategy = resolve_strategy(declared, chosen_strategy(args))
    job_steps = last_step(args, declared_flags)
    interval = max(1, job_steps // _EVALUATIONS) if job_steps else _EVALUATION_STEPS
    sets_interval = any(name == declared_flags.evaluate for name, _ in flags(args))
    results: list[runs.MeasuredRun] = []
    with _unpack(built) as folder:
        for replicas in target_runs.replicas:
            output = folder / f"output-{replicas}"
            chosen = _single_process_args(args, declared) if replicas == 1 else args
            job_args = _with_output(chosen, built, declared, str(output))
            argv = [module, *job_args, *(() if sets_interval else (str(declared_flags.evaluate), str(interval)))]
            servers = find_speed_models(declared)[strategy] is asynchronous
            env = _environment(folder, output, declared, extra_env)
            setup = runs.RunSetup(target, argv, env, servers, target_runs.seconds, extra_env)
            results.append(runs.run(setup, replicas, folder))
    points = [(run.replicas, run.crossing.step) for run in results]
    steps_model = time_to_target.fit(points)
    return {
        "metric": target.metric,
        "value": target.value,
        "strategy": strategy,
        "jobSteps": job_steps,
        "runs": [run.as_dict(target.metric) for run in results],
        "leastSteps": steps_model.least,
        "noiseSteps": steps_model.noise,
        "errorPercent": round(time_to_target.largest_error(steps_model, points), 1),
    }


@contextmanager
def _unpack(built: package.Package) -> Iterator[Path]:
    """Unpack the package to a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="scaletier-plan-", ignore_cleanup_errors=True) as folder:
        with tarfile.open(fileobj=io.BytesIO(built.archive)) as tar:
            tar.extractall(folder)  # noqa: S202  this program packed it
        yield Path(folder)


def _environment(folder: Path, output: Path, declared: TrainerConfig, extra_env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of every process of a job, with the variables that it adds; create its folders."""
    temporary = folder / ".tmp"
    for path in (output, temporary):
        path.mkdir(exist_ok=True)
    env = {key: value for key, value in {**os.environ, "TMPDIR": str(temporary), **extra_env}.items() if key != "TF_CONFIG"}
    files = declared.data.local_files(ROOT) if declared.data else {}
    data = next((path.parent for path in files.values()), Path.cwd())
    python_path = os.pathsep.join(filter(None, (str(folder), extra_env.get("PYTHONPATH"))))
    return env | {"PYTHONPATH": python_path, "SCALETIER_DATA": str(data), "JOB_DIR": str(output), "JOB_ID": "plan"}


def _with_output(args: Sequence[str], built: package.Package, declared: TrainerConfig, output: str) -> list[str]:
    """Return the arguments with this output folder; if no argument names one, add the flag that `fab train` adds."""
    flag = detect_job_dir_flag(args, declared, built.files)
    return [*redirect_output(args, output), *((flag, output) if flag else ())]


def _single_process_args(args: Sequence[str], declared: TrainerConfig) -> Sequence[str]:
    """Return the arguments of a single process, which are without --strategy."""
    return drop_flags(args, [STRATEGY]) if declared.strategies else args


def resolve_strategy(declared: TrainerConfig, chosen: str | None) -> str:
    """Return the strategy of a job; a trainer that declares none uses parameter servers."""
    speed_models = find_speed_models(declared)
    name = (chosen or declared.strategy or next(iter(speed_models))) if declared.strategies else next(iter(speed_models))
    if name not in speed_models:
        raise UsageError(f"fab plan cannot predict --strategy {name}; valid are {', '.join(speed_models)}")
    return name


def find_speed_models(declared: TrainerConfig) -> dict[str, SpeedModel]:
    """Return a speed model for each strategy of the trainer that declares its exchange; if none does, all speed models."""
    declared_models = {
        name: SPEED_MODELS[strategy.exchange] for name, strategy in declared.strategies.items() if strategy.exchange
    }
    return declared_models or SPEED_MODELS


def sync_period(args: Sequence[str], lines: Sequence[str], declared_flags: DeclaredFlags) -> int:
    """Return the local steps between two exchanges: from the log, else the arguments, else the default."""
    values = [value for flag, value in flags(args) if flag == declared_flags.syncPeriod]
    chosen = whole_number(values[-1]) if values else None
    return progress.parse_period(lines) or chosen or declared_flags.defaultSyncPeriod


def vcpus_per_cpu() -> int:
    """Return 1 if a processor of this machine is a hyperthread, as a vCPU is, and 2 if it is a whole core."""
    try:
        siblings = _TOPOLOGY.read_text().strip()
    except OSError:
        return 1
    return 1 if "," in siblings or "-" in siblings else 2


def tier_shape(spec: ClusterSpec) -> ClusterShape:
    """Return the shape of a cluster of Google's machine types."""

    def machines(role: Role) -> list[PlannedMachine]:
        pool = spec.roles.get(role)
        return [PlannedMachine.of(vcpus(pool.machine_type), network_gbits(pool.machine_type))] * pool.count if pool else []

    return ClusterShape([*machines(Role.MASTER), *machines(Role.WORKER)], machines(Role.PS))


def path(module: str, args: Sequence[str], declared: TrainerConfig, environment: Mapping[str, str] | None = None) -> Path:
    """Return the path of a job's plan; arguments that do not change the cost of a step do not change it.

    They are the number of steps, the strategy, the sync period, the evaluation interval, and paths. `environment`
    has the variables that the job adds.
    """
    declared_flags = declared.plan
    same = [flag for flag in (STRATEGY, declared_flags.steps, declared_flags.syncPeriod, declared_flags.evaluate) if flag]
    key = json.dumps([module, drop_flags_and_paths(args, same), *([environment] if environment else [])], sort_keys=True)
    return PLANS / f"{module}-{hashlib.sha256(key.encode()).hexdigest()[:8]}.json"


def read(
    module: str, args: Sequence[str], environment: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], TrainerConfig]:
    """Return the stored plan for these arguments, and its trainer's configuration; the job's package is not needed.

    A plan of an older version does not say for which environment it was made: it is returned if there is no other.
    """
    invalid, of_any_environment = "", None
    for file in sorted(PLANS.glob(f"{glob.escape(module)}-*.json")):
        try:
            content: dict[str, Any] = json.loads(file.read_bytes())
            declared = validate(TrainerConfig, content["trainer"], "trainer")
            same = path(module, args, declared, environment) == file
            if not same and ("environment" in content or path(module, args, declared) != file):
                continue
            Work(**content["work"])
            if content["until"]:
                TimeToTargetModel.of(content["until"])
            if not content.keys() >= {"args", "createTime", "package", "vcpusPerCpu"}:
                raise ValueError("it lacks a key")
        except (KeyError, TypeError, ValueError, UsageError) as error:
            invalid = f"the plan {file} is invalid: {error!r}. Run fab plan again"  # it may be another job's, or an old one
            continue
        if same:
            return content, declared
        of_any_environment = content, declared
    if of_any_environment:
        terminal.note("the plan is of an older version, which did not record the environment: it may be of another one")
        return of_any_environment
    also, config = (" and this environment", ", and its environment in --config or --env") if environment else ("", "")
    run = f"run fab plan with the job's --package, --module and --args{config}"
    raise UsageError(invalid or f"no plan was made of {module} with these arguments{also}: {run}")


def rounded(value: float) -> float:
    """Round a rate or a time for JSON: to two places, or below 1 to three digits."""
    return round(value, 2) if value >= 1 else float(f"{value:.3g}")


def prediction_to_dict(prediction: Prediction, time_model: TimeToTargetModel | None = None) -> dict[str, Any]:
    """Return a prediction for JSON: rates in steps/s, and the seconds to the target of `time_model`."""
    return {
        "stepsPerSecond": rounded(prediction.rate),
        "alone": rounded(prediction.alone),
        "speedUp": round(prediction.speed_up, 3),
        "efficiency": round(prediction.efficiency, 3),
        "replicas": prediction.replicas,
        "bound": prediction.bottleneck,
        "untilSeconds": rounded(time_model.seconds(prediction)) if time_model else None,
        "untilSpeedUp": round(time_model.speed_up(prediction), 3) if time_model else None,
    }
