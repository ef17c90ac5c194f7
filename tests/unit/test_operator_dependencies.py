"""The operator's packages: all that `pulumi up` and `fab` import, and no TensorFlow."""

from __future__ import annotations

import ast
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
OURS = frozenset({"infra", "jobs", "ops", "hosts", "scaletier", "trainer"})
RECORDS = ("records", "tfrecord", "mnist", "custom_data", "images", "progress", "request")
# The modules of the library that `import scaletier` loads, and the one that imports TensorFlow.
LIBRARY = ("__init__", "tf_config", "flags", "job", "run", "tensorflow_setup")
HEAVY = {"tensorflow-cpu", "tensorflow", "numpy", "keras", "tensorboard", "optuna", "uvicorn", "pytest", "mypy"}


def installed(names: list[str]) -> set[str]:
    """Return distributions with all their dependencies."""
    found: set[tuple[str, frozenset[str]]] = set()
    waiting = [Requirement(name) for name in names]
    while waiting:
        wanted = waiting.pop()
        if (one := (canonicalize_name(wanted.name), frozenset(wanted.extras))) not in found:
            found.add(one)
            needed = map(Requirement, metadata.requires(wanted.name) or [])
            asked = [{"extra": extra} for extra in ("", *wanted.extras)]
            waiting += [need for need in needed if not need.marker or any(map(need.marker.evaluate, asked))]
    return {name for name, _ in found}


@pytest.fixture(scope="module")
def operator() -> set[str]:
    return installed(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])


def imported(path: Path) -> set[str]:
    """Return the top-level names that a file imports when it is imported, or later."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add((node.module or "").partition(".")[0])
    return names - OURS - set(sys.stdlib_module_names)


def test_no_tensorflow_for_an_operator(operator: set[str]) -> None:
    assert not HEAVY & operator


def test_all_that_an_operator_runs_is_installed(operator: set[str]) -> None:
    files = [path for package in ("infra", "jobs", "ops") for path in (ROOT / package).rglob("*.py")]
    files += [ROOT / "scaletier" / f"{name}.py" for name in LIBRARY]
    files += [*(ROOT / "trainer" / f"{name}.py" for name in RECORDS), ROOT / "fabfile.py"]
    owners = metadata.packages_distributions()
    for path in files:
        for name in imported(path):
            assert {canonicalize_name(owner) for owner in owners.get(name, [])} & operator, f"{path} imports {name}"
