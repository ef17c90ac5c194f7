"""The same work on every host: each ends in a result or an error, within the time limit."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from waiting import limit

from jobs.background import Background
from ops.cluster import fanout
from ops.cluster.fanout import fan_out, first_of
from ops.errors import HostError, HostsError, UsageError


def test_every_host_runs_to_its_end() -> None:
    def work(name: str) -> str:
        if name == "b":
            raise ValueError("no")
        return name.upper()

    done: list[str] = []
    outcome = fan_out("abc", work, limit(), done.append)
    assert outcome.results == {"a": "A", "c": "C"}
    assert list(outcome.failures) == ["b"]
    assert str(outcome.failures["b"]) == "no"
    assert sorted(done) == ["a", "b", "c"]


def test_all_at_once_and_in_the_order_asked() -> None:
    barrier = threading.Barrier(20)
    outcome = fan_out(map(str, range(20)), lambda _: barrier.wait(limit()) >= 0, limit())
    assert list(outcome.results) == [str(n) for n in range(20)]


def test_a_host_that_hangs_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once b has ended, all of the time has passed."""
    gone, now = threading.Event(), [100.0]
    monkeypatch.setattr(fanout, "time", SimpleNamespace(monotonic=lambda: now[0]))
    outcome = fan_out(
        ["a", "b"], lambda name: gone.wait() if name == "a" else True, limit(), lambda _: now.append(now.pop() + limit())
    )
    assert outcome.results == {"b": True}
    assert str(outcome.failures["a"]) == f"a did not finish within {limit():.0f} s"
    gone.set()


def test_the_first_that_answers() -> None:
    ended = threading.Event()

    def work(name: str) -> str:
        if name == "a":
            raise HostError(name, "does not answer")
        if name == "b":
            ended.wait()
        return name

    assert first_of("abc", work, 0.05, limit()) == "c"
    ended.set()


def test_none_that_answers() -> None:
    def work(name: str) -> str:
        raise HostError(name, "does not answer")

    with pytest.raises(HostError, match="a does not answer"):
        first_of("abc", work, 0.05, limit())


def test_how_failures_are_told() -> None:
    failures: dict[str, BaseException] = {
        "a": HostError("a", "(10.0.0.1) ended with exit code 1", 1, "noise\n tar: no space left\n"),
        "b": ValueError("odd"),
    }
    error = HostsError(failures, "run pulumi up", UsageError.code)
    assert str(error) == "a (10.0.0.1) ended with exit code 1:  tar: no space left; b odd: run pulumi up"
    assert error.code == 2


def test_work_in_the_background() -> None:
    assert Background(lambda: 7).join(10) == 7

    def fails() -> int:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        Background(fails).join(10)
    goes_on = threading.Event()
    with pytest.raises(TimeoutError, match="it takes longer than 0 s"):
        Background(lambda: goes_on.wait(10)).join(0.01)
    goes_on.set()
