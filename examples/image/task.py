"""`python -m image.task`: classifies the direction of stripes in grey pictures, by convolutions.

Each replica makes pictures of its own, as one that reads files would read its own.
"""

import functools

import scaletier

SIDE, DIRECTIONS = 20, 4


def pictures(size, seed, number):
    """Return batch `number`: pictures uint8 [size, SIDE, SIDE, 1], directions int32 [size], in 1/8 turns."""
    import tensorflow as tf

    seeds = tf.random.split(tf.stack([tf.constant(seed, tf.int64), number]), 4)
    directions = tf.random.stateless_uniform([size], seeds[0], 0, DIRECTIONS, tf.int32)
    angle = tf.reshape(tf.cast(directions, tf.float32), [-1, 1, 1]) * (3.14159265 / DIRECTIONS)
    start = tf.random.stateless_uniform([size, 1, 1], seeds[1], 0.0, 6.3)
    wide = tf.random.stateless_uniform([size, 1, 1], seeds[2], 0.8, 1.6)
    across = tf.range(float(SIDE))
    stripes = tf.sin(wide * (tf.cos(angle) * across + tf.sin(angle) * across[:, tf.newaxis]) + start)
    noise = tf.random.stateless_normal([size, SIDE, SIDE], seeds[3])
    grey = tf.clip_by_value(128.0 + 60.0 * (stripes + noise), 0.0, 255.0)
    return tf.cast(grey, tf.uint8)[..., tf.newaxis], directions


def training(args, context):
    """Yield batches without end; `context` has the replica's number, and how many there are."""
    import tensorflow as tf

    own = functools.partial(pictures, args.batch_size, 1 + args.seed * context.num_input_pipelines + context.input_pipeline_id)
    return tf.data.Dataset.counter().map(own, tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


def evaluated(args):
    import tensorflow as tf

    return tf.data.Dataset.range(10).map(functools.partial(pictures, args.batch_size, 0))


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
    """Return an optimizer with longer steps for several replicas, whose deltas are averaged."""
    import keras

    return keras.optimizers.SGD(args.learning_rate * min(replicas, 4) ** 0.5, momentum=0.9, nesterov=True)


def serving(predict):
    """Return a function from pictures to each direction's probability, and the likeliest."""
    import tensorflow as tf

    def serve(picture):
        probabilities = predict(picture)
        return {"probabilities": probabilities, "classes": tf.argmax(probabilities, 1)}

    return tf.function(serve, input_signature=[tf.TensorSpec([None, SIDE, SIDE, 1], tf.uint8, "picture")])


def main():
    parser = scaletier.parser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--filters", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=2, help="of convolutions with a way past them")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--learning-rate", type=float, default=0.05)
    args = parser.parse_args()
    scaletier.fit(
        functools.partial(model, args),
        functools.partial(training, args),
        functools.partial(evaluated, args),
        steps_per_epoch=200,
        arguments=args,
        optimizer=functools.partial(optimizer, args),
        serving=serving,
    )


if __name__ == "__main__":
    main()
