"""The wait for hosts, which lasts while further hosts start to answer; LXD and ssh are fakes here."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Self

import pytest
from pylxd.exceptions import NotFound
from shared_fakes import Clock

from infra.dynamic import ModuleProvider, Props, changes
from infra.lxd import host, ready
from infra.lxd.api import LxdError


@pytest.fixture
def answer_times(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Return the seconds after which a host answers, by address, for tests to fill."""
    clock, seconds_by_address = Clock(), dict[str, float]()
    began = clock()
    monkeypatch.setattr(ready.time, "monotonic", clock)
    monkeypatch.setattr(ready.time, "sleep", lambda _: clock.sleep(1.0))
    monkeypatch.setattr(ready, "ThreadPoolExecutor", lambda _: ThreadPoolExecutor(1))  # one after the other
    monkeypatch.setattr(ready, "_answers", lambda address: clock() - began >= seconds_by_address[address])
    monkeypatch.setattr(ready, "_host_key", lambda project, name: f"key of {name}")
    return seconds_by_address


def test_the_wait_continues_while_hosts_start_to_answer(answer_times: dict[str, float]) -> None:
    answer_times |= {f"10.0.0.{number}": 150.0 * number for number in range(1, 6)}
    hosts = {f"worker-{number}": address for number, address in enumerate(answer_times)}
    assert ready.wait("p", hosts) == {address: f"key of {name}" for name, address in hosts.items()}


def test_hosts_that_never_answer_are_named(answer_times: dict[str, float]) -> None:
    answer_times |= {"10.0.0.1": 100.0, "10.0.0.2": 1e9, "10.0.0.3": 1e9}
    error = "no ssh on worker-1, worker-2, and on no other host for 180 s: see `lxc console --show-log worker-1 --project p`; "
    with pytest.raises(LxdError, match=f"^{error}"):
        ready.wait("p", {f"worker-{number}": address for number, address in enumerate(answer_times)})


@pytest.fixture
def project(monkeypatch: pytest.MonkeyPatch, answer_times: dict[str, float]) -> list[str]:
    """Return the names of instances in the stack's LXD project; one is not a host."""
    names = ["mine"]
    answer_times |= {f"10.0.0.{number}": 0.0 for number in range(1, 9)}

    def get(name: str) -> SimpleNamespace:
        return SimpleNamespace(config={} if name == "mine" else {"user.scaletier.machine-type": "n1-standard-4"})

    instances = SimpleNamespace(exists=lambda name: name in names, get=get)
    monkeypatch.setattr(host, "client", lambda _: SimpleNamespace(instances=instances))
    monkeypatch.setattr(host, "hosts_of", lambda _: [*names])
    monkeypatch.setattr(ready, "remove", lambda _, name: names.remove(name))
    return names


def props(*hosts: str) -> Props:
    return {"project": "p", "hosts": {name: f"10.0.0.{n}" for n, name in enumerate(hosts, 1)}, "unrecorded": []}


def test_hosts_of_a_killed_update_are_removed_by_the_next_one(project: list[str]) -> None:
    """Remove unrecorded hosts, also one that was to be replaced, but no other instance."""
    project += ["master-0", "worker-0", "worker-1", "worker-2", "worker-3"]
    before = props("master-0", "worker-0")
    drifted = ready.read("ready", before)
    assert drifted == {**before, "unrecorded": ["worker-1", "worker-2", "worker-3"]}
    after = props("master-0", "worker-1")
    assert changes(drifted, after), "the next pulumi up updates the resource"
    outputs = ModuleProvider(ready.__name__).update("ready", drifted, after).outs
    assert project == ["mine", "master-0", "worker-0", "worker-1"], "the engine deletes worker-0 after this, or protects it"
    assert outputs["unrecorded"] == []
    assert set(outputs["hostKeys"]) == {"10.0.0.1", "10.0.0.2"}
    drifted = ready.read("ready", outputs)
    assert drifted == {**outputs, "unrecorded": ["worker-0"]}, "the engine has deleted it, and a killed update created it again"
    ModuleProvider(ready.__name__).update("ready", drifted, after)
    assert project == ["mine", "master-0", "worker-1"]


def test_hosts_of_a_killed_first_update_are_removed(project: list[str]) -> None:
    project += ["master-0", "worker-0", "worker-1"]
    _, outputs = ready.create(props("master-0"))
    assert project == ["mine", "master-0"]
    assert ready.read("ready", outputs) == outputs, "there is no drift afterwards"


def test_all_hosts_are_awaited_at_once(answer_times: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    workers: list[int] = []
    monkeypatch.setattr(ready, "ThreadPoolExecutor", lambda count: workers.append(count) or ThreadPoolExecutor(1))
    answer_times |= {"10.0.0.1": 0.0, "10.0.0.2": 0.0}
    for hosts in ({}, {"ps-0": "10.0.0.1", "ps-1": "10.0.0.2"}):
        assert ready.wait("p", hosts).keys() == set(hosts.values())
    assert workers == [1, 2]


@pytest.mark.parametrize(("banner", "answers"), [(b"SSH-2.0-OpenSSH", True), (b"HTTP", False), (OSError("refused"), False)])
def test_a_host_answers_once_sshd_speaks(monkeypatch: pytest.MonkeyPatch, banner: bytes | OSError, answers: bool) -> None:
    class Connection:
        def __init__(self, address: tuple[str, int], timeout: float) -> None:
            assert (address, timeout) == (("10.0.0.1", 22), 5)
            if isinstance(banner, OSError):
                raise banner

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def recv(self, size: int) -> bytes:
            assert isinstance(banner, bytes)
            return banner[:size]

    monkeypatch.setattr(ready.socket, "create_connection", Connection)
    assert ready._answers("10.0.0.1") is answers


def test_a_host_key_is_read_by_lxd_without_its_comment(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(path: str) -> bytes:
        assert path == "/etc/ssh/ssh_host_ed25519_key.pub"
        if not keys:
            raise NotFound(SimpleNamespace(status_code=404, json=lambda: {"error": "not found"}))
        return keys.pop()

    keys = [b"ssh-ed25519 AAAA root@image\n"]
    instances = SimpleNamespace(get=lambda name: SimpleNamespace(files=SimpleNamespace(get=get)))
    monkeypatch.setattr(ready, "client", lambda project: SimpleNamespace(instances=instances))
    assert ready._host_key("p", "ps-0") == "ssh-ed25519 AAAA"
    with pytest.raises(LxdError, match=r"^ps-0 has no /etc/.*_ed25519_key\.pub: its image is not one of `make image`$"):
        ready._host_key("p", "ps-0")
