"""The model versions of this server: poll the bucket, load the versions to serve, and unload the others."""

from __future__ import annotations

import errno
import math
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from hosts.serving.batcher import Batcher
from hosts.serving.rest import RestError
from hosts.serving.saved import SavedModel, error_reason
from jobs.bucket import Bucket, BucketError, Conflict
from jobs.model_catalog import Catalog
from jobs.model_download import fetch
from jobs.model_records import LoadState, Model, Version, VersionState, folder_of

_RETRY_SECONDS = 1
_RELOAD_SECONDS = 60.0
# These errors of a download mean that this host's disk is full, not that the bucket fails.
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


Load = Callable[[Path], SavedModel]


@dataclass(frozen=True)
class LoadedVersion:
    """A version on this server; only an AVAILABLE one has a model. `deployment` is the id that its record has as `token`."""

    name: str
    state: LoadState
    why: str = ""
    model: SavedModel | None = None
    batcher: Batcher | None = None
    deployment: str = ""
    failures: int = 0
    """The number of failed loads, including those that killed an earlier server process."""
    failed_at: float = math.inf
    """The time of the last failed load, or when this process noticed it."""


@dataclass(frozen=True)
class ServedModel:
    """A model on this server. `default` answers requests that name no version; None if there is no default."""

    default: LoadedVersion | None
    versions: Mapping[str, LoadedVersion]


class ModelManager:
    """The loaded models. One thread calls `reconcile`; any thread may use `find` and `models`, whose results are immutable."""

    def __init__(
        self,
        catalog: Catalog,
        files: Bucket,
        cache: Path,
        load: Load,
        on_batch: Callable[[str, int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare a server without models.

        No other server uses the folder `cache`. `on_batch` is called with the model and the number of rows of each batch.
        """
        self._clock = clock
        self._markers: set[Path] = set()
        self._markers_lock, self._closed = threading.Lock(), False
        self._catalog, self._files, self._cache, self._load, self._on_batch = catalog, files, cache, load, on_batch
        self._models: Mapping[str, ServedModel] = {}
        self.polled = False
        """True once the bucket was read."""
        self.ready = False
        """True from the first poll on after which no version is LOADING, also during later deployments."""

    @property
    def models(self) -> Mapping[str, ServedModel]:
        return self._models

    def versions_of(self, model: str, version: str | None) -> list[LoadedVersion]:
        """Return a model's versions, or the requested one; RestError 404 if it does not exist, 503 before the first poll."""
        served = self._served_model(model)
        if version is None:
            return list(served.versions.values())
        if version not in served.versions:
            names = ", ".join(sorted(served.versions)) or "none"
            raise RestError(404, f"model {model} has no version {version!r} here; there are {names}")
        return [served.versions[version]]

    def find(self, model: str, version: str | None) -> LoadedVersion:
        """Return the version that answers a request; RestError as by `versions_of`, 503 if not loaded yet, 500 if it failed."""
        loaded = self._served_model(model).default if version is None else self.versions_of(model, version)[0]
        if loaded is None or loaded.state is LoadState.LOADING:
            raise RestError(503, f"model {model} is not loaded yet", _RETRY_SECONDS)
        if loaded.state is LoadState.END:
            raise RestError(500, f"version {loaded.name} of model {model} could not be loaded: {loaded.why}")
        return loaded

    def _served_model(self, model: str) -> ServedModel:
        models = self._models
        if model in models:
            return models[model]
        if not self.polled:
            raise RestError(503, "the models are not loaded yet", _RETRY_SECONDS)
        raise RestError(404, f"there is no model {model!r} here; there are {', '.join(sorted(models)) or 'none'}")

    @property
    def idle(self) -> bool:
        """True if the bucket has no model to serve."""
        return self.polled and not self._models

    def reconcile(self) -> None:
        """Load and unload versions by the records in the bucket; log errors of a model or the bucket."""
        try:
            records, unreadable_lines = self._catalog.models()
        except (BucketError, Conflict) as error:
            _log_warning(f"the bucket does not answer: {error}")
            return
        for line in unreadable_lines:
            _log_warning(line)
        unreadable = {line.partition(":")[0] for line in unreadable_lines}
        loadable = {model.name for model in records if _loadable(model)}
        deleted = self._models.keys() - loadable - unreadable
        if deleted and not records and not unreadable_lines and not self._bucket_in_use():
            _log_warning("the bucket is empty, so it is probably not mounted: loaded models are kept")
            return
        if not self.polled and (records or unreadable_lines or self._bucket_in_use()):
            self._remove_unused_folders(loadable | unreadable)
        # Load READY versions first, so that they are served again after a restart: loading a new version may crash the process.
        for state in (VersionState.READY, VersionState.CREATING):
            for model in records:
                if any(version.state is state for version in _loadable(model)):
                    self._reconcile(model, state)
        if deleted:
            self._drop(deleted)
        self.polled = True
        self.ready = self.ready or all(
            loaded.state is not LoadState.LOADING for served in self._models.values() for loaded in served.versions.values()
        )

    def _bucket_in_use(self) -> bool:
        """Return True if the bucket has a queue or a job; a folder without both is probably not mounted."""
        try:
            return self._catalog.in_use()
        except (BucketError, Conflict):
            return False

    def _reconcile(self, model: Model, state: VersionState) -> None:
        """Load the model's versions of this state, and drop versions that are no longer recorded."""
        previous = dict(self._models[model.name].versions) if model.name in self._models else {}
        versions = {
            v.name: previous[v.name] for v in _loadable(model) if v.name in previous and previous[v.name].deployment == v.token
        }
        for version in _loadable(model):
            if version.name not in versions:
                versions[version.name] = LoadedVersion(version.name, LoadState.LOADING, deployment=version.token)
        self._publish(model, versions)
        for version in _loadable(model):
            loaded = versions[version.name]
            if version.state is state and (loaded.state is LoadState.LOADING or self._retry_due(version, loaded)):
                versions = {**versions, version.name: self._load_version(model.name, version, loaded.failures)}
                self._publish(model, versions)
        for name, loaded in previous.items():
            if versions.get(name) is not loaded and loaded.batcher:
                loaded.batcher.close()
        self._tidy(model.name, versions)

    def _publish(self, model: Model, versions: Mapping[str, LoadedVersion]) -> None:
        """Publish the versions of a model. The previous default stays until the recorded one is AVAILABLE."""
        recorded = versions.get(model.default)
        old = self._models[model.name].default if model.name in self._models else None
        default = recorded
        if (recorded is None or recorded.state is not LoadState.AVAILABLE) and old and old.state is LoadState.AVAILABLE:
            same_name = versions.get(old.name)
            default = same_name if same_name and same_name.state is LoadState.AVAILABLE else old if recorded else None
        self._models = {**self._models, model.name: ServedModel(default, dict(versions))}

    def _retry_due(self, version: Version, loaded: LoadedVersion) -> bool:
        """Return True if a failed version is due to be loaded again; the pause doubles after each failure."""
        if version.state is not VersionState.READY or loaded.state is not LoadState.END:
            return False
        return self._clock() - loaded.failed_at >= math.ldexp(_RELOAD_SECONDS, loaded.failures - 1)

    def _load_version(self, model: str, version: Version, failures: int) -> LoadedVersion:
        """Load a version, of which `failures` loads have failed, and return the result."""
        marker = self._cache / f".loading-{model}-{version.name}-{version.token}"
        if not failures and marker not in self._markers and marker.exists():
            later = ", and tries it again later" if version.state is VersionState.READY else ""
            why = f"the server ended while it loaded this{later}; to try it now: fab undeploy, then fab deploy"
            crashes = _load_number(marker)
            return LoadedVersion(
                version.name, LoadState.END, why, deployment=version.token, failures=crashes, failed_at=self._clock()
            )
        try:
            with self._markers_lock:
                if self._closed:
                    return LoadedVersion(version.name, LoadState.LOADING, deployment=version.token)
                self._markers.add(marker)
                self._cache.mkdir(parents=True, exist_ok=True)
                marker.write_text(str(failures + 1))
            folder = self._fetch(model, version)
            saved = self._load(folder)
            batcher = Batcher(saved.run, saved.signatures, on_batch=lambda rows: self._on_batch(model, rows))
        except Exception as error:  # noqa: BLE001  the server continues whatever error a model raises
            if isinstance(error, BucketError) and error.errno not in _DISK_FULL:
                _log_warning(f"version {version.name} of model {model}: the bucket does not answer: {error}")
                return LoadedVersion(version.name, LoadState.LOADING, deployment=version.token)  # retried at the next poll
            why = f"{type(error).__name__}: {error_reason(error)}"
            _log_warning(f"version {version.name} of model {model} cannot be loaded: {why}")
            return LoadedVersion(
                version.name, LoadState.END, why, deployment=version.token, failures=failures + 1, failed_at=self._clock()
            )
        finally:
            marker.unlink(missing_ok=True)
        return LoadedVersion(version.name, LoadState.AVAILABLE, model=saved, batcher=batcher, deployment=version.token)

    def close(self) -> None:
        """Start no more loads, and remove the marker files of running loads: no model caused this end of the process."""
        with self._markers_lock:
            self._closed = True
            for marker in self._markers:
                marker.unlink(missing_ok=True)

    def _fetch(self, model: str, version: Version) -> Path:
        """Return a local folder with the version's files as they were deployed; ValueError if one differs."""
        folder = self._cache / model / f"{version.name}-{version.token}"
        source = folder_of(model, version.name)
        fetch(version.files, folder, lambda path, target: self._files.download(f"{source}/{path}", target))
        return folder

    def _tidy(self, model: str, kept: Mapping[str, LoadedVersion]) -> None:
        names = {f"{loaded.name}-{loaded.deployment}" for loaded in kept.values() if loaded.state is not LoadState.END}
        for folder in (self._cache / model).glob("*"):
            if folder.name not in names:
                shutil.rmtree(folder, ignore_errors=True)

    def _remove_unused_folders(self, names: Collection[str]) -> None:
        """Remove the cached files of models not in `names`: some may have been deleted while the server did not run."""
        for folder in self._cache.glob("*"):
            if folder.is_dir() and folder.name not in names:
                shutil.rmtree(folder, ignore_errors=True)

    def _drop(self, names: Collection[str]) -> None:
        dropped = [loaded for name in names for loaded in self._models[name].versions.values()]
        self._models = {name: model for name, model in self._models.items() if name not in names}
        for loaded in dropped:
            if loaded.batcher:
                loaded.batcher.close()
        for name in names:
            shutil.rmtree(self._cache / name, ignore_errors=True)


def _loadable(model: Model) -> list[Version]:
    """Return the versions that this server must load."""
    return [version for version in model.versions if version.loadable]


def _load_number(marker: Path) -> int:
    """Return the number of the load that wrote this marker file; 1 if the server was killed before writing the number."""
    content = marker.read_bytes()
    return int(content) if content.isdigit() else 1


def _log_warning(line: str) -> None:
    """Write a line to the journal."""
    sys.stderr.write(f"<4>serving: {line}\n")
