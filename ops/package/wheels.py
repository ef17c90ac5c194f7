"""What a trainer needs besides itself: made or fetched by pip here, since hosts have no route outside, and unpacked for them.

All that pip leaves is kept below .cache/wheels by the content that asked for it: a second submission needs no network.
"""

from __future__ import annotations

import hashlib
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from packaging.utils import parse_wheel_filename

from infra.runtime.pip import for_hosts
from infra.runtime.whole import key, making
from infra.spec import PYTHON
from ops import terminal
from ops.cluster.inventory import ROOT
from ops.errors import OpsError, UsageError
from ops.package import git, hostpython, piperror
from ops.package.pip import Sizes, pip

CACHE = ROOT / ".cache" / "wheels"


def project(root: Path, files: Mapping[str, bytes]) -> Path:
    """A folder with the wheel of a project, and its dependencies as requirements.txt.

    Args:
        root: the project's folder.
        files: its files by their paths from beside that folder.
    """
    history = git.find(root)
    parts = [part for path in sorted(files) for part in (path.encode(), files[path])]
    parts += [history.state.encode()] if history else []

    def make(into: Path, step: terminal.Step) -> None:
        # In a copy, because a build leaves things behind, and takes in what an earlier one left.
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
    """What is in the project's wheel."""
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
    kept = {name: version for name, version in there.items() if name not in replaced}
    lacking = [line for line in lines if not hostpython.is_there(line, kept, python)]
    if all(line.startswith("-") and not line.startswith(hostpython.EDITABLE) for line in lacking):
        return []
    have = [f"{name}=={version}" for name, version in sorted(kept.items())]
    parts = [part.encode() for part in (python, *have, *lines)] + list(hostpython.named_files(requirements.parent, lines))

    def make(into: Path, step: terminal.Step) -> None:
        with tempfile.TemporaryDirectory() as folder:
            asked = _asked(Path(folder), requirements, lines, lacking, kept)
            like_this = hostpython.is_like_this(python)
            where = [f"--wheel-dir={into}"] if like_this else [f"--dest={into}", *for_hosts(python)]
            command = "wheel" if like_this else "download"
            pip(command, *where, *asked, start=requirements.parent, hosts=python, step=step, check=check)
        for wheel in into.glob("*.whl"):
            name, version, _, tags = parse_wheel_filename(wheel.name)
            if name in kept:
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
    """What pip is asked for, with what is `kept` of the job's Python as wheels with no content, made in `folder`.

    Where a line has a hash, pip wants one of each that it takes, and of the one that the job's Python has it is no matter.
    """
    stubs = hostpython.stubs(folder, kept)
    given = {name: f"{name} @ {stub.as_uri()}" for name, stub in stubs.items()}
    if not any(" --hash" in line for line in lines):
        (constraints := folder / "constraints.txt").write_text("".join(f"{line}\n" for line in given.values()))
        return ["--constraint", str(constraints), "--requirement", str(requirements)]
    if any(" --hash" in line for line in lacking):
        digests = {name: hashlib.sha256(stub.read_bytes()).hexdigest() for name, stub in stubs.items()}
        given = {name: f"{line} --hash=sha256:{digests[name]}" for name, line in given.items()}
    (asked := folder / "requirements.txt").write_text("".join(f"{line}\n" for line in (*lacking, *given.values())))
    return ["--requirement", str(asked)]


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


def _kept(parts: Iterable[bytes], what: str, make: Callable[[Path, terminal.Step], None]) -> Path:
    """The folder that `make` filled for the same parts before, or does now; it is there whole or not at all."""
    if not (folder := CACHE / key(parts)).is_dir():
        with terminal.Step(what) as step, making(folder, OpsError) as made:
            made.mkdir()
            make(made, step)
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
