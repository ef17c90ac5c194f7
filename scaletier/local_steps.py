"""K local steps of a replica on each of its devices, as one graph.

Every strategy except model-parallel repeats them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from scaletier.network import Batch, FunctionalModel
from scaletier.private import is_seed
from scaletier.runtime import import_tensorflow

tf = import_tensorflow()


class DivergedError(RuntimeError):
    """The loss, or a parameter, is no longer a number: the message is one line."""


class State(NamedTuple):
    """A replica's state between rounds: values of the network's `shared` and `own` variables.

    They are in the variables' order. Those of `own` are there for each of its devices, one after the other.
    """

    shared: tuple[Any, ...]
    own: tuple[Any, ...]

    @classmethod
    def initial(cls, network: FunctionalModel) -> State:
        """Return the initial state of a job, on one device of the master."""
        shared = tuple(tf.constant(network.initial(spec)) for spec in network.shared)
        return cls(shared, tuple(tf.constant(network.initial(spec)) for spec in network.own))


def numbers(replica: int, replicas: int, devices: int) -> range:
    """Return the numbers of one replica's devices, which are unique in the job."""
    return range(replica, replica + replicas * devices, replicas)


def begin_own(network: FunctionalModel, values: Sequence[Any], devices: Sequence[int], step: int) -> list[npt.NDArray[Any]]:
    """Return the `own` values with which devices of these numbers begin at a global step.

    Optimizers continue from `values`, those of the chief's first device. Random generators draw other numbers on each device,
    and others at each start.
    """
    results = []
    for number in devices:
        for spec, value in zip(network.own, map(np.asarray, values), strict=True):
            if number and value.size and is_seed(spec.variable):
                value = value.copy()
                value.flat[0] = (int(value.flat[0]) + number * 7_919 + step * 104_729) % 2**31
            results.append(value)
    return results


class Round(NamedTuple):
    """The result of a round: steps, the global step after it, mean loss, and metrics by name.

    `staleness` are the steps of others between reading the parameters and adding to them; `compute` are the seconds that the
    steps took by themselves; `mean_loss` is that of samples, since the metrics began.
    """

    steps: int
    global_step: int
    loss: float
    metrics: Mapping[str, float] = {}
    staleness: int = 0
    compute: float = 0.0
    mean_loss: float = 0.0

    @classmethod
    def of(cls, network: FunctionalModel, figures: Any) -> Round:
        """Return the round of a tensor of `figures`."""
        steps, global_step, loss, staleness, compute, mean_loss, *results = map(float, np.asarray(figures))
        metrics = dict(zip(network.metric_names, results, strict=True))
        return cls(int(steps), int(global_step), loss, metrics, int(staleness), compute, mean_loss)


def figures(steps: Any, global_step: Any, loss: Any, staleness: Any, compute: Any, metrics: Any) -> Any:
    """Return all figures of a round, float64 [5 + metrics]: one tensor, so that it is one message.

    `metrics` are as those of `Network.step`, the mean loss first.
    """
    stacked = tf.stack([tf.cast(figure, tf.float64) for figure in (steps, global_step, loss, staleness, compute)])
    return tf.concat([stacked, tf.cast(metrics, tf.float64)], 0)


def run_local_steps(
    network: FunctionalModel,
    iterator: Any,
    state: State,
    steps: Any,
    position: Any,
    devices: Sequence[str],
    live: Any = None,
    metrics: Sequence[Any] = (),
) -> tuple[State, Any, Any]:
    """Take this many steps, int64, from `state`; return the new state, the sum of losses, the metrics.

    They use the iterator's next batches. Several devices share the steps, as evenly as can be, each by itself from `state`,
    and the new one is the mean by steps; metrics are those of the first device, which has a step if any has. The first step of
    each is taken at the global step `position`, int64, and each further one as many after the one before as devices train in
    the job: `live`, or all. Metrics begin anew, or continue in tf.Variables, `metrics`, for one device alone.
    """
    if len(devices) == 1:
        return _run(network, iterator, state, steps, position, live, metrics)
    own, moved, owns, losses, first = len(network.own), list[Any](), list[Any](), list[Any](), None
    for index, device in enumerate(devices):
        mine = (steps + len(devices) - 1 - index) // len(devices)
        with tf.device(device):
            start = State(tuple(map(tf.identity, state.shared)), state.own[own * index : own * (index + 1)])
            end, loss_sum, results = _run(network, iterator, start, mine, position, live)
            part = tf.cast(mine, tf.float32) / tf.maximum(tf.cast(steps, tf.float32), 1.0)
            moved.append([(after - before) * part for after, before in zip(end.shared, start.shared, strict=True)])
        owns += end.own
        losses.append(loss_sum)
        first = results if first is None else first
    with tf.device(devices[0]):
        shared = [before + tf.add_n(changes) for before, *changes in zip(state.shared, *moved, strict=True)]
        return State(tuple(shared), tuple(owns)), tf.add_n(losses), first


def _run(
    network: FunctionalModel, iterator: Any, state: State, steps: Any, position: Any, live: Any, metrics: Sequence[Any] = ()
) -> tuple[State, Any, Any]:
    measured = [variable.read_value() for variable in metrics] or network.initial_metrics()
    counts = [len(network.shared), len(network.own), len(measured)]

    def body(taken: Any, loss_sum: Any, _results: Any, *values: Any) -> Any:
        batch = Batch.of(iterator.get_next())
        shared, own, measured = _divide(values, counts)
        *after, loss, results = network.step(
            shared, own, measured, batch, position + taken * (network.replicas if live is None else live), live
        )
        return (taken + 1, loss_sum + loss, results, *(value for part in after for value in part))

    zeros = (tf.constant(0, tf.int64), tf.constant(0.0), tf.zeros([1 + len(network.metric_names)]))
    _, loss_sum, results, *values = tf.while_loop(
        lambda taken, *_: taken < steps, body, (*zeros, *state.shared, *state.own, *measured), parallel_iterations=1
    )
    shared, own, after = _divide(values, counts)
    for variable, value in zip(metrics, after, strict=False):
        variable.assign(value, read_value=False)
    return State(tuple(shared), tuple(own)), loss_sum, results


def _divide(values: Sequence[Any], counts: Sequence[int]) -> list[Sequence[Any]]:
    """Return consecutive parts of the values, of these lengths."""
    ends = list(accumulate(counts, initial=0))
    return [values[begin:end] for begin, end in pairwise(ends)]
