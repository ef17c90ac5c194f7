"""Hosts that are stopped, started from here: as the operator, by a token that the target's own tool prints."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Collection, Mapping
from functools import cache

from jobs.power import Asker, PowerError
from ops import terminal
from ops.cluster.inventory import Inventory, Powers
from ops.cluster.remote import Fleet
from ops.errors import HostError, HostsError, UsageError

_TOKEN_SECONDS = 60.0
_PAUSE_SECONDS = 5.0
# A start that was accepted may come to nothing, and one that is asked for twice does no harm.
_AGAIN_SECONDS = 60.0
SECONDS = 300.0
"""So long a host may take from its start until it answers."""


def startable(inventory: Inventory, names: Collection[str]) -> list[str]:
    """Those of these hosts that can be started from here."""
    power = inventory.power()
    return [name for name in names if power and name in power.starts]


def wake(
    fleet: Fleet,
    names: Collection[str],
    start: Callable[[str], str] | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Mapping[str, Exception]:
    """Have these hosts started, those that stay away again each minute, and wait until they answer: why not, by host, of those
    that do not in time.

    HostsError where a start is refused at first.
    """
    ask = start or _start(fleet.inventory)
    with terminal.Step(f"starting {terminal.plural(len(names), 'host')}", always=True) as step:
        refused = {name: HostError(name, f"is not started: {why}") for name in names if (why := ask(name))}
        if refused:
            raise HostsError(refused, code=UsageError.code)
        until, again, away = clock() + SECONDS, clock() + _AGAIN_SECONDS, list(names)
        while True:
            failures = fleet.connect_each(away).failures
            away = [name for name in away if name in failures]
            step.count = f"{len(names) - len(away)} of {len(names)}"
            if not away or clock() >= until:
                return failures
            if clock() >= again:
                again += _AGAIN_SECONDS
                for name in away:
                    ask(name)
            sleep(_PAUSE_SECONDS)


def _start(inventory: Inventory) -> Callable[[str], str]:
    power, powers = inventory.power(operator=True), inventory.powers
    assert power is not None
    assert powers is not None
    return Asker(power, cache(lambda: _token(powers))).start


def _token(powers: Powers) -> str:
    """What the operator shows; PowerError where the tool is not there, or gives none."""
    command = powers.token_command
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TOKEN_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PowerError(f"`{command}` gives no token within {_TOKEN_SECONDS:g} s") from None
    if done.returncode or not done.stdout.strip():
        said = done.stderr.strip().splitlines()[-1:] or [f"it ended with {done.returncode}"]
        raise PowerError(f"`{command}` gives no token ({said[0]})")
    return done.stdout.strip()
