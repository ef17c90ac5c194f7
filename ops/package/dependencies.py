"""A trainer's dependencies: built or fetched by uv here, as hosts may have no route to an index, and unpacked.

uv's result is kept in `.cache/dependencies/<hash of the inputs>`, so a second submission needs no network.
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
# How much smaller packages are when they are compressed, about.
_COMPRESSION = 4
_SITE, _REQUIREMENTS = "site", "requirements.txt"
# What uv writes beside a package's own files differs from machine to machine.
_UV_FILES = ("INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json")


def build_project(root: Path, files: Mapping[str, bytes]) -> Path:
    """Return a folder with what a project installs, and its dependencies as requirements.txt.

    Args:
        root: the project's folder.
        files: its files by their paths, which begin with that folder's name.
    """
    history = git.find(root)
    parts = [PYTHON.encode(), *_contents(files)]
    parts += [history.state.encode()] if history else []

    def make(into: Path, step: terminal.ProgressLine) -> None:
        # In a copy, because a build leaves files behind, and includes those of an earlier one.
        with tempfile.TemporaryDirectory() as folder:
            top = history.top.resolve() if history else root.parent
            copy, below = Path(folder) / top.name, root.relative_to(top)
            placed = {below / Path(path).relative_to(root.name): content for path, content in files.items()}
            if history:
                git.copy(history, copy, placed)
            else:
                git.write(copy, placed)
            built = copy / below
            install(into / _SITE, PYTHON, [f"./{built.name}"], built.parent, step, ["--no-deps"])
        requires = [line for each in distributions(path=[str(into / _SITE)]) for line in each.requires or []]
        (into / _REQUIREMENTS).write_text("\n".join(requires))

    return _cached(parts, f"building {root.name}", make)


def fetch(
    requirements: Path,
    installed: Mapping[str, str] | None = None,
    python: str = PYTHON,
    check: Callable[[Sizes], None] = lambda _: None,
    own: Mapping[str, bytes] = MappingProxyType({}),
) -> dict[str, bytes]:
    """Return the files of the packages that a requirements.txt asks for and the hosts lack, as in site-packages.

    Args:
        requirements: the file.
        installed: what the job's own Python has, name to version, if it is not the hosts'.
        python: the hosts' version.
        check: is called with the sizes of the packages before each download, and of all of them at the end; an exception of it
            ends the fetch.
        own: the files of the folder of `requirements`, for a line that installs that folder.
    """
    lines = hostpython.flat_lines(requirements)
    present = hostpython.host_packages() if installed is None else hostpython.add_aliases(installed)
    replaced = hostpython.find_conflicts(lines, present, python)
    remaining = {name: version for name, version in present.items() if name not in replaced}
    lacking = [line for line in lines if not hostpython.is_met(line, remaining, python)]
    if not any(map(hostpython.asks_for_packages, lacking)):
        return {}
    have = [f"{name}=={version}" for name, version in sorted(remaining.items())]
    parts = [part.encode() for part in (python, *have, *lines)] + list(hostpython.contents_of_files(requirements.parent, lines))
    parts += _contents(own) if any(map(hostpython.is_own_folder, lines)) else []

    def make(into: Path, step: terminal.ProgressLine) -> None:
        site = into / _SITE
        with tempfile.TemporaryDirectory() as folder:
            # What the hosts have takes part in the resolution as wheels without content, each with a hash if one is needed.
            hashed = any(" --hash" in line for line in lacking)
            stubs = [_stub_line(name, stub, hashed) for name, stub in hostpython.stubs(Path(folder), remaining).items()]
            install(site, python, [*lacking, *stubs], requirements.parent, step, wheels_only_options(python), check)
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
                    raise hostpython.version_error(replaced[name], name, present[name])
                instead = f"in the place of the {present[name]} that the Python of the job has"
                terminal.note(f"{name} {distribution.version} goes along, {instead}")

    cached = _cached(parts, "fetching dependencies", make)
    sizes = Counter[str]()
    for path, file in _paths(cached).items():
        sizes[path.partition("/")[0]] += file.stat().st_size
    check({name: size // _COMPRESSION for name, size in sizes.items()})
    return read(cached)


def read(folder: Path) -> dict[str, bytes]:
    """Return the installed files without scripts, which no import needs: path in site-packages to content."""
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
    of_uv = {path for path, file in paths.items() if file.parent.suffix == ".dist-info" and file.name in _UV_FILES}
    return {path: file for path, file in paths.items() if path not in of_uv and not path.startswith("bin/")}


def _contents(files: Mapping[str, bytes]) -> list[bytes]:
    return [part for path in sorted(files) for part in (os.fsencode(path), files[path])]


def _stub_line(name: str, stub: Path, hashed: bool) -> str:
    digest = f" --hash=sha256:{hashlib.sha256(stub.read_bytes()).hexdigest()}" if hashed else ""
    return f"{name} @ {stub.as_uri()}{digest}"


def _tag(distribution: Distribution) -> str:
    """Return the tag of a distribution's wheel: of several, one of manylinux, else one for any platform."""
    lines = (distribution.read_text("WHEEL") or "").splitlines()
    tags = [line.removeprefix("Tag: ") for line in lines if line.startswith("Tag: ")]
    return max(tags, key=lambda tag: [each in tag for each in ("-manylinux", "-any")], default="py3-none-any")


def _cached(parts: Iterable[bytes], what: str, make: Callable[[Path, terminal.ProgressLine], None]) -> Path:
    """Return the folder that `make` filled for the same parts before, or does now, atomically."""
    if not (folder := CACHE / digest_of(parts)).is_dir():
        with terminal.ProgressLine(what) as step, create_atomically(folder, OpsError) as target:
            target.mkdir()
            make(target, step)
    return folder
