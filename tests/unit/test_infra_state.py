"""A stack's state before an update, queried from Pulumi's engine, which may be writing it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pulumi
import pytest

from infra import state
from infra.scale_tiers import TargetError


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    queries: list[str] = []
    monkeypatch.setattr(state, "_PAUSES", (0.0,) * 3)
    for attribute, name in {"organization": "acme", "project": "scaletier", "stack": "dev"}.items():
        monkeypatch.setattr(pulumi, f"get_{attribute}", lambda name=name: name)
    return queries


def test_a_state_that_is_being_written_is_reread(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def invoke(token: str, args: dict[str, Any]) -> Any:
        calls.append(args["stackName"])
        if len(calls) < 3:
            raise RuntimeError("failed to load checkpoint: EOF")
        return SimpleNamespace(value={"outputs": {"urn::x": {"type": "lxd:Host", "outputs": {"name": "master-0"}}}})

    monkeypatch.setattr(pulumi.runtime, "invoke", invoke)
    assert state.before().of("lxd:Host") == {"x": {"name": "master-0"}}
    assert calls == ["acme/scaletier/dev"] * 3


def test_an_unreadable_state_is_an_error_after_the_retries(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def invoke(token: str, args: dict[str, Any]) -> Any:
        calls.append(token)
        raise RuntimeError("access denied")

    monkeypatch.setattr(pulumi.runtime, "invoke", invoke)
    with pytest.raises(TargetError, match=r"^the stack's state cannot be read: access denied$"):
        state.before()
    assert len(calls) == 3
