"""Read the records of models in the bucket, and change them by conditional writes."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable

from jobs import paths
from jobs.bucket import Conflict, RecordStore
from jobs.model_records import EVERY_MODEL, NAME, Model, ModelError, model_of, path_of
from jobs.serialization import RecordError

_TRIES = 50
_DEPLOYMENT_ID = re.compile(r"[A-Za-z0-9]{0,64}")


class Catalog:
    """The records of models in the bucket. All methods raise BucketError if the bucket fails."""

    def __init__(self, store: RecordStore, sleep: Callable[[float], None] = time.sleep) -> None:
        self._store, self._sleep = store, sleep

    def models(self) -> tuple[list[Model], list[str]]:
        """Return every model by name, and a line about each unreadable record."""
        records, unreadable = [], []
        for path, content in sorted(self._store.scan(EVERY_MODEL).items()):
            try:
                records.append(_model(model_of(path), content))
            except RecordError as error:
                unreadable.append(f"{model_of(path)}: {error}")
        return records, unreadable

    def in_use(self) -> bool:
        """Return True if the bucket has a queue or a job."""
        return self._store.read(paths.QUEUE) is not None or bool(self._store.scan(paths.EVERY_JOB))

    def model(self, name: str) -> Model | None:
        """Return a model, or None if there is none; RecordError if its record is unreadable."""
        item = self._store.read(path_of(name))
        return _model(name, item.content) if item else None

    def change(self, name: str, change: Callable[[Model], Model], create: bool = False) -> Model:
        """Apply a change to the newest record and return the result.

        If another writer has changed the record meanwhile, call `change` again with the newer record; it must be idempotent.
        ModelError if the model does not exist and `create` is False, or if `change` raises it.
        """
        for _ in range(_TRIES):
            item = self._store.read(path_of(name))
            if item is None and not create:
                raise ModelError(f"there is no model {name!r}")
            before = _model(name, item.content) if item else None
            after = change(before or Model(name))
            if after == before:
                return after
            try:
                if item is None:
                    self._store.create(path_of(name), after.to_json())
                else:
                    self._store.replace(path_of(name), after.to_json(), item.version)
            except Conflict:
                self._sleep(random.uniform(0.005, 0.05))  # noqa: S311  nothing is secret here
                continue
            return after
        raise Conflict(path_of(name))


def _model(name: str, content: bytes) -> Model:
    model = Model.from_json(content)
    if model.name != name:
        raise RecordError(f"model.json says that it is that of model {model.name!r}")
    for version in model.versions:
        if not NAME.fullmatch(version.name) or not _DEPLOYMENT_ID.fullmatch(version.token):
            raise RecordError(f"model.json has an invalid version name or deployment id: {version.name!r}, {version.token!r}")
    return model
