"""Requirements of this machine for local hosts, and their errors; LXD itself is a fake here."""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import socket
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from pylxd.exceptions import LXDAPIException

from infra.lxd import api, image, network, preflight
from infra.lxd.api import LxdError
from infra.lxd.config import LxdConfig
from infra.lxd.firewall import forward_drops
from infra.lxd.layout import LxdNames
from infra.scale_tiers import ClusterSpec, ScaleTier, preset
from infra.state import StackState

NAMES = LxdNames("scaletier-local-abcdef")
STATE = StackState({"urn::identity": {"type": "pulumi-python:dynamic/lxd:Identity", "outputs": {"project": NAMES.project}}})


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the machine's interfaces, for tests to fill."""
    interfaces: dict[str, Any] = {}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    return interfaces


def _inet(address: str) -> list[SimpleNamespace]:
    return [SimpleNamespace(family=socket.AF_INET, address=address, netmask="255.255.255.0")]


def test_a_used_range_is_refused_with_its_owner(interfaces: dict[str, Any]) -> None:
    interfaces["eth7"] = _inet("10.77.0.9")
    with pytest.raises(LxdError, match=r"address range 10\.77\.0\.0/24 is taken: eth7 .* has 10\.77\.0\.0/24"):
        network.choose_range(NAMES.project, NAMES.bridge, ipaddress.IPv4Network("10.77.0.0/24"))


def test_an_unused_range_is_chosen_and_kept(interfaces: dict[str, Any]) -> None:
    first = network.choose_range(NAMES.project, NAMES.bridge, None)
    interfaces["eth7"] = _inet(str(first[9]))
    second = network.choose_range(NAMES.project, NAMES.bridge, None)
    assert not second.overlaps(first)
    interfaces[NAMES.bridge] = _inet(str(second[1]))
    assert network.choose_range(NAMES.project, NAMES.bridge, None) == second
    assert network.choose_range(NAMES.project, NAMES.bridge, second) == second


def test_only_ipv4_ranges_of_this_machine_count(interfaces: dict[str, Any]) -> None:
    interfaces["eth0"] = [
        SimpleNamespace(family=socket.AF_INET6, address="fe80::1", netmask="ffff::"),
        SimpleNamespace(family=socket.AF_INET, address="10.77.0.9", netmask=None),
    ]
    wanted = ipaddress.IPv4Network("10.77.0.0/24")
    assert network.choose_range(NAMES.project, NAMES.bridge, wanted) == wanted
    interfaces["eth1"] = [SimpleNamespace(family=socket.AF_INET, address="10.9.9.9", netmask="255.0.0.0")]
    with pytest.raises(LxdError, match=r"^no free private /24 range on this machine: set one with `pulumi config set network"):
        network.choose_range(NAMES.project, NAMES.bridge, None)


class Bridge:
    """LXD's networks with one bridge and its device; its deletion may fail first."""

    def __init__(self, interfaces: dict[str, Any], *refusals: str) -> None:
        self.interfaces, self.refusals = interfaces, list(refusals)
        self.config: dict[str, str] = {}
        self.present, self.saved, self.deletions = False, dict[str, str](), 0

    def exists(self, name: str) -> bool:
        assert name == NAMES.bridge
        return self.present

    def create(self, name: str, description: str, type: str, config: dict[str, str]) -> None:  # noqa: A002  pylxd's name
        assert (self.present, type) == (False, "bridge")
        self.present, self.config = True, config
        self.save()

    def get(self, name: str) -> Bridge:
        return self

    def save(self) -> None:
        self.saved = dict(self.config)
        self.interfaces[NAMES.bridge] = _inet(self.config["ipv4.address"].partition("/")[0])

    def delete(self) -> None:
        if self.refusals:
            raise LXDAPIException(SimpleNamespace(status_code=400, json=lambda: {"error": self.refusals.pop(0)}))
        self.present, self.deletions = False, self.deletions + 1
        self.interfaces.pop(NAMES.bridge, None)


def test_a_bridge_is_created_changed_and_deleted(interfaces: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    bridge, pauses = Bridge(interfaces), list[float]()
    monkeypatch.setattr(network, "client", lambda: SimpleNamespace(networks=bridge))
    monkeypatch.setattr("time.sleep", pauses.append)
    name, props = NAMES.bridge, {"name": NAMES.bridge, "range": "10.77.0.0/24"}
    assert network.read(name, props) is None
    assert network.create(props) == (name, props)
    closed = {"ipv4.nat": "false", "ipv4.dhcp": "false", "ipv6.address": "none", "dns.mode": "none"}
    assert bridge.saved == {"ipv4.address": "10.77.0.1/24", **closed}
    assert network.read(name, {**props, "range": "10.1.0.0/24"}) == props, "the actual range, not the recorded one"
    moved = {**props, "range": "10.78.0.0/24"}
    assert network.create(moved) == (name, moved), "an existing bridge is changed"
    assert (bridge.saved["ipv4.address"], bridge.deletions) == ("10.78.0.1/24", 0)
    del interfaces[name]
    assert network.read(name, moved) is None, "LXD has the bridge, but its device is missing"
    network.create(moved)
    assert bridge.deletions == 1, "so it is created again"
    assert network.read(name, moved) == moved
    bridge.refusals += ["The network is currently in use"] * 2
    network.delete(name, moved)
    assert (bridge.present, name in interfaces, pauses) == (False, False, [0.5, 0.5])
    for present, refusal in ((True, "Network not found"), (False, "Device is missing")):
        bridge.present, bridge.refusals = present, [refusal]
        network.delete(name, moved)
    assert len(pauses) == 2, "it is gone"
    bridge.present, bridge.refusals = True, ["The network is currently in use"] * 9
    pauses.clear()
    with pytest.raises(LxdError, match=f"^network {name}: The network is currently in use$"):
        network.delete(name, moved)
    assert pauses == [0.5] * 3


@pytest.fixture
def folder(socket_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("SCALETIER_LXD_SOCKET", raising=False)
    monkeypatch.setattr(api, "SOCKETS", (str(socket_folder / "lxd"), str(socket_folder / "incus")))
    return socket_folder


def test_the_answering_socket_is_used_and_none_is_an_error(folder: Path) -> None:
    with pytest.raises(LxdError, match=r"no socket at .*: start it with `make lxd`"):
        api.socket_path()
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(folder / "lxd"))
    with pytest.raises(LxdError, match=r"LXD does not answer at .*: start it with `make lxd`"):
        api.socket_path()
    with socket.socket(socket.AF_UNIX) as alive:
        alive.bind(str(folder / "incus"))
        alive.listen()
        assert api.socket_path() == str(folder / "incus")


def test_a_user_without_access_to_the_socket_gets_the_group(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX) as alive:
        alive.bind(str(folder / "lxd"))
        monkeypatch.setattr(api.os, "access", lambda *_: False)
        with pytest.raises(LxdError, match=r"no right to use .*: be root, or `sudo usermod -aG "):
            api.socket_path()
        with socket.socket(socket.AF_UNIX) as usable:
            usable.bind(str(folder / "incus"))
            usable.listen()
            monkeypatch.setattr(api.os, "access", lambda path, _: path == str(folder / "incus"))
            assert api.socket_path() == str(folder / "incus")


def _machine(
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    hosts: tuple[str, ...] = (),
    driver: str = "btrfs",
    held: int | None = None,
    total: int = 40 * 2**30,
) -> None:
    """Fake a machine with a pool of `free` bytes, an instance for each host, and `held` bytes in the bucket."""
    space = {"metadata": {"space": {"total": total, "used": total - free}}}
    answer = SimpleNamespace(json=lambda: space)
    pool = SimpleNamespace(resources=SimpleNamespace(get=lambda: answer))
    fake = SimpleNamespace(
        storage_pools=SimpleNamespace(
            all=lambda: [SimpleNamespace(name="scaletier")],
            get=lambda _: SimpleNamespace(driver=driver, config={"source": "/"}),
        ),
        api=SimpleNamespace(storage_pools={"scaletier": pool}),
        projects=SimpleNamespace(exists=lambda _: bool(hosts)),
        instances=SimpleNamespace(all=lambda: [SimpleNamespace(name=f"{name}?project=x") for name in hosts]),
    )
    monkeypatch.setattr(api, "client", lambda *_: fake)
    monkeypatch.setattr(preflight, "client", lambda *_: fake)
    monkeypatch.setattr(image, "exists", lambda: True)
    monkeypatch.setattr(image, "folder_path", lambda _: Path("/"))
    monkeypatch.setattr(preflight, "pool_of", lambda _: None)
    monkeypatch.setattr(preflight, "forward_drops", lambda *_: [])
    monkeypatch.setattr(preflight, "used_bytes", lambda _: held)


def _preflight(config: dict[str, str], spec: ClusterSpec | None = None) -> preflight.PreflightResult:
    return preflight.preflight("local", spec or preset(ScaleTier.STANDARD_1), LxdConfig.parse(config), STATE)


@pytest.mark.usefixtures("interfaces")
def test_a_full_disk_is_refused_unless_all_hosts_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, free=2**30)
    with pytest.raises(LxdError, match=r"storage pool scaletier is nearly full: 1\.0 GiB free, 8 new hosts need 1\.5 GiB"):
        _preflight({})
    _machine(monkeypatch, free=2**30, hosts=tuple(host_id.name for host_id in preset(ScaleTier.STANDARD_1).hosts))
    assert _preflight({}).image == image.name()
    for free, error in (
        (2**30 + 8 * 2**26, None),
        (2**30 + 8 * 2**26 - 1, "is nearly full: 1.5 GiB free, 8 new hosts need 1.5"),
    ):
        _machine(monkeypatch, free=free)
        with pytest.raises(LxdError, match=error) if error else nullcontext():
            _preflight({})


@pytest.mark.usefixtures("interfaces")
def test_a_pool_of_unknown_size_limits_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, free=0, total=0, held=7)
    assert _preflight({}).bucket_size == 0
    assert _preflight({"bucketSize": "3GiB", "disk": '{"ps": "50GiB"}'}).bucket_size == 3 * 2**30
    _machine(monkeypatch, free=2**32, total=2**30)
    with pytest.raises(LxdError, match=r"has 1\.0 GiB in all: `pulumi config set --path bucketSize 1GiB`$"):
        _preflight({"bucketSize": "2GiB"})
    assert _preflight({"bucketSize": "1GiB"}).bucket_size == 2**30, "all of the pool"


@pytest.mark.usefixtures("interfaces")
def test_the_folder_of_the_jobs_pythons_is_there_for_all_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "runtimes"
    monkeypatch.setattr(image, "LOCAL_RUNTIMES", folder)
    _machine(monkeypatch, free=30 * 2**30)
    umask = os.umask(0o077)
    try:
        for _ in range(2):
            _preflight({})
    finally:
        os.umask(umask)
    assert folder.stat().st_mode & 0o777 == 0o755


@pytest.mark.usefixtures("interfaces")
def test_a_folder_of_another_user_is_used_or_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    folder = tmp_path / "runtimes"
    monkeypatch.setattr(image, "LOCAL_RUNTIMES", folder)
    _machine(monkeypatch, free=30 * 2**30)
    _preflight({})
    line = rf"^{folder} cannot be used \(Operation not permitted\): `sudo chown -R \$USER {tmp_path}`$"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "chmod", refuse)
        assert _preflight({}).names == NAMES, "its mode is right already"
    folder.chmod(0o700)
    for call in ("chmod", "mkdir"):
        monkeypatch.setattr(Path, call, refuse)
        with pytest.raises(LxdError, match=line):
            _preflight({})


@pytest.mark.usefixtures("interfaces")
def test_missing_requirements_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, free=30 * 2**30)
    with pytest.raises(LxdError, match="storage pool other does not exist; there is scaletier: "):
        _preflight({"storagePool": "other"})
    with monkeypatch.context() as patch:
        patch.setattr(preflight.client().storage_pools, "all", list)
        with pytest.raises(LxdError, match="storage pool scaletier does not exist; there is none: "):
            _preflight({})
    monkeypatch.setattr(preflight, "pool_of", lambda project: "scaletier" if project == NAMES.project else None)
    with pytest.raises(
        LxdError, match=r"storagePool is other, and the bucket is in scaletier, .* `pulumi config set storagePool scal"
    ):
        _preflight({"storagePool": "other"})
    assert _preflight({"storagePool": "scaletier"}).names == NAMES
    with pytest.raises(LxdError, match=r"local hosts have no GPUs"):
        _preflight({}, preset(ScaleTier.BASIC_GPU))
    monkeypatch.setattr(image, "folder_path", lambda _: Path("/no such folder"))
    with pytest.raises(LxdError, match="the Python of the hosts is missing: make it with `make image`"):
        _preflight({})
    monkeypatch.setattr(image, "exists", lambda: False)
    with pytest.raises(LxdError, match="the image of the hosts is missing: make it with `make image`"):
        _preflight({})


@pytest.mark.usefixtures("interfaces")
def test_a_bucket_gets_half_of_its_pool_or_the_configured_size(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, free=30 * 2**30)
    assert _preflight({}).bucket_size == 20 * 2**30
    assert _preflight({"bucketSize": "3GiB"}).bucket_size == 3 * 2**30
    with pytest.raises(LxdError, match=r"^bucketSize is 41\.0 GiB, and storage pool scaletier has 40\.0 GiB in all: `pulumi"):
        _preflight({"bucketSize": "41GiB"})
    with pytest.raises(LxdError, match=r"^disk\.ps is 50\.0 GiB, .*`pulumi config set --path disk\.ps 20GiB`"):
        _preflight({"disk": '{"ps": "50GiB"}'})
    _machine(monkeypatch, free=30 * 2**30, held=5 * 2**30 + 1)
    assert _preflight({"bucketSize": "6GiB"}).bucket_size == 6 * 2**30
    with pytest.raises(
        LxdError, match=r"the bucket holds 5\.0 GiB, and may hold 5\.0 GiB: `pulumi config set bucketSize 6GiB`"
    ):
        _preflight({"bucketSize": "5GiB"})


@pytest.mark.usefixtures("interfaces")
def test_a_pool_without_limits_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    mount = SimpleNamespace(mountpoint="/", opts="rw,relatime")
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: [mount] if all else [])  # noqa: A006  psutil's name
    _machine(monkeypatch, free=30 * 2**30)
    assert _preflight({}).warnings == ()
    _machine(monkeypatch, free=30 * 2**30, driver="dir")
    (warning,) = _preflight({}).warnings
    assert warning.startswith("storage pool scaletier is a folder of a file system without project quotas")
    mount.opts += ",prjquota"
    assert _preflight({}).warnings == ()


@pytest.mark.usefixtures("interfaces")
def test_a_limit_of_a_role_without_hosts_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, free=30 * 2**30)
    limits = {"cpus": '{"worker": 2, "master": 1}', "memory": '{"ps": "3GiB"}', "disk": '{"evaluator": "8GiB"}'}
    assert _preflight(limits, preset(ScaleTier.BASIC)).warnings == tuple(
        f"{key} has no effect: this cluster has no {key.rpartition('.')[2]}; it has master"
        for key in ("cpus.worker", "memory.ps", "disk.evaluator")
    )
    assert _preflight({"cpus": '{"worker": 2}', "memory": '{"ps": "3GiB"}'}).warnings == ()


def _chains(*fields: tuple[str, str, str, str]) -> str:
    listed = [{"chain": dict(zip(("family", "table", "hook", "policy"), each, strict=True))} for each in fields]
    return json.dumps(
        {"nftables": [{"metainfo": {}}, *listed, {"chain": {"family": "ip", "table": "filter", "name": "DOCKER"}}]}
    )


def test_a_foreign_firewall_that_drops_between_hosts_is_reported(tmp_path: Path) -> None:
    switch = tmp_path / "bridge-nf-call-iptables"
    docker = _chains(
        ("ip", "filter", "forward", "drop"), ("ip", "filter", "input", "drop"), ("bridge", "own", "forward", "drop")
    )

    def fail_if_called() -> str:
        raise AssertionError("bridged frames are not filtered, so nft is not called")

    assert forward_drops(switch, fail_if_called) == []
    switch.write_text("0\n")
    assert forward_drops(switch, fail_if_called) == []
    switch.write_text("1\n")
    assert forward_drops(switch, lambda: "") == []
    assert forward_drops(switch, lambda: _chains(("ip", "filter", "forward", "accept"))) == []
    (warning,) = forward_drops(switch, lambda: docker)
    assert warning.startswith("nft table ip filter drops all that it does not accept")
    assert "`sysctl net.bridge.bridge-nf-call-iptables=0`" in warning
