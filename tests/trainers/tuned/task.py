"""A trainer as Google's samples for tuning have it: flags, training in steps, reports by the public package, no word of ours.

`python -m tuned.task --learning-rate=0.1 --units=32` comes the closer to 1 the nearer they are to 0.1 and 32.
"""

import argparse
import json
import math
import os
import time
from pathlib import Path

import hypertune


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--units", type=int, default=32)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.2, help="of a step")
    parser.add_argument(
        "--hold", type=int, default=0, help="trials up to this number wait after half of their steps for JOB_DIR/go"
    )
    parser.add_argument("--tag", default="accuracy")
    parser.add_argument("--job-dir", required=True)
    args = parser.parse_args()

    task = json.loads(os.environ["TF_CONFIG"])["task"]
    print(f"trial {task['trial']} in {args.job_dir}", flush=True)
    best = 1 / (1 + abs(math.log10(args.learning_rate / 0.1)) + abs(args.units - 32) / 32)
    tuner = hypertune.HyperTune()
    for step in range(1, args.steps + 1):
        time.sleep(args.seconds)
        if step > args.steps / 2 and int(os.environ["CLOUD_ML_TRIAL_ID"]) <= args.hold:
            hold(Path(args.job_dir))
        tuner.report_hyperparameter_tuning_metric(args.tag, best * (1 - 0.5**step), step)
    told = {"trial": os.environ["CLOUD_ML_TRIAL_ID"], "units": args.units}
    Path(args.job_dir, "done.json").write_text(json.dumps(told))


def hold(folder: Path) -> None:
    """Say so by a file, and wait for another."""
    (folder / "holds").touch()
    while not (folder / "go").exists():
        time.sleep(0.1)


if __name__ == "__main__":
    main()
