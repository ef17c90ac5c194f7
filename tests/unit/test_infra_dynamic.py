"""Dynamic resources: the functions of their modules, the defaults, and the module names in Pulumi states."""

from __future__ import annotations

import base64
import importlib
import logging
import pickle
import sys
from types import ModuleType
from typing import Any

import pytest
from pulumi.dynamic import Config, ConfigureRequest
from pulumi.dynamic.dynamic import serialize_provider

from infra import dynamic
from infra.dynamic import ModuleProvider


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a module that defines only `create`."""
    module: Any = ModuleType("only_creates")
    module.create = lambda props: ("it", {**props, "made": True})
    monkeypatch.setitem(sys.modules, "only_creates", module)
    return module


def test_a_module_overrides_only_some_functions(module: Any) -> None:
    provider, old, new = ModuleProvider("only_creates"), {"a": 1.0}, {"a": 2.0}
    assert provider.create(new).outs == {"a": 2, "made": True}
    assert (provider.read("it", old).id, provider.read("it", old).outs) == ("it", old)
    assert provider.update("it", old, new).outs == {"a": 2, "made": True}
    provider.delete("it", old)
    assert (provider.diff("it", old, old).changes, provider.diff("it", old, new).changes) == (False, True)
    assert (provider.diff("it", old, new).replaces, provider.diff("it", old, new).delete_before_replace) == ([], True)


def test_a_module_may_define_all_functions(module: Any) -> None:
    provider, deleted = ModuleProvider("only_creates"), list[str]()
    module.REPLACE_ON_CHANGES, module.DELETE_FIRST = frozenset({"a"}), False
    module.read, module.update = lambda name, props: None, lambda name, old, new: {**old, "b": new["a"]}
    module.delete = lambda name, props: deleted.append(name)
    assert provider.read("it", {}).id == "", "a missing resource has no id"
    assert provider.update("it", {"a": 1}, {"a": 2}).outs == {"a": 1, "b": 2}
    provider.delete("it", {})
    assert deleted == ["it"]
    diff = provider.diff("it", {"a": 1, "__provider": "x"}, {"a": 2, "__provider": "y"})
    assert (diff.replaces, diff.delete_before_replace) == (["a"], False)


def test_one_thread_at_a_time_imports_a_module(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    locked = list[bool]()

    def import_module(name: str) -> Any:
        locked.append(dynamic._importing.locked())
        return sys.modules[name]

    monkeypatch.setattr(importlib, "import_module", import_module)
    ModuleProvider("only_creates").create({})
    assert locked == [True], "imports of two threads that need each other's modules end by a deadlock"


LOCAL = ("bucket", "bucket_guard", "firewall", "host", "identity", "network", "project", "ready")
MODULES = (
    "infra.operator_files",
    "infra.operator_key",
    *(f"infra.lxd.{name}" for name in LOCAL),
    *(f"infra.gcp.{name}" for name in ("bucket_guard", "hostkeys", "ready", "runtime")),
)


# A host's provider in the state of an existing stack.
STORED = "gASVRQAAAAAAAACMDWluZnJhLmR5bmFtaWOUjA5Nb2R1bGVQcm92aWRlcpSTlCmBlH2UjAZtb2R1bGWUjA5pbmZyYS5seGQuaG9zdJRzYi4="


def test_modules_named_in_states_keep_their_names() -> None:
    """Existing stacks need the modules to delete their resources."""
    provider = pickle.loads(base64.b64decode(STORED))  # noqa: S301  trusted
    assert (type(provider), provider.module) == (ModuleProvider, "infra.lxd.host")
    assert serialize_provider(provider) == STORED, "otherwise each update would rewrite each resource's provider"
    for name in MODULES:
        assert callable(importlib.import_module(name).create)


def test_a_state_may_name_a_module_by_its_old_name() -> None:
    old, new = ModuleProvider("infra.lxd.seal"), ModuleProvider("infra.lxd.bucket_guard")
    assert (
        old.diff("it", {"name": "a"}, {"name": "b"}).replaces
        == new.diff("it", {"name": "a"}, {"name": "b"}).replaces
        == ["name"]
    )


def test_the_configuration_is_that_of_the_engines_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic, "_configuration", {})
    assert dynamic.configuration("gcp:project") is None
    ModuleProvider("x").configure(ConfigureRequest(Config({"gcp:project": "p"}, "scaletier")))
    assert (dynamic.configuration("gcp:project"), dynamic.configuration("gcp:zone")) == ("p", None)


def test_properties_are_whole_and_without_the_engines_own() -> None:
    given = {"a": 1.0, "b": {"c": [2.0, 2.5]}, "d": "1.0", "e": True, "__provider": "x", "f__": None}
    expected = {"a": 1, "b": {"c": [2, 2.5]}, "d": "1.0", "e": True, "f__": None}
    assert repr(dynamic.normalize(given)) == repr(expected)
    assert dynamic.changes({"a": 1, "b": 2, "gone": 3}, {"a": 1, "b": 3, "new": 4}) == {"b", "new"}
    assert logging.getLogger("grpc").level == logging.CRITICAL, "a traceback is no error line"
