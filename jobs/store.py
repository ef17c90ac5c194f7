"""The store: small records in the bucket, whose every write is conditional.

A write says what it expects to find: nothing, or just the version that was read. Of two writers one wins; the other gets a
Conflict, reads again, and decides again. So nobody who slept, or whose message was late, can undo what happened since.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Protocol


class Conflict(Exception):  # noqa: N818  it is no error but an answer
    """Somebody else has written since; nothing was changed."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} was changed by somebody else")
        self.name = name


class StoreError(OSError):
    """The bucket does not answer, not in time, or refuses. Whether a write took effect is not known."""


class Item(NamedTuple):
    """An object's content, and which version of it that is."""

    content: bytes
    version: str


class Store(Protocol):
    """Objects by name, such as `jobs/job01/job.json`.

    Every method has a time limit and raises StoreError if it is exceeded. A write that is repeated, because its answer was
    lost, is recognised by its content. So the content must identify its writer, as a lease or a heartbeat does.
    """

    def read(self, name: str) -> Item | None:
        """Return the object, or None if there is none."""

    def read_all(self, names: Iterable[str]) -> dict[str, Item]:
        """Return those of the objects that exist."""

    def scan(self, pattern: str) -> dict[str, bytes]:
        """Return the content of every object that fits a pattern, by name.

        In a pattern such as `jobs/*/job.json`, * is one part of a name.
        """

    def create(self, name: str, content: bytes) -> str:
        """Make an object that is not there yet; its version. Conflict where it is."""

    def replace(self, name: str, content: bytes, version: str) -> str:
        """Replace just this version of an object and return the new version.

        Raises Conflict if the version is another one by now, or the object is gone.
        """


class Files(Protocol):
    """The bucket for large objects, such as packages and logs, each with one writer and no version."""

    def upload(self, name: str, source: Path) -> None:
        """Write an object with the content of a file, whether it exists or not.

        Raises Conflict if its job was deleted and the bucket can detect that.
        """

    def download(self, name: str, target: Path) -> bool:
        """Write an object to a file; False where there is no such object."""

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the sizes of a folder's objects in bytes, by name; empty if there is no such folder."""

    def delete(self, name: str) -> None:
        """Take an object away, which may be gone already."""
