"""A job whose model, data, metric and optimizer are objects, so TensorFlow has computed before the job starts."""

import keras
import tensorflow as tf

import scaletier

pairs = tf.random.stateless_uniform([640, 2], [1, 2], -1.0, 1.0)
data = tf.data.Dataset.from_tensor_slices((pairs, pairs[:, :1] - pairs[:, 1:])).batch(64)
model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
job = scaletier.Job(
    model, data, "mse", [keras.metrics.MeanAbsoluteError(name="mae")], keras.optimizers.SGD(0.1), eval_data=data
)

if __name__ == "__main__":
    scaletier.run(job)
