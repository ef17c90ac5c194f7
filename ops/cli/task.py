"""The decorator of the commands of `fab`: it turns a function's result or error into a line and an exit code."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import fabric

from ops.cli.commandline import CommandTask
from ops.errors import DETACHED, DONE, explain

if TYPE_CHECKING:
    from ops.cluster.cluster import ClusterClient

sys.dont_write_bytecode = False  # invoke sets it, and every command would compile ops again

JOB = "id of the job, as in fab jobs (default: the newest that has hosts, else the newest that started)"
TRAINER = "ARGUMENTS OF THE TRAINER"
NEW_JOB = "id of the job: a letter, then letters, digits and _; never used before"
JSON = "print JSON, for programs"


def task(**options: Any) -> Callable[[Callable[..., int]], Any]:
    """Return Fabric's decorator for a function that returns an exit code; errors become a line and a code."""
    return lambda body: fabric.task(klass=CommandTask, **options)(command(body))


def command(body: Callable[..., int | None]) -> Callable[..., None]:
    """Wrap a command's function so that an error becomes a line and an exit code; with SCALETIER_DEBUG, a traceback."""

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
            code = print_error(error)
        if code:
            sys.exit(code)

    return run


def load_cluster() -> ClusterClient:
    """Load the cluster of the stack in use."""
    from ops.cluster.cluster import ClusterClient

    return ClusterClient.load()


def _interrupt(*_: object) -> NoReturn:
    """Handle SIGHUP and SIGTERM, of a closed terminal or `timeout`, like Ctrl-C: undo or detach."""
    raise KeyboardInterrupt


def print_error(error: BaseException) -> int:
    """Print an error in one line on stderr; return the exit code."""
    from ops import terminal

    if isinstance(error, BrokenPipeError):  # the reader has closed the pipe: `fab logs all | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    if isinstance(error, KeyboardInterrupt):
        terminal.note("stopped")
        return DETACHED
    line, code = explain(error)
    terminal.error(line)
    return code
