"""Evaluation on all batches of a job's eval_data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from scaletier.job import Inspector
from scaletier.network import Batch, Network
from scaletier.runtime import import_tensorflow

tf = import_tensorflow()


class Metrics(NamedTuple):
    """Mean loss, and metrics by name, over all samples; and who looked at the batches, or None."""

    loss: float
    metrics: Mapping[str, float]
    inspector: Inspector | None = None


def make_evaluate(
    network: Network, outputs: Callable[[Any], Any], batches: Any, inspector: Callable[[], Inspector] | None
) -> Callable[[], Metrics]:
    """The evaluation of `outputs`, of inputs, as it is at each call, on all of `batches`, in this process; traced once."""

    def totals(batch: Batch, state: Any) -> Any:
        found = outputs(batch.inputs)
        return network.loss(batch, found), network.measured(state, batch, found), found if inspector else ()

    traced = tf.function(totals, reduce_retracing=True, autograph=False)
    results = tf.function(network.results, autograph=False)

    def evaluate() -> Metrics:
        looks = inspector() if inspector else None
        state, loss, samples = network.metrics(), 0.0, 0
        for element in batches:
            batch = Batch.of(element)
            mean, state, found = traced(batch, state)
            count = int(tf.shape(tf.nest.flatten(batch.inputs)[0])[0])
            loss, samples = loss + float(mean) * count, samples + count
            if looks:
                looks.batch(*(tf.nest.map_structure(lambda part: part.numpy(), part) for part in (batch[0], batch[1], found)))
        named = dict(zip(network.metric_names, map(float, results(state)), strict=True))
        return Metrics(loss / max(samples, 1), named, looks)

    return evaluate
