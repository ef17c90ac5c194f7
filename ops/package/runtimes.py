"""A job's own Python, for a program that needs another TensorFlow than the hosts', or none at all.

It is built here once, in a folder that every host mounts read-only, so that no host has to fetch or unpack it. Its folder is
named by a hash of the request, and a job that asks for the same uses it as long as it is kept.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from infra.inventory import Inventory
from infra.runtime.atomic_dir import key, making
from infra.spec import PYTHON
from ops import terminal
from ops.cluster.inventory import Runtimes, require_runtimes
from ops.errors import OpsError, UsageError
from ops.package import cpubuilds, hostpython
from ops.package.pip import pip, run

# The hosts' own Python, which a runtime leads to.
_BASE = "/usr/bin/python3"
_TELL_VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"
_SITE = f"lib/python{PYTHON}/site-packages"
_TENSORFLOW_2 = re.compile(r"2\.\d{1,2}(\.\d{1,2})?")
# The valid content of a manifest.
_PINNED = re.compile(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!+_-]+")
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# The name of the requirements file becomes part of the folder's.
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9.]+")


@dataclass(frozen=True)
class Runtime:
    """A request to pip.

    Attributes:
        name: for people.
        lines: as in a requirements.txt.
        key: the name of its folder.
        file: a user's own requirements.txt, which has the lines.
        original: what that file says, if the lines have builds for processors instead.
        cuda: it would have CUDA, of which no host makes use.
    """

    name: str
    lines: tuple[str, ...]
    key: str
    file: Path | None = None
    original: tuple[str, ...] = ()
    cuda: bool = False


def of_version(text: str, where: str, inventory: Inventory) -> Runtime | None:
    """Return a runtime with TensorFlow 2.19, of which the newest 2.19.x is used, or 2.19.1.

    Returns:
        None if the hosts have that version.
    """
    ours = inventory.tensorflow or hostpython.hosts()[hostpython.TENSORFLOW]
    if not _TENSORFLOW_2.fullmatch(text):
        raise UsageError(f"{where} {text!r} is no version of TensorFlow 2: write 2.20 or 2.20.0, or leave it out for {ours}")
    if f"{ours}.".startswith(f"{text}."):
        return None
    others = (Requirement(line).name for line in hostpython.lines_of(hostpython.REQUIREMENTS))
    requirement = f"{hostpython.TENSORFLOW}=={text}{'.*' if text.count('.') == 1 else ''}"
    return _of(f"tensorflow-{text}", [requirement, *(name for name in others if name != hostpython.TENSORFLOW)])


def of_file(path: str, where: str, gpus: bool = False) -> Runtime:
    """Return the runtime of a requirements.txt alone; without `gpus`, with CPU builds if there are any."""
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"{where} {path} is no file: give the path of a requirements.txt")
    if not (lines := hostpython.lines_of(file)):
        raise UsageError(f"{where} {path} asks for nothing: write a requirement on each line, such as scikit-learn==1.7.2")
    if here := next((line for line in lines if line.startswith(hostpython.EDITABLE) or line in (".", "./")), None):
        raise UsageError(f"{where} {path} asks for {here}, which stays a folder of this machine: name a wheel of it")
    builds = lines if gpus else cpubuilds.replaced(lines)
    request = _of(file.stem, builds, file.absolute())
    return replace(request, original=() if builds == lines else tuple(lines), cuda=not gpus and cpubuilds.asks_for_cuda(lines))


def again(inventory: Inventory, told: Mapping[str, Any]) -> Runtime:
    """Return a manifest's runtime: that of its key if it has the same versions today, else a new one.

    Raises:
        OpsError: if the manifest's content is unsafe: any job can write to the bucket, and pip runs what it is given.
    """
    name, kept_as, requirements = told.get("name"), told.get("key"), told.get("requirements")
    lines = (
        [line for line in requirements if isinstance(line, str) and _PINNED.fullmatch(line)]
        if isinstance(requirements, list)
        else []
    )
    is_valid = isinstance(name, str) and isinstance(kept_as, str) and _KEY.fullmatch(name) and _KEY.fullmatch(kept_as)
    if not is_valid or lines != requirements:
        raise OpsError("the manifest tells of a runtime that fab train would not have made: start the job with fab train")
    there = require_runtimes(inventory, f"runtime {name}").here / str(kept_as)
    return Runtime(str(name), tuple(lines), str(kept_as)) if pinned(installed(there)) == lines else _of(str(name), lines)


def _of(name: str, lines: Sequence[str], file: Path | None = None) -> Runtime:
    contents = hostpython.named_files(file.parent, lines) if file else ()
    digest = key([PYTHON.encode(), *(line.encode() for line in lines), *contents])
    return Runtime(name, tuple(lines), f"{_NOT_IN_NAMES.sub('-', name).strip('-.')[:40]}-{digest[:12]}", file)


def python(inventory: Inventory, runtime: Runtime) -> str:
    """Return its Python, as the hosts see it."""
    return _seen(require_runtimes(inventory, f"runtime {runtime.name}"), runtime.key)


def _seen(kept: Runtimes, key: str) -> str:
    return f"{kept.on_hosts}/{key}/bin/python"


def python_of(inventory: Inventory, manifest: Mapping[str, Any]) -> str | None:
    """Return the path on the hosts of a job's own Python, by its manifest; None if there is none."""
    runtime_key = manifest.get("runtime", {}).get("key")
    is_known = inventory.runtimes is not None and isinstance(runtime_key, str) and _KEY.fullmatch(runtime_key)
    return f"{inventory.runtimes}/{runtime_key}/bin/python" if is_known else None


def build(inventory: Inventory, runtime: Runtime) -> dict[str, str]:
    """Return its packages, name to version; build it first if it is missing.

    Raises:
        UsageError: if pip finds no such package.
    """
    there = require_runtimes(inventory, f"runtime {runtime.name}")
    folder = there.here / runtime.key
    if not folder.is_dir():
        if runtime.cuda:
            how = f"put a line {cpubuilds.TORCH_INDEX} into {runtime.file}"
            terminal.note(f"PyTorch comes with CUDA, some 5 GB that hosts without a GPU do not use: {how}")
        if runtime.original:
            replacements = ", ".join(line for line in runtime.lines if line not in runtime.original)
            terminal.note(f"no host has a GPU: {replacements} is taken, its build for processors")
        with (
            terminal.Step(f"building the runtime {runtime.name} (a minute or three, once)", always=True) as step,
            making(folder, OpsError) as folder_in_progress,
        ):
            try:
                _install(folder_in_progress, runtime, _seen(there, runtime.key), step)
            except UsageError:
                if not runtime.original:
                    raise
                # Not every version has such a build.
                _install(folder_in_progress, replace(runtime, lines=runtime.original), _seen(there, runtime.key), step)
    return installed(folder)


def kept(inventory: Inventory, runtime: Runtime) -> dict[str, str]:
    """Return its packages if it was built before, else an empty mapping."""
    return installed(require_runtimes(inventory, f"runtime {runtime.name}").here / runtime.key)


def installed(folder: Path) -> dict[str, str]:
    """Return the packages in a runtime's folder, name to version; empty if there is none."""
    distributions = metadata.distributions(path=[str(folder / _SITE)])
    return {canonicalize_name(each.name): each.version for each in distributions}


def pinned(versions: Mapping[str, str]) -> list[str]:
    """Return the same as requirements."""
    return [f"{name}=={version}" for name, version in sorted(versions.items())]


def requested(folder: Path) -> list[str]:
    """Return the requested packages of a runtime, without their dependencies, as requirements."""
    distributions = metadata.distributions(path=[str(folder / _SITE)])
    return sorted(
        f"{canonicalize_name(each.name)}=={each.version}" for each in distributions if each.read_text("REQUESTED") is not None
    )


def _install(made: Path, runtime: Runtime, seen: str, step: terminal.Step) -> None:
    base = _base()
    run([base, "-m", "venv", "--without-pip", "--clear", str(made)], made.parent)
    requirements, start = made / "asked.txt", runtime.file.parent if runtime.file else made
    requirements.write_text("".join(f"{hostpython.absolute(line, start)}\n" for line in runtime.lines))
    try:
        pip(
            "install", "--requirement", str(requirements), start=start, python=made / "bin/python", step=step, site=made / _SITE
        )
    finally:
        requirements.unlink()
    for script in (made / "bin").iterdir():  # they name the Python that installed them
        if script.is_file() and not script.is_symlink() and (content := script.read_bytes()).startswith(b"#!"):
            script.write_bytes(content.replace(bytes(made / "bin/python"), seen.encode()))
    if base != _BASE:
        _lead_to_hosts(made)


def _base() -> str:
    """Return a Python of the hosts' version: this system's own, else this program's, else one on PATH.

    Raises:
        OpsError: there is none.
    """
    versions = {}
    for python in filter(None, (_BASE, os.path.realpath(sys.executable), shutil.which(f"python{PYTHON}"))):
        try:
            output = subprocess.run([python, "-c", _TELL_VERSION], capture_output=True, text=True, check=False).stdout.strip()
        except OSError:
            output = "not there"
        if output == PYTHON:
            return python
        versions[python] = output
    names = ", ".join(f"{python} is {version}" for python, version in versions.items())
    raise OpsError(
        f"the hosts have Python {PYTHON} and {names}: install a Python {PYTHON}, such as by uv python install {PYTHON}"
    )


def _lead_to_hosts(made: Path) -> None:
    """Change a runtime that another Python built into one of the hosts' Python."""
    for link in (made / "bin").iterdir():
        if link.is_symlink() and link.readlink().is_absolute():
            link.unlink()
            link.symlink_to(_BASE)
    settings = made / "pyvenv.cfg"
    lines = [line for line in settings.read_text().splitlines() if not line.startswith(("home", "executable", "command"))]
    settings.write_text("\n".join([f"home = {Path(_BASE).parent}", *lines]) + "\n")
