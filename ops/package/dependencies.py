"""Build or fetch a trainer's dependencies with uv on this machine, as hosts may have no route to an index.

The installed files are cached in `.cache/dependencies/<hash of the inputs>`, so a second submission needs no network.
"""

from __future__ import annotations

import csv
import hashlib
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import Distribution, distributions
from pathlib import Path
from types import MappingProxyType

from packaging.utils import canonicalize_name

from infra.runtime.atomic_dir import create_atomically, digest_of
from infra.scale_tiers import PYTHON
from ops import terminal
from ops.cluster.inventory import ROOT
from ops.errors import OpsError, UsageError
from ops.package import git, hostpython
from ops.package.install import Sizes, describe_unfit_wheel, install, wheels_only_options

CACHE = ROOT / ".cache" / "dependencies"
# The approximate ratio of a package's installed size to its compressed size.
_COMPRESSION = 4
_SITE, _REQUIREMENTS = "site", "requirements.txt"
# Files that uv adds to a package's metadata; their content differs between machines.
_UV_FILES = ("INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json")


def build_project(root: Path, files: Mapping[str, bytes]) -> Path:
    """Build a project; return a folder with its installed files and with its dependencies as requirements.txt.

    Args:
        root: the project's folder.
        files: its files by their paths, which begin with the name of `root`.
    """
    repository = git.find(root)
    inputs = [PYTHON.encode(), *_contents(files)]
    inputs += [repository.state.encode()] if repository else []

    def make(into: Path, step: terminal.ProgressLine) -> None:
        # In a copy, because a build leaves files behind, and would include those of an earlier build.
        with tempfile.TemporaryDirectory() as folder:
            top, here = (repository.top.resolve(), root.resolve()) if repository else (root.parent, root)
            copy, subfolder = Path(folder) / top.name, here.relative_to(top)
            project_files = {subfolder / Path(path).relative_to(root.name): content for path, content in files.items()}
            if repository:
                git.copy(repository, copy, project_files)
            else:
                git.write(copy, project_files)
            project = copy / subfolder
            install(into / _SITE, PYTHON, [f"./{project.name}"], project.parent, step, ["--no-deps"])
        requires = [line for each in distributions(path=[str(into / _SITE)]) for line in each.requires or []]
        (into / _REQUIREMENTS).write_text("\n".join(requires))

    return _cached(inputs, f"building {root.name}", make)


def fetch(
    requirements: Path,
    installed: Mapping[str, str] | None = None,
    python: str = PYTHON,
    check: Callable[[Sizes], None] = lambda _: None,
    own: Mapping[str, bytes] = MappingProxyType({}),
) -> dict[str, bytes]:
    """Return the files of the packages that a requirements.txt requires and the hosts lack, by path in site-packages.

    Args:
        requirements: the requirements.txt.
        installed: the packages of the job's own Python, name to version; None for the hosts' Python.
        python: the version of that Python.
        check: called with the sizes of the packages before each download, and of all at the end; its exception ends the fetch.
        own: the files of the folder of `requirements`, for a line such as `.` that installs this folder.
    """
    lines = hostpython.flat_lines(requirements)
    available = hostpython.host_packages() if installed is None else hostpython.add_aliases(installed)
    replaced = hostpython.find_conflicts(lines, available, python)
    remaining = {name: version for name, version in available.items() if name not in replaced}
    extras = hostpython.with_extras(lines, remaining, python) if installed is None else frozenset[str]()
    stubbed = {name: version for name, version in remaining.items() if name not in extras}
    unmet = [line for line in lines if not hostpython.is_met(line, stubbed, python)]
    unmet += [f"{name}=={remaining[name]}" for name in sorted(extras) if not any(" --hash" in line for line in unmet)]
    if not any(map(hostpython.requires_packages, unmet)):
        return {}
    pins = [f"{name}=={version}" for name, version in sorted(remaining.items())]
    inputs = [part.encode() for part in (python, *pins, *lines)]
    inputs += hostpython.contents_of_files(requirements.parent, lines)
    inputs += _contents(own) if any(map(hostpython.is_own_folder, lines)) else []

    def make(into: Path, step: terminal.ProgressLine) -> None:
        site = into / _SITE
        with tempfile.TemporaryDirectory() as folder:
            # uv resolves with empty wheels in place of the available packages, each with a hash if a line has one.
            hashed = any(" --hash" in line for line in unmet)
            stubs = [_stub_line(name, stub, hashed) for name, stub in hostpython.make_stubs(Path(folder), stubbed).items()]
            wanted = [hostpython.without_constraints(line, stubbed, Path(folder)) for line in unmet]
            install(site, python, [*wanted, *stubs], requirements.parent, step, wheels_only_options(python), check)
        for info in site.glob("*.dist-info"):
            distribution = Distribution.at(info)
            name = canonicalize_name(distribution.name)
            if name in remaining:
                shutil.rmtree(info)
                continue
            tag = _tag(distribution)
            if "-linux_" in tag:
                raise UsageError(describe_unfit_wheel(f"{distribution.name}-{distribution.version}-{tag}.whl", python))
            if name in replaced:
                if not tag.endswith("-any"):
                    raise hostpython.version_error(replaced[name], name, available[name])
                instead = f"instead of the {available[name]} of the job's Python"
                terminal.note(f"{name} {distribution.version} is sent, {instead}")

    cached = _cached(inputs, "fetching dependencies", make)
    sizes = Counter[str]()
    for path, file in _paths(cached).items():
        sizes[path.partition("/")[0]] += file.stat().st_size
    check({name: size // _COMPRESSION for name, size in sizes.items()})
    folder = requirements.parent.name
    if (cached / _SITE / folder / "__init__.py").is_file() and not any(map(hostpython.is_own_folder, lines)):
        how = "rename the folder, or give --package a link to it of another name"
        raise UsageError(f"folder {folder} has the name of a package that its requirements.txt installs beside it: {how}")
    return read(cached)


def read(folder: Path) -> dict[str, bytes]:
    """Return the installed files, path in site-packages to content, without scripts, which no import needs."""
    files = {path: file.read_bytes() for path, file in _paths(folder).items()}
    for path in files:
        if path.endswith(".dist-info/RECORD"):
            lines = files[path].splitlines(keepends=True)
            names = [(next(csv.reader([line.decode()])) or [""])[0] for line in lines]
            files[path] = b"".join(line for name, line in zip(names, lines, strict=True) if name in files)
    return files


def _paths(folder: Path) -> dict[str, Path]:
    site = folder / _SITE
    paths = {path.relative_to(site).as_posix(): path for path in sorted(site.rglob("*")) if path.is_file()}
    uv_paths = {path for path, file in paths.items() if file.parent.suffix == ".dist-info" and file.name in _UV_FILES}
    return {path: file for path, file in paths.items() if path not in uv_paths and not path.startswith("bin/")}


def _contents(files: Mapping[str, bytes]) -> list[bytes]:
    return [part for path in sorted(files) for part in (os.fsencode(path), files[path])]


def _stub_line(name: str, stub: Path, hashed: bool) -> str:
    digest = f" --hash=sha256:{hashlib.sha256(stub.read_bytes()).hexdigest()}" if hashed else ""
    return f"{name} @ {stub.as_uri()}{digest}"


def _tag(distribution: Distribution) -> str:
    """Return the tag of a distribution's wheel; of several tags prefer manylinux, then any platform."""
    lines = (distribution.read_text("WHEEL") or "").splitlines()
    tags = [line.removeprefix("Tag: ") for line in lines if line.startswith("Tag: ")]
    return max(tags, key=lambda tag: [each in tag for each in ("-manylinux", "-any")], default="py3-none-any")


def _cached(inputs: Iterable[bytes], what: str, make: Callable[[Path, terminal.ProgressLine], None]) -> Path:
    """Return the cached folder for these inputs; if it is missing, `make` fills it, atomically."""
    if not (folder := CACHE / digest_of(inputs)).is_dir():
        with terminal.ProgressLine(what) as step, create_atomically(folder, OpsError) as target:
            target.mkdir()
            make(target, step)
    return folder
