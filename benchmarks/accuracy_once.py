"""`python -m benchmarks.accuracy_once FOLDER TARGET`: the step of the first checkpoint of the cnn with this test accuracy."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from ops.train.train import MNIST
from trainer import checkpoint
from trainer.data import find_files
from trainer.evaluation import make_evaluate
from trainer.model import make_model


def main() -> int:
    """Prints the step, or nothing where no checkpoint has it."""
    model = make_model("cnn")
    copy = checkpoint.LocalCopy(model)
    evaluate = make_evaluate(copy.logits, find_files([str(MNIST)], "test"))
    files = Path(sys.argv[1]).rglob("model-*.index")
    steps = {int(re.findall(r"\d+", path.stem)[-1]): str(path.with_suffix("")) for path in files}
    for step, path in sorted(steps.items()):
        copy.assign(*checkpoint.read(path, model))
        if evaluate().accuracy >= float(sys.argv[2]):
            print(step)
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
