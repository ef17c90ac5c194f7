"""The versions of this server: it polls the bucket, loads the served ones and unloads the others."""

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
from hosts.serving.catalog import Catalog
from hosts.serving.download import fetch
from hosts.serving.records import LoadState, Model, Version, VersionState, folder_of
from hosts.serving.rest import RestError
from hosts.serving.saved import SavedModel, error_reason
from jobs.bucket import Bucket, BucketError, Conflict

_RETRY_SECONDS = 1
_RELOAD_SECONDS = 60.0
# A download fails with these for want of space on this host, not because of the bucket.
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


Load = Callable[[Path], SavedModel]


@dataclass(frozen=True)
class LoadedVersion:
    """A version on this server; what is not AVAILABLE has no model."""

    name: str
    state: LoadState
    why: str = ""
    model: SavedModel | None = None
    batcher: Batcher | None = None
    deployment: str = ""
    tries: int = 0
    """The number of failed loads. The last was `at`, or this server found then that an earlier one had ended in it."""
    at: float = math.inf


@dataclass(frozen=True)
class ServedModel:
    """A model on this server. `default` answers if a request names no version, None while there is none."""

    default: LoadedVersion | None
    versions: Mapping[str, LoadedVersion]


class ModelManager:
    """The loaded models. One thread calls `reconcile`; all may call `find` and `models`.

    Their results are immutable and are replaced as a whole.
    """

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

        `cache` is a folder of this server's own. `on_batch` is called with each model's batches by their rows.
        """
        self._clock = clock
        self._markers: set[Path] = set()
        self._marking, self._closed = threading.Lock(), False
        self._catalog, self._files, self._cache, self._load, self._on_batch = catalog, files, cache, load, on_batch
        self._models: Mapping[str, ServedModel] = {}
        self.polled = False
        """True once the bucket was read."""
        self.ready = False
        """True once no version was LOADING after a poll; later deployments do not change it."""

    @property
    def models(self) -> Mapping[str, ServedModel]:
        """The present models by name."""
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
        """Return the version that is to answer; RestError as by `versions_of`, and 503 for one that may be loaded soon."""
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
        """Load and unload versions by the records in the bucket. Raises nothing for errors of a model or the bucket."""
        try:
            records, bad = self._catalog.models()
        except (BucketError, Conflict) as error:
            _log_warning(f"the bucket does not answer: {error}")
            return
        for line in bad:
            _log_warning(line)
        broken = {line.partition(":")[0] for line in bad}
        loadable = {model.name for model in records if _loadable(model)}
        deleted = self._models.keys() - loadable - broken
        if deleted and not records and not bad and not self._bucket_in_use():
            _log_warning("the bucket is empty, so it is probably not mounted: loaded models are kept")
            return
        if not self.polled and (records or bad or self._bucket_in_use()):
            self._remove_unused_folders(loadable | broken)
        # Load READY versions first, which were served before a restart: loading a new one may crash the process.
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
        """Load the versions of that state, and drop those that are no longer recorded."""
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
            if version.state is state and (loaded.state is LoadState.LOADING or self._try_again(version, loaded)):
                versions = {**versions, version.name: self._load_version(model.name, version, loaded.tries)}
                self._publish(model, versions)
        for name, loaded in previous.items():
            if versions.get(name) is not loaded and loaded.batcher:
                loaded.batcher.close()
        self._tidy(model.name, versions)

    def _publish(self, model: Model, versions: Mapping[str, LoadedVersion]) -> None:
        """Publish the versions of a model. The previous default stays until the recorded one is AVAILABLE."""
        recorded = versions.get(model.default)
        before = self._models[model.name].default if model.name in self._models else None
        default = recorded
        if (recorded is None or recorded.state is not LoadState.AVAILABLE) and before and before.state is LoadState.AVAILABLE:
            still = versions.get(before.name)
            default = still if still and still.state is LoadState.AVAILABLE else before if recorded else recorded
        self._models = {**self._models, model.name: ServedModel(default, dict(versions))}

    def _try_again(self, version: Version, loaded: LoadedVersion) -> bool:
        """Return True if a version is to be loaded again, after a pause that doubles each time."""
        if version.state is not VersionState.READY or loaded.state is not LoadState.END:
            return False
        return self._clock() - loaded.at >= math.ldexp(_RELOAD_SECONDS, loaded.tries - 1)

    def _load_version(self, model: str, version: Version, tries: int) -> LoadedVersion:
        """Load a version and return the result; `tries` loads have failed before."""
        marker = self._cache / f".loading-{model}-{version.name}-{version.token}"
        if not tries and marker not in self._markers and marker.exists():
            later = ", and tries it again later" if version.state is VersionState.READY else ""
            why = f"the server ended while it loaded this{later}: fab undeploy and fab deploy try it at once"
            ended = _tries_in(marker)
            return LoadedVersion(version.name, LoadState.END, why, deployment=version.token, tries=ended, at=self._clock())
        try:
            with self._marking:
                if self._closed:
                    return LoadedVersion(version.name, LoadState.LOADING, deployment=version.token)
                self._markers.add(marker)
                self._cache.mkdir(parents=True, exist_ok=True)
                marker.write_text(str(tries + 1))
            folder = self._fetch(model, version)
            saved = self._load(folder)
            batcher = Batcher(saved.run, saved.signatures, on_batch=lambda rows: self._on_batch(model, rows))
        except Exception as error:  # noqa: BLE001  whatever a model does, the server continues
            if isinstance(error, BucketError) and error.errno not in _DISK_FULL:
                _log_warning(f"version {version.name} of model {model}: the bucket does not answer: {error}")
                return LoadedVersion(version.name, LoadState.LOADING, deployment=version.token)  # next time
            why = f"{type(error).__name__}: {error_reason(error)}"
            _log_warning(f"version {version.name} of model {model} cannot be loaded: {why}")
            return LoadedVersion(version.name, LoadState.END, why, deployment=version.token, tries=tries + 1, at=self._clock())
        finally:
            marker.unlink(missing_ok=True)
        return LoadedVersion(version.name, LoadState.AVAILABLE, model=saved, batcher=batcher, deployment=version.token)

    def close(self) -> None:
        """Begin no further load, and remove the marker files of those in progress: the process's end is no model's fault."""
        with self._marking:
            self._closed = True
            for marker in self._markers:
                marker.unlink(missing_ok=True)

    def _fetch(self, model: str, version: Version) -> Path:
        """Return the version's files in a local folder, each as it was deployed; ValueError if one differs."""
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
        """Remove the cached files of all models but these: they may have been deleted while no server ran."""
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
    """Return the versions that this server must have."""
    return [version for version in model.versions if version.loadable]


def _tries_in(marker: Path) -> int:
    """Return which try to load a version the marker file is of; 1 if the server ended before that was written."""
    content = marker.read_bytes()
    return int(content) if content.isdigit() else 1


def _log_warning(line: str) -> None:
    """Write a line to the journal."""
    sys.stderr.write(f"<4>serving: {line}\n")
