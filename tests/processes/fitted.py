"""A program that calls `scaletier.fit` with callbacks, one of which ends the job, and continues with the trained model."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import scaletier

EPOCH, STOP, BATCH = 40, 3, 16


def model() -> Any:
    import keras

    class OwnStep(keras.Sequential):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            return super().train_step(data)

    kind = OwnStep if "OWN_STEP" in os.environ else keras.Sequential
    compiled = kind([keras.Input([3]), keras.layers.Dense(2, name="in"), keras.layers.Dense(1, name="out")])
    compiled.compile(loss="mse")
    return compiled


def optimizer(replicas: int) -> Any:
    import keras

    return keras.optimizers.SGD(0.05 * replicas)


def batches() -> Any:
    import tensorflow as tf

    def batch(number: Any) -> Any:
        inputs = tf.random.stateless_normal([BATCH, 3], [1, number])
        return inputs, tf.reduce_sum(inputs, 1, keepdims=True)

    return tf.data.Dataset.range(400).map(batch)


def callbacks() -> Any:
    import keras

    class EndsJob(keras.callbacks.Callback):  # type: ignore[misc]
        """Set the learning rate to zero after an epoch, and end the job after the last one."""

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_test_begin(self, logs: Any = None) -> None:
            if (file := os.environ.get("TERMINATE_ONCE")) and self.epoch == STOP - 1 and not Path(file).exists():
                Path(file).touch()
                signal.raise_signal(signal.SIGTERM)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            print(f"Epoch {epoch} has {', '.join(sorted(logs))}: {self.model.layers[-1].get_weights()[0].ravel()}", flush=True)
            if epoch == 0:
                self.model.optimizer.learning_rate = 0.0
            if "SETS_WEIGHTS" in os.environ:
                self.model.set_weights([weight + 1 for weight in self.model.get_weights()])
            self.model.stop_training = epoch + 1 == STOP and "EPOCHS" not in os.environ

    best = keras.callbacks.ModelCheckpoint(f"{os.environ['JOB_DIR']}/best.keras", "val_loss", save_best_only=True)
    return [EndsJob(), best, keras.callbacks.EarlyStopping("val_loss", patience=9)]


if __name__ == "__main__":
    epochs = int(os.environ.get("EPOCHS", 0))
    steps, tested = EPOCH * (epochs or 2500), 400 if epochs else 5  # others train through an epoch during a long evaluation
    data = (model, batches, lambda: batches().take(tested))
    history = scaletier.fit(*data, steps=steps, steps_per_epoch=EPOCH, callbacks=callbacks, optimizer=optimizer)
    trained = history.model
    print(f"The chief continues: {history.epoch} {trained.evaluate(batches().take(5), verbose=0):.6f}", flush=True)
