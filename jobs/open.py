"""A store by its URL."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jobs.folder import LocalStore
from jobs.store import StoreError

if TYPE_CHECKING:
    from jobs.objects import Objects


def open_store(url: str) -> LocalStore | Objects:
    """Return the store in a directory or in a bucket of Google's.

    The URL is `/bucket`, `file:///bucket`, `gs://name` or `gs://name/folder`.
    """
    scheme, separator, rest = url.partition("://")
    if url and not separator:
        return LocalStore(Path(url))
    if scheme == "file" and rest.startswith("/"):
        return LocalStore(Path(rest))
    if scheme == "gs":
        from jobs.objects import Objects  # some megabytes, and of no use to a host whose bucket is a directory

        return Objects(url)
    raise StoreError(f"{url!r} is no store: a directory, file:///directory, or gs://bucket")
