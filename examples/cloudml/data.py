"""MNIST from TFRecords, as tensors of a TensorFlow 1 graph."""

import tensorflow.compat.v1 as tf

PIXELS = 784


def _parse(records):
    features = tf.parse_example(
        records,
        {"image_raw": tf.FixedLenFeature([], tf.string), "label": tf.FixedLenFeature([], tf.int64)},
    )
    images = tf.reshape(tf.decode_raw(features["image_raw"], tf.uint8), [-1, PIXELS])
    return tf.cast(images, tf.float32) / 255.0, features["label"]


def _records(folder, split):
    files = sorted(tf.gfile.Glob(f"{folder}/{split}*.tfrecord*"))
    if not files:
        raise SystemExit(f"there is no {split}*.tfrecord* in {folder}")
    return tf.data.TFRecordDataset(files, compression_type="GZIP" if files[0].endswith(".gz") else "")


def train_batch(folder, batch_size, seed):
    """Return the next batch of the endless, shuffled training data: images [batch, 784], labels [batch]."""
    batches = _records(folder, "train").shuffle(10_000, seed=seed).repeat().batch(batch_size).map(_parse).prefetch(2)
    return tf.data.make_one_shot_iterator(batches).get_next()


def test_batch(folder):
    """Return the next 1000 records of the test data; OutOfRangeError after the last."""
    return tf.data.make_one_shot_iterator(_records(folder, "test").batch(1000).map(_parse)).get_next()
