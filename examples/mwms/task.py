"""Train synchronously as the task that TF_CONFIG names, or in one process: `python -m mwms.task`."""

import argparse
import functools
import json
import math
import os
import time

import fsspec  # the hosts have it; it also writes to gs://
import numpy as np
import tensorflow as tf
import tf_keras as keras

MODELS = {
    "cnn": [
        keras.layers.Conv2D(32, 5, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Conv2D(64, 5, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(1024, activation="relu"),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(10),
    ],
    "mlp": [
        keras.layers.Flatten(),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dense(32, activation="relu"),
        keras.layers.Dense(10),
    ],
}


class WarmupCosineDecay(keras.optimizers.schedules.LearningRateSchedule):
    """The product of a linear warmup, in the first `warmup` updates, and a cosine decay over all updates."""

    def __init__(self, highest, warmup, updates):
        self.highest, self.warmup, self.updates = highest, max(warmup, 1), updates

    def __call__(self, update):
        now = tf.cast(update, tf.float32) + 1.0
        warmup = tf.minimum(1.0, now / self.warmup)
        return self.highest * warmup * (0.5 + 0.5 * tf.cos(math.pi * tf.minimum(1.0, now / self.updates)))


class Report(keras.callbacks.Callback):
    """Print a line after the first batch, then about every second.

    Each replica's batch counts as a step, so that steps/s can be compared with those of other strategies.
    """

    def __init__(self, replica, replicas, batch_size):
        super().__init__()
        self.replica, self.replicas, self.batch_size = replica, replicas, batch_size
        self.began = self.last_time = 0.0
        self.last_batch = 0

    def on_train_batch_end(self, batch, logs=None):
        now = time.monotonic()
        if not self.began:  # the time before is that of building the graph, not of training
            self.began, self.last_time, self.last_batch = now, now, batch
            self.report(batch, logs, now, 0.0)
        elif now - self.last_time >= 1:
            self.report(batch, logs, now, (batch - self.last_batch) / (now - self.last_time))
            self.last_time, self.last_batch = now, batch

    def report(self, batch, logs, now, local):
        print(
            f"Train [{self.replica}], step {(batch + 1) * self.replicas}: loss: {logs['loss']:.3f}, "
            f"accuracy: {logs['accuracy']:.3f} ({now - self.began:.3f} sec) {local * self.replicas:.1f} global steps/s, "
            f"{local:.1f} local steps/s, {local * self.replicas * self.batch_size:.0f} examples/s",
            flush=True,
        )


def save_weights(model, path):
    with fsspec.open(path, "wb") as file:
        np.savez(file, *model.get_weights())


class SaveWeights(keras.callbacks.Callback):
    """Save the weights every N steps. Keras would save metrics, too, which can be read only by all replicas together."""

    def __init__(self, replicas, every, folder):
        super().__init__()
        self.replicas, self.every, self.folder = replicas, every, folder
        self.saved = 0

    def on_train_batch_end(self, batch, logs=None):
        del logs
        step = (batch + 1) * self.replicas
        if step - self.saved >= self.every:
            save_weights(self.model, f"{self.folder}/weights-{step}.npz")
            self.saved = step


def records(folder, split):
    """Return images [28, 28, 1] from 0 to 1, and labels."""

    def parse(record):
        features = tf.io.parse_single_example(
            record,
            {"image_raw": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)},
        )
        image = tf.reshape(tf.io.decode_raw(features["image_raw"], tf.uint8), [28, 28, 1])
        return tf.cast(image, tf.float32) / 255.0, features["label"]

    files = sorted(tf.io.gfile.glob(f"{folder}/{split}*.tfrecord*"))
    if not files:
        raise SystemExit(f"there is no {split}*.tfrecord* in {folder}")
    compression = "GZIP" if files[0].endswith(".gz") else ""
    return tf.data.TFRecordDataset(files, compression).map(parse, num_parallel_calls=tf.data.AUTOTUNE)


def train(args, replica):
    """Run `fit` and `evaluate` on all replicas together; the chief saves the weights."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    replicas = strategy.num_replicas_in_sync
    steps = math.ceil(args.max_steps / replicas)
    rate = args.learning_rate
    if args.warmup_steps:
        rate = WarmupCosineDecay(rate, args.warmup_steps / replicas, steps)
    if args.momentum:
        optimizer = functools.partial(keras.optimizers.SGD, momentum=args.momentum, nesterov=True, global_clipnorm=args.clip)
    else:
        optimizer = keras.optimizers.Adam
    with strategy.scope():
        model = keras.Sequential(MODELS[args.model])
        model.compile(
            optimizer(rate),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=args.steps_per_execution,
        )
        model.distribute_reduction_method = "first"  # metrics are sums over all replicas; "auto" would add them up again
    # The strategy divides the data and each batch among the replicas.
    batch = args.batch_size * replicas
    data = records(args.data, "train").shuffle(10_000).repeat().batch(batch, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
    callbacks = [Report(replica, replicas, args.batch_size)]
    if replica == "chief/0" and args.checkpoint_steps:
        callbacks.append(SaveWeights(replicas, args.checkpoint_steps, args.job_dir))
    model.fit(data, steps_per_epoch=steps, verbose=0, callbacks=callbacks)
    if replica == "chief/0":
        save_weights(model, f"{args.job_dir}/weights.npz")
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA  # by record: it is one file
    test = records(args.data, "test").batch(1000)
    batches = sum(1 for _ in test)  # with several steps per execution Keras cannot count the batches
    loss, accuracy = model.evaluate(test.with_options(options), steps=batches, verbose=0)
    if replica == "chief/0":
        print(f"Final metrics after {steps * replicas} steps, loss: {loss:.3f}, accuracy: {accuracy:.3f}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=sorted(MODELS), default="cnn")
    parser.add_argument("--batch-size", type=int, default=100, help="examples per replica")
    parser.add_argument("--max-steps", type=int, default=2000, help="batches, of all replicas together")
    parser.add_argument("--learning-rate", type=float, default=0.001)
    parser.add_argument("--momentum", type=float, help="Nesterov momentum of SGD; without this flag the optimizer is Adam")
    parser.add_argument("--clip", type=float, help="with --momentum: the maximum gradient norm")
    parser.add_argument(
        "--warmup-steps", type=int, help="batches in which the learning rate rises; then it falls; by default it is constant"
    )
    parser.add_argument("--steps-per-execution", type=int, default=1, help="of Keras's compile")
    parser.add_argument(
        "--checkpoint-steps", type=int, help="batches, of all replicas together, between two saves of the weights"
    )
    parser.add_argument("--data", default=os.environ.get("SCALETIER_DATA", ".cache/mnist"), help="folder of TFRecords")
    parser.add_argument("--job-dir", default=os.environ.get("JOB_DIR", "output"), help="for the trained model")
    args = parser.parse_args()
    if args.max_steps < 1:
        parser.error("--max-steps must be at least 1")

    config = json.loads(os.environ.get("TF_CONFIG", "{}"))
    task = config.get("task", {"type": "chief", "index": 0})
    replica = f"{task['type']}/{task['index']}"
    if task["type"] in ("ps", "evaluator"):
        print(f"{replica} has nothing to do: chief and workers hold all variables, and evaluate", flush=True)
        return
    if "cluster" in config:
        config["cluster"].pop("ps", None)  # they take no part, and TensorFlow would wait for them
        os.environ["TF_CONFIG"] = json.dumps(config)
    train(args, replica)


if __name__ == "__main__":
    main()
