"""SSH connections to hosts, by Fabric: with the stack's ssh_config, key and known_hosts, never the user's."""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import paramiko
from fabric import Config, Connection

from infra.inventory import Inventory
from ops.cluster.fanout import OnDone, Outcome, fan_out, first_of
from ops.errors import HostError, SeveralHostsError, UsageError

T = TypeVar("T")
# Errors are raised; paramiko's threads would also print them with a traceback.
logging.getLogger("paramiko").addHandler(logging.NullHandler())
# Time limits of the TCP connection, then of sshd's banner and the login: all hosts of a machine may be busy.
CONNECT_SECONDS = 15
SSHD_SECONDS = 20
COMMAND_SECONDS = 60.0
"""The time limit of a short command on a host: longer than connecting to a slow one may take."""
_STAGGER_SECONDS = 0.7
# A host that loses power closes no connection: it counts as broken after this long without an answer to keepalives.
_SILENT_SECONDS = 30
_CHUNK = 32_768
_BURST = _WINDOW = 262_144
_CONNECTION_ERRORS = (paramiko.SSHException, EOFError, OSError)
ADVICE = "run pulumi up, which brings back what is missing"


@dataclass(frozen=True)
class CommandResult:
    """The result of a command on a host. `output` is its stdout and stderr in one."""

    host: str
    exit_code: int
    output: str


class Stream:
    """A command that runs on a host, with one window of output in flight; HostError if the connection breaks."""

    def __init__(self, host: str, connection: Any, command: str) -> None:
        self.host = host
        with self._as_host_error():
            self._channel = connection.transport.open_session(window_size=_WINDOW)
            self._channel.exec_command(command)

    def pieces(self) -> Iterator[bytes]:
        """Yield the command's output, until it ends."""
        with self._as_host_error():
            while data := self._channel.recv(_CHUNK):
                yield data
        if self.exit_code < 0:
            raise HostError(self.host, _no_exit_code(self._channel))

    @property
    def exit_code(self) -> int:
        """The command's exit code, once its output is read; below 0 if the connection broke or a signal ended it."""
        return int(self._channel.recv_exit_status())

    @property
    def stderr(self) -> str:
        """The beginning of the command's stderr."""
        return str(self._channel.recv_stderr(_CHUNK).decode("utf-8", "replace")) if self._channel.recv_stderr_ready() else ""

    def finish(self) -> None:
        """Close the command's stdin."""
        with contextlib.suppress(*_CONNECTION_ERRORS):  # the reader gets the error
            self._channel.shutdown_write()

    def close(self) -> None:
        """Close the channel, whether the command has ended or not."""
        with contextlib.suppress(*_CONNECTION_ERRORS):
            self._channel.close()

    @contextlib.contextmanager
    def _as_host_error(self) -> Iterator[None]:
        try:
            yield
        except _CONNECTION_ERRORS as error:
            raise HostError(self.host, describe_break(error)) from error


def send_bursts(channel: Any, data: bytes, progress: Callable[[int], None] = lambda _: None) -> None:
    """Send the data in bursts: for each packet, `sendall` copies all the data that is left."""
    for start in range(0, len(data), _BURST):
        channel.sendall(piece := data[start : start + _BURST])
        progress(len(piece))


def connection_loss(channel: Any) -> str | None:
    """Return why a command without an exit code lost its connection; None if a signal ended it."""
    transport = channel.get_transport()
    if transport.saved_exception is None and transport.is_active():
        return None
    return describe_break(transport.saved_exception)


def _no_exit_code(channel: Any) -> str:
    """Return why a command has no exit code."""
    return connection_loss(channel) or "reports that the command was killed, as when memory is short"


def describe_break(error: BaseException | None) -> str:
    """Describe a broken connection and its cause."""
    return "broke off" if error is None else f"broke off: {str(error) or type(error).__name__}"


class _Connection(Connection):  # type: ignore[misc]  # Fabric has no types
    """Fabric's connection, except that a ProxyCommand talks through a socket, as OpenSSH's does.

    paramiko's own ProxyCommand spins for ever once the command has ended.
    """

    def open_gateway(self) -> Any:
        if not isinstance(self.gateway, str):
            return super().open_gateway()
        ours, theirs = socket.socketpair()
        with theirs:
            # A session of its own keeps Ctrl-C from ending the connection, which cleaning up needs. ssh_config is our own.
            argv = ["/bin/sh", "-c", f"exec {self.gateway}"]
            end = theirs.fileno()
            self._set(_proxy=subprocess.Popen(argv, stdin=end, stdout=end, start_new_session=True))
        return ours


class _SSHConfig(paramiko.SSHConfig):
    """The stack's ssh_config. paramiko would look up this machine's own name for each key's path, which can take seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.TOKENS_BY_CONFIG_KEY = {k: tokens for k, tokens in self.TOKENS_BY_CONFIG_KEY.items() if k != "identityfile"}


def _transport(*arguments: Any, **settings: Any) -> paramiko.Transport:
    """Return paramiko's transport, whose key exchange has the time limit of sshd's other answers."""
    transport = paramiko.Transport(*arguments, **settings)
    transport.handshake_timeout = SSHD_SECONDS
    return transport


class Fleet:
    """Connections to the hosts of one inventory, opened when first used and kept for the command's life."""

    def __init__(self, inventory: Inventory) -> None:
        self.inventory = inventory
        folder = inventory.folder
        ssh_config, known_hosts = folder / "ssh_config", folder / "known_hosts"
        for path in (ssh_config, known_hosts):
            if not path.is_file():
                raise UsageError(f"{path} is missing: run pulumi up")
        self._known_hosts = paramiko.HostKeys(str(known_hosts))
        self._ssh_config = _SSHConfig.from_path(str(ssh_config))
        self._addresses = {host.name: host.address for host in inventory.hosts}
        self._open: dict[str, Any] = {}
        self._opening: dict[str, threading.Lock] = defaultdict(threading.Lock)
        self._failed: dict[str, HostError] = {}
        self._lock = threading.Lock()
        self._key: paramiko.PKey | None = None

    def connection(self, name: str) -> Any:
        """Return the open connection to a host; HostError if none can be opened."""
        with self._lock:
            opening = self._opening[name]
            previous_failure = self._failed.get(name)
        with opening:  # concurrent callers for this host get the same connection or the same error
            with self._lock:
                existing = self._open.get(name)
                if existing is not None and existing.is_connected:
                    return existing
                failed = self._failed.get(name)
                if failed is not None and failed is not previous_failure:
                    raise failed
                connection = self._new(name)
            try:
                self._connect(name, connection)
            except HostError as error:
                self._failed[name] = error
                raise
            with self._lock:
                self._open[name] = connection
            return connection

    def run(
        self,
        name: str,
        command: str,
        stdin: bytes | tuple[bytes, ...] | None = None,
        progress: Callable[[int], None] = lambda _: None,
    ) -> CommandResult:
        """Run a command line on a host over one channel.

        Args:
            stdin: what the command reads; parts are sent one after the other, and not copied into one.
            progress: is called with the number of bytes of each piece that was sent.
        """
        connection = self.connection(name)
        try:
            channel = connection.create_session()
            with channel:
                channel.set_combine_stderr(True)
                channel.exec_command(command)
                if stdin is not None:
                    # If a command ends before it has read all of it, its exit code says why.
                    with contextlib.suppress(OSError):
                        for part in (stdin,) if isinstance(stdin, bytes) else stdin:
                            send_bursts(channel, part, progress)
                channel.shutdown_write()
                output = b"".join(iter(lambda: channel.recv(_CHUNK), b""))
                if (exit_code := int(channel.recv_exit_status())) >= 0:
                    return CommandResult(name, exit_code, output.decode("utf-8", "replace"))
                why, cause = _no_exit_code(channel), None
        except _CONNECTION_ERRORS as error:
            why, cause = describe_break(error), error
        with self._lock:  # paramiko may report it as open a moment longer
            if self._open.get(name) is connection:
                del self._open[name]
        raise HostError(name, f"({self._addresses[name]}) {why}") from cause

    def stream(self, name: str, command: str) -> Stream:
        """Start a command line on a host, whose output is read as it comes."""
        return Stream(name, self.connection(name), command)

    def check_output(
        self,
        name: str,
        command: str,
        what: str,
        stdin: bytes | tuple[bytes, ...] | None = None,
        progress: Callable[[int], None] = lambda _: None,
    ) -> str:
        """Return a command's output; if it fails, HostError, which begins with `what` and has the output's end."""
        result = self.run(name, command, stdin, progress)
        if result.exit_code:
            # sudo refuses a program that the host does not know.
            unknown = any(line.startswith("sudo: ") for line in result.output.strip().splitlines()[-1:])
            older = "; it is not ready, or older than this scaletier (pulumi up)" if unknown else ""
            raise HostError(name, f"{what} with exit code {result.exit_code}{older}", result.exit_code, result.output)
        return result.output

    def each(self, names: Iterable[str], work: Callable[[str], T], seconds: float, on_done: OnDone | None = None) -> Outcome[T]:
        """Run `work` for every host at once."""
        return fan_out(names, work, seconds, on_done)

    def connect_each(self, names: Iterable[str], on_done: OnDone | None = None) -> Outcome[Any]:
        """Connect to all of the hosts."""
        return self.each(names, self.connection, COMMAND_SECONDS, on_done)

    def any_connection(self) -> Any:
        """Return an open connection, else one to the first host that answers; the chief is tried first."""
        with self._lock:
            for existing in self._open.values():
                if existing.is_connected:
                    return existing
        try:
            return first_of(self.inventory.replicas, self.connection, _STAGGER_SECONDS, COMMAND_SECONDS)
        except HostError as error:
            raise SeveralHostsError({error.host: error}, f"no other host can be reached either; {ADVICE}") from error

    def close(self) -> None:
        """Close the open connections, without waiting."""
        with self._lock:
            connections = list(self._open.values())
        for connection in connections:
            connection.close()

    def _new(self, name: str) -> Any:
        own = {"look_for_keys": False, "allow_agent": False}
        limits = {"auth_timeout": SSHD_SECONDS, "banner_timeout": SSHD_SECONDS, "transport_factory": _transport}
        # Lazy: no fabric.yaml and no FABRIC_ variable of the user may change how a cluster is reached. Connections share no
        # config: a new one sets values in its config, which is empty meanwhile, so another thread's connection would fail.
        config = Config(ssh_config=self._ssh_config, lazy=True)
        connection = _Connection(name, config=config, connect_timeout=CONNECT_SECONDS, connect_kwargs={**own, **limits})
        for path in connection.connect_kwargs.pop("key_filename", []):
            connection.connect_kwargs["pkey"] = self._load_key(Path(path).expanduser())
        connection.client.set_missing_host_key_policy(paramiko.RejectPolicy())  # Fabric's own would accept any
        connection.client.get_host_keys().update(self._known_hosts)
        return connection

    def _load_key(self, path: Path) -> paramiko.PKey:
        if self._key is None:
            try:
                self._key = paramiko.PKey.from_path(path)
            except (OSError, ValueError, paramiko.SSHException) as error:
                raise UsageError(f"the key {path} cannot be read ({error}): run pulumi up") from None
        return self._key

    def _connect(self, name: str, connection: Any) -> None:
        where = f"({self._addresses.get(name, name)})"
        try:
            connection.open()
            _set_socket_options(connection.transport)
        except paramiko.BadHostKeyException:
            raise HostError(
                name, f"{where} has another host key than is recorded here: if another user ran pulumi up, run fab connect"
            ) from None
        except paramiko.AuthenticationException:
            raise HostError(
                name, f"{where} refuses the stack's key: if another user recreated the stack, run fab connect"
            ) from None
        except paramiko.SSHException as error:
            if "not found in known_hosts" in str(error):
                raise HostError(name, f"{where} has a host key that is not recorded here: run fab connect") from None
            # A proxy that ends, or an sshd that has not started yet, sends no banner.
            why = "" if "protocol banner" in str(error) else f" as an SSH server does: {error}"
            raise HostError(name, f"{where} does not answer{why}") from error
        except (OSError, EOFError, socket.gaierror) as error:
            raise HostError(name, f"{where} does not answer") from error


def _set_socket_options(transport: paramiko.Transport) -> None:
    """End a silent connection, and send small messages at once: the second of two otherwise waits 40 ms for the first's ACK."""
    transport.set_keepalive(_SILENT_SECONDS // 3)
    sock: Any = transport.sock
    if sock.family in (socket.AF_INET, socket.AF_INET6):  # else it is a proxy's
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_SECONDS * 1000)
