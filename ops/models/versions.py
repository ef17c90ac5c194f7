"""List deployed models and versions, set the default, undeploy and delete them."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from typing import Any

from jobs.model_catalog import Catalog
from jobs.model_records import NAME, Model, Version, VersionState, folder_of
from ops import terminal
from ops.cluster.cluster import ClusterClient
from ops.errors import DONE, OpsError, UsageError
from ops.models import server_status
from ops.models.lookup import (
    NO_MODEL,
    catalog_of,
    change_model,
    existing_model,
    existing_version,
    find_model,
    models_with_versions,
    one_line_errors,
)


def models(cluster: ClusterClient, as_json: bool) -> int:
    """List the models."""
    with terminal.ProgressLine("reading the models"):
        present, bad = models_with_versions(catalog_of(cluster))
    for line in bad:
        terminal.note(line)
    states = server_status.query(cluster, present)
    if as_json:
        listed = [(m, [version_to_dict(m, v, states) for v in m.existing_versions]) for m in present]
        terminal.print_json([{"name": m.name, "default": m.default, "versions": versions} for m, versions in listed])
        return DONE
    if not present:
        terminal.note(NO_MODEL)
        return DONE
    rows = []
    for m in present:
        ready = server_status.format_ready(states.get((m.name, m.default), []))
        rows.append((m.name, m.default, ready, len(m.existing_versions), terminal.local_time(m.createTime)))
    terminal.table(("MODEL", "DEFAULT", "SERVERS", "VERSIONS", "CREATED"), rows)
    for line in server_status.problems(states):
        terminal.note(line)
    return DONE


def versions(cluster: ClusterClient, model: str | None, as_json: bool) -> int:
    """List the versions of a model."""
    record = existing_model(catalog_of(cluster), model)
    states = server_status.query(cluster, [record])
    if as_json:
        terminal.print_json([version_to_dict(record, version, states) for version in record.existing_versions])
        return DONE
    rows = []
    for v in record.existing_versions:
        default, size = "default" if v.name == record.default else "", terminal.size(v.size) if v.size else ""
        ready = server_status.format_ready(states.get((record.name, v.name), []))
        rows.append((v.name, v.state, default, ready, v.jobId or v.origin, size, terminal.local_time(v.createTime)))
    terminal.table(("VERSION", "STATE", "DEFAULT", "SERVERS", "ORIGIN", "SIZE", "CREATED"), rows)
    for v in record.existing_versions:
        if v.errorMessage:
            terminal.note(f"{v.name}: {v.errorMessage}")
    for line in server_status.problems(states):
        terminal.note(line)
    return DONE


def set_default(cluster: ClusterClient, model: str | None, version: str | None, as_json: bool = False) -> int:
    """Make a version the default: it answers at once, and no request fails."""
    catalog = catalog_of(cluster)
    record, chosen = _find_version(catalog, model, version)
    after = change_model(catalog, record.name, lambda record: record.with_default(chosen.name))
    return _report_version(after, chosen.name, as_json)


def undeploy(cluster: ClusterClient, model: str | None, version: str | None, as_json: bool = False) -> int:
    """Remove a version from the servers; fab deploy without --job or --origin restores it."""
    catalog = catalog_of(cluster)
    record, chosen = _find_version(catalog, model, version)
    after = change_model(catalog, record.name, lambda record: record.undeploy(chosen.name))
    with terminal.ProgressLine(f"{record.name} {chosen.name}: unloading it from the servers"), contextlib.suppress(OpsError):
        server_status.wait_unloaded(cluster, record.name, chosen.name)
    return _report_version(after, chosen.name, as_json)


def delete_version(cluster: ClusterClient, model: str | None, version: str | None, sure: bool, as_json: bool = False) -> int:
    """Delete a version and its files; its name cannot be used again."""
    catalog = catalog_of(cluster)
    if model is not None and version is not None and _was_deleted(catalog, model, version):
        cluster.bucket.remove(folder_of(model, version))  # files that an interrupted deletion or a late upload left
    record, chosen = _find_version(catalog, model, version)
    with one_line_errors(record.name):
        record.delete(chosen.name)  # raises before the user is asked
    if not sure:
        terminal.confirm(f"delete version {chosen.name} of model {record.name}, {terminal.size(chosen.size)}")
    # The version is deleted before its files: an interruption in between leaves no incomplete version.
    after = change_model(catalog, record.name, lambda record: record.delete(chosen.name))
    cluster.bucket.remove(folder_of(record.name, chosen.name))
    if as_json:
        terminal.print_json({"deleted": {"model": record.name, "version": chosen.name}, "default": after.default})
    else:
        terminal.out(f"version {chosen.name} of model {record.name} is deleted")
    return DONE


def _was_deleted(catalog: Catalog, model: str, version: str) -> bool:
    record = find_model(catalog, model) if NAME.fullmatch(model) else None
    return record is not None and any(v.name == version and v.state is VersionState.DELETED for v in record.versions)


def _find_version(catalog: Catalog, model: str | None, version: str | None) -> tuple[Model, Version]:
    record = existing_model(catalog, model)
    if version is None:
        names = ", ".join(v.name for v in record.existing_versions) or "none"
        raise UsageError(f"which version of model {record.name}? There are {names}")
    return record, existing_version(record, version)


def _report_version(record: Model, version: str, as_json: bool) -> int:
    if as_json:
        terminal.print_json(version_to_dict(record, record.version(version)))
    else:
        default = f"the default is {record.default}" if record.default else "there is no default"
        terminal.out(f"version {version} of model {record.name} is {record.version(version).state}; {default}")
    return DONE


def version_to_dict(model: Model, version: Version, states: server_status.ServerStates | None = None) -> dict[str, Any]:
    """Return a version as a JSON object, with its state on each server if `states` is given."""
    recorded = ("origin", "jobId", "createTime", "createdBy", "size", "errorMessage", "manifest")
    result = {"model": model.name, "version": version.name, "state": version.state, "isDefault": model.default == version.name}
    result |= {key: getattr(version, key) for key in recorded}
    if states is not None:
        result["servers"] = [asdict(each) for each in states.get((model.name, version.name), [])]
    return result
