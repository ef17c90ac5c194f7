"""A Python of a job's own, for a program that wants another TensorFlow than the hosts have, or none at all.

It is built here once, in a folder that every host mounts read-only, so that no host has to fetch or unpack it. Its folder is
named by what was asked for: the same lines, next week, are the same Python.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ops import terminal
from ops.cluster.inventory import Inventory
from ops.errors import OpsError, UsageError
from ops.package import hostpython, piperror

# The hosts' own Python, which is this machine's where the hosts are on it.
_PYTHON = "/usr/bin/python3"
_SITE = f"lib/python{hostpython.PYTHON}/site-packages"
_VERSION = re.compile(r"[1-9]\d?\.\d{1,2}(\.\d{1,2})?")
_BUILDING = ".building-"


@dataclass(frozen=True)
class Runtime:
    """What pip is asked for: `lines` as in a requirements.txt, whose paths start from `start`. `name` is for people, and `key`
    the name of its folder.
    """

    name: str
    lines: tuple[str, ...]
    key: str
    start: Path = Path()


def of_version(text: str, where: str) -> Runtime | None:
    """TensorFlow 2.19, of which the newest 2.19.x is taken, or 2.19.1; None where that is what the hosts have."""
    if not _VERSION.fullmatch(text) or not text.startswith("2."):
        raise UsageError(f"{where} {text!r} is no version of TensorFlow 2: write 2.20 or 2.20.0, or leave it out for {ours()}")
    if ours() == text or ours().startswith(f"{text}."):
        return None
    others = (Requirement(line).name for line in hostpython.lines(hostpython.REQUIREMENTS))
    wanted = f"tensorflow-cpu=={text}{'.*' if text.count('.') == 1 else ''}"
    return _of(f"tensorflow-{text}", [wanted, *(name for name in others if name != "tensorflow-cpu")])


def ours() -> str:
    """The TensorFlow that the hosts have."""
    return hostpython.hosts()["tensorflow-cpu"]


def of_file(path: str, where: str) -> Runtime:
    """What a requirements.txt asks for, and nothing else."""
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"{where} {path} is no file: give the path of a requirements.txt")
    if not (lines := hostpython.lines(file)):
        raise UsageError(f"{where} {path} asks for nothing: write a requirement on each line, such as scikit-learn==1.7.2")
    return _of(file.stem, lines, file.parent)


def again(inventory: Inventory, name: str, key: str, lines: Sequence[str]) -> Runtime:
    """A runtime as a job had it: the one of that key where it has the same versions to this day, else one of those versions."""
    folder = inventory.operator_runtimes and inventory.operator_runtimes / key
    if folder and pinned(versions(folder)) == list(lines):
        return Runtime(name, tuple(lines), key)
    return _of(name, lines)


def _of(name: str, lines: Sequence[str], start: Path = Path()) -> Runtime:
    parts = [hostpython.PYTHON.encode(), *(line.encode() for line in lines), *hostpython.named_files(start, lines)]
    digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
    return Runtime(name, tuple(lines), f"{re.sub('[^A-Za-z0-9.]+', '-', name).strip('-.')}-{digest[:12]}", start)


def python(inventory: Inventory, runtime: Runtime) -> str:
    """Its Python, as the hosts see it; UsageError where they see none."""
    if inventory.runtimes is None:
        raise UsageError(
            f"runtime {runtime.name}: the hosts of stack {inventory.stack} have one Python only; pulumi config set "
            "runtimeVersion says of which TensorFlow, and what else a program wants goes into its package's requirements.txt"
        )
    return f"{inventory.runtimes}/{runtime.key}/bin/python"


def build(inventory: Inventory, runtime: Runtime) -> dict[str, str]:
    """What is in it, name to version; made first where it was not made before. UsageError where pip finds no such thing."""
    seen = python(inventory, runtime)
    folder = (inventory.operator_runtimes or Path()) / runtime.key
    if not folder.is_dir():
        with terminal.Step(f"building the runtime {runtime.name} (a minute or three, once)", always=True), _new(folder) as made:
            _install(made, runtime, seen)
    return versions(folder)


def versions(folder: Path) -> dict[str, str]:
    """What is installed in it, name to version; empty where there is none."""
    found = metadata.distributions(path=[str(folder / _SITE)])
    return {canonicalize_name(each.name): each.version for each in found}


def pinned(have: Mapping[str, str]) -> list[str]:
    """The same as requirements."""
    return [f"{name}=={version}" for name, version in sorted(have.items())]


@contextmanager
def _new(folder: Path) -> Iterator[Path]:
    """A folder beside the one that is wanted, and in its place once it is whole; another who builds the same may be first."""
    folder.parent.mkdir(parents=True, exist_ok=True)  # `pulumi up` made it, or hosts would not see it
    for left in folder.parent.glob(f"{_BUILDING}*"):  # by one who was killed
        if not Path("/proc", left.name.rpartition("-")[2]).exists():
            shutil.rmtree(left, ignore_errors=True)
    made = folder.parent / f"{_BUILDING}{folder.name}-{os.getpid()}"
    try:
        yield made
        with suppress(OSError):
            made.rename(folder)
        if not folder.is_dir():
            raise OpsError(f"{folder} cannot be made: see whether there is room, and who may write there")
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _install(made: Path, runtime: Runtime, seen: str) -> None:
    asked = made / "requirements.txt"
    _run([_PYTHON, "-m", "venv", "--without-pip", str(made)], made.parent)
    found = (made / "lib").glob("python3.*")
    if (version := next((each.name.removeprefix("python") for each in found), "")) != hostpython.PYTHON:
        raise OpsError(
            f"the hosts have Python {hostpython.PYTHON} and {_PYTHON} is {version}: a runtime for them cannot be made"
        )
    asked.write_text("".join(f"{line}\n" for line in runtime.lines))
    asked.chmod(0o644)
    pip = [sys.executable, "-m", "pip", "--python", str(made / "bin/python"), "install", "--no-input"]
    # Paths in the lines start from where they were written, so pip is started there.
    _run([*pip, "--disable-pip-version-check", "--progress-bar=off", "--requirement", str(asked.resolve())], runtime.start)
    for script in (made / "bin").iterdir():  # they name the Python that installed them
        if script.is_file() and not script.is_symlink() and (content := script.read_bytes()).startswith(b"#!"):
            script.write_bytes(content.replace(bytes(made.resolve() / "bin/python"), seen.encode()))


def _run(command: Sequence[str], cwd: Path) -> None:
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        umask=0o022,  # another user reads it, on a host
        check=False,
    )
    if done.returncode:
        raise UsageError(piperror.explain(done.stdout))
