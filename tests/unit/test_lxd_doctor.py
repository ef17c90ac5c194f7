"""The doctor's findings of local hosts, by fakes of LXD and nft; tests/e2e/test_doctor.py has both."""

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

from infra import backend
from infra import doctor as general
from infra.findings import Finding, Severity, fail, look, warning
from infra.lxd import doctor, nft, orphans
from infra.lxd.api import LxdError
from infra.lxd.firewall import rules
from infra.lxd.layout import LxdNames, address
from infra.lxd.project import Owner
from infra.scale_tiers import ScaleTier, preset

NAMES = LxdNames("scaletier-local-abcdef")
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
    monkeypatch.setattr(doctor, "unrecorded", lambda _, known: sorted(found.status.keys() - {*known}))
    return found


def told(found: Iterable[Finding]) -> list[tuple[str, str]]:
    return [(str(each.severity), each.what) for each in found]


@pytest.mark.usefixtures("kernel")
def test_the_firewall_of_the_inventory_is_that_of_the_stack() -> None:
    assert doctor.firewall_script(INVENTORY, NAMES) == rules(SPEC, NAMES.table, NAMES.bridge, NETWORK)
    assert told(doctor.firewall(INVENTORY)) == [("ok", "nft table scaletier_abcdef is as it was made")]
    assert told(doctor.firewall(None)) == []


def test_a_table_that_is_gone_or_changed_is_put_back(kernel: Kernel) -> None:
    for change in (lambda: kernel.tables.clear(), lambda: kernel.tables[NAMES.table].remove("counter drop")):
        change()
        (found,) = doctor.firewall(INVENTORY)
        assert (found.severity, found.remedy) == (Severity.ERROR, "pulumi up")
        assert "gone" in found.what or found.what.endswith("is not as it was made: - counter drop")
        assert [each.fixed for each in look({"firewall": lambda: doctor.firewall(INVENTORY)}, 30, fix=True)] == [True]
        assert nft.differences(NAMES.table, rules(SPEC, NAMES.table, NAMES.bridge, NETWORK)) == []


def test_a_host_that_is_off_is_started_behind_the_firewall_and_one_that_is_gone_is_not(
    kernel: Kernel, instances: Instances
) -> None:
    assert told(doctor.hosts(INVENTORY)) == [("ok", "all 8 hosts run")]
    instances.status["worker-1"] = "Stopped"
    del instances.status["ps-0"]
    kernel.tables.clear()
    gone, off = sorted(doctor.hosts(INVENTORY), key=lambda each: each.what)
    assert told([gone, off]) == [("error", "host ps-0 is gone"), ("error", "host worker-1 is stopped")]
    assert gone.fix is None
    assert off.fix
    off.fix()
    assert instances.status["worker-1"] == "Running"
    assert list(kernel.tables) == [NAMES.table]


def test_hosts_of_an_update_that_was_killed_are_named(instances: Instances) -> None:
    instances.status |= {"worker-14": "Running", "worker-15": "Stopped"}
    said = [(str(each.severity), each.what, each.remedy) for each in doctor.hosts(INVENTORY)]
    assert said == [
        ("ok", "all 8 hosts run", ""),
        ("warning", "host worker-14 is left by an update that did not end", "pulumi up"),
        ("warning", "host worker-15 is left by an update that did not end", "pulumi up"),
    ]


def test_low_limits_are_broken_for_many_hosts_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, least in doctor.LIMITS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{least}\n")
    monkeypatch.setattr(doctor, "_SYS", tmp_path)
    assert told(doctor.kernel(INVENTORY)) == [("ok", "the kernel's limits are those for 31 hosts")]
    (tmp_path / "kernel/keys/maxkeys").write_text("200\n")
    (few,) = doctor.kernel(INVENTORY)
    (many,) = doctor.kernel({**INVENTORY, "hosts": INVENTORY["hosts"] * 2})
    assert (few.severity, many.severity) == (Severity.WARNING, Severity.ERROR)
    assert few.what == "the kernel's kernel.keys.maxkeys is 200, and 31 hosts need 20000"


@pytest.mark.parametrize(
    ("usage", "size", "said"),
    [(None, "100", []), (50, "", []), (89, "100", []), (90, "100", ["warning"]), (98, "100", ["error"]), (9, "0", [])],
)
def test_a_nearly_full_disk_is_reported(usage: int | None, size: str, said: list[str]) -> None:
    assert [severity for severity, _ in told(doctor._filled("it", usage, size, "more"))] == said


class Machine:
    """LXD's and the kernel's data of stacks: projects with the states of their hosts, networks and tables."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.owners: list[Owner] = []
        self.hosts: dict[str, list[str]] = {}
        self.networks: list[str] = []
        self.tables: list[str] = []
        self.bridges = folder / "net"
        monkeypatch.setattr(orphans, "owners", lambda: self.owners)
        monkeypatch.setattr(orphans, "client", self.client)
        monkeypatch.setattr(orphans, "tables", lambda: self.tables)
        monkeypatch.setattr(orphans, "_BRIDGES", str(self.bridges))
        monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": []})
        monkeypatch.setattr(orphans, "ROOT", folder)
        monkeypatch.delenv("PULUMI_BACKEND_URL", raising=False)

    def client(self, project: str = "default") -> SimpleNamespace:
        networks = [SimpleNamespace(name=name) for name in self.networks]
        hosts = [SimpleNamespace(status=status) for status in self.hosts.get(project, [])]
        return SimpleNamespace(networks=SimpleNamespace(all=lambda: networks), instances=SimpleNamespace(all=lambda: hosts))

    def has(self, key: str, state: str, *hosts: str, stack: str = "local", kept: bool = False) -> str:
        project = f"scaletier-{stack}-{key}"
        self.owners.append(Owner(project, stack, str(orphans.ROOT), kept, state))
        self.hosts[project] = list(hosts)
        return project

    def orphans(self, stacks: set[str] | None = None) -> list[Finding]:
        return orphans.orphans(stacks)


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


def write_state(folder: Path, stack: str, text: str) -> str:
    (stacks := folder / ".pulumi/stacks/scaletier").mkdir(parents=True, exist_ok=True)
    (stacks / f"{stack}.json").write_text(text)
    return f"file://{folder}"


def test_what_another_state_may_have_is_no_orphan(there: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = write_state(tmp_path / ".pulumi-state", "local", "scaletier-local-abcdef")
    elsewhere = write_state(tmp_path / "shared", "team", "scaletier-team-111111")
    there.has("abcdef", own)
    there.has("111111", elsewhere, stack="team")
    there.has("222222", "gs://team", stack="cloud")
    there.has("333333", "", stack="of-an-earlier-version")
    there.has("444444", "file:///gone/.pulumi-state", stack="gone", kept=True)
    for state in ("", elsewhere, "gs://other", "file:///empty"):
        monkeypatch.setenv("PULUMI_BACKEND_URL", state)
        for stacks in (set[str](), None):
            assert there.orphans(stacks) == [], state


def test_a_moved_checkout_has_its_stack(there: Machine, tmp_path: Path) -> None:
    write_state(tmp_path / ".pulumi-state", "local", "scaletier-local-abcdef")
    there.has("abcdef", "file:///before/.pulumi-state")
    assert there.orphans({"local"}) == []


def test_an_orphan_is_what_its_own_state_no_longer_has(there: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = write_state(tmp_path / ".pulumi-state", "local", "{}")
    lost = there.has("abcdef", own, "Stopped", stack="lost")
    gone = there.has("111111", "file:///gone/.pulumi-state", "Running", "Stopped")
    cloud = there.has("222222", "gs://team", stack="cloud")
    first, second = there.orphans({"local"})
    assert first.what.startswith(f"project {lost} (stack lost of {tmp_path}) is not in its state, {own}")
    assert f"lxc delete --force --project {lost}" in first.remedy
    assert "and 1 of its hosts run" in second.what
    assert f"lxc stop --all --project {gone}" in second.remedy
    assert "delete" not in second.remedy, "nothing that runs is to be deleted"
    monkeypatch.setenv("PULUMI_BACKEND_URL", "gs://team")
    assert there.orphans({"local"})[-1].what.startswith(f"project {cloud} ")
    assert cloud not in str(there.orphans({"local", "cloud"}))
    assert cloud not in str(there.orphans(None))


def test_bridges_and_tables_of_no_project_are_orphans_unless_hosts_use_them(there: Machine) -> None:
    there.has("abcdef", "")
    there.networks = ["stabcdef", "st555555", "st777777", "lxdbr0", "st22222x"]
    there.tables = ["scaletier_abcdef", "scaletier_666666", "scaletier_666666_asleep_1_2", "scaletier_777777", "lxd"]
    (there.bridges / "st777777/brif/vethx").mkdir(parents=True)
    (there.bridges / "st555555/brif").mkdir(parents=True)
    table = "nft delete table bridge scaletier_666666"
    assert there.orphans() == [
        warning("network st555555 is in no stack", "lxc network delete st555555"),
        warning("nft table scaletier_666666 is in no stack", table),
        warning("nft table scaletier_666666_asleep_1_2 is in no stack", f"{table}_asleep_1_2"),
    ]


def test_a_state_that_does_not_open_is_a_warning_and_nothing_is_an_orphan(
    there: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*_: object) -> str:
        raise backend.BackendError("the state in x cannot be read: no")

    monkeypatch.setattr(backend, "ask", ask)
    there.has("abcdef", backend.own_url(orphans.ROOT))
    monkeypatch.setattr(backend, "mentions", lambda *_: None)
    assert told(doctor.belongings(None)) == [("warning", "the state in x cannot be read: no")]
    monkeypatch.setattr(backend, "ask", lambda *_: '[{"name": "organization/scaletier/local"}]')
    assert told(doctor.belongings(None)) == [("ok", "nothing is left of other stacks")]


def test_what_infra_finds_is_a_line_of_json_each(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(general, "checks", lambda stack: {"a": lambda: [Finding(Severity.OK, f"stack {stack}")]})
    general.main(["local", "--fix"])
    assert json.loads(capsys.readouterr().out)["what"] == "stack local"

    def garbled(_: str | None) -> None:
        raise ValueError("no JSON")

    monkeypatch.setattr(general, "checks", garbled)
    general.main(["local"])
    said = json.loads(capsys.readouterr().out)
    assert (said["check"], said["severity"]) == ("inventory", "error")


def test_versions_compare_as_numbers() -> None:
    assert general.numbers("3.250.0") > general.numbers("3.99.1")
    assert general.numbers("v3.250.0-dev") == general.numbers("3.250.0")
    assert general.numbers("") < general.numbers("1")


@pytest.mark.parametrize(("gib", "severity"), [(0.5, "error"), (3, "warning"), (50, "ok")])
def test_room_on_a_disk(gib: float, severity: str) -> None:
    assert general.free_space("it", int(gib * 2**30)).severity == severity


def test_without_a_stack_nothing_of_a_target_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(_: object) -> Iterable[Finding]:
        raise LxdError("LXD does not answer: start it with `make lxd`")

    monkeypatch.setattr(doctor, "CHECKS", {"daemon": refuses, "kernel": lambda _: [fail("low")]})
    monkeypatch.setattr(general, "known", lambda stack: INVENTORY | {"target": "lxd"} if stack == "local" else None)
    for stack, severity in (("local", "error"), ("none", "warning"), (None, "warning")):
        found = {each.check: str(each.severity) for each in look(general.checks(stack), 30)}
        assert (found["daemon"], found["kernel"]) == (severity, severity)
        assert {"pulumi", "python", "machine"} <= found.keys()
