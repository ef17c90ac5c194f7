"""The hosts' Python as pip must see it: what it has, which needs no push and is never replaced, and which wheels fit it."""

from __future__ import annotations

import platform
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

from packaging.markers import UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name

from infra.runtime.pip import PLATFORMS
from infra.spec import PYTHON
from infra.templates import ROOT as HERE
from ops.errors import UsageError

REQUIREMENTS = HERE / "trainer" / "requirements.txt"
CONSTRAINTS = HERE / "constraints.txt"
NAMES = Path(__file__).with_name("hosts.txt")
# What a requirement's marker means there, besides the versions of Python.
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
_OPTION = re.compile(r"(?:-r|--requirement|-c|--constraint)[ =]*(.+)")
_PATH_OPTION = re.compile(r"(-r|--requirement|-c|--constraint|-f|--find-links)[ =]*(.+)")
EDITABLE = ("-e ", "--editable")
_PATHS = (".", "/")
_ARCHIVES = (".whl", ".tar.gz", ".zip")
_EXTRAS = re.compile(r"\[[^\]]*\]$")
# A distribution that is another by name alone, and the one that the hosts have.
_ALIASES = {"tensorflow": TENSORFLOW}


@cache
def hosts() -> dict[str, str]:
    """What the hosts' Python has for trainers, name to version: the names of hosts.txt in the versions of constraints.txt.

    It is written down because nothing of it need be here, and this Python may be another.
    """
    pinned = dict(line.split("==") for line in lines_of(CONSTRAINTS))
    versions: dict[str, str] = {canonicalize_name(name): version for name, version in pinned.items()}
    return aliased({name: versions[name] for name in lines_of(NAMES)})


def aliased(there: Mapping[str, str]) -> dict[str, str]:
    """With the other names of what is there."""
    return {**there, **{alias: there[name] for alias, name in _ALIASES.items() if name in there}}


def is_there(line: str, there: Mapping[str, str], python: str = PYTHON) -> bool:
    """True for a requirement that what is `there` meets or need not meet."""
    if (wanted := _requirement(line)) is None:
        return False  # a path or an option, or pip will say what is wrong
    return not _applies(wanted, python) or _meets(wanted, there.get(canonicalize_name(wanted.name)))


def replaced(lines: Iterable[str], there: Mapping[str, str], python: str = PYTHON) -> dict[str, str]:
    """Find what is `there` in a version that a line does not want: its name, and the line.

    Raises:
        UsageError: it is something that TensorFlow works with.
    """
    found = {}
    for line in lines:
        wanted = _requirement(line)
        name = canonicalize_name(wanted.name) if wanted else ""
        if wanted and name in there and _applies(wanted, python) and not _meets(wanted, there[name]):
            if name in _never_replaced():
                raise other_version(line, name, there[name])
            found[name] = line
    return found


def other_version(line: str, name: str, have: str) -> UsageError:
    """The refusal of a requirement that no package can bring along."""
    asked = without_options(line)
    return UsageError(
        f"{asked} is asked for, but the Python of the job has {name} {have}: ask for that, leave the version out, or give the "
        "job a Python of its own by --runtime"
    )


def without_options(line: str) -> str:
    """A line's requirement without what comes behind it, such as --hash."""
    return line.partition(" --")[0].strip()


def _requirement(line: str) -> Requirement | None:
    try:
        wanted = Requirement(without_options(line))
        _applies(wanted, PYTHON)
    except (InvalidRequirement, UndefinedEnvironmentName):
        return None
    return wanted


def _meets(wanted: Requirement, have: str | None) -> bool:
    return have is not None and not wanted.url and wanted.specifier.contains(have, prereleases=True)


@cache
def _never_replaced() -> frozenset[str]:
    """What the hosts' TensorFlow was built for, or is itself."""
    named = {canonicalize_name(Requirement(line).name) for line in lines_of(REQUIREMENTS)}
    return frozenset({*named, *_ALIASES, "keras"})


def stubs(folder: Path, there: Mapping[str, str]) -> dict[str, Path]:
    """Make wheels with no content, by which pip takes what is there for given; by the name of each."""
    made = {}
    for name, version in there.items():
        stem = f"{name.replace('-', '_')}-{version}"
        made[name] = folder / f"{stem}-py3-none-any.whl"
        with zipfile.ZipFile(made[name], "w") as wheel:
            info = f"{stem}.dist-info"
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    return made


def is_like_this(python: str = PYTHON) -> bool:
    """True where what pip makes for the Python that runs this may be for the hosts."""
    here = (platform.python_version_tuple()[:2], sys.platform, platform.machine())
    return here == (tuple(python.split(".")), "linux", "x86_64")


@cache
def tags(python: str = PYTHON) -> frozenset[Tag]:
    """The tags of wheels that the hosts can use."""
    version = [int(part) for part in python.split(".")]
    interpreter = f"cp{python.replace('.', '')}"
    return frozenset([*cpython_tags(version, platforms=PLATFORMS), *compatible_tags(version, interpreter, PLATFORMS)])


def lines_of(requirements: Path) -> list[str]:
    """The lines of a requirements.txt without comments."""
    try:
        text = requirements.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{requirements} cannot be read: {error}") from None
    stripped = (line.partition(" #")[0].strip() for line in text.replace("\\\n", " ").splitlines())
    return [line for line in stripped if line and not line.startswith("#")]


def flat_lines(requirements: Path) -> list[str]:
    """The same with the lines of the files that are named by -r, and the paths of other options from the root."""
    found = []
    for line in lines_of(requirements):
        option = _PATH_OPTION.fullmatch(line)
        named = requirements.parent / option[2] if option else requirements
        inline = option and option[1] in ("-r", "--requirement") and named.is_file()
        found += flat_lines(named) if inline else [absolute(line, requirements.parent)]
    return found


def absolute(line: str, folder: Path) -> str:
    """A line for a file elsewhere: the path of an option, which starts at the file's folder, from the root."""
    option = _PATH_OPTION.fullmatch(line)
    return f"{option[1]} {(folder / option[2]).absolute()}" if option and (folder / option[2]).exists() else line


def named_files(folder: Path, lines: Iterable[str]) -> Iterator[bytes]:
    """The content of the files that lines name, such as `./mine-1.0-py3-none-any.whl` or `-r more.txt` and what that names."""
    for line in lines:
        option = _OPTION.match(line)
        if option is None and not line.startswith(_PATHS) and not without_options(line).endswith(_ARCHIVES):
            continue  # the name of a distribution, though there may be a folder of that name
        path = folder / _EXTRAS.sub("", option[1] if option else without_options(line))
        inside = sorted(path.rglob("*")) if path.is_dir() and path != folder else [path]
        yield from (found.read_bytes() for found in inside if found.is_file())
        if option and path.is_file():
            yield from named_files(path.parent, lines_of(path))


def _applies(requirement: Requirement, python: str) -> bool:
    full = f"{python}.2"
    versions = {"python_version": python, "python_full_version": full, "implementation_version": full}
    return requirement.marker is None or requirement.marker.evaluate({**_ENVIRONMENT, **versions, "extra": ""})
