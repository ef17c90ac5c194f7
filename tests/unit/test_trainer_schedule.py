"""The learning rate over a job: against its formula in plain Python."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaletier.tensorflow_setup import import_tensorflow
from trainer.model import WarmupCosineDecay

tf = import_tensorflow()


def rate(schedule: WarmupCosineDecay, step: int) -> float:
    return float(schedule(tf.constant(step, tf.int64)))


@given(st.integers(0, 3000), st.integers(1, 2000), st.integers(1, 12), st.floats(1e-4, 1.0), st.integers(1, 300))
def test_the_rate_follows_its_formula(step: int, max_steps: int, replicas: int, learning_rate: float, warmup: int) -> None:
    growth = min(replicas, 8)
    rise = min(1.0, (step + 1) / min(warmup, max_steps / 2))
    fall = 0.5 + 0.5 * math.cos(math.pi * min(1.0, (step + 1) / max_steps))
    actual = rate(WarmupCosineDecay(learning_rate, warmup, max_steps, replicas), step)
    assert actual == pytest.approx(learning_rate * growth * rise * fall, rel=1e-4, abs=1e-6)
