"""A stack's former state, queried from the engine, which may be writing it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pulumi
import pytest

from infra import state
from infra.scale_tiers import TargetError


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    monkeypatch.setattr(state, "_PAUSES", (0.0,) * 3)
    for what, name in {"organization": "acme", "project": "scaletier", "stack": "dev"}.items():
        monkeypatch.setattr(pulumi, f"get_{what}", lambda name=name: name)
    return names


def test_a_state_that_is_being_written_is_read_again(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def invoke(token: str, args: dict[str, Any]) -> Any:
        asked.append(args["stackName"])
        if len(asked) < 3:
            raise RuntimeError("failed to load checkpoint: EOF")
        return SimpleNamespace(value={"outputs": {"urn::x": {"type": "lxd:Host", "outputs": {"name": "master-0"}}}})

    monkeypatch.setattr(pulumi.runtime, "invoke", invoke)
    assert state.before().of("lxd:Host") == {"x": {"name": "master-0"}}
    assert asked == ["acme/scaletier/dev"] * 3


def test_an_unreadable_file_is_reported_at_the_end(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def invoke(token: str, args: dict[str, Any]) -> Any:
        asked.append(token)
        raise RuntimeError("access denied")

    monkeypatch.setattr(pulumi.runtime, "invoke", invoke)
    with pytest.raises(TargetError, match=r"^the stack's state cannot be read: access denied$"):
        state.before()
    assert len(asked) == 3
