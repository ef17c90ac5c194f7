"""Send the notification of a job's end, by the job's leader and in a thread of its own.

A URL gets up to three tries, so it may get the record more than once if answers are lost. The hosts wait at most
NOTIFY_TIMEOUT. If it fails, the job's result stays; the error goes into the job's record.
"""

from __future__ import annotations

import base64
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from http.client import HTTPConnection, HTTPException
from urllib.parse import SplitResult

from jobs.background import BackgroundTask, reason_of
from jobs.notification import SCHEMES, Notification, check_address, check_url, is_url, redact_target
from jobs.times import now

NOTIFY_TIMEOUT = 60.0
"""The most seconds that a host's next job waits for a notification."""
TRY_SECONDS = 5.0
PAUSES = (1.0, 2.0)
"""The seconds between tries to reach a URL: there is one more try than pauses."""
COMMAND_SECONDS = 30.0
LIMIT = 1_000_000
"""The most bytes of a record that a command gets."""
_RETRY_STATUSES = frozenset({408, 425, 429})
_VARIABLE = "SCALETIER_RECORD"
_CHUNK = 100_000  # bytes of each variable: the kernel takes 128 KiB at most

RunCommand = Callable[[list[str], Mapping[str, str]], int]
"""Runs a command line with further variables and returns its exit code; TimeoutError if it takes too long."""


class NotifyError(Exception):
    """One line: why a notification was not sent, and whether another try may help."""

    def __init__(self, why: str, is_retriable: bool = False) -> None:
        super().__init__(why)
        self.is_retriable = is_retriable


def start(
    target: str, words: list[str], record: bytes, run: RunCommand, sleep: Callable[[float], None] = time.sleep
) -> BackgroundTask[Notification]:
    """Begin to send a notification; the result has its error.

    Args:
        target: the URL, or the command as the user gave it.
        words: the command's words with its variables filled in; empty for a URL.
        record: the job's record as JSON, which is sent.
        run: runs the command.
    """
    attempts = 1

    def outcome(error: str) -> Notification:
        return Notification(redact_target(target), now(), attempts, " ".join(error.split())[:500])

    def send() -> Notification:
        nonlocal attempts
        if not is_url(target):
            return outcome(_run_with_record(words, record, run))
        parts = check_url(target)
        while True:
            try:
                post(parts, record)
                return outcome("")
            except NotifyError as error:
                if not error.is_retriable or attempts > len(PAUSES):
                    return outcome(str(error))
            sleep(PAUSES[attempts - 1])
            attempts += 1

    return BackgroundTask(send, NOTIFY_TIMEOUT, outcome)


def _run_with_record(words: list[str], record: bytes, run: RunCommand) -> str:
    """Run a command with the record on stdin; return the error, empty if there is none."""
    if len(record) > LIMIT:
        return f"the record has {len(record)} bytes, and a command is given {LIMIT} at most"
    argv, variables = command_with_stdin(words, record)
    try:
        code = run(argv, variables)
    except TimeoutError:
        return f"it was stopped after {COMMAND_SECONDS:g} s"
    return f"it exited with status {code}" if code else ""


def command_with_stdin(words: list[str], content: bytes) -> tuple[list[str], dict[str, str]]:
    """Return a command line that gives a command this content on stdin, and the variables for it.

    The root program `launcher` starts programs without stdin, so the record is in environment variables. It mounts every bucket
    path that it finds in the environment, so the record is in base32, which has no slash.
    """
    text = base64.b32encode(content).decode()
    variables = {f"{_VARIABLE}_{start // _CHUNK}": text[start : start + _CHUNK] for start in range(0, len(text), _CHUNK)}
    joined = "".join(f"${{{name}}}" for name in variables)
    script = f'record="{joined}"; unset {" ".join(variables)}; printf %s "$record" | base32 -d | "$@"'
    return ["/bin/sh", "-c", script, "sh", *words], variables


def post(parts: SplitResult, body: bytes, timeout: float = TRY_SECONDS) -> None:
    """POST JSON to a URL, at a validated address, without redirects; NotifyError if the answer is not 2xx."""
    assert parts.hostname is not None
    port = parts.port or SCHEMES[parts.scheme]
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    connection = HTTPConnection(parts.hostname, port, timeout=timeout)
    try:
        connection.sock = _connect(parts, port, timeout)
        headers = {"Content-Type": "application/json", "User-Agent": "scaletier"}
        connection.request("POST", path, body, headers)
        status = connection.getresponse().status
    except (OSError, HTTPException, UnicodeError) as error:
        raise NotifyError(reason_of(error), is_retriable=True) from error
    finally:
        connection.close()
    if not 200 <= status < 300:
        raise NotifyError(f"it answered {status}", is_retriable=status >= 500 or status in _RETRY_STATUSES)


def _connect(parts: SplitResult, port: int, timeout: float) -> socket.socket:
    """Connect to the first address that answers, each of them validated. The name may have another address the next time."""
    host, problem = parts.hostname, None
    for address in _addresses(host or "", port):
        try:
            plain = socket.create_connection((address, port), timeout)
        except OSError as error:
            problem = error
            continue
        if parts.scheme == "http":
            return plain
        try:
            return ssl.create_default_context().wrap_socket(plain, server_hostname=host)
        except BaseException:
            plain.close()
            raise
    raise problem or OSError("it has no address")


def _addresses(host: str, port: int) -> Iterator[str]:
    addresses = dict.fromkeys(str(address[0]) for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    for address in addresses:
        try:
            check_address(address)
        except ValueError as error:
            raise NotifyError(str(error)) from None
    yield from addresses
