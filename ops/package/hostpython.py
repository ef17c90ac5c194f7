"""The packages of the hosts' Python, and the lines of a requirements.txt that they do not meet."""

from __future__ import annotations

import re
import zipfile
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from packaging.markers import UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from infra.runtime.atomic_dir import digest_of
from infra.scale_tiers import PYTHON
from infra.templates import ROOT as CHECKOUT
from ops.errors import UsageError

REQUIREMENTS = CHECKOUT / "trainer" / "requirements.txt"
CONSTRAINTS = CHECKOUT / "constraints.txt"
HOST_PACKAGES_FILE = Path(__file__).with_name("host_packages.txt")
# The hosts' values of environment markers, besides the versions of Python.
_ENVIRONMENT = {
    "implementation_name": "cpython",
    "os_name": "posix",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "platform_system": "Linux",
    "sys_platform": "linux",
}
TENSORFLOW = "tensorflow-cpu"
# Lines of a requirements.txt that name files: an option, or what looks like a path.
_INCLUDE_OPTION = re.compile(r"(?:-r|--requirement|-c|--constraint)[ =]*(.+)")
_PATH_OPTION = re.compile(r"(-r|--requirement|-c|--constraint|-f|--find-links)[ =]*(.+)")
_CONSTRAINT = ("-c", "--constraint")
EDITABLE = ("-e ", "--editable")
_EDITABLE_OPTION = re.compile(r"(?:-e|--editable)[ =]+(.+)")
_COMMENT = re.compile(r"\s#")
_PATHS = (".", "/")
_ARCHIVES = (".whl", ".tar.gz", ".zip")
_EXTRAS = re.compile(r"\[[^\]]*\]$")
# Other names of distributions, each with the name that the hosts have.
_ALIASES = {"tensorflow": TENSORFLOW}


@cache
def host_packages() -> dict[str, str]:
    """Return the hosts' packages for trainers, name to version, from host_packages.txt and constraints.txt.

    They are read from files: they may not be installed here, and this Python may have another version.
    """
    pinned = dict(line.split("==") for line in lines_of(CONSTRAINTS))
    versions: dict[str, str] = {canonicalize_name(name): version for name, version in pinned.items()}
    return add_aliases({name: versions[name] for name in lines_of(HOST_PACKAGES_FILE)})


def add_aliases(packages: Mapping[str, str]) -> dict[str, str]:
    """Return the packages, also under their other names."""
    return {**packages, **{alias: packages[name] for alias, name in _ALIASES.items() if name in packages}}


def with_extras(lines: Iterable[str], packages: Mapping[str, str], python: str = PYTHON) -> frozenset[str]:
    """Return the names of the packages that a line requires with extras, whose own requirements the hosts may lack.

    TensorFlow's extra is CUDA, which a job's own Python has.
    """
    requirements = [requirement for line in lines if (requirement := _requirement(line)) and _applies(requirement, python)]
    names = {canonicalize_name(requirement.name) for requirement in requirements if requirement.extras}
    return frozenset(names & packages.keys() - {TENSORFLOW, *_ALIASES})


def is_met(line: str, packages: Mapping[str, str], python: str = PYTHON) -> bool:
    """Return True if `packages` meet a requirement, or if its marker does not apply to the hosts."""
    if (requirement := _requirement(line)) is None:
        return False  # a path, an option, or an error that uv reports
    return not _applies(requirement, python) or _meets(requirement, packages.get(canonicalize_name(requirement.name)))


def find_conflicts(lines: Sequence[str], packages: Mapping[str, str], python: str = PYTHON) -> dict[str, str]:
    """Return the lines that require another version of a package, by its name; UsageError if no job may replace it.

    A line of a constraints file counts if another line requires its package.
    """
    requirements = [requirement for line in lines if (requirement := _requirement(line)) and _applies(requirement, python)]
    required = {canonicalize_name(requirement.name) for requirement in requirements}
    files = [Path(option[1]) for line in lines if line.startswith(_CONSTRAINT) and (option := _INCLUDE_OPTION.fullmatch(line))]
    lines_by_name = {}
    for line in (*lines, *(each for file in files if file.is_file() for each in flat_lines(file))):
        requirement = _requirement(line)
        name = canonicalize_name(requirement.name) if requirement else ""
        if (
            requirement
            and name in required & packages.keys()
            and _applies(requirement, python)
            and not _meets(requirement, packages[name])
        ):
            if name in _protected_packages():
                raise version_error(line, name, packages[name])
            lines_by_name[name] = line
    return lines_by_name


def without_constraints(line: str, names: Collection[str], folder: Path) -> str:
    """Return a line; if it names a constraints file, name a copy in `folder` that does not constrain these packages."""
    option = _INCLUDE_OPTION.fullmatch(line)
    if option is None or not line.startswith(_CONSTRAINT) or not Path(option[1]).is_file():
        return line
    lines = [
        each
        for each in flat_lines(Path(option[1]))
        if (requirement := _requirement(each)) is None or canonicalize_name(requirement.name) not in names
    ]
    copy = folder / f"{digest_of([line.encode()])}.txt"
    copy.write_text("\n".join(lines))
    return f"-c {copy}"


def version_error(line: str, name: str, version: str) -> UsageError:
    """Return the error for a line that requires another version of a package that no job may replace."""
    spec = without_options(line)
    return UsageError(
        f"{spec} is required, but the job's Python has {name} {version}: require that version, leave it out, or give the job a "
        "Python of its own by --runtime"
    )


def without_options(line: str) -> str:
    """Return a line's requirement without options such as --hash."""
    return line.partition(" --")[0].strip()


def _requirement(line: str) -> Requirement | None:
    try:
        requirement = Requirement(without_options(line))
        _applies(requirement, PYTHON)
    except (InvalidRequirement, UndefinedEnvironmentName):
        return None
    return requirement


def _meets(requirement: Requirement, version: str | None) -> bool:
    return version is not None and not requirement.url and requirement.specifier.contains(version, prereleases=True)


@cache
def _protected_packages() -> frozenset[str]:
    """Return the packages that no job may replace: those of trainer/requirements.txt, their other names, and Keras."""
    names = {canonicalize_name(Requirement(line).name) for line in lines_of(REQUIREMENTS)}
    return frozenset({*names, *_ALIASES, "keras"})


def make_stubs(folder: Path, packages: Mapping[str, str]) -> dict[str, Path]:
    """Make empty wheels of the hosts' packages, so that uv takes these as available; return the wheels' paths by name."""
    wheels = {}
    for name, version in packages.items():
        stem = f"{name.replace('-', '_')}-{version}"
        wheels[name] = folder / f"{stem}-py3-none-any.whl"
        with zipfile.ZipFile(wheels[name], "w") as wheel:
            info = f"{stem}.dist-info"
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    return wheels


def lines_of(requirements: Path) -> list[str]:
    """Return the lines of a requirements.txt without comments; as for pip it is UTF-8, or UTF-16 with a byte order mark."""
    return [line for _, line in _numbered_lines(requirements)]


def _numbered_lines(requirements: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of `lines_of`, each with its number."""
    try:
        content = requirements.read_bytes()
        text = content.decode("utf-16" if content.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) else "utf-8-sig")
    except OSError as error:
        raise UsageError(f"{requirements} cannot be read: {error}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{requirements} cannot be read: {error}; save it as UTF-8") from None
    first, parts = 1, list[str]()
    for number, part in enumerate([*text.splitlines(), ""], 1):
        parts.append(part.removesuffix("\\"))
        if part.endswith("\\"):
            continue
        line = _COMMENT.split(" ".join(parts), 1)[0].strip()
        if line and not line.startswith("#"):
            yield first, line
        first, parts = number + 1, []


def flat_lines(requirements: Path) -> list[str]:
    """Return the lines of `lines_of` with the files of -r inlined once, and the paths of other options made absolute.

    Editable requirements become normal ones, as hosts have no folder of this machine.
    """
    return list(_flat_lines(requirements, set()))


def _flat_lines(requirements: Path, inlined: set[Path]) -> Iterator[str]:
    inlined.add(requirements.resolve())
    for number, line in _numbered_lines(requirements):
        option = _INCLUDE_OPTION.fullmatch(line)
        path = requirements.parent / option[1].strip("'\"") if option else requirements
        if option and not path.is_file() and not _is_remote(option[1]):
            raise UsageError(f"{requirements}:{number}: {path.name} is missing in {path.parent}")
        if not option or _is_remote(option[1]) or line.startswith(_CONSTRAINT):
            yield absolute(_without_editable(line), requirements.parent)
        elif path.resolve() not in inlined:
            yield from _flat_lines(path, inlined)


def requires_packages(line: str) -> bool:
    """Return whether a line of `flat_lines` requires packages: options do not, except -r with a URL, which uv reads."""
    return not line.startswith("-") or line.startswith(("-r", "--requirement"))


def _is_remote(path: str) -> bool:
    """Return whether an option's path is a URL, or contains a variable: uv resolves both."""
    return "://" in path or "${" in path


def _without_editable(line: str) -> str:
    """Return a line without -e, whose value is a path or a URL, and never the name of a distribution."""
    if (option := _EDITABLE_OPTION.fullmatch(line)) is None:
        return line
    path = option[1].strip("'\"")
    return path if path.startswith((*_PATHS, "${")) or "://" in path else f"./{path}"


def is_own_folder(line: str) -> bool:
    """Return True for a line that requires the folder of its own file, such as `.[train]`."""
    return _EXTRAS.sub("", line) in (".", "./")


def absolute(line: str, folder: Path) -> str:
    """Return a line whose option's path, relative to `folder`, is made absolute."""
    option = _PATH_OPTION.fullmatch(line)
    path = folder / option[2].strip("'\"") if option else folder
    return f"{option[1]} {path.absolute()}" if option and path.exists() else line


def contents_of_files(folder: Path, lines: Iterable[str], visited: set[Path] | None = None) -> Iterator[bytes]:
    """Yield the content of files that lines name, recursively, such as `-r more.txt` or `./mine.whl`.

    The lines of `visited` files are not followed again, as files may include one another.
    """
    visited = set() if visited is None else visited
    for line in lines:
        option = _INCLUDE_OPTION.match(line)
        if option is None and not line.startswith(_PATHS) and not without_options(line).endswith(_ARCHIVES):
            continue  # the name of a distribution, though there may be a folder of that name
        path = folder / _EXTRAS.sub("", option[1] if option else without_options(line))
        inside = sorted(path.rglob("*")) if path.is_dir() and path != folder else [path]
        yield from (candidate.read_bytes() for candidate in inside if candidate.is_file())
        if option and path.is_file() and (real := path.resolve()) not in visited:
            visited.add(real)
            yield from contents_of_files(path.parent, lines_of(path), visited)


def _applies(requirement: Requirement, python: str) -> bool:
    full = f"{python}.2"  # any patch version
    versions = {"python_version": python, "python_full_version": full, "implementation_version": full}
    return requirement.marker is None or requirement.marker.evaluate({**_ENVIRONMENT, **versions, "extra": ""})
