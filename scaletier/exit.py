"""End a process of a training job with an exit code, and print its error in one line."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import NoReturn

from scaletier.tensorflow_setup import one_line

# The job should resume from its last checkpoint: a host is lost, or this process got SIGTERM. The process kills itself by
# SIGTERM, since a supervisor would count an exit code as the program's fault.
RETRY_EXIT_CODE = 128 + signal.SIGTERM


def exit_process(code: int) -> NoReturn:
    """End the process at once, from any thread; by SIGTERM if the job should resume."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code == RETRY_EXIT_CODE:
        ctypes.CDLL(None).signal(signal.SIGTERM, int(signal.SIG_DFL))  # signal.signal works only in the main thread
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        signal.raise_signal(signal.SIGTERM)
    os._exit(code)


def print_failure(message: str, code: int) -> int:
    """Print an error line; return the exit code."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    return code


def print_lost_host(error: Exception) -> int:
    """Print one line about a lost host of the cluster; return the exit code with which the job resumes."""
    return print_failure(f"a host of the cluster is lost: {one_line(error)}", RETRY_EXIT_CODE)
