"""The stack of tests on hosts; Pulumi and LXD are fakes here."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import waiting

E2E = Path(__file__).resolve().parents[1] / "e2e"


def test_what_was_there_before_a_stack_is_none_of_its_leftovers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Bridges and processes of an LXD in a container may be in sight of this machine."""
    monkeypatch.syspath_prepend(str(E2E))
    stacks = importlib.import_module("stacks")
    there = ["network stffffff"]
    monkeypatch.setattr(stacks, "MARKS", tmp_path)
    monkeypatch.setattr(stacks, "leftovers", lambda _: [*there])
    monkeypatch.setattr(stacks.hosts_report, "WATCHED", [])
    monkeypatch.setattr(stacks.hosts_report, "write", str)
    monkeypatch.setattr(waiting, "limit", lambda *_: 0.0)
    for method in ("clear", "pulumi", "configure", "_remove"):
        monkeypatch.setattr(stacks.Stack, method, lambda *_, **__: "")
    with stacks.Stack("story", {}) as stack:
        stack.wait_for_leftovers()
        there.append("network staaaaaa")
        stack.wait_for_leftovers("network staaaaaa")
