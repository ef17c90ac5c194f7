"""Export the latest checkpoint of a job that ended early: `python -m trainer.export --job-dir DIR --model NAME`.

The command accepts all flags of trainer.task, but uses only --job-dir and the flags of the model.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import Any

import scaletier
from trainer import flags, task
from trainer.mnist import PIXELS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command: return 0 and print the path, or return 2 if no readable checkpoint fits the model."""
    parser = flags.parser(os.environ)
    parser.prog, parser.description = "python -m trainer.export", "Exports the latest checkpoint of a job."
    parsed = parser.parse_args(arguments)
    return scaletier.export(dataclasses.replace(task.job(parsed), data=_placeholder_data), parsed)


def _placeholder_data() -> Any:
    """Return a dataset of one empty image: an export needs only the shape of the data."""
    import tensorflow as tf

    return tf.data.Dataset.from_tensors((tf.zeros([1, PIXELS]), tf.zeros([1], tf.int64)))


if __name__ == "__main__":
    sys.exit(main())
