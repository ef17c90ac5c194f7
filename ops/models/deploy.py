"""`fab deploy`: copy a SavedModel into the bucket as a version, READY once all servers that can be started have loaded it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.background import Background
from jobs.bucket import BucketError, Conflict
from jobs.model_catalog import Catalog
from jobs.model_download import LARGEST_MODEL_FILE, MODEL_FILE, NO_SIGNATURE
from jobs.model_records import NAME, Model, Version, VersionState, folder_of
from jobs.model_signatures import read_signatures
from ops import terminal
from ops.cluster.cluster import ClusterClient
from ops.cluster.fanout import Outcome
from ops.cluster.ledger import current_user, existing_job
from ops.cluster.output import find
from ops.errors import DONE, OpsError, UsageError, one_line
from ops.models import server, server_status
from ops.models.export import newest_model, read_model_file
from ops.models.lookup import catalog_of, change_model, find_model, models_with_versions, one_line_errors
from ops.models.versions import version_to_dict
from ops.submit.trials import best_trial, note_best_trial

# A model in memory is at least as large as on disk, and TensorFlow itself takes its part.
_TENSORFLOW_BYTES = 400_000_000


@dataclass(frozen=True)
class _Origin:
    """The source of a version: the content of its saved_model.pb, and a function that copies all files, `size` bytes."""

    path: str
    model_file: bytes
    size: int
    copy_to: Callable[[Path], object]
    job_id: str = ""
    manifest: dict[str, Any] | None = None


def deploy(
    cluster: ClusterClient,
    model: str | None,
    version: str | None,
    job_id: str | None,
    origin: str | None,
    as_json: bool = False,
) -> int:
    """Deploy a SavedModel as a version of a model on the cluster's servers; the first version becomes the default."""
    name, version = _check_name("--model", model), _check_name("--version", version)
    catalog = catalog_of(cluster)
    token = os.urandom(8).hex()
    model_record = find_model(catalog, name)
    existing = next((v for v in model_record.existing_versions if v.name == version), None) if model_record else None
    with tempfile.TemporaryDirectory() as scratch:
        files: dict[str, Path] = {}
        if existing and existing.redeployable and origin is None and job_id is None:
            starting = _start_servers(cluster)
            change_model(catalog, name, lambda record: record.redeploy(version, token))
        else:
            if model_record:
                with one_line_errors(name):
                    model_record.add_version(Version(version, token=token))  # before anything is copied
            if origin is None and job_id is None:
                versions = ", ".join(v.name for v in model_record.existing_versions if v.redeployable) if model_record else ""
                raise UsageError(
                    f"version {version} has no origin: --job ID takes a job's model, --origin PATH a local one"
                    + (f"; without both, fab deploy restores {versions}" if versions else "")
                )
            source = _find_origin(cluster, job_id, origin)
            _check_servable(cluster, catalog, source)
            starting = _start_servers(cluster)
            files = _copy_locally(source, Path(scratch, "model"))
            new_version = Version(
                version,
                origin=source.path,
                jobId=source.job_id,
                createdBy=current_user(),
                manifest=source.manifest or {},
                token=token,
            )
            change_model(catalog, name, lambda record: record.add_version(new_version), create=True)
        with _mark_failed_on_error(catalog, name, version, token):
            if files:
                _upload(cluster, catalog, name, version, token, files)
            with terminal.ProgressLine(f"{name} {version}: starting the model server"):
                started = starting.join(server.START_SECONDS)
            server_status.wait_loaded(cluster, name, Version(version, token=token), started)
            record = change_model(catalog, name, lambda record: record.mark_ready(version, token))
        server.stop_unused_master_server(cluster)
    if as_json:
        terminal.print_json(version_to_dict(record, record.version(version)))
    else:
        which = "the default" if record.default == version else f"the default is {record.default}"
        terminal.out(f"model {name} has version {version}, {which}: fab predict --model {name} --json-instances request.json")
    return DONE


def _check_name(flag: str, value: str | None) -> str:
    if value is None:
        raise UsageError(f"{flag} is missing: fab deploy --job ID --model mnist --version v1")
    if not NAME.fullmatch(value):
        raise UsageError(f"{flag} {value!r} is no name: a letter, then up to 127 letters, digits and _")
    return value


def _find_origin(cluster: ClusterClient, job_id: str | None, origin: str | None) -> _Origin:
    """Return the source of a version, a job's output or a root folder."""
    if origin is None:
        record = existing_job(cluster.ledger, job_id)
        if trial := best_trial(cluster.ledger, record):
            note_best_trial(record, trial)
        output = find(cluster, record).of_trial(trial)
        folder = newest_model(output)
        if folder is None and not record.final:
            has = f"has no SavedModel in {output.job_dir} yet"
            raise UsageError(f"job {record.jobId} is {record.state}, and {has}: fab wait {record.jobId}")
        if folder is None:
            raise UsageError(
                f"job {record.jobId} ({record.state}) has no SavedModel in {output.job_dir}: fab export {record.jobId} makes "
                "one from its latest checkpoint if its trainer can, and --origin names another"
            )
        below = f"{folder}/" if folder else ""
        paths = [path for path in output.files if path.startswith(below)]
        where = f"{output.job_dir}/{folder}".rstrip("/")
        size = sum(output.files[path] for path in paths)
        content = output.read(f"{below}{MODEL_FILE}", LARGEST_MODEL_FILE)
        return _Origin(where, content, size, lambda to: output.fetch(paths, to, below), record.jobId, dict(record.manifest))
    if job_id is not None:
        raise UsageError("--job takes the model of a job, and --origin another: use only one of them")
    root = Path(origin)
    if not (root / MODEL_FILE).is_file():
        raise UsageError(f"--origin {origin} is no folder with a {MODEL_FILE}: fab export fetches one, and --job takes a job's")

    size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    return _Origin(str(root.resolve()), read_model_file(root), size, lambda to: shutil.copytree(root, to, dirs_exist_ok=True))


def _start_servers(cluster: ClusterClient) -> Background[Outcome[str]]:
    """Start the servers in the background: they import TensorFlow while files are copied. Without a model they exit."""
    return Background(lambda: server.start(cluster))


def _copy_locally(source: _Origin, folder: Path) -> dict[str, Path]:
    """Copy the files to a local folder; return each by its path in that folder."""
    folder.mkdir()
    source.copy_to(folder)
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def _upload(cluster: ClusterClient, catalog: Catalog, name: str, version: str, token: str, files: Mapping[str, Path]) -> None:
    """Upload the files, then put their hashes and size into the record."""
    size = sum(path.stat().st_size for path in files.values())
    digests = {}
    with terminal.ProgressLine(f"{name} {version}: uploading {terminal.size(size)}") as step:
        progress = terminal.byte_counter(step, size)
        for path, file in files.items():
            cluster.bucket.upload(f"{folder_of(name, version)}/{path}", file, progress)
            with file.open("rb") as content:
                digests[path] = hashlib.file_digest(content, "sha256").hexdigest()
    try:
        change_model(catalog, name, lambda record: record.set_files(version, token, digests, size))
    except UsageError:  # it was deleted meanwhile: remove what was uploaded since
        cluster.bucket.remove(folder_of(name, version))
        raise


def _check_servable(cluster: ClusterClient, catalog: Catalog, source: _Origin) -> None:
    """Check that the model has signatures and fits into the memory of every server."""
    try:
        available = read_signatures(source.model_file)
    except ValueError as error:
        raise UsageError(f"{source.path}/{MODEL_FILE}: {error}") from None
    if not available:
        raise UsageError(f"the model in {source.path} {NO_SIGNATURE}")
    deployed_bytes = sum(
        version.size for model in models_with_versions(catalog)[0] for version in model.existing_versions if version.loadable
    )
    host = min(server.serving_hosts(cluster.inventory), key=server.memory_limit)
    free_bytes = server.memory_limit(host) - _TENSORFLOW_BYTES - deployed_bytes
    if source.size > free_bytes:
        has, can = terminal.size(source.size), terminal.size(max(free_bytes, 0))
        raise UsageError(
            f"the model has {has}, and the server on {host.name} has room for {can} more: fab undeploy what is not needed, or "
            f"give the {'master' if host.role.runs_jobs else 'serving hosts'} a larger machine type"
        )


@contextlib.contextmanager
def _mark_failed_on_error(catalog: Catalog, name: str, version: str, token: str) -> Iterator[None]:
    """Mark the version FAILED after any exception; its name stays reserved."""
    try:
        yield
    except BaseException as error:
        why = "fab deploy was stopped" if isinstance(error, KeyboardInterrupt) else one_line(error)

        def mark_failed(record: Model) -> Model:
            mine = next((v for v in record.existing_versions if v.name == version and v.token == token), None)
            return record.mark_failed(version, token, why) if mine and mine.state is VersionState.CREATING else record

        with contextlib.suppress(OpsError, BucketError, Conflict):
            current = next((v for v in change_model(catalog, name, mark_failed).existing_versions if v.name == version), None)
            if current and current.state is VersionState.FAILED:
                again = f"fab deploy --model {name} --version {version} tries it again, and " if current.redeployable else ""
                terminal.note(
                    f"version {version} of model {name} is FAILED: {again}fab delete-version {name} {version} deletes it"
                )
        raise
