"""The trainer's networks and their loss: variables, normalization, and label smoothing, by NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from scaletier.tensorflow_setup import import_tensorflow
from trainer import task
from trainer.flags import parse
from trainer.model import make_model

tf = import_tensorflow()

IMAGES = np.random.default_rng(1).random((8, 784), np.float32)


def cnn(batch_norm: bool) -> Any:
    return make_model("cnn", [], "float32", batch_norm)


def test_the_plain_cnn_reads_checkpoints_of_the_trainer_without_batch_normalization() -> None:
    names = [variable.path.removeprefix("cnn/") for variable in cnn(False).trainable_variables]
    assert names == [f"{layer}/{part}" for layer in ("conv1", "conv2", "hidden", "logits") for part in ("kernel", "bias")]


@pytest.mark.parametrize("name", ["conv1", "conv2"])
def test_a_convolution_is_normalized_after_its_pooling(name: str) -> None:
    model = cnn(True)
    norm, before = model.get_layer(f"{name}_norm"), model.get_layer(f"{name}_pool")
    pooled = type(model)([*model.layers[: model.layers.index(before) + 1]])(IMAGES, training=True)
    mean, variance = np.mean(pooled, (0, 1, 2)), np.var(pooled, (0, 1, 2))
    normalized = norm(pooled, training=True)
    np.testing.assert_allclose(normalized, (pooled - mean) / np.sqrt(variance + 1e-3), atol=1e-4)
    np.testing.assert_allclose(norm.moving_mean, 0.1 * mean, rtol=1e-3, atol=1e-6)


def test_label_smoothing_is_the_cross_entropy_of_a_mixed_label() -> None:
    flags = ["--train-data=a", "--eval-data=b"]
    logits = np.random.default_rng(2).normal(size=(3, 10)).astype(np.float32)
    log_shares = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    labels = np.array([3, 0, 9])
    one_hot = np.eye(10)[labels]
    for smoothing in (0.0, 0.2):
        loss = task.job(parse([*flags, f"--label-smoothing={smoothing}"])).loss
        target = one_hot * (1 - smoothing) + smoothing / 10
        np.testing.assert_allclose(loss(labels, logits), -(target * log_shares).sum(1), rtol=1e-4)
