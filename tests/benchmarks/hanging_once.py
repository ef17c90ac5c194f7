"""`python -m benchmarks.hanging_once FILE`: run `python -m hosts.agent` with a bucket that hangs.

It hangs while FILE exists. FILE.hangs exists once a call hangs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hosts.agent.__main__ as program
from jobs.folder_bucket import open_bucket

_PAUSE = 0.01


class Hanging:
    """A store that does what another one does, but every call waits while a file exists."""

    def __init__(self, store: object, file: Path) -> None:
        self._store, self._file = store, file

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            while self._file.exists():
                self._file.with_suffix(".hangs").touch()
                time.sleep(_PAUSE)
            return getattr(self._store, method)(*arguments)

        return call


def main(file: Path) -> int:
    """Run the command."""
    vars(program)["open_bucket"] = lambda url: Hanging(open_bucket(url), file)
    return program.main()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
