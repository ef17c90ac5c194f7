"""A trainer as real processes on loopback, one a replica, each with its own log."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

SECONDS = 240.0
Found = TypeVar("Found")


class Job:
    """`python -m MODULE FLAGS` for every replica; `flags` and `environ` are what a process has that is started next."""

    def __init__(self, directory: Path, module: str, roles: Sequence[tuple[str, int]], *flags: str, **environ: str) -> None:
        self.directory, self.module, self.roles, self.flags = directory, module, roles, flags
        self.environ = {"JOB_DIR": str(directory / "job"), **environ}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        with_ports = [(role, socket.create_server(("127.0.0.1", 0))) for role, _ in roles]
        self.cluster: dict[str, list[str]] = {}
        for role, server in with_ports:
            self.cluster.setdefault(role, []).append(f"127.0.0.1:{server.getsockname()[1]}")
            server.close()

    def start(self, role: str, index: int) -> None:
        """Starts a replica, whose log begins anew."""
        config = {"cluster": self.cluster, "task": {"type": role, "index": index}}
        with (self.directory / f"{role}-{index}.log").open("wb") as log:
            self.processes[f"{role}-{index}"] = subprocess.Popen(
                [sys.executable, "-m", self.module, *self.flags],
                env={**os.environ, **self.environ, "TF_CONFIG": json.dumps(config)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def start_all(self) -> None:
        for role, index in self.roles:
            self.start(role, index)

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()

    def await_line(self, name: str, pattern: str) -> re.Match[str]:
        return self._await(name, pattern, lambda: re.search(pattern, self.log(name), re.MULTILINE))

    def await_step(self, name: str, step: int) -> int:
        """The last step that a replica tells of, once that is `step` or more."""

        def reached() -> int | None:
            told = re.findall(r"^Train \[\w+/\d+\], step (\d+):", self.log(name), re.MULTILINE)
            return int(told[-1]) if told and int(told[-1]) >= step else None

        return self._await(name, f"step {step}", reached)

    def _await(self, name: str, what: str, found: Callable[[], Found | None]) -> Found:
        """What is looked for in a log, once it is there; an AssertionError with the log where the chief ends without it."""
        deadline = time.monotonic() + SECONDS
        over = False
        while not over:
            over = time.monotonic() > deadline or any(
                self.processes[one].poll() is not None for one in (name, "chief-0") if one in self.processes
            )
            if (seen := found()) is not None:
                return seen
            time.sleep(0.05)
        raise AssertionError(f"{name} never logged {what}:\n{self.log(name)}\nchief-0:\n{self.log('chief-0')}")

    def wait(self, name: str) -> int:
        """The exit code of a replica that ends by itself; an AssertionError with its log where it does not."""
        try:
            return self.processes[name].wait(SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{name} did not end:\n{self.log(name)}") from None

    def end(self, name: str, number: int = signal.SIGTERM) -> int:
        self.processes[name].send_signal(number)
        return self.wait(name)

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


@contextlib.contextmanager
def slow_answers(address: str, seconds: float) -> Iterator[str]:
    """Another address of the same server, whose answers take so long; those on their way are lost when the server goes."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def ask(asked: asyncio.StreamReader, server: asyncio.StreamWriter) -> None:
        while some := await asked.read(2**16):
            server.write(some)
            await server.drain()

    async def answer(answered: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        while some := await answered.read(2**16):
            loop.call_later(seconds, client.write, some)

    async def relay(asked: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            answered, server = await asyncio.open_connection(*address.split(":"))
            ways = asyncio.ensure_future(ask(asked, server)), asyncio.ensure_future(answer(answered, client))
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            server.transport.abort()
        client.transport.abort()

    listening = asyncio.run_coroutine_threadsafe(asyncio.start_server(relay, "127.0.0.1", 0), loop).result()
    try:
        host, port = listening.sockets[0].getsockname()
        yield f"{host}:{port}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
