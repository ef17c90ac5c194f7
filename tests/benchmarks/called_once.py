"""Call a SavedModel in this process, one image at a time, and print the result as JSON, on a host.

`python - FOLDER SECONDS`, the program on stdin. `ready` is the seconds from its start to its first answer.
"""

import time

BEGAN = time.monotonic()
import json  # noqa: E402
import sys  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

FOLDER, SECONDS = sys.argv[1], float(sys.argv[2])
predict = tf.saved_model.load(FOLDER).signatures["serving_default"]
IMAGE = np.array([[place % 7 / 7 for place in range(784)]], np.float32)


def call() -> dict[str, Any]:
    outputs = predict(image=tf.constant(IMAGE), key=tf.constant([1], tf.int64))
    return {name: output.numpy() for name, output in outputs.items()}


call()
ready = time.monotonic() - BEGAN
for _ in range(50):
    call()
took: list[float] = []
until = time.monotonic() + SECONDS
while time.monotonic() < until:
    began = time.perf_counter()
    call()
    took.append(time.perf_counter() - began)
took.sort()
print(
    json.dumps({"rate": len(took) / sum(took), "p50": took[len(took) // 2], "p99": took[len(took) * 99 // 100], "ready": ready})
)
