"""Downpour SGD: local steps on a copy of the parameters, whose sum is then added to the parameter servers' own.

A replica pulls the parameters, takes K steps of stochastic gradient descent on its copy, and pushes what those steps
changed: n_fetch = n_push = K of Dean et al. 2012, "Large Scale Distributed Deep Networks", section 4.1, with the learning
rate already in the push. Plain descent keeps no state beside the parameters, so nothing else moves over the wire and a
replica may come and go; a linear warm-up keeps the many stale first steps of a large cluster from diverging.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.model import Model, loss_and_correct
from trainer.runtime import import_tensorflow

tf = import_tensorflow()

_WARMUP_STEPS = 100.0


class Round(NamedTuple):
    """What K local steps came to: steps taken, the global step after them, mean loss in nats and mean accuracy."""

    steps: int
    global_step: int
    loss: float
    accuracy: float


class Parameters:
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

    def pull(self) -> tuple[Any, Any]:
        """All parameters, float32 [P], and the global step, int64."""
        return tf.concat([shard.read_value() for shard in self._shards], 0), self._step.read_value()

    def push(self, delta: Any, steps: Any) -> Any:
        """Adds to the parameters and to the global step; returns the latter, int64."""
        for shard, piece in zip(self._shards, tf.split(delta, [shard.shape[0] for shard in self._shards]), strict=True):
            shard.assign_add(piece, read_value=False)
        return self._step.assign_add(steps)


def make_round(
    model: Model, parameters: Parameters, learning_rate: float, sync_period: int, max_steps: int
) -> Callable[[Any], Any]:
    """The tf.function of one round, from an iterator over a train pipeline to steps, global step, loss and accuracy.

    It takes fewer than K steps where the global step would pass `max_steps`, and none at all once it is there.
    """

    @tf.function
    def run(iterator: Any) -> Any:
        pulled, step = parameters.pull()
        steps = tf.cast(tf.clip_by_value(max_steps - step, 0, sync_period), tf.int32)
        names = list(model.shapes)

        def body(taken: Any, loss_sum: Any, correct_sum: Any, *values: Any) -> Any:
            images, labels = next(iterator)
            done = tf.cast(step + 1 + tf.cast(taken, tf.int64), tf.float32)
            rate = learning_rate * tf.minimum(1.0, done / _WARMUP_STEPS)
            with tf.GradientTape() as tape:
                tape.watch(values)
                losses, correct = loss_and_correct(model, dict(zip(names, values, strict=True)), images, labels, True)
                loss = tf.reduce_mean(losses)
                # Descent is linear in the loss: scaling one number here spares a pass over every gradient.
                scaled = rate * loss
            changes = tape.gradient(scaled, values)
            moved = [value - change for value, change in zip(values, changes, strict=True)]
            return (taken + 1, loss_sum + loss, correct_sum + tf.reduce_mean(correct), *moved)

        taken, loss_sum, correct_sum, *values = tf.while_loop(
            lambda taken, *_: taken < steps,
            body,
            (tf.constant(0), tf.constant(0.0), tf.constant(0.0), *model.unflatten(pulled).values()),
            parallel_iterations=1,
        )
        delta = tf.concat([tf.reshape(value, [-1]) for value in values], 0) - pulled
        reached = parameters.push(delta, tf.cast(steps, tf.int64))
        share = 1.0 / tf.cast(tf.maximum(steps, 1), tf.float32)
        return tf.stack([tf.cast(steps, tf.float64), tf.cast(reached, tf.float64),
                         tf.cast(loss_sum * share, tf.float64), tf.cast(correct_sum * share, tf.float64)])

    return run


def take_round(run: Callable[[Any], Any], iterator: Any) -> Round:
    """One round, here or wherever the current device is; its results come back as one tensor, in one message."""
    steps, global_step, loss, accuracy = run(iterator).numpy()
    return Round(int(steps), int(global_step), float(loss), float(accuracy))
