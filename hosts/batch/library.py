"""The minimal TensorFlow for a batch: the only module here that imports it."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import types
from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True)
class Library:
    """Modules of TensorFlow, in its own names."""

    errors: Any
    file_io: Any
    record_io: Any
    example: Any
    dtypes: Any
    ops: Any
    session: Any
    saved_model: Any


@cache
def tensorflow() -> Library:
    """Return TensorFlow's C++ and the half of its Python that runs a graph.

    All of it takes 2 s to import on a processor, these modules 1 s: a replica of a small batch does little else. So the
    package is entered past its `__init__`. The hosts' TensorFlow is of one version, and a test holds that it can be had in
    this way.
    """
    spec = importlib.util.find_spec("tensorflow")
    if "tensorflow" not in sys.modules and spec is not None and spec.submodule_search_locations:
        package = types.ModuleType("tensorflow")
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules["tensorflow"] = package
    logging.getLogger("tensorflow").setLevel(logging.ERROR)  # it warns of its own older half
    return Library(
        *(
            importlib.import_module(f"tensorflow.{name}")
            for name in (
                "python.framework.errors",
                "python.lib.io.file_io",
                "python.lib.io._pywrap_record_io",
                "core.example.example_pb2",
                "python.framework.dtypes",
                "python.framework.ops",
                "python.client.session",
                "python.saved_model.loader_impl",
            )
        )
    )
