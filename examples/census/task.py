"""Train a Keras model that predicts incomes over 50K, with the flags of Cloud ML's sample: `python -m census.task`."""

import argparse
import csv
import os

import keras
import numpy as np
import tensorflow as tf


def load(paths):
    """Return features [n, 4] and labels [n], float32, of CSV files with a header."""
    rows = []
    for pattern in paths:
        for path in tf.io.gfile.glob(pattern):
            with tf.io.gfile.GFile(path) as file:
                rows += list(csv.DictReader(file))
    features = [[float(row[name]) for name in ("age", "education_years", "hours_per_week")] for row in rows]
    married = [[row["married"] == "yes"] for row in rows]
    labels = [row["income_bracket"] == ">50K" for row in rows]
    return np.hstack([np.array(features, np.float32), np.array(married, np.float32)]), np.array(labels, np.float32)


def build(features, units, learning_rate):
    normalize = keras.layers.Normalization()
    normalize.adapt(features)
    model = keras.Sequential([normalize, *(keras.layers.Dense(n, "relu") for n in units), keras.layers.Dense(1, "sigmoid")])
    model.compile(keras.optimizers.Adam(learning_rate), "binary_crossentropy", metrics=["accuracy"])
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--train-files", nargs="+", required=True)
    parser.add_argument("--eval-files", nargs="+", required=True)
    parser.add_argument("--num-epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=0.01)
    parser.add_argument("--first-layer-size", type=int, default=32)
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--job-dir", required=True)
    args = parser.parse_args()

    features, labels = load(args.train_files)
    keras.utils.set_random_seed(0)
    model = build(features, [args.first_layer_size // 2**n for n in range(args.num_layers)], args.learning_rate)
    tensorboard = keras.callbacks.TensorBoard(os.path.join(args.job_dir, "logs"))
    model.fit(features, labels, batch_size=args.batch_size, epochs=args.num_epochs, verbose=2, callbacks=[tensorboard])
    loss, accuracy = model.evaluate(*load(args.eval_files), verbose=0)
    model.export(os.path.join(args.job_dir, "export", "1"))
    steps = args.num_epochs * -(-len(labels) // args.batch_size)
    print(f"Final metrics after {steps} steps, loss: {loss:.3f}, accuracy: {accuracy:.3f}")


if __name__ == "__main__":
    main()
