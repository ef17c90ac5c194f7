"""Write the final evaluation to `<job-dir>/evaluation.json`: confusion matrix and misclassified images.

docs/trainers.md describes the file, which any trainer may write.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scaletier.tensorflow_setup import import_tensorflow, one_line, say
from trainer.mnist import CLASS_COUNT, MANIFEST

tf = import_tensorflow()

FILE = "evaluation.json"
_MAX_MISTAKES = 16


def classes(file: str) -> list[str]:
    """Return the names of the labels from the manifest beside a file of records; digits if there is none."""
    digits = [str(label) for label in range(CLASS_COUNT)]
    folder, slash, _ = file.rpartition("/")
    try:
        with tf.io.gfile.GFile(f"{folder}{slash}{MANIFEST}") as manifest:
            content = json.load(manifest)
    except (tf.errors.OpError, ValueError):
        return digits
    names = content.get("classes") if isinstance(content, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return digits
    return [*names, *digits[len(names) :]][:CLASS_COUNT]


class ImageEvaluation:
    """Evaluate images beyond loss and metrics; a `scaletier.EvalCallback`.

    `confusion`, int64 [10, 10], counts the records: a row per label, a column per prediction. The first 16 misclassified images
    are kept: `pictures` uint8 [M, 28, 28], and `predicted` and `labels`, int64 [M] of 0 to 9.
    """

    def __init__(self, classes: Sequence[str]) -> None:
        self._classes = classes
        self.confusion = np.zeros((CLASS_COUNT, CLASS_COUNT), np.int64)
        self.pictures = np.zeros((0, 28, 28), np.uint8)
        self.predicted = self.labels = np.zeros(0, np.int64)

    def on_batch(self, inputs: Any, targets: Any, outputs: Any) -> None:
        """Add a batch: images float32 [N, 784], 0 to 1, labels int64 [N], logits float32 [N, 10]."""
        predictions = np.argmax(outputs, 1)
        np.add.at(self.confusion, (targets, predictions), 1)
        wrong = np.flatnonzero(predictions != targets)[: _MAX_MISTAKES - len(self.labels)]
        pictures = np.rint(inputs[wrong] * 255).astype(np.uint8).reshape(-1, 28, 28)
        self.pictures = np.concatenate([self.pictures, pictures])
        self.predicted, self.labels = np.append(self.predicted, predictions[wrong]), np.append(self.labels, targets[wrong])

    def on_end(self, step: int, metrics: Mapping[str, float], summaries: Any, job_dir: str, last: bool) -> None:
        """Write image summaries of the mistakes by label and prediction; after the last evaluation, write the file."""
        pairs = sorted({*zip(self.labels.tolist(), self.predicted.tolist(), strict=True)})
        masks = {pair: (self.labels == pair[0]) & (self.predicted == pair[1]) for pair in pairs}
        images = {f"mistakes/{label} predicted as {other}": self.pictures[mask] for (label, other), mask in masks.items()}
        summaries.images(step, images)
        if last and (problem := self.write(job_dir, step, metrics)):
            say(problem)

    def content(self, step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Return the file's content, without the classes after the last that is in use."""
        used = [label for label in range(CLASS_COUNT) if self.confusion[label].any() or self.confusion[:, label].any()]
        size = max([2, *(label + 1 for label in used)])
        mistakes = zip(self.labels.tolist(), self.predicted.tolist(), self.pictures, strict=True)
        return {
            "step": step,
            **{name: round(value, 6) for name, value in metrics.items()},
            "classes": list(self._classes[:size]),
            "confusion": self.confusion[:size, :size].tolist(),
            "mistakes": [
                {"label": label, "predicted": prediction, "image": _png(image)} for label, prediction, image in mistakes
            ],
        }

    def write(self, job_dir: str, step: int, metrics: Mapping[str, float]) -> str | None:
        """Write the file atomically; if that fails, return a line instead of failing the job."""
        target, part = f"{job_dir}/{FILE}", f"{job_dir}/.{FILE}"
        try:
            with tf.io.gfile.GFile(part, "w") as out:
                out.write(json.dumps(self.content(step, metrics)) + "\n")
            tf.io.gfile.rename(part, target, overwrite=True)
        except tf.errors.OpError as error:
            return f"{target} was not written: {one_line(error)}"
        return None


def _png(image: Any) -> str:
    """Return an image, uint8 [height, width], as a PNG in base64."""
    return base64.b64encode(tf.io.encode_png(image[..., None]).numpy()).decode()
