"""Evaluation on every record of the test data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from trainer.data import eval_pipeline
from trainer.model import Model, loss_and_correct
from trainer.runtime import import_tensorflow

tf = import_tensorflow()


class Metrics(NamedTuple):
    """Mean loss in nats and accuracy, 0 to 1, over all records."""

    loss: float
    accuracy: float


def make_evaluate(model: Model, variables: Mapping[str, Any], files: Sequence[str]) -> Callable[[], Metrics]:
    """The evaluation of these variables, as they are at each call, on all records of `files`, in this process."""
    pipeline = eval_pipeline(files)

    def totals(images: Any, labels: Any) -> Any:
        losses, correct = loss_and_correct(model, variables, images, labels, False)
        return tf.stack([tf.reduce_sum(losses), tf.reduce_sum(correct)]), tf.shape(labels)[0]

    totals_graph = tf.function(totals, reduce_retracing=True, autograph=False)

    def evaluate() -> Metrics:
        loss = correct = 0.0
        records = 0
        for images, labels in pipeline:
            sums, count = totals_graph(images, labels)
            batch_loss, batch_correct = sums.numpy()
            loss, correct, records = loss + float(batch_loss), correct + float(batch_correct), records + int(count)
        return Metrics(loss / records, correct / records)

    return evaluate
