"""The wait for hosts: as long as one after the other begins to answer; LXD and ssh are fakes here."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from replicahosts import Clock

from infra.dynamic import ModuleProvider, Props, changes
from infra.lxd import host, ready
from infra.lxd.api import LxdError


@pytest.fixture
def answers_at(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Return the seconds after which a host answers, by address."""
    clock, found = Clock(), dict[str, float]()
    began = clock()
    monkeypatch.setattr(ready.time, "monotonic", clock)
    monkeypatch.setattr(ready.time, "sleep", lambda _: clock.pass_(1.0))
    monkeypatch.setattr(ready, "ThreadPoolExecutor", lambda _: ThreadPoolExecutor(1))  # one after the other
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


@pytest.fixture
def project(monkeypatch: pytest.MonkeyPatch, answers_at: dict[str, float]) -> list[str]:
    """Return the instances in the stack's LXD project, by name; one is not ours."""
    names = ["mine"]
    answers_at |= {f"10.0.0.{number}": 0.0 for number in range(1, 9)}

    def get(name: str) -> SimpleNamespace:
        return SimpleNamespace(config={} if name == "mine" else {"user.scaletier.machine-type": "n1-standard-4"})

    instances = SimpleNamespace(exists=lambda name: name in names, get=get)
    monkeypatch.setattr(host, "client", lambda _: SimpleNamespace(instances=instances))
    monkeypatch.setattr(host, "hosts_of", lambda _: [*names])
    monkeypatch.setattr(host, "remove", lambda _, name: names.remove(name))
    return names


def props(*hosts: str) -> Props:
    return {"project": "p", "hosts": {name: f"10.0.0.{n}" for n, name in enumerate(hosts, 1)}, "unrecorded": []}


def test_what_a_killed_update_left_is_found_by_the_next_and_goes(project: list[str]) -> None:
    """Whatever the configuration became meanwhile, and also one that was to be replaced; nothing that is not a host."""
    project += ["master-0", "worker-0", "worker-1", "worker-2", "worker-3"]
    before = props("master-0", "worker-0")
    found = ready.read("ready", before)
    assert found == {**before, "unrecorded": ["worker-1", "worker-2", "worker-3"]}
    after = props("master-0", "worker-1")
    assert changes(found, after), "so the next update of the stack updates it"
    made = ModuleProvider(ready.__name__).update("ready", found, after).outs
    assert project == ["mine", "master-0", "worker-1"]
    assert made["unrecorded"] == []
    assert set(made["hostKeys"]) == {"10.0.0.1", "10.0.0.2"}


def test_what_the_first_update_left_goes_too(project: list[str]) -> None:
    project += ["master-0", "worker-0", "worker-1"]
    _, made = ready.create(props("master-0"))
    assert project == ["mine", "master-0"]
    assert ready.read("ready", made) == made, "nothing is left to do"
