"""A store by its URL."""

from __future__ import annotations

from pathlib import Path

from jobs.folder import Folder
from jobs.objects import Objects
from jobs.store import StoreError


def open_store(url: str) -> Folder | Objects:
    """The store in a directory (`/bucket`, `file:///bucket`) or in a bucket of Google's (`gs://name`, `gs://name/folder`)."""
    scheme, found, rest = url.partition("://")
    if url and not found:
        return Folder(Path(url))
    if scheme == "file" and rest.startswith("/"):
        return Folder(Path(rest))
    if scheme == "gs":
        return Objects(url)
    raise StoreError(f"{url!r} is no store: a directory, file:///directory, or gs://bucket")
