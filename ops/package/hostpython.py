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
from ops.cluster.inventory import HERE, PYTHON
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
    """True for a requirement that what is `there` meets or need not meet; UsageError for another version of it."""
    try:
        wanted = Requirement(line)
        if not _applies(wanted, python):
            return True
    except (InvalidRequirement, UndefinedEnvironmentName):
        return False  # a path or an option, or pip will say what is wrong
    have = there.get(canonicalize_name(wanted.name))
    if have is None:
        return False
    if wanted.url or not wanted.specifier.contains(have, prereleases=True):
        raise UsageError(
            f"{line} is asked for, but the Python of the job has {wanted.name} {have}: ask for that, or leave the version out"
        )
    return True


def constraints(folder: Path, there: Mapping[str, str]) -> Path:
    """A constraints.txt by which pip takes what is there for given, as wheels with no content."""
    links = []
    for name, version in there.items():
        stem = f"{name.replace('-', '_')}-{version}"
        with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
            info = f"{stem}.dist-info"
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
        links.append(f"{name} @ {Path(wheel.filename or '').as_uri()}\n")
    file = folder / "constraints.txt"
    file.write_text("".join(links))
    return file


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


def named_files(folder: Path, lines: Iterable[str]) -> Iterator[bytes]:
    """The content of the files that lines name, such as `./mine-1.0-py3-none-any.whl` or `-r more.txt` and what that names."""
    for line in lines:
        option = _OPTION.match(line)
        if option is None and not line.startswith(_PATHS) and not line.endswith(_ARCHIVES):
            continue  # the name of a distribution, though there may be a folder of that name
        path = folder / _EXTRAS.sub("", option[1] if option else line)
        inside = sorted(path.rglob("*")) if path.is_dir() and path != folder else [path]
        yield from (found.read_bytes() for found in inside if found.is_file())
        if option and path.is_file():
            yield from named_files(path.parent, lines_of(path))


def _applies(requirement: Requirement, python: str) -> bool:
    full = f"{python}.2"
    versions = {"python_version": python, "python_full_version": full, "implementation_version": full}
    return requirement.marker is None or requirement.marker.evaluate({**_ENVIRONMENT, **versions, "extra": ""})
