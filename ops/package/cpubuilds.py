"""Packages of which there is a build for processors alone, which hosts without a GPU do well with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

TORCH_INDEX = "--extra-index-url https://download.pytorch.org/whl/cpu"
# Names of distributions, with those of their CPU builds, which have the same versions and modules.
_BY_NAME = {"tensorflow": "tensorflow-cpu", "xgboost": "xgboost-cpu"}
_TORCH = ("torch", "torchvision", "torchaudio")
_CUDA = "and-cuda"
_INDEX_OPTIONS = ("--extra-index-url", "--index-url", "-i ")


def replaced(lines: Sequence[str]) -> list[str]:
    """Return the lines of a requirements.txt with CPU builds; a line with a hash names a file, and stays."""
    return [_replaced(line) for line in lines]


def asks_for_cuda(lines: Iterable[str]) -> bool:
    """Return True for lines that fetch PyTorch with CUDA, whose CPU build is in another index."""
    lines = list(lines)
    elsewhere = any(line.startswith(_INDEX_OPTIONS) for line in lines)
    return not elsewhere and any(_name(line) in _TORCH and "+cpu" not in line for line in lines)


def remedy(packages: Iterable[str]) -> str:
    """Return what to ask for instead of these packages, as a part of a sentence; empty if there is nothing."""
    names = {canonicalize_name(package) for package in packages}
    if names & {*_TORCH} or any(name.startswith("nvidia-") for name in names if "torch" in names):
        return f"a line {TORCH_INDEX} above torch fetches its build for processors; "
    return "".join(f"{other} is {name} for processors; " for name, other in _BY_NAME.items() if name in names)


def _replaced(line: str) -> str:
    name = _name(line)
    if name not in _BY_NAME or " --" in line:
        return line
    requirement = Requirement(line)
    requirement.name, requirement.extras = _BY_NAME[name], requirement.extras - {_CUDA}
    return line if requirement.url else str(requirement)


def _name(line: str) -> str:
    try:
        return canonicalize_name(Requirement(line.partition(" --")[0].strip()).name)
    except InvalidRequirement:
        return ""
