"""Downpour SGD: every replica walks K steps on its own, then meets the parameters on the servers.

Source: Dean et al. 2012, "Large scale distributed deep networks", section 4.1, with n_fetch = n_push = K, and its warmstart:
the master walks alone at first, and the workers join it a moment later. Two things differ. The servers take the mean of what
the replicas walked and not its sum, as federated averaging does (McMahan et al. 2017): the sum of steps that were taken on
stale parameters overshoots. And what crosses the network are 16-bit integers, in parts of the largest number of each piece:
the parameters as a replica reads them, and how far it walked from there, so that what rounding loses is never added up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.descent import Descent, gradients
from trainer.model import Model
from trainer.runtime import import_tensorflow

tf = import_tensorflow()

_WIRE = tf.int16
_WIRE_BYTES = 2


class Round(NamedTuple):
    """What K local steps came to: steps taken, the global step after them, mean loss in nats and mean accuracy.

    `staleness` are the steps of others between reading the parameters and adding to them; `compute` are the seconds that the
    steps took by themselves.
    """

    steps: int
    global_step: int
    loss: float
    accuracy: float
    staleness: int = 0
    compute: float = 0.0


class State(NamedTuple):
    """What a replica keeps between rounds: the parameters as it read them last, and its velocity, both float32 [P]."""

    values: Any
    velocity: Any


class Centre:
    """The flat vector of all parameters, cut into equal shards, one on each device; and the global step, on the first.

    Cutting by size and not by variable spreads the load evenly: one matrix is 98% of the convolutional network.
    """

    def __init__(self, devices: Sequence[str], values: npt.NDArray[np.float32], step: int, remote: bool) -> None:
        self._shards = []
        self._remote = remote
        for device, piece in zip(devices, np.array_split(values, len(devices)), strict=True):
            with tf.device(device):
                self._shards.append(tf.Variable(piece))
        with tf.device(devices[0]):
            self._step = tf.Variable(np.int64(step))
        self._pull = tf.function(lambda: (self._exact(), self.step()), autograph=False).get_concrete_function()

    @property
    def bytes_per_round(self) -> list[int]:
        """Bytes that a round of one replica moves to and from each shard; none where they are at hand."""
        return [2 * _WIRE_BYTES * int(shard.shape[0]) if self._remote else 0 for shard in self._shards]

    def read(self) -> Any:
        """All parameters, float32 [P], as they cross the network."""
        if not self._remote:
            return self._exact()
        pieces = []
        for shard in self._shards:
            with tf.device(shard.device):
                packed = _pack(shard.read_value())
            pieces.append(_unpack(*packed))
        return tf.concat(pieces, 0)

    def _exact(self) -> Any:
        return tf.concat([shard.read_value() for shard in self._shards], 0)

    def step(self) -> Any:
        """The global step, int64."""
        return self._step.read_value()

    def add(self, change: Any, steps: Any) -> Any:
        """Adds to the parameters, float32 [P], and to the global step, int64; returns the latter."""
        for shard, piece in zip(self._shards, tf.split(change, [shard.shape[0] for shard in self._shards]), strict=True):
            packed = _pack(piece) if self._remote else None
            with tf.device(shard.device):
                shard.assign_add(_unpack(*packed) if packed else piece, read_value=False)
        with tf.device(self._step.device):
            return self._step.assign_add(steps)

    def set(self, values: Any, steps: Any) -> Any:
        """Puts these parameters, float32 [P], in place of all; adds to the global step, int64, and returns it."""
        for shard, piece in zip(self._shards, tf.split(values, [shard.shape[0] for shard in self._shards]), strict=True):
            shard.assign(piece, read_value=False)
        return self._step.assign_add(steps)

    def pull(self) -> tuple[Any, int]:
        """All parameters, float32 [P], exactly, on the current device, and the global step."""
        values, step = self._pull()
        return values, int(step)


def _pack(values: Any) -> tuple[Any, Any]:
    """Floats as int16, and the float that one of them stands for."""
    unit = tf.maximum(tf.reduce_max(tf.abs(values)), np.finfo(np.float32).tiny * _WIRE.max) / _WIRE.max
    return tf.cast(tf.round(values / unit), _WIRE), unit


def _unpack(packed: Any, unit: Any) -> Any:
    return tf.cast(packed, tf.float32) * unit


Run = Callable[[Any, Any, Any, Any, Any], Any]


def make_round(model: Model, centre: Centre, descent: Descent, iterator: Any) -> Run:
    """One round as a graph: from an iterator like `iterator`, a replica's values and velocity, K, int64, and its share in the
    mean, float32, to its new values and velocity and the figures of Round, float64 [6].

    It takes fewer than K steps where the global step would pass the last one, and none at all once it is there. It is traced
    here, once: a tf.function would be traced again for each device that it is called on.
    """
    count = len(model.shapes)

    def run(iterator: Any, start: Any, velocity: Any, period: Any, share: Any) -> Any:
        step = centre.step()
        steps = tf.clip_by_value(descent.max_steps - step, 0, period)
        with tf.control_dependencies([steps]):
            began = tf.timestamp()
        with tf.control_dependencies([began]):
            start = tf.identity(start)

        def body(taken: Any, loss_sum: Any, correct_sum: Any, *state: Any) -> Any:
            images, labels = iterator.get_next()
            changes, loss, correct = gradients(model, state[:count], images, labels)
            moved, velocities = descent.move(state[:count], state[count:], changes, descent.rate(step + taken))
            return (taken + 1, loss_sum + loss, correct_sum + correct, *moved, *velocities)

        zeros = (tf.constant(0, tf.int64), tf.constant(0.0), tf.constant(0.0))
        state = (*model.unflatten(start).values(), *model.unflatten(velocity).values())
        _, loss_sum, correct_sum, *state = tf.while_loop(
            lambda taken, *_: taken < steps, body, (*zeros, *state), parallel_iterations=1
        )
        reached = tf.concat([tf.reshape(value, [-1]) for value in state[:count]], 0)
        velocity = tf.concat([tf.reshape(value, [-1]) for value in state[count:]], 0)
        with tf.control_dependencies([reached]):
            computed = tf.timestamp()
        if descent.replicas == 1:
            global_step, values = centre.set(reached, steps), reached
        else:
            with tf.control_dependencies([computed]):
                global_step = centre.add((reached - start) * share, steps)
            with tf.control_dependencies([global_step]):
                values = centre.read()
        taken = tf.maximum(tf.cast(steps, tf.float32), 1.0)
        staleness = global_step - step - steps
        figures = (steps, global_step, loss_sum / taken, correct_sum / taken, staleness, computed - began)
        return values, velocity, tf.stack([tf.cast(figure, tf.float64) for figure in figures])

    # There is no Python control flow for AutoGraph to convert, and converting takes time.
    vector = tf.TensorSpec([sum(model.sizes)], tf.float32)
    scalars = (tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.float32))
    graph: Run = tf.function(run, autograph=False).get_concrete_function(iterator, vector, vector, *scalars)
    return graph


def take_round(run: Run, iterator: Any, state: State, period: int, share: float) -> tuple[State, Round]:
    """One round, here or wherever the current device is: the replica's new state, which stays there, and the figures."""
    values, velocity, figures = run(iterator, *state, tf.constant(period, tf.int64), tf.constant(share))
    steps, global_step, loss, accuracy, staleness, compute = figures.numpy()  # one tensor, so that they come in one message
    taken = Round(int(steps), int(global_step), float(loss), float(accuracy), int(staleness), float(compute))
    return State(values, velocity), taken
