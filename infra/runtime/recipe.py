"""A runtime as a list: what is in it, for which Python, and a name that says so.

Pure but for the files that the lists are in.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from infra.spec import PYTHON, Accelerator
from infra.templates import ROOT

FOLDER = "runtimes"
"""Where runtimes are in the bucket, beside `jobs` and `models`, and below /opt/scaletier on a host."""


@dataclass(frozen=True)
class Recipe:
    """Lines for pip, and the version of Python, such as 3.11, that the hosts' image has."""

    python: str
    requirements: tuple[str, ...]
    constraints: tuple[str, ...]

    @property
    def name(self) -> str:
        """`runtime-` and a hash: another list is another runtime, and two stacks with the same list have the same."""
        lines = "\n".join((self.python, *self.requirements, "", *self.constraints))
        return f"runtime-{hashlib.sha256(lines.encode()).hexdigest()[:12]}"

    @property
    def cuda(self) -> bool:
        """True for one with the libraries that TensorFlow needs for GPUs."""
        return any("[and-cuda]" in line for line in self.requirements)

    @property
    def path(self) -> str:
        """Its archive in the bucket."""
        return f"{FOLDER}/{self.name}.tar.gz"


def recipe(runtime_version: str, accelerator: Accelerator | None, python: str = PYTHON) -> Recipe:
    """What hosts with, or without, an accelerator have."""
    package = "tensorflow[and-cuda]" if accelerator else "tensorflow-cpu"
    return Recipe(
        python,
        tuple(requirement_lines(f"{package}=={runtime_version}")),
        tuple(constraint_lines(runtime_version)),
    )


def ours() -> Recipe:
    """What hosts without an accelerator have unless they are to have another TensorFlow."""
    return recipe(_tensorflow(), None)


def requirement_lines(tensorflow: str) -> list[str]:
    """What the trainer needs, with this TensorFlow, the model server and the tuner, and gcsfs for the bucket.

    Other versions are the constraints' affair.
    """
    names = [line.partition("==")[0] for line in _lines("trainer/requirements.txt")]
    mine = [name for name in names if not name.startswith("tensorflow")]
    return [*mine, "gcsfs", *_lines("serving/requirements.txt"), *_lines("tuner/requirements.txt"), tensorflow]


def constraint_lines(runtime_version: str) -> list[str]:
    """The versions that the project was tried with; none of them for another TensorFlow, which needs others."""
    if runtime_version != _tensorflow():
        return []
    return [line for line in _lines("constraints.txt") if not re.match(r"(?i)tensorflow", line)]


def _tensorflow() -> str:
    """The version that the project was tried with."""
    return next(line for line in _lines("trainer/requirements.txt") if line.startswith("tensorflow")).partition("==")[2]


def _lines(path: str) -> list[str]:
    return [line.strip() for line in (ROOT / path).read_text().splitlines() if line.strip() and not line.startswith("#")]
