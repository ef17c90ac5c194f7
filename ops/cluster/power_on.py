"""Start stopped hosts as the operator, with a token that the cloud's own tool prints."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Collection, Mapping

from infra.inventory import Inventory, PowerAccess
from jobs.host_power import NoAnswerError, StartClient
from ops import terminal
from ops.cluster.fanout import fan_out
from ops.cluster.remote import Fleet
from ops.errors import HostError, SeveralHostsError, UsageError

_TOKEN_SECONDS = 60.0
_REQUEST_SECONDS = 90.0
_POLL_SECONDS = 5.0
# An accepted start may fail, and a repeated request does no harm.
_RETRY_SECONDS = 60.0
START_SECONDS = 300.0
"""The time limit from a host's start until it answers."""


def startable_hosts(inventory: Inventory, names: Collection[str]) -> list[str]:
    """Return those of these hosts that this machine can start."""
    requests = inventory.start_requests()
    return [name for name in names if requests and name in requests.starts]


def start_and_wait(
    fleet: Fleet,
    names: Collection[str],
    start: Callable[[str], None] | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Mapping[str, Exception]:
    """Start these hosts, and wait until they answer; UsageError without a token, SeveralHostsError if a start is refused.

    The start of a host that does not answer is requested again each minute, and at the next poll if the request had no answer.

    Returns:
        The reason by host, for those that do not answer in time.
    """
    with terminal.ProgressLine(f"starting {terminal.plural(len(names), 'host')}", always=True) as step:
        request_start = start or _build_start_request(fleet.inventory)
        deadline, retry_time, pending = clock() + START_SECONDS, clock() + _RETRY_SECONDS, list(names)
        unanswered = fan_out(names, request_start, _REQUEST_SECONDS).failures
        if refused := {name: error for name, error in unanswered.items() if not _is_unanswered(error)}:
            raise SeveralHostsError({n: HostError(n, f"is not started: {e}") for n, e in refused.items()}, code=UsageError.code)
        for name, error in unanswered.items():
            terminal.note(f"{name} may not be started: {error}; it is asked for again")
        while True:
            failures = fleet.connect_each(pending).failures
            pending = [name for name in pending if name in failures]
            step.detail = f"{len(names) - len(pending)} of {len(names)}"
            if not pending or clock() >= deadline:
                return failures
            due = pending if clock() >= retry_time else [name for name in pending if name in unanswered]
            if clock() >= retry_time:
                retry_time += _RETRY_SECONDS
            failed = fan_out(due, request_start, _REQUEST_SECONDS).failures
            unanswered = {name: error for name, error in failed.items() if _is_unanswered(error)}
            sleep(_POLL_SECONDS)


def _is_unanswered(error: Exception) -> bool:
    return isinstance(error, (NoAnswerError, HostError))  # HostError is a timeout of fan_out


def _build_start_request(inventory: Inventory) -> Callable[[str], None]:
    requests, power = inventory.start_requests(operator=True), inventory.power
    assert requests is not None
    assert power is not None
    token = _token(power)  # once, as concurrent gcloud commands fail
    return StartClient(requests, lambda: token).request_start


def _token(power: PowerAccess) -> str:
    """Return the operator's token; UsageError if the tool is missing, or prints none."""
    command = power.token_command
    try:
        process = subprocess.run(
            ["/bin/sh", "-c", command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TOKEN_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"`{command}` gives no token within {_TOKEN_SECONDS:g} s") from None
    if process.returncode or not process.stdout.strip():
        error_lines = process.stderr.strip().splitlines()[-1:] or [f"it ended with {process.returncode}"]
        raise UsageError(f"`{command}` gives no token ({error_lines[0]})")
    return process.stdout.strip()
