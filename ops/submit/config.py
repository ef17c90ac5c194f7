"""A job as Cloud ML's config.yaml and the flags of `fab train` define it, checked before it starts."""

from __future__ import annotations

import os
import posixpath
import re
import shlex
import shutil
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from infra.inventory import Host, Inventory
from infra.scale_tiers import Role, suggest
from jobs import notification, paths, variables
from jobs.records import LATE_HEARTBEATS, RESTART_CODE, Plan
from jobs.study import Study
from ops import commands
from ops.cluster.host_files import heartbeat_seconds
from ops.cluster.inventory import require_runtimes
from ops.config_values import check_notify, read_yaml, validate
from ops.errors import UsageError
from ops.package import trainer_config
from ops.package.trainer_config import Strategy, TrainerConfig, merge_policy_keys
from ops.submit import arguments, environment, resources, tuning
from ops.submit.program import files_defining_flags
from ops.submit.resources import ROLE_KEYS
from ops.submit.schema import JobConfig, check_job_id, check_labels
from ops.terminal import list_some

if TYPE_CHECKING:
    from ops.package.runtimes import RuntimeRequest

IGNORED_KEYS = ("region", "pythonVersion")
RUNTIME_KEYS = ("runtime", "runtimeVersion")
# The values of scaleTier and ROLE_KEYS that fit a trial, which has one host.
_SINGLE_HOST_VALUES = ("BASIC", "BASIC_GPU", "CUSTOM", 0)
_RESERVED_FOLDERS = ("data", "cluster", "models")
_OUTPUT_PARTS = paths.output("ID").split("/")
# A path in a property of a systemd unit must not have these characters.
_NOT_IN_FOLDERS = '"\\%:'
# Calls that read a rank from the environment, not in comments and definitions. Trainer is Lightning's class.
_RANK_CALLS = re.compile(
    rb"^(?![ \t]*(?:class|def)\b)[^#\n]*?\b(init_process_group|jax\.distributed\.initialize|Accelerator|Trainer)\(",
    re.MULTILINE,
)
_LIGHTNING = re.compile(rb"^[ \t]*(?:from|import)[ \t]+(?:pytorch_)?lightning\b", re.MULTILINE)
# Programs that set the ranks of the processes that they start: on several hosts they need one of the options below.
_RANK_LAUNCHERS = frozenset({"torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate"})
_HOST_COUNT_OPTIONS = ("nnode", "pet-nnodes", "num-machine", "config-file")
# A program that names one of these may know its own replica, or another program or library does that for it.
_REPLICA_AWARE = re.compile(
    rf"\b(?:TF_CONFIG|CLOUD_ML_JOB|TASK_INDEX|TYPE|INDEX|{'|'.join(variables.RANK_NAMES)}|trl|ray)\b|scaletier|[Dd]istribute|"
    r"estimator|keras\.distribution|[Cc]luster_?[Rr]esolver|multihost|horovod|lightning|accelerate|transformers|deepspeed|mpi4py|"
    r"dask|hostname|platform\.node|nodename|torchrun|n(?:um_)?nodes|num_machines".encode()
)
_JOB_DIR = re.compile(rb"job[-_]?dir", re.IGNORECASE)
_MAX_PROGRAM_BYTES = 2**20
_OUTPUT_FLAG = re.compile(r"-[oO]$|--?(\w+[-_])?(out|save|log|job[-_]dir|model[-_]dir)")
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
GRACE_SECONDS = 30.0
"""The default grace period of replicas that still work when their job is done."""
# The defaults of the keys that say how a job restarts and ends.
_DEFAULT_POLICY_KEYS: Mapping[str, Any] = {
    "restartPolicy": "replica",
    "optionalRoles": [Role.EVALUATOR.value],
    "restartCodes": [RESTART_CODE],
    "gracePeriod": GRACE_SECONDS,
}
# Keys of config.yaml that a job's trainingInput records in another form.
_CONVERTED_KEYS = frozenset({"labels", "environment", "pythonModule", "notify", "scaleTier", *RUNTIME_KEYS, *ROLE_KEYS})


@dataclass(frozen=True)
class JobFlags:
    """The command line's values of a job; if one is None, config.yaml's is used."""

    job_id: str | None = None
    module: str | None = None
    config: str | None = None
    args: str | None = None
    more_args: Sequence[str] = ()
    labels: Sequence[str] = ()
    job_dir: str | None = None
    strategy: str | None = None
    priority: str | None = None
    env: Sequence[str] = ()
    env_file: str | None = None
    secret: Sequence[str] = ()
    secret_file: str | None = None
    resume: str | None = None
    scale_tier: str | None = None
    replicas: str | None = None
    script: str | None = None
    command: str | None = None
    runtime: str | None = None
    runtime_version: str | None = None
    start_hosts: bool = False
    notify: str | None = None

    @classmethod
    def of(cls, parameters: Mapping[str, Any], more_args: Sequence[str]) -> JobFlags:
        """Select the flags among a function's parameters by name, and ignore the others; a job's id may be called `job`."""
        values = {"job_id": parameters.get("job"), **parameters, "more_args": more_args}
        return cls(**{item.name: values[item.name] for item in fields(cls) if values.get(item.name) is not None})


@dataclass(frozen=True)
class JobSpec:
    """A checked job, from which its plan and records are made.

    Attributes:
        job_dir: the path of its output on the hosts.
        policy: how it restarts and ends, as fields of `jobs.records.Plan` by name.
        declared: the package's scaletier.yaml.
        job_dir_flag: the flag that passes `job_dir` to the trainer, after `args`; None to pass none.
        environment: the variables that the user adds.
        secrets: variables of which only the names are recorded.
        reproduces: the id of the job that it repeats.
        counts: the number of replicas of each role; if empty, all that the cluster has.
        command: a program to run instead of the module.
        folder: the folder of the package in which the command runs.
        runtime: its own Python; None for the hosts' Python.
        study: hyperparameter tuning: each replica runs one trial after another.
        start_hosts: start its stopped hosts first.
        notify: the URL or command to notify of its end (`jobs.notification`).
    """

    id: str
    module: str
    args: tuple[str, ...]
    job_dir: str
    policy: Mapping[str, Any]
    priority: int = 0
    declared: TrainerConfig = field(default_factory=TrainerConfig)
    labels: Mapping[str, str] = field(default_factory=dict)
    job_dir_flag: str | None = None
    use_chief: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    training_input: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    reproduces: str | None = None
    counts: resources.Counts = field(default_factory=dict)
    command: tuple[str, ...] = ()
    folder: str = ""
    runtime: RuntimeRequest | None = None
    study: Study | None = None
    start_hosts: bool = False
    notify: str = ""

    def subset(self, inventory: Inventory) -> Inventory:
        """Return the hosts that the job asks for, as an inventory."""
        return inventory.subset(self.counts, self.training_input.get("scaleTier"))


def read_config(path: str | None) -> dict[str, Any]:
    """Read config.yaml with its keys and types checked; empty without a path."""
    if path is None:
        return {}
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        raise UsageError(f"there is no file {path}: give --config the path of a config.yaml") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    return validate(JobConfig, read_yaml(content, path), path, report_old_keys=True).given()


def split_args(text: str | None) -> list[str]:
    """Split `--args` into words, quoted as for a shell."""
    try:
        return commands.split_words(text or "")
    except ValueError as error:
        raise UsageError(f"--args cannot be split ({error}): quote it as for a shell, or put the arguments behind --") from None


def split_labels(texts: Sequence[str]) -> dict[str, str]:
    """Parse `--labels owner=ann,run=3`, given once or several times."""
    labels: dict[str, str] = {}
    for pair in (pair for text in texts for pair in text.split(",")):
        key, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"--labels {pair!r} is not of the form key=value")
        labels[key] = value
    try:
        return check_labels(labels)
    except ValueError as error:
        raise UsageError(f"--labels: {error}") from None


def detect_job_dir_flag(
    args: Sequence[str], declared: TrainerConfig, files: Mapping[str, bytes] | None, requested: bool = False
) -> str | None:
    """Return the flag that passes the output folder to a trainer, as Cloud ML does, or None for none.

    `files` are those that may define the trainer's flags; None if these are unknown. With `requested`, a trainer that knows no
    such flag gets --job-dir.
    """
    if files is None or not (requested or (declared.passJobDir and not arguments.has_output_flag(args))):
        return None
    return arguments.job_dir_flag(files) or ("--job-dir" if requested else None)


def chosen_strategy(args: Sequence[str]) -> str | None:
    """Return the last value of `--strategy`, which takes effect, or None for the trainer's default."""
    values = [value for flag, value in arguments.flags(args) if flag == arguments.STRATEGY]
    return values[-1] if values else None


def policy(
    scheduling: Mapping[str, Any],
    strategy: Strategy,
    study: Study | None = None,
    where: str = "scheduling",
    declaration: str = trainer_config.FILE,
) -> dict[str, Any]:
    """Return how a job restarts and ends, as fields of a plan: from config.yaml, else from the trainer's declaration.

    Trials are independent: if one host is lost, the others continue. With successPolicy `all`, optionalRoles is empty by
    default, and must not include worker or evaluator, as these end by themselves. UsageError if the job can never succeed.

    Args:
        where: the name of config.yaml's scheduling in messages.
        declaration: the name of the trainer's declaration in messages.
    """
    if study:
        codes = strategy.model_dump(include={"restartCodes", "permanentCodes", "stopSignal"})
        strategy = Strategy(optionalRoles=["worker"], successPolicy="chief", **codes)
    chosen = {key: value for key, value in scheduling.items() if key != "priority"}
    merged = merge_policy_keys(merge_policy_keys(_DEFAULT_POLICY_KEYS, strategy.policy_keys), chosen)
    if merged.get("successPolicy") != "all":
        return merged
    wrong = f"{f'{where}.' if 'successPolicy' in chosen else f'{declaration}: '}successPolicy 'all' is invalid"
    if strategy.successPolicy == "chief":
        why = "a trial's host may be lost" if study else "this trainer's other replicas have no end of their own"
        raise UsageError(f"{wrong}: {why}. Valid: chief")
    if "optionalRoles" not in {**strategy.policy_keys, **chosen}:
        return merged | {"optionalRoles": []}
    if optional := [role for role in (Role.WORKER, Role.EVALUATOR) if role in merged["optionalRoles"]]:
        valid = "chief, or optionalRoles without worker and evaluator"
        raise UsageError(f"{wrong}: optionalRoles has {' and '.join(optional)}. Valid: {valid}")
    return merged


def _check_heartbeats(scheduling: Mapping[str, Any], inventory: Inventory, where: str) -> None:
    """Check that a host is lost only after several missed heartbeats: a single one may be slow."""
    interval = scheduling.get("heartbeatSeconds", heartbeat_seconds(inventory.poll_seconds))
    limit = scheduling.get("lostAfterSeconds", Plan.lostAfterSeconds)
    if limit >= LATE_HEARTBEATS * interval:
        return
    if "lostAfterSeconds" in scheduling:
        wrong = f"lostAfterSeconds {limit:g} is invalid: heartbeatSeconds is {interval:g}"
        valid = f"{LATE_HEARTBEATS * interval:g} and above"
    else:
        wrong = f"heartbeatSeconds {interval:g} is invalid: lostAfterSeconds is {limit:g}"
        valid = f"{limit / LATE_HEARTBEATS:g} and below"
    raise UsageError(f"{where}.{wrong}. Valid: {valid}")


def generate_job_id(package: str) -> str:
    """Return an id for a job without one: `trainer_20260131_120000_3f9a1c`, in UTC, with a random end."""
    name = re.sub(r"\W", "_", package, flags=re.ASCII).lstrip("_0123456789") or "job"
    return f"{name}_{datetime.now(UTC):%Y%m%d_%H%M%S}_{uuid.uuid4().hex[:6]}"


def _priority(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"--priority {text!r} is no whole number: 0 is the default, and the highest comes first") from None


def split_arguments(config: Mapping[str, Any], text: str | None, more: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments of `--args` and behind `--`, which take precedence, and those of config.yaml."""
    return [*split_args(text), *more], config.get("args", [])


def _runtime(flags: JobFlags, config: Mapping[str, Any], inventory: Inventory, where: str) -> RuntimeRequest | None:
    """Return the job's own Python, or None if it has none or config.yaml's version is ignored."""
    path, version, names = flags.runtime, flags.runtime_version, ("--runtime", "--runtime-version")
    if path is None and version is None:
        names = (f"{where}: trainingInput.runtime", f"{where}: trainingInput.runtimeVersion")
        path = str(Path(where).parent / config["runtime"]) if "runtime" in config else None
        version = None if _why_version_ignored(config, inventory) else config.get("runtimeVersion")
    if path is None and version is None:
        return None
    require_runtimes(inventory, names[path is None])
    if path is not None and version is not None:
        raise UsageError(f"{names[0]} and {names[1]} both say which Python: use only one of them")
    from ops.package import runtimes  # imports packaging, which is slow

    if path is not None:
        return runtimes.from_file(path, names[0], any(host.accelerator for host in inventory.job_hosts))
    return runtimes.from_version(version or "", names[1], inventory)


def _why_version_ignored(config: Mapping[str, Any], inventory: Inventory) -> str:
    """Explain why config.yaml's runtimeVersion, maybe of Cloud ML, is ignored; empty if it is not."""
    if str(config.get("runtimeVersion", "")).startswith("1."):
        return "no current Python has TensorFlow 1; TensorFlow 2 has tf.compat.v1"
    return "the stack defines the hosts' Python" if "runtimeVersion" in config and inventory.runtimes is None else ""


def _ignored_notes(config: Mapping[str, Any], inventory: Inventory, where: str, has_cli_args: bool) -> Iterator[str]:
    """Yield the parts of config.yaml that are ignored, with the reason."""
    if ignored := [key for key in IGNORED_KEYS if key in config]:
        yield f"{', '.join(ignored)} in {where}: ignored, the stack defines region and Python"
    if why := _why_version_ignored(config, inventory):
        yield f"runtimeVersion in {where}: ignored, {why}"
    if tuned := config.get("hyperparameters"):
        if shape := [key for key in ("scaleTier", *ROLE_KEYS) if key in config and config[key] not in _SINGLE_HOST_VALUES]:
            yield f"{', '.join(shape)} in {where}: ignored, a trial has one host, and maxParallelTrials sets their number"
        discrete = [each for each in tuned["params"] if each["type"] == "DISCRETE"]
        if scaled := [each["parameterName"] for each in discrete if each.get("scaleType", "NONE") != "NONE"]:
            yield f"scaleType of {', '.join(scaled)} in {where}: ignored, discreteValues are sampled by index"
        if note := tuning.limit_note(tuned, inventory):
            yield note
    if has_cli_args and config.get("args"):
        yield f"args in {where}: ignored, the command line has others"


def check_job_dir(job_dir: str, bucket: str, default: str, what: str = "jobDir") -> str:
    """Return a job's normalized output path; UsageError unless it is in the bucket, as the hosts' launcher requires.

    A URL of another bucket is valid if hosts can reach it: TensorFlow opens it.
    """
    if variable := commands.first_placeholder([job_dir]) or commands.unknown_placeholder([job_dir]):
        raise UsageError(
            f"{what} {job_dir!r} has {variable}, which is not filled in: write the path, of which ${{JOB_ID}} may be part"
        )
    inside = f"{job_dir}/".startswith(f"{bucket}/") and ".." not in job_dir.split("/")
    parts = [part for part in job_dir.removeprefix(bucket).split("/") if part not in ("", ".")] if inside else []
    if "://" in job_dir and "://" not in bucket:
        raise UsageError(f"{what} {job_dir!r} cannot be reached: local hosts have no way out; take a path below {bucket}/")
    of_job = len(parts) >= len(_OUTPUT_PARTS) and paths.JOB_ID.fullmatch(parts[1]) and parts[2] == _OUTPUT_PARTS[2]
    if parts and (parts[0] in _RESERVED_FOLDERS or (parts[0] == _OUTPUT_PARTS[0] and not of_job)):
        raise UsageError(f"{what} {job_dir!r} is where the bucket keeps other things: take a path such as {default}")
    if not job_dir.isprintable() or not (parts if inside else "://" in job_dir):
        raise UsageError(f"{what} {job_dir!r} is not in the bucket: take a path below {bucket}/, such as {default}")
    if "://" not in bucket and (bad := next((char for char in job_dir if char in _NOT_IN_FOLDERS), "")):
        raise UsageError(f"{what} {job_dir!r} has {bad}, which no folder of a job may have: take a path such as {default}")
    return "/".join([bucket, *parts]) if inside else job_dir


def _trial_counts(flags: JobFlags, tuned: Mapping[str, Any], inventory: Inventory, where: str) -> resources.Counts:
    """Return the number of hosts of each role for a job that tunes; UsageError for a flag that is invalid for such a job."""
    for flag, value in {"--scale-tier": flags.scale_tier, "--replicas": flags.replicas}.items():
        if value is not None:
            raise UsageError(
                f"{flag}: {where} tunes hyperparameters, each trial on one host; maxParallelTrials sets their number"
            )
    if flags.resume is not None:
        raise UsageError(f"--resume continues one training, and {where} tunes hyperparameters: use resumePreviousJobId")
    return tuning.required_counts(tuned, inventory)


def _notify(flags: JobFlags, config: Mapping[str, Any], declared: TrainerConfig) -> str:
    """Return the notification target by the command line, config.yaml or the package; empty for none."""
    if flags.notify is not None:
        try:
            return check_notify(flags.notify)
        except ValueError as error:
            raise UsageError(f"--notify {notification.quote_target(flags.notify)} is invalid: {error}") from None
    return str(config.get("notify") or config.get("trainingInput", {}).get("notify") or declared.notify)


def _lone_training_notes(
    sources: Mapping[str, bytes],
    files: Mapping[str, bytes],
    command: Sequence[str],
    texts: Sequence[str],
    job_hosts: Sequence[Host],
) -> Iterator[str]:
    """Yield a note if each host would train alone, without an error, for lack of a rank or of the number of hosts.

    Args:
        sources: the files that show what the program calls.
        files: all files of the package, which may configure it.
        command: as of a JobSpec.
        texts: arguments and the environment, which may have a rank or the number of hosts.
    """
    unranked = [host.name for host in job_hosts if host.role not in environment.RANKED_ROLES]
    programs = [(name, content) for name, content in sources.items() if name.endswith(".py")]
    matches = ((match[1].decode(), name) for name, content in programs for match in _RANK_CALLS.finditer(content))
    calls = [(call, name) for call, name in matches if call != "Trainer" or _LIGHTNING.search(sources[name])]
    argument = commands.first_placeholder(texts, variables.RANK_NAMES)
    if unranked and (reason := " in ".join(calls[0]) if calls else argument and f"{argument} of the arguments"):
        workers = sum(host.role is Role.WORKER for host in job_hosts)
        how = f"--replicas {f'worker={workers}' if workers else 'master'} leaves them out"
        yield f"{reason} needs a rank, which {list_some(unranked)} would run without: {how}"
    ranked = len(job_hosts) - len(unranked)
    programs_run = (word for before, word in pairwise(("-m", *command)) if before == "-m")
    rank_launcher = next((word for word in programs_run if posixpath.basename(word) in _RANK_LAUNCHERS), None)
    options = (text.lstrip("-").replace("_", "-").lower() for text in texts)
    has_number = argument or any(option.startswith(_HOST_COUNT_OPTIONS) for option in options)
    if rank_launcher and ranked > 1 and not has_number:
        how = "a program that reads RANK needs none, as RANK and WORLD_SIZE are set"
        yield f"{rank_launcher} on each of {ranked} hosts starts its own training, as it is given no number of hosts: {how}"
    lightning = next((name for call, name in calls if call == "Trainer"), None)
    has_nodes = any("num_nodes" in text for text in texts) or any(b"num_nodes" in content for content in files.values())
    if lightning and ranked > 1 and not has_nodes:
        how = 'Trainer(num_nodes=int(os.environ["WORLD_SIZE"])) makes them one training, --replicas master takes one'
        yield f"Trainer in {lightning} has no num_nodes, so each of {ranked} hosts trains alone: {how}"


def _overwriting_notes(files: Mapping[str, bytes], texts: Sequence[str], replicas: int) -> Iterator[str]:
    """Yield the note that replicas would all do the same and write the same files; `files` are those that may run."""
    program = [content for name, content in files.items() if len(content) <= _MAX_PROGRAM_BYTES and not name.endswith(".md")]
    program += [text.encode(errors="replace") for text in texts]
    if replicas > 1 and any(map(_JOB_DIR.search, program)) and not any(map(_REPLICA_AWARE.search, program)):
        yield (
            f"{replicas} replicas run the same program, which reads none of TF_CONFIG, RANK and INDEX: each works alone, and "
            "of a file that all write to JOB_DIR the last one stays: --replicas master takes one replica"
        )


def _unreachable_notes(notify: str, job_id: str, inventory: Inventory) -> Iterator[str]:
    """Yield the note that a URL cannot be reached: local hosts reach only one another and themselves."""
    if "://" in inventory.bucket or not notification.is_url(notify):
        return
    host = urlsplit(notify).hostname or ""
    if host in {name for each in inventory.hosts for name in (each.name, each.address)} or host in _LOOPBACK:
        return
    how = f"fab wait {job_id} --json | curl --json @- URL on this machine sends the same record"
    yield f"notify {notification.redact_target(notify)} will not arrive, as local hosts have no way out of the cluster: {how}"


def _absent_notes(args: Sequence[str], folder: str, files: Collection[str]) -> Iterator[str]:
    """Yield the note that arguments name files of this machine that no host will have; one for output may be among them."""
    absent, data = [], arguments.data_paths(args)
    for before, arg in pairwise(("", *args)):
        flag, equals, value = arg.partition("=") if arg.startswith("-") else (before, "=", arg)
        path, place = Path(value), posixpath.normpath(f"{folder}/{value}").lstrip("/")
        if not equals or _OUTPUT_FLAG.match(flag) or not os.access(path, os.F_OK):
            continue
        is_named = path.is_file() or (path.is_dir() and value in data)
        is_own = not path.is_absolute() or path.is_relative_to(Path.home())
        if is_named and is_own and not any(f"{file}/".startswith(f"{place}/" if place else "") for file in files):
            absent.append(value)
    if absent:
        where = f"the folder {folder}" if folder else "the folder that has the package"
        how = f"put files into the package, data into the bucket (fab data put); the program runs in {where}"
        yield f"the arguments name {list_some([*dict.fromkeys(absent)])}, which exists on this machine alone: {how}"


def _failure_notes(notify: str, folder: str, files: Mapping[str, bytes], executables: Collection[str] | None) -> Iterator[str]:
    """Yield the note that a notification's command cannot start, which would only show after the training."""
    if notification.is_url(notify):
        return
    words, scripts = shlex.split(notify), {*variables.scripts(shlex.split(notify))}
    words = [word for index, word in enumerate(words) if index not in scripts]
    paths = [word for word in words[:1] if "/" in word] or [word for word in words[1:] if word.endswith((".py", ".sh"))]
    for path in paths[:1]:
        if not path.startswith("/") and "$" not in path and posixpath.normpath(f"{folder}/{path}").lstrip("/") not in files:
            where = f"the folder {folder}" if folder else "the folder that has the package"
            yield f"notify will fail, as it runs in {where}, and no {path} is sent there"
    first = words[0] if words else ""
    file = posixpath.normpath(f"{folder}/{first}").lstrip("/")
    if first.partition("=")[0].isidentifier() and "=" in first:
        yield f"notify will fail, as it begins with {first.partition('=')[0]}=…, which only a shell reads: sh -c '…'"
    elif file in files and "/" not in first and not shutil.which(first):
        yield f"notify will fail, as {first} is no program that hosts have; did you mean ./{first}?"
    elif file in files and "/" in first and executables is not None and file not in executables:
        yield f"notify will fail, as {first} is not executable: chmod +x"
    elif re.match(rb"#!.*\r\n", files.get(file, b"")):
        yield f"notify will fail, as {first} has the line ends of Windows, with which no host finds its program: dos2unix"


def _check_variables(
    words: Sequence[str], environment_values: Mapping[str, str], notify: str, tuned: Mapping[str, Any] | None
) -> None:
    """Check that hosts fill in each `${NAME}` of a job; UsageError if not."""
    command = [notify] if notification.is_url(notify) else shlex.split(notify)
    texts = {
        "an argument": words,
        "notify": command,
        "a categorical value": [
            value for each in (tuned or {}).get("params", ()) for value in each.get("categoricalValues", ())
        ],
        **{f"the environment's {name}": [value] for name, value in environment_values.items()},
    }
    for where, text in texts.items():
        if unknown := commands.unknown_placeholder(text):
            like = suggest(unknown.strip("${}"), variables.NAMES)
            valid = ", ".join(f"${{{name}}}" for name in variables.NAMES)
            how = f"valid are {valid}; ${unknown} passes {unknown} on as it is, and a shell fills it in: sh -c '…'"
            raise UsageError(f"{where} has {unknown}, which no host fills in{like}: {how}")
    for name, value in environment_values.items():
        if re.search(rf"(?<![$\\])\${name}\b", value):
            how = f"write all of it, or set it in a command: sh -c 'export {name}={value}; exec …'"
            raise UsageError(f"the environment's {name} has ${name}, which no host fills in: {how}")


def build_job(
    flags: JobFlags,
    inventory: Inventory,
    package: str = "trainer",
    files: Mapping[str, bytes] | None = None,
    command: Sequence[str] = (),
    folder: str = "",
    executables: Collection[str] | None = None,
) -> JobSpec:
    """Build the job of the flags and config.yaml; the flags take precedence. UsageError if any of them is invalid.

    Args:
        files: the trainer package's, which may declare what it needs.
        command: as of a JobSpec.
        folder: as of a JobSpec.
        executables: the package's executable files, None if unknown.
    """
    config = read_config(flags.config)
    where = flags.config or "config.yaml"
    job_id = flags.job_id if flags.job_id is not None else config.get("jobId", generate_job_id(package))
    check_job_id(job_id)
    training_input: dict[str, Any] = config.get("trainingInput", {})
    if config.get("jobId", job_id) != job_id:
        raise UsageError(f"{where} is for job {config['jobId']!r}, the command line says {job_id!r}: make them the same")
    default_dir = f"{inventory.bucket}/{paths.output(job_id)}"
    chosen_dir = variables.expand(flags.job_dir or training_input.get("jobDir") or "", {"JOB_ID": job_id})
    chosen = [arguments.STRATEGY, flags.strategy] if flags.strategy is not None else []
    cli_args, config_args = split_arguments(training_input, flags.args, flags.more_args)
    args = [*chosen, *cli_args] if cli_args else [*config_args, *chosen]  # not both, as in gcloud
    if chosen_dir:
        what = "--job-dir" if flags.job_dir else f"{where}: trainingInput.jobDir"
        chosen_dir = check_job_dir(chosen_dir, inventory.bucket, default_dir, what)
    for word in (*command, *args):
        environment.check_word(word, "an argument of the trainer")
    module = "" if command else flags.module or training_input.get("pythonModule") or f"{package}.task"
    source_files = files_defining_flags(folder, command, files or {}, module)
    declaring = module.partition(".")[0] or package
    declared = trainer_config.read(files or {}, declaring, report_old_keys=True)
    tuned = training_input.get(tuning.HYPERPARAMETERS)
    has_job_dir = bool((flags.job_dir and flags.resume is None) or training_input.get("jobDir"))
    job_dir_flag = detect_job_dir_flag(args, declared, source_files, has_job_dir)
    if job_dir_flag and has_job_dir and not tuned:
        args += [job_dir_flag, str(chosen_dir)]
    strategy = chosen_strategy(args)
    if tuned:
        counts = _trial_counts(flags, tuned, inventory, where)
    else:
        counts = resources.requested_counts(
            flags.scale_tier, flags.replicas, training_input, declared.strategy_for(strategy).usedRoles, inventory, where
        )
    for name in {flags.strategy or strategy, strategy}:
        resources.check_strategy(name, declared, inventory, {Role.MASTER: 1} if tuned else counts)
    labels = {**inventory.labels, **training_input.get("labels", {}), **config.get("labels", {}), **split_labels(flags.labels)}
    scheduling = training_input.get("scheduling", {})
    _check_heartbeats(scheduling, inventory, f"{where}: trainingInput.scheduling")
    added_environment = environment.merge_environment(training_input.get("environment", {}), flags.env_file, flags.env, where)
    notify = _notify(flags, config, declared)
    _check_variables([*command, *args], added_environment, notify, tuned)
    secrets = environment.read_secrets(flags.secret, flags.secret_file, os.environ)
    if both := added_environment.keys() & secrets.keys():
        raise UsageError(f"{min(both)} is both a secret and a recorded variable: use only one of them")
    runtime = _runtime(flags, training_input, inventory, where)
    study = tuning.build_study(tuned, args, chosen_dir or default_dir, job_dir_flag) if tuned else None
    texts = [*command, *args, *map("=".join, added_environment.items())]
    job_hosts = inventory.subset(counts).hosts
    program_files = (source_files if module else files) or {}  # a script may run others
    # A program that is not in the package, such as one that the hosts have, may know its replica.
    started = {
        posixpath.normpath(f"{folder}/{each}").lstrip("/") for word in command for each in (word, word.replace(".", "/"))
    }
    starts = (module.replace(".", "/"),) if module else tuple(started)
    is_known = "-c" in command or any(name.startswith(starts) for name in program_files)
    input_record = {
        **resources.describe_counts(counts, inventory),
        **{key: training_input[key] for key in training_input if key not in _CONVERTED_KEYS},
        **({"runtime": runtime.name} if runtime else {}),
        **({"command": [*command]} if command else {"pythonModule": module}),
        "args": args,
        "jobDir": chosen_dir or default_dir,
        **({"environment": added_environment} if added_environment else {}),
    }
    return JobSpec(
        id=job_id,
        module=module,
        args=tuple(args),
        job_dir=chosen_dir or default_dir,
        labels=labels,
        job_dir_flag=None if has_job_dir or tuned else job_dir_flag,
        use_chief=training_input.get("useChiefInTfConfig", True),
        policy=policy(
            scheduling,
            declared.strategy_for(strategy),
            study,
            f"{where}: trainingInput.scheduling",
            f"{declaring}/{trainer_config.FILE}",
        ),
        priority=scheduling.get("priority", 0) if flags.priority is None else _priority(flags.priority),
        declared=declared,
        environment=added_environment,
        secrets=secrets,
        training_input=input_record,
        counts=counts,
        command=tuple(command),
        folder=folder,
        runtime=runtime,
        study=study,
        start_hosts=flags.start_hosts or training_input.get("startHosts", False),
        notify=notify,
        notes=(
            *_ignored_notes(training_input, inventory, where, bool(cli_args)),
            *(
                ()
                if tuned
                else (
                    *_lone_training_notes(source_files or files or {}, files or {}, command, texts, job_hosts),
                    *(_overwriting_notes(program_files, texts, len(job_hosts)) if is_known else ()),
                )
            ),
            *_unreachable_notes(notify, job_id, inventory),
            *(() if files is None else _absent_notes([*command[1:], *args], folder, files)),
            *(() if files is None else _failure_notes(notify, folder, files, executables)),
        ),
    )
