"""`python -m benchmarks.accuracy_once FOLDER`: the test accuracy of each checkpoint of the cnn below a folder, as JSON."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from ops.train.train import MNIST
from scaletier import checkpoint
from scaletier.evaluation import make_evaluate
from scaletier.network import Network
from trainer import flags, task


def main() -> int:
    """Prints `[[step, accuracy], …]`, in the order of the steps."""
    parsed = flags.parse(["--train-data", str(MNIST), "--eval-data", str(MNIST)])
    job = task.job(parsed)
    batches = job.eval_data()
    network = Network(job, batches.element_spec, 0)
    copy = checkpoint.LocalCopy(network)
    evaluate = make_evaluate(network, copy.outputs, batches, None)
    files = Path(sys.argv[1]).rglob("model-*.index")
    steps = {int(re.findall(r"\d+", path.stem)[-1]): str(path.with_suffix("")) for path in files}
    curve = []
    for _, path in sorted(steps.items()):
        step = copy.restore(checkpoint.Reader(path, network))
        curve.append((step, evaluate().metrics["accuracy"]))
    print(json.dumps(curve))
    return 0


if __name__ == "__main__":
    sys.exit(main())
