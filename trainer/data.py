"""Make input pipelines: read TFRecord files, local or `gs://`, into batches of images and labels."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from scaletier.job import DataError
from scaletier.tensorflow_setup import import_tensorflow, one_line
from trainer.corrupt_records import RecordRange, locate, read, record_ranges, tensors
from trainer.mnist import PIXELS, SIDE

tf = import_tensorflow()

_SHUFFLE_RECORDS = 10_000
_EVAL_BATCH = 1000
_PREFETCH_BATCHES = 2
_INTERLEAVED_FILES, _INTERLEAVED_RECORDS = 8, 16

# The result of `find_files`, or `corrupt_records.record_ranges` of that result.
Files = Sequence[str] | Sequence[RecordRange]


def find_files(paths: Sequence[str], split: str) -> list[str]:
    """Return the files of globs, paths and directories (their `<split>*.tfrecord*`), sorted; DataError if one has none."""
    files: set[str] = set()
    for path in paths:
        try:
            pattern = f"{path.rstrip('/')}/{split}*.tfrecord*" if tf.io.gfile.isdir(path) else path
            matches = tf.io.gfile.glob(pattern)
        except tf.errors.OpError as error:
            raise DataError(f"data {path} cannot be listed: {one_line(error)}") from None
        if not matches:
            raise DataError(f"data {pattern} matches no file")
        files.update(matches)
    return sorted(files)


@functools.cache
def find_record_ranges(paths: tuple[str, ...], split: str, batch_size: int, skip_corrupt: bool) -> list[RecordRange]:
    """Return the record ranges of these paths; DataError if no file matches, or there are fewer records than a batch."""
    files = record_ranges(find_files(paths, split), skip_corrupt)
    check(files, batch_size)
    return files


def check(files: Files, batch_size: int) -> None:
    """Raise DataError if the files have fewer records than a batch, or other records than images and labels."""
    parts = _to_ranges(files)
    try:
        batch = next(iter(_chain(parts).batch(batch_size)), None)
        count = 0 if batch is None else int(tf.shape(batch)[0])
        if count < batch_size:
            what = f"{parts[0].file} … hold {count} records" if parts else "no record of it can be read"
            raise DataError(f"batch size {batch_size} is larger than the data: {what}")
        _parse(batch)
    except tf.errors.OpError as error:
        line = damaged(files) if isinstance(error, tf.errors.DataLossError) else None
        reason = f"{parts[0].file} … cannot be read as TFRecords of image_raw and label: {one_line(error)}"
        raise DataError(line or reason) from None


def damaged(files: Files) -> str | None:
    """Return a line with the first corrupt record of the files and a remedy; None if there is none."""
    damage = locate([record_range.file for record_range in _to_ranges(files)])
    return damage and f"{damage.file} has no intact TFRecord at {damage}: make the file again, or pass --skip-corrupt-records"


def _to_ranges(files: Files) -> list[RecordRange]:
    return [RecordRange(file) if isinstance(file, str) else file for file in files]


def _chain(parts: Sequence[RecordRange]) -> Any:
    """Return the serialized examples of the ranges, one range after the other."""
    return tf.data.Dataset.from_tensor_slices(tensors(parts)).flat_map(read)


def _parse(serialized: Any) -> tuple[Any, Any]:
    """Return images float32 [N, 784], 0 to 1, and labels int64 [N], of a batch of examples."""
    features = tf.io.parse_example(
        serialized,
        {"image_raw": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)},
    )
    images = tf.io.decode_raw(features["image_raw"], tf.uint8)
    images = tf.ensure_shape(images, [None, PIXELS])
    return tf.cast(images, tf.float32) * (1.0 / 255.0), features["label"]


# AutoGraph would find no Python control flow to convert, and takes time.
_parse_graph = tf.autograph.experimental.do_not_convert(_parse)


def _options() -> Any:
    options = tf.data.Options()
    options.autotune.enabled = False  # all parameters are set, and its thread costs CPU time
    return options


def train_pipeline(files: Files, batch_size: int, seed: int) -> Any:
    """Return an endless dataset of full batches, in an order that depends on the seed."""
    parts = _to_ranges(files)
    order = tf.data.Dataset.from_tensor_slices(tensors(parts))
    interleaved = order.shuffle(len(parts), seed=seed).interleave(read, _INTERLEAVED_FILES, _INTERLEAVED_RECORDS)
    batches = interleaved.shuffle(_SHUFFLE_RECORDS, seed=seed).repeat().batch(batch_size, drop_remainder=True)
    return batches.map(_parse_graph).prefetch(_PREFETCH_BATCHES).with_options(_options())


def augment(batches: Any, seed: int, shift: int, rotation: float) -> Any:
    """Return the batches with each image moved by up to `shift` pixels and rotated by up to `rotation` degrees, at random."""

    def transform(number: Any, batch: tuple[Any, Any]) -> tuple[Any, Any]:
        images, labels = batch
        # Seeded by the batch's number, so that a resumed job draws the same values.
        random = tf.random.stateless_uniform([3, tf.shape(images)[0]], [seed, number], -1.0, 1.0)
        angle = random[0] * (rotation * math.pi / 180)
        right, down = (tf.round(part * (shift + 0.49)) for part in (random[1], random[2]))
        sine, cosine, zero = tf.sin(angle), tf.cos(angle), tf.zeros_like(angle)
        # A pixel of the result at (x, y) is taken from (cosine x - sine y + …, sine x + cosine y + …), about the center.
        center = (SIDE - 1) / 2
        x = center * (1 - cosine + sine) + right
        y = center * (1 - sine - cosine) + down
        transforms = tf.stack([cosine, -sine, x, sine, cosine, y, zero, zero], 1)
        transformed = tf.raw_ops.ImageProjectiveTransformV3(
            images=tf.reshape(images, [-1, SIDE, SIDE, 1]),
            transforms=transforms,
            output_shape=[SIDE, SIDE],
            fill_value=0.0,
            interpolation="BILINEAR",
        )
        return tf.reshape(transformed, [-1, PIXELS]), labels

    return batches.enumerate().map(tf.autograph.experimental.do_not_convert(transform)).prefetch(1)


def eval_pipeline(files: Files) -> Any:
    """Return a dataset of every record once; the last batch may be smaller."""
    return _chain(_to_ranges(files)).batch(_EVAL_BATCH).map(_parse_graph).prefetch(1).with_options(_options())
