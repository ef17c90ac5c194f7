"""The specification of a runtime: its packages and version of Python. The runtime's name is a hash of its spec."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

import yaml

from infra.scale_tiers import PYTHON, Accelerator
from infra.templates import ROOT

RUNTIMES_FOLDER = "runtimes"
"""The folder of runtimes in the bucket, beside `jobs` and `models`, and below /opt/scaletier on a host."""


@dataclass(frozen=True)
class RuntimeSpec:
    """A runtime's packages, as lines for pip, and the version of Python in the hosts' image, such as 3.11."""

    python: str
    requirements: tuple[str, ...]
    constraints: tuple[str, ...]

    @property
    def name(self) -> str:
        """`runtime-` and a hash: stacks with equal specs share a runtime."""
        lines = "\n".join((self.python, *self.requirements, "", *self.constraints))
        return f"runtime-{hashlib.sha256(lines.encode()).hexdigest()[:12]}"

    @property
    def cuda(self) -> bool:
        """True if the runtime includes the libraries that TensorFlow needs for GPUs."""
        return any("[and-cuda]" in line for line in self.requirements)

    @property
    def path(self) -> str:
        """The path of the runtime's archive in the bucket."""
        return f"{RUNTIMES_FOLDER}/{self.name}.tar.gz"


def runtime_spec(runtime_version: str, accelerator: Accelerator | None, python: str = PYTHON) -> RuntimeSpec:
    """Return the runtime's specification for hosts with or without an accelerator."""
    package = "tensorflow[and-cuda]" if accelerator else "tensorflow-cpu"
    return RuntimeSpec(
        python, tuple(requirement_lines(f"{package}=={runtime_version}")), tuple(constraint_lines(runtime_version))
    )


def default_runtime_spec() -> RuntimeSpec:
    """Return the runtime's specification for hosts without an accelerator and with the default TensorFlow."""
    return runtime_spec(_tensorflow(), None)


def requirement_lines(tensorflow: str) -> list[str]:
    """Return the requirements: those of the trainer, the model server and the tuner, gcsfs, and this TensorFlow."""
    names = [line.partition("==")[0] for line in _lines("trainer/requirements.txt")]
    own = [name for name in names if not name.startswith("tensorflow")]
    return [*own, "gcsfs", *_lines("hosts/serving/requirements.txt"), *_lines("hosts/tuner/requirements.txt"), tensorflow]


def constraint_lines(runtime_version: str) -> list[str]:
    """Return the tested versions of packages; with another TensorFlow than the tested one, only Keras's range, if known."""
    if runtime_version != _tensorflow():
        library = yaml.safe_load((ROOT / "scaletier/scaletier.yaml").read_text())
        major, minor = library["keras"][-1].split(".")
        known = runtime_version.rpartition(".")[0] in library["tensorflow"]
        return [f"keras>={library['keras'][0]},<{major}.{int(minor) + 1}"] if known else []
    return [line for line in _lines("constraints.txt") if not re.match(r"(?i)tensorflow|uv==", line)]


def _tensorflow() -> str:
    """Return the tested version of TensorFlow."""
    return next(line for line in _lines("trainer/requirements.txt") if line.startswith("tensorflow")).partition("==")[2]


def _lines(path: str) -> list[str]:
    return [line.strip() for line in (ROOT / path).read_text().splitlines() if line.strip() and not line.startswith("#")]
