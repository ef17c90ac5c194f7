"""Elastic averaging SGD: every replica walks on its own, and a spring ties it to the parameters on the servers.

A replica x takes K steps of stochastic gradient descent, then meets the centre x~ on the parameter servers: x~ moves towards
x, and x towards x~, by the same share of their distance. This is the asynchronous algorithm of Zhang, Choromanska and LeCun
2015, "Deep learning with Elastic Averaging SGD" (algorithm 1, with tau = K, eta = the learning rate, alpha = 0.9 / replicas).

It moves what Downpour SGD moves (Dean et al. 2012, n_fetch = n_push = K): the parameters once each way in K steps. But no
replica adds up what others did on stale parameters: with 5 replicas and K = 4, Downpour SGD at a learning rate of 0.1 was at
an accuracy of 0.67 after 400 steps, this one at 0.2 at 0.95. Plain descent keeps no state that would have to move too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.model import Model, loss_and_correct
from trainer.runtime import import_tensorflow

tf = import_tensorflow()

_WARMUP_STEPS = 100.0
_ELASTICITY = 0.9


class Round(NamedTuple):
    """What K local steps came to: steps taken, the global step after them, mean loss in nats and mean accuracy."""

    steps: int
    global_step: int
    loss: float
    accuracy: float


class Centre:
    """The flat vector of all parameters, cut into equal shards, one on each parameter server; and the global step.

    Cutting by size and not by variable spreads the load evenly: one matrix is 98% of the convolutional network.
    """

    def __init__(self, devices: Sequence[str], values: npt.NDArray[np.float32], step: int) -> None:
        self._shards = []
        for device, piece in zip(devices, np.array_split(values, len(devices)), strict=True):
            with tf.device(device):
                self._shards.append(tf.Variable(piece))
        with tf.device(devices[0]):
            self._step = tf.Variable(np.int64(step))
        self._pull = tf.function(lambda: (self.read(), self.step()), autograph=False).get_concrete_function()

    def read(self) -> Any:
        """All parameters, float32 [P]."""
        return tf.concat([shard.read_value() for shard in self._shards], 0)

    def step(self) -> Any:
        """The global step, int64."""
        return self._step.read_value()

    def add(self, change: Any, steps: Any) -> Any:
        """Adds to the parameters, float32 [P], and to the global step, int64; returns the latter."""
        for shard, piece in zip(self._shards, tf.split(change, [shard.shape[0] for shard in self._shards]), strict=True):
            shard.assign_add(piece, read_value=False)
        return self._step.assign_add(steps)

    def pull(self) -> tuple[Any, int]:
        """All parameters, float32 [P], on the current device, and the global step."""
        values, step = self._pull()
        return values, int(step)


@dataclass(frozen=True)
class Descent:
    """How a replica learns: warm-up is in global steps, `sync_period` in local ones, `max_steps` in global ones."""

    learning_rate: float
    sync_period: int
    max_steps: int
    replicas: int

    def rate(self, step: Any) -> Any:
        """The learning rate at a global step, int64; it rises linearly over the first of them."""
        return self.learning_rate * tf.minimum(1.0, tf.cast(step, tf.float32) / _WARMUP_STEPS)

    @property
    def spring(self) -> tuple[float, float]:
        """Shares of their distance by which the centre and the replica move. The only replica is the centre itself."""
        return (1.0, 0.0) if self.replicas == 1 else (_ELASTICITY / self.replicas, _ELASTICITY / self.replicas)


def make_round(model: Model, centre: Centre, descent: Descent, iterator: Any) -> Callable[[Any, Any], Any]:
    """One round as a graph: from an iterator like `iterator` and a replica's parameters, float32 [P], to its new ones and to
    steps, global step, loss and accuracy, float64 [4].

    It takes fewer than K steps where the global step would pass the last one, and none at all once it is there. It is traced
    here, once: a tf.function would be traced again for each device that it is called on.
    """
    names = list(model.shapes)
    centre_share, replica_share = descent.spring

    def run(iterator: Any, start: Any) -> Any:
        step = centre.step()
        steps = tf.clip_by_value(descent.max_steps - step, 0, descent.sync_period)

        def body(taken: Any, loss_sum: Any, correct_sum: Any, *values: Any) -> Any:
            images, labels = iterator.get_next()
            with tf.GradientTape() as tape:
                tape.watch(values)
                losses, correct = loss_and_correct(model, dict(zip(names, values, strict=True)), images, labels, True)
                loss = tf.reduce_mean(losses)
                # Descent is linear in the loss: scaling one number here spares a pass over every gradient.
                scaled = descent.rate(step + taken + 1) * loss
            changes = tape.gradient(scaled, values)
            moved = [value - change for value, change in zip(values, changes, strict=True)]
            return (taken + 1, loss_sum + loss, correct_sum + tf.reduce_mean(correct), *moved)

        _, loss_sum, correct_sum, *values = tf.while_loop(
            lambda taken, *_: taken < steps,
            body,
            (tf.constant(0, tf.int64), tf.constant(0.0), tf.constant(0.0), *model.unflatten(start).values()),
            parallel_iterations=1,
        )
        reached = tf.concat([tf.reshape(value, [-1]) for value in values], 0)
        with tf.control_dependencies([reached]):  # the centre as it is now, not as it was K steps ago
            distance = reached - centre.read()
        global_step = centre.add(distance * centre_share, steps)
        taken = tf.maximum(tf.cast(steps, tf.float32), 1.0)
        figures = (steps, global_step, loss_sum / taken, correct_sum / taken)
        return reached - distance * replica_share, tf.stack([tf.cast(figure, tf.float64) for figure in figures])

    # There is no Python control flow for AutoGraph to convert, and converting takes time.
    values = tf.TensorSpec([sum(model.sizes)], tf.float32)
    graph: Callable[[Any, Any], Any] = tf.function(run, autograph=False).get_concrete_function(iterator, values)
    return graph


def take_round(run: Callable[[Any, Any], Any], iterator: Any, values: Any) -> tuple[Any, Round]:
    """One round, here or wherever the current device is: a replica's new parameters, which stay there, and the figures."""
    values, figures = run(iterator, values)
    steps, global_step, loss, accuracy = figures.numpy()  # one tensor, so that they come back in one message
    return values, Round(int(steps), int(global_step), float(loss), float(accuracy))
