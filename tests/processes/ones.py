"""A trainer whose gradient is one, so that its only weight counts steps; each step prints its optimizer and a random number.

The rate is a thousandth per replica that trains: each step moves the weight by a thousandth, whatever number of replicas
trains. A replica whose working directory has a file `die` ends between the count of a round's steps and its push.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import scaletier

RATE = 0.001


def data() -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensors((tf.ones([2, 1]), tf.ones([2, 1]))).repeat()


def model() -> Any:
    import keras
    import tensorflow as tf

    class Draws(keras.layers.Layer):  # type: ignore[misc]
        """Print a random number."""

        def __init__(self) -> None:
            super().__init__()
            self.generator = keras.random.SeedGenerator(7)

        def call(self, inputs: Any, training: bool = False) -> Any:
            if training:
                first, second = tf.unstack(tf.cast(keras.random.randint([2], 0, 2**31 - 1, seed=self.generator), tf.int64))
                tf.print("Drew", first * 2**20 + second // 2**11)
            return inputs

    return keras.Sequential([keras.Input([1]), Draws(), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])


def optimizer(replicas: int) -> Any:
    import keras
    import tensorflow as tf

    class Prints(keras.optimizers.SGD):  # type: ignore[misc]
        """Print the rate, and the velocity before the step."""

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            velocity = self.momentums[0][0, 0] if self.momentum else tf.constant(0.0)
            tf.print("Rate", learning_rate, "velocity", velocity)
            super().update_step(gradient, variable, learning_rate)

    return Prints(RATE * replicas, float(os.environ.get("MOMENTUM", "0")))


class Dies:
    """The variable of the global step: after it has counted a round, a replica with a file `die` ends."""

    def __init__(self, variable: Any) -> None:
        self.variable, self.device, self.read_value = variable, variable.device, variable.read_value

    def assign_add(self, steps: Any) -> Any:
        import tensorflow as tf

        def abort() -> Any:
            with tf.control_dependencies([tf.raw_ops.Abort(error_msg="a file `die` is there")]):
                return tf.identity(step)

        step = self.variable.assign_add(steps)
        with tf.device(None):  # on the replica, each time: TensorFlow would search for a constant name only once
            name = tf.strings.join(["die", tf.strings.substr(tf.strings.as_string(step), 0, 0)])
            return tf.cond(tf.size(tf.io.matching_files(name)) > 0, abort, lambda: step)


if __name__ == "__main__":
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    folder = Path(os.environ["JOB_DIR"]).parent / f"{task['type']}-{task['index']}"
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    if task["type"] == "chief":
        from scaletier.shared_parameters import SharedParameters

        create = SharedParameters.__init__

        def create_with_death(self: Any, *arguments: Any) -> None:
            create(self, *arguments)
            self._step = Dies(self._step)

        SharedParameters.__init__ = create_with_death  # type: ignore[method-assign]
    scaletier.run(scaletier.Job(model, data, lambda targets, outputs: targets * outputs, optimizer=optimizer))
