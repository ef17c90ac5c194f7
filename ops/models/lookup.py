"""Find and change the cluster's models by name, with one-line errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from infra.scale_tiers import suggest
from jobs.bucket import Conflict
from jobs.model_catalog import Catalog
from jobs.model_records import Model, ModelError, Version, VersionState
from jobs.serialization import RecordError
from ops.cluster.cluster import ClusterClient
from ops.errors import OpsError, UsageError

NO_MODEL = "no model is deployed: fab deploy --job ID --model mnist --version v1"


def catalog_of(cluster: ClusterClient) -> Catalog:
    """Return the catalog of a cluster's models."""
    return Catalog(cluster.ledger.store)


def existing_model(catalog: Catalog, name: str | None) -> Model:
    """Return a model by name, or the only one if `name` is None; UsageError lists the existing ones."""
    present, _ = models_with_versions(catalog)
    names = [model.name for model in present]
    if name is None:
        if len(present) == 1:
            return present[0]
        raise UsageError(f"which model? There are {', '.join(names)}" if names else NO_MODEL)
    for model in present:
        if model.name == name:
            return model
    raise UsageError(
        f"there is no model {name!r}{suggest(name, names)}; " + (f"there are {', '.join(names)}" if names else NO_MODEL)
    )


def served_model(catalog: Catalog, name: str | None) -> Model:
    """Return a model like `existing_model`; UsageError if no version of it is READY."""
    record = existing_model(catalog, name)
    if not any(version.state is VersionState.READY for version in record.existing_versions):
        states = ", ".join(f"{version.name} is {version.state}" for version in record.existing_versions)
        redeployable = next((version.name for version in record.existing_versions if version.redeployable), None)
        how = f"--version {redeployable} restores it" if redeployable else "--version NAME --job ID deploys another one"
        raise UsageError(f"no version of model {record.name} is served: {states}; fab deploy --model {record.name} {how}")
    return record


def existing_version(record: Model, name: str) -> Version:
    """Return a version of a model; UsageError suggests the closest name and lists the existing ones."""
    try:
        return record.version(name)
    except ModelError as error:
        raise UsageError(f"{error}{suggest(name, [version.name for version in record.existing_versions])}") from None


def models_with_versions(catalog: Catalog) -> tuple[list[Model], list[str]]:
    """Return the models that have a version, and a line about each unreadable record.

    The record of a model without versions only reserves the names of deleted ones.
    """
    records, bad = catalog.models()
    return [model for model in records if model.existing_versions], bad


def find_model(catalog: Catalog, name: str) -> Model | None:
    """Return a model by its name, or None if missing; OpsError if its record cannot be read."""
    with one_line_errors(name):
        return catalog.model(name)


def change_model(catalog: Catalog, name: str, change: Callable[[Model], Model], create: bool = False) -> Model:
    """Change a model, and return it; UsageError if the record refuses the change."""
    with one_line_errors(name):
        return catalog.change(name, change, create)


@contextmanager
def one_line_errors(name: str) -> Iterator[None]:
    """Convert the errors of a model's record: UsageError if it refuses a change, else OpsError."""
    try:
        yield
    except ModelError as error:
        raise UsageError(str(error)) from None
    except RecordError as error:
        raise OpsError(f"the record of model {name} cannot be read: {error}") from None
    except Conflict:
        raise OpsError(f"model {name} was changed by others at each try: try again") from None
