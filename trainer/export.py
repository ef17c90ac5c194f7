"""The exported model: a SavedModel for one process, which knows nothing of the cluster that trained it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.mnist import PIXELS
from trainer.model import Model
from trainer.runtime import import_tensorflow

tf = import_tensorflow()


def export(model: Model, variables: Mapping[str, Any], path: str) -> None:
    """Writes a SavedModel to `path`, in place of what was there, as a whole or not at all.

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
    scratch = f"{path}.partial"
    if tf.io.gfile.exists(scratch):
        tf.io.gfile.rmtree(scratch)
    tf.saved_model.save(module, scratch, signatures=module.predict)
    if tf.io.gfile.exists(path):
        tf.io.gfile.rmtree(path)
    tf.io.gfile.rename(scratch, path)
