"""What the final evaluation found, in `<job-dir>/evaluation.json`: who was taken for whom, and some pictures of it.

docs/trainers.md has its shape, as part of what any trainer may leave.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

from trainer.evaluation import Metrics
from trainer.manifest import MANIFEST
from trainer.mnist import LABELS
from trainer.runtime import import_tensorflow, one_line

tf = import_tensorflow()

FILE = "evaluation.json"


def classes(file: str) -> list[str]:
    """The names of the labels, as the manifest beside a file of records has them; digits where there is none."""
    digits = [str(label) for label in range(LABELS)]
    try:
        with tf.io.gfile.GFile(f"{file.rpartition('/')[0]}/{MANIFEST}") as manifest:
            told = json.load(manifest)
    except (tf.errors.OpError, ValueError):
        return digits
    named = told.get("classes") if isinstance(told, dict) else None
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        return digits
    return [*named, *digits[len(named) :]][:LABELS]


def content(step: int, metrics: Metrics, names: Sequence[str]) -> dict[str, Any]:
    """The file. The classes behind the last one that any record is of, or was taken for, are left out."""
    met = [label for label in range(LABELS) if metrics.confusion[label].any() or metrics.confusion[:, label].any()]
    size = max([2, *(label + 1 for label in met)])
    found = metrics.mistakes
    pictures = zip(found.labels.tolist(), found.predicted.tolist(), found.images, strict=True)
    mistakes = [{"label": label, "predicted": taken, "image": _png(image)} for label, taken, image in pictures]
    return {
        "step": step,
        "loss": round(metrics.loss, 6),
        "accuracy": round(metrics.accuracy, 6),
        "classes": list(names[:size]),
        "confusion": metrics.confusion[:size, :size].tolist(),
        "mistakes": mistakes,
    }


def write(job_dir: str, step: int, metrics: Metrics, names: Sequence[str]) -> str | None:
    """Leaves the file in the job's directory, whole or not at all; the line that says why it could not, which ends no job."""
    target, part = f"{job_dir}/{FILE}", f"{job_dir}/.{FILE}"
    try:
        with tf.io.gfile.GFile(part, "w") as out:
            out.write(json.dumps(content(step, metrics, names)) + "\n")
        tf.io.gfile.rename(part, target, overwrite=True)
    except tf.errors.OpError as error:
        return f"{target} was not written: {one_line(error)}"
    return None


def _png(image: Any) -> str:
    """A picture, uint8 [height, width], as a PNG in base64."""
    return base64.b64encode(tf.io.encode_png(image[..., None]).numpy()).decode()
