"""Downpour SGD: every replica walks K steps on its own, then meets the parameters on the servers.

Source: Dean et al. 2012, "Large scale distributed deep networks", section 4.1, with n_fetch = n_push = K, and its warmstart:
the master walks alone at first, and the workers join it a moment later. Two things differ. The servers take the mean of what
the replicas walked and not its sum, as federated averaging does (McMahan et al. 2017): the sum of steps that were taken on
stale parameters overshoots. And what crosses the network are half-precision floats: the parameters as a replica reads them,
and how far it walked from there, so that what rounding loses is never added up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.descent import Descent, gradients
from trainer.model import Model
from trainer.runtime import import_tensorflow

tf = import_tensorflow()

# Half precision has 10 bits from 6e-5 up, and what a replica walks in a round may be less than that.
_WIRE_SCALE = 1024.0
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
    """What a replica keeps between rounds: the parameters as it read them last, and its velocities, in the model's order."""

    values: tuple[Any, ...]
    velocities: tuple[Any, ...]


class Piece(NamedTuple):
    """A part of one variable, flat, where it is kept: `begin` and `end` are elements of the variable."""

    begin: int
    end: int
    values: Any


class Centre:
    """All parameters, spread evenly over devices; and the global step, on the first of them.

    The variables lie one after the other in a flat vector, which is cut into as many equal parts as there are devices:
    one matrix is 98% of the convolutional network, so that whole variables would leave all but one server idle.
    """

    def __init__(self, model: Model, devices: Sequence[str], values: npt.NDArray[np.float32], step: int, remote: bool) -> None:
        self._shapes, self._remote = list(model.shapes.values()), remote
        cuts = np.linspace(0, values.size, len(devices) + 1).astype(int)
        self._pieces: list[list[Piece]] = []
        self.bytes_per_round = [0] * len(devices)
        start = 0
        for size in model.sizes:
            pieces = []
            for index, (low, high) in enumerate(pairwise(cuts.tolist())):
                begin, end = max(low, start), min(high, start + size)
                if begin < end:
                    with tf.device(devices[index]):
                        pieces.append(Piece(begin - start, end - start, tf.Variable(values[begin:end])))
                    self.bytes_per_round[index] += 2 * _WIRE_BYTES * (end - begin) if remote else 0
            self._pieces.append(pieces)
            start += size
        with tf.device(devices[0]):
            self._step = tf.Variable(np.int64(step))
        self._pull = tf.function(lambda: (self._exact(), self.step()), autograph=False).get_concrete_function()

    def read(self) -> list[Any]:
        """All variables in the model's order, as they cross the network."""
        return [self._read(*pair) for pair in zip(self._pieces, self._shapes, strict=True)]

    def _read(self, pieces: Sequence[Piece], shape: Sequence[int]) -> Any:
        # TensorFlow would have casts after a concat rather than before, and has no quick concat of halves: these are no halves.
        packed = []
        for piece in pieces:
            with tf.device(piece.values.device):
                value = piece.values.read_value()
                packed.append(tf.bitcast(tf.cast(value, tf.float16), tf.uint16) if self._remote else value)
        whole = packed[0] if len(packed) == 1 else tf.concat(packed, 0)
        whole = tf.reshape(whole, shape)
        return tf.cast(tf.bitcast(whole, tf.float16), tf.float32) if self._remote else whole

    def _exact(self) -> Any:
        return tf.concat([piece.values.read_value() for pieces in self._pieces for piece in pieces], 0)

    def step(self) -> Any:
        """The global step, int64."""
        return self._step.read_value()

    def add(self, changes: Sequence[Any], share: Any, steps: Any) -> Any:
        """Adds this share of changes, in the model's order, to the variables, and to the global step, int64; the latter."""
        for pieces, change in zip(self._pieces, changes, strict=True):
            whole = tf.reshape(change, [-1]) * (share * (_WIRE_SCALE if self._remote else 1.0))
            if self._remote:
                whole = tf.bitcast(tf.cast(whole, tf.float16), tf.uint16)
            parts = [whole] if len(pieces) == 1 else [whole[piece.begin : piece.end] for piece in pieces]
            for piece, part in zip(pieces, parts, strict=True):
                with tf.device(piece.values.device):
                    if self._remote:
                        part = tf.cast(tf.bitcast(part, tf.float16), tf.float32) * (1.0 / _WIRE_SCALE)
                    piece.values.assign_add(part, read_value=False)
        with tf.device(self._step.device):
            return self._step.assign_add(steps)

    def set(self, values: Sequence[Any], steps: Any) -> Any:
        """Puts these in place of all variables; adds to the global step, int64, and returns it."""
        for pieces, value in zip(self._pieces, values, strict=True):
            for piece in pieces:
                piece.values.assign(tf.reshape(value, [-1])[piece.begin : piece.end], read_value=False)
        return self._step.assign_add(steps)

    def pull(self) -> tuple[Any, int]:
        """All parameters, float32 [P], exactly, on the current device, and the global step."""
        values, step = self._pull()
        return values, int(step)


Run = Callable[[Any, Any, Any, Any, Any], Any]


def make_round(model: Model, centre: Centre, descent: Descent, iterator: Any) -> Run:
    """One round as a graph: from an iterator like `iterator`, a replica's state, the number of its steps, int64, and its share
    in the mean, float32, to its new values and velocities and the figures of Round, float64 [6].

    It is traced here, once: a tf.function would be traced again for each device that it is called on.
    """
    count = len(model.shapes)

    def run(iterator: Any, start: Any, velocities: Any, steps: Any, share: Any) -> Any:
        step = centre.step()
        with tf.control_dependencies([step]):
            began = tf.timestamp()
        with tf.control_dependencies([began]):
            start = [tf.identity(value) for value in start]

        def body(taken: Any, loss_sum: Any, correct_sum: Any, *state: Any) -> Any:
            images, labels = iterator.get_next()
            changes, loss, correct = gradients(model, state[:count], images, labels)
            moved, faster = descent.move(state[:count], state[count:], changes, descent.rate(step + taken))
            return (taken + 1, loss_sum + loss, correct_sum + correct, *moved, *faster)

        zeros = (tf.constant(0, tf.int64), tf.constant(0.0), tf.constant(0.0))
        _, loss_sum, correct_sum, *state = tf.while_loop(
            lambda taken, *_: taken < steps, body, (*zeros, *start, *velocities), parallel_iterations=1
        )
        values, velocities = state[:count], state[count:]
        with tf.control_dependencies(values):
            computed = tf.timestamp()
        if descent.averaged == 1:
            global_step = centre.set(values, steps)
        else:
            with tf.control_dependencies([computed]):
                walked = [reached - value for reached, value in zip(values, start, strict=True)]
                global_step = centre.add(walked, share, steps)
            with tf.control_dependencies([global_step]):
                values = centre.read()
        taken = tf.maximum(tf.cast(steps, tf.float32), 1.0)
        staleness = global_step - step - steps
        figures = (steps, global_step, loss_sum / taken, correct_sum / taken, staleness, computed - began)
        return tuple(values), tuple(velocities), tf.stack([tf.cast(figure, tf.float64) for figure in figures])

    # There is no Python control flow for AutoGraph to convert, and converting takes time.
    variables = tuple(tf.TensorSpec(shape, tf.float32) for shape in model.shapes.values())
    scalars = (tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.float32))
    graph: Run = tf.function(run, autograph=False).get_concrete_function(iterator, variables, variables, *scalars)
    return graph


def take_round(run: Run, iterator: Any, state: State, steps: int, share: float) -> tuple[State, Round]:
    """One round, here or wherever the current device is: the replica's new state, which stays there, and the figures."""
    values, velocities, figures = run(iterator, *state, tf.constant(steps, tf.int64), tf.constant(share))
    steps, global_step, loss, accuracy, staleness, compute = figures.numpy()  # one tensor, so that they come in one message
    taken = Round(int(steps), int(global_step), float(loss), float(accuracy), int(staleness), float(compute))
    return State(values, velocities), taken
