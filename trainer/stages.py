"""The stages of a model whose layers lie on several hosts, and the way of a batch through them, there and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from trainer.model import Layer, losses_and_correct
from trainer.runtime import import_tensorflow

tf = import_tensorflow()


@dataclass(frozen=True)
class Stage:
    """Consecutive layers on one host; `variables` and `velocities` by name."""

    replica: str
    device: str
    layers: Sequence[Layer]
    variables: dict[str, Any]
    velocities: dict[str, Any]

    def forward(self, inputs: Any, training: bool) -> Any:
        """The stage's output; to be called under its device."""
        for layer in self.layers:
            inputs = layer(self.variables, inputs, training)
        return inputs


def partition(sizes: Sequence[int], parts: int) -> list[int]:
    """Cuts layers of these sizes into consecutive parts, at most `parts` and none empty, the largest as small as can be.

    The result are the indices at which the parts begin, and the end: [0, 2, 3] are the layers 0 and 1, and the layer 2.
    """

    @cache
    def best(start: int, left: int) -> tuple[int, tuple[int, ...]]:
        if left == 1:
            return sum(sizes[start:]), (start, len(sizes))
        options = []
        for end in range(start + 1, len(sizes) - left + 2):
            largest, rest = best(end, left - 1)
            options.append((max(sum(sizes[start:end]), largest), (start, *rest)))
        return min(options)

    return list(best(0, min(parts, len(sizes)))[1])


def gradient_sums(stages: Sequence[Stage], images: Any, labels: Any, size: int, parts: int) -> tuple[dict[str, Any], Any, Any]:
    """Gradients of the summed loss of a batch of this size, by the variables' names, each on its stage's host; the summed
    loss in nats, and how many were right.

    The batch goes in parts. Nothing orders these but what they need of each other, so that all stages are at work at once.
    """
    cuts = np.linspace(0, size, parts + 1).astype(int)
    lengths = np.diff(cuts).tolist()
    pairs = zip(tf.split(images, lengths), tf.split(labels, lengths), strict=True)
    passed = [_forward(stages, *pair) for pair in pairs]
    sums: dict[str, Any] = {}
    for backward, _, _ in passed:
        backward(sums)
    _, losses, correct = zip(*passed, strict=True)
    return sums, tf.add_n([tf.reduce_sum(values) for values in losses]), tf.add_n([tf.reduce_sum(values) for values in correct])


def _forward(stages: Sequence[Stage], images: Any, labels: Any) -> tuple[Callable[[dict[str, Any]], None], Any, Any]:
    """A microbatch through all stages: what takes it back, adding its gradients to sums by name; losses, correct."""
    passed: list[tuple[Stage, Any, Any, Any]] = []
    outputs = images
    for stage in stages:
        with tf.device(stage.device):
            inputs = tf.identity(outputs)
            with tf.GradientTape() as tape:
                tape.watch(inputs)
                outputs = stage.forward(inputs, True)
                if stage is stages[-1]:
                    losses, correct = losses_and_correct(outputs, tf.identity(labels))
                    outputs = losses
            passed.append((stage, tape, inputs, outputs))

    def backward(sums: dict[str, Any]) -> None:
        upstream = None
        for stage, tape, inputs, reached in reversed(passed):
            with tf.device(stage.device):
                upstream = None if upstream is None else tf.identity(upstream)
                sources = [inputs, *stage.variables.values()]
                upstream, *changes = tape.gradient(reached, sources, output_gradients=upstream)
                for name, change in zip(stage.variables, changes, strict=True):
                    sums[name] = change if name not in sums else sums[name] + change

    return backward, losses, correct
