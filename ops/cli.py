"""Between `fab` and ops: the one place where an error becomes a line on stderr and an exit code.

Fabric parses the command line; what it says of a wrong call is put into this project's words here, too.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import fabric
from fabric.main import Fab
from invoke.exceptions import Exit, ParseError

from ops.errors import DETACHED, DONE, FAILED, WRONG_CALL, OpsError, one_line


def command(body: Callable[..., int | None]) -> Callable[..., None]:
    """A task's body, run so that it always ends in an exit code; the body returns one, or None for 0.

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
    """A closed terminal, or `timeout`, undoes or detaches as Ctrl-C does."""
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
    """The line and the exit code of an error of any library that a command uses."""
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


def after_dashes(argv: Sequence[str]) -> list[str]:
    """What follows a lone `--`, each word as the shell gave it."""
    return list(argv[argv.index("--") + 1 :]) if "--" in argv else []


def shield(tokens: Sequence[str], flag: str = "--args") -> list[str]:
    """Keep invoke from reading the value of `--args` as a flag of the task: `--args "--json"`.

    A space in front does it, and means nothing to shlex, which splits the value later.
    """
    shielded: list[str] = []
    for token in tokens:
        if token.startswith(f"{flag}="):
            shielded += [flag, " " + token.removeprefix(f"{flag}=")]
        elif shielded and shielded[-1] == flag:
            shielded.append(" " + token)
        else:
            shielded.append(token)
    return shielded


def reword(message: str, tasks: Sequence[str]) -> str:
    """invoke's message about a wrong command line, in words that say what to do."""
    if found := re.search(r"No idea what '(.*)' is!", message):
        word = found[1]
        if word.startswith("-"):
            return f"there is no flag {word} here; fab --help TASK lists the valid ones"
        return f"there is no task {word!r}; valid are {', '.join(tasks)}"
    if found := re.search(r"'(\S+)' did not receive required positional arguments: (.*)", message):
        wanted = found[2].replace("'", "").upper()
        return f"fab {found[1]} needs {wanted}: see fab --help {found[1]}"
    if found := re.search(r"Flag (?:<Argument: )?'?(\S+?)'?[ >(].*needed value", message):
        return f"--{found[1].lstrip('-')} needs a value"
    return " ".join(message.split())


@contextlib.contextmanager
def worded(program: Program) -> Iterator[None]:
    """Whatever is wrong with the command line is one line, and exit code 2."""
    try:
        yield
    except ParseError as error:
        raise Exit(f"error: {reword(str(error), sorted(program.collection.task_names))}", WRONG_CALL) from None
    except ValueError as error:
        raise Exit(f"error: {one_line(error)}", WRONG_CALL) from None


class Program(Fab):  # type: ignore[misc]  # Fabric has no types
    """Fabric's command line, kept to this project's rules: it is for tasks alone, and never looks at ~/.ssh/config."""

    def parse_core(self, argv: list[str] | None) -> None:
        super().parse_core(argv)
        self.core.unparsed[:] = shield(self.core.unparsed)
        if not self.args.complete.value:
            self.core.remainder = ""  # Fabric would run what follows -- as a command of its own
        self.config.load_ssh_configs = False

    def parse_tasks(self) -> None:
        with worded(self):
            super().parse_tasks()

    def parse_cleanup(self) -> None:
        with worded(self):
            super().parse_cleanup()

    def no_tasks_given(self) -> NoReturn:
        """Fabric would show its own flags."""
        self.list_tasks()
        raise Exit


def main() -> None:
    """`fab` itself."""
    Program(name="Fabric", version=fabric.__version__, executor_class=fabric.Executor, config_class=fabric.Config).run()
