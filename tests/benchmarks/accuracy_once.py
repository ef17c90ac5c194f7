"""`python -m benchmarks.accuracy_once FOLDER`: print the test accuracy of each checkpoint of the cnn.

It is JSON. The checkpoints are of ours, of examples/cloudml and of examples/mwms. Each keeps its variables in a file of another
kind, and only ours normalizes batches.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.stack import MNIST
from scaletier import checkpoint
from scaletier.evaluation import make_evaluate
from scaletier.functional_model import FunctionalModel
from scaletier.tensorflow_setup import import_tensorflow
from trainer import flags, task

tf = import_tensorflow()

_KINDS = ("model-*.index", "model.ckpt-*.index", "weights-*.npz")
_CLOUDML = [f"model/{layer}/{part}" for layer in ("conv1", "conv2", "full", "logits") for part in ("weights", "biases")]


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return steps and files of the checkpoints below a folder, by step; a file may index several."""
    files = [path for kind in _KINDS for path in folder.rglob(kind)]
    return sorted((int(re.findall(r"\d+", path.stem)[-1]), path) for path in files)


def values(path: Path) -> Sequence[Any]:
    """Return the weights of a peer's checkpoint in the order of the network's layers: each kernel, then its biases."""
    if path.suffix == ".npz":
        with np.load(path) as archive:
            return [archive[f"arr_{number}"] for number in range(len(archive.files))]
    reader = tf.train.load_checkpoint(str(path.with_suffix("")))
    return [reader.get_tensor(name) for name in _CLOUDML]


def main() -> int:
    """Print `[[step, accuracy], …]`, in the order of the steps."""
    paths_by_step = checkpoints(Path(sys.argv[1]))
    plain = any(path.suffix == ".npz" or path.name.startswith("model.ckpt") for _, path in paths_by_step)
    norm = "--no-batch-norm" if plain else "--batch-norm"
    parsed = flags.parse(["--train-data", str(MNIST), "--eval-data", str(MNIST), norm])
    job = task.job(parsed)
    batches = job.eval_data()
    network = FunctionalModel(job, batches.element_spec, 0)
    state = checkpoint.TrainingState(network)
    evaluate = make_evaluate(network, state, batches, None)
    curve = []
    for step, path in paths_by_step:
        if plain:
            for variable, value in zip(state.shared, values(path), strict=True):
                variable.assign(value)
        else:
            state.restore(checkpoint.CheckpointReader(str(path.with_suffix("")), network))
            state.assign_ema()
        measured = evaluate(lambda: False)
        assert measured
        curve.append((step, measured.metrics["accuracy"]))
    print(json.dumps(curve))
    return 0


if __name__ == "__main__":
    sys.exit(main())
