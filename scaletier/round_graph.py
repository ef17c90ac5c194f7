"""Build a replica's round as one graph: K local steps on each of its devices, between the begin and end of an exchange."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from scaletier.functional_model import Batch, FunctionalModel, metrics_by_name
from scaletier.loop import Round
from scaletier.private import is_seed
from scaletier.tensorflow_setup import import_tensorflow, on_this_process, send
from scaletier.variables import Handle, Variables, VariableSpec

tf = import_tensorflow()


class LocalResult(NamedTuple):
    """The result of a host's local steps.

    Attributes:
        steps: the number of steps on all devices of the host, int64.
        global_step: the global step before them, int64.
        live_hosts: the number of hosts that train now, int64.
        results: the mean loss of the steps, the mean loss of samples since the metrics were reset, and the metrics, float32
            [2 + M].
    """

    steps: Any
    global_step: Any
    live_hosts: Any
    results: Any


class Exchange:
    """Begin and end a round within its graph. This base class is for a replica that trains alone."""

    def __init__(self, network: FunctionalModel) -> None:
        self.network = network

    def begin(self, variables: Variables) -> tuple[Any, Any]:
        """Assign the values from which a round starts to the variables of a replica's first device.

        Returns:
            The global step, int64, computed after the assignments; and what `end` needs of the start.
        """
        return variables.step.read_value(), None

    def end(self, _start: Any, variables: Variables, result: LocalResult) -> tuple[Any, Any]:
        """End a round, and share its result with the other replicas.

        Returns:
            The global step after the round, int64; and the results, as in `LocalResult`.
        """
        written = self.update_ema(variables, result.steps, result.global_step)
        with tf.control_dependencies([*written, variables.step.assign(result.global_step + result.steps)]):
            return variables.step.read_value(), result.results

    def update_ema(self, variables: Variables, steps: Any, global_step: Any) -> list[Any]:
        """Move the moving averages of weights (`use_ema`) towards the weights, after steps of all replicas at a global step.

        Returns:
            The operations.
        """
        averages = self.network.ema_pairs(variables.shared, variables.local)
        if self.network.replicas == 1 or not averages:  # the optimizer of a single replica does this in each step, as in Keras
            return []
        share = self.network.ema_share(steps, global_step)
        values = [(average, average.read_value(), weight.read_value()) for average, weight in averages]
        return [average.assign(value + share * (weight - value)) for average, value, weight in values]


def list_handles(variables: Any) -> list[Any]:
    """Return the handles of a replica's tf.Variables on a device, as a graph takes them."""
    return [variable.handle for variable in (*variables.shared, *variables.local, variables.step)]


def handle_specs(network: FunctionalModel, devices: int = 1) -> list[Any]:
    """Return the specs of `list_handles` as arguments of a graph.

    They do not declare the variables' shapes: else TensorFlow would not let a round free a variable's memory.
    """
    return [tf.TensorSpec([], tf.resource)] * ((len(network.shared) + len(network.local) + 1) * devices)


def named_handles(network: FunctionalModel, handles: Sequence[Any]) -> Variables:
    """Return the handles of `list_handles` as `Variables`, each with the spec of its variable."""
    step = VariableSpec("step", (), "int64", None)
    pairs = [Handle(*pair) for pair in zip(handles, (*network.shared, *network.local, step), strict=True)]
    return Variables(pairs[: len(network.shared)], pairs[len(network.shared) : -1], pairs[-1])


def initial_local(
    network: FunctionalModel, values: Iterable[npt.NDArray[Any]], number: int, step: int
) -> Iterator[npt.NDArray[Any]]:
    """Yield the initial `local` values of a device, one by one; `number` is unique among the devices of the job.

    Optimizers continue from `values`, the local values of the chief's first device, which has the number 0. Random generators
    draw different numbers on each device and at each global `step`.
    """
    for spec, value in zip(network.local, values, strict=True):
        if number and spec.name in network.ema_slots:
            value = np.zeros_like(value)  # zeros are not sent, and only the first device's averages are used
        elif number and value.size and is_seed(spec.variable):
            value = value.copy()
            value.flat[0] = (int(value.flat[0]) + number * 7_919 + step * 104_729) % 2**31
        yield value


def replica_variables(
    network: FunctionalModel, state: Any, replica: int, replicas: int, devices: Sequence[str], step: int, use_state: bool = True
) -> list[Any]:
    """Return a replica's variables on each of its devices.

    The optimizers continue from the chief's `state`. With `use_state`, the first device uses the variables of `state`. On other
    devices the `shared` variables are empty until a round. The memory has no second copy of the local values.
    """
    with on_this_process():
        empty, zero = tf.zeros([0]), tf.constant(0, tf.int64)
    results = list[Any]()
    for number, device in zip(itertools.count(replica, replicas), devices, strict=False):
        values = initial_local(network, _read(state.local), number, step)
        if use_state and not results:
            if number:
                for variable, value in zip(state.local, values, strict=True):
                    variable.assign(value)
            results.append(state)
            continue
        with tf.device(device):
            shared = [tf.Variable(empty, shape=tf.TensorShape(None)) for _ in network.shared]
            results.append(Variables(shared, [tf.Variable(send(value, device)) for value in values], tf.Variable(zero)))
    return results


def _read(variables: Iterable[Any]) -> Iterator[npt.NDArray[Any]]:
    """Yield the value of each tf.Variable of this host, without a copy until the variable changes."""
    for variable in variables:
        with on_this_process():
            value = np.asarray(variable.read_value())
        yield value


def set_learning_rates(device_variables: Sequence[Any], learning_rates: Mapping[int, Any]) -> None:
    """Set learning rates, by their indices in `local`, on each of a replica's devices."""
    for variables in device_variables:
        for at, rate in learning_rates.items():
            with on_this_process():
                value = tf.constant(rate)
            with tf.device(variables.local[at].device):
                variables.local[at].assign(value)


def pack_round(
    steps: Any, global_step: Any, results: Any, local_loss: Any = None, staleness: Any = 0, compute: Any = 0.0
) -> Any:
    """Return all numbers of a round as one tensor, float64 [7 + M], for one message."""
    local_loss = results[0] if local_loss is None else local_loss
    stacked = tf.stack([tf.cast(one, tf.float64) for one in (steps, global_step, local_loss, staleness, compute)])
    return tf.concat([stacked, tf.cast(results, tf.float64)], 0)


def unpack_round(network: FunctionalModel, packed: Any) -> Round:
    """Return the round of a tensor of `pack_round`."""
    steps, global_step, local_loss, staleness, compute, loss, mean_loss, *results = map(float, np.asarray(packed))
    metrics = metrics_by_name(network.metric_shapes, results)
    return Round(int(steps), int(global_step), loss, metrics, int(staleness), compute, mean_loss, local_loss)


def make_round(
    network: FunctionalModel,
    exchange: Exchange | None,
    iterator: Any,
    devices: Sequence[str],
    metrics: Sequence[Any] = (),
    use_xla: bool = False,
) -> Any:
    """Return one round as a concrete function, for hosts with these devices.

    The function takes an iterator like `iterator`, the handles of the variables on each device, and float64 [2]: the number of
    steps and of hosts that train now, in one message. It returns a tensor of `pack_round`. It is traced once, here: a
    tf.function would be traced again for each device that calls it.

    Args:
        metrics: the tf.Variables in which metrics continue; without them each round resets the metrics. For one device only.
        use_xla: True to compile a step by XLA. For one device only.
    """
    exchange, count = exchange or Exchange(network), len(devices)
    size = len(handle_specs(network))
    step_function = _compiled_step if use_xla else FunctionalModel.step

    def take_steps(iterator: Any, variables: Variables, begin_step: Any, live_devices: Any, steps: Any) -> tuple[Any, Any]:
        """Take steps, int64, with the next batches, on the current device; return the sum of losses, and the metrics.

        The first step has the global step `begin_step`, int64; each further step adds `live_devices`, the number of devices
        that train now on all hosts.
        """

        def body(steps_done: Any, loss_sum: Any, _results: Any, *metric_state: Any) -> Any:
            batch, global_step = Batch.of(iterator.get_next()), begin_step + steps_done * live_devices
            new_metric_state, loss, results = step_function(
                network, variables.shared, variables.local, metric_state, batch, global_step, live_devices
            )
            with tf.control_dependencies([loss]):
                counted = variables.step.assign(variables.step.read_value() + 1)
            with tf.control_dependencies([counted]):
                return steps_done + 1, loss_sum + loss, results, *new_metric_state

        metric_state = [variable.read_value() for variable in metrics] or network.initial_metrics()
        zeros = tf.constant(0, tf.int64), tf.constant(0.0), tf.zeros([1 + sum(map(math.prod, network.metric_shapes.values()))])
        steps_done, loss_sum, results, *metric_state = tf.while_loop(
            lambda steps_done, *_: steps_done < steps, body, (*zeros, *metric_state), parallel_iterations=1
        )
        for variable, value in zip(metrics, metric_state, strict=False):
            variable.assign(value, read_value=False)
        with tf.control_dependencies([steps_done]):
            return tf.identity(loss_sum), results

    def run(iterator: Any, handles: Sequence[Any], numbers: Any) -> Any:
        steps, live_hosts = (tf.cast(number, tf.int64) for number in tf.unstack(numbers))
        shares = [(steps + count - 1 - at) // count for at in range(count)]
        first, *others = (named_handles(network, handles[at : at + size]) for at in range(0, len(handles), size))
        begin_step, start = exchange.begin(first)
        with tf.control_dependencies([begin_step]):
            values = [
                (one, value.read_value()) for each in others for one, value in zip(each.shared, first.shared, strict=True)
            ]
            with tf.control_dependencies([one.assign(value) for one, value in values]):
                start_time = tf.timestamp()
        losses, results = list[Any](), list[Any]()
        for device, variables, share in zip(devices, (first, *others), shares, strict=True):
            with tf.control_dependencies([start_time]), tf.device(device if others else None):
                loss_sum, device_results = take_steps(iterator, variables, begin_step, live_hosts * count, share)
            losses.append(loss_sum)
            results.append(device_results)
        with tf.control_dependencies(losses), tf.control_dependencies(_average((first, *others), shares, steps)):
            end_time = tf.timestamp()
        loss = tf.add_n(losses) / tf.maximum(tf.cast(steps, tf.float32), 1.0)
        with tf.control_dependencies([end_time]):
            result = LocalResult(steps, begin_step, live_hosts, tf.concat([[loss], results[0]], 0))
            global_step, shared_results = exchange.end(start, first, result)
        return pack_round(steps, global_step, shared_results, loss, global_step - begin_step - steps, end_time - start_time)

    # There is no Python control flow for AutoGraph to convert, and converting takes time.
    return tf.function(run, autograph=False).get_concrete_function(
        iterator, handle_specs(network, count), tf.TensorSpec([2], tf.float64)
    )


def _average(device_variables: Sequence[Variables], shares: Sequence[Any], steps: Any) -> list[Any]:
    """Assign the mean of all devices, weighted by their shares of steps, to the first device; return the operations."""
    if (count := len(device_variables)) == 1:
        return []
    parts = [tf.where(steps > 0, tf.cast(share / steps, tf.float32), 1.0 / count) for share in shares]
    means = [
        tf.add_n([part * one.read_value() for part, one in zip(parts, each, strict=True)])
        for each in zip(*(one.shared for one in device_variables), strict=True)
    ]
    return [one.assign(mean) for one, mean in zip(device_variables[0].shared, means, strict=True)]


def run_round(
    network: FunctionalModel, graph: Any, iterator: Any, device_variables: Sequence[Any], steps: int, live_hosts: int
) -> Round:
    """Run one round from the current device, with the variables of each of the replica's devices."""
    with on_this_process():
        numbers = tf.constant([steps, live_hosts], tf.float64)
    handles = [handle for variables in device_variables for handle in list_handles(variables)]
    return unpack_round(network, graph(iterator, handles, numbers).numpy())


def _compiled_step(network: FunctionalModel, shared: Sequence[Handle], local: Sequence[Handle], *arguments: Any) -> Any:
    """Take a step as `FunctionalModel.step`, compiled by XLA once for each shape of batches."""

    def step(handles: Sequence[Any], *arguments: Any) -> Any:
        pairs = [Handle(*pair) for pair in zip(handles, (*network.shared, *network.local), strict=True)]
        return network.step(pairs[: len(shared)], pairs[len(shared) :], *arguments)

    return tf.function(step, autograph=False, jit_compile=True)([one.handle for one in (*shared, *local)], *arguments)
