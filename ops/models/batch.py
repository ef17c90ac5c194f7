"""`fab predict --batch`: run a version of a model on files of the bucket, as a job on the master and workers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from infra.inventory import Inventory
from infra.scale_tiers import Role, suggest
from infra.templates import ROOT as CHECKOUT
from jobs import paths
from jobs.batch_request import FILE, RESTART_EXIT, Request
from jobs.bucket import Bucket, BucketError
from jobs.folder_bucket import open_bucket
from jobs.model_download import MODEL_FILE
from jobs.model_records import Model, Version, VersionState, folder_of
from jobs.model_signatures import read_signatures
from ops import terminal
from ops.cluster.cluster import ClusterClient
from ops.errors import UsageError
from ops.models.lookup import catalog_of, existing_model, existing_version
from ops.package import package, trainer_config
from ops.submit.config import JobFlags, check_job_dir, generate_job_id
from ops.submit.program import JobProgram
from ops.submit.runner import run_submission
from ops.submit.submit import Submission
from ops.submit.train import overlap, prepare_program

_MODULE = "hosts.batch.task"
# Modules that a batch shares with the model server, which load a model and define the format of requests, and its request.
_SHARED_MODULES = (
    "hosts/__init__.py",
    *(f"hosts/serving/{name}.py" for name in ("__init__", "rest", "saved")),
    *(f"jobs/{name}.py" for name in ("__init__", "batch_request", "model_download", "model_signatures")),
)
_DECLARATION = f"restartCodes: [{RESTART_EXIT}]\n".encode()
# The bytes of input that justify one more replica: about ten thousand images of MNIST, a few seconds of a CPU.
_BYTES_PER_REPLICA = 8_000_000
_GLOB = re.compile(r"[*?\[]")
# A host that looks for paths in an argument may end one at these characters, so each is replaced by `?`, which matches it.
_ENDS_PATH = re.compile(r"[\s'\",;:|&<>{}\\]")
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
    """Submit a job that predicts the input; return the exit code as `fab train` does."""
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
    patterns = [options.pattern] if _is_file(cluster, options.pattern) else options.pattern.split(",")
    inputs = {path: size for pattern in patterns for path, size in match_files(cluster, pattern).items()}
    _check_output(cluster, output, list(inputs))
    request = Request(tuple(sorted(inputs)), version.files)
    flags = JobFlags(
        job_id=generate_job_id("predict") if options.job_id is None else options.job_id,
        module=_MODULE,
        replicas=_replicas(inventory, sum(inputs.values()), options.replicas),
        job_dir=output,
        # A host lets a program read only those paths of the bucket that its arguments name.
        more_args=[
            *("--data", ",".join(map(_as_argument, patterns)), "--model", f"{inventory.bucket}/{source}"),
            *(["--signature", options.signature] if options.signature is not None else []),
        ],
    )
    return prepare_program(inventory, flags, build_program(request))


def build_program(request: Request) -> JobProgram:
    """Return the package of `hosts/batch`, with the modules that it shares, a declaration and the request."""
    batch_modules = sorted(path.relative_to(CHECKOUT).as_posix() for path in (CHECKOUT / "hosts/batch").glob("*.py"))
    files = {path: (CHECKOUT / path).read_bytes() for path in (*batch_modules, *_SHARED_MODULES)}
    files |= {f"hosts/{trainer_config.FILE}": _DECLARATION, FILE: request.to_json()}
    return JobProgram(package.PackageSource("hosts", files))


def _replicas(inventory: Inventory, size: int, requested: str | None) -> str:
    """Return the value of --replicas, the workers besides the master: as requested, else by the input's bytes."""
    available = 1 + len(inventory.of_role(Role.WORKER))
    if requested is not None and not (requested.isdecimal() and 1 <= int(requested) <= available):
        raise UsageError(
            f"--replicas {requested!r} is invalid. Valid: 1 to {available}, the master and workers of stack {inventory.stack}"
        )
    count = int(requested) if requested is not None else count_replicas(size, available, inventory.shared_cpus)
    if requested is None and count < available:
        shared = f"the hosts share {terminal.plural(inventory.shared_cpus or 0, 'processor')}"
        why = shared if count < size // _BYTES_PER_REPLICA else f"{terminal.size(size)} of input need no more"
        terminal.note(f"{terminal.plural(count, 'replica')} of {available}, as {why}: --replicas {available} takes all")
    return f"{Role.WORKER}={count - 1}"


def count_replicas(size: int, available: int, shared_cpus: int | None) -> int:
    """Return the number of replicas for an input of `size` bytes; at most `shared_cpus` if the hosts share CPUs."""
    return max(1, min(available, size // _BYTES_PER_REPLICA, shared_cpus or available))


def _version(model: Model, name: str | None) -> Version:
    """Return the named version, or the default; UsageError if it is not READY."""
    ready = [version.name for version in model.existing_versions if version.state is VersionState.READY]
    if name is None and not model.default:
        raise UsageError(f"model {model.name} has no default: give --version; READY are {', '.join(ready) or 'none'}")
    version = existing_version(model, name or model.default)
    if version.state is not VersionState.READY:
        raise UsageError(
            f"version {version.name} of model {model.name} is {version.state}, and only a READY one predicts; "
            f"READY are {', '.join(ready) or 'none'}"
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
            f"--signature {name!r} is not in the model{suggest(name, available)}; it has {', '.join(available) or 'none'}"
        )


def match_files(cluster: ClusterClient, pattern: str) -> dict[str, int]:
    """Return the sizes in bytes of the files that match a pattern, by their paths or URLs on the hosts."""
    if (location := _locate(cluster, pattern)) is None:
        raise UsageError(
            f"--input {pattern!r} is not in the bucket, where hosts find it: fab data put PATH puts a file or a folder there, "
            f"and --input {cluster.inventory.bucket}/data/… names it"
        )
    bucket, bucket_path = location
    parts = pattern.removeprefix(f"{bucket_path}/").split("/")
    first_glob = next((index for index, part in enumerate(parts) if _GLOB.search(part)), len(parts))
    folder = "/".join(parts[:first_glob])
    sizes = {f"{folder}/{path}".strip("/"): size for path, size in bucket.walk(folder).items()}
    names = sorted(path for path in sizes if _matches(path.split("/"), parts))
    named = _as_argument(pattern).removeprefix(f"{bucket_path}/")
    if bucket is cluster.bucket and not paths.readable_folder(named) and any(not each.startswith("data/") for each in names):
        raise UsageError(
            f"--input {pattern} is invalid: a job may read data/, and outside it only files of a folder that its input names; "
            "the first folder may hold no space, comma or similar character. "
            f"Valid: {bucket_path}/data/*, {bucket_path}/jobs/ID/output/*.json, {bucket_path}/FOLDER/*/*.csv"
        )
    if names:
        return {f"{bucket_path}/{path}": sizes[path] for path in names}
    if sizes and first_glob == len(parts):
        raise UsageError(f"--input {pattern} is a folder: give files in it, such as {pattern.rstrip('/')}/*")
    raise UsageError(
        f"--input {pattern} matches no file of the bucket: fab data ls lists them, fab data put PATH puts some there"
    )


def _is_file(cluster: ClusterClient, path: str) -> bool:
    """Return True if the bucket has a file of exactly this name, which may contain a comma."""
    location = _locate(cluster, path) if "," in path else None
    try:
        return location is not None and "" in location[0].walk(path.removeprefix(f"{location[1]}/"))
    except BucketError:  # several paths are too long for one; the search for each shows any other error
        return False


def _as_argument(pattern: str) -> str:
    """Return the pattern as an argument in which hosts find the whole path."""
    scheme, separator, path = pattern.rpartition("://")
    return f"{scheme}{separator}{_ENDS_PATH.sub('?', path)}"


def _matches(path: Sequence[str], parts: Sequence[str]) -> bool:
    """Match like a shell: * matches no /, and no name that begins with a dot."""
    return len(path) == len(parts) and all(
        fnmatchcase(name, part) and (part.startswith(".") or not name.startswith("."))
        for name, part in zip(path, parts, strict=True)
    )


def _locate(cluster: ClusterClient, path: str) -> tuple[Bucket, str] | None:
    """Return the bucket that holds a path, and the bucket's path or URL; None unless hosts and this machine can reach it."""
    own_bucket = cluster.inventory.bucket
    if path.startswith(f"{own_bucket}/") and ".." not in path.split("/"):
        return cluster.bucket, own_bucket
    if (url := _URL.match(path)) and "://" in own_bucket:
        return open_bucket(url[0]), url[0]
    return None


def _check_output(cluster: ClusterClient, output: str, inputs: Sequence[str]) -> None:
    """Check that the output folder is empty and contains no input."""
    for path in inputs:
        if overlap(path, output):
            raise UsageError(f"--input {path} is in --output {output}: give another --output")
    location = _locate(cluster, output)
    if location and location[0].walk(output.removeprefix(f"{location[1]}/")):
        raise UsageError(f"--output {output} is not empty, and its files are never replaced: give another")


def check_flags(batch: bool, instances: str | None, with_batch: Mapping[str, object]) -> None:
    """Check that the flags in `with_batch`, flag to value, are given only with --batch, and `instances` only without."""
    if batch and instances is not None:
        raise UsageError(
            "--json-instances is for the model server, and --batch runs a job: name its files in the bucket by --input"
        )
    if not batch and (batch_flags := [flag for flag, value in with_batch.items() if value]):
        raise UsageError(f"{batch_flags[0]} is valid only with --batch: fab predict --batch --input PATTERN --output PATH")
