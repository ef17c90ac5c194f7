"""The input pipelines: TFRecord files, local or `gs://`, to batches of images and labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.mnist import PIXELS
from trainer.runtime import import_tensorflow, one_line

tf = import_tensorflow()

_SHUFFLE_RECORDS = 10_000
_EVAL_BATCH = 1000
_PREFETCH_BATCHES = 2


class DataError(RuntimeError):
    """There is no such data, or not enough: the message is one line."""


def find_files(paths: Sequence[str], split: str) -> list[str]:
    """Files of globs, plain paths, and directories (their `<split>*.tfrecord*`), sorted.

    Raises DataError where a path matches none.
    """
    found: set[str] = set()
    for path in paths:
        try:
            pattern = f"{path.rstrip('/')}/{split}*.tfrecord*" if tf.io.gfile.isdir(path) else path
            matches = tf.io.gfile.glob(pattern)
        except tf.errors.OpError as error:
            raise DataError(f"data {path} cannot be listed: {one_line(error)}") from None
        if not matches:
            raise DataError(f"data {pattern} matches no file")
        found.update(matches)
    return sorted(found)


def check(files: Sequence[str], batch_size: int) -> None:
    """DataError where the files hold fewer records than one batch, or are no TFRecords of images and labels."""
    try:
        batch = next(iter(_records(files).batch(batch_size)), None)
        held = 0 if batch is None else int(tf.shape(batch)[0])
        if held < batch_size:
            raise DataError(f"batch size {batch_size} is larger than the data: {files[0]} … hold {held} records")
        _parse(batch)
    except tf.errors.OpError as error:
        reason = one_line(error)
        raise DataError(f"{files[0]} … cannot be read as TFRecords of image_raw and label: {reason}") from None


def _records(files: Sequence[str], names: Any = None) -> Any:
    """Serialized examples of `files`, or in the order of the dataset `names`; the first file's name tells the compression."""
    compression = "GZIP" if files[0].endswith(".gz") else ""
    return tf.data.TFRecordDataset(list(files) if names is None else names, compression_type=compression)


def _parse(serialized: Any) -> tuple[Any, Any]:
    """Images float32 [N, 784], 0 to 1, and labels int64 [N], of a batch of examples."""
    features = tf.io.parse_example(
        serialized,
        {"image_raw": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)},
    )
    images = tf.io.decode_raw(features["image_raw"], tf.uint8)
    images = tf.ensure_shape(images, [None, PIXELS])
    return tf.cast(images, tf.float32) * (1.0 / 255.0), features["label"]


# There is no Python control flow to convert, and converting takes time.
_parse_graph = tf.autograph.experimental.do_not_convert(_parse)


def _options() -> Any:
    options = tf.data.Options()
    options.autotune.enabled = False  # nothing here is left to tune, and its thread costs what it would save
    return options


def train_pipeline(files: Sequence[str], batch_size: int, seed: int) -> Any:
    """Endless full batches of the whole data; a replica of another seed sees it in another order."""
    order = tf.data.Dataset.from_tensor_slices(list(files)).shuffle(len(files), seed=seed)
    batches = _records(files, order).shuffle(_SHUFFLE_RECORDS, seed=seed).repeat().batch(batch_size, drop_remainder=True)
    return batches.map(_parse_graph).prefetch(_PREFETCH_BATCHES).with_options(_options())


def eval_pipeline(files: Sequence[str]) -> Any:
    """Every record once, the last batch as small as it comes."""
    return _records(files).batch(_EVAL_BATCH).map(_parse_graph).prefetch(1).with_options(_options())
