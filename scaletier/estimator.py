"""`train_and_evaluate`, for programs that were written for tf.estimator: the same three things, by the same names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from scaletier.flags import parser
from scaletier.job import Job
from scaletier.run import run


@dataclass(frozen=True)
class TrainSpec:
    """`input_fn` gives a tf.data.Dataset of batches `(features, labels)`, by itself or of a `tf.distribute.InputContext`;
    `max_steps` are batches over all replicas.
    """

    input_fn: Callable[..., Any]
    max_steps: int | None = None


@dataclass(frozen=True)
class EvalSpec:
    """`input_fn` gives what to evaluate on, each batch once; `throttle_secs` are the least between two evaluations."""

    input_fn: Callable[..., Any]
    throttle_secs: float | None = None


def train_and_evaluate(
    model_fn: Callable[[], Any], train_spec: TrainSpec, eval_spec: EvalSpec, arguments: Sequence[str] | None = None
) -> NoReturn:
    """Trains the compiled Keras 3 model that `model_fn` makes, and evaluates and exports it, as this task of the cluster.

    Of `arguments`, sys.argv's by default, those that `scaletier.parser()` knows count, before what the specs say.
    Source of the names: tf.estimator.train_and_evaluate of TensorFlow 1.
    """
    flags = parser()
    told = {"max_steps": train_spec.max_steps, "eval_interval": eval_spec.throttle_secs}
    flags.set_defaults(**{name: value for name, value in told.items() if value is not None})
    run(Job(model=model_fn, data=train_spec.input_fn, eval_data=eval_spec.input_fn), flags.parse_args(arguments))
