"""`fab predict --batch`: a model's version on files of the bucket, as a job on master and workers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from hosts.batch.request import FILE, RESTART_EXIT, Request
from hosts.serving.download import MODEL_FILE
from hosts.serving.records import Model, Version, VersionState, folder_of
from hosts.serving.signatures import read_signatures
from infra.inventory import Inventory
from infra.scale_tiers import Role
from infra.templates import ROOT as CHECKOUT
from jobs.bucket import Bucket
from jobs.folder_bucket import open_bucket
from ops import terminal
from ops.cluster.cluster import ClusterClient
from ops.errors import UsageError, suggest
from ops.models.lookup import catalog_of, existing_model, existing_version
from ops.package import package, trainer_config
from ops.submit.config import JobFlags, check_job_dir, generate_job_id
from ops.submit.program import JobProgram
from ops.submit.runner import run_submission
from ops.submit.submit import Submission
from ops.submit.train import overlap, prepare_program

_MODULE = "hosts.batch.task"
# The model server's modules that load a model, and define requests and answers: a batch has the same format.
_SHARED_MODULES = (
    "hosts/__init__.py",
    *(f"hosts/serving/{name}.py" for name in ("__init__", "download", "rest", "saved", "signatures")),
)
_DECLARATION = f"restartCodes: [{RESTART_EXIT}]\n".encode()
# The bytes that make a replica worth its start: some ten thousand images of MNIST, a few seconds of a processor.
_BYTES_PER_REPLICA = 8_000_000
_GLOB = re.compile(r"[*?\[]")
_URL = re.compile(r"gs://[^/]+")


@dataclass(frozen=True)
class BatchOptions:
    """The command's arguments; `pattern` matches the input files, and may be several, separated by commas."""

    model: str | None
    version: str | None
    pattern: str | None
    output: str | None
    signature: str | None = None
    job_id: str | None = None
    replicas: str | None = None


def batch(cluster: ClusterClient, options: BatchOptions, follow: bool, as_json: bool) -> int:
    """Predict all of the input, and follow the job that does; the exit code is that of `fab train`."""
    return run_submission(cluster, lambda: prepare(cluster, options), True, follow, as_json, False)


def prepare(cluster: ClusterClient, options: BatchOptions) -> Submission:
    """Build the job, checked as far as possible without the hosts."""
    inventory = cluster.inventory
    if options.pattern is None:
        raise UsageError(f"--input is missing: files in the bucket, such as {inventory.bucket}/data/digits/*.json")
    if options.output is None:
        raise UsageError(f"--output is missing: a folder in the bucket, such as {inventory.bucket}/predictions/digits")
    model = existing_model(catalog_of(cluster), options.model)
    version = _version(model, options.version)
    source = folder_of(model.name, version.name)
    _check_signature(cluster.bucket, source, options.signature)
    output = check_job_dir(options.output, inventory.bucket, f"{inventory.bucket}/predictions", "--output")
    inputs = {path: size for pattern in options.pattern.split(",") for path, size in match_files(cluster, pattern).items()}
    _check_output(cluster, output, list(inputs))
    request = Request(tuple(sorted(inputs)), version.files)
    flags = JobFlags(
        job_id=generate_job_id("predict") if options.job_id is None else options.job_id,
        module=_MODULE,
        replicas=_replicas(inventory, sum(inputs.values()), options.replicas),
        job_dir=output,
        # By name, as hosts mount the paths of a program's command line.
        more_args=[
            *("--data", options.pattern, "--model", f"{inventory.bucket}/{source}"),
            *(["--signature", options.signature] if options.signature is not None else []),
        ],
    )
    return prepare_program(inventory, flags, program(request))


def program(request: Request) -> JobProgram:
    """Return the shipped package, with the model server's modules, its declaration and the request."""
    own = sorted(path.relative_to(CHECKOUT).as_posix() for path in (CHECKOUT / "hosts/batch").glob("*.py"))
    files = {path: (CHECKOUT / path).read_bytes() for path in (*own, *_SHARED_MODULES)}
    files |= {f"hosts/{trainer_config.FILE}": _DECLARATION, FILE: request.to_json()}
    return JobProgram(package.PackageSource("hosts", files))


def _replicas(inventory: Inventory, size: int, requested: str | None) -> str:
    """Return the number of predicting hosts: as requested, else by the size of the input in bytes."""
    available = 1 + len(inventory.of_role(Role.WORKER))
    if requested is not None and not (requested.isdecimal() and 1 <= int(requested) <= available):
        raise UsageError(
            f"--replicas {requested!r} is no number of the hosts that predict: stack {inventory.stack} has {available}"
        )
    count = int(requested) if requested is not None else count_replicas(size, available, inventory.shared_cpus)
    if requested is None and count < available:
        shared = f"the hosts share {terminal.plural(inventory.shared_cpus or 0, 'processor')}"
        why = shared if count < size // _BYTES_PER_REPLICA else f"{terminal.size(size)} of input are not worth more"
        terminal.note(f"{terminal.plural(count, 'replica')} of {available}, as {why}: --replicas {available} takes all")
    return f"{Role.WORKER}={count - 1}"


def count_replicas(size: int, available: int, shared_cpus: int | None) -> int:
    """Return how many replicas an input of `size` bytes is worth; at most `shared_cpus` on shared CPUs."""
    return max(1, min(available, size // _BYTES_PER_REPLICA, shared_cpus or available))


def _version(model: Model, name: str | None) -> Version:
    """Return the named version, or the default; UsageError if it is not READY."""
    ready = [version.name for version in model.existing_versions if version.state is VersionState.READY]
    if name is None and not model.default:
        raise UsageError(f"model {model.name} has no default: say --version; READY are {', '.join(ready) or 'none'}")
    version = existing_version(model, name or model.default)
    if version.state is not VersionState.READY:
        raise UsageError(
            f"version {version.name} of model {model.name} is {version.state}, and predictions are made by one that is READY; "
            f"those are {', '.join(ready) or 'none'}"
        )
    return version


def _check_signature(bucket: Bucket, source: str, name: str | None) -> None:
    if name is None:
        return
    try:
        item = bucket.read(f"{source}/{MODEL_FILE}")
        available = read_signatures(item.content if item else b"")
    except ValueError as error:
        raise UsageError(f"{source}/{MODEL_FILE}: {error}") from None
    if name not in available:
        raise UsageError(
            f"--signature {name!r} is none of the model{suggest(name, available)}; there are {', '.join(available) or 'none'}"
        )


def match_files(cluster: ClusterClient, pattern: str) -> dict[str, int]:
    """Return the files that match a pattern, as the hosts see them, by name, with their sizes in bytes."""
    if (location := _locate(cluster, pattern)) is None:
        raise UsageError(
            f"--input {pattern!r} is not in the bucket, where hosts find it: fab data put PATH puts a file or a folder there, "
            f"and --input {cluster.inventory.bucket}/data/… names it"
        )
    bucket, top = location
    parts = pattern.removeprefix(f"{top}/").split("/")
    fixed = next((place for place, part in enumerate(parts) if _GLOB.search(part)), len(parts))
    folder = "/".join(parts[:fixed])
    sizes = {f"{folder}/{path}".strip("/"): size for path, size in bucket.walk(folder).items()}
    names = sorted(path for path in sizes if _matches(path.split("/"), parts))
    if names:
        return {f"{top}/{path}": sizes[path] for path in names}
    if sizes and fixed == len(parts):
        raise UsageError(f"--input {pattern} is a folder: say which of its files, such as {pattern.rstrip('/')}/*")
    raise UsageError(
        f"--input {pattern} matches no file of the bucket: fab data ls lists them, fab data put PATH puts some there"
    )


def _matches(path: Sequence[str], parts: Sequence[str]) -> bool:
    """Match like a shell: * ends at a /, and matches no name that begins with a point."""
    return len(path) == len(parts) and all(
        fnmatchcase(name, part) and (part.startswith(".") or not name.startswith("."))
        for name, part in zip(path, parts, strict=True)
    )


def _locate(cluster: ClusterClient, path: str) -> tuple[Bucket, str] | None:
    """Return a path's bucket, and its own path or URL; None unless both the hosts and we can reach it."""
    here = cluster.inventory.bucket
    if path.startswith(f"{here}/") and ".." not in path.split("/"):
        return cluster.bucket, here
    if (url := _URL.match(path)) and "://" in here:
        return open_bucket(url[0]), url[0]
    return None


def _check_output(cluster: ClusterClient, output: str, inputs: Sequence[str]) -> None:
    """Check that the output is empty, and would not contain the input."""
    for path in inputs:
        if overlap(path, output):
            raise UsageError(f"--input {path} is in --output {output}: give another --output")
    location = _locate(cluster, output)
    if location and location[0].walk(output.removeprefix(f"{location[1]}/")):
        raise UsageError(f"--output {output} is not empty: give another, as what is there is left as it is")


def check_flags(batch: bool, instances: str | None, with_batch: Mapping[str, object]) -> None:
    """Check that the flags of --batch, by name in `with_batch`, come with it, and others without it."""
    if batch and instances is not None:
        raise UsageError(
            "--json-instances is asked of the model server, and --batch is a job: --input names its files in the bucket"
        )
    if not batch and (batch_flags := [flag for flag, value in with_batch.items() if value]):
        raise UsageError(f"{batch_flags[0]} goes with --batch only: fab predict --batch --input PATTERN --output PATH")
