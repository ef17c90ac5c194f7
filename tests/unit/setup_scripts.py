"""Load a Python program of set-up, which is in no package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

SETUP = Path(__file__).resolve().parents[2] / "setup"


def load(name: str) -> ModuleType:
    """Load setup/NAME.py."""
    spec = importlib.util.spec_from_file_location(f"setup_{name}", SETUP / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
