"""What a directory of records says of itself, in manifest.json: what they were made of, and how large each file is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
MNIST = "MNIST"


@dataclass(frozen=True)
class Recipe:
    """What records are made of and how; `sha256` is of the data. The same recipe makes the same files."""

    source: str
    sha256: str
    shards: int
    gzip: bool
    test_share: float | None = None


def read(dest: Path) -> dict[str, Any]:
    """What `dest` says of its records; empty where it says nothing that can be read."""
    try:
        content = json.loads((dest / MANIFEST).read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def complete(dest: Path, recipe: Recipe) -> bool:
    """True if `dest` holds the records of this recipe, each file of the size noted when it was made, and no others."""
    made = read(dest)
    there = {path.name: path.stat().st_size for path in held(dest)}
    return bool(there) and made.get("recipe") == asdict(recipe) and made.get("sizes") == there


def replaceable(dest: Path, source: str) -> bool:
    """True if `dest` holds no records, or those of this source."""
    recipe = read(dest).get("recipe")
    return not held(dest) or (isinstance(recipe, dict) and recipe.get("source") == source)


def held(dest: Path) -> list[Path]:
    """The files in `dest` that a trainer would read."""
    return sorted(path for split in ("train", "test") for path in dest.glob(f"{split}*.tfrecord*"))


def write(scratch: Path, dest: Path, content: Mapping[str, Any]) -> None:
    """Puts the manifest into `dest` as a whole, by way of a directory beside it."""
    (scratch / MANIFEST).write_text(json.dumps(content, indent=1) + "\n")
    (scratch / MANIFEST).replace(dest / MANIFEST)
