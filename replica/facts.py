"""What only the chief's host can tell of a job: `python -m replica.facts PATH…` prints it as one JSON object.

`{"versions": {"python", "tensorflow"}, "data": {"paths", "sha256", "files", "bytes"}}`; where the data cannot be hashed,
`data` has `notHashed`, which says why, in place of the last three.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

# More would take minutes, and push what the trainer reads out of the page cache.
LIMIT = 8_000_000_000
_NICEST = 19
_TENSORFLOWS = ("tensorflow", "tensorflow-cpu")


class DataError(ValueError):
    """Why data was not hashed."""


def files_of(paths: Iterable[str]) -> dict[str, Path]:
    """The files of files, directories and globs, by their names below the directory that they share; DataError for none."""
    found: set[Path] = set()
    for path in paths:
        if "://" in path:
            raise DataError(f"{path} is no path of the chief's host")
        matches = list(Path("/").glob(path.lstrip("/"))) if path.startswith("/") else [Path(path)]
        below = [file for match in matches for file in ([match] if match.is_file() else match.rglob("*")) if file.is_file()]
        files = [file for file in below if not file.name.startswith(".")]
        if not files:
            raise DataError(f"there is no file {path} on the chief's host")
        found.update(files)
    shared = os.path.commonpath([file.parent for file in found])
    return {file.relative_to(shared).as_posix(): file for file in sorted(found)}


def digest(paths: Sequence[str]) -> dict[str, Any]:
    """`data` of the facts.

    The hash is that of the lines that sha256sum prints of the files, so `sha256sum FILE… | sha256sum` there checks it.
    """
    try:
        files = files_of(paths)
        size = sum(file.stat().st_size for file in files.values())
        if size > LIMIT:
            raise DataError(f"{size / 1e9:.1f} GB are more than the {LIMIT / 1e9:.0f} GB that are hashed at most")
        lines = hashlib.sha256()
        for name, file in files.items():
            with file.open("rb") as content:
                line = f"{hashlib.file_digest(content, 'sha256').hexdigest()}  {name}\n"
            lines.update(line.encode("utf-8", "surrogateescape"))
    except (DataError, OSError) as error:
        return {"paths": list(paths), "notHashed": str(error)}
    return {"paths": list(paths), "sha256": lines.hexdigest(), "files": len(files), "bytes": size}


def main() -> None:
    """Print the facts about the data of the command line."""
    os.nice(_NICEST)
    found = {d.name: d.version for name in _TENSORFLOWS for d in distributions(name=name)}
    versions = {"python": platform.python_version(), "tensorflow": next(iter(found.values()), None)}
    sys.stdout.write(json.dumps({"versions": versions, "data": digest(sys.argv[1:])}))


if __name__ == "__main__":
    main()
