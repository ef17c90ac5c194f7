"""`train_and_evaluate`, for programs of tf.estimator: the same three names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from scaletier.flags import parser
from scaletier.job import Job
from scaletier.run import run


@dataclass(frozen=True)
class TrainSpec:
    """The training of an estimator program.

    `input_fn` gives a tf.data.Dataset of batches `(features, labels)`, by itself or of a `tf.distribute.InputContext`;
    `max_steps` are batches over all replicas.
    """

    input_fn: Callable[..., Any]
    max_steps: int | None = None


@dataclass(frozen=True)
class EvalSpec:
    """The evaluation of an estimator program.

    `input_fn` gives its data, each batch once; `throttle_secs` are the least seconds between two evaluations.
    """

    input_fn: Callable[..., Any]
    throttle_secs: float | None = None


def train_and_evaluate(
    model_fn: Callable[[], Any], train_spec: TrainSpec, eval_spec: EvalSpec, arguments: Sequence[str] | None = None
) -> NoReturn:
    """Train, evaluate and export the compiled Keras 3 model of `model_fn`, as this task of the cluster.

    Of `arguments`, sys.argv's by default, those that `scaletier.parser()` knows count, before the specs. Source of the names:
    tf.estimator.train_and_evaluate of TensorFlow 1.
    """
    flags = parser()
    settings = {"max_steps": train_spec.max_steps, "eval_interval": eval_spec.throttle_secs}
    flags.set_defaults(**{name: value for name, value in settings.items() if value is not None})
    run(Job(model=model_fn, data=train_spec.input_fn, eval_data=eval_spec.input_fn), flags.parse_args(arguments))
