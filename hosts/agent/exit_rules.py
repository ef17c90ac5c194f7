"""Decide whether a program that has ended restarts, by ordered rules; the first match wins.

A status is as `subprocess` has it: 0 to 255 as the program exited, negative if a signal ended it. So a program's own 137 is
not mistaken for a SIGKILL. A code is the shell's: 128 + n if signal n ended the program.
"""

from __future__ import annotations

import signal

from jobs.records import Plan

SIGKILL_STATUS = -int(signal.SIGKILL)
SIGTERM_CODE = 128 + int(signal.SIGTERM)
# What others send to end a program; 143 counts for one that was told to end.
_FROM_OUTSIDE = frozenset({0, SIGTERM_CODE, *(-int(n) for n in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP))})


def shell_code(status: int) -> int:
    """Return the exit code as a shell gives it."""
    return 128 - status if status < 0 else status


def is_restart(plan: Plan, status: int, out_of_memory: bool = False, told: bool = False) -> bool:
    """Return True for an end that starts the program again, False for one that is its own verdict.

    Args:
        plan: has the user's rules, which come first.
        status: how the program ended.
        out_of_memory: True if the kernel killed one of its processes for want of memory.
        told: True if the program was told to end.
    """
    code = shell_code(status)
    if code == 0 or code in plan.permanentCodes:
        return False
    if code in plan.restartCodes or status < 0:
        return True
    return out_of_memory or (told and code == SIGTERM_CODE)


def is_fault(status: int, out_of_memory: bool = False) -> bool:
    """Return True for an end that the program brought about itself: a code, a fault such as SIGSEGV, or too much memory."""
    return out_of_memory or status not in _FROM_OUTSIDE


def describe_end(status: int, out_of_memory: bool = False) -> str:
    """Return how a program ended, in words: `signal 9 (SIGKILL), out of memory`, or `status 255`."""
    try:
        text = f"signal {-status} ({signal.Signals(-status).name})" if status < 0 else f"status {status}"
    except ValueError:
        text = f"signal {-status}"  # of real time, which have no names
    return f"{text}, out of memory" if out_of_memory else text
