"""How every strategy learns: stochastic gradient descent with Nesterov's momentum and a rate that rises, then falls.

Sources: Sutskever et al. 2013, "On the importance of initialization and momentum in deep learning"; the rise of the rate and
its growth with the replicas: Goyal et al. 2017, "Accurate, large minibatch SGD"; its fall: Loshchilov and Hutter 2017, "SGDR".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainer.model import Model, losses_and_correct
from trainer.runtime import import_tensorflow

tf = import_tensorflow()

_WARMUP_STEPS = 50.0
_WARMUP_UPDATES = 10.0
# The growth of the rate takes this many times as long as its rise, and ends here: beyond, nothing would be left of stability.
_GROWTH_TIME = 2.0
_MOST_GROWTH = 3.0


@dataclass(frozen=True)
class Descent:
    """`max_steps` are global ones. `averaged` are the batches whose gradients, or steps, are averaged: their mean has less
    noise than each, so that the rate may be higher, by the root of their number. `update` are the global steps of one update.
    """

    learning_rate: float
    momentum: float
    max_steps: int
    averaged: int = 1
    update: int = 1

    def rate(self, step: Any) -> Any:
        """The learning rate of the global step, int64, which is about to be taken."""
        warmup = max(_WARMUP_STEPS, _WARMUP_UPDATES * self.update)
        now = tf.cast(step + self.update, tf.float32)
        rise = tf.minimum(1.0, now / warmup)
        grown = tf.clip_by_value((now - warmup) / (_GROWTH_TIME * warmup), 0.0, 1.0)
        growth = 1.0 + (min(math.sqrt(self.averaged), _MOST_GROWTH) - 1.0) * grown
        fall = 0.5 + 0.5 * tf.cos(math.pi * tf.minimum(1.0, now / self.max_steps))
        return self.learning_rate * rise * growth * fall

    def move(self, values: Sequence[Any], velocities: Sequence[Any], gradients: Sequence[Any], rate: Any) -> Any:
        """Values and velocities after a step along these gradients, all of them lists of tensors of the same shapes."""
        velocities = [self.momentum * velocity + gradient for velocity, gradient in zip(velocities, gradients, strict=True)]
        moved = [
            value - rate * (self.momentum * velocity + gradient)
            for value, velocity, gradient in zip(values, velocities, gradients, strict=True)
        ]
        return moved, velocities


def gradients(model: Model, values: Sequence[Any], images: Any, labels: Any) -> tuple[list[Any], Any, Any]:
    """Gradients of the mean loss of a batch by the values, in the model's order; the mean loss in nats and the accuracy."""
    with tf.GradientTape() as tape:
        tape.watch(values)
        logits = model.logits(dict(zip(model.shapes, values, strict=True)), images, True)
        losses, correct = losses_and_correct(logits, labels)
        loss = tf.reduce_mean(losses)
    return tape.gradient(loss, values), loss, tf.reduce_mean(correct)
