"""What strategies come to as several processes, against NumPy: nothing may be lost, scaled or counted twice on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from linear import BATCH, DECAY, MOMENTUM, RATE, WIDTH, points
from loopback import Job

from scaletier.runtime import import_tensorflow

tf = import_tensorflow()
NAMES = ("first:kernel", "first:bias", "second:kernel", "second:bias")
STEPS, PERIOD = 27, 4


def walked(weights: list[Any], velocities: list[Any], replica: int, batches: range) -> tuple[list[Any], list[Any]]:
    """By Nesterov's momentum along the gradients of the mean of squares and of the weights' decay."""
    inputs, targets = points(replica)
    for batch in batches:
        x, (a, b, c, d) = inputs[batch], weights
        hidden = x @ a + b
        error = 2 * (hidden @ c + d - targets[batch]) / BATCH
        behind = error @ c.T
        gradients = [x.T @ behind + 2 * DECAY * a, behind.sum(0), hidden.T @ error + 2 * DECAY * c, error.sum(0)]
        velocities = [MOMENTUM * v - RATE * g for v, g in zip(velocities, gradients, strict=True)]
        weights = [w + MOMENTUM * v - RATE * g for w, v, g in zip(weights, velocities, gradients, strict=True)]
    return weights, velocities


def rounds(replicas: int, period: int, resumed: int = 0) -> list[Any]:
    """Return the weights after rounds of `period` steps of each replica, which end in the mean of all.

    When the job is resumed after so many steps of each, the first replica's velocities are those of all.
    """
    mean: list[Any] = [np.ones([WIDTH, 2]), np.zeros(2), np.ones([2, 1]), np.zeros(1)]
    velocities = [[np.zeros_like(one) for one in mean] for _ in range(replicas)]
    for first in range(0, STEPS // replicas, period):
        batches = range(first, min(first + period, STEPS // replicas))
        velocities = [velocities[0]] * replicas if first == resumed else velocities
        reached = []
        for replica in range(replicas):
            weights, velocities[replica] = walked(mean, velocities[replica], replica, batches)
            reached.append(weights)
        mean = [sum(ones) / replicas for ones in zip(*reached, strict=True)]
    return mean


@pytest.mark.parametrize(
    ("strategy", "replicas", "ends"),
    [("sync", 3, [STEPS]), ("sync", 3, [PERIOD * 3, STEPS]), ("model-parallel", 1, [STEPS])],
    ids=["sync", "sync, resumed", "model-parallel"],
)
def test_what_several_hosts_come_to_is_what_numpy_says(tmp_path: Path, strategy: str, replicas: int, ends: list[int]) -> None:
    for steps in ends:
        flags = (f"--strategy={strategy}", f"--max-steps={steps}", "--microbatches=2")
        roles = ("chief", 0), ("worker", 0), ("worker", 1)
        job = Job(tmp_path, "linear", roles, *flags, PYTHONPATH=str(Path(__file__).parent))
        try:
            job.start_all()
            assert job.wait("chief-0") == 0, job.log("chief-0")
        finally:
            job.stop()
    held = tf.train.load_checkpoint(f"{tmp_path}/job/checkpoints/model-{STEPS}")
    for name, expected in zip(NAMES, rounds(replicas, PERIOD, PERIOD if len(ends) > 1 else 0), strict=True):
        np.testing.assert_allclose(held.get_tensor(f"{name}/.ATTRIBUTES/VARIABLE_VALUE"), expected, rtol=1e-4, err_msg=name)
