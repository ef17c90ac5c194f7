"""The exported model: a SavedModel for one process, which knows nothing of the cluster that trained it.

`python -m trainer.export --job-dir DIR --model NAME` makes one of the latest checkpoint of a job that did not come to it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from trainer import checkpoint, flags
from trainer.mnist import PIXELS
from trainer.model import Model, make_model
from trainer.runtime import import_tensorflow, say

tf = import_tensorflow()


def export(model: Model, variables: Mapping[str, Any], job_dir: str) -> str:
    """Writes a SavedModel to `<job_dir>/export/Servo/<seconds since 1970>`, as a whole or not at all; the path.

    Its signature `serving_default` maps `key` int64 [N] and `image` float32 [N, 784], 0 to 1, to `key` as it came,
    `scores` and `probabilities` float32 [N, 10], the softmax, and `classes` int64 [N], the likeliest digit.
    """
    module = tf.Module()
    module.variables_by_name = dict(variables)

    def predict(key: Any, image: Any) -> dict[str, Any]:
        scores = tf.nn.softmax(model.logits(module.variables_by_name, image, False))
        return {
            "key": tf.identity(key),
            "scores": scores,
            "probabilities": tf.identity(scores),
            "classes": tf.argmax(scores, 1),
        }

    signature = [tf.TensorSpec([None], tf.int64, "key"), tf.TensorSpec([None, PIXELS], tf.float32, "image")]
    module.predict = tf.function(predict, input_signature=signature, autograph=False)
    folder = f"{job_dir}/export/Servo"
    timestamp = int(time.time())
    while tf.io.gfile.exists(f"{folder}/{timestamp}"):
        timestamp += 1
    # Readers of the folder, TensorFlow Serving among them, pass over what is no number.
    scratch = f"{folder}/temp-{timestamp}"
    if tf.io.gfile.exists(scratch):
        tf.io.gfile.rmtree(scratch)
    tf.saved_model.save(module, scratch, signatures=module.predict)
    tf.io.gfile.rename(scratch, f"{folder}/{timestamp}")
    return f"{folder}/{timestamp}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command, with the flags of trainer.task, of which --job-dir and those of the model count.

    0 and the path on stdout; 2 where there is no checkpoint of this model.
    """
    parser = flags.parser(os.environ)
    parser.prog, parser.description = "python -m trainer.export", "Exports the latest checkpoint of a job."
    given = parser.parse_args(arguments)
    job_dir, model = given.job_dir.rstrip("/"), make_model(given.model, given.hidden_units)
    found = checkpoint.latest(job_dir)
    try:
        if found is None:
            raise checkpoint.CheckpointError(f"there is no checkpoint in {checkpoint.directory(job_dir)}")
        values, _ = checkpoint.read(found, model)
    except checkpoint.CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    say(export(model, {name: tf.Variable(value) for name, value in model.unflatten(values).items()}, job_dir))
    return 0


if __name__ == "__main__":
    sys.exit(main())
