"""Run a trainer as real processes on loopback, one for each replica, with a log each."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self, TypeVar

from forked import Program
from waiting import limit, wait_for

SMALL_METRIC = r"(?:0\.\d{3}|0\.000\d+|\d\S*e-\d\d)"
"""A metric below 1 in a log line: three decimals, or three digits of one below 0.0005."""
METRIC = rf"(?:\d+\.\d{{3}}|{SMALL_METRIC})"
SECONDS = 240.0  # the limit of each wait on a typical machine
PEERS = (("worker", 0), ("chief", 0))
ROLES = {"async": (("ps", 0), *PEERS), "sync": PEERS, "model-parallel": PEERS}
"""The replicas of a small job, by strategy."""
Value = TypeVar("Value")


def reserve_port() -> socket.socket:
    """Return a socket that is bound to a free loopback port but does not listen.

    Until it is closed the port is reserved; only a server that also sets SO_REUSEPORT can listen on it.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


class Job:
    """Run `python -m MODULE FLAGS` for every replica, until the end of a `with` statement.

    `flags` and `environ` apply to processes that are started later; a MODULE may be one of this folder.
    """

    def __init__(self, directory: Path, module: str, roles: Sequence[tuple[str, int]], *flags: str, **environ: str) -> None:
        self.directory, self.module, self.roles, self.flags = directory, module, roles, flags
        folders = {"JOB_DIR": str(directory / "job"), "PYTHONPATH": str(Path(__file__).parent)}
        self.environ = {**folders, "TF_GRPC_REUSE_PORT": "true", **environ}
        self.processes: dict[str, Program] = {}
        self.ports = [reserve_port() for _ in roles]
        self.cluster: dict[str, list[str]] = {}
        for (role, _), port in zip(roles, self.ports, strict=True):
            self.cluster.setdefault(role, []).append(f"127.0.0.1:{port.getsockname()[1]}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        for port in self.ports:
            port.close()

    def start(self, role: str, index: int) -> None:
        """Start a replica with an empty log."""
        config = {"cluster": self.cluster, "task": {"type": role, "index": index}}
        env = {**os.environ, **self.environ, "TF_CONFIG": json.dumps(config)}
        log = self.directory / f"{role}-{index}.log"
        self.processes[f"{role}-{index}"] = Program("-m", self.module, *self.flags, env=env, folder=Path.cwd(), log=log)

    def start_all(self) -> None:
        for role, index in self.roles:
            self.start(role, index)

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()

    def await_line(self, name: str, pattern: str) -> re.Match[str]:
        return self._await(name, pattern, lambda: re.search(pattern, self.log(name), re.MULTILINE))

    def await_step(self, name: str, step: int) -> int:
        """Wait until a replica's log has reached a step, and return its last step."""

        def read_step() -> int | None:
            steps = re.findall(r"^Train \[\w+/\d+\], step (\d+):", self.log(name), re.MULTILINE)
            return int(steps[-1]) if steps and int(steps[-1]) >= step else None

        return self._await(name, f"step {step}", read_step)

    def _await(self, name: str, what: str, find: Callable[[], Value | None]) -> Value:
        """Wait until `find` returns a value, and return that.

        Raises:
            AssertionError: the replica or the chief has ended without it, or the limit has passed; both logs are included.
        """

        def find_or_fail() -> Value | None:
            ended_replicas = [
                one for one in (name, "chief-0") if one in self.processes and self.processes[one].poll() is not None
            ]
            value = find()
            assert value is not None or not ended_replicas, f"{ended_replicas} ended without {what}"
            return value

        try:
            return wait_for(find_or_fail, f"{what} of {name}", SECONDS)
        except AssertionError as error:
            raise AssertionError(f"{error}:\n{self.log(name)}\nchief-0:\n{self.log('chief-0')}") from None

    def wait(self, name: str) -> int:
        """Wait until a replica ends by itself, and return its exit code; an AssertionError includes its log."""
        try:
            return self.processes[name].wait(limit(SECONDS))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{name} did not end:\n{self.log(name)}") from None

    def terminate(self, name: str, number: int = signal.SIGTERM) -> int:
        self.processes[name].send_signal(number)
        return self.wait(name)


@contextlib.contextmanager
def slow_answers(address: str, seconds: float) -> Iterator[str]:
    """Yield a proxy of a server whose answers are delayed by `seconds`; pending ones are lost when the server ends."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def forward_request(from_client: asyncio.StreamReader, server: asyncio.StreamWriter) -> None:
        while chunk := await from_client.read(2**16):
            server.write(chunk)
            await server.drain()

    async def forward_answer(from_server: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        while chunk := await from_server.read(2**16):
            loop.call_later(seconds, client.write, chunk)

    async def relay(from_client: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            from_server, server = await asyncio.open_connection(*address.split(":"))
            directions = (
                asyncio.ensure_future(forward_request(from_client, server)),
                asyncio.ensure_future(forward_answer(from_server, client)),
            )
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
            server.transport.abort()
        client.transport.abort()

    listening = asyncio.run_coroutine_threadsafe(asyncio.start_server(relay, "127.0.0.1", 0), loop).result()
    try:
        host, port = listening.sockets[0].getsockname()
        yield f"{host}:{port}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
