"""Checkpoints of a job: the variables by name and the global step, whatever cluster they were trained on."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.model import Model
from trainer.runtime import import_tensorflow, one_line

tf = import_tensorflow()

_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
_STEP = "global_step"


class CheckpointError(RuntimeError):
    """A checkpoint that this model cannot go on from: the message is one line."""


def directory(job_dir: str) -> str:
    """Where a job keeps its checkpoints."""
    return f"{job_dir}/checkpoints"


def latest(job_dir: str) -> str | None:
    """The newest checkpoint of the job, or None."""
    found: str | None = tf.train.latest_checkpoint(directory(job_dir))
    return found


def read(path: str, model: Model) -> tuple[npt.NDArray[np.float32], int]:
    """All parameters, flat, and the global step of a checkpoint.

    Raises CheckpointError that names the first variable that `model` and the checkpoint do not share, or where the
    checkpoint is damaged or gone.
    """
    try:
        reader = tf.train.load_checkpoint(path)
        shapes = {
            key.removesuffix(_SUFFIX): tuple(shape)
            for key, shape in reader.get_variable_to_shape_map().items()
            if key.endswith(_SUFFIX)
        }
        for name, shape in model.shapes.items():
            if shapes.get(name) != shape:
                held = f"holds it as {shapes[name]}" if name in shapes else "has none"
                raise CheckpointError(
                    f"checkpoint {path} is of another model: {model.name} has variable {name} {shape}, it {held}; "
                    "pass another --job-dir or --model"
                )
        values = [reader.get_tensor(name + _SUFFIX).reshape(-1) for name in model.shapes]
        return np.concatenate(values), int(reader.get_tensor(_STEP + _SUFFIX))
    except (tf.errors.OpError, RuntimeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"checkpoint {path} cannot be read: {one_line(error)}") from None


class LocalCopy:
    """The chief's own copy of the variables, by name: what is evaluated, saved and exported."""

    def __init__(self, model: Model, job_dir: str, keep: int) -> None:
        self.model = model
        self.variables = {name: tf.Variable(tf.zeros(shape), name=name) for name, shape in model.shapes.items()}
        self.step = tf.Variable(np.int64(0), name=_STEP)
        checkpoint = tf.train.Checkpoint(**self.variables, global_step=self.step)
        self._manager = tf.train.CheckpointManager(checkpoint, directory(job_dir), max_to_keep=keep, checkpoint_name="model")

    def assign(self, flat: Any, step: int) -> None:
        """Takes over parameters, float32 [P], and the global step."""
        for name, value in self.model.unflatten(flat).items():
            self.variables[name].assign(value)
        self.step.assign(step)

    def save(self) -> None:
        """Writes a checkpoint; older ones beyond the number to keep go. Half a checkpoint is never the latest."""
        self._manager.save(checkpoint_number=int(self.step))
