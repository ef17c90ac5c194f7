"""A trainer so small that NumPy computes its result; a replica's points are deterministic."""

from __future__ import annotations

from typing import Any

import numpy as np

import scaletier

WIDTH, BATCH, BATCHES = 3, 4, 40
RATE, MOMENTUM, DECAY = 0.05, 0.9, 0.01


def points(replica: int) -> tuple[Any, Any]:
    """Return a replica's batches: float32 [BATCHES, BATCH, WIDTH] and [BATCHES, BATCH, 1]."""
    generator = np.random.default_rng(replica)
    inputs, targets = (generator.normal(size=(BATCHES, BATCH, width)) for width in (WIDTH, 1))
    return inputs.astype(np.float32), targets.astype(np.float32)


def data(context: Any) -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(points(context.input_pipeline_id))


def model() -> Any:
    import keras

    layers = [keras.layers.Dense(2, name="first"), keras.layers.Dense(1, name="second")]
    for layer in layers:
        layer.kernel_initializer = keras.initializers.Ones()
        layer.kernel_regularizer = keras.regularizers.L2(DECAY)
    return keras.Sequential([keras.Input([WIDTH]), *layers], name="linear")


def optimizer() -> Any:
    import keras

    return keras.optimizers.SGD(RATE, MOMENTUM, nesterov=True)


job = scaletier.Job(model=model, data=data, loss="mse", optimizer=optimizer)

if __name__ == "__main__":
    scaletier.run(job)
