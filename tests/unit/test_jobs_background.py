"""Test that a poller of work in a thread is called once there is a result."""

from __future__ import annotations

import threading

import pytest
from waiting import limit

from jobs.background import BackgroundTask


@pytest.mark.parametrize(("error", "expected"), [(None, "done"), (ValueError("why"), "failed: why")])
def test_a_poller_is_called_once_the_result_is_there(error: Exception | None, expected: str) -> None:
    go, ended, results = threading.Event(), threading.Event(), list[str | None]()

    def work() -> str:
        go.wait()
        if error:
            raise error
        return "done"

    def wake() -> None:
        results.append(task.result)
        ended.set()

    task: BackgroundTask[str] = BackgroundTask(work, 60, lambda why: f"failed: {why}", wake)
    assert task.result is None
    go.set()
    assert ended.wait(limit())
    assert results == [expected]
