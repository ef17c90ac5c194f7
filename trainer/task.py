"""Train a model of MNIST or similar images: `python -m trainer.task`.

This module defines the job; `scaletier.run` trains it, alone or as this process's task of a cluster.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import scaletier
from trainer import flags

_CLIP_NORM = 1.0


def job(parsed: argparse.Namespace) -> scaletier.Job:
    """Return the job of these flags. TensorFlow is imported only when the job runs."""
    return scaletier.Job(
        model=functools.partial(_model, parsed),
        data=functools.partial(_data, parsed),
        loss=functools.partial(_loss, parsed.label_smoothing),
        metrics=["accuracy"],
        optimizer=functools.partial(_optimizer, parsed),
        eval_data=functools.partial(_eval_data, parsed),
        serving=_serving,
        eval_callback=functools.partial(_make_eval_callback, parsed),
        on_data_error=functools.partial(_describe_data_error, parsed),
    )


def _model(parsed: argparse.Namespace) -> Any:
    from trainer.model import make_model

    return make_model(parsed.model, parsed.hidden_units, parsed.precision, parsed.batch_norm)


def _data(parsed: argparse.Namespace, context: Any) -> Any:
    """Return all training data, in an order of this replica's own.

    Each replica reads all data, so that none is lost with a replica. The record ranges of a file exclude its corrupt records.
    """
    from scaletier.data import replica_seed
    from trainer.data import augment, find_record_ranges, train_pipeline

    files = find_record_ranges(parsed.train_data, "train", parsed.batch_size, parsed.skip_corrupt_records)
    batches = train_pipeline(files, parsed.batch_size, seed := replica_seed(parsed.seed, context.input_pipeline_id))
    return augment(batches, seed, parsed.shift, parsed.rotation) if parsed.shift or parsed.rotation else batches


def _eval_data(parsed: argparse.Namespace) -> Any:
    from trainer.data import eval_pipeline, find_record_ranges

    return eval_pipeline(find_record_ranges(parsed.eval_data, "test", 1, parsed.skip_corrupt_records))


def _loss(smoothing: float, labels: Any, logits: Any) -> Any:
    """Return each image's cross entropy in nats, float32 [N]; labels [N] integers, logits float32 [N, 10].

    A part of each label, `smoothing`, is spread over all classes. Source: Szegedy et al. 2016, "Rethinking the Inception
    architecture for computer vision", section 7.
    """
    import tensorflow as tf

    labels = tf.cast(labels, tf.int64)
    if not smoothing:
        return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    classes = logits.shape[1]
    return tf.nn.softmax_cross_entropy_with_logits(tf.one_hot(labels, classes) * (1 - smoothing) + smoothing / classes, logits)


def _optimizer(parsed: argparse.Namespace, replicas: int) -> Any:
    """Return SGD with Nesterov's momentum; with several replicas gradients are clipped to norm 1.

    Without clipping, training at the higher learning rate of several replicas can diverge. Sources: Sutskever et al. 2013, "On
    the importance of initialization and momentum in deep learning"; Pascanu et al. 2013, "On the difficulty of training
    recurrent neural networks", for the norm.
    """
    import keras

    from trainer.model import WarmupCosineDecay

    requested = (0.98 if parsed.model == "cnn" else 0.0) if parsed.average is None else parsed.average
    # The moving average covers at most a twentieth of the job: a longer average would lag behind.
    ema_momentum = max(0.0, min(requested, 1 - 20 * replicas / parsed.max_steps))
    rate = WarmupCosineDecay(parsed.learning_rate, parsed.warmup_steps, parsed.max_steps, replicas)
    momentum = parsed.momentum
    clip = {"global_clipnorm": _CLIP_NORM if replicas > 1 else None}
    descent = keras.optimizers.SGD(rate, momentum, momentum > 0, use_ema=ema_momentum > 0, ema_momentum=ema_momentum, **clip)
    return keras.optimizers.LossScaleOptimizer(descent) if parsed.precision == "float16" else descent


def _serving(predict: Any) -> Any:
    """Return the exported signature.

    It maps `key` int64 [N] and `image` float32 [N, 784], 0 to 1, to `key` unchanged, `scores` and `probabilities` float32 [N,
    10], the softmax, and `classes` int64 [N], the most likely digit.
    """
    import tensorflow as tf

    from trainer.mnist import PIXELS

    def serve(key: Any, image: Any) -> dict[str, Any]:
        scores = tf.nn.softmax(predict(image))
        return {
            "key": tf.identity(key),
            "scores": scores,
            "probabilities": tf.identity(scores),
            "classes": tf.argmax(scores, 1),
        }

    signature = [tf.TensorSpec([None], tf.int64, "key"), tf.TensorSpec([None, PIXELS], tf.float32, "image")]
    return tf.function(serve, input_signature=signature, autograph=False)


def _make_eval_callback(parsed: argparse.Namespace) -> Any:
    """Return the callback that computes the confusion matrix and collects misclassified images."""
    from trainer.data import find_files
    from trainer.evaluation import ImageEvaluation, classes

    return ImageEvaluation(classes(find_files(parsed.eval_data, "test")[0]))


def _describe_data_error(parsed: argparse.Namespace, error: Exception) -> str | None:
    import tensorflow as tf

    from trainer.data import damaged, find_files

    if isinstance(error, tf.errors.OutOfRangeError):
        return f"no record is in {', '.join(parsed.train_data)}"
    return damaged([*find_files(parsed.train_data, "train"), *find_files(parsed.eval_data, "test")])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in this process, as tests do; return its exit code, as scaletier.main does."""
    parsed = flags.parse(arguments)
    return scaletier.main(job(parsed), parsed)


def _run() -> NoReturn:
    parsed = flags.parse()
    scaletier.run(job(parsed), parsed)


if __name__ == "__main__":
    _run()
