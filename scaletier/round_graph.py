"""Build a replica's round as one graph: K local steps on each of its devices, between the two ends of an exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from scaletier.checkpoint import LocalCopy
from scaletier.functional_model import Batch, FunctionalModel
from scaletier.loop import Round
from scaletier.private import is_seed
from scaletier.runtime import here, import_tensorflow

tf = import_tensorflow()


class State(NamedTuple):
    """A replica's state between rounds: values of the network's `shared` and `local` variables, in their order.

    `local` has the values of each of its devices, one device after the other. A part that the exchange holds is empty here.
    """

    shared: tuple[Any, ...] = ()
    local: tuple[Any, ...] = ()

    @classmethod
    def initial(cls, network: FunctionalModel) -> State:
        """Return the initial state of a job, on one device of the master."""
        return cls(*(tuple(tf.constant(network.initial(spec)) for spec in part) for part in (network.shared, network.local)))

    @classmethod
    def of(cls, shared: Sequence[Any], local: Sequence[Any]) -> State:
        """Return the values of tf.Variables, each on its device."""
        values = []
        for variable in (*shared, *local):
            with tf.device(variable.device):
                values.append(variable.read_value())
        return cls(tuple(values[: len(shared)]), tuple(values[len(shared) :]))


class Exchange:
    """Begin and end a round within its graph; this class is for a replica that trains alone."""

    # The parts of the state that a round passes to the next one; the exchange holds the others.
    carried: tuple[str, ...] = ("shared", "local")

    def __init__(self, network: FunctionalModel) -> None:
        self.network = network

    def begin(self, position: Any, state: State) -> tuple[Any, State]:
        """Return the global step, int64, and the state that a round starts from."""
        return position, state

    def end(self, _start: State, reached: State, taken: LocalResult) -> tuple[State, Any, Any]:
        """Share the result of a round; return the state after it, the global step, and the results, as in `LocalResult`."""
        local = self.network.average(reached.shared, reached.local, taken.steps, taken.position)
        return State(reached.shared, tuple(local)), taken.position + taken.steps, taken.results


class VariableExchange(Exchange):
    """Keep the state of `count` replicas in the tf.Variables of a copy, each on its device."""

    carried = ()

    def __init__(self, copy: LocalCopy, local: Sequence[Any], count: int = 1) -> None:
        super().__init__(copy.network)
        self.step, self.shared, self.local, self.count = copy.step, copy.shared, local, count

    def begin(self, _position: Any, _state: State) -> tuple[Any, State]:
        return self.step.read_value(), State.of(self.shared, self.local)

    def end(self, _start: State, reached: State, taken: LocalResult) -> tuple[State, Any, Any]:
        with tf.control_dependencies([taken.results]):  # a round without results changes nothing
            for variable, value in zip((*self.shared, *self.local), (*reached.shared, *reached.local), strict=True):
                with tf.device(variable.device):
                    variable.assign(value, read_value=False)
            step = self.step.assign_add(taken.steps * self.count)
        return State(), step, taken.results


class LocalResult(NamedTuple):
    """Local steps from a global step on, int64, by one of `live` hosts; `results` are the mean loss and the metrics."""

    steps: Any
    position: Any
    live: Any
    results: Any


def initial_local(
    network: FunctionalModel, values: Sequence[Any], replica: int, replicas: int, devices: int, step: int
) -> list[npt.NDArray[Any]]:
    """Return the initial `local` values of a replica's devices, one device after the other.

    Optimizers continue from `values`, those of the chief's first device. Random generators draw different numbers on each
    device and at each global `step`.
    """
    results = []
    for number in range(replica, replica + replicas * devices, replicas):  # no other device of the job has it
        for spec, value in zip(network.local, map(np.asarray, values), strict=True):
            if number and spec.name in network.averages:
                value = np.zeros_like(value)  # which is not sent: the first device's averages count
            elif number and value.size and is_seed(spec.variable):
                value = value.copy()
                value.flat[0] = (int(value.flat[0]) + number * 7_919 + step * 104_729) % 2**31
            results.append(value)
    return results


def pack_round(
    steps: Any, global_step: Any, results: Any, local_loss: Any = None, staleness: Any = 0, compute: Any = 0.0
) -> Any:
    """Return all figures of a round, float64 [6 + metrics]: one tensor, so that it is one message."""
    local_loss = results[0] if local_loss is None else local_loss
    stacked = tf.stack([tf.cast(one, tf.float64) for one in (steps, global_step, local_loss, staleness, compute)])
    return tf.concat([stacked, tf.cast(results, tf.float64)], 0)


def unpack_round(network: FunctionalModel, packed: Any) -> Round:
    """Return the round of a tensor of `pack_round`."""
    steps, global_step, local_loss, staleness, compute, loss, mean_loss, *results = map(float, np.asarray(packed))
    metrics = dict(zip(network.metric_names, results, strict=True))
    return Round(int(steps), int(global_step), loss, metrics, int(staleness), compute, mean_loss, local_loss)


Run = Callable[..., Any]


def make_round(
    network: FunctionalModel,
    exchange: Exchange | None,
    iterator: Any,
    devices: Sequence[str],
    metrics: Sequence[Any] = (),
) -> Run:
    """Return one round as a graph, for hosts with these devices.

    It maps an iterator like `iterator`, a replica's state, and three numbers, float64 [3], to its new state and the figures of
    `pack_round`. The numbers are the steps, the global step if the exchange does not have it, and the number of hosts that
    train now: one tensor, so that it goes in one message. `metrics` are as in `local_steps`, for one device alone.

    It is traced here, once: a tf.function would be traced again for each device that it is called on.
    """
    exchange = exchange or Exchange(network)

    def run(iterator: Any, shared: Any, local: Any, numbers: Any) -> Any:
        steps, position, live = (tf.cast(number, tf.int64) for number in tf.unstack(numbers))
        position, (shared, local) = exchange.begin(position, State(shared, local))
        with tf.control_dependencies([position, *shared]):
            began = tf.timestamp()
        with tf.control_dependencies([began]):
            start = State(tuple(tf.identity(value) for value in shared), tuple(local))
        take = local_steps(network, iterator, position, live * len(devices), metrics)
        reached, loss_sum, results = run_on_devices(take, start, steps, devices)
        with tf.control_dependencies([*reached.shared, loss_sum]):
            computed = tf.timestamp()
        loss = loss_sum / tf.maximum(tf.cast(steps, tf.float32), 1.0)
        with tf.control_dependencies([computed]):
            taken = LocalResult(steps, position, live, tf.concat([[loss], results], 0))
            after, global_step, results = exchange.end(start, reached, taken)
        staleness = global_step - position - steps
        return *after, pack_round(steps, global_step, results, loss, staleness, computed - began)

    # There is no Python control flow for AutoGraph to convert, and converting takes time.
    specs = State(*(tuple(tf.TensorSpec(one.shape, one.dtype) for one in part) for part in (network.shared, network.local)))
    shared = specs.shared if "shared" in exchange.carried else ()
    local = specs.local * len(devices) if "local" in exchange.carried else ()
    numbers = tf.TensorSpec([3], tf.float64)
    graph: Run = tf.function(run, autograph=False).get_concrete_function(iterator, shared, local, numbers)
    return graph


def run_round(
    network: FunctionalModel, run: Run, iterator: Any, state: State, steps: int, position: int, live: int
) -> tuple[State, Round]:
    """Run one round on the current device; return the new state, which stays there, and the figures."""
    with here():
        numbers = tf.constant([steps, position, live], tf.float64)
    shared, local, packed = run(iterator, *state, numbers)
    return State(tuple(shared), tuple(local)), unpack_round(network, packed.numpy())


Steps = Callable[[State, Any], tuple[State, Any, Any]]


def local_steps(network: FunctionalModel, iterator: Any, position: Any, live: Any, metrics: Sequence[Any] = ()) -> Steps:
    """Return a function that takes steps, int64, from a state, with the iterator's next batches, on the current device.

    Its results are the new state, the sum of losses, and the metrics. The first step has the global step `position`, int64;
    each further step adds `live`, the devices that train in the job. Metrics are reset, or continue in `metrics`, tf.Variables.
    """

    def take(state: State, steps: Any) -> tuple[State, Any, Any]:
        measured = [variable.read_value() for variable in metrics] or network.initial_metrics()
        ends = list(accumulate([len(state.shared), len(state.local), len(measured)], initial=0))

        def divide(values: Sequence[Any]) -> list[Sequence[Any]]:
            return [values[begin:end] for begin, end in pairwise(ends)]

        def body(taken: Any, loss_sum: Any, _results: Any, *values: Any) -> Any:
            batch = Batch.of(iterator.get_next())
            shared, local, measured = divide(values)
            *after, loss, results = network.step(shared, local, measured, batch, position + taken * live, live)
            return taken + 1, loss_sum + loss, results, *(value for part in after for value in part)

        zeros = (tf.constant(0, tf.int64), tf.constant(0.0), tf.zeros([1 + len(network.metric_names)]))
        _, loss_sum, results, *values = tf.while_loop(
            lambda taken, *_: taken < steps, body, (*zeros, *state.shared, *state.local, *measured), parallel_iterations=1
        )
        shared, local, after = divide(values)
        for variable, value in zip(metrics, after, strict=False):
            variable.assign(value, read_value=False)
        return State(tuple(shared), tuple(local)), loss_sum, results

    return take


def run_on_devices(take: Steps, state: State, steps: Any, devices: Sequence[str]) -> tuple[State, Any, Any]:
    """Divide steps evenly among devices, each of which takes its own from `state`.

    The new state is their mean, weighted by steps. The metrics are those of the first device.
    """
    if len(devices) == 1:
        return take(state, steps)
    count, moved, local_values, losses, metrics = (
        len(state.local) // len(devices),
        list[Any](),
        list[Any](),
        list[Any](),
        list[Any](),
    )
    for index, device in enumerate(devices):
        mine = (steps + len(devices) - 1 - index) // len(devices)
        with tf.device(device):
            start = State(tuple(map(tf.identity, state.shared)), state.local[count * index : count * (index + 1)])
            end, loss_sum, results = take(start, mine)
            part = tf.cast(mine, tf.float32) / tf.maximum(tf.cast(steps, tf.float32), 1.0)
            moved.append([(after - before) * part for after, before in zip(end.shared, start.shared, strict=True)])
        local_values += end.local
        losses.append(loss_sum)
        metrics.append(results)
    with tf.device(devices[0]):
        shared = [before + tf.add_n(changes) for before, *changes in zip(state.shared, *moved, strict=True)]
        return State(tuple(shared), tuple(local_values)), tf.add_n(losses), metrics[0]
