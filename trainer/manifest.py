"""The manifest.json of a directory of records: their source, and the size of each file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
MNIST = "MNIST"


@dataclass(frozen=True)
class DataRecipe:
    """The source of records and their format; `sha256` is of the data. Equal recipes make equal files."""

    source: str
    sha256: str
    shards: int
    gzip: bool
    test_share: float | None = None


def read(dest: Path) -> dict[str, Any]:
    """Return the manifest of `dest`; empty if there is no readable one."""
    try:
        content = json.loads((dest / MANIFEST).read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def complete(dest: Path, recipe: DataRecipe) -> bool:
    """Return True if `dest` holds just the records of this recipe, in the recorded sizes."""
    manifest = read(dest)
    there = {path.name: path.stat().st_size for path in held(dest)}
    return bool(there) and manifest.get("recipe") == asdict(recipe) and manifest.get("sizes") == there


def replaceable(dest: Path, source: str) -> bool:
    """Return True if `dest` holds no records, or those of this source."""
    recipe = read(dest).get("recipe")
    return not held(dest) or (isinstance(recipe, dict) and recipe.get("source") == source)


def held(dest: Path) -> list[Path]:
    """Return the files in `dest` that a trainer would read."""
    return sorted(path for split in ("train", "test") for path in dest.glob(f"{split}*.tfrecord*"))


def write(scratch: Path, dest: Path, content: Mapping[str, Any]) -> None:
    """Write the manifest into `dest` atomically, by way of a directory beside it."""
    (scratch / MANIFEST).write_text(json.dumps(content, indent=1) + "\n")
    (scratch / MANIFEST).replace(dest / MANIFEST)
