"""A line every two seconds, and none for quick operations."""

from __future__ import annotations

import pytest

from trainer.progress import with_progress


def test_only_slow_iterations_print_progress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def items(seconds: float) -> list[int]:
        consumed = []
        for item in with_progress(range(5), "reading row", 5000):
            now[0] += seconds
            consumed.append(item)
        return consumed

    assert items(0.1) == [0, 1, 2, 3, 4]
    assert capsys.readouterr().out == ""
    assert items(1.5) == [0, 1, 2, 3, 4]
    assert capsys.readouterr().out.splitlines() == ["reading row 3 of 5,000", "reading row 5 of 5,000"]
