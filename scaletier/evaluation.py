"""Evaluate on all batches of a job's eval_data: the chief between two rounds, and the evaluators, outside the cluster."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from scaletier import checkpoint
from scaletier.data import evaluation
from scaletier.flags import Flags
from scaletier.functional_model import Batch, FunctionalModel
from scaletier.job import Inspector, Job
from scaletier.loop import EvalInterval, eval_line
from scaletier.summaries import Summaries
from scaletier.tensorflow_setup import StopRequest, import_tensorflow, say

tf = import_tensorflow()

_LOG_SECONDS = 60.0


class EvaluationResult(NamedTuple):
    """The result of an evaluation.

    Attributes:
        loss: the mean loss over all samples.
        metrics: the metrics by name, over all samples.
        inspector: the trainer's `Inspector`, a callback that got each batch's inputs, targets and outputs; or None.
        state: after the last batch, the values of the metrics and of the model's variables that an evaluation changes.
    """

    loss: float
    metrics: Mapping[str, float]
    inspector: Inspector | None = None
    state: Sequence[Any] = ()

    def report(self, step: int, summaries: Summaries, job_dir: str, last: bool = False) -> None:
        """Write summaries for TensorBoard at this step, and call the inspector; `last` for the finished model."""
        figures = {"loss": self.loss, **self.metrics}
        summaries.scalars(step, {f"eval/{name}": value for name, value in figures.items()})
        if self.inspector:
            self.inspector.done(step, figures, summaries, job_dir, last)


def make_evaluate(
    network: FunctionalModel, tested: checkpoint.TrainingState, batches: Any, make_inspector: Callable[[], Inspector] | None
) -> Callable[[Callable[[], bool]], EvaluationResult | None]:
    """Return a function that evaluates the current values of `tested` on all batches; it is traced once.

    Its argument is called before each batch: if it returns True the evaluation stops, with None. A long evaluation logs its
    samples, as data without an end is found in no other way.
    """

    def test(state: Any, batch: Batch) -> Any:
        loss, outputs, state, results = tested.test(state, batch)
        return loss, outputs if make_inspector else (), state, results

    traced = tf.function(test, autograph=False)
    spec = Batch.of(batches.element_spec)

    def evaluate(stopped: Callable[[], bool]) -> EvaluationResult | None:
        inspector = make_inspector() if make_inspector else None
        state, loss, samples, results = tested.initial_test(), 0.0, 0, ()
        # Traced for the sizes that the dataset declares, which Keras weighs the losses of outputs by.
        graph = traced.get_concrete_function([tf.TensorSpec(one.shape, one.dtype) for one in state], spec)
        logged_at = time.monotonic()
        for element in batches:
            if stopped():
                return None
            if (now := time.monotonic()) - logged_at >= _LOG_SECONDS:
                say(f"Still evaluates, {samples} samples so far; eval_data must come to an end")
                logged_at = now
            batch = Batch.of(element)
            loss, predictions, state, results = graph(state, batch)
            samples += int(next(one for one in tf.nest.flatten(batch.inputs) if one is not None).shape[0])
            if inspector:
                inspector.batch(*(tf.nest.map_structure(_array, part) for part in (batch.inputs, batch.targets, predictions)))
        by_name = dict(zip(network.test_names, map(float, results), strict=True))
        return EvaluationResult(float(loss), by_name, inspector, state)

    return evaluate


def _array(part: Any) -> Any:
    """Return a tensor as NumPy's array, a sparse one too; None for an optional input, or if there are no targets."""
    return None if part is None else (tf.sparse.to_dense(part) if isinstance(part, tf.SparseTensor) else part).numpy()


def run_evaluator(job: Job, flags: Flags, index: int) -> None:
    """Evaluate the latest checkpoint at each interval, if it is new, until SIGTERM or SIGINT."""
    stopped = StopRequest()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stopped)
    if job.eval_data is None:
        say(f"Idle [evaluator/{index}]: the job has no eval_data; this one waits for the job's end")
        stopped.wait()
        return
    batches = evaluation(job.eval_data)
    network = FunctionalModel(job, batches.element_spec, flags.seed)
    state = checkpoint.TrainingState(network)
    evaluate = make_evaluate(network, state, batches.once(), job.inspector)
    summaries = Summaries(f"{flags.job_dir}/evaluator{f'-{index}' if index else ''}")
    interval = EvalInterval(flags.eval_interval)
    say(f"Started [evaluator/{index}], waits for checkpoints in {checkpoint.directory(flags.job_dir)}")
    evaluated = None
    while not stopped.wait(min(interval.seconds, 1.0)):
        path = checkpoint.latest(flags.job_dir)
        if path is None or path == evaluated or not interval.due(time.monotonic()):
            continue
        start = time.monotonic()
        try:
            step = state.restore(checkpoint.CheckpointReader(path, network))
        except checkpoint.CheckpointReadError as error:
            if checkpoint.latest(flags.job_dir) == path:  # else it was deleted for a newer one while it was read
                say(f"{error}; waits for the next one")
                evaluated = path
            continue
        measured = evaluate(stopped.is_set)
        if measured is None:
            break
        say(eval_line(step, measured.loss, measured.metrics))
        measured.report(step, summaries, flags.job_dir)
        if adjusted := interval.record(start, time.monotonic()):
            say(adjusted)
        evaluated = path
