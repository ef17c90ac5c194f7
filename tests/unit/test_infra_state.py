"""A stack's state before an update, queried from Pulumi's engine, which may be writing it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pulumi
import pytest

from infra import state
from infra.scale_tiers import TargetError


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    pauses: list[float] = []
    monkeypatch.setattr(state, "time", SimpleNamespace(sleep=pauses.append))
    return pauses


@pytest.fixture
def calls(pauses: list[float], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    queries: list[str] = []
    for attribute, name in {"organization": "acme", "project": "scaletier", "stack": "dev"}.items():
        monkeypatch.setattr(pulumi, f"get_{attribute}", lambda name=name: name)
    return queries


def test_a_state_that_is_being_written_is_reread(
    calls: list[str], pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def invoke(token: str, args: dict[str, Any]) -> Any:
        calls.append(args["stackName"])
        if len(calls) < 3:
            raise RuntimeError("failed to load checkpoint: EOF")
        return SimpleNamespace(value={"outputs": {"urn::x": {"type": "lxd:Host", "outputs": {"name": "master-0"}}}})

    monkeypatch.setattr(pulumi.runtime, "invoke", invoke)
    assert state.read_state().of("lxd:Host") == {"x": {"name": "master-0"}}
    assert (calls, pauses) == (["acme/scaletier/dev"] * 3, [0.0, 0.05, 0.1])


def test_an_unreadable_state_is_an_error_after_the_retries(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def invoke(token: str, args: dict[str, Any]) -> Any:
        calls.append(token)
        raise RuntimeError("access denied")

    monkeypatch.setattr(pulumi.runtime, "invoke", invoke)
    with pytest.raises(TargetError, match=r"^the stack's state cannot be read: access denied$"):
        state.read_state()
    assert len(calls) == 6


@pytest.mark.parametrize("value", [None, {}, {"outputs": None}])
def test_a_new_stack_has_an_empty_state(calls: list[str], monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    monkeypatch.setattr(pulumi.runtime, "invoke", lambda *_: SimpleNamespace(value=value))
    before = state.read_state()
    assert (before.resources, before.target, before.hosts) == ({}, None, [])


@pytest.mark.parametrize("kind", ["pulumi-python:dynamic/lxd:Host", "gcp:compute/instance:Instance"])
def test_a_state_names_its_target_and_all_its_hosts(kind: str) -> None:
    """An update with `--target`, or one that failed, keeps hosts that the stack's outputs lack."""

    def read(outputs: dict[str, Any], *hosts: str) -> state.StackState:
        resources = {f"urn::a::{host}": {"type": kind, "outputs": {}} for host in hosts}
        return state.StackState({"urn::a::dev": {"type": "pulumi:pulumi:Stack", "outputs": outputs}, **resources})

    up = read({"target": "gcp", "hosts": {"master-0": "10.0.0.2"}}, "ps-0", "master-0")
    assert (up.target, up.hosts) == ("gcp", ["ps-0", "master-0"])
    assert (read({"hosts": None}).target, read({"hosts": None}).hosts) == (None, [])
    assert read({}).of("lxd:Host") == {}
