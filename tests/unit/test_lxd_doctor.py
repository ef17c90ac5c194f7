"""The doctor's findings about local hosts, with fakes of LXD and nft; tests/e2e/test_doctor.py uses both."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from test_lxd_firewall import FakeKernel

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
def kernel(monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    fake = FakeKernel()
    monkeypatch.setattr(nft, "_nft", fake.nft)
    monkeypatch.setattr(doctor, "forward_drops", lambda *_: [])
    monkeypatch.setattr(doctor, "names_of", lambda _: [NAMES])
    nft.load(rules(SPEC, NAMES.table, NAMES.bridge, NETWORK))
    return fake


@pytest.fixture
def instances(kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> Instances:
    fake = Instances()
    monkeypatch.setattr(doctor, "client", lambda *_: SimpleNamespace(instances=fake))
    monkeypatch.setattr(doctor, "hosts_of", lambda _: list(fake.status))
    monkeypatch.setattr(doctor, "unrecorded", lambda _, known: sorted(fake.status.keys() - {*known}))
    return fake


def summarize(findings: Iterable[Finding]) -> list[tuple[str, str]]:
    return [(str(each.severity), each.what) for each in findings]


@pytest.mark.usefixtures("kernel")
def test_the_inventory_yields_the_stack_s_firewall_rules() -> None:
    assert doctor.firewall_script(INVENTORY, NAMES) == rules(SPEC, NAMES.table, NAMES.bridge, NETWORK)
    assert summarize(doctor.firewall(INVENTORY)) == [("ok", "nft table scaletier_abcdef is as it was made")]
    assert summarize(doctor.firewall(None)) == []


def test_a_missing_or_changed_table_is_restored(kernel: FakeKernel) -> None:
    for change in (lambda: kernel.tables.clear(), lambda: kernel.tables[NAMES.table].remove("counter drop")):
        change()
        (finding,) = doctor.firewall(INVENTORY)
        assert (finding.severity, finding.remedy) == (Severity.ERROR, "pulumi up")
        assert "gone" in finding.what or finding.what.endswith("is not as it was made: - counter drop")
        assert [each.fixed for each in look({"firewall": lambda: doctor.firewall(INVENTORY)}, 30, fix=True)] == [True]
        assert nft.differences(NAMES.table, rules(SPEC, NAMES.table, NAMES.bridge, NETWORK)) == []


def test_a_stopped_host_is_started_behind_the_firewall(kernel: FakeKernel, instances: Instances) -> None:
    assert summarize(doctor.hosts(INVENTORY)) == [("ok", "all 8 hosts run")]
    instances.status["worker-1"] = "Stopped"
    del instances.status["ps-0"]
    kernel.tables.clear()
    missing, stopped = sorted(doctor.hosts(INVENTORY), key=lambda each: each.what)
    assert summarize([missing, stopped]) == [("error", "host ps-0 is gone"), ("error", "host worker-1 is stopped")]
    assert missing.fix is None
    assert stopped.fix
    stopped.fix()
    assert instances.status["worker-1"] == "Running"
    assert list(kernel.tables) == [NAMES.table]


def test_hosts_of_a_killed_update_are_named(instances: Instances) -> None:
    instances.status |= {"worker-14": "Running", "worker-15": "Stopped"}
    findings = [(str(each.severity), each.what, each.remedy) for each in doctor.hosts(INVENTORY)]
    assert findings == [
        ("ok", "all 8 hosts run", ""),
        ("warning", "host worker-14 is left by an update that did not end", "pulumi up"),
        ("warning", "host worker-15 is left by an update that did not end", "pulumi up"),
    ]


def test_low_limits_are_an_error_only_for_many_hosts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, least in doctor.LIMITS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{least}\n")
    monkeypatch.setattr(doctor, "_SYS", tmp_path)
    assert summarize(doctor.kernel(INVENTORY)) == [("ok", "the kernel's limits are those for 31 hosts")]
    (tmp_path / "kernel/keys/maxkeys").write_text("200\n")
    (few,) = doctor.kernel(INVENTORY)
    (many,) = doctor.kernel({**INVENTORY, "hosts": INVENTORY["hosts"] * 2})
    assert (few.severity, many.severity) == (Severity.WARNING, Severity.ERROR)
    assert few.what == "the kernel's kernel.keys.maxkeys is 200, and 31 hosts need 20000"


@pytest.mark.parametrize(
    ("usage", "size", "severities"),
    [(None, "100", []), (50, "", []), (89, "100", []), (90, "100", ["warning"]), (98, "100", ["error"]), (9, "0", [])],
)
def test_a_nearly_full_disk_is_reported(usage: int | None, size: str, severities: list[str]) -> None:
    assert [severity for severity, _ in summarize(doctor._filled("it", usage, size, "more"))] == severities


class Machine:
    """Fakes of LXD and the kernel: projects with the states of their hosts, networks and tables."""

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

    def add_project(self, key: str, state: str, *hosts: str, stack: str = "local", kept: bool = False) -> str:
        project = f"scaletier-{stack}-{key}"
        self.owners.append(Owner(project, stack, str(orphans.ROOT), kept, state))
        self.hosts[project] = list(hosts)
        return project

    def orphans(self, stacks: set[str] | None = None) -> list[Finding]:
        return orphans.orphans(stacks)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


def write_state(folder: Path, stack: str, text: str) -> str:
    (stacks := folder / ".pulumi/stacks/scaletier").mkdir(parents=True, exist_ok=True)
    (stacks / f"{stack}.json").write_text(text)
    return f"file://{folder}"


def test_projects_that_another_state_may_have_are_no_orphans(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_state = write_state(tmp_path / ".pulumi-state", "local", "scaletier-local-abcdef")
    shared_state = write_state(tmp_path / "shared", "team", "scaletier-team-111111")
    machine.add_project("abcdef", own_state)
    machine.add_project("111111", shared_state, stack="team")
    machine.add_project("222222", "gs://team", stack="cloud")
    machine.add_project("333333", "", stack="of-an-earlier-version")
    machine.add_project("444444", "file:///gone/.pulumi-state", stack="gone", kept=True)
    for state in ("", shared_state, "gs://other", "file:///empty"):
        monkeypatch.setenv("PULUMI_BACKEND_URL", state)
        for stacks in (set[str](), None):
            assert machine.orphans(stacks) == [], state


def test_a_moved_checkout_keeps_its_stack(machine: Machine, tmp_path: Path) -> None:
    write_state(tmp_path / ".pulumi-state", "local", "scaletier-local-abcdef")
    machine.add_project("abcdef", "file:///before/.pulumi-state")
    assert machine.orphans({"local"}) == []


def test_an_orphan_is_missing_in_its_own_state(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_state = write_state(tmp_path / ".pulumi-state", "local", "{}")
    lost = machine.add_project("abcdef", own_state, "Stopped", stack="lost")
    without_state = machine.add_project("111111", "file:///gone/.pulumi-state", "Running", "Stopped")
    remote = machine.add_project("222222", "gs://team", stack="cloud")
    first, second = machine.orphans({"local"})
    assert first.what.startswith(f"project {lost} (stack lost of {tmp_path}) is not in its state, {own_state}")
    assert f"lxc delete --force --project {lost}" in first.remedy
    assert "and 1 of its hosts run" in second.what
    assert f"lxc stop --all --project {without_state}" in second.remedy
    assert "delete" not in second.remedy, "running hosts are not to be deleted"
    monkeypatch.setenv("PULUMI_BACKEND_URL", "gs://team")
    assert machine.orphans({"local"})[-1].what.startswith(f"project {remote} ")
    assert remote not in str(machine.orphans({"local", "cloud"}))
    assert remote not in str(machine.orphans(None))


def test_bridges_and_tables_of_no_project_are_orphans_unless_hosts_use_them(machine: Machine) -> None:
    machine.add_project("abcdef", "")
    machine.networks = ["stabcdef", "st555555", "st777777", "lxdbr0", "st22222x"]
    machine.tables = ["scaletier_abcdef", "scaletier_666666", "scaletier_666666_asleep_1_2", "scaletier_777777", "lxd"]
    (machine.bridges / "st777777/brif/vethx").mkdir(parents=True)
    (machine.bridges / "st555555/brif").mkdir(parents=True)
    table = "nft delete table bridge scaletier_666666"
    assert machine.orphans() == [
        warning("network st555555 is in no stack", "lxc network delete st555555"),
        warning("nft table scaletier_666666 is in no stack", table),
        warning("nft table scaletier_666666_asleep_1_2 is in no stack", f"{table}_asleep_1_2"),
    ]


def test_an_unreadable_state_is_a_warning_and_there_are_no_orphans(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: object) -> str:
        raise backend.BackendError("the state in x cannot be read: no")

    monkeypatch.setattr(backend, "ask", ask)
    machine.add_project("abcdef", backend.own_url(orphans.ROOT))
    monkeypatch.setattr(backend, "mentions", lambda *_: None)
    assert summarize(doctor.belongings(None)) == [("warning", "the state in x cannot be read: no")]
    monkeypatch.setattr(backend, "ask", lambda *_: '[{"name": "organization/scaletier/local"}]')
    assert summarize(doctor.belongings(None)) == [("ok", "nothing is left of other stacks")]


def test_each_finding_of_infra_is_a_line_of_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(general, "checks", lambda stack: {"a": lambda: [Finding(Severity.OK, f"stack {stack}")]})
    general.main(["local", "--fix"])
    assert json.loads(capsys.readouterr().out)["what"] == "stack local"

    def garbled(_: str | None) -> None:
        raise ValueError("no JSON")

    monkeypatch.setattr(general, "checks", garbled)
    general.main(["local"])
    finding = json.loads(capsys.readouterr().out)
    assert (finding["check"], finding["severity"]) == ("inventory", "error")


def test_versions_compare_as_numbers() -> None:
    assert general.numbers("3.250.0") > general.numbers("3.99.1")
    assert general.numbers("v3.250.0-dev") == general.numbers("3.250.0")
    assert general.numbers("") < general.numbers("1")


@pytest.mark.parametrize(("gib", "severity"), [(0.5, "error"), (3, "warning"), (50, "ok")])
def test_free_space_on_a_disk(gib: float, severity: str) -> None:
    assert general.free_space("it", int(gib * 2**30)).severity == severity


def test_without_a_stack_a_target_s_errors_are_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> Iterable[Finding]:
        raise LxdError("LXD does not answer: start it with `make lxd`")

    monkeypatch.setattr(doctor, "CHECKS", {"daemon": refuse, "kernel": lambda _: [fail("low")]})
    monkeypatch.setattr(general, "known", lambda stack: INVENTORY | {"target": "lxd"} if stack == "local" else None)
    for stack, severity in (("local", "error"), ("none", "warning"), (None, "warning")):
        severities = {each.check: str(each.severity) for each in look(general.checks(stack), 30)}
        assert (severities["daemon"], severities["kernel"]) == (severity, severity)
        assert {"pulumi", "python", "machine"} <= severities.keys()
