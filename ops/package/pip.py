"""pip, run here for the hosts; what it says when it fails is one line."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from packaging.utils import canonicalize_name

from infra.runtime import pip as bare_pip
from infra.spec import PYTHON
from ops import terminal
from ops.errors import UsageError
from ops.package import piperror

Sizes = Mapping[str, int]
"""The bytes of files that pip fetches, by their names."""
_FILE = re.compile(
    r"(?:Downloading|Using cached) (?:\S+/)?([^\s/]+\.(?:whl|tar\.gz|zip|tar\.bz2)) \(([\d.]+) (bytes|kB|MB|GB)\)"
)
_UNITS = {"bytes": 1, "kB": 1_000, "MB": 1_000_000, "GB": 1_000_000_000}
_BUILDS = re.compile(r"Building wheel for (\S+)|Preparing metadata|Installing build dependencies")
_INSTALLS = re.compile(r"Installing collected packages: (.+)")


def pip(
    command: str,
    *arguments: str,
    start: Path,
    python: Path | None = None,
    hosts: str = PYTHON,
    step: terminal.Step | None = None,
    check: Callable[[Sizes], None] = lambda _: None,
    site: Path | None = None,
) -> None:
    """Run `pip COMMAND ARGUMENTS`. What it makes can be read by everybody, as hosts have other users.

    Args:
        command: such as `wheel`.
        arguments: its options.
        start: the folder from which a requirement's paths start.
        python: whose packages it manages, if not this Python's.
        hosts: the version of the hosts' Python, for what is said.
        step: shows what is fetched.
        check: is called with the sizes of all files that are to be fetched, before each; what it raises ends pip.
        site: where it installs packages, for what is shown.

    Raises:
        UsageError: pip failed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        progress = _Progress(Path(scratch), check, site)
        if step:
            step.count = progress.line
        line = bare_pip.command(command, *arguments, whose=python)
        try:
            run(line, start, hosts, progress.hear, {"TMPDIR": scratch, "PYTHONUNBUFFERED": "1"})
        finally:
            if step:
                step.count = progress.total


def run(
    command: Sequence[str],
    start: Path,
    hosts: str = PYTHON,
    heard: Callable[[str], None] | None = None,
    more: Mapping[str, str] | None = None,
) -> None:
    """Run a command that must succeed; UsageError with pip's reason where it does not."""
    process = bare_pip.run(command, start, heard=heard, more=more)
    if process.returncode:
        raise UsageError(piperror.explain(process.stdout, hosts))


class _Progress:
    """The progress of pip, by its output and by the size of its folder for temporary files."""

    def __init__(self, scratch: Path, check: Callable[[Sizes], None], site: Path | None) -> None:
        self._scratch, self._check, self._site = scratch, check, site
        self._sizes: dict[str, tuple[str, int]] = {}
        self._installed = 0
        self._now = ""

    def hear(self, line: str) -> None:
        """Take in a line."""
        if file := _FILE.search(line):
            name, size = file[1], round(float(file[2]) * _UNITS[file[3]])
            # If pip tries several versions of a package, the last one counts.
            project = canonicalize_name(name.partition("-")[0])
            self._sizes[project], self._now = (name, size), project
            self._check(dict(self._sizes.values()))
        elif match := _BUILDS.search(line):
            self._now = f"building {match[1]}" if match[1] else self._now
        elif match := _INSTALLS.search(line):
            self._installed, self._now = len(match[1].split(", ")), "installing"

    @property
    def total(self) -> str:
        """The size of the downloads; empty if there are none."""
        total = sum(size for _, size in self._sizes.values())
        return terminal.size(total) if total else ""

    def line(self) -> str:
        """Return the status to show: `numpy, 12.1 MB of 55.0 MB`."""
        if self._installed:
            there = len([*self._site.glob("*.dist-info")]) if self._site else 0
            return f"installing {min(there, self._installed)} of {self._installed} packages"
        if not self.total:
            return self._now
        come = 0
        for path in self._scratch.glob("pip-unpack-*/*"):
            with suppress(OSError):  # gone meanwhile
                come += path.stat().st_size if path.is_file() else 0
        return f"{self._now}, {terminal.size(come)} of {self.total}"
