"""Ctrl-C in tests: for commands that a test starts, and during clean-up."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

from scaletier.tensorflow_setup import StopRequest

HEARS_CTRL_C = ("env", "--default-signal=INT")
"""Starts a command that Ctrl-C ends, which a shell's background processes and their children ignore.

A `preexec_fn` would run in a fork of this process, where the fork handlers of gRPC meet descriptors that are closed.
"""


@contextlib.contextmanager
def postponed() -> Iterator[None]:
    """Interrupt this process only after the body: a clean-up that is left halfway is not continued."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, stop := StopRequest())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if stop.is_set():
            signal.raise_signal(signal.SIGINT)
