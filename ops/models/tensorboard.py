"""`fab tensorboard`: run TensorBoard on the chief's host, where it reads the bucket, and forward a local port to it."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, NoReturn

import paramiko

from infra.inventory import Host
from jobs.paths import PYTHON
from ops import terminal
from ops.cluster import root_helper
from ops.cluster.cluster import ClusterClient
from ops.cluster.forward import LOOPBACK, Forward, local_ports, open_channel
from ops.cluster.ledger import existing_job
from ops.cluster.output import WITHOUT_TENSORFLOW, find
from ops.cluster.remote import Fleet, connection_loss, describe_break
from ops.errors import DONE, HostError, OpsError, UsageError

_PORT = 6006
_RELOAD_SECONDS = 5
_START_SECONDS = 120.0
_KEEPALIVE_SECONDS = 10.0
_KEEPALIVE_TIMEOUT = 60
# Runs on the host. Ends when stdin closes (fab was killed), or after a minute without a keepalive (fab's machine is off).
_SERVE = f"""
import os, select, signal, sys, threading, time, types
def watch():
    while select.select([0], [], [], {_KEEPALIVE_TIMEOUT})[0] and os.read(0, 64):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)
    os._exit(1)
threading.Thread(target=watch, daemon=True).start()
sys.argv[0] = "tensorboard"
{WITHOUT_TENSORFLOW}
from tensorboard.main import run_main
run_main()
"""


def command(host: Host, logdir: str, title: str) -> str:
    """Return the command that runs TensorBoard on a host, where it may only read; it prints the free port that it takes."""
    flags = ["--logdir", logdir, "--window_title", title, "--host", LOOPBACK, "--port", "0"]
    load_flags = ["--reload_interval", str(_RELOAD_SECONDS), "--load_fast=false"]  # the fast loader cannot read every bucket
    scheme, is_url, _ = logdir.partition("://")
    # fsspec would cache the sizes and names that it read first.
    uncached = [f'FSSPEC_{scheme.upper()}={{"use_listings_cache": false}}'] if is_url else []
    return root_helper.reader_command(host, ["env", *uncached, PYTHON, "-c", _SERVE, *flags, *load_flags])


def tensorboard(cluster: ClusterClient, job_id: str | None, every_job: bool, port: str | None) -> int:
    """Show a job, or all jobs, in TensorBoard until Ctrl-C."""
    ports = local_ports(port, _PORT)
    if job_id and every_job:
        raise UsageError("--job shows one job and --all every one: use only one of them")
    inventory = cluster.inventory
    logdir, title = (f"{inventory.bucket}/jobs", inventory.stack) if every_job else _logdir(cluster, job_id)
    fleet, chief = cluster.fleet, inventory.chief.name
    line = command(inventory.chief, logdir, title)
    with contextlib.suppress(KeyboardInterrupt), Forward(partial(open_channel, fleet, chief), ports) as forward:
        announced = serves = False
        while True:
            try:
                with _serving(fleet, chief, line) as server:
                    with terminal.ProgressLine(f"starting TensorBoard on {chief}"):
                        forward.remote_port = server.await_port()
                    serves = True
                    if not announced:
                        terminal.out(f"http://{LOOPBACK}:{forward.port}/")
                        sys.stdout.flush()
                        terminal.note(f"TensorBoard on {chief} shows {logdir}; Ctrl-C ends it")
                    announced = True
                    server.await_end()
            except _ConnectionLostError as error:
                if not serves:
                    raise
                serves = False
                terminal.note(f"{error}; starting TensorBoard again")
    return DONE


def _logdir(cluster: ClusterClient, job_id: str | None) -> tuple[str, str]:
    """Return the path of a job's summaries on hosts, and the job's id; OpsError if it has no summaries."""
    record = existing_job(cluster.ledger, job_id)
    output = find(cluster, record)
    if not output.summaries:
        later = "" if record.final else ", try again in a moment"
        raise OpsError(f"job {record.jobId} ({record.state}) has no summaries in {output.job_dir}{later}")
    return output.job_dir, record.jobId


class _ConnectionLostError(HostError):
    """The connection to TensorBoard was lost."""


@contextlib.contextmanager
def _serving(fleet: Fleet, name: str, line: str) -> Iterator[_Server]:
    """Run TensorBoard on a host by this command line; its stdin closes with the context."""
    connection = fleet.connection(name)
    try:
        channel = connection.create_session()
        with contextlib.closing(channel):
            channel.set_combine_stderr(True)
            channel.exec_command(line)
            yield _Server(name, channel)
    except (paramiko.SSHException, EOFError, OSError) as error:
        raise _ConnectionLostError(name, describe_break(error)) from error


class _Server:
    """TensorBoard on a host, at the other end of a channel."""

    def __init__(self, name: str, channel: Any) -> None:
        self.name, self._channel, self._output = name, channel, ""

    def await_port(self) -> int:
        """Return the host's port on which TensorBoard listens; HostError if it does not start in time."""
        deadline = time.monotonic() + _START_SECONDS
        while not (announcement := re.search(r" at http://\S+:(\d+)/", self._output)):
            if time.monotonic() > deadline:
                raise HostError(self.name, f"has not started TensorBoard in {_START_SECONDS:.0f} s", output=self._output)
            self._receive(1.0)
        return int(announcement[1])

    def await_end(self) -> NoReturn:
        """Wait until TensorBoard (HostError) or the connection to it (_ConnectionLostError) ends."""
        while True:
            self._receive(_KEEPALIVE_SECONDS)

    def _receive(self, seconds: float) -> None:
        """Read TensorBoard's output for at most `seconds`, and send a keepalive."""
        self._channel.settimeout(seconds)
        try:
            received = self._channel.recv(1 << 15)
        except TimeoutError:
            received = None
        if received == b"":
            if self._channel.recv_exit_status() >= 0:
                raise HostError(self.name, "has ended TensorBoard", output=self._output)
            if why := connection_loss(self._channel):
                raise _ConnectionLostError(self.name, why)
            raise HostError(self.name, "has killed TensorBoard, as when memory is short")
        if received:
            self._output = (self._output + received.decode("utf-8", "replace"))[-2000:]
        with contextlib.suppress(OSError):  # the next call reports the end of TensorBoard
            self._channel.sendall(b"\n")
