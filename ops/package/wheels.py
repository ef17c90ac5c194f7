"""What a trainer needs besides itself: made or fetched by pip here, since hosts have no route outside, and unpacked for them.

All that pip leaves is kept below .cache/wheels by the content that asked for it: a second submission needs no network.
"""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path

from packaging.utils import parse_wheel_filename

from infra.runtime.pip import for_hosts
from infra.runtime.whole import key, making
from ops import terminal
from ops.cluster.inventory import PYTHON, ROOT
from ops.errors import OpsError, UsageError
from ops.package import hostpython, piperror
from ops.package.pip import pip

CACHE = ROOT / ".cache" / "wheels"


def project(name: str, files: Mapping[str, bytes]) -> Path:
    """A folder with the wheel of a project, and its dependencies as requirements.txt. `files` are below the folder `name`."""
    parts = [part for path in sorted(files) for part in (path.encode(), files[path])]

    def make(into: Path) -> None:
        # In a copy, because a build leaves things behind, and takes in what an earlier one left.
        with tempfile.TemporaryDirectory() as copy:
            for path, content in files.items():
                (target := Path(copy, path)).parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
            pip("wheel", f"--wheel-dir={into}", "--no-deps", f"./{name}", start=Path(copy))
        (into / "requirements.txt").write_text("\n".join(_distribution(_only_wheel(into)).requires or []))

    return _kept(parts, f"building {name}", make)


def project_files(built: Path) -> dict[str, bytes]:
    """What is in the project's wheel."""
    return unpack([_only_wheel(built)])


def fetch(requirements: Path, installed: Mapping[str, str] | None = None, python: str = PYTHON) -> list[Path]:
    """The wheels that a requirements.txt asks for and the hosts lack; UsageError where there are none that fit the hosts.

    `installed` is what the job's own Python has, name to version, where it is not the hosts'; `python` is the hosts' version.
    """
    lines = hostpython.lines_of(requirements)
    if installed is None and set(lines) <= set(hostpython.lines_of(hostpython.REQUIREMENTS)):
        return []
    there = hostpython.hosts() if installed is None else hostpython.aliased(installed)
    if all(hostpython.is_there(line, there, python) for line in lines):
        return []
    have = [f"{name}=={version}" for name, version in sorted(there.items())]
    parts = [part.encode() for part in (python, *have, *lines)] + list(hostpython.named_files(requirements.parent, lines))

    def make(into: Path) -> None:
        with tempfile.TemporaryDirectory() as stubs:
            constraints = hostpython.constraints(Path(stubs), there)
            asked = ["--constraint", str(constraints), "--requirement", str(requirements)]
            if hostpython.is_like_this(python):
                pip("wheel", f"--wheel-dir={into}", *asked, start=requirements.parent, hosts=python)
            else:
                pip("download", f"--dest={into}", *for_hosts(python), *asked, start=requirements.parent, hosts=python)
        for wheel in into.glob("*.whl"):
            name, _, _, tags = parse_wheel_filename(wheel.name)
            if name in there:
                wheel.unlink()
            elif not tags & hostpython.tags(python):
                raise UsageError(piperror.unfit(wheel.name, python))

    return sorted(_kept(parts, "fetching dependencies", make).glob("*.whl"))


def unpack(wheels: Iterable[Path]) -> dict[str, bytes]:
    """The modules and data of wheels as they lie in site-packages: path to content."""
    files: dict[str, bytes] = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as opened:
            for entry in opened.infolist():
                path = _installed(entry.filename)
                if not path or entry.is_dir():
                    continue
                if path.startswith("/") or ".." in path.split("/"):
                    raise UsageError(
                        f"{wheel.name} has a file of the name {path!r}, which would leave the package: do not use it"
                    )
                files[path] = opened.read(entry)
    return files


def _kept(parts: Iterable[bytes], what: str, make: Callable[[Path], None]) -> Path:
    """The folder that `make` filled for the same parts before, or does now; it is there whole or not at all."""
    if not (folder := CACHE / key(parts)).is_dir():
        with terminal.Step(what), making(folder, OpsError) as made:
            made.mkdir()
            make(made)
    return folder


def _installed(path: str) -> str | None:
    """Where a file of a wheel lies once installed; None for scripts and the like, which no trainer imports."""
    top, _, rest = path.partition("/")
    if not top.endswith(".data"):
        return path
    kind, _, inside = rest.partition("/")
    return inside if kind in ("purelib", "platlib") else None


def _only_wheel(folder: Path) -> Path:
    return next(folder.glob("*.whl"))


def _distribution(wheel: Path) -> metadata.Distribution:
    info = next(name for name in zipfile.Path(wheel).iterdir() if name.name.endswith(".dist-info"))
    return metadata.PathDistribution(info)
