"""Call `fab` in this process: a new process for each call would take most of a second."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import fabfile
from ops.cli import start

ROOT = Path(__file__).resolve().parents[2]


def call_fab(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Call fab's own entry point in the checkout, and undo its changes to this process."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    threshold, code = gc.get_threshold(), 0
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(sys, "argv", ["fab", *argv]),
        mock.patch.object(sys, "path", [*sys.path]),
        contextlib.chdir(ROOT),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            start.run()
        except SystemExit as error:
            code = int(error.code or 0)
        finally:
            gc.set_threshold(*threshold)
            sys.modules["fabfile"] = fabfile  # Fabric reloads it
            for number, handler in handlers.items():
                signal.signal(number, handler)
    output = [stream.buffer.getvalue().decode() for stream in (out, err)]  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(["fab", *argv], code, *output)
