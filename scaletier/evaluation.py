"""Evaluation on all batches of a job's eval_data."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from scaletier.job import Inspector
from scaletier.network import Batch, FunctionalModel
from scaletier.runtime import import_tensorflow, say
from scaletier.summaries import Summaries

tf = import_tensorflow()

_TOLD_SECONDS = 60.0


class Measured(NamedTuple):
    """Mean loss, and metrics by name, over all samples; and who looked at the batches, or None."""

    loss: float
    metrics: Mapping[str, float]
    inspector: Inspector | None = None

    def tell(self, step: int, summaries: Summaries, job_dir: str, last: bool = False) -> None:
        """Write summaries for TensorBoard at this step, and call the inspector.

        `last` is True for the job's last evaluation.
        """
        figures = {"loss": self.loss, **self.metrics}
        summaries.scalars(step, {f"eval/{name}": value for name, value in figures.items()})
        if self.inspector:
            self.inspector.done(step, figures, summaries, job_dir, last)


class Tested(Protocol):
    """A model as it is at each call: `Network.test` of it, and the state before the first batch."""

    def initial_test(self) -> Sequence[Any]: ...

    def test(self, state: Sequence[Any], batch: Batch) -> tuple[Any, Any, Sequence[Any], Any]: ...


def make_evaluate(
    network: FunctionalModel, tested: Tested, batches: Any, inspector: Callable[[], Inspector] | None
) -> Callable[[Callable[[], bool]], Measured | None]:
    """Return the evaluation of `tested` on all of `batches`, in this process; traced once.

    It asks before each batch whether to stop, and then returns None. A long one logs that: only the end of the batches shows
    that data has an end.
    """

    def test(state: Any, batch: Batch) -> Any:
        loss, outputs, state, results = tested.test(state, batch)
        return loss, outputs if inspector else (), state, results

    traced = tf.function(test, autograph=False)
    spec = Batch.of(batches.element_spec)

    def evaluate(stopped: Callable[[], bool]) -> Measured | None:
        looks = inspector() if inspector else None
        state, loss, samples, results = tested.initial_test(), 0.0, 0, ()
        # By the sizes that the dataset declares, also for a smaller last batch: Keras weighs the losses of outputs by them.
        graph = traced.get_concrete_function([tf.TensorSpec(one.shape, one.dtype) for one in state], spec)
        logged_at = time.monotonic()
        for element in batches:
            if stopped():
                return None
            if (now := time.monotonic()) - logged_at >= _TOLD_SECONDS:
                say(f"Still evaluates, {samples} samples so far; eval_data must come to an end")
                logged_at = now
            batch = Batch.of(element)
            mean, predictions, state, results = graph(state, batch)
            count = int(tf.nest.flatten(batch.inputs)[0].shape[0])
            loss, samples = loss + float(mean) * count, samples + count
            if looks:
                looks.batch(
                    *(tf.nest.map_structure(lambda part: part.numpy(), part) for part in (batch[0], batch[1], predictions))
                )
        by_name = dict(zip(network.metric_names, map(float, results), strict=True))
        return Measured(loss / max(samples, 1), by_name, looks)

    return evaluate
