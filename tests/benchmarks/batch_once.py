"""Predict the files of a batch with a SavedModel in one process, as its author would, on a host.

`python - FOLDER OUTPUT FILE …`, the program on stdin.
"""

import sys
from pathlib import Path

import orjson
import tensorflow as tf

FOLDER, OUTPUT, *FILES = sys.argv[1:]
predict = tf.saved_model.load(FOLDER).signatures["serving_default"]
records = tf.data.TFRecordDataset(FILES).batch(128).prefetch(tf.data.AUTOTUNE)
done = 0
with Path(OUTPUT).open("wb") as out:
    for batch in records:
        parsed = tf.io.parse_example(batch, {"image_raw": tf.io.FixedLenFeature([], tf.string)})
        images = tf.cast(tf.io.decode_raw(parsed["image_raw"], tf.uint8), tf.float32) / 255
        keys = tf.range(done, done + len(batch), dtype=tf.int64)
        columns = {name: value.numpy().tolist() for name, value in predict(image=images, key=keys).items()}
        rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
        out.writelines(orjson.dumps(row) + b"\n" for row in rows)
        done += len(batch)
print(done)
