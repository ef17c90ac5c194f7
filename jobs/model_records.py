"""The record of a model, `models/<model>/model.json`, with all its versions and their states.

A write succeeds only if the object has not changed since it was read; otherwise the writer reads it again. So a version name
has one owner, and a model one default. Fields have the names of Cloud ML's `projects.models.versions` if they exist there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, ClassVar

from jobs.serialization import Record
from jobs.times import now

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,127}")
_MODELS = "models"
EVERY_MODEL = f"{_MODELS}/*/model.json"


def path_of(model: str) -> str:
    """Return the path of a model's record in the bucket."""
    return f"{_MODELS}/{model}/model.json"


def model_of(path: str) -> str:
    """Return the name of the model whose record has this path."""
    return path.split("/")[1]


def folder_of(model: str, version: str) -> str:
    """Return the folder of a version's files in the bucket."""
    return f"{_MODELS}/{model}/versions/{version}"


class LoadState(StrEnum):
    """The state of a version on a server, in TensorFlow Serving's terms."""

    LOADING = "LOADING"
    AVAILABLE = "AVAILABLE"
    END = "END"
    """The version could not be loaded."""


class VersionState(StrEnum):
    """The state of a version in the bucket; only a READY one may be the default.

    CREATING: its files are being uploaded, or servers test whether they can load it. UNDEPLOYED: its files are kept, but it is
    not served. DELETED: its files are deleted; its name stays reserved.
    """

    CREATING = "CREATING"
    READY = "READY"
    FAILED = "FAILED"
    UNDEPLOYED = "UNDEPLOYED"
    DELETED = "DELETED"


class ModelError(ValueError):
    """An invalid change of a model; the message is one line with the reason and what is valid."""


@dataclass(frozen=True)
class Version:
    """A version of a model.

    Attributes:
        size: the bytes of its files.
        files: the SHA-256 of each file by its path below the version's folder; empty until all are uploaded.
        manifest: a summary of the manifest of the job that trained it.
        token: the id of the deployment, no secret.
    """

    name: str
    state: VersionState = VersionState.CREATING
    origin: str = ""
    jobId: str = ""
    createTime: str = field(default_factory=now)
    createdBy: str = ""
    size: int = 0
    files: dict[str, str] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)
    errorMessage: str = ""
    token: str = ""

    @property
    def loadable(self) -> bool:
        """True if servers must load it: it is READY, or becomes READY if they can load it."""
        return bool(self.files) and self.state in (VersionState.READY, VersionState.CREATING)

    @property
    def redeployable(self) -> bool:
        """True if its files exist and it is not READY: it was undeployed, or its deployment ended early."""
        return bool(self.files) and self.state is not VersionState.READY


@dataclass(frozen=True)
class Model(Record):
    """A model; `default` is the version that answers a request without a version, empty if there is none."""

    kind: ClassVar[str] = "model.json"

    name: str
    createTime: str = field(default_factory=now)
    default: str = ""
    versions: list[Version] = field(default_factory=list)

    @property
    def existing_versions(self) -> list[Version]:
        """The versions that were not deleted, in the order of their creation."""
        return [version for version in self.versions if version.state is not VersionState.DELETED]

    def version(self, name: str) -> Version:
        """Return the version of that name. Raises ModelError that lists the existing ones."""
        for version in self.existing_versions:
            if version.name == name:
                return version
        names = ", ".join(version.name for version in self.existing_versions) or "none"
        raise ModelError(f"model {self.name} has no version {name!r}; there are {names}")

    def add_version(self, version: Version) -> Model:
        """Return the model with one more version; ModelError if its name is already used."""
        if any(other.name == version.name and other.token == version.token for other in self.versions):
            return self
        for other in self.versions:
            never_uploaded = other.state is VersionState.FAILED and not other.files
            if other.name == version.name and not never_uploaded:
                detail = f"it is {other.state}" if other.state is not VersionState.DELETED else "it was deleted"
                raise ModelError(
                    f"version {version.name} of model {self.name} was made at {other.createTime} ({detail}), and a name is "
                    "used once: take another"
                )
        others = [other for other in self.versions if other.name != version.name]
        return replace(self, versions=[*others, version])

    def set_files(self, name: str, token: str, files: Mapping[str, str], size: int) -> Model:
        """Return the model with the uploaded files of a version; ModelError if another command has changed the version."""
        return self._with_version(replace(self._creating_version(name, token), files=dict(files), size=size))

    def mark_ready(self, name: str, token: str) -> Model:
        """Return the model with a version READY, which is the default if there is none yet. Errors as by `set_files`."""
        model = self._with_version(replace(self._creating_version(name, token), state=VersionState.READY))
        return model if model.default else replace(model, default=name)

    def mark_failed(self, name: str, token: str, why: str) -> Model:
        """Return the model with a version FAILED. Errors as by `set_files`."""
        return self._with_version(replace(self._creating_version(name, token), state=VersionState.FAILED, errorMessage=why))

    def with_default(self, name: str) -> Model:
        """Return the model with another default; ModelError if the version is not served."""
        version = self.version(name)
        if version.state is not VersionState.READY:
            ready = ", ".join(v.name for v in self.existing_versions if v.state is VersionState.READY) or "none"
            raise ModelError(
                f"only a READY version can be the default; {name} of model {self.name} is {version.state}, READY are {ready}"
            )
        return replace(self, default=name)

    def undeploy(self, name: str) -> Model:
        """Return the model with a version UNDEPLOYED; ModelError if it is the default and others are READY."""
        version = self.version(name)
        if not version.files:
            raise ModelError(f"version {name} of model {self.name} is {version.state}: there is nothing to undeploy")
        return self._without_default(name)._with_version(replace(version, state=VersionState.UNDEPLOYED, errorMessage=""))

    def redeploy(self, name: str, token: str) -> Model:
        """Return the model with an unserved version CREATING, so that servers load its files again."""
        version = self.version(name)
        if version.token == token:
            return self
        if not version.redeployable:
            raise ModelError(
                f"version {name} of model {self.name} is {version.state}: only a version that has files and is not "
                "served can be redeployed"
            )
        return self._with_version(replace(version, state=VersionState.CREATING, token=token, errorMessage=""))

    def delete(self, name: str) -> Model:
        """Return the model with a version DELETED; ModelError if it is the default and others are READY."""
        version = self.version(name)
        deleted = replace(version, state=VersionState.DELETED, files={}, size=0, manifest={})
        return self._without_default(name)._with_version(deleted)

    def _creating_version(self, name: str, token: str) -> Version:
        version = self.version(name)
        if version.state is not VersionState.CREATING or version.token != token:
            raise ModelError(f"version {name} of model {self.name} is {version.state} by now: another command changed it")
        return version

    def _without_default(self, name: str) -> Model:
        if self.default != name:
            return self
        others = [v.name for v in self.existing_versions if v.state is VersionState.READY and v.name != name]
        if others:
            raise ModelError(
                f"version {name} is the default of model {self.name}: fab set-default {self.name} {others[-1]} first"
            )
        return replace(self, default="")

    def _with_version(self, version: Version) -> Model:
        return replace(self, versions=[version if other.name == version.name else other for other in self.versions])
