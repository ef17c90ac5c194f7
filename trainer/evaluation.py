"""Evaluation on every record of the test data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.data import Files, eval_pipeline
from trainer.mnist import LABELS
from trainer.runtime import import_tensorflow

tf = import_tensorflow()

_MISTAKES = 16


class Mistakes(NamedTuple):
    """The first images that were taken for another digit: uint8 [M, 28, 28], and int64 [M] of 0 to 9; M is 16 at most."""

    images: npt.NDArray[np.uint8]
    predicted: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]


class Metrics(NamedTuple):
    """Mean loss in nats and accuracy, 0 to 1, over all records, and some of those that were mistaken.

    `confusion`, int64 [10, 10], counts the records of each label, its row, by what they were taken for.
    """

    loss: float
    accuracy: float
    mistakes: Mistakes
    confusion: npt.NDArray[np.int64]


def make_evaluate(logits: Callable[[Any], Any], files: Files) -> Callable[[], Metrics]:
    """The evaluation of `logits`, as it is at each call, on all records of `files`, in this process.

    `logits` maps images, float32 [N, 784], 0 to 1, to float32 [N, 10]; it is traced once.
    """
    pipeline = eval_pipeline(files)

    def totals(images: Any, labels: Any) -> Any:
        answers = logits(images)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, answers)
        predicted = tf.argmax(answers, 1)
        wrong = tf.where(tf.not_equal(predicted, labels))[:, 0]
        sums = tf.stack([tf.reduce_sum(losses), tf.cast(tf.size(wrong), tf.float32)])
        first = wrong[:_MISTAKES]
        return sums, predicted, *(tf.gather(values, first) for values in (images, predicted, labels))

    totals_graph = tf.function(totals, reduce_retracing=True, autograph=False)

    def evaluate() -> Metrics:
        loss = wrong = 0.0
        records = 0
        mistaken = []
        confusion = np.zeros((LABELS, LABELS), np.int64)
        for images, labels in pipeline:
            sums, predicted, *found = totals_graph(images, labels)
            np.add.at(confusion, (labels.numpy(), predicted.numpy()), 1)
            batch_loss, batch_wrong = sums.numpy()
            loss, wrong, records = loss + float(batch_loss), wrong + float(batch_wrong), records + len(labels)
            mistaken.append([values.numpy() for values in found])
        images, taken_for, labels = (np.concatenate(values)[:_MISTAKES] for values in zip(*mistaken, strict=True))
        pictures = np.rint(images * 255).astype(np.uint8).reshape(-1, 28, 28)
        return Metrics(loss / records, (records - wrong) / records, Mistakes(pictures, taken_for, labels), confusion)

    return evaluate
