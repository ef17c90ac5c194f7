"""Error handling of the tasks of `fab`: the place that turns an error into a line and an exit code."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from ops.errors import DETACHED, DONE, FAILED, WRONG_CALL, OpsError, one_line


def command(body: Callable[..., int | None]) -> Callable[..., None]:
    """Wrap a task's body so that it always ends in an exit code; the body returns one, or None for 0.

    With SCALETIER_DEBUG set, the traceback is shown as well.
    """

    @functools.wraps(body)
    def run(*args: Any, **kwargs: Any) -> None:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _interrupt)
        try:
            code = body(*args, **kwargs) or DONE
            sys.stdout.flush()
        except BaseException as error:
            if isinstance(error, SystemExit):
                raise
            if os.environ.get("SCALETIER_DEBUG"):
                raise
            code = report(error)
        if code:
            sys.exit(code)

    return run


def _interrupt(*_: object) -> NoReturn:
    """Handle SIGHUP and SIGTERM, of a closed terminal or `timeout`, like Ctrl-C: undo or detach."""
    raise KeyboardInterrupt


def report(error: BaseException) -> int:
    """Say what went wrong in one line on stderr; the exit code."""
    from ops import terminal

    if isinstance(error, BrokenPipeError):  # the reader of our output has seen enough: `fab logs all | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    if isinstance(error, KeyboardInterrupt):
        terminal.note("stopped")
        return DETACHED
    line, code = explain(error)
    terminal.error(line)
    return code


def explain(error: BaseException) -> tuple[str, int]:
    """Return the line and the exit code of an error of any library that a command uses."""
    from infra.spec import SpecError
    from jobs.checked import RecordError
    from jobs.store import Conflict, StoreError

    if isinstance(error, OpsError):
        return one_line(error), error.code
    if isinstance(error, SpecError):
        return one_line(error), WRONG_CALL
    if hasattr(error, "result") and hasattr(error.result, "items"):  # fabric's GroupException: a result or an error a host
        failed = {getattr(host, "original_host", host): e for host, e in error.result.items() if isinstance(e, Exception)}
        return "; ".join(f"{host}: {one_line(e)}" for host, e in failed.items()), FAILED
    module = type(error).__module__.partition(".")[0]
    if module in ("paramiko", "fabric", "invoke") or isinstance(error, (EOFError, ConnectionError, TimeoutError)):
        return f"the connection failed ({one_line(error)}): try again, then pulumi up", FAILED
    if module == "google":  # of all that is Google's, fab asks google-auth alone by itself
        return f"no Google credentials ({one_line(error)}): run `gcloud auth application-default login`", FAILED
    if module in ("aiohttp", "gcsfs"):
        return f"the bucket fails: {one_line(error)}: try again", FAILED
    if isinstance(error, StoreError):
        return f"the bucket fails: {error.strerror or one_line(error)}", FAILED
    if isinstance(error, RecordError):
        return f"what the bucket says cannot be read: {one_line(error)}", FAILED
    if isinstance(error, Conflict):
        return f"{one_line(error)} again and again: try again", FAILED
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or one_line(error)}", FAILED
    return f"this is a bug of scaletier, {type(error).__name__}: {one_line(error)} (SCALETIER_DEBUG=1 shows where)", FAILED
