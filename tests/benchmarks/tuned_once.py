"""Print the mean error rates of studies of 24 trials, five at once, as JSON.

A trial trains an mlp of one hidden layer on 8,000 images of MNIST for 250 steps, by gradient descent with momentum, and
reports its error rate on the 10,000 test images.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.stack import MNIST
from hosts.tuner.suggest import suggest
from jobs.study import Algorithm, Goal, Measurement, Parameter, ParameterType, ScaleType, Study, Trial, TrialState, best
from trainer.request import images

SEEDS, TRIALS, AT_ONCE, STEPS, IMAGES = 5, 24, 5, 250, 8_000
STUDY = Study(
    [
        Parameter("learning-rate", ParameterType.DOUBLE, 1e-4, 1.0, scaleType=ScaleType.UNIT_LOG_SCALE),
        Parameter("momentum", ParameterType.DOUBLE, 0.01, 0.99, scaleType=ScaleType.UNIT_REVERSE_LOG_SCALE),
        Parameter("hidden-units", ParameterType.INTEGER, 8, 64, scaleType=ScaleType.UNIT_LOG_SCALE),
        Parameter("batch-size", ParameterType.DISCRETE, discreteValues=[16, 32, 64, 128]),
    ],
    goal=Goal.MINIMIZE,
    maxTrials=TRIALS,
    maxParallelTrials=AT_ONCE,
)
Array = np.ndarray[Any, np.dtype[np.float32]]


def read(pattern: str, most: int) -> tuple[Array, Array]:
    """Return images [N, 784] of 0 to 1, and labels [N]."""
    examples = [*islice(images(MNIST, pattern), most)]
    pixels = np.frombuffer(b"".join(image for image, _ in examples), np.uint8).reshape(-1, 784)
    return (pixels / 255).astype(np.float32), np.array([label for _, label in examples])


def trained(hyperparameters: dict[str, str], train: tuple[Array, Array], test: tuple[Array, Array]) -> float:
    """Return the error rate after a training with these hyperparameters; 1 if it diverges."""
    rate, momentum = float(hyperparameters["learning-rate"]), float(hyperparameters["momentum"])
    units, batch = int(hyperparameters["hidden-units"]), int(hyperparameters["batch-size"])
    chance = np.random.default_rng(1)
    layers = [
        chance.normal(0, (2 / size) ** 0.5, (size, width)).astype(np.float32) for size, width in ((784, units), (units, 10))
    ]
    velocities = [np.zeros_like(layer) for layer in layers]
    x, y = train
    with np.errstate(all="ignore"):
        for _ in range(STEPS):
            chosen = chance.integers(0, len(x), batch)
            hidden = np.maximum(x[chosen] @ layers[0], 0)
            scores = hidden @ layers[1]
            odds = np.exp(scores - scores.max(1, keepdims=True))
            wrong = odds / odds.sum(1, keepdims=True)
            wrong[np.arange(batch), y[chosen]] -= 1
            back = (wrong @ layers[1].T) * (hidden > 0)
            slopes = [x[chosen].T @ back / batch, hidden.T @ wrong / batch]
            velocities = [momentum * velocity + slope for velocity, slope in zip(velocities, slopes, strict=True)]
            layers = [layer - rate * velocity for layer, velocity in zip(layers, velocities, strict=True)]
        scores = np.maximum(test[0] @ layers[0], 0) @ layers[1]
    return float(np.mean(scores.argmax(1) != test[1])) if np.isfinite(scores).all() else 1.0


def main() -> None:
    train, test = read("train*.tfrecord", IMAGES), read("test*.tfrecord", 10_000)

    def best_rate(study: Study) -> float:
        trials: list[Trial] = []
        while len(trials) < TRIALS:
            started = list[Trial]()
            for number in range(len(trials) + 1, min(len(trials) + AT_ONCE, TRIALS) + 1):
                started.append(Trial(number, suggest(study, [*trials, *started], number), ""))
            for trial in started:
                final = Measurement(STEPS, trained(trial.hyperparameters, train, test))
                trials.append(replace(trial, state=TrialState.SUCCEEDED, finalMetric=final))
        first = best(study, trials)
        assert first is not None
        assert first.finalMetric is not None
        return first.finalMetric.objectiveValue

    rates = {
        name: [best_rate(replace(STUDY, algorithm=algorithm, seed=seed)) for seed in range(SEEDS)]
        for name, algorithm in (("ours", Algorithm.ALGORITHM_UNSPECIFIED), ("random", Algorithm.RANDOM_SEARCH))
    }
    print(json.dumps({**{name: fmean(each) for name, each in rates.items()}, "each": rates}))


if __name__ == "__main__":
    main()
