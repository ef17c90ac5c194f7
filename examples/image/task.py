"""Classify the direction of stripes in gray pictures by convolutions: `python -m image.task`.

Each replica generates its own pictures, as a trainer with files would read its own part of them.
"""

import functools

import scaletier

SIDE, DIRECTIONS = 20, 4


def generate(size, seed, number):
    """Return batch `number`: pictures uint8 [size, SIDE, SIDE, 1], directions int32 [size], in 1/8 turns."""
    import tensorflow as tf

    seeds = tf.random.split(tf.stack([tf.constant(seed, tf.int64), number]), 4)
    directions = tf.random.stateless_uniform([size], seeds[0], 0, DIRECTIONS, tf.int32)
    angle = tf.reshape(tf.cast(directions, tf.float32), [-1, 1, 1]) * (3.14159265 / DIRECTIONS)
    phase = tf.random.stateless_uniform([size, 1, 1], seeds[1], 0.0, 6.3)
    frequency = tf.random.stateless_uniform([size, 1, 1], seeds[2], 0.8, 1.6)
    position = tf.range(float(SIDE))
    stripes = tf.sin(frequency * (tf.cos(angle) * position + tf.sin(angle) * position[:, tf.newaxis]) + phase)
    noise = tf.random.stateless_normal([size, SIDE, SIDE], seeds[3])
    grey = tf.clip_by_value(128.0 + 60.0 * (stripes + noise), 0.0, 255.0)
    return tf.cast(grey, tf.uint8)[..., tf.newaxis], directions


def training_data(args, context):
    """Return an endless dataset of batches; `context` has the replica's number and the number of replicas."""
    import tensorflow as tf

    own = functools.partial(generate, args.batch_size, 1 + args.seed * context.num_input_pipelines + context.input_pipeline_id)
    return tf.data.Dataset.counter().map(own, tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


def eval_data(args):
    import tensorflow as tf

    return tf.data.Dataset.range(10).map(functools.partial(generate, args.batch_size, 0))


def model(args):
    import keras
    from keras import layers

    picture = keras.Input([SIDE, SIDE, 1], dtype="uint8", name="picture")
    features = layers.Rescaling(1 / 127.5, -1.0)(picture)
    features = layers.Conv2D(args.filters, 3, padding="same", use_bias=False)(features)
    features = layers.Activation("relu")(layers.BatchNormalization()(features))
    for _ in range(args.blocks):
        inner = layers.Conv2D(args.filters, 3, padding="same", use_bias=False)(features)
        features = layers.Activation("relu")(layers.Add()([features, layers.BatchNormalization()(inner)]))
    features = layers.Dropout(args.dropout)(layers.GlobalMaxPooling2D()(features))
    network = keras.Model(picture, layers.Dense(DIRECTIONS, "softmax")(features), name="image")
    network.compile(loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return network


def optimizer(args, replicas):
    """Return an optimizer with a higher learning rate for several replicas, whose parameter deltas are averaged."""
    import keras

    return keras.optimizers.SGD(args.learning_rate * min(replicas, 4) ** 0.5, momentum=0.9, nesterov=True)


def serving(predict):
    """Return a function from pictures to the probability of each direction and the most likely direction."""
    import tensorflow as tf

    def serve(picture):
        probabilities = predict(picture)
        return {"probabilities": probabilities, "classes": tf.argmax(probabilities, 1)}

    return tf.function(serve, input_signature=[tf.TensorSpec([None, SIDE, SIDE, 1], tf.uint8, "picture")])


def main():
    parser = scaletier.parser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--filters", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=2, help="number of residual blocks")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--learning-rate", type=float, default=0.05)
    args = parser.parse_args()
    scaletier.fit(
        functools.partial(model, args),
        functools.partial(training_data, args),
        functools.partial(eval_data, args),
        steps_per_epoch=200,
        arguments=args,
        optimizer=functools.partial(optimizer, args),
        serving=serving,
    )


if __name__ == "__main__":
    main()
