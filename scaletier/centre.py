"""The parameters that asynchronous replicas share, and the exchange with them after a walk.

Sources: Dean et al. 2012, "Large scale distributed deep networks", section 4.1, Downpour SGD with n_fetch = n_push = K. Two
things differ. The servers take the mean of what the replicas walked and not its sum, as federated averaging does (McMahan et
al. 2017): the sum of steps that were taken on stale parameters overshoots. And what crosses the network are half-precision
floats: the parameters as a replica reads them, and how far it walked from there, so that what rounding loses is never added up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from scaletier.network import Network
from scaletier.runtime import here, import_tensorflow
from scaletier.walk import Round, State, figures, walk

tf = import_tensorflow()

# A half-precision float holds up to 65,504, and this many times less than its largest with all its bits.
_HALF_MOST = 32_768.0
_WIRE_BYTES = 2


class Centre:
    """All shared parameters, spread evenly over devices, and the global step, on the first of them.

    The variables lie one after the other in a flat vector, which is cut into as many equal parts as there are devices:
    one matrix may be nearly all of a model, so that whole variables would leave all but one server idle, and one embedding may
    be more than a server holds.
    """

    def __init__(self, network: Network, devices: Sequence[str], values: Sequence[npt.NDArray[np.float32]], step: int) -> None:
        self._specs = network.shared
        cuts = np.linspace(0, sum(spec.size for spec in self._specs), len(devices) + 1).astype(int).tolist()
        self._sizes = [end - begin for begin, end in pairwise(cuts)]
        self.bytes_per_round = [2 * _WIRE_BYTES * size for size in self._sizes]
        self._parts = []
        for device, (begin, end) in zip(devices, pairwise(cuts), strict=True):
            with tf.device(device):
                self._parts.append(tf.Variable(_between(values, begin, end)))
        with tf.device(devices[0]):
            self._step = tf.Variable(np.int64(step))
        self._pull = tf.function(lambda: ([part.read_value() for part in self._parts], self.step()), autograph=False)
        self._pull = self._pull.get_concrete_function()

    def read(self) -> tuple[Any, ...]:
        """All variables, in the network's order, as they cross the network."""
        parts = []
        for part in self._parts:
            with tf.device(part.device):
                packed = _packed(part.read_value())
            parts.append(_unpacked(*packed))
        return self._cut(tf.concat(parts, 0))

    def _cut(self, flat: Any) -> tuple[Any, ...]:
        pieces = tf.split(flat, [spec.size for spec in self._specs])
        return tuple(tf.reshape(piece, spec.shape) for piece, spec in zip(pieces, self._specs, strict=True))

    def step(self) -> Any:
        """The global step, int64."""
        return self._step.read_value()

    def add(self, walked: Sequence[Any], share: Any, steps: Any) -> Any:
        """Takes this share of a walk, in the network's order, and counts its steps, int64; the global step after it."""
        flat = tf.concat([tf.reshape(one, [-1]) for one in walked], 0) * share
        for part, mine in zip(self._parts, tf.split(flat, self._sizes), strict=True):
            packed = _packed(mine)
            with tf.device(part.device):
                part.assign_add(_unpacked(*packed), read_value=False)
        with tf.device(self._step.device):
            return self._step.assign_add(steps)

    def pull(self) -> tuple[list[npt.NDArray[np.float32]], int]:
        """All parameters, exactly, in the network's order, and the global step."""
        parts, step = self._pull()
        flat = np.concatenate([part.numpy() for part in parts])
        cuts = np.cumsum([0, *(spec.size for spec in self._specs)]).tolist()
        found = [flat[begin:end].reshape(spec.shape) for spec, (begin, end) in zip(self._specs, pairwise(cuts), strict=True)]
        return found, int(step)


def _between(values: Sequence[npt.NDArray[np.float32]], begin: int, end: int) -> npt.NDArray[np.float32]:
    """Elements of arrays that lie end to end, without a copy of them all."""
    found, start = [], 0
    for value in values:
        low, high = max(begin, start), min(end, start + value.size)
        if low < high:
            found.append(value.reshape(-1)[low - start : high - start])
        start += value.size
    return np.concatenate(found) if found else np.zeros(0, np.float32)


def _packed(values: Any) -> tuple[Any, Any]:
    """Numbers in half precision, as their bits, and what they are multiples of: the largest always fits.

    TensorFlow would have casts after a concat rather than before, and has no quick concat of halves: these are no halves.
    """
    scale = tf.reduce_max(tf.abs(values)) / _HALF_MOST if values.shape[0] else tf.constant(0.0)
    scale = tf.where(tf.equal(scale, 0.0), 1.0, scale)
    return tf.bitcast(tf.cast(values / scale, tf.float16), tf.uint16), scale


def _unpacked(bits: Any, scale: Any) -> Any:
    return tf.cast(tf.bitcast(bits, tf.float16), tf.float32) * scale


Run = Callable[..., Any]


def make_round(network: Network, centre: Centre | None, iterator: Any, devices: Sequence[str]) -> Run:
    """One round as a graph, for hosts with these devices: from an iterator like `iterator`, a replica's state, and three
    numbers, float64 [3], to its new state and the figures of Round. The numbers are how many steps, the global step where there
    is no centre, and the share in the mean: one tensor, so that it goes in one message.

    Where there is a centre, a round begins with what that holds now, and nothing shared is in the state before: who was busy
    with something else, as the master is with an evaluation, would walk from where the others were long ago, at today's rate.
    The state after it has what was read.

    It is traced here, once: a tf.function would be traced again for each device that it is called on.
    """

    def run(iterator: Any, shared: Any, own: Any, numbers: Any) -> Any:
        steps, share = tf.cast(numbers[0], tf.int64), tf.cast(numbers[2], tf.float32)
        position = tf.cast(numbers[1], tf.int64)
        if centre:
            position, shared = centre.step(), centre.read()
        with tf.control_dependencies([position, *shared]):
            began = tf.timestamp()
        with tf.control_dependencies([began]):
            start = [tf.identity(value) for value in shared]
        reached, loss_sum, metrics = walk(network, iterator, State(tuple(start), tuple(own)), steps, position, devices)
        with tf.control_dependencies([*reached.shared, loss_sum]):
            computed = tf.timestamp()
        values, global_step = list(reached.shared), position + steps
        if centre:
            with tf.control_dependencies([computed]):
                walked = [after - before for after, before in zip(reached.shared, start, strict=True)]
                values, global_step = start, centre.add(walked, share, steps)
        loss = loss_sum / tf.maximum(tf.cast(steps, tf.float32), 1.0)
        told = figures(steps, global_step, loss, global_step - position - steps, computed - began, network.results(metrics))
        return tuple(values), reached.own, told

    # There is no Python control flow for AutoGraph to convert, and converting takes time.
    shared = () if centre else tuple(tf.TensorSpec(spec.shape, spec.dtype) for spec in network.shared)
    own = tuple(tf.TensorSpec(spec.shape, spec.dtype) for _ in devices for spec in network.own)
    numbers = tf.TensorSpec([3], tf.float64)
    graph: Run = tf.function(run, autograph=False).get_concrete_function(iterator, shared, own, numbers)
    return graph


def take_round(
    network: Network, run: Run, iterator: Any, state: State, steps: int, position: int, share: float
) -> tuple[State, Round]:
    """One round, here or wherever the current device is: the replica's new state, which stays there, and the figures."""
    with here():
        numbers = tf.constant([steps, position, share], tf.float64)
    shared, own, told = run(iterator, *state, numbers)
    return State(tuple(shared), tuple(own)), Round.of(network, told.numpy())
