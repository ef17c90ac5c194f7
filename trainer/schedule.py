"""The learning rate: it rises, and falls to the job's last step.

Sources: the rise, and its growth with the replicas, whose mean has less noise than each: Goyal et al. 2017, "Accurate, large
minibatch SGD"; the fall: Loshchilov and Hutter 2017, "SGDR".
"""

from __future__ import annotations

import math
from typing import Any

from scaletier.runtime import import_tensorflow

tf = import_tensorflow()
import keras  # noqa: E402 - it comes with TensorFlow, whose import is the quiet one

_WARMUP_STEPS = 80
# What several replicas learn together is less noisy: they may go this much faster, and need so much longer to come to that.
_MOST_GROWTH = 8.0


class WarmupCosineDecay(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """The rate of a global step of `max_steps`, for so many replicas."""

    def __init__(self, learning_rate: float, max_steps: int, replicas: int) -> None:
        growth = min(float(replicas), _MOST_GROWTH)
        self._highest, self._max_steps = learning_rate * growth, max_steps
        self._warmup = min(_WARMUP_STEPS * growth, max_steps / 2)

    def __call__(self, step: Any) -> Any:
        """Return the learning rate, float32 [], at a step, int64 []."""
        now = tf.cast(step, tf.float32) + 1.0
        rise = tf.minimum(1.0, now / self._warmup)
        fall = 0.5 + 0.5 * tf.cos(math.pi * tf.minimum(1.0, now / self._max_steps))
        return self._highest * rise * fall
