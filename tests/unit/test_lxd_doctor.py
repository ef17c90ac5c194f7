"""The doctor's findings about local hosts, with fakes of LXD and nft; tests/e2e/test_doctor.py uses both."""

from __future__ import annotations

import importlib
import ipaddress
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from test_lxd_firewall import FakeKernel

from infra import backend
from infra import doctor as general
from infra.findings import Finding, Severity, fail, ok, run_checks, warning
from infra.lxd import doctor, nft, orphans
from infra.lxd.api import LxdError
from infra.lxd.firewall import rules
from infra.lxd.layout import LxdNames, address
from infra.lxd.project import StackProject
from infra.scale_tiers import ScaleTier, preset

NAMES = LxdNames("scaletier-local-abcdef")
NETWORK = ipaddress.IPv4Network("10.77.0.0/24")
SPEC = preset(ScaleTier.STANDARD_1)
INVENTORY: dict[str, Any] = {
    "stack": "local",
    "scaleTier": "STANDARD_1",
    "hosts": [
        {
            "name": host_id.name,
            "role": str(host_id.role),
            "index": host_id.index,
            "address": str(address(NETWORK, host_id)),
            "machineType": SPEC.roles[host_id.role].machine_type,
        }
        for host_id in SPEC.hosts
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
    monkeypatch.setattr(doctor, "existing_names", lambda _: [NAMES])
    nft.load(rules(SPEC, NAMES.table, NAMES.bridge, NETWORK))
    return fake


@pytest.fixture
def instances(kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> Instances:
    fake = Instances()
    monkeypatch.setattr(doctor, "client", lambda *_: SimpleNamespace(instances=fake))
    monkeypatch.setattr(doctor, "hosts_of", lambda _: list(fake.status))
    monkeypatch.setattr(doctor, "unrecorded_hosts", lambda _, known: sorted(fake.status.keys() - {*known}))
    return fake


def summarize(findings: Iterable[Finding]) -> list[tuple[str, str]]:
    return [(str(each.severity), each.what) for each in findings]


@pytest.mark.usefixtures("kernel")
def test_the_inventory_yields_the_stack_s_firewall_rules() -> None:
    assert doctor.firewall_script(INVENTORY, NAMES) == rules(SPEC, NAMES.table, NAMES.bridge, NETWORK)
    assert summarize(doctor.firewall(INVENTORY)) == [("ok", "nft table scaletier_abcdef is as it was made")]
    assert summarize(doctor.firewall(None)) == []
    basic, (master, *_) = preset(ScaleTier.BASIC), (host for host in INVENTORY["hosts"] if host["role"] == "master")
    single = {"scaleTier": "BASIC", "hosts": [{**master, "machineType": "n1-standard-4"}]}
    assert doctor.firewall_script(single, NAMES) == rules(basic, NAMES.table, NAMES.bridge, NETWORK)


def test_a_missing_or_changed_table_is_restored(kernel: FakeKernel) -> None:
    for change in (lambda: kernel.tables.clear(), lambda: kernel.tables[NAMES.table].remove("counter drop")):
        change()
        (finding,) = doctor.firewall(INVENTORY)
        assert (finding.severity, finding.remedy) == (Severity.ERROR, "pulumi up")
        assert "gone" in finding.what or finding.what.endswith("is not as it was made: - counter drop")
        assert [each.fixed for each in run_checks({"firewall": lambda: doctor.firewall(INVENTORY)}, 30, fix=True)] == [True]
        assert nft.differences(NAMES.table, rules(SPEC, NAMES.table, NAMES.bridge, NETWORK)) == []


def test_a_stopped_host_is_started_behind_the_firewall(kernel: FakeKernel, instances: Instances) -> None:
    assert summarize(doctor.hosts(INVENTORY)) == [("ok", "all 8 hosts run")]
    instances.status["worker-1"] = "Stopped"
    del instances.status["ps-0"]
    kernel.tables.clear()
    missing, stopped = sorted(doctor.hosts(INVENTORY), key=lambda each: each.what)
    assert summarize([missing, stopped]) == [("error", "host ps-0 is gone"), ("error", "host worker-1 is stopped")]
    assert missing.fix is None
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


@pytest.mark.parametrize(
    ("usage", "size", "severities"),
    [(None, "100", []), (50, "", []), (89, "100", []), (90, "100", ["warning"]), (98, "100", ["error"]), (9, "0", [])],
)
def test_a_nearly_full_disk_is_reported(usage: int | None, size: str, severities: list[str]) -> None:
    assert [severity for severity, _ in summarize(doctor._check_usage("it", usage, size, "more"))] == severities


class Machine:
    """Fakes of LXD and the kernel: projects with the states of their hosts, networks and tables."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.stack_projects: list[StackProject] = []
        self.hosts: dict[str, list[str]] = {}
        self.networks: list[str] = []
        self.tables: list[str] = []
        self.bridges = folder / "net"
        monkeypatch.setattr(orphans, "stack_projects", lambda: self.stack_projects)
        monkeypatch.setattr(orphans, "client", self.client)
        monkeypatch.setattr(orphans, "tables", lambda: self.tables)
        monkeypatch.setattr(orphans, "pool_of", lambda _: "fast")
        monkeypatch.setattr(orphans, "_BRIDGES", str(self.bridges))
        monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": []})
        monkeypatch.setattr(orphans, "ROOT", folder)
        monkeypatch.delenv("PULUMI_BACKEND_URL", raising=False)

    def client(self, project: str = "default") -> SimpleNamespace:
        networks = [SimpleNamespace(name=name) for name in self.networks]
        hosts = [SimpleNamespace(name=f"ps-{n}", status=status) for n, status in enumerate(self.hosts.get(project, []))]
        return SimpleNamespace(networks=SimpleNamespace(all=lambda: networks), instances=SimpleNamespace(all=lambda: hosts))

    def add_project(self, key: str, state: str, *hosts: str, stack: str = "local", retained: bool = False) -> str:
        project = f"scaletier-{stack}-{key}"
        self.stack_projects.append(StackProject(project, stack, str(orphans.ROOT), retained, state))
        self.hosts[project] = list(hosts)
        return project

    def orphans(self, stacks: set[str] | None = None) -> list[Finding]:
        return orphans.find_orphans(stacks)


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
    machine.add_project("444444", "file:///gone/.pulumi-state", stack="gone", retained=True)
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
    commands = f"lxc storage volume delete fast bucket --project {lost} && lxc project delete {lost}"
    assert first.remedy.endswith(f"lxc delete --force --project {lost} ps-0 && {commands}")
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
    machine.tables = ["scaletier_abcdef", "scaletier_666666", "scaletier_666666_dormant_1_2", "scaletier_777777", "lxd"]
    (machine.bridges / "st777777/brif/vethx").mkdir(parents=True)
    (machine.bridges / "st555555/brif").mkdir(parents=True)
    table = "nft delete table bridge scaletier_666666"
    assert machine.orphans() == [
        warning("network st555555 is in no stack", "lxc network delete st555555"),
        warning("nft table scaletier_666666 is in no stack", table),
        warning("nft table scaletier_666666_dormant_1_2 is in no stack", f"{table}_dormant_1_2"),
    ]


def test_bridges_and_tables_that_a_state_lists_are_no_orphans(machine: Machine, tmp_path: Path) -> None:
    write_state(tmp_path / ".pulumi-state", "local", '{"id": "st555555"}')
    machine.networks, machine.tables = ["st555555", "st666666"], ["scaletier_555555"]
    assert machine.orphans() == [warning("network st666666 is in no stack", "lxc network delete st666666")]


def test_an_unreadable_state_is_a_warning_and_there_are_no_orphans(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: object) -> str:
        raise backend.BackendError("the state in x cannot be read: no")

    monkeypatch.setattr(backend, "run_pulumi", ask)
    machine.add_project("abcdef", backend.own_url(orphans.ROOT))
    monkeypatch.setattr(backend, "mentions", lambda *_: None)
    assert summarize(doctor.orphans(None)) == [("warning", "the state in x cannot be read: no")]
    monkeypatch.setattr(backend, "run_pulumi", lambda *_: '[{"name": "organization/scaletier/local"}]')
    assert summarize(doctor.orphans(None)) == [("ok", "nothing is left of other stacks")]


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


def test_without_a_known_stack_a_target_s_errors_are_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> Iterable[Finding]:
        raise LxdError("LXD\ndoes not answer")

    stored = {"a": refuse, "b": lambda _: [ok("well"), warning("low"), fail("gone", "pulumi up")]}
    monkeypatch.setattr(doctor, "CHECKS", stored)
    monkeypatch.setattr(general, "local_inventory", lambda stack: INVENTORY | {"target": "lxd"} if stack == "local" else None)
    checks = general.checks("local")
    assert [each.severity for each in run_checks({"a": checks["a"]}, 30)] == [Severity.ERROR]
    assert list(checks["b"]()) == stored["b"](None)
    for stack in ("none", None):
        checks = general.checks(stack)
        assert list(checks) == ["pulumi", "python", "machine", "state", "a", "b"]
        assert list(checks["a"]()) == [warning("LXD does not answer")]
        assert list(checks["b"]()) == [ok("well"), warning("low"), warning("gone", "pulumi up")]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a checkout that needs Pulumi 3.10.0, with a `pulumi` in the environment's folder of programs."""
    (tmp_path / "Pulumi.yaml").write_text("requiredPulumiVersion: '>=3.10.0'\n")
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(general, "ROOT", tmp_path)
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}/path")
    return tmp_path


def write_program(path: Path, output: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n[ $1 = version ] && echo {output}; exit 1\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("version", "finding"),
    [
        ("v3.10.0", ok("pulumi 3.10.0")),
        ("v3.10.0-dev", ok("pulumi 3.10.0-dev")),
        ("v3.9.9", fail("pulumi is 3.9.9, and 3.10.0 is needed", "make pulumi")),
        ("", fail("pulumi is without a version, and 3.10.0 is needed", "make pulumi")),
    ],
)
def test_pulumi_s_version_is_compared(project: Path, version: str, finding: Finding) -> None:
    assert list(general.pulumi()) == [fail("pulumi does not run (No such file or directory)", "make pulumi")]
    write_program(project / "bin" / "pulumi", version)
    assert list(general.pulumi()) == [finding]
    write_program(project / "path" / "pulumi", "v4.0.0")
    assert list(general.pulumi()) == [ok("pulumi 4.0.0")], "the one on PATH comes first"


def test_versions_of_libraries_are_compared_with_the_pinned_ones(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"pulumi": "3.1", "pulumi-gcp": "8.0", "pylxd": "2.3", "fabric": "3.2"}

    def version(name: str) -> str:
        if name not in installed:
            raise general.importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    (project / "constraints.txt").write_text("# pins\npulumi==3.1\npulumi-gcp==8.0\npylxd==2.4\nparamiko==3.0\n")
    monkeypatch.setattr("importlib.metadata.version", version)
    python = sys.version.partition(" ")[0]
    assert list(general.python()) == [
        warning("pylxd is 2.3, and the project was tested with 2.4", "make venv"),
        fail("paramiko is not installed", "make venv"),
        ok(f"Python {python}, pulumi-gcp 8.0"),
    ]


def test_the_space_of_this_machine_is_a_finding(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gib, remedy = 2**30, "make room, or fab prune"
    texts = {free: list(general.machine()) for free in (gib - 1, gib, 5 * gib - 1, 5 * gib) if not set_free(monkeypatch, free)}
    assert texts == {
        gib - 1: [fail("1.0 GiB are free on this machine", remedy)],
        gib: [warning("1.0 GiB are free on this machine", remedy)],
        5 * gib - 1: [warning("5.0 GiB are free on this machine", remedy)],
        5 * gib: [ok("5.0 GiB are free on this machine")],
    }


def set_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("config:\n  scaletier:target: gcp\n", "gcp"),
        ("config:\n  scaletier:target: lxd\n", "lxd"),
        *((text, "lxd") for text in ("config:\n  scaletier:target: [aws]\n", "config:\n", "", "{", "config: {x: 1}", None)),
    ],
)
def test_a_stack_without_hosts_has_the_checks_of_its_configured_target(project: Path, text: str | None, target: str) -> None:
    if text is not None:
        (project / "Pulumi.new.yaml").write_text(text)
    own = importlib.import_module(f"infra.{target}.doctor").CHECKS
    assert list(general.checks("new")) == ["pulumi", "python", "machine", "state", *own]


@pytest.mark.parametrize(("text", "known"), [(None, False), ("[]", False), ('{"hosts": []}', False), ('{"hosts": [{}]}', True)])
def test_a_stack_is_known_by_its_inventory(project: Path, text: str | None, known: bool) -> None:
    folder = project / ".scaletier" / "local"
    folder.mkdir(parents=True)
    if text is not None:
        (folder / "inventory.json").write_text(text)
    assert general.local_inventory("local") == ({"hosts": [{}]} if known else None)


def test_only_with_fix_a_remedy_is_applied_by_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    applied: list[str | None] = []
    monkeypatch.setattr(general, "checks", lambda stack: {"a": lambda: [fail("off", fix=lambda: applied.append(stack))]})
    general.main(["local"])
    assert applied == []
    general.main(["--fix", "local"])
    general.main(["--fix"])
    assert applied == ["local", None]
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["what"], line["fixed"]) for line in lines] == [("off", False), ("off", True), ("off", True)]


FAST = {"project": NAMES.project, "pool": "fast", "name": "bucket"}


class Disks:
    """LXD with a pool of 40 GiB, in which 30 are free, and a bucket and hosts with disks of 10 bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pool: str | None = "fast"
        self.counted, self.bucket = True, 1
        self.usages: dict[str, Any] = {"ps-0": 1, "serving-0": 1}
        self.volume: dict[str, Any] | None = {"config": {"size": "10"}}
        monkeypatch.setattr(doctor, "existing_names", lambda _: [NAMES])
        monkeypatch.setattr(doctor, "pool_of", lambda _: self.pool)
        monkeypatch.setattr(doctor, "get_volume", lambda props: self.volume if props == FAST else None)
        monkeypatch.setattr(doctor, "used_bytes", lambda props: self.bucket if props == FAST else None)
        monkeypatch.setattr(doctor, "hosts_of", lambda _: list(self.usages))
        monkeypatch.setattr(doctor, "client", self.client)
        monkeypatch.setattr(doctor.quotas, "is_accounting", lambda _: self.counted)
        monkeypatch.setattr(doctor.quotas, "enable_accounting", lambda pool: setattr(self, "counted", pool == "fast"))
        monkeypatch.setattr(doctor.quotas, "command", lambda pool: f"rescan {pool}")

    def client(self, project: str = "default") -> SimpleNamespace:
        answer = {"metadata": {"space": {"total": 40 * 2**30, "used": 10 * 2**30}}}
        resources = SimpleNamespace(get=lambda: SimpleNamespace(json=lambda: answer))
        pools = {"fast": SimpleNamespace(resources=resources)}
        return SimpleNamespace(api=SimpleNamespace(storage_pools=pools), instances=SimpleNamespace(get=self.get))

    def get(self, name: str) -> SimpleNamespace:
        usage = self.usages[name]
        disk = None if usage is None else {} if usage == {} else {"root": {"usage": usage}}
        return SimpleNamespace(state=lambda: SimpleNamespace(disk=disk), devices={"root": {"size": "10"}})


def test_the_space_of_the_pool_the_bucket_and_each_disk_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    disks, free = Disks(monkeypatch), ok("30.0 GiB are free on storage pool fast")
    assert list(doctor.disks(None)) == []
    assert list(doctor.disks(INVENTORY)) == [free]
    disks.bucket, disks.usages, disks.counted = 9, {"ps-0": 10, "serving-0": None, "worker-0": {}}, False
    uncounted = fail("storage pool fast no longer counts its usage, so disk and bucketSize limit nothing", "rescan fast")
    findings = list(doctor.disks(INVENTORY))
    assert findings == [
        free,
        uncounted,
        warning("the bucket is 90% full", "fab prune, or pulumi config set bucketSize"),
        fail("host ps-0's disk is 100% full", "pulumi config set --path disk.ps"),
    ]
    assert findings[1].fix
    findings[1].fix()
    assert disks.counted
    disks.volume, disks.usages = None, {}
    assert list(doctor.disks(INVENTORY)) == [free]
    disks.pool = None
    assert list(doctor.disks(INVENTORY)) == [fail("the bucket is gone", "pulumi up makes another, which is empty")]


@pytest.mark.parametrize("image", [True, False])
def test_the_daemon_and_the_image_are_checked(monkeypatch: pytest.MonkeyPatch, image: bool) -> None:
    environment = {"server_version": "6.0"}
    monkeypatch.setattr(doctor, "client", lambda: SimpleNamespace(host_info={"environment": environment}))
    monkeypatch.setattr(doctor.nft, "version", lambda: "nftables v1")
    monkeypatch.setattr(doctor.image, "exists", lambda: image)
    missing = [] if image else [warning("the image of the hosts, of this version, is missing", "make image")]
    assert list(doctor.daemon(None)) == [ok("lxd 6.0 answers, and there is nftables v1"), *missing]
    environment["server"] = "incus"
    assert next(iter(doctor.daemon(None))) == ok("incus 6.0 answers, and there is nftables v1")


def test_a_stack_without_a_project_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "existing_names", lambda stack: [NAMES] if stack == "local" else [])
    assert list(doctor.project(None)) == []
    assert list(doctor.project(INVENTORY)) == []
    error = fail("LXD has no project of stack gone of this checkout", "pulumi up")
    assert list(doctor.project({**INVENTORY, "stack": "gone"})) == [error]


@pytest.mark.parametrize(("count", "more"), [(3, ""), (4, "; and 1 more")])
def test_three_changed_rules_are_named(monkeypatch: pytest.MonkeyPatch, kernel: FakeKernel, count: int, more: str) -> None:
    foreign = "nft table ip filter drops all that it does not accept"
    monkeypatch.setattr(doctor, "forward_drops", lambda *_: [foreign])
    kernel.tables[NAMES.table][-1:-1] = [f"rule {number}" for number in range(count)]
    shown = "; ".join(f"+ rule {number}" for number in range(3))
    error = fail(f"nft table {NAMES.table} is not as it was made: {shown}{more}", "pulumi up")
    assert list(doctor.firewall(INVENTORY)) == [warning(foreign), error]


def test_a_stopped_host_is_started_behind_an_unchanged_firewall(
    kernel: FakeKernel, instances: Instances, monkeypatch: pytest.MonkeyPatch
) -> None:
    instances.status["worker-1"] = "Stopped"
    (stopped,) = doctor.hosts(INVENTORY)
    loaded: list[str] = []
    monkeypatch.setattr(nft, "load", loaded.append)
    monkeypatch.setattr(nft, "differences", lambda *_: [])
    stopped.fix()
    assert (loaded, summarize(doctor.hosts(INVENTORY))) == ([], [("ok", "all 8 hosts run")])


def test_limits_below_the_least_are_named_one_by_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def found(hosts: int, missing: int) -> list[Finding]:
        for name, least in doctor.LIMITS.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(f"{least - missing * name.startswith('kernel')}\n")
        return list(doctor.kernel({**INVENTORY, "hosts": [{}] * hosts} if hosts else None))

    monkeypatch.setattr(doctor, "_SYS", tmp_path)
    remedy = "sudo setup/lxd.sh system"
    whats = (
        "the kernel's kernel.keys.maxkeys is 19999, and 31 hosts need 20000",
        "the kernel's kernel.keys.maxbytes is 1999999, and 31 hosts need 2000000",
    )
    assert found(13, 0) == [ok("the kernel's limits are those for 31 hosts")]
    assert found(0, 1) == found(12, 1) == [warning(what, remedy) for what in whats]
    assert found(13, 1) == [fail(what, remedy) for what in whats]
