"""The deletion and change of a host despite errors of LXD, which is a fake here; tests/e2e uses the real one."""

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
    """A running instance; its stop and deletion first raise these errors."""

    def __init__(self, *stops: Exception, deletes: list[Exception] | None = None) -> None:
        self.status, self.present = "Running", True
        self.stops, self.deletes = list(stops), deletes or []

    def get(self, name: str) -> Instance:
        if not self.present:
            raise NotFound(_refusal(404, "Instance not found"))
        return self

    def stop(self, force: bool, wait: bool) -> None:
        assert (force, wait) == (True, True)
        if self.stops:
            raise self.stops.pop(0)
        self.status = "Stopped"

    def delete(self, wait: bool) -> None:
        assert self.status == "Stopped", "LXD deletes no running instance"
        if self.deletes:
            raise self.deletes.pop(0)
        self.present = False


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    return pauses


def _delete(monkeypatch: pytest.MonkeyPatch, instance: Instance) -> None:
    monkeypatch.setattr(host, "client", lambda project: SimpleNamespace(instances=instance))
    host.delete("serving-0", {"project": "scaletier-local-abcdef"})


@pytest.mark.parametrize(
    ("instance", "pause_count"),
    [
        (Instance(), 0),
        (Instance(BUSY, BUSY), 2),
        (Instance(OPERATION), 1),
        (Instance(deletes=[BUSY, OPERATION]), 2),
        (Instance(BUSY, deletes=[BUSY]), 2),
    ],
    ids=["at once", "busy as it stops", "an operation that ended long ago", "busy as it goes", "both"],
)
def test_a_host_is_deleted_though_lxd_is_busy(
    monkeypatch: pytest.MonkeyPatch, pauses: list[float], instance: Instance, pause_count: int
) -> None:
    _delete(monkeypatch, instance)
    assert (instance.present, len(pauses)) == (False, pause_count)
    _delete(monkeypatch, instance)
    assert len(pauses) == pause_count, "a deleted host needs no retry"


def test_a_repeated_refusal_of_lxd_is_an_error(monkeypatch: pytest.MonkeyPatch, pauses: list[float]) -> None:
    with pytest.raises(LxdError, match="host serving-0: Failed to remove subvolume: device or resource busy"):
        _delete(monkeypatch, Instance(deletes=[BUSY] * 10))
    assert 10 < sum(pauses) < 30


def test_a_change_of_a_host_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits and labels are replaced; other keys of LXD or of users are unchanged."""
    config = {"limits.memory": "1", "user.label.old": "x", "volatile.uuid": "7", host.ALLOWANCE: "20ms/100ms"}
    saved: list[tuple[dict[str, str], Any]] = []
    instance = SimpleNamespace(config=config, devices={})
    instance.save = lambda wait: saved.append((instance.config, instance.devices))
    monkeypatch.setattr(host, "client", lambda project: SimpleNamespace(instances=SimpleNamespace(get=lambda name: instance)))
    monkeypatch.setattr(host, "definition", lambda props: {"devices": {"root": props["name"]}})
    monkeypatch.setattr(host, "_start", lambda project, name, props: {**props, "running": True})
    new = {"project": "p", "name": "ps-0", "cpus": 2, "memory": 5, "machineType": "n1-standard-4", "labels": {"new": "y"}}
    assert host.update("ps-0", {}, new)["running"]
    (config_saved, devices), *more = saved
    assert (devices, more) == ({"root": "ps-0"}, [])
    assert (config_saved["limits.memory"], config_saved["user.label.new"], config_saved["volatile.uuid"]) == ("5", "y", "7")
    assert config_saved.keys().isdisjoint({"user.label.old", host.ALLOWANCE})
