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
        """End the evaluation of a global step, with `scaletier.summaries.Summaries`; `last` is for the finished model."""


@dataclass(frozen=True)
class Job:
    """A training job: its model, its data, and its settings; docs/library.md describes each.

    A function given in place of an object is called only if it is needed: a parameter server, or an asynchronous worker, never
    asks for the model and so starts without TensorFlow's Python. Strategy `sync` must begin before TensorFlow computes
    anything, as it has for a model, a dataset, an optimizer or a metric that is an object here.

    `data` are batches, or a function of nothing or of a `tf.distribute.InputContext`; `optimizer` may be a function of the
    number of replicas, and its schedule is asked at the global step, which counts the batches of all; `serving` maps `predict`,
    a function of inputs, to the `tf.function`, with its signature, that is exported; `explain` maps an error that the data
    ended the job with to the line that says what to do, or to None.
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
