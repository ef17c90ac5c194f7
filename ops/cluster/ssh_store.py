"""The store in a folder of another machine: `jobs.folder` runs there, over one channel.

SFTP can neither compare and replace atomically nor sync a directory. So this module's own source is sent along and run by the
host's Python: the host need not have it, and it is always the operator's version.
"""

from __future__ import annotations

import base64
import json
import shlex
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from jobs import folder, store
from jobs.store import Conflict, Item, StoreError

_PYTHON = "python3"
# Reads the modules from the first line of stdin, and then serves.
_BOOT = """
import json, sys, types
sources = json.loads(sys.stdin.buffer.readline())
for name, source in sources:
    module = types.ModuleType(name)
    module.__path__ = []
    sys.modules[name] = module
    exec(compile(source, name, "exec"), module.__dict__)
sys.modules["ops.cluster.ssh_store"].serve(sys.argv[1], sys.stdin.buffer, sys.stdout.buffer)
"""


class Channel(Protocol):
    """A command's stdin and stdout on another machine.

    Both calls raise OSError or EOFError if the connection breaks.
    """

    def send(self, data: bytes) -> None:
        """Write all of the data to its stdin."""

    def line(self, seconds: float) -> bytes:
        """Return the next line of its stdout. Raises TimeoutError after this time."""

    def close(self) -> None:
        """Be done with it."""


def command(root: str) -> str:
    """Return the command line that serves a folder after it has read `sources`."""
    return shlex.join([_PYTHON, "-I", "-c", _BOOT, root])


def sources() -> bytes:
    """Return the source of the modules that the command runs, in order; it reads them first."""
    import inspect

    modules = [("jobs", ""), *((m.__name__, inspect.getsource(m)) for m in (store, folder, sys.modules[__name__]))]
    return json.dumps(modules).encode() + b"\n"


class SshStore:
    """A store whose calls go through a channel, opened on first use and again after it broke.

    A call over a broken channel is repeated once over another one: a write that had taken effect is recognised.
    """

    def __init__(self, open_channel: Callable[[], Channel], seconds: float = 30.0) -> None:
        """Prepare calls through `open_channel`, which runs `command` on a host that answers."""
        self._open_channel, self._seconds = open_channel, seconds
        self._channel: Channel | None = None
        self._lock = threading.Lock()

    def read(self, name: str) -> Item | None:
        return self.read_all([name]).get(name)

    def read_all(self, names: Iterable[str]) -> dict[str, Item]:
        contents = self._call("read_all", names=list(names))
        return {name: Item(base64.b64decode(content), version) for name, (content, version) in contents.items()}

    def scan(self, pattern: str) -> dict[str, bytes]:
        return {name: base64.b64decode(content) for name, content in self._call("scan", pattern=pattern).items()}

    def create(self, name: str, content: bytes) -> str:
        return str(self._call("create", name=name, content=base64.b64encode(content).decode()))

    def replace(self, name: str, content: bytes, version: str) -> str:
        return str(self._call("replace", name=name, content=base64.b64encode(content).decode(), version=version))

    def _call(self, method: str, **arguments: Any) -> Any:
        request = json.dumps([method, arguments]).encode() + b"\n"
        with self._lock:
            answer = self._once(request, again=True)
        if "conflict" in answer:
            raise Conflict(answer["conflict"])
        if "error" in answer:
            raise StoreError(answer["error"])
        return answer["result"]

    def _once(self, request: bytes, again: bool) -> dict[str, Any]:
        try:
            if self._channel is None:
                self._channel = self._open_channel()
                self._channel.send(sources())
            self._channel.send(request)
            answer: dict[str, Any] = json.loads(self._channel.line(self._seconds))
        except TimeoutError:
            self._drop()
            raise StoreError(f"the bucket does not answer within {self._seconds:g} s") from None
        except (OSError, EOFError, ValueError) as error:
            broke = self._channel is not None
            self._drop()
            if broke and again:
                return self._once(request, again=False)
            raise StoreError(f"the connection to the bucket broke off: {str(error) or type(error).__name__}") from error
        except BaseException:
            self._drop()  # the answer to a call that was interrupted must not be taken for that to the next
            raise
        return answer

    def _drop(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def serve(root: str, requests: Any, answers: Any) -> None:
    """Answer calls, a line of JSON each, until there are no more."""
    import os

    os.umask(0o002)  # the bucket is the group's
    there = folder.LocalStore(Path(root))
    for line in requests:
        method, arguments = json.loads(line)
        answers.write(json.dumps(_answer(there, method, arguments)).encode() + b"\n")
        answers.flush()


def _answer(there: folder.LocalStore, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
    if "content" in arguments:
        arguments["content"] = base64.b64decode(arguments["content"])
    try:
        result = getattr(there, method)(**arguments)
    except Conflict as conflict:
        return {"conflict": conflict.name}
    except StoreError as error:
        return {"error": str(error.strerror or error)}
    if method == "read_all":
        return {"result": {name: [base64.b64encode(i.content).decode(), i.version] for name, i in result.items()}}
    if method == "scan":
        return {"result": {name: base64.b64encode(content).decode() for name, content in result.items()}}
    return {"result": result}
