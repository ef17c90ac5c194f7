"""Facts that only the chief's host knows: `facts.py PYTHON PATH…` prints a JSON object.

`{"versions": {"python", "tensorflow"}, "data": {"paths", "sha256", "files", "bytes"}}`, with `torch` and `jax` in `versions` if
they are installed; if the data cannot be hashed, `data` has the reason, `notHashed`, in place of the last three. The
hosts' Python runs this program as the agent's user. PYTHON is the job's: only metadata of its packages is read. This program
imports nothing of the project.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import IO, Any

# More would take minutes, and push what the trainer reads out of the page cache.
LIMIT = 8_000_000_000
_NICE = 10  # not a higher value: a short job's data must be hashed while its trainer uses the processor
_CHUNK = 1 << 20
_TENSORFLOWS, _OTHERS = ("tensorflow", "tensorflow-cpu"), ("torch", "jax")


class FactsError(ValueError):
    """A reason why data was not hashed."""


@dataclass(frozen=True)
class DataSource:
    """A file, wherever it is: its size in bytes, and how to open it."""

    size: int
    open: Callable[[], IO[bytes]]


def sources(paths: Iterable[str]) -> dict[str, DataSource]:
    """Return files of paths, globs and URLs by their names below a common folder; FactsError if one of them has no file."""
    files: dict[str, DataSource] = {}
    for path in paths:
        files_there = _at_url(path) if "://" in path else _on_this_host(path)
        visible = {name: source for name, source in files_there if not name.rpartition("/")[2].startswith(".")}
        if not visible:
            raise FactsError(f"the chief's host finds no file {path}")
        files |= visible
    shared = os.path.commonpath([name.rpartition("/")[0] for name in files]) if files else ""
    return {os.path.relpath(name, shared): files[name] for name in sorted(files)}


def _on_this_host(path: str) -> Iterator[tuple[str, DataSource]]:
    top = Path(path).absolute()
    for match in Path("/").glob(str(top)[1:]):
        for file in match.rglob("*") if match.is_dir() else [match]:
            if file.is_file():
                yield str(file), DataSource(file.stat().st_size, partial(file.open, "rb"))  # type: ignore[arg-type]  # knows no modes


def _at_url(url: str) -> Iterator[tuple[str, DataSource]]:
    try:
        from fsspec.core import url_to_fs  # slow, of no use to a host whose bucket is a directory

        filesystem, top = url_to_fs(url)
        for match in filesystem.glob(top):
            for name, info in filesystem.find(match, detail=True).items():
                yield name, DataSource(info["size"], partial(filesystem.open, name, "rb"))
    except Exception as error:  # clients raise errors of their own
        raise FactsError(f"{url} cannot be read: {error}") from error


def digest(paths: Sequence[str]) -> dict[str, Any]:
    """Return `data` of the facts.

    The hash is that of the lines that sha256sum prints: in the files' folder, `sha256sum FILE… | sha256sum` prints it.
    """
    if not paths:
        return {"paths": [], "notHashed": "no argument of the trainer names any"}
    try:
        files = sources(paths)
        size = sum(file.size for file in files.values())
        if size > LIMIT:
            raise FactsError(f"{size / 1e9:.1f} GB are more than the {LIMIT / 1e9:.0f} GB that are hashed at most")
        lines = hashlib.sha256()
        for name, file in files.items():
            with file.open() as content:
                line = f"{_sha256(content)}  {name}\n"
            lines.update(line.encode("utf-8", "surrogateescape"))
    except (ValueError, OSError) as error:  # also of a pattern that pathlib refuses, such as `**.csv`
        return {"paths": list(paths), "notHashed": str(error)}
    return {"paths": list(paths), "sha256": lines.hexdigest(), "files": len(files), "bytes": size}


def _sha256(content: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while piece := content.read(_CHUNK):
        digest.update(piece)
    return digest.hexdigest()


def main() -> None:
    """Print the facts about the Python and the data of the command line."""
    os.nice(_NICE)
    python, *paths = sys.argv[1:]
    sys.path += _site_packages(sys.executable)  # without running code of their .pth files
    site, names = _site_packages(python), (*_TENSORFLOWS, *_OTHERS)
    installed = {name: each.version for name in names for each in distributions(name=name, path=site)}
    # All Pythons of a host are environments of one Python, its image's.
    tensorflow = next((installed.pop(name) for name in _TENSORFLOWS if name in installed), None)
    others = {name: installed[name] for name in _OTHERS if name in installed}
    versions = {"python": platform.python_version(), "tensorflow": tensorflow, **others}
    sys.stdout.write(json.dumps({"versions": versions, "data": digest(paths)}))


def _site_packages(python: str) -> list[str]:
    return [str(path) for path in Path(python).parent.parent.glob("lib/python3*/site-packages")]


if __name__ == "__main__":
    main()
