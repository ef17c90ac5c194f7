"""The stack's state before this run: names and addresses that must not change by themselves."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pulumi

from infra.dynamic import Props, normalize
from infra.scale_tiers import TargetError

# Seconds before each attempt: the engine may be writing the state, and a half-written file cannot be read.
_PAUSES = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8)
READ_FUNCTION = "pulumi:pulumi:readStackResourceOutputs"


@dataclass(frozen=True)
class StackState:
    """Resources by URN, each with its `type` and `outputs`; those of our own resources have the inputs that were applied."""

    resources: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def of(self, kind: str) -> dict[str, Props]:
        """Return the outputs of the resources whose type ends in `kind`, such as `lxd:Host`, by the resource's name."""
        return {
            urn.rpartition("::")[2]: normalize(resource["outputs"])
            for urn, resource in self.resources.items()
            if str(resource["type"]).endswith(kind)
        }

    @property
    def target(self) -> str | None:
        """The target that the stack is up on, None if it is not up."""
        return next((outputs.get("target") for outputs in self.of("pulumi:Stack").values()), None)

    @property
    def retains_bucket(self) -> bool:
        """True if the last update had retainBucket: this decides whether Pulumi retains or deletes a replaced bucket."""
        return any(outputs.get("retainBucket") for outputs in self.of("pulumi:Stack").values())

    @property
    def hosts(self) -> list[str]:
        """The names of all hosts in the state.

        The stack's outputs lack hosts that an update with `--target`, or one that failed, has yet to delete.
        """
        return [*self.of("lxd:Host"), *self.of("compute/instance:Instance")]


def read_state() -> StackState:
    """Return the state that the last operation, even a killed one, left; empty for a new stack; may raise TargetError."""
    # A backend with organisations would look for a name without one in the user's own organisation.
    name = f"{pulumi.get_organization()}/{pulumi.get_project()}/{pulumi.get_stack()}"
    reason = ""
    for pause in _PAUSES:
        time.sleep(pause)
        try:
            return _read(name)
        except Exception as error:  # noqa: BLE001  the SDK raises nothing narrower
            reason = " ".join(str(error).split()).rpartition("returned an error: ")[2]
    raise TargetError(f"the stack's state cannot be read: {reason}")


def _read(name: str) -> StackState:
    answer = pulumi.runtime.invoke(READ_FUNCTION, {"stackName": name})
    return StackState((answer.value or {}).get("outputs") or {})
