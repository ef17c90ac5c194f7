"""Entry points of `fab` and `scaletier`, which handle Ctrl-C also during their slow imports."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from ops.cli.checkout import FLAG, find, is_checkout
from ops.errors import DETACHED, DONE, FAILED, WRONG_CALL

# Imported objects live as long as the process; the garbage collector's usual 700 allocations cost a tenth of the imports' time.
_GC_THRESHOLD = 200_000
# The checkout whose program we exec. A copied .venv starts the program of its original, which would otherwise exec forever.
_EXEC_ROOT = "SCALETIER_CALLED_FOR"
# Arguments that need no particular checkout, so that they work in any folder.
_ANYWHERE = frozenset({"-h", "--help", "-V", "--version", "-l", "--list", "help"})


def main() -> None:
    """Run `fab`, and end the process at once.

    Python's own shutdown takes a third of a short command's time, and only frees what the kernel frees anyway.
    """
    try:
        run()
        code: object = DONE
    except SystemExit as end:
        code = end.code
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except BrokenPipeError:  # the reader has closed the pipe
        pass
    except OSError:  # the disk is full
        code = code or FAILED
    if not isinstance(code, int):
        sys.exit(str(code))
    os._exit(code)


def run() -> None:
    """Run `fab`; SystemExit if it ends by an exit code."""
    gc.set_threshold(_GC_THRESHOLD)
    try:
        _import_invoke()
        from ops.cli.commandline import main as command_line

        command_line()
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        sys.exit(DETACHED)
    except BrokenPipeError:  # the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _import_invoke() -> None:
    """Import Invoke without unittest.mock, which its users' tests alone need, and which takes a tenth of a command's time."""
    name = "unittest.mock"
    if name in sys.modules:
        return
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name])["Mock"] = None
    try:
        import invoke  # noqa: F401
    finally:
        del sys.modules[name]


def scaletier() -> None:
    """Run the checkout's own program from a single installation by pipx or uv."""
    argv = sys.argv[1:]
    try:
        root = find(argv, Path.cwd(), os.environ)
    except OSError as error:
        _exit_with(f"the folder that this is called in is gone ({error.strerror}): cd into another")
    exec_root = os.environ.pop(_EXEC_ROOT, None)
    if root is not None and exec_root != str(root) and Path(sys.prefix).resolve() != (root / ".venv").resolve():
        _run_checkout_program(root, argv)
    elif root is None and argv and not _ANYWHERE & set(argv):
        _exit_with(f"there is no checkout of scaletier here or above: cd into one, or name it by {FLAG} DIR")
    main()


def _run_checkout_program(root: Path, argv: Sequence[str]) -> NoReturn:
    program = root / ".venv" / "bin" / "scaletier"
    if not is_checkout(root):
        _exit_with(f"{root} is no checkout of scaletier: it does not have scaletier's Pulumi.yaml")
    if not program.exists():
        _exit_with(f"the checkout {root} is not set up: run make setup there")
    path = f"{program.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    try:
        os.execve(program, [str(program), *argv], {**os.environ, "PATH": path, _EXEC_ROOT: str(root)})  # noqa: S606  no shell is wanted
    except OSError as error:
        _exit_with(f"{program} does not run ({error.strerror}): was {root} moved? Run make setup there")


def _exit_with(line: str) -> NoReturn:
    sys.stderr.write(f"error: {line}\n")
    sys.exit(WRONG_CALL)
