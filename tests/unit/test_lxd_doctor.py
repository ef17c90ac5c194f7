"""What the doctor finds of local hosts; LXD and nft are fakes here, and real in tests/e2e/test_doctor.py."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from test_lxd_firewall import Kernel

from infra import doctor as general
from infra.findings import Finding, Severity, broken, look
from infra.lxd import doctor, leftovers, nft
from infra.lxd.api import LxdError
from infra.lxd.firewall import rules
from infra.lxd.layout import Names, address
from infra.lxd.leftovers import Orphan
from infra.lxd.project import Owner
from infra.spec import ScaleTier, preset
from infra.templates import ROOT

NAMES = Names("scaletier-local-abcdef")
NETWORK = ipaddress.IPv4Network("10.77.0.0/24")
SPEC = preset(ScaleTier.STANDARD_1)
INVENTORY: dict[str, Any] = {
    "stack": "local",
    "scaleTier": "STANDARD_1",
    "hosts": [
        {
            "name": replica.name,
            "role": str(replica.role),
            "index": replica.index,
            "address": str(address(NETWORK, replica)),
            "machineType": SPEC.roles[replica.role].machine_type,
        }
        for replica in SPEC.replicas
    ],
}


class Instances:
    """The instances of LXD's project, by name and status."""

    def __init__(self) -> None:
        self.status = {host["name"]: "Running" for host in INVENTORY["hosts"]}

    def get(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(status=self.status[name], start=lambda wait: self.status.update({name: "Running"}))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    found = Kernel()
    monkeypatch.setattr(nft, "_nft", found.nft)
    monkeypatch.setattr(doctor, "forward_drops", lambda *_: [])
    monkeypatch.setattr(doctor, "own", lambda _: [NAMES])
    nft.load(rules(SPEC, NAMES.table, NAMES.bridge, NETWORK))
    return found


@pytest.fixture
def instances(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> Instances:
    found = Instances()
    monkeypatch.setattr(doctor, "client", lambda *_: SimpleNamespace(instances=found))
    monkeypatch.setattr(doctor, "hosts_of", lambda _: list(found.status))
    return found


def told(found: Iterable[Finding]) -> list[tuple[str, str]]:
    return [(str(each.severity), each.what) for each in found]


@pytest.mark.usefixtures("kernel")
def test_the_firewall_of_the_inventory_is_that_of_the_stack() -> None:
    assert doctor.wanted(INVENTORY, NAMES) == rules(SPEC, NAMES.table, NAMES.bridge, NETWORK)
    assert told(doctor.firewall(INVENTORY)) == [("ok", "nft table scaletier_abcdef is as it was made")]
    assert told(doctor.firewall(None)) == []


def test_a_table_that_is_gone_or_changed_is_put_back(kernel: Kernel) -> None:
    for change in (lambda: kernel.tables.clear(), lambda: kernel.tables[NAMES.table].remove("counter drop")):
        change()
        (found,) = doctor.firewall(INVENTORY)
        assert (found.severity, found.mend) == (Severity.BROKEN, "pulumi up")
        assert "gone" in found.what or found.what.endswith("is not as it was made: - counter drop")
        assert [each.mended for each in look({"firewall": lambda: doctor.firewall(INVENTORY)}, 30, fix=True)] == [True]
        assert nft.differences(NAMES.table, rules(SPEC, NAMES.table, NAMES.bridge, NETWORK)) == []


def test_a_host_that_is_off_is_started_behind_the_firewall_and_one_that_is_gone_is_not(
    kernel: Kernel, instances: Instances
) -> None:
    assert told(doctor.hosts(INVENTORY)) == [("ok", "all 8 hosts run")]
    instances.status["worker-1"] = "Stopped"
    del instances.status["ps-0"]
    kernel.tables.clear()
    gone, off = sorted(doctor.hosts(INVENTORY), key=lambda each: each.what)
    assert told([gone, off]) == [("broken", "host ps-0 is gone"), ("broken", "host worker-1 is stopped")]
    assert gone.fix is None
    assert off.fix
    off.fix()
    assert instances.status["worker-1"] == "Running"
    assert list(kernel.tables) == [NAMES.table]


def test_low_limits_are_broken_for_many_hosts_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, least in doctor.LIMITS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{least}\n")
    monkeypatch.setattr(doctor, "_SYS", tmp_path)
    assert told(doctor.kernel(INVENTORY)) == [("ok", "the kernel's limits are those for 31 hosts")]
    (tmp_path / "kernel/keys/maxkeys").write_text("200\n")
    (few,) = doctor.kernel(INVENTORY)
    (many,) = doctor.kernel({**INVENTORY, "hosts": INVENTORY["hosts"] * 2})
    assert (few.severity, many.severity) == (Severity.WARNING, Severity.BROKEN)
    assert few.what == "the kernel's kernel.keys.maxkeys is 200, and 31 hosts need 20000"


@pytest.mark.parametrize(
    ("usage", "size", "said"),
    [(None, "100", []), (50, "", []), (89, "100", []), (90, "100", ["warning"]), (98, "100", ["broken"]), (9, "0", [])],
)
def test_a_disk_that_is_nearly_full_is_said(usage: int | None, size: str, said: list[str]) -> None:
    assert [severity for severity, _ in told(doctor._filled("it", usage, size, "more"))] == said


def test_what_is_in_no_stack_is_told_with_what_removes_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = str(ROOT)
    owners = [
        Owner("scaletier-local-abcdef", "local", here, kept=False),
        Owner("scaletier-lost-111111", "lost", here, kept=False),
        Owner("scaletier-kept-222222", "gone", here, kept=True),
        Owner("scaletier-theirs-333333", "theirs", str(tmp_path), kept=False),
        Owner("scaletier-away-444444", "away", str(tmp_path / "no such"), kept=False),
    ]
    networks = [SimpleNamespace(name=name) for name in ("stabcdef", "st555555", "lxdbr0", "st22222x")]
    monkeypatch.setattr(leftovers, "owners", lambda: owners)
    monkeypatch.setattr(leftovers, "client", lambda: SimpleNamespace(networks=SimpleNamespace(all=lambda: networks)))
    monkeypatch.setattr(
        leftovers, "tables", lambda: ["scaletier_abcdef", "scaletier_666666", "scaletier_666666_asleep_1_2", "lxd"]
    )
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": [], "st555555": []})
    table = "nft delete table bridge scaletier_666666"
    found = leftovers.orphans({"local"})
    assert [each.what.split(" (")[0] for each in found[:2]] == [
        "project scaletier-lost-111111",
        "project scaletier-away-444444",
    ]
    assert found[2:] == [
        Orphan("network st555555", "lxc network delete st555555"),
        Orphan("nft table scaletier_666666", table),
        Orphan("nft table scaletier_666666_asleep_1_2", f"{table}_asleep_1_2"),
    ]
    assert leftovers.orphans(None)[0].what.startswith("project scaletier-away"), "nobody knows of ours"


def test_what_infra_finds_is_a_line_of_json_each(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(general, "checks", lambda stack: {"a": lambda: [Finding(Severity.OK, f"stack {stack}")]})
    general.main(["local", "--fix"])
    assert json.loads(capsys.readouterr().out)["what"] == "stack local"

    def garbled(_: str | None) -> None:
        raise ValueError("no JSON")

    monkeypatch.setattr(general, "checks", garbled)
    general.main(["local"])
    said = json.loads(capsys.readouterr().out)
    assert (said["check"], said["severity"]) == ("inventory", "broken")


def test_versions_compare_as_numbers() -> None:
    assert general.numbers("3.250.0") > general.numbers("3.99.1")
    assert general.numbers("v3.250.0-dev") == general.numbers("3.250.0")
    assert general.numbers("") < general.numbers("1")


@pytest.mark.parametrize(("gib", "severity"), [(0.5, "broken"), (3, "warning"), (50, "ok")])
def test_room_on_a_disk(gib: float, severity: str) -> None:
    assert general.room("it", int(gib * 2**30)).severity == severity


def test_without_a_stack_nothing_of_a_target_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(_: object) -> Iterable[Finding]:
        raise LxdError("LXD does not answer: start it with `make lxd`")

    monkeypatch.setattr(doctor, "CHECKS", {"daemon": refuses, "kernel": lambda _: [broken("low")]})
    monkeypatch.setattr(general, "known", lambda stack: INVENTORY | {"target": "lxd"} if stack == "local" else None)
    for stack, severity in (("local", "broken"), ("none", "warning"), (None, "warning")):
        found = {each.check: str(each.severity) for each in look(general.checks(stack), 30)}
        assert (found["daemon"], found["kernel"]) == (severity, severity)
        assert {"pulumi", "python", "machine"} <= found.keys()
