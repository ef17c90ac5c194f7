"""How long hosts are waited for: as long as one after the other begins to answer; LXD and ssh are fakes here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self

import pytest
from replicahosts import Clock

from infra.lxd import ready
from infra.lxd.api import LxdError


class OneByOne:
    """A pool that does one thing after the other."""

    def __init__(self, _: int) -> None:
        """There are no threads."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """There is nothing to end."""

    def map(self, work: Callable[[Any], Any], things: Iterable[Any]) -> list[Any]:
        return [work(each) for each in things]


@pytest.fixture
def answers_at(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """By address the seconds after which a host answers."""
    clock, found = Clock(), dict[str, float]()
    began = clock()
    monkeypatch.setattr(ready.time, "monotonic", clock)
    monkeypatch.setattr(ready.time, "sleep", lambda _: clock.pass_(1.0))
    monkeypatch.setattr(ready, "ThreadPoolExecutor", OneByOne)
    monkeypatch.setattr(ready, "_answers", lambda address: clock() - began >= found[address])
    monkeypatch.setattr(ready, "_host_key", lambda project, name: f"key of {name}")
    return found


def test_hosts_may_take_long_as_long_as_one_comes_after_the_other(answers_at: dict[str, float]) -> None:
    answers_at |= {f"10.0.0.{number}": 150.0 * number for number in range(1, 6)}
    hosts = {f"worker-{number}": address for number, address in enumerate(answers_at)}
    assert ready.wait("p", hosts) == {address: f"key of {name}" for name, address in hosts.items()}


def test_those_that_stay_silent_are_named(answers_at: dict[str, float]) -> None:
    answers_at |= {"10.0.0.1": 100.0, "10.0.0.2": 1e9, "10.0.0.3": 1e9}
    with pytest.raises(LxdError, match=r"^no ssh on worker-1, worker-2, and on no other host for 180 s: see `lxc console "):
        ready.wait("p", {f"worker-{number}": address for number, address in enumerate(answers_at)})
