"""K local steps of a replica, as one graph: what every strategy but model-parallel repeats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from scaletier.network import Batch, Network, Spec
from scaletier.runtime import import_tensorflow

tf = import_tensorflow()


class State(NamedTuple):
    """What a replica has between rounds: values of the network's `shared` and `own` variables, in their order."""

    shared: tuple[Any, ...]
    own: tuple[Any, ...]

    @classmethod
    def initial(cls, network: Network, replica: int = 0) -> State:
        """How a job begins."""
        shared = tuple(tf.constant(network.initial(spec)) for spec in network.shared)
        return cls(shared, tuple(tf.constant(initial_own(network, spec, replica)) for spec in network.own))


def initial_own(network: Network, spec: Spec, replica: int) -> npt.NDArray[Any]:
    """How a replica begins with a variable of its own: generators' states differ by its number, for other random numbers."""
    value = network.initial(spec)
    if "seed_generator_state" in spec.name and value.size:
        value = value.copy()
        value.reshape(-1)[0] += replica * 7_919
    return value


class Round(NamedTuple):
    """What a round came to: steps taken, the global step after it, mean loss, and metrics by name, of the round's batches.

    `staleness` are the steps of others between reading the parameters and adding to them; `compute` are the seconds that the
    steps took by themselves.
    """

    steps: int
    global_step: int
    loss: float
    metrics: Mapping[str, float] = {}
    staleness: int = 0
    compute: float = 0.0

    @classmethod
    def of(cls, network: Network, figures: Any) -> Round:
        """Of the tensor that `figures` made."""
        steps, global_step, loss, staleness, compute, *metrics = map(float, np.asarray(figures))
        return cls(
            int(steps), int(global_step), loss, dict(zip(network.metric_names, metrics, strict=True)), int(staleness), compute
        )


def figures(steps: Any, global_step: Any, loss: Any, staleness: Any, compute: Any, metrics: Sequence[Any]) -> Any:
    """All that is told of a round, float64 [5 + metrics]: one tensor, so that it comes in one message."""
    return tf.stack([tf.cast(figure, tf.float64) for figure in (steps, global_step, loss, staleness, compute, *metrics)])


def walk(
    network: Network, iterator: Any, state: State, steps: Any, position: Any, stride: int = 1
) -> tuple[State, Any, list[Any]]:
    """So many steps, int64, from `state` on the iterator's next batches: the new state, the sum of losses, the metrics'
    variables.

    The first is taken at the global step `position`, int64, and each further one `stride` after the one before.
    """
    metrics = network.metrics()
    shared, own = len(network.shared), len(network.own)

    def body(taken: Any, loss_sum: Any, *values: Any) -> Any:
        batch = Batch.of(iterator.get_next())
        moved, kept, loss, outputs = network.step(
            values[:shared], values[shared : shared + own], batch, position + taken * stride
        )
        measured = network.measured(values[shared + own :], batch, outputs)
        return (taken + 1, loss_sum + loss, *moved, *kept, *measured)

    zeros = (tf.constant(0, tf.int64), tf.constant(0.0))
    _, loss_sum, *values = tf.while_loop(
        lambda taken, *_: taken < steps, body, (*zeros, *state.shared, *state.own, *metrics), parallel_iterations=1
    )
    found = State(tuple(values[:shared]), tuple(values[shared : shared + own]))
    return found, loss_sum, values[shared + own :]
