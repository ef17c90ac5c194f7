"""What runs: a job as Cloud ML's config.yaml and the flags of `fab train` describe it, checked before anything is touched."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.spec import Role, ScaleTier, SpecError
from ops.cluster.inventory import Inventory
from ops.errors import UsageError
from ops.train.schema import JOB_KEYS, ROLE_KEYS, check_job_id, check_label, check_mapping
from replica.record import Plan

STRATEGIES = ("async", "sync", "model-parallel")
IGNORED_KEYS = ("region", "runtimeVersion", "pythonVersion")


@dataclass(frozen=True)
class Flags:
    """What the command line says about a job; None where it says nothing, and then config.yaml does."""

    job_id: str
    module: str | None = None
    config: str | None = None
    args: str | None = None
    more_args: Sequence[str] = ()
    labels: Sequence[str] = ()
    job_dir: str | None = None
    strategy: str | None = None


@dataclass(frozen=True)
class Job:
    """A job ready to be rendered. `job_dir` is where its output goes, as the hosts see it; `reproduces` is the id of a job."""

    id: str
    module: str
    args: tuple[str, ...]
    job_dir: str
    labels: Mapping[str, str] = field(default_factory=dict)
    use_chief: bool = True
    policy: Mapping[str, float] = field(default_factory=dict)
    training_input: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    reproduces: str | None = None

    @property
    def package_dir(self) -> str:
        return f"/var/lib/scaletier/jobs/{self.id}/package"

    def plan(self, inventory: Inventory, replica: str) -> Plan:
        """`/etc/scaletier/replica.json` of one replica."""
        return Plan(
            jobId=self.id,
            replica=replica,
            replicas=list(inventory.replicas),
            module=self.module,
            args=list(self.args),
            bucket=inventory.bucket,
            packageDir=self.package_dir,
            pollSeconds=inventory.poll_seconds,
            **self.policy,  # type: ignore[arg-type]  # the schema let only numbers in
        )


def read_config(path: str | None) -> dict[str, Any]:
    """config.yaml, its keys and types checked; empty without a path."""
    if path is None:
        return {}
    import yaml

    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"there is no file {path}: give --config the path of a config.yaml") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}" if mark else ""
        raise UsageError(f"{path}{where} is not YAML: {getattr(error, 'problem', error)}") from None
    return check_mapping(data if data is not None else {}, JOB_KEYS, path)


def split_args(text: str | None) -> list[str]:
    """The words of `--args`, quoted as for a shell."""
    try:
        return shlex.split(text or "")
    except ValueError as error:
        raise UsageError(f"--args cannot be split ({error}): quote it as for a shell, or put the arguments behind --") from None


def split_labels(texts: Sequence[str]) -> dict[str, str]:
    """`--labels owner=ann,run=3`, given once or several times."""
    labels: dict[str, str] = {}
    for pair in (pair for text in texts for pair in text.split(",")):
        key, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"--labels {pair!r} is not of the form key=value")
        check_label(key, value, "--labels")
        labels[key] = value
    return labels


def build_job(flags: Flags, inventory: Inventory, package: str = "trainer") -> Job:
    """The job that the flags and config.yaml describe, the flags winning; UsageError for all that is wrong in them."""
    check_job_id(flags.job_id)
    config = read_config(flags.config)
    where = flags.config or "config.yaml"
    given: dict[str, Any] = config.get("trainingInput", {})
    _check_tier(given, inventory, where)
    if config.get("jobId", flags.job_id) != flags.job_id:
        raise UsageError(f"{where} is for job {config['jobId']!r}, the command line says {flags.job_id!r}: make them the same")
    default_dir = f"{inventory.bucket}/jobs/{flags.job_id}/output"
    chosen_dir = flags.job_dir or given.get("jobDir")
    chosen = _strategy(flags.strategy, inventory)
    args = [*given.get("args", []), *chosen, *split_args(flags.args), *flags.more_args]
    if chosen_dir:
        _check_job_dir(chosen_dir, inventory.bucket, default_dir)
        args += ["--job-dir", chosen_dir]  # as Cloud ML does
    for arg in args:
        if "\0" in arg:
            raise UsageError("an argument of the trainer holds a NUL character, which no program can receive")
    module = flags.module or given.get("pythonModule") or f"{package}.task"
    labels = {**inventory.labels, **given.get("labels", {}), **config.get("labels", {}), **split_labels(flags.labels)}
    policy = given.get("scheduling", {})
    ignored = [key for key in IGNORED_KEYS if key in given]
    shown = {
        "scaleTier": inventory.scale_tier,
        **{key: given[key] for key in given if key not in ("labels", "scaleTier")},
        "pythonModule": module,
        "args": args,
        "jobDir": chosen_dir or default_dir,
    }
    return Job(
        id=flags.job_id,
        module=module,
        args=tuple(args),
        job_dir=chosen_dir or default_dir,
        labels=labels,
        use_chief=given.get("useChiefInTfConfig", True),
        policy=policy,
        training_input=shown,
        notes=(f"{', '.join(ignored)} in {where}: ignored, the cluster is where and what pulumi made it",) if ignored else (),
    )


def _strategy(name: str | None, inventory: Inventory) -> list[str]:
    """The trainer's arguments for a strategy that this cluster can train by; none where the flag is not given."""
    if name is None:
        return []
    if name not in STRATEGIES:
        raise UsageError(f"--strategy {name!r} is unknown; valid are {', '.join(STRATEGIES)}")
    if name != "async" and not any(host.role is Role.WORKER for host in inventory.hosts):
        lacking = f"--strategy {name} needs a worker, and stack {inventory.stack} ({inventory.scale_tier}) has none"
        raise UsageError(f"{lacking}: take --strategy async, or run pulumi config set scaleTier STANDARD_1 && pulumi up")
    return ["--strategy", name]


def _check_tier(given: Mapping[str, Any], inventory: Inventory, where: str) -> None:
    """Whether the cluster that is up is the one that config.yaml asks for."""
    stack, path = inventory.stack, f"{where}: trainingInput"
    shape = [key for key in ROLE_KEYS if key in given]
    tier = inventory.scale_tier
    if "scaleTier" in given:
        try:
            tier = str(ScaleTier.parse(given["scaleTier"]))
        except SpecError as error:
            raise UsageError(f"{path}.{error}") from None
    if shape and tier != ScaleTier.CUSTOM:
        raise UsageError(f"{path}.{shape[0]} goes with scaleTier CUSTOM only, and this is {tier}: take it out")
    if tier != inventory.scale_tier:
        fix = f"pulumi config set scaleTier {tier} && pulumi up"
        raise UsageError(f"{path}.scaleTier is {tier}, but stack {stack} has {inventory.scale_tier}: run {fix}")
    for key in shape:
        role, is_count = ROLE_KEYS[key]
        hosts = [host for host in inventory.hosts if host.role is role]
        there: Any = len(hosts) if is_count else (hosts[0].machine_type if hosts else None)
        if given[key] != there:
            has = "none" if there is None else there
            fix = f"pulumi config set {key} {given[key]} && pulumi up"
            raise UsageError(f"{path}.{key} is {given[key]}, but stack {stack} has {has}: run {fix}")
    if inventory.scale_tier == ScaleTier.CUSTOM and "scaleTier" in given and "masterType" not in given:
        raise UsageError(f"{path}.masterType is missing: scaleTier CUSTOM needs it, stack {stack} has {_type_of(inventory)}")


def _type_of(inventory: Inventory) -> str:
    return next(host.machine_type for host in inventory.hosts if host.role is Role.MASTER)


def _check_job_dir(job_dir: str, bucket: str, default: str) -> None:
    """A path on a host is writable for the trainer only in the bucket; a URL is TensorFlow's affair."""
    inside = job_dir.startswith(f"{bucket}/") and ".." not in job_dir.split("/")
    if not job_dir.isprintable() or not (inside or "://" in job_dir):
        raise UsageError(f"jobDir {job_dir!r} is not in the bucket: take a path below {bucket}/, such as {default}")
