"""The job, which a user of this library writes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class JobError(RuntimeError):
    """An invalid job; the message is one line with the problem and the valid values."""


def kind_of(value: Any) -> str:
    """Return a value's type, for a message."""
    module, name = type(value).__module__, type(value).__qualname__
    return f"of type {name if module == 'builtins' else f'{module}.{name}'}"


def wants_argument(function: Callable[..., Any]) -> bool:
    """Return True if a function needs a positional argument."""
    parameters = inspect.signature(function).parameters.values()
    return any(one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in parameters)


Metrics = Sequence[Any] | Mapping[str, Sequence[Any]] | Callable[[], Any]


class Inspector(Protocol):
    """Looks at an evaluation beyond its loss and metrics; one is made for each evaluation."""

    def batch(self, inputs: Any, targets: Any, outputs: Any) -> None:
        """Inspect a batch of the evaluation and the model's outputs, as NumPy arrays of the data's structure."""

    def done(self, step: int, metrics: Mapping[str, float], summaries: Any, job_dir: str, last: bool) -> None:
        """End the evaluation of the global step `step`; `last` is True for the finished model.

        `summaries` are the job's `scaletier.summaries.Summaries`, for TensorBoard.
        """


@dataclass(frozen=True)
class Job:
    """A training job: its model, its data, and its settings.

    A function given in place of an object is called only if it is needed: a parameter server, or an asynchronous worker, never
    asks for the model and so starts without TensorFlow's Python.

    model: a Keras 3 model, or a function without arguments that makes one. A model that is compiled brings its loss, metrics
        and optimizer. Its `float32` variables are what replicas share, those that are not trained (moving statistics) included.
    data: a `tf.data.Dataset` of batches `(inputs, targets)` or `(inputs, targets, sample_weight)`, or of inputs alone if the
        loss needs no targets, of which each replica takes every n-th batch; or a function of a `tf.distribute.InputContext`
        that makes one for a replica, `input_pipeline_id` of `num_input_pipelines`. One that ends begins again. Its graph goes
        to the hosts: Python functions in it (`py_function`, `from_generator`) run if the chief trains alone, or by `sync`.
    loss: as `keras.Model.compile` takes it: a name, a `keras.losses.Loss`, a function of targets and outputs, or a mapping of a
        model's outputs to these. What layers add by `add_loss` and regularizers comes to it.
    metrics: names, `keras.metrics.Metric`s or functions of targets and outputs; a mapping of outputs to lists of them; or a
        function without arguments that makes these.
    optimizer: a name, a `keras.optimizers.Optimizer`, or a function that makes one, of the number of replicas if it must have
        an argument. Its learning rate schedule is asked at the global step: the batches that all replicas together have taken.
    eval_data: batches to evaluate on, as `data` without arguments; without it nothing is evaluated.
    serving: a function of `predict`, which maps inputs to outputs, to the `tf.function`, with its signature, that is exported;
        by default the model's inputs by name to its outputs.
    inspector: a function that makes an `Inspector` of each evaluation.
    explain: a function of the error that the job's data ended it with (`tf.errors.DataLossError` where it is damaged,
        `OutOfRangeError` where a replica finds none, `InvalidArgumentError` and others where a batch is not as it should be) to
        the line that says what to do, or to None.
    weighted_metrics: as `metrics`, of which samples count by their weights.
    callbacks: what `scaletier.fit` has the chief call.

    Strategy `sync` must begin before TensorFlow computes anything, as it has for a model, a dataset, an optimizer or a metric
    that is an object here: it is to be what a function makes.

    Raises JobError, from `scaletier.run`, for what does not fit together.
    """

    model: Any = None
    data: Any = None
    loss: Any = None
    metrics: Metrics = ()
    optimizer: Any = None
    eval_data: Any = None
    serving: Callable[[Callable[[Any], Any]], Any] | None = None
    inspector: Callable[[], Inspector] | None = None
    explain: Callable[[Exception], str | None] | None = None
    weighted_metrics: Metrics = ()
    callbacks: Any = None
