"""Classify the topic of a sequence of words by pooling or a GRU: `python -m text.task`.

The embedding is nearly the whole model; each parameter server holds a part of it. The texts are generated, the same each time.
"""

import functools

import scaletier


def texts(args, seed, number):
    """Return batch `number`: words int32 [batch, length], 0 after the end, and topics int32 [batch]."""
    import tensorflow as tf

    seeds = tf.random.split(tf.stack([tf.constant(seed, tf.int64), number]), 4)
    shape = [args.batch_size, args.length]
    topics = tf.random.stateless_uniform(shape[:1], seeds[0], 0, args.topics, tf.int32)
    # Some words are frequent and most are rare. A word's topic is its number modulo `topics`; one word of four has the text's.
    frequency = tf.random.stateless_uniform(shape, seeds[1]) ** 4
    words = 1 + tf.cast(frequency * (args.vocabulary - args.topics - 1), tf.int32)
    topic_words = words - words % args.topics + topics[:, tf.newaxis]
    words = tf.where(tf.random.stateless_uniform(shape, seeds[2]) < 0.25, tf.maximum(topic_words, 1), words)
    ends = tf.random.stateless_uniform([args.batch_size, 1], seeds[3], args.length // 2, args.length + 1, tf.int32)
    return tf.where(tf.range(args.length) < ends, words, 0), topics


def batches(args, seed, count):
    import tensorflow as tf

    return tf.data.Dataset.range(count).map(functools.partial(texts, args, seed), tf.data.AUTOTUNE)


def model(args):
    """Return the compiled model, with its loss, metrics and optimizer."""
    import keras
    from keras import layers

    words = keras.Input([args.length], dtype="int32", name="words")
    features = layers.Embedding(args.vocabulary, args.embedding, mask_zero=True)(words)
    features = layers.GRU(args.units)(features) if args.model == "gru" else layers.GlobalAveragePooling1D()(features)
    network = keras.Model(words, layers.Dense(args.topics, name="topic")(features), name=args.model)
    network.compile(
        optimizer=keras.optimizers.Adam(args.learning_rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return network


def main():
    parser = scaletier.parser(description=__doc__)
    parser.add_argument("--model", choices=["pooling", "gru"], default="pooling")
    parser.add_argument("--vocabulary", type=int, default=50_000)
    parser.add_argument("--embedding", type=int, default=64)
    parser.add_argument("--units", type=int, default=32, help="of the GRU")
    parser.add_argument("--length", type=int, default=40, help="most words of a text")
    parser.add_argument("--topics", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=0.01)
    args = parser.parse_args()
    scaletier.fit(
        functools.partial(model, args),
        functools.partial(batches, args, 1, 2000),
        functools.partial(batches, args, 2, 10),
        steps_per_epoch=200,
        arguments=args,
    )


if __name__ == "__main__":
    main()
