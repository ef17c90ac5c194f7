"""Check fan_out: each host ends in a result or an error, within the time limit."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import limit

from jobs.background import Background
from ops.cluster import fanout
from ops.cluster.fanout import fan_out, first_of
from ops.errors import HostError, SeveralHostsError, UsageError


class CountedQueue(queue.SimpleQueue[Any]):
    """A queue that is read no more often than there are names: another read would wait in vain."""

    reads = 0

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        CountedQueue.reads += 1
        return super().get(block, limit())


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return how often a queue was read since the last call."""
    monkeypatch.setattr(fanout, "queue", SimpleNamespace(SimpleQueue=CountedQueue, Empty=queue.Empty))

    def count() -> int:
        reads, CountedQueue.reads = CountedQueue.reads, 0
        return reads

    count()
    return count


def test_the_work_ends_with_its_last_name(reads: Callable[[], int]) -> None:
    def work(name: str) -> str:
        assert threading.current_thread().daemon, "a host that hangs does not keep the command from its end"
        assert threading.current_thread().name == name
        if name in "bd":
            raise ValueError(name)
        return name

    done = list[str]()
    outcome = fan_out("abcd", work, limit(), done.append)
    assert (outcome.results, list(outcome.failures), reads()) == ({"a": "a", "c": "c"}, ["b", "d"], 4)
    assert (str(outcome.failures["b"]), sorted(done)) == ("b", ["a", "b", "c", "d"])
    assert (fan_out("", work, limit()), reads()) == (fanout.Outcome({}, {}), 0)
    assert (first_of("bdac", work, limit(), limit()), reads()) == ("a", 3)
    with pytest.raises(ValueError, match="b"):
        first_of("bd", work, limit(), limit())
    assert reads() == 2


def test_failures_are_in_the_order_of_the_names() -> None:
    first, second = threading.Event(), threading.Event()

    def work(name: str) -> None:
        if name == "a":
            first.wait(limit())
        if name == "b":
            second.wait(limit())
        if name in "bd":
            raise ValueError(name)

    ended = {"d": second, "b": first}
    outcome = fan_out("abcd", work, limit(), lambda name: ended[name].set() if name in ended else None)
    assert (list(outcome.results), list(outcome.failures)) == (["a", "c"], ["b", "d"])


def test_without_an_answer_first_of_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    never, clock = threading.Event(), iter(range(10))
    monkeypatch.setattr(fanout, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    with pytest.raises(TimeoutError, match=r"^nothing answers within 3 s$"):
        first_of("ab", lambda _: never.wait(), 0, 3)
    never.set()


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


def test_failures_are_formatted_in_one_line() -> None:
    failures: dict[str, BaseException] = {
        "a": HostError("a", "(10.0.0.1) ended with exit code 1", 1, "noise\n tar: no space left\n"),
        "b": ValueError("odd"),
    }
    error = SeveralHostsError(failures, "run pulumi up", UsageError.code)
    assert str(error) == "a (10.0.0.1) ended with exit code 1:  tar: no space left; b odd: run pulumi up"
    assert error.code == 2


def test_background_returns_raises_and_times_out() -> None:
    assert Background(lambda: 7).join(limit()) == 7

    def fail() -> int:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        Background(fail).join(limit())
    stop = threading.Event()
    with pytest.raises(TimeoutError, match="it takes longer than 0 s"):
        Background(lambda: stop.wait(limit())).join(0.01)
    stop.set()
