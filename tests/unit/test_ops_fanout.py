"""Check fan_out: each host ends in a result or an error, within the time limit."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from waiting import limit

from jobs.background import Background
from ops.cluster import fanout
from ops.cluster.fanout import fan_out, first_of
from ops.errors import HostError, HostsError, UsageError


def test_one_failure_does_not_stop_other_hosts() -> None:
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


def test_hosts_run_in_parallel_and_results_keep_the_order() -> None:
    barrier = threading.Barrier(20)
    outcome = fan_out(map(str, range(20)), lambda _: barrier.wait(limit()) >= 0, limit())
    assert list(outcome.results) == [str(n) for n in range(20)]


def test_a_hanging_host_does_not_delay_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Advance the clock past the limit once b has ended."""
    never, clock = threading.Event(), [100.0]
    monkeypatch.setattr(fanout, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    outcome = fan_out(
        ["a", "b"], lambda name: never.wait() if name == "a" else True, limit(), lambda _: clock.append(clock.pop() + limit())
    )
    assert outcome.results == {"b": True}
    assert str(outcome.failures["a"]) == f"a did not finish within {limit():.0f} s"
    never.set()


def test_first_of_returns_the_first_answer() -> None:
    done_event = threading.Event()

    def work(name: str) -> str:
        if name == "a":
            raise HostError(name, "does not answer")
        if name == "b":
            done_event.wait()
        return name

    assert first_of("abc", work, 0.05, limit()) == "c"
    done_event.set()


def test_first_of_fails_if_no_host_answers() -> None:
    def work(name: str) -> str:
        raise HostError(name, "does not answer")

    with pytest.raises(HostError, match="a does not answer"):
        first_of("abc", work, 0.05, limit())


def test_failures_are_formatted_in_one_line() -> None:
    failures: dict[str, BaseException] = {
        "a": HostError("a", "(10.0.0.1) ended with exit code 1", 1, "noise\n tar: no space left\n"),
        "b": ValueError("odd"),
    }
    error = HostsError(failures, "run pulumi up", UsageError.code)
    assert str(error) == "a (10.0.0.1) ended with exit code 1:  tar: no space left; b odd: run pulumi up"
    assert error.code == 2


def test_background_returns_raises_and_times_out() -> None:
    assert Background(lambda: 7).join(10) == 7

    def fail() -> int:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        Background(fail).join(10)
    stop = threading.Event()
    with pytest.raises(TimeoutError, match="it takes longer than 0 s"):
        Background(lambda: stop.wait(10)).join(0.01)
    stop.set()
