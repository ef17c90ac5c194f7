"""Start programs as forks of a process that has imported TensorFlow, which each of them would need seconds for.

Run as a program it is that process. It reads requests as lines of JSON and answers each with one line:
`{"arguments", "env", "folder", "log"}` starts a program and is answered with its pid; `{"pid"}` is answered with
the exit code of a program that has ended, or with null.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1


class Program:
    """Run `python ARGUMENTS` as a process; its methods and attributes are those of subprocess.Popen that tests use.

    Args:
        arguments: `-m MODULE` or the path of a script, and flags.
        env: the whole environment. Of what Python reads at its start only PYTHONPATH has an effect.
        folder: the directory in which it runs.
        log: gets what the program prints.
    """

    def __init__(self, *arguments: str, env: Mapping[str, str], folder: Path, log: Path) -> None:
        self.log = log
        log.write_bytes(b"")  # before this returns, as a test may read it at once
        self.returncode: int | None = None
        self.pid: int = _ask({"arguments": arguments, "env": dict(env), "folder": str(folder), "log": str(log)})

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = _ask({"pid": self.pid})
        return self.returncode

    def wait(self, timeout: float = float("inf")) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.02)
        return code

    def output(self, timeout: float) -> str:
        """Wait for the program's end, and return what it has printed."""
        self.wait(timeout)
        return self.log.read_text()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Start the process that forks; it ends with this one, which closes its standard input."""
    return subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _ask(request: Mapping[str, Any]) -> Any:
    server = _server()
    assert server.stdin and server.stdout
    print(json.dumps(request), file=server.stdin, flush=True)
    return json.loads(server.stdout.readline())


def _serve() -> list[str]:
    """Answer requests until there are no more; return in a fork, with the arguments of its program."""
    for line in sys.stdin:
        request = json.loads(line)
        if "pid" in request:
            pid, status = os.waitpid(request["pid"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        elif (answer := os.fork()) == 0:
            return _become(**request)
        print(json.dumps(answer), flush=True)
    sys.exit()


def _become(arguments: list[str], env: Mapping[str, str], folder: str, log: str) -> list[str]:
    """Give this process the environment, directory, import path and output of the program, which ends with its parent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    first = folder if arguments[0] == "-m" else str(Path(arguments[0]).parent)
    sys.path[:] = [first, *filter(None, env.get("PYTHONPATH", "").split(":")), *_SYSTEM_PATH]
    with Path(os.devnull).open("rb") as nothing, Path(log).open("wb") as output:
        for number, file in enumerate((nothing, output, output)):
            os.dup2(file.fileno(), number)
    return arguments


if __name__ == "__main__":
    _SYSTEM_PATH = [one for one in sys.path[1:] if one not in os.environ.get("PYTHONPATH", "").split(":")]
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    importlib.import_module("scaletier.tensorflow_setup").import_tensorflow()
    gc.freeze()
    _arguments = _serve()
    # The program runs here, outside of the loop, so that it ends as an interpreter ends.
    if _arguments[0] == "-m":
        sys.argv = _arguments[1:]
        runpy.run_module(_arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = _arguments
        runpy.run_path(_arguments[0], run_name="__main__")
