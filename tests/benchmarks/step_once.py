"""`python -m benchmarks.step_once job|fit [FLAG …]`: train the cnn here and print its Train lines.

It uses a scaletier.Job, or Keras's own `fit`: the same compiled model, batches and optimizer. Flags are the trainer's.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import scaletier
from scaletier.data import replica_seed
from scaletier.tensorflow_setup import import_tensorflow
from trainer import flags
from trainer.data import find_record_ranges, train_pipeline
from trainer.model import make_model

import_tensorflow()
import keras  # noqa: E402 - it comes with TensorFlow, whose import is the quiet one

# A learning rate without warm-up must be low.
_RATE, _MOMENTUM = 0.01, 0.9


class Report(keras.callbacks.Callback):  # type: ignore[misc]
    """Prints a Train line as often as the library does."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds, self._last = seconds, time.monotonic()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Print a line; `batch` counts from 0, `logs` has the loss and the metrics."""
        now = time.monotonic()
        if now - self._last >= self._seconds:
            print(f"Train [fit/0], step {batch + 1}: loss: {logs['loss']:.3f}, accuracy: {logs['accuracy']:.3f}", flush=True)
            self._last = now


def compiled(parsed: argparse.Namespace) -> Any:
    """Return the model with its loss, metrics and optimizer."""
    model = make_model("cnn", parsed.hidden_units, "float32", parsed.batch_norm)
    optimizer = keras.optimizers.SGD(_RATE, momentum=_MOMENTUM, nesterov=True)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
    return model


def batches(parsed: argparse.Namespace) -> Any:
    """Return the batches of the shipped trainer for the only replica."""
    files = find_record_ranges(parsed.train_data, "train", parsed.batch_size, False)
    return train_pipeline(files, parsed.batch_size, replica_seed(parsed.seed, 0))


def main() -> int:
    """Run the command and return its exit code."""
    way, *arguments = sys.argv[1:]
    parsed = flags.parse(arguments)
    if way == "job":
        return scaletier.main(scaletier.Job(model=lambda: compiled(parsed), data=lambda _: batches(parsed)), parsed)
    report = Report(parsed.log_interval)
    compiled(parsed).fit(batches(parsed), steps_per_epoch=parsed.max_steps, verbose=0, callbacks=[report])
    return 0


if __name__ == "__main__":
    sys.exit(main())
