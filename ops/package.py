"""The trainer package: found, checked without importing it, and packed the same way every time."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ops.errors import UsageError
from ops.imports import check_module

MEGABYTE = 1_000_000
LIMIT = 50 * MEGABYTE
_SKIPPED_DIRS = frozenset(
    {"__pycache__", ".git", ".hg", ".svn", ".venv", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".ipynb_checkpoints"}
)
_SKIPPED_FILES = (".pyc", ".pyo", ".swp")


@dataclass(frozen=True)
class Package:
    """A packed trainer package. `files` maps a path such as `trainer/task.py` to its content.

    `imports` are the modules that the hosts must have, each with the `file:line` that wants it.
    """

    name: str
    files: dict[str, bytes]
    imports: dict[str, str]
    archive: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.archive).hexdigest()


def build(folder: str | Path, module: str) -> Package:
    """Pack the package in `folder`, which is to run `module`; UsageError for all that would fail on the hosts later."""
    root = find(folder)
    files = {path.as_posix(): content for path, content in _read(root)}
    imports = check_module(files, root.name, module, str(root.parent))
    return Package(root.name, files, imports, pack(files))


def find(folder: str | Path) -> Path:
    """The package's directory; UsageError where there is none."""
    root = Path(folder).resolve()
    if not root.is_dir():
        what = "is not a directory" if root.exists() else "does not exist"
        raise UsageError(f"package {folder} {what}: give --package the directory of a Python package")
    if not (root / "__init__.py").is_file():
        raise UsageError(f"package {folder} has no __init__.py: make an empty one there, or give --package another directory")
    if not root.name.isidentifier():
        raise UsageError(f"package {folder} has no name that Python can import: rename it to letters, digits and _")
    return root


def _read(root: Path) -> Iterator[tuple[Path, bytes]]:
    """Every file of the package, in order; stops as soon as there is too much."""
    sizes: dict[Path, int] = {}
    for directory, folders, names in os.walk(root):
        folders[:] = sorted(folder for folder in folders if folder not in _SKIPPED_DIRS)
        for name in names:
            path = Path(directory, name)
            if not name.endswith(_SKIPPED_FILES) and path.is_file():
                sizes[path] = path.stat().st_size
    if (total := sum(sizes.values())) > LIMIT:
        largest = max(sizes, key=lambda path: sizes[path])
        raise UsageError(
            f"package {root} has {total / MEGABYTE:.0f} MB, {LIMIT // MEGABYTE} MB at most; largest is "
            f"{largest.relative_to(root)} with {sizes[largest] / MEGABYTE:.0f} MB: keep data in the bucket"
        )
    for path in sorted(sizes):
        try:
            yield path.relative_to(root.parent), path.read_bytes()
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def pack(files: dict[str, bytes]) -> bytes:
    """package.tar.gz; the same files give the same bytes."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0, compresslevel=6, filename="") as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for path in sorted(files):
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(files[path]), 0o644
            tar.addfile(entry, io.BytesIO(files[path]))
    return packed.getvalue()
