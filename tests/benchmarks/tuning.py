"""Tuning hyperparameters: the time of sixteen trials on five hosts, and the result of 24 trials."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from benchmarks.measure import must, run
from benchmarks.registry import Figure, benchmark, in_turn
from benchmarks.stack import DATA, ROOT, BenchStack, job_id, say, unpacked
from infra.scale_tiers import ScaleTier
from jobs.paths import PYTHON

_TRIALS, _AT_ONCE = 16, 5
_TRAINING = ["--model", "mlp", "--max-steps", "3000", "--seed", "1"]
_STUDY = {
    "hyperparameterMetricTag": "accuracy",
    "maxTrials": _TRIALS,
    "maxParallelTrials": _AT_ONCE,
    "params": [
        {"parameterName": "learning-rate", "type": "DOUBLE", "minValue": 0.001, "maxValue": 0.3, "scaleType": "UNIT_LOG_SCALE"}
    ],
}


@benchmark(
    "tuning-trials",
    what="seconds of `fab train` that tunes the mlp, 16 trials of 3,000 steps, five hosts at once",
    against="16 such runs one after another by ssh on master-0 with the same learning rates, which may use all processors, "
    "too; they keep no record, log or output; medians of 3",
    bar=1.2,
    aim=1.0,
)
def tuning_trials(stack: BenchStack) -> Figure:
    """Compare the same work: all hosts share the processors of this machine."""
    stack.require(ScaleTier.STANDARD_1)
    with TemporaryDirectory() as folder:
        config = Path(folder, "config.yaml")
        config.write_text(yaml.safe_dump({"trainingInput": {"args": _TRAINING, "hyperparameters": _STUDY}}))
        jobs: list[str] = []

        def ours() -> float:
            say(f"{_TRIALS} trials on {_AT_ONCE} hosts")
            jobs.append(f"{job_id('tuning')}_{len(jobs)}")
            began = time.monotonic()
            must(stack.run("fab", "train", jobs[-1], "--config", str(config)), "fab train")
            return time.monotonic() - began

        def theirs() -> float:
            trials = json.loads(stack.fab("describe", jobs[-1], "--json").out)["trainingOutput"]["trials"]
            rates = [trial["hyperparameters"]["learning-rate"] for trial in sorted(trials, key=lambda trial: trial["trialId"])]
            say(f"{_TRIALS} runs one after another")
            package = unpacked(jobs[-1])
            train = f"{PYTHON} -m trainer.task --job-dir /tmp/peer {' '.join(_TRAINING)}"
            began = time.monotonic()
            for rate in rates:
                line = f"{package} && rm -rf /tmp/peer && SCALETIER_DATA=/bucket/{DATA} {train} --learning-rate {rate}"
                stack.on("master-0", line)
            return time.monotonic() - began

        return in_turn(3, ours, theirs)


@benchmark(
    "tuning-best",
    what="error rate of the best of 24 trials, five at once: a small mlp of NumPy on MNIST, 4 hyperparameters; mean of 5 seeds",
    against="RANDOM_SEARCH with the same 24 trials and seeds, likewise not on hosts",
    bar=1.0,
    tier=None,
    unit="",
)
def tuning_best(stack: BenchStack) -> Figure:
    """Use the tuner's own suggestions, and trainings in one process."""
    say("2 times 5 studies of 24 trials")
    ran = must(run([sys.executable, "-m", "benchmarks.tuned_once"], stack.env, ROOT), "the studies")
    rates = json.loads(ran.out.strip().splitlines()[-1])
    return Figure(rates["ours"], rates["random"])
