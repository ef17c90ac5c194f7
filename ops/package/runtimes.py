"""A job's own Python runtime, on local hosts: for a program that needs another TensorFlow than the hosts', or none.

This machine builds it once, in a folder that every local host mounts read-only, so that no host has to fetch or unpack it. The
folder's name is the request's name and a hash of the request: later jobs with the same request reuse it.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from infra.inventory import Inventory
from infra.runtime.atomic_dir import create_atomically, digest_of
from infra.runtime.uv import make_venv, open_to_all
from infra.scale_tiers import PYTHON
from ops import terminal
from ops.cluster.inventory import Runtimes, require_runtimes
from ops.errors import OpsError, UsageError
from ops.package import hostpython
from ops.package.install import install, wheels_only_options

_REQUESTED = "requested.txt"
_SITE = f"lib/python{PYTHON}/site-packages"
_TENSORFLOW_2 = re.compile(r"2\.\d{1,2}(\.\d{1,2})?")
# Valid values for the runtime in a job's manifest.json.
_PINNED = re.compile(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!+_-]+")
_FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# Characters of a requirements file's name that the runtime's folder name cannot have.
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9.]+")

TORCH_INDEX = "--extra-index-url https://download.pytorch.org/whl/cpu"
# Names of distributions, with those of their CPU builds, which have the same versions and modules.
_CPU_BUILDS = {"tensorflow": "tensorflow-cpu", "xgboost": "xgboost-cpu"}
_TORCH = ("torch", "torchvision", "torchaudio")
_CUDA = "and-cuda"
# uv takes only the packages of the PyTorch project from the index of CPU builds.
_CPU_TORCH = "--torch-backend=cpu"
_INDEX_OPTIONS = ("--extra-index-url", "--index-url", "-i ")


@dataclass(frozen=True)
class RuntimeRequest:
    """A runtime to build with uv, or to reuse.

    Attributes:
        name: shown to people.
        lines: the lines of a requirements.txt.
        folder_name: the name of the runtime's folder.
        file: the user's requirements.txt, from which the lines come.
        original: the lines of that file, if `lines` names CPU builds instead; else empty.
        cpu_torch: install PyTorch's CPU build, as no host has a GPU.
    """

    name: str
    lines: tuple[str, ...]
    folder_name: str
    file: Path | None = None
    original: tuple[str, ...] = ()
    cpu_torch: bool = False


def from_version(text: str, where: str, inventory: Inventory) -> RuntimeRequest | None:
    """Return the request for a version of TensorFlow, 2.19.1 or 2.19 for its newest patch; None if the hosts have it."""
    host_version = inventory.tensorflow or hostpython.host_packages()[hostpython.TENSORFLOW]
    if not _TENSORFLOW_2.fullmatch(text):
        raise UsageError(
            f"{where} {text!r} is no version of TensorFlow 2: write 2.20 or 2.20.0, or leave it out for {host_version}"
        )
    if f"{host_version}.".startswith(f"{text}."):
        return None
    others = (Requirement(line).name for line in hostpython.lines_of(hostpython.REQUIREMENTS))
    requirement = f"{hostpython.TENSORFLOW}=={text}{'.*' if text.count('.') == 1 else ''}"
    return _make_request(f"tensorflow-{text}", [requirement, *(name for name in others if name != hostpython.TENSORFLOW)])


def from_file(path: str, where: str, gpus: bool = False) -> RuntimeRequest:
    """Return the request for a runtime with only a requirements.txt; without `gpus`, with the existing CPU builds."""
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"{where} {path} is no file: give the path of a requirements.txt")
    if not (lines := hostpython.flat_lines(file)):
        raise UsageError(f"{where} {path} has no requirement: write a requirement on each line, such as scikit-learn==1.7.2")
    if editable := next(
        (line for line in (*hostpython.lines_of(file), *lines) if line.startswith(hostpython.EDITABLE) or line in (".", "./")),
        None,
    ):
        raise UsageError(f"{where} {path} requires {editable}, which stays in a folder of this machine: name a wheel of it")
    builds, cpu_torch = lines if gpus else cpu_builds(lines), not gpus and names_torch(lines)
    request = _make_request(file.stem, builds, file.absolute(), cpu_torch)
    return replace(request, original=() if builds == lines else tuple(lines))


def from_manifest(inventory: Inventory, request: Mapping[str, Any]) -> RuntimeRequest:
    """Return the request for a manifest's runtime: the existing folder if it still has these versions, else a new one.

    The manifest's `key` is the folder's name. OpsError if `fab train` would not have written it: a compromised host could
    have, and uv may run code of the packages that it installs.
    """
    name, folder_name, requirements = request.get("name"), request.get("key"), request.get("requirements")
    lines = (
        [line for line in requirements if isinstance(line, str) and _PINNED.fullmatch(line)]
        if isinstance(requirements, list)
        else []
    )
    is_valid = (
        isinstance(name, str)
        and isinstance(folder_name, str)
        and _FOLDER_NAME.fullmatch(name)
        and _FOLDER_NAME.fullmatch(folder_name)
    )
    if not is_valid or lines != requirements:
        raise OpsError("the manifest has a runtime that fab train would not have made: start the job with fab train")
    folder = require_runtimes(inventory, f"runtime {name}").here / str(folder_name)
    return (
        RuntimeRequest(str(name), tuple(lines), str(folder_name))
        if format_requirements(installed_packages(folder)) == lines
        else _make_request(str(name), lines, cpu_torch=any(line.endswith("+cpu") for line in lines))
    )


def _make_request(name: str, lines: Sequence[str], file: Path | None = None, cpu_torch: bool = False) -> RuntimeRequest:
    contents = hostpython.contents_of_files(file.parent, lines) if file else ()
    options = [_CPU_TORCH] if cpu_torch else []
    here = f" {file.parent}/" if file else ""  # the same files in another folder give the same runtime
    relative = [line.replace(here, " ") if here else line for line in (*lines, *options)]
    digest = digest_of([PYTHON.encode(), *(line.encode() for line in relative), *contents])
    folder = f"{_NOT_IN_NAMES.sub('-', name).strip('-.')[:40]}-{digest[:12]}"
    return RuntimeRequest(name, tuple(lines), folder, file, cpu_torch=cpu_torch)


def python(inventory: Inventory, runtime: RuntimeRequest) -> str:
    """Return the path of a runtime's Python on the hosts."""
    return _host_python(require_runtimes(inventory, f"runtime {runtime.name}"), runtime.folder_name)


def _host_python(folders: Runtimes, folder_name: str) -> str:
    return f"{folders.on_hosts}/{folder_name}/bin/python"


def python_of(inventory: Inventory, manifest: Mapping[str, Any]) -> str | None:
    """Return the path on the hosts of a job's own Python, by the runtime in its manifest; None if there is none."""
    folder_name = manifest.get("runtime", {}).get("key")
    is_known = inventory.runtimes is not None and isinstance(folder_name, str) and _FOLDER_NAME.fullmatch(folder_name)
    return f"{inventory.runtimes}/{folder_name}/bin/python" if is_known else None


def build(inventory: Inventory, runtime: RuntimeRequest) -> dict[str, str]:
    """Return a runtime's packages, name to version; build it first if it is missing."""
    folders = require_runtimes(inventory, f"runtime {runtime.name}")
    folder = folders.here / runtime.folder_name
    if not folder.is_dir():
        if runtime.original:
            replacements = ", ".join(line for line in runtime.lines if line not in runtime.original)
            terminal.note(f"no host has a GPU, so CPU builds are installed: {replacements}")
        with (
            terminal.ProgressLine(f"building the runtime {runtime.name} (a minute or three, once)", always=True) as step,
            create_atomically(folder, OpsError) as folder_in_progress,
        ):
            try:
                _install(folder_in_progress, runtime, _host_python(folders, runtime.folder_name), step)
            except UsageError as error:
                without_torch = runtime.cpu_torch and "torch" in str(error)
                if not runtime.original and not without_torch:
                    raise
                if without_torch:
                    terminal.note(f"PyTorch comes with CUDA, some 5 GB, as there is no CPU build: {error}")
                # Not every version has a CPU build.
                lines, cpu_torch = runtime.original or runtime.lines, runtime.cpu_torch and not without_torch
                request = replace(runtime, lines=lines, cpu_torch=cpu_torch)
                _install(folder_in_progress, request, _host_python(folders, runtime.folder_name), step)
    return installed_packages(folder)


def read_existing(inventory: Inventory, runtime: RuntimeRequest) -> dict[str, str]:
    """Return a runtime's packages if it was built before, else an empty mapping."""
    return installed_packages(require_runtimes(inventory, f"runtime {runtime.name}").here / runtime.folder_name)


def installed_packages(folder: Path) -> dict[str, str]:
    """Return the packages in a runtime's folder, name to version; empty if there is none."""
    distributions = metadata.distributions(path=[str(folder / _SITE)])
    return {canonicalize_name(each.name): each.version for each in distributions}


def format_requirements(versions: Mapping[str, str]) -> list[str]:
    """Format packages, name to version, as lines of a requirements.txt."""
    return [f"{name}=={version}" for name, version in sorted(versions.items())]


def requested_packages(folder: Path) -> list[str]:
    """Return the requirements of a runtime, without dependencies."""
    if (file := folder / _REQUESTED).exists():
        return file.read_text().splitlines()
    # In a runtime that pip built, a file REQUESTED marks each.
    distributions = metadata.distributions(path=[str(folder / _SITE)])
    return sorted(
        f"{canonicalize_name(each.name)}=={each.version}" for each in distributions if each.read_text("REQUESTED") is not None
    )


def _install(folder: Path, runtime: RuntimeRequest, host_python: str, step: terminal.ProgressLine) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    site = make_venv(folder, PYTHON)
    start = runtime.file.parent if runtime.file else folder
    options = [*wheels_only_options(PYTHON), *([_CPU_TORCH] if runtime.cpu_torch else [])]
    install(site, PYTHON, runtime.lines, start, step, options)
    for script in (site / "bin").glob("*"):  # a script's first line names this machine's Python
        script.write_bytes(script.read_bytes().replace(sys.executable.encode(), host_python.encode()))
        script.rename(folder / "bin" / script.name)
    shutil.rmtree(site / "bin", ignore_errors=True)
    (folder / _REQUESTED).write_text("".join(f"{line}\n" for line in runtime.lines))
    open_to_all(folder)


def cpu_builds(lines: Sequence[str]) -> list[str]:
    """Return the lines of a requirements.txt with CPU builds; keep a line with a hash, which is valid for one file only."""
    return [_cpu_build(line) for line in lines]


def names_torch(lines: Collection[str]) -> bool:
    """Return True if the lines name PyTorch without an index or a hash: its CPU build, from another index, may replace it."""
    has_index = any(line.startswith(_INDEX_OPTIONS) for line in lines)
    return not has_index and any(_name(line) in _TORCH and " --hash" not in line for line in lines)


def cpu_remedy(packages: Iterable[str]) -> str:
    """Return the CPU builds to request instead of these packages, as a clause of an error; empty if there are none."""
    names = {canonicalize_name(package) for package in packages}
    if names & {*_TORCH}:
        return f"a line {TORCH_INDEX} above torch fetches its CPU build; "
    return "".join(f"{other} is the CPU build of {name}; " for name, other in _CPU_BUILDS.items() if name in names)


def _cpu_build(line: str) -> str:
    name = _name(line)
    if name not in _CPU_BUILDS or " --" in line:
        return line
    requirement = Requirement(line)
    requirement.name, requirement.extras = _CPU_BUILDS[name], requirement.extras - {_CUDA}
    return line if requirement.url else str(requirement)


def _name(line: str) -> str:
    try:
        return canonicalize_name(Requirement(line.partition(" --")[0].strip()).name)
    except InvalidRequirement:
        return ""
