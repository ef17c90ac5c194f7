"""Define a training job, as a user of this library writes it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class JobError(RuntimeError):
    """An invalid job; the message is one line with the problem and the valid values."""


class DataError(RuntimeError):
    """Data is missing or cannot be read; the message is one line. A job's own functions may raise it."""


def kind_of(value: Any) -> str:
    """Return `of type …` with the value's type, for an error message."""
    module, name = type(value).__module__, type(value).__qualname__
    return f"of type {name if module == 'builtins' else f'{module}.{name}'}"


def wants_argument(function: Callable[..., Any]) -> bool:
    """Return True if a function needs a positional argument.

    Raises:
        JobError: the function needs several arguments, or one by keyword.
    """
    parameters = inspect.signature(function).parameters.values()
    needed = [one for one in parameters if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    if len(needed) > 1 or any(one.kind is one.KEYWORD_ONLY for one in needed):
        line = f"{getattr(function, '__name__', 'a function')} needs {', '.join(one.name for one in needed)}, which scaletier"
        raise JobError(f"{line} does not pass. Valid: at most one positional argument, and defaults for all others")
    return bool(needed)


Metrics = Sequence[Any] | Mapping[str, Sequence[Any]] | Callable[[], Any]


class EvalCallback(Protocol):
    """Compute more than loss and metrics in an evaluation; each evaluation has its own instance."""

    def on_batch(self, inputs: Any, targets: Any, outputs: Any) -> None:
        """Receive a batch of the evaluation.

        Args:
            inputs: the batch's inputs, NumPy arrays [N, …] in the structure of the data; None for an input that is absent.
            targets: the batch's targets, in the same form; None if there are none.
            outputs: the model's outputs for the inputs, in the same form.
        """

    def on_end(self, step: int, metrics: Mapping[str, float], summaries: Any, job_dir: str, last: bool) -> None:
        """Receive the result of the evaluation.

        Args:
            step: the global step of the evaluated model.
            metrics: the loss and the metrics by name, over all samples, each a float, or an array if it has several numbers.
            summaries: a `scaletier.summaries.Summaries` to write scalars and images to.
            job_dir: the folder of the job's output.
            last: True for the finished model.
        """


@dataclass(frozen=True)
class Job:
    """A training job: its model, its data, and its settings.

    Pass functions instead of objects: a process calls only those whose result it needs, so that parameter servers and
    asynchronous workers import little of TensorFlow. Strategy `sync` needs functions, as it must begin before TensorFlow
    computes anything.

    Args:
        model: a Keras 3 model, or a function that returns one. A compiled one brings loss, metrics and optimizer.
        data: a `tf.data.Dataset` of batches `(inputs, targets, sample_weights)`, `(inputs, targets)` or only inputs, or a
            function that returns one, and may take a `tf.distribute.InputContext`. It is repeated without end.
        loss: as for `compile`, or a mapping by output. Default: the compiled model's loss.
        metrics: as for `compile`, or a function that returns the metrics.
        optimizer: a name, an optimizer, or a function that returns one, and may take the number of replicas. Its
            schedule gets the global step, which counts the batches of all replicas. Default: the compiled model's optimizer,
            or `rmsprop`.
        eval_data: a finite dataset, or a function that returns one.
        serving: a function that takes `predict`, a function of the model's inputs, and returns the `tf.function` to export,
            with an input_signature.
        eval_callback: a function that returns the `EvalCallback` of an evaluation.
        on_data_error: a function that takes an error caused by the data and returns the line to print, or None.
        weighted_metrics: as `metrics`, with sample weights.
        callbacks: set by `fit`.
    """

    model: Any = None
    data: Any = None
    loss: Any = None
    metrics: Metrics = ()
    optimizer: Any = None
    eval_data: Any = None
    serving: Callable[[Callable[[Any], Any]], Any] | None = None
    eval_callback: Callable[[], EvalCallback] | None = None
    on_data_error: Callable[[Exception], str | None] | None = None
    weighted_metrics: Metrics = ()
    callbacks: Any = None
