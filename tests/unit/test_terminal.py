"""What takes long says so: a line that is drawn again on a terminal, lines that stay elsewhere."""

from __future__ import annotations

import time

import pytest

from ops import terminal


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_FIRST_SECONDS", 0.05)
    monkeypatch.setattr(terminal, "_AGAIN_SECONDS", 0.1)


@pytest.mark.usefixtures("quick")
def test_outside_a_terminal_it_is_told_from_time_to_time(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.Step("connecting", always=True) as step:
        step.count = "3 of 8"
        time.sleep(0.4)
        step.count = "8 of 8"
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("connecting 8 of 8 (")
    assert len(lines) >= 2
    assert "connecting 3 of 8 … 0 s" in lines


@pytest.mark.usefixtures("quick")
def test_on_a_terminal_it_is_one_line_that_goes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(terminal, "colourful", lambda _: True)
    with terminal.Step("connecting"):
        time.sleep(1.5)
    drawn = capsys.readouterr().err
    assert "\r\033[Kconnecting … 1 s" in drawn
    assert drawn.endswith("\r\033[K")


def test_what_is_quick_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.Step("connecting"):
        pass
    assert capsys.readouterr().err == ""
