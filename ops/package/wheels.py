"""A trainer's dependencies: built or fetched by pip here, since hosts have no route, and unpacked.

All results of pip are kept below .cache/wheels by the content that asked for them: a second submission needs no network.
"""

from __future__ import annotations

import hashlib
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from packaging.utils import parse_wheel_filename

from infra.runtime.atomic_dir import key, making
from infra.runtime.pip import for_hosts
from infra.spec import PYTHON
from ops import terminal
from ops.cluster.inventory import ROOT
from ops.errors import OpsError, UsageError
from ops.package import git, hostpython, piperror
from ops.package.pip import Sizes, pip

CACHE = ROOT / ".cache" / "wheels"


def project(root: Path, files: Mapping[str, bytes]) -> Path:
    """Return a folder with the wheel of a project, and its dependencies as requirements.txt.

    Args:
        root: the project's folder.
        files: its files by their paths from beside that folder.
    """
    history = git.find(root)
    parts = [part for path in sorted(files) for part in (path.encode(), files[path])]
    parts += [history.state.encode()] if history else []

    def make(into: Path, step: terminal.Step) -> None:
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
            pip("wheel", f"--wheel-dir={into}", "--no-deps", f"./{built.name}", start=built.parent, step=step)
        (into / "requirements.txt").write_text("\n".join(_distribution(_only_wheel(into)).requires or []))

    return _kept(parts, f"building {root.name}", make)


def project_files(built: Path) -> dict[str, bytes]:
    """Return the content of the project's wheel."""
    return unpack([_only_wheel(built)])


def fetch(
    requirements: Path,
    installed: Mapping[str, str] | None = None,
    python: str = PYTHON,
    check: Callable[[Sizes], None] = lambda _: None,
) -> list[Path]:
    """Fetch the wheels that a requirements.txt asks for and the hosts lack.

    Args:
        requirements: the file.
        installed: what the job's own Python has, name to version, if it is not the hosts'.
        python: the hosts' version.
        check: is called with the sizes of what is about to be fetched; what it raises ends that.

    Raises:
        UsageError: there are none that fit the hosts.
    """
    lines = hostpython.flat_lines(requirements)
    if installed is None and set(lines) <= set(hostpython.lines_of(hostpython.REQUIREMENTS)):
        return []
    there = hostpython.hosts() if installed is None else hostpython.aliased(installed)
    replaced = hostpython.replaced(lines, there, python)
    remaining = {name: version for name, version in there.items() if name not in replaced}
    lacking = [line for line in lines if not hostpython.is_there(line, remaining, python)]
    if all(line.startswith("-") and not line.startswith(hostpython.EDITABLE) for line in lacking):
        return []
    have = [f"{name}=={version}" for name, version in sorted(remaining.items())]
    parts = [part.encode() for part in (python, *have, *lines)] + list(hostpython.named_files(requirements.parent, lines))

    def make(into: Path, step: terminal.Step) -> None:
        with tempfile.TemporaryDirectory() as folder:
            pip_args = _asked(Path(folder), requirements, lines, lacking, remaining)
            like_this = hostpython.is_like_this(python)
            where = [f"--wheel-dir={into}"] if like_this else [f"--dest={into}", *for_hosts(python)]
            command = "wheel" if like_this else "download"
            pip(command, *where, *pip_args, start=requirements.parent, hosts=python, step=step, check=check)
        for wheel in into.glob("*.whl"):
            name, version, _, tags = parse_wheel_filename(wheel.name)
            if name in remaining:
                wheel.unlink()
            elif not tags & hostpython.tags(python):
                raise UsageError(piperror.unfit(wheel.name, python))
            elif name in replaced and not any(tag.platform == "any" for tag in tags):
                raise hostpython.other_version(replaced[name], name, there[name])
            elif name in replaced:
                terminal.note(f"{name} {version} goes along, in the place of the {there[name]} that the Python of the job has")

    return sorted(_kept(parts, "fetching dependencies", make).glob("*.whl"))


def _asked(
    folder: Path, requirements: Path, lines: Sequence[str], lacking: Sequence[str], kept: Mapping[str, str]
) -> list[str]:
    """Return pip's arguments, with the packages `kept` of the job's Python as empty wheels in `folder`.

    If a line has a hash, pip demands one for each package; any will do for those of the job's Python.
    """
    stubs = hostpython.stubs(folder, kept)
    stub_lines = {name: f"{name} @ {stub.as_uri()}" for name, stub in stubs.items()}
    if not any(" --hash" in line for line in lines):
        (constraints := folder / "constraints.txt").write_text("".join(f"{line}\n" for line in stub_lines.values()))
        return ["--constraint", str(constraints), "--requirement", str(requirements)]
    if any(" --hash" in line for line in lacking):
        digests = {name: hashlib.sha256(stub.read_bytes()).hexdigest() for name, stub in stubs.items()}
        stub_lines = {name: f"{line} --hash=sha256:{digests[name]}" for name, line in stub_lines.items()}
    (requirements_file := folder / "requirements.txt").write_text(
        "".join(f"{line}\n" for line in (*lacking, *stub_lines.values()))
    )
    return ["--requirement", str(requirements_file)]


def unpack(wheels: Iterable[Path]) -> dict[str, bytes]:
    """Return the modules and data of wheels as they lie in site-packages: path to content."""
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


def _kept(parts: Iterable[bytes], what: str, make: Callable[[Path, terminal.Step], None]) -> Path:
    """Return the folder that `make` filled for the same parts before, or does now, atomically."""
    if not (folder := CACHE / key(parts)).is_dir():
        with terminal.Step(what) as step, making(folder, OpsError) as target:
            target.mkdir()
            make(target, step)
    return folder


def _installed(path: str) -> str | None:
    """Return the path of a wheel's file once installed; None for scripts and the like, never imported."""
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
