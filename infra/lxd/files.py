"""Files on hosts, read and written by LXD's or Incus's API."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import pylxd.exceptions

from infra.lxd.api import LxdError, is_not_found

_Answer = TypeVar("_Answer")
_ATTEMPTS = 3
_PAUSE = 0.5  # seconds


def read_file(host: Any, path: str) -> bytes | None:
    """Return a file on a host, or None if there is none."""
    with suppress(pylxd.exceptions.NotFound):
        return retry_request(lambda: bytes(host.files.get(path)))
    return None


def list_folder(host: Any, path: str) -> list[str]:
    """Return the names in a folder on a host; the path itself if it is a file; none if there is no such folder."""
    try:
        answer = retry_request(lambda: host.api.files.get(params={"path": path}))
    except pylxd.exceptions.LXDAPIException as error:
        if is_not_found(error):
            return []
        raise
    kinds = {answer.headers.get(f"X-{daemon}-type") for daemon in ("LXD", "Incus")}
    if "directory" not in kinds:
        return [path]
    return list(json.loads(answer.content)["metadata"] or [])


def retry_request(request: Callable[[], _Answer]) -> _Answer:
    """Send a request about files, which must be idempotent, and return its answer.

    LXD accesses a host's files by a process, forkfile, that ends when it is idle; a request at that moment fails, and is sent
    again. LxdError after the last attempt, so that the failure cannot be taken for a missing file.
    """
    for _ in range(_ATTEMPTS):
        try:
            return request()
        except pylxd.exceptions.LXDAPIException as error:
            if "forkfile" not in str(error):
                raise
        time.sleep(_PAUSE)
    raise LxdError("LXD does not read a host's files, as its process for them ended several times: try again")
