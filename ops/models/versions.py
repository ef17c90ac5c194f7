"""Models and their versions: deployed, listed, made the default, taken away."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.checked import RecordError
from jobs.store import Conflict, StoreError
from ops import terminal
from ops.cluster.cluster import Cluster
from ops.cluster.fanout import Background
from ops.cluster.ledger import existing_job, me
from ops.cluster.output import find
from ops.errors import DONE, OpsError, UsageError, meant, one_line
from ops.models import server
from ops.models.export import MODEL, newest, of_trial
from ops.models.savedmodel import signatures
from ops.show.trials import best_of
from serving.catalog import Catalog
from serving.records import NAME, Model, ModelError, Version, VersionState, folder_of

_START_SECONDS = 60.0
_LOAD_SECONDS = 180.0
_AGAIN_SECONDS = 5.0
_GONE_SECONDS = 10.0
_POLL_SECONDS = 0.2
# A model in memory is at least as large as on disk, and TensorFlow itself takes its part.
_TENSORFLOW_BYTES = 400_000_000


@dataclass(frozen=True)
class _Origin:
    """Where a version comes from: `model` is its saved_model.pb, `bring` puts all its files, `size` bytes, into a folder."""

    said: str
    model: bytes
    size: int
    bring: Callable[[Path], object]
    job_id: str = ""
    manifest: dict[str, Any] | None = None


def deploy(
    cluster: Cluster, model: str | None, version: str | None, job_id: str | None, origin: str | None, as_json: bool = False
) -> int:
    """Make a SavedModel a version of a model that the cluster's server answers for; the first version is the default."""
    name, version = _name("--model", model), _name("--version", version)
    catalog = catalog_of(cluster)
    token = os.urandom(8).hex()
    before = _model(catalog, name)
    there = next((v for v in before.there if v.name == version), None) if before else None
    with tempfile.TemporaryDirectory() as scratch:
        files: dict[str, Path] = {}
        if there and there.may_be_again and origin is None and job_id is None:
            starting = _start(cluster)
            _change(catalog, name, lambda record: record.again(version, token))
        else:
            if before:
                _refusing(lambda: before.begun(Version(version, token=token)))  # before anything is copied
            if origin is None and job_id is None:
                kept = ", ".join(v.name for v in before.there if v.may_be_again) if before else ""
                raise UsageError(
                    f"version {version} of what? --job ID takes a job's model, --origin PATH one that is here"
                    + (f"; kept, and to be deployed again without these, are {kept}" if kept else "")
                )
            source = _origin(cluster, job_id, origin)
            _check(cluster, catalog, source)
            starting = _start(cluster)
            files = _fetched(source, Path(scratch, "model"))
            made = Version(
                version,
                origin=source.said,
                jobId=source.job_id,
                createdBy=me(),
                manifest=source.manifest or {},
                token=token,
            )
            _change(catalog, name, lambda record: record.begun(made), create=True)
        with _undone(catalog, name, version, token):
            if files:
                _upload(cluster, catalog, name, version, token, files)
            with terminal.Step(f"{name} {version}: starting the model server"):
                starting.join(_START_SECONDS)
            _await(cluster, name, version, token)
            record = _change(catalog, name, lambda record: record.ready(version, token))
    if as_json:
        terminal.as_json(_shown(record, record.version(version)))
    else:
        which = "the default" if record.default == version else f"the default is {record.default}"
        terminal.out(f"model {name} has version {version}, {which}: fab predict --model {name} --json-instances request.json")
    return DONE


def _name(flag: str, value: str | None) -> str:
    if value is None:
        raise UsageError(f"{flag} is missing: fab deploy --job ID --model mnist --version v1")
    if not NAME.fullmatch(value):
        raise UsageError(f"{flag} {value!r} is no name: a letter, then up to 127 letters, digits and _")
    return value


def _origin(cluster: Cluster, job_id: str | None, origin: str | None) -> _Origin:
    """UsageError where there is no SavedModel to deploy."""
    if origin is None:
        record = existing_job(cluster.ledger, job_id)
        found = of_trial(find(cluster, record), best_of(cluster.ledger, record))
        folder = newest(found)
        if folder is None:
            raise UsageError(
                f"job {record.jobId} ({record.state}) has no SavedModel in {found.job_dir}: fab export {record.jobId} makes "
                "one of its latest checkpoint where its trainer can, and --origin names another"
            )
        below = f"{folder}/" if folder else ""
        paths = [path for path in found.files if path.startswith(below)]
        where = f"{found.job_dir}/{folder}".rstrip("/")
        size = sum(found.files[path] for path in paths)
        content = found.read(f"{below}{MODEL}")
        return _Origin(where, content, size, lambda to: found.fetch(paths, to, below), record.jobId, dict(record.manifest))
    if job_id is not None:
        raise UsageError("--job takes the model of a job, and --origin another: leave one of them out")
    here = Path(origin)
    if not (here / MODEL).is_file():
        raise UsageError(
            f"--origin {origin} is no folder with a {MODEL}: fab export fetches one, and --job takes that of a job"
        )

    size = sum(path.stat().st_size for path in here.rglob("*") if path.is_file())
    return _Origin(
        str(here.resolve()), (here / MODEL).read_bytes(), size, lambda to: shutil.copytree(here, to, dirs_exist_ok=True)
    )


def _start(cluster: Cluster) -> Background[None]:
    """The server has TensorFlow to import, while files are copied; one that gets nothing to serve ends by itself."""
    return Background(lambda: server.start(cluster))


def _fetched(source: _Origin, folder: Path) -> dict[str, Path]:
    """The files, in a folder of ours, each by its path below it."""
    folder.mkdir()
    source.bring(folder)
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def _upload(cluster: Cluster, catalog: Catalog, name: str, version: str, token: str, files: Mapping[str, Path]) -> None:
    """Put the files into the bucket, and then into the record what they are."""
    size = sum(path.stat().st_size for path in files.values())
    digests = {}
    with terminal.Step(f"{name} {version}: uploading {terminal.size(size)}") as step:
        progress = terminal.sizer(step, size)
        for path, file in files.items():
            cluster.bucket.upload(f"{folder_of(name, version)}/{path}", file, progress)
            with file.open("rb") as content:
                digests[path] = hashlib.file_digest(content, "sha256").hexdigest()
    try:
        _change(catalog, name, lambda record: record.copied(version, token, digests, size))
    except UsageError:  # it was deleted meanwhile, and what came after that is nobody's
        cluster.bucket.remove(folder_of(name, version))
        raise


def _check(cluster: Cluster, catalog: Catalog, source: _Origin) -> None:
    """UsageError for what no server could answer for."""
    try:
        found = signatures(source.model)
    except ValueError as error:
        raise UsageError(f"{source.said}/{MODEL}: {error}") from None
    if not found:
        raise UsageError(
            f"the model in {source.said} has no signature: export it with one (tf.saved_model.save(…, signatures=…))"
        )
    others = sum(version.size for model in _all(catalog)[0] for version in model.there if version.wanted)
    room = server.memory_of(cluster.inventory) - _TENSORFLOW_BYTES - others
    if source.size > room:
        host = server.server_of(cluster.inventory)
        has, can = terminal.size(source.size), terminal.size(max(room, 0))
        raise UsageError(
            f"the model has {has}, and the server on {host.name} has room for {can} more: fab undeploy what is not needed, or "
            "give the master a larger machine type"
        )


@contextlib.contextmanager
def _undone(catalog: Catalog, name: str, version: str, token: str) -> Iterator[None]:
    """Whatever ends the deployment also says so in the record, and the name stays taken."""
    try:
        yield
    except BaseException as error:
        why = "fab deploy was stopped" if isinstance(error, KeyboardInterrupt) else one_line(error)

        def failed(record: Model) -> Model:
            mine = next((v for v in record.there if v.name == version and v.token == token), None)
            return record.failed(version, token, why) if mine and mine.state is VersionState.CREATING else record

        with contextlib.suppress(OpsError, StoreError, Conflict):
            left = next((v for v in _change(catalog, name, failed).there if v.name == version), None)
            if left and left.state is VersionState.FAILED:
                again = f"fab deploy --model {name} --version {version} tries it again, and " if left.may_be_again else ""
                terminal.note(
                    f"version {version} of model {name} is FAILED: {again}fab delete-version {name} {version} clears it away"
                )
        raise


def _await(cluster: Cluster, name: str, version: str, token: str) -> None:
    """Until the server has loaded this deployment of it; OpsError where it cannot."""
    deadline = time.monotonic() + _LOAD_SECONDS
    started_at = time.monotonic()
    with terminal.Step(f"{name} {version}: loading"), server.reached(cluster) as (client, _):
        while True:
            status, said = client.ask("GET", f"/v1/models/{name}/versions/{version}")
            found: dict[str, Any] = said["model_version_status"][0] if status == 200 else {"state": "LOADING"}
            if found.get("deployment") != token:
                found = {"state": "LOADING"}  # it has not looked yet
            if status == server.NOBODY and time.monotonic() - started_at > _AGAIN_SECONDS:
                server.start(cluster)  # it had nothing to serve for long, and ended just when something came
                started_at = time.monotonic()
            if found["state"] == "AVAILABLE":
                return
            if found["state"] == "END":
                raise OpsError(f"version {version} of model {name} cannot be loaded: {found['status']['error_message']}")
            if time.monotonic() > deadline:
                host = server.server_of(cluster.inventory).name
                raise OpsError(
                    f"the model server on {host} has not loaded {name} {version} in {_LOAD_SECONDS:.0f} s: "
                    f"fab shell {host} -- journalctl -u scaletier-serving"
                )
            time.sleep(_POLL_SECONDS)


def _await_gone(cluster: Cluster, name: str, version: str) -> None:
    """Until the server has dropped it, or for as long as anybody would wait."""
    deadline = time.monotonic() + _GONE_SECONDS
    with server.reached(cluster) as (client, _):
        while client.ask("GET", f"/v1/models/{name}/versions/{version}")[0] == 200 and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)


def models(cluster: Cluster, as_json: bool) -> int:
    """List the models."""
    found, bad = _read(cluster)
    for line in bad:
        terminal.note(line)
    if as_json:
        terminal.as_json([{"name": m.name, "default": m.default, "versions": [_shown(m, v) for v in m.there]} for m in found])
        return DONE
    if not found:
        terminal.note("no model is deployed yet: fab deploy --job ID --model mnist --version v1")
        return DONE
    rows = [(m.name, m.default, len(m.there), terminal.local_time(m.createTime)) for m in found]
    terminal.table(("MODEL", "DEFAULT", "VERSIONS", "CREATED"), rows)
    return DONE


def versions(cluster: Cluster, model: str | None, as_json: bool) -> int:
    """List the versions of a model."""
    record = existing_model(catalog_of(cluster), model)
    if as_json:
        terminal.as_json([_shown(record, version) for version in record.there])
        return DONE
    rows = [
        (
            v.name,
            v.state,
            "default" if v.name == record.default else "",
            v.jobId or v.origin,
            terminal.size(v.size) if v.size else "",
            terminal.local_time(v.createTime),
        )
        for v in record.there
    ]
    terminal.table(("VERSION", "STATE", "DEFAULT", "ORIGIN", "SIZE", "CREATED"), rows)
    for v in record.there:
        if v.errorMessage:
            terminal.note(f"{v.name}: {v.errorMessage}")
    return DONE


def set_default(cluster: Cluster, model: str | None, version: str | None, as_json: bool = False) -> int:
    """Make a version the one that answers where none is named; it takes over at once, and no request fails."""
    catalog = catalog_of(cluster)
    record, chosen = _of(catalog, model, version)
    return _done(_change(catalog, record.name, lambda record: record.with_default(chosen.name)), chosen.name, as_json)


def undeploy(cluster: Cluster, model: str | None, version: str | None, as_json: bool = False) -> int:
    """Take a version off the server; its files stay, and fab deploy without --job or --origin brings it back."""
    catalog = catalog_of(cluster)
    record, chosen = _of(catalog, model, version)
    changed = _change(catalog, record.name, lambda record: record.undeployed(chosen.name))
    with terminal.Step(f"{record.name} {chosen.name}: taking it off the server"), contextlib.suppress(OpsError):
        _await_gone(cluster, record.name, chosen.name)
    return _done(changed, chosen.name, as_json)


def delete_version(cluster: Cluster, model: str | None, version: str | None, sure: bool, as_json: bool = False) -> int:
    """Delete a version and its files; its name stays taken."""
    catalog = catalog_of(cluster)
    if model is not None and version is not None and _was_deleted(catalog, model, version):
        cluster.bucket.remove(folder_of(model, version))  # what an interrupted deletion, or an upload that ended later, left
    record, chosen = _of(catalog, model, version)
    _refusing(lambda: record.deleted(chosen.name))
    if not sure:
        terminal.confirm(f"delete version {chosen.name} of model {record.name}, {terminal.size(chosen.size)}")
    # First it is no version any more, then its files go: whoever is interrupted in between has left no half of one.
    changed = _change(catalog, record.name, lambda record: record.deleted(chosen.name))
    cluster.bucket.remove(folder_of(record.name, chosen.name))
    if as_json:
        terminal.as_json({"deleted": {"model": record.name, "version": chosen.name}, "default": changed.default})
    else:
        terminal.out(f"version {chosen.name} of model {record.name} is deleted")
    return DONE


def _was_deleted(catalog: Catalog, model: str, version: str) -> bool:
    record = _model(catalog, model) if NAME.fullmatch(model) else None
    return record is not None and any(v.name == version and v.state is VersionState.DELETED for v in record.versions)


def catalog_of(cluster: Cluster) -> Catalog:
    """The models of a cluster."""
    return Catalog(cluster.ledger.store)


def existing_model(catalog: Catalog, name: str | None) -> Model:
    """A model, the only one where none is named; UsageError that lists those that there are."""
    found, _ = _all(catalog)
    names = [model.name for model in found]
    if name is None:
        if len(found) == 1:
            return found[0]
        raise UsageError(f"which model? There are {', '.join(names)}" if names else _NONE)
    for model in found:
        if model.name == name:
            return model
    raise UsageError(
        f"there is no model {name!r}{meant(name, names)}; " + (f"there are {', '.join(names)}" if names else _NONE)
    )


def served_model(catalog: Catalog, name: str | None) -> Model:
    """As `existing_model`, one of which the server has a version; UsageError where it has none."""
    record = existing_model(catalog, name)
    if not any(version.state is VersionState.READY for version in record.there):
        states = ", ".join(f"{version.name} is {version.state}" for version in record.there)
        raise UsageError(
            f"no version of model {record.name} is served: {states}; fab deploy --model {record.name} brings one back"
        )
    return record


_NONE = "no model is deployed yet: fab deploy --job ID --model mnist --version v1"


def _of(catalog: Catalog, model: str | None, version: str | None) -> tuple[Model, Version]:
    record = existing_model(catalog, model)
    if version is None:
        there = ", ".join(v.name for v in record.there) or "none"
        raise UsageError(f"which version of model {record.name}? There are {there}")
    try:
        return record, record.version(version)
    except ModelError as error:
        raise UsageError(f"{error}{meant(version, [v.name for v in record.there])}") from None


def _all(catalog: Catalog) -> tuple[list[Model], list[str]]:
    """The models that have a version; what is left of others is which names were used."""
    try:
        found, bad = catalog.models()
        return [model for model in found if model.there], bad
    except StoreError as error:
        raise OpsError(f"the bucket does not answer: {error}") from error


def _read(cluster: Cluster) -> tuple[list[Model], list[str]]:
    with terminal.Step("reading the models"):
        return _all(catalog_of(cluster))


def _model(catalog: Catalog, name: str) -> Model | None:
    try:
        return catalog.model(name)
    except RecordError as error:
        raise OpsError(f"the record of model {name} cannot be read: {error}") from None


def _change(catalog: Catalog, name: str, change: Callable[[Model], Model], create: bool = False) -> Model:
    try:
        return catalog.change(name, change, create)
    except ModelError as error:
        raise UsageError(str(error)) from None
    except RecordError as error:
        raise OpsError(f"the record of model {name} cannot be read: {error}") from None
    except Conflict:
        raise OpsError(f"model {name} is changed by others all the time: try again") from None


def _refusing(change: Callable[[], Model]) -> None:
    try:
        change()
    except ModelError as error:
        raise UsageError(str(error)) from None


def _done(record: Model, version: str, as_json: bool) -> int:
    if as_json:
        terminal.as_json(_shown(record, record.version(version)))
    else:
        default = f"the default is {record.default}" if record.default else "there is no default"
        terminal.out(f"version {version} of model {record.name} is {record.version(version).state}; {default}")
    return DONE


def _shown(model: Model, version: Version) -> dict[str, Any]:
    """A version as programs read it."""
    return {
        "model": model.name,
        "version": version.name,
        "state": version.state,
        "isDefault": model.default == version.name,
        "origin": version.origin,
        "jobId": version.jobId,
        "createTime": version.createTime,
        "createdBy": version.createdBy,
        "size": version.size,
        "errorMessage": version.errorMessage,
        "manifest": version.manifest,
    }
