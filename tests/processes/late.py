"""A job whose data has invalid labels from the 400th batch on."""

import scaletier

CLASSES, VALID = 2, 400


def batches():
    import tensorflow as tf

    def batch(number):
        inputs = tf.random.stateless_uniform([16, 3], [1, number], -1.0, 1.0)
        return inputs, tf.where(number < VALID, tf.zeros([16], tf.int64), tf.fill([16], tf.cast(CLASSES, tf.int64)))

    return tf.data.Dataset.range(10**6).map(batch)


def model():
    import keras

    return keras.Sequential([keras.Input([3]), keras.layers.Dense(8, "relu"), keras.layers.Dense(CLASSES, "softmax")])


if __name__ == "__main__":
    scaletier.run(scaletier.Job(model, batches, "sparse_categorical_crossentropy", optimizer="sgd"))
