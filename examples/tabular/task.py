"""Predict returning customers from numbers and categories, with sample weights: `python -m tabular.task`.

The customers are generated, the same ones each time, so that hosts need no file.
"""

import functools

import scaletier

CITIES, DEVICES = 300, 3


def customers(seed, size, number):
    """Return batch `number`: inputs by name, 1 for customers who returned, int32 [size], weights float32 [size]."""
    import tensorflow as tf

    seeds = tf.random.split(tf.stack([tf.constant(seed, tf.int64), number]), 5)
    age = tf.random.stateless_uniform([size], seeds[0], 18, 90, tf.int32)
    spent = tf.exp(tf.random.stateless_normal([size, 2], seeds[1]))  # this month, and the previous one
    city = tf.random.stateless_uniform([size], seeds[2], 0, CITIES, tf.int32)
    device = tf.random.stateless_uniform([size], seeds[3], 0, DEVICES, tf.int32)
    preference = tf.sin(7.0 * tf.cast(city, tf.float32)) + tf.gather([-1.0, 0.0, 1.0], device)
    score = preference + tf.math.log(spent[:, 0] / spent[:, 1]) + (tf.cast(age, tf.float32) - 50.0) / 20.0
    returned = tf.random.stateless_uniform([size], seeds[4]) < tf.sigmoid(3.0 * score)
    inputs = {"age": tf.cast(age, tf.float32), "spent": spent, "city": city, "device": device}
    return inputs, tf.cast(returned, tf.int32), tf.clip_by_value(spent[:, 0], 0.2, 5.0)


def batches(seed, count, size):
    """Return `count` batches; the library divides them among the replicas."""
    import tensorflow as tf

    return tf.data.Dataset.range(count).map(functools.partial(customers, seed, size), tf.data.AUTOTUNE)


def model(args):
    import keras
    from keras import layers

    age, spent = keras.Input([], name="age"), keras.Input([2], name="spent")
    city, device = keras.Input([], dtype="int32", name="city"), keras.Input([], dtype="int32", name="device")
    scaled_age = layers.Rescaling(1 / 20, -2.5)(layers.Reshape([1])(age))
    city_features = layers.Embedding(CITIES, args.embedding)(city)
    device_features = layers.Embedding(DEVICES, args.embedding)(device)
    features = layers.Concatenate()([scaled_age, layers.Lambda(keras.ops.log)(spent), city_features, device_features])
    for units in args.hidden_units:
        features = layers.Dense(units, "relu")(features)
    inputs = {"age": age, "spent": spent, "city": city, "device": device}
    network = keras.Model(inputs, layers.Dense(1, "sigmoid", name="back")(features), name="tabular")
    rate = keras.optimizers.schedules.CosineDecay(args.learning_rate, args.max_steps)
    network.compile(keras.optimizers.Adam(rate), "binary_crossentropy", metrics=["accuracy", "auc"])
    return network


def main():
    parser = scaletier.parser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--batches", type=int, default=1000, help="number of batches before the data repeats")
    parser.add_argument("--embedding", type=int, default=8)
    parser.add_argument("--hidden-units", type=int, nargs="*", default=[64, 32])
    parser.add_argument("--learning-rate", type=float, default=0.01)
    args = parser.parse_args()
    scaletier.fit(
        functools.partial(model, args),
        functools.partial(batches, 1, args.batches, args.batch_size),
        functools.partial(batches, 2, 10, args.batch_size),
        steps_per_epoch=200,
        arguments=args,
    )


if __name__ == "__main__":
    main()
