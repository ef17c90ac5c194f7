"""The deletion and change of a host despite errors of LXD, which is a fake here; tests/e2e uses the real one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pylxd.exceptions import LXDAPIException, NotFound

from infra.dynamic import ModuleProvider
from infra.lxd import host, removal
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
    monkeypatch.setattr(removal, "client", lambda project: SimpleNamespace(instances=instance))
    monkeypatch.setattr(host, "check_again", lambda _: None)
    host.delete("serving-0", {"project": "scaletier-local-abcdef", "pool": "fast", "bucket": "bucket"})


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
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0]


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


PROJECT, IMAGE = "scaletier-local-abcdef", "scaletier-0123456789ab"
PROPS: dict[str, Any] = {
    "project": PROJECT,
    "name": "ps-0",
    "image": IMAGE,
    "pool": "fast",
    "bridge": "stabcdef",
    "port": "stabcdefp0",
    "address": "10.77.0.64",
    "gateway": "10.77.0.1",
    "bucket": "bucket",
    "runtime": "/here/runtime",
    "runtimes": "/here/runtimes",
    "authorizedKey": "ssh-ed25519 AAAA",
    "firewall": "table inet t",
    "machineType": "n1-standard-4",
    "cpus": 2,
    "memory": 2**30,
    "disk": 2**32,
    "labels": {"team": "vision"},
}
DEFINITION = {
    "name": "ps-0",
    "type": "container",
    "source": {"type": "image", "alias": IMAGE},
    "profiles": [],
    "config": {
        "limits.cpu": "2",
        "limits.memory": str(2**30),
        "user.scaletier.machine-type": "n1-standard-4",
        "user.label.team": "vision",
        "user.scaletier.authorized-key": "ssh-ed25519 AAAA",
        "user.scaletier.firewall": "table inet t",
        "user.scaletier.network": "10.77.0.0/24",
        "boot.autostart": "false",
        "raw.lxc": "lxc.net.0.ipv4.address = 10.77.0.64/24\nlxc.net.0.ipv4.gateway = 10.77.0.1",
    },
    "devices": {
        "root": {"type": "disk", "path": "/", "pool": "fast", "size": str(2**32)},
        "eth0": {
            "type": "nic",
            "name": "eth0",
            "nictype": "bridged",
            "parent": "stabcdef",
            "host_name": "stabcdefp0",
            "ipv4.address": "10.77.0.64",
            "security.ipv4_filtering": "true",
            "security.mac_filtering": "true",
        },
        "bucket": {"type": "disk", "pool": "fast", "source": "bucket", "path": "/bucket"},
        "runtime": {"type": "disk", "source": "/here/runtime", "path": "/opt/scaletier/venv", "readonly": "true"},
        "runtimes": {"type": "disk", "source": "/here/runtimes", "path": "/opt/scaletier/runtimes", "readonly": "true"},
    },
}


class Lxd:
    """LXD with the instances of one project, and what was done with them."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.present: dict[str, SimpleNamespace] = {}

    def client(self, project: str = "default") -> SimpleNamespace:
        assert project in (PROJECT, "default")
        images = SimpleNamespace(get_by_alias={IMAGE: SimpleNamespace(fingerprint="f1")}.get)
        projects = SimpleNamespace(exists=lambda name: name == PROJECT)
        return SimpleNamespace(instances=self, images=images, projects=projects)

    def exists(self, name: str) -> bool:
        return name in self.present

    def all(self) -> list[SimpleNamespace]:
        return list(self.present.values())

    def get(self, name: str) -> SimpleNamespace:
        if name not in self.present:
            raise NotFound(_refusal(404, "Instance not found"))
        return SimpleNamespace(**vars(self.present[name]))  # as it is now

    def create(self, definition: dict[str, Any], wait: bool) -> None:
        assert wait
        self.add(
            definition["name"], config={**definition["config"], "volatile.base_image": "f1"}, devices=definition["devices"]
        )
        self.done.append("create")

    def add(self, name: str, **fields: Any) -> SimpleNamespace:
        def call(what: str, **changes: str) -> Any:
            def run(wait: bool, force: bool = True) -> None:
                assert (wait, force) == (True, True)
                self.done.append(what)
                vars(instance).update(changes)
                if what == "start":
                    instance.last_used_at = f"started {self.done.count('start')}"
                if what == "delete":
                    del self.present[name]

            return run

        instance = SimpleNamespace(
            name=name, status="Stopped", config={}, devices={}, created_at="created", last_used_at="never"
        )
        instance.start, instance.stop = call("start", status="Running"), call("stop", status="Stopped")
        instance.delete, instance.save = call("delete"), call("save")
        instance.unfreeze = call("unfreeze", status="Running")
        vars(instance).update(fields)
        self.present[name] = instance
        return instance


@pytest.fixture
def lxd(monkeypatch: pytest.MonkeyPatch) -> Lxd:
    lxd = Lxd()
    for module in (host, removal):
        monkeypatch.setattr(module, "client", lxd.client)
    return lxd


def test_the_definition_of_a_host_is_complete() -> None:
    assert host.definition(PROPS) == DEFINITION
    shares = [host.limits({**PROPS, "cpus": cpus}) for cpus in (1, 0.25, 0.05)]
    assert [(share.get("limits.cpu"), share.get("limits.cpu.allowance")) for share in shares] == [
        ("1", None),
        (None, "25ms/100ms"),
        (None, "5ms/100ms"),
    ]


def test_a_host_is_created_read_and_adopted(lxd: Lxd) -> None:
    assert host.read("ps-0", PROPS) is None
    made = {**PROPS, "running": True, "created": "created", "started": "started 1"}
    assert host.create(PROPS) == ("ps-0", made)
    assert lxd.done == ["create", "start"]
    assert (lxd.present["ps-0"].config, lxd.present["ps-0"].devices) == (
        {**DEFINITION["config"], "volatile.base_image": "f1"},  # type: ignore[dict-item]
        DEFINITION["devices"],
    )
    assert host.read("ps-0", made) == made
    assert host.create(PROPS) == ("ps-0", made), "an interrupted run left it"
    assert lxd.done == ["create", "start", "save"]


def test_a_paused_host_is_resumed(lxd: Lxd) -> None:
    _, made = host.create(PROPS)
    lxd.present["ps-0"].status = "Frozen"
    lxd.done.clear()
    paused = host.read("ps-0", made)
    assert paused == {**made, "running": False}
    assert host.update("ps-0", paused, made) == made
    assert lxd.done == ["save", "unfreeze"]


@pytest.mark.parametrize(
    ("key", "value", "replaced"),
    [
        ("runtime", "/there/runtime", False),
        ("runtime", "/here/runtime-2", True),
        ("runtimes", "/there/runtimes", False),
        ("image", "scaletier-another", True),
        ("memory", 1, False),
    ],
)
def test_a_checkout_in_another_folder_replaces_no_host(key: str, value: Any, replaced: bool) -> None:
    diff = ModuleProvider(host.__name__).diff("ps-0", PROPS, {**PROPS, key: value})
    assert (diff.changes, diff.replaces) == (True, [key] if replaced else [])


@pytest.mark.parametrize(
    ("part", "key", "value", "recreated"),
    [
        ("config", "volatile.base_image", "another", True),
        ("config", "user.scaletier.firewall", "", True),
        ("devices", "eth0", {}, True),
        ("config", "limits.memory", "1", False),
        ("config", "user.of.somebody", "x", False),
    ],
)
def test_a_host_of_another_definition_is_created_again(lxd: Lxd, part: str, key: str, value: Any, recreated: bool) -> None:
    host.create(PROPS)
    lxd.done.clear()
    changed = {**getattr(lxd.present["ps-0"], part), key: value}
    setattr(lxd.present["ps-0"], part, changed)
    host.create(PROPS)
    assert lxd.done == (["stop", "delete", "create", "start"] if recreated else ["save"])


def test_what_was_changed_by_hand_is_read(lxd: Lxd) -> None:
    config = {"limits.cpu.allowance": "25ms/100ms", "limits.memory": "2GiB"}
    lxd.add("ps-0", config=config, devices={"root": {"size": "5"}})
    facts = {"memory": "2GiB", "disk": 5, "running": False, "created": "created", "started": "never"}
    assert host.read("ps-0", PROPS) == {**PROPS, **facts, "cpus": 0.25}
    lxd.add("ps-0", status="Running", config={"limits.cpu": "0-1"})
    assert host.read("ps-0", PROPS) == {**PROPS, **facts, "cpus": "0-1", "memory": "", "disk": "", "running": True}


def test_all_instances_of_a_project_are_removed(lxd: Lxd) -> None:
    lxd.add("ps-0", status="Running")
    lxd.add("mine")
    removal.purge("scaletier-gone-111111")
    assert lxd.done == []
    removal.purge(PROJECT)
    assert (lxd.done, lxd.present) == (["stop", "delete", "delete"], {})


def test_only_hosts_that_are_not_known_are_unrecorded(lxd: Lxd, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("worker-1", "ps-0", "master-0"):
        lxd.add(name, config={"user.scaletier.machine-type": "n1-standard-4"})
    lxd.add("mine")
    monkeypatch.setattr(host, "hosts_of", lambda _: ["worker-1", "ps-0", "master-0", "mine", "going"])
    assert host.unrecorded_hosts(PROJECT, ["master-0"]) == ["ps-0", "worker-1"]
