"""Evaluate a model on all batches of a job's eval_data, in the chief between two rounds or in an evaluator process."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from scaletier import checkpoint
from scaletier.data import LOG_SECONDS, make_eval_source
from scaletier.flags import Flags
from scaletier.functional_model import Batch, FunctionalModel, metrics_by_name
from scaletier.job import EvalCallback, Job
from scaletier.loop import EvalInterval, eval_line
from scaletier.summaries import Summaries
from scaletier.tensorflow_setup import StopRequest, import_tensorflow, say

if TYPE_CHECKING:
    from scaletier.loop import Metric

tf = import_tensorflow()


class EvaluationResult(NamedTuple):
    """The result of an evaluation.

    Attributes:
        loss: the mean loss over all samples.
        metrics: the metrics by name, over all samples, as in `Round`.
        callback: the job's `EvalCallback`, which has received each batch; None if the job has none.
        test_state: after the last batch, the values of the metrics and of the model's variables that an evaluation changes.
    """

    loss: float
    metrics: Mapping[str, Metric]
    callback: EvalCallback | None = None
    test_state: Sequence[Any] = ()

    def report(self, step: int, summaries: Summaries, job_dir: str, last: bool = False) -> None:
        """Write summaries for TensorBoard at this step, and end the callback; `last` is True for the finished model."""
        metrics: dict[str, Any] = {"loss": self.loss, **self.metrics}
        summaries.scalars(step, {f"eval/{name}": value for name, value in metrics.items()})
        if self.callback:
            self.callback.on_end(step, metrics, summaries, job_dir, last)


def make_evaluate(
    network: FunctionalModel, state: checkpoint.TrainingState, batches: Any, make_callback: Callable[[], EvalCallback] | None
) -> Callable[[Callable[[], bool]], EvaluationResult | None]:
    """Return a function that evaluates the current values of `state` on all batches; it is traced once.

    The function calls its argument before each batch, and returns None as soon as that returns True. A long evaluation logs the
    number of its samples, since nothing else shows that the data has no end.
    """

    def test(test_state: Any, batch: Batch) -> Any:
        loss, outputs, test_state, results = state.test(test_state, batch)
        return loss, outputs if make_callback else (), test_state, results

    traced = tf.function(test, autograph=False)
    spec = Batch.of(batches.element_spec)

    def evaluate(is_stopped: Callable[[], bool]) -> EvaluationResult | None:
        callback = make_callback() if make_callback else None
        test_state, loss, samples, results = state.initial_test_state(), 0.0, 0, ()
        # Traced for the sizes that the dataset declares, by which Keras weighs the losses of outputs.
        graph = traced.get_concrete_function([tf.TensorSpec(one.shape, one.dtype) for one in test_state], spec)
        logged_at = time.monotonic()
        for element in batches:
            if is_stopped():
                return None
            if (now := time.monotonic()) - logged_at >= LOG_SECONDS:
                say(f"Still evaluates, {samples} samples so far; eval_data must end")
                logged_at = now
            batch = Batch.of(element)
            loss, predictions, test_state, results = graph(test_state, batch)
            samples += int(next(one for one in tf.nest.flatten(batch.inputs) if one is not None).shape[0])
            if callback:
                callback.on_batch(
                    *(tf.nest.map_structure(_to_numpy, part) for part in (batch.inputs, batch.targets, predictions))
                )
        return EvaluationResult(float(loss), metrics_by_name(network.test_shapes, results), callback, test_state)

    return evaluate


def _to_numpy(part: Any) -> Any:
    """Return a tensor, dense or sparse, as an array; None for an input that is absent, or if there are no targets."""
    return None if part is None else (tf.sparse.to_dense(part) if isinstance(part, tf.SparseTensor) else part).numpy()


def run_evaluator(job: Job, flags: Flags, index: int) -> None:
    """Evaluate the latest checkpoint at each interval, if it is new, until SIGTERM or SIGINT."""
    stop_request = StopRequest()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop_request)
    if job.eval_data is None:
        say(f"Idle [evaluator/{index}]: the job has no eval_data; this one waits for the job's end")
        stop_request.wait()
        return
    source = make_eval_source(job.eval_data)
    network = FunctionalModel(job, source.element_spec, flags.seed)
    state = checkpoint.TrainingState(network)
    evaluate = make_evaluate(network, state, source.one_pass(), job.eval_callback)
    summaries = Summaries(f"{flags.job_dir}/evaluator{f'-{index}' if index else ''}")
    interval = EvalInterval(flags.eval_interval)
    say(f"Started [evaluator/{index}], waits for checkpoints in {checkpoint.directory(flags.job_dir)}")
    evaluated_path = None
    while not stop_request.wait(min(interval.seconds, 1.0)):
        path = checkpoint.latest_path(flags.job_dir)
        if path is None or path == evaluated_path or not interval.is_due(time.monotonic()):
            continue
        start = time.monotonic()
        try:
            step = state.restore(checkpoint.CheckpointReader(path, network))
        except checkpoint.CheckpointReadError as error:
            if checkpoint.latest_path(flags.job_dir) == path:  # else it was deleted for a newer one while it was read
                say(f"{error}; waits for the next one")
                evaluated_path = path
            continue
        result = evaluate(stop_request.is_set)
        if result is None:
            break
        say(eval_line(step, result.loss, result.metrics))
        result.report(step, summaries, flags.job_dir)
        if adjusted := interval.record(start, time.monotonic()):
            say(adjusted)
        evaluated_path = path
