"""Check the start of hosts by the operator: the token, and the wait."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from shared_fakes import Clock

from infra.inventory import Inventory, PowerAccess
from jobs.host_power import NoAnswerError, PowerError
from ops import terminal
from ops.cluster import power_on
from ops.cluster.fanout import Outcome
from ops.errors import HostError, SeveralHostsError, UsageError

POWER = PowerAccess(
    url="https://api/",
    operator_url="http://own/",
    token="http://token",
    token_command="echo t1",
    preempted="http://preempted",
    headers={"Flavor": "G"},
)


class Fleet:
    """Hosts that answer from a given time on."""

    def __init__(self, clock: Clock, **answers_at: float) -> None:
        self.clock, self.answers_at = clock, answers_at

    def connect_each(self, names: Sequence[str], done: Any = None) -> Outcome[Any]:
        late = {name: HostError(name, "does not answer") for name in names if self.clock() < self.answers_at[name[:-2]]}
        return Outcome({}, dict(late))


def test_the_wait_ends_when_all_answer_or_time_is_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=lambda: 100.0))
    fleet: Any = Fleet(clock, worker=1040.0, ps=1000.0 + power_on.START_SECONDS + 10)
    assert power_on.start_and_wait(fleet, ["worker-0"], lambda _: None, clock.sleep, clock) == {}
    assert clock() == 1040.0
    assert capsys.readouterr().err.splitlines()[-1] == "starting 1 host 1 of 1 (0.0 s)"
    clock.now = 1000.0
    failures = power_on.start_and_wait(fleet, ["worker-0", "ps-0"], lambda _: None, clock.sleep, clock)
    assert ({*failures}, clock()) == ({"ps-0"}, 1000.0 + power_on.START_SECONDS)
    assert capsys.readouterr().err.splitlines()[-1] == "starting 2 hosts 1 of 2 (0.0 s)"


def test_a_silent_host_is_started_again_each_minute() -> None:
    clock, calls = Clock(), list[tuple[str, float]]()

    def start(name: str) -> None:
        calls.append((name, clock() - 1000.0))
        if clock() > 1000.0:
            raise PowerError("HTTP 400, not ready")

    fleet: Any = Fleet(clock, worker=1010.0, ps=1150.0)
    assert power_on.start_and_wait(fleet, ["worker-0", "ps-0"], start, clock.sleep, clock) == {}
    assert sorted(calls) == [("ps-0", 0.0), ("ps-0", 60.0), ("ps-0", 120.0), ("worker-0", 0.0)]


def test_a_start_without_an_answer_is_retried(capsys: pytest.CaptureFixture[str]) -> None:
    clock, calls = Clock(), list[float]()

    def start(name: str) -> None:
        calls.append(clock() - 1000.0)
        if len(calls) < 3:
            raise NoAnswerError("api does not answer (timed out)")

    fleet: Any = Fleet(clock, worker=1040.0)
    assert power_on.start_and_wait(fleet, ["worker-0"], start, clock.sleep, clock) == {}
    assert calls == [0.0, 0.0, 5.0], "retried until the API answers"
    message = "worker-0 may not be started: api does not answer (timed out); it is asked for again\n"
    assert message in capsys.readouterr().err


def test_a_refused_start_is_one_line() -> None:
    def start(name: str) -> None:
        raise PowerError("HTTP 403, no right")

    with pytest.raises(SeveralHostsError, match=r"^ps-0 is not started: HTTP 403, no right$") as error:
        power_on.start_and_wait(Fleet(Clock()), ["ps-0"], start)  # type: ignore[arg-type]
    assert error.value.code == 2


@pytest.mark.parametrize(
    ("command", "reason"),
    [("echo no login >&2; exit 1", "no login"), ("exit 3", "it ended with 3"), ("true", "it ended with 0")],
)
def test_a_failed_token_command_is_one_line(command: str, reason: str) -> None:
    with pytest.raises(UsageError) as error:
        power_on._token(replace(POWER, token_command=command))
    assert str(error.value) == f"`{command}` gives no token ({reason})"
    assert power_on._token(POWER) == "t1"


def test_a_token_command_that_hangs_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(argv: list[str], timeout: float, **_: object) -> None:
        raise subprocess.TimeoutExpired(argv, timeout)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(UsageError, match=r"^`echo t1` gives no token within 60 s$"):
        power_on._token(POWER)


def test_the_operator_s_token_is_asked_for_once(inventory: Inventory, monkeypatch: pytest.MonkeyPatch) -> None:
    requests, tokens = list[tuple[str, object]](), list[PowerAccess]()

    def fetch(url: str, headers: object, *_: object) -> bytes:
        requests.append((url, headers))
        return b"{}"

    def token(power: PowerAccess) -> str:
        tokens.append(power)
        return "t1"

    monkeypatch.setattr("jobs.host_power._fetch", fetch)
    monkeypatch.setattr(power_on, "_token", token)
    hosts = tuple(replace(host, start=f"{host.name}/start") for host in inventory.hosts)
    fleet: Any = Fleet(Clock(), worker=0, ps=0)
    fleet.inventory = replace(inventory, hosts=hosts, power=POWER)
    assert power_on.start_and_wait(fleet, ["worker-0", "ps-0"]) == {}
    header = {"Authorization": "Bearer t1"}
    assert sorted(requests) == [("http://own/ps-0/start", header), ("http://own/worker-0/start", header)]
    assert tokens == [POWER]


def test_no_host_is_asked_without_a_token(inventory: Inventory, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*_: object) -> bytes:
        raise AssertionError("no request is sent")

    monkeypatch.setattr("jobs.host_power._fetch", fetch)
    hosts = tuple(replace(host, start=f"{host.name}/start") for host in inventory.hosts)
    fleet: Any = Fleet(Clock(), worker=0, ps=0)
    fleet.inventory = replace(inventory, hosts=hosts, power=replace(POWER, token_command="exit 3"))
    with pytest.raises(UsageError, match=r"^`exit 3` gives no token \(it ended with 3\)$"):
        power_on.start_and_wait(fleet, ["worker-0", "ps-0"])


def test_hosts_and_the_operator_use_different_urls(inventory: Inventory) -> None:
    hosts = tuple(replace(host, start=f"{host.name}/start" if host.name != "ps-0" else None) for host in inventory.hosts)
    stack = replace(inventory, hosts=hosts, power=POWER)
    power, operator_power = stack.start_requests(), stack.start_requests(operator=True)
    assert power is not None
    assert operator_power is not None
    assert power.starts["worker-0"] == "https://api/worker-0/start"
    assert operator_power.starts["worker-0"] == "http://own/worker-0/start"
    assert "ps-0" not in power.starts
    assert (power.token, power.preempted, power.headers) == ("http://token", "http://preempted", {"Flavor": "G"})
    assert power_on.startable_hosts(stack, ["ps-0", "worker-1"]) == ["worker-1"]
    assert inventory.start_requests() is None
    assert power_on.startable_hosts(inventory, ["worker-1"]) == []
