"""How what replicas walked moves the parameters that they share: an optimizer over rounds, outside the one over steps.

Sources: McMahan et al. 2017, "Communication-efficient learning of deep networks from decentralized data" (the mean of walks);
Douillard et al. 2023, "DiLoCo: distributed low-communication training of language models" (Nesterov's momentum over such
means); Liu et al. 2024, "Asynchronous local-SGD training for language modeling" (what of that helps replicas that do not wait).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Outer:
    """A mean of walks is taken `rate` times, and with Nesterov's `momentum`, 0 for none."""

    rate: float = 1.0
    momentum: float = 0.0

    def move(self, walked: Any, velocity: Any) -> tuple[Any, Any]:
        """What is added to the parameters for this share of a walk, and the velocity after it; both of one shape."""
        change = self.rate * walked
        if not self.momentum:
            return change, velocity
        velocity = self.momentum * velocity + change
        return change + self.momentum * velocity, velocity
