"""Run uv on this machine for the hosts; show its progress, and explain a failure in one line."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from infra.runtime import uv
from ops import terminal
from ops.errors import UsageError

Sizes = Mapping[str, int]
"""The bytes of packages, by their names."""
_DOWNLOAD = re.compile(r"\s*Download(ing|ed) (\S+)(?: \(([\d.]+)(B|KiB|MiB|GiB)\))?")
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_BUILDING = re.compile(r"\s+Building (\S+)")
_TRACEBACK = "Traceback (most recent call last):"
# The line of an error of Python, a compiler or git; a file's name may precede it.
_ERROR_LINE = re.compile(r"(?:\S+: )?(?:[\w.]*(?:Error|Exception)|(?:fatal )?error|fatal|ERROR)\b ?[^:\w]*:", re.ASCII)
_GENERIC = re.compile(
    r"CalledProcessError|exit (?:code|status)|^(?:error: )?[Cc]ommand .* (?:failed|returned)|Failed building wheel"
)
_WRONG_WHEEL = re.compile(r"([^\s(/]+\.whl)\) dependency is incompatible")
_WRONG_HASH = re.compile(r"Hash mismatch for `(.+?)`.*? Computed: sha256:(\w+)")
_NO_HASH = re.compile(r"(?:none were|no trusted hash was) provided for: `?([^`\s]+)")
_UNREACHABLE = re.compile(r"Failed to fetch: `?([^`\s]+).*?(?:error sending request|client error|timed out)")
_INDEX = re.compile(r"(--(?:extra-)?index-url|-i|--find-links|-f)[ =]*(\S+)")
_COMPILED = re.compile(r"-(cp\d+|abi3|none)-linux_x86_64\.whl$")


def install(
    target: Path,
    python: str,
    lines: Sequence[str],
    start: Path,
    step: terminal.ProgressLine | None = None,
    options: Sequence[str] = (),
    check: Callable[[Sizes], None] = lambda _: None,
) -> None:
    """Install the lines of a requirements.txt into a folder, for hosts with this version of Python.

    Args:
        start: the folder to which the lines' paths are relative.
        step: shows the progress.
        check: called when a large download begins, with the sizes of all that have begun; its exception ends uv.
    """
    progress = _Progress(check)
    if step:
        step.detail = progress.describe
    # A folder has no hash, such as the project itself in the output of `uv export`: so uv checks only the hashes that exist.
    local = any(line.startswith((".", "/")) for line in lines)
    hashed = ["--require-hashes"] if any(" --hash" in line for line in lines) and not local else []
    try:
        result = uv.install(target, python, lines, [*hashed, *options], start, progress.read)
    except KeyboardInterrupt:
        terminal.note(
            "no job was submitted; packages that were fetched completely are kept, and the next call goes on with them"
        )
        raise
    if step:
        step.detail = progress.total
    if result.returncode:
        raise UsageError(explain(result.stdout, python, lines))


def wheels_only_options(python: str) -> list[str]:
    """Return uv's options that forbid builds, unless the hosts' Python may run what this machine builds."""
    here = (platform.python_version_tuple()[:2], sys.platform, platform.machine())
    return [] if here == (tuple(python.split(".")), "linux", "x86_64") else ["--only-binary=:all:"]


class _Progress:
    """The progress of uv, by its output."""

    def __init__(self, check: Callable[[Sizes], None]) -> None:
        self._check = check
        self._sizes: dict[str, int] = {}
        self._fetched = 0
        self._phase = ""

    def read(self, line: str) -> None:
        """Parse a line of uv's output."""
        if (match := _DOWNLOAD.match(line)) and match[1] == "ed":
            self._fetched += 1
        elif match and match[3]:
            self._sizes[match[2]] = round(float(match[3]) * _UNITS[match[4]])
            self._check(self._sizes)
        elif match := _BUILDING.match(line):
            self._phase = f"building {match[1]}"
        elif line.startswith("Prepared "):
            self._phase = "installing"

    @property
    def total(self) -> str:
        """The size of the large downloads; empty if there are none."""
        total = sum(self._sizes.values())
        return terminal.size(total) if total else ""

    def describe(self) -> str:
        """Describe the progress: `2 of 5 large packages fetched, 55.0 MB in all`."""
        if self._phase or not self._sizes:
            return self._phase
        return f"{self._fetched} of {len(self._sizes)} large packages fetched, {self.total} in all"


def explain(output: str, python: str, lines: Sequence[str] = ()) -> str:
    """Explain from uv's output why it failed to install these lines for hosts with this version of Python, with a remedy."""
    flat = " ".join(output.split())
    if match := _WRONG_WHEEL.search(flat):
        return describe_unfit_wheel(match[1], python)
    if match := _WRONG_HASH.search(flat):
        problem = f"what was fetched has sha256 {match[2]}"
        return (
            f"{match[1]} does not match its hash in requirements.txt, {problem}: export the file again, or ask who changed it"
        )
    if match := _NO_HASH.search(flat):
        how = "uv export and pip-compile --generate-hashes write them"
        return f"{match[1]} has no version and hash in requirements.txt; where one line has a hash, all need one: {how}"
    if "Git operation failed" in flat:
        return f"a dependency cannot be fetched by git: {reason(output)}"
    if "The build backend returned an error" in flat:
        return f"a build by setup.py or pyproject.toml failed: {reason(output.partition('[stderr]')[2] or output)}"
    if match := _UNREACHABLE.search(flat):
        server = urlsplit(match[1]).hostname
        options = (option for line in lines if (option := _INDEX.match(line)) and urlsplit(option[2]).hostname == server)
        where = f"{option[1]} in the requirements file" if (option := next(options, None)) else "pip config list"
        return f"dependencies cannot be fetched, {match[1]} does not answer: check the network, or {where}"
    if "No solution found" in flat:
        why = uv.reason(output).partition("dependencies ")[2]
        return f"dependencies cannot be resolved for {_describe_hosts(python)}: {why} Check names and versions"
    return f"uv failed: {uv.reason(output)}"


def reason(output: str) -> str:
    """Return the line of a failed build's output that states why: the last exception, else the last error.

    Without such a line, return one that only reports a failed command, else the last line, which may be advice.
    """
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    errors: list[str] = []
    depth: int | None = None
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if _TRACEBACK in line:
            depth = indent
        elif depth is not None and indent <= depth:
            errors.append(line.strip())
            depth = None
        elif _ERROR_LINE.match(line.strip()):
            errors.append(line.strip())
    specific = [line for line in errors if not _GENERIC.search(line)]
    last = [line.strip() for line in lines[-1:]]
    return (specific or errors or last or ["it printed nothing"])[-1]


def describe_unfit_wheel(wheel: str, python: str) -> str:
    """Return the message for a wheel that hosts with this version of Python cannot use."""
    tag = f"cp{python.replace('.', '')}"
    if (compiled := _COMPILED.search(wheel)) and compiled[1] in (tag, "abi3", "none"):
        return f"{wheel} was compiled here, and may not run on the hosts: ask for a version that has a manylinux wheel"
    hosts = _describe_hosts(python)
    return f"{wheel} is not a wheel for {hosts}: take one for {tag}, abi3 or py3, and for any platform or manylinux"


def _describe_hosts(python: str) -> str:
    return f"the hosts' Python {python} on Linux x86-64"
