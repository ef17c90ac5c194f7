"""The deletion and change of a host through any error of LXD, a fake here and real in tests/e2e."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pylxd.exceptions import LXDAPIException, NotFound

from infra.lxd import host
from infra.lxd.api import LxdError


def _refusal(status: int, text: str) -> Any:
    return SimpleNamespace(status_code=status, text=text, json=lambda: {"error": text})


BUSY = LXDAPIException(_refusal(400, "Failed to remove subvolume: device or resource busy"))
OPERATION = NotFound(_refusal(404, "Operation not found"))


class Instance:
    """A running instance; its stop and deletion raise these errors first, though they may have succeeded."""

    def __init__(self, *stops: Exception, deletes: list[Exception] | None = None) -> None:
        self.status, self.there = "Running", True
        self.stops, self.deletes = list(stops), deletes or []

    def get(self, name: str) -> Instance:
        if not self.there:
            raise NotFound(_refusal(404, "Instance not found"))
        return self

    def stop(self, force: bool, wait: bool) -> None:
        assert (force, wait) == (True, True)
        if self.stops:
            raise self.stops.pop(0)
        self.status = "Stopped"

    def delete(self, wait: bool) -> None:
        assert self.status == "Stopped", "LXD deletes none that runs"
        if self.deletes:
            raise self.deletes.pop(0)
        self.there = False


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr("time.sleep", found.append)
    return found


def _delete(monkeypatch: pytest.MonkeyPatch, instance: Instance) -> None:
    monkeypatch.setattr(host, "client", lambda project: SimpleNamespace(instances=instance))
    host.delete("serving-0", {"project": "scaletier-local-abcdef"})


@pytest.mark.parametrize(
    ("instance", "pauses"),
    [
        (Instance(), 0),
        (Instance(BUSY, BUSY), 2),
        (Instance(OPERATION), 1),
        (Instance(deletes=[BUSY, OPERATION]), 2),
        (Instance(BUSY, deletes=[BUSY]), 2),
    ],
    ids=["at once", "busy as it stops", "an operation that ended long ago", "busy as it goes", "both"],
)
def test_a_host_goes_though_lxd_is_busy_for_a_while(
    monkeypatch: pytest.MonkeyPatch, slept: list[float], instance: Instance, pauses: int
) -> None:
    _delete(monkeypatch, instance)
    assert (instance.there, len(slept)) == (False, pauses)
    _delete(monkeypatch, instance)
    assert len(slept) == pauses, "one that is gone is gone"


def test_what_lxd_refuses_again_and_again_is_told(monkeypatch: pytest.MonkeyPatch, slept: list[float]) -> None:
    with pytest.raises(LxdError, match="host serving-0: Failed to remove subvolume: device or resource busy"):
        _delete(monkeypatch, Instance(deletes=[BUSY] * 10))
    assert 10 < sum(slept) < 30


def test_a_change_of_a_host_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its limits and labels become the new ones; what LXD or somebody else has written into its configuration stays."""
    config = {"limits.memory": "1", "user.label.old": "x", "volatile.uuid": "7", host.ALLOWANCE: "20ms/100ms"}
    saved: list[tuple[dict[str, str], Any]] = []
    instance = SimpleNamespace(config=config, devices={})
    instance.save = lambda wait: saved.append((instance.config, instance.devices))
    monkeypatch.setattr(host, "client", lambda project: SimpleNamespace(instances=SimpleNamespace(get=lambda name: instance)))
    monkeypatch.setattr(host, "definition", lambda props: {"devices": {"root": props["name"]}})
    monkeypatch.setattr(host, "_start", lambda project, name, props: {**props, "running": True})
    new = {"project": "p", "name": "ps-0", "cpus": 2, "memory": 5, "machineType": "n1-standard-4", "labels": {"new": "y"}}
    assert host.update("ps-0", {}, new)["running"]
    (told, devices), *more = saved
    assert (devices, more) == ({"root": "ps-0"}, [])
    assert (told["limits.memory"], told["user.label.new"], told["volatile.uuid"]) == ("5", "y", "7")
    assert told.keys().isdisjoint({"user.label.old", host.ALLOWANCE})
