"""Compare strategies on several processes with NumPy: no update may be lost, rescaled or counted twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from linear import BATCH, DECAY, MOMENTUM, RATE, WIDTH, points
from loopback import Job

from scaletier.tensorflow_setup import import_tensorflow

tf = import_tensorflow()
NAMES = ("first:kernel", "first:bias", "second:kernel", "second:bias")
STEPS, PERIOD = 27, 4


def local_steps(weights: list[Any], velocities: list[Any], replica: int, batches: range) -> tuple[list[Any], list[Any]]:
    """Run steps with Nesterov momentum for mean squared error and weight decay."""
    inputs, targets = points(replica)
    for batch in batches:
        x, (a, b, c, d) = inputs[batch], weights
        hidden = x @ a + b
        error = 2 * (hidden @ c + d - targets[batch]) / BATCH
        hidden_error = error @ c.T
        gradients = [x.T @ hidden_error + 2 * DECAY * a, hidden_error.sum(0), hidden.T @ error + 2 * DECAY * c, error.sum(0)]
        velocities = [MOMENTUM * v - RATE * g for v, g in zip(velocities, gradients, strict=True)]
        weights = [w + MOMENTUM * v - RATE * g for w, v, g in zip(weights, velocities, gradients, strict=True)]
    return weights, velocities


def expected_weights(replicas: int, period: int, resumed_step: int = 0) -> list[Any]:
    """Return the weights after rounds of `period` steps per replica, each of which ends with the mean.

    Args:
        replicas: the number of replicas.
        period: steps per round.
        resumed_step: steps per replica after which the job resumes, with the first replica's velocities for all.
    """
    mean: list[Any] = [np.ones([WIDTH, 2]), np.zeros(2), np.ones([2, 1]), np.zeros(1)]
    velocities = [[np.zeros_like(one) for one in mean] for _ in range(replicas)]
    for first in range(0, STEPS // replicas, period):
        batches = range(first, min(first + period, STEPS // replicas))
        velocities = [velocities[0]] * replicas if first == resumed_step else velocities
        replica_weights = []
        for replica in range(replicas):
            weights, velocities[replica] = local_steps(mean, velocities[replica], replica, batches)
            replica_weights.append(weights)
        mean = [sum(ones) / replicas for ones in zip(*replica_weights, strict=True)]
    return mean


@pytest.mark.parametrize(
    ("strategy", "replicas", "last_steps"),
    [
        pytest.param("sync", 3, [STEPS], marks=pytest.mark.full("[sync, resumed] ends with the same numbers"), id="sync"),
        pytest.param("sync", 3, [PERIOD * 3, STEPS], id="sync, resumed"),
        pytest.param("model-parallel", 1, [STEPS], id="model-parallel"),
    ],
)
def test_training_on_several_hosts_equals_numpy(tmp_path: Path, strategy: str, replicas: int, last_steps: list[int]) -> None:
    for steps in last_steps:
        flags = (f"--strategy={strategy}", f"--max-steps={steps}", "--microbatches=2")
        roles = ("chief", 0), ("worker", 0), ("worker", 1)
        with Job(tmp_path, "linear", roles, *flags) as job:
            job.start_all()
            assert job.wait("chief-0") == 0, job.log("chief-0")
    checkpoint = tf.train.load_checkpoint(f"{tmp_path}/job/checkpoints/model-{STEPS}")
    for name, expected in zip(NAMES, expected_weights(replicas, PERIOD, PERIOD if len(last_steps) > 1 else 0), strict=True):
        np.testing.assert_allclose(
            checkpoint.get_tensor(f"{name}/.ATTRIBUTES/VARIABLE_VALUE"), expected, rtol=1e-4, err_msg=name
        )
