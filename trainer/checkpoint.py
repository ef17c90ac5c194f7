"""Checkpoints of a job: the variables by name and the global step, whatever strategy and cluster they were trained by."""

from __future__ import annotations

from collections.abc import Mapping
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


class Reader:
    """A checkpoint of `model`, read one variable at a time, as the whole may be larger than this host's memory.

    The constructor raises CheckpointError that names the first variable that `model` and the checkpoint do not share, or where
    the checkpoint is damaged or gone; `value` where it goes while it is read.
    """

    def __init__(self, path: str, model: Model) -> None:
        self.path = path
        try:
            self._reader = tf.train.load_checkpoint(path)
            self.step = int(self._tensor(_STEP))
        except (tf.errors.OpError, RuntimeError, ValueError) as error:
            raise _unreadable(path, error) from None
        found = self._reader.get_variable_to_shape_map().items()
        shapes = {key.removesuffix(_SUFFIX): tuple(shape) for key, shape in found if key.endswith(_SUFFIX)}
        for name, shape in model.shapes.items():
            if shapes.get(name) != shape:
                held = f"holds it as {shapes[name]}" if name in shapes else "has none"
                raise CheckpointError(
                    f"checkpoint {path} is of another model: {model.name} has variable {name} {shape}, it {held}; "
                    "pass another --job-dir or --model"
                )

    def value(self, name: str) -> npt.NDArray[np.float32]:
        """The variable of this name, in its shape."""
        try:
            value: npt.NDArray[np.float32] = self._tensor(name)
        except (tf.errors.OpError, RuntimeError, ValueError) as error:
            raise _unreadable(self.path, error) from None
        return value

    def _tensor(self, name: str) -> Any:
        return self._reader.get_tensor(name + _SUFFIX)


def _unreadable(path: str, error: Exception) -> CheckpointError:
    return CheckpointError(f"checkpoint {path} cannot be read: {one_line(error)}")


def read(path: str, model: Model) -> tuple[npt.NDArray[np.float32], int]:
    """All parameters, flat, and the global step of a checkpoint; CheckpointError as of Reader."""
    reader = Reader(path, model)
    return np.concatenate([reader.value(name).reshape(-1) for name in model.shapes]), reader.step


class Saver:
    """Writes checkpoints of variables, each on the host that holds it, into a directory that all of these share."""

    def __init__(self, variables: Mapping[str, Any], step: Any, job_dir: str, keep: int) -> None:
        self._step = step
        # TensorFlow traces a save over several hosts anew each time, and warns of it.
        tf.get_logger().addFilter(lambda record: "MultiDeviceSaver.save" not in record.getMessage())
        saved = tf.train.Checkpoint(**variables, global_step=step)
        self._manager = tf.train.CheckpointManager(saved, directory(job_dir), max_to_keep=keep, checkpoint_name="model")

    def save(self) -> None:
        """Writes a checkpoint; older ones beyond the number to keep go. Half a checkpoint is never the latest."""
        self._manager.save(checkpoint_number=int(self._step))


class LocalCopy:
    """A copy of the variables on this host, by name: what is evaluated, saved and exported."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.variables = {name: tf.Variable(tf.zeros(shape), name=name) for name, shape in model.shapes.items()}
        self.step = tf.Variable(np.int64(0), name=_STEP)

    def logits(self, images: Any) -> Any:
        """Images, float32 [N, 784], to float32 [N, 10], by the variables as they are."""
        return self.model.logits(self.variables, images, False)

    def restore(self, reader: Reader) -> int:
        """Takes over a checkpoint, one variable at a time; its global step. CheckpointError as of Reader."""
        for name, variable in self.variables.items():
            variable.assign(reader.value(name))
        self.step.assign(reader.step)
        return reader.step

    def assign(self, flat: Any, step: int) -> None:
        """Takes over parameters, float32 [P], and the global step."""
        for name, value in self.model.unflatten(flat).items():
            self.variables[name].assign(value)
        self.step.assign(step)
