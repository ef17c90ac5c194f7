"""Check `fab doctor` with fake hosts: its findings, its fixes, and its exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from shapes import check

from infra.doctor import free_space
from infra.findings import Finding, Severity, fail, ok, warning
from infra.inventory import Inventory
from ops.cluster import remote
from ops.cluster.cluster import ClusterClient
from ops.cluster.fanout import fan_out
from ops.errors import DONE, FAILED, HostError, UsageError
from ops.models import client, server_status
from ops.show import doctor


class Fleet:
    """Print the given outputs on hosts; None for a host that does not answer."""

    def __init__(self, outputs: dict[str, str | None]) -> None:
        self.outputs = outputs

    def connection(self, name: str) -> None:
        if self.outputs[name] is None:
            raise HostError(name, "(10.0.0.1) does not answer")

    def run(self, name: str, command: str) -> SimpleNamespace:
        assert command == doctor.STATE_COMMAND
        return SimpleNamespace(output=self.outputs[name])

    def each(self, names: Iterable[str], work: Callable[[str], Any], seconds: float) -> Any:
        return fan_out(names, work, seconds)


def run_host_checks(monkeypatch: pytest.MonkeyPatch, **outputs: str | None) -> list[Finding]:
    monkeypatch.setattr(doctor.time, "time", lambda: 1000.0)
    outputs_by_host = {name.replace("_", "-"): output for name, output in outputs.items()}
    cluster = SimpleNamespace(inventory=SimpleNamespace(names=tuple(outputs_by_host)), fleet=Fleet(outputs_by_host))
    return list(doctor.hosts(cluster))  # type: ignore[arg-type]


def test_host_checks_outlast_the_slowest_connection() -> None:
    slowest = remote.CONNECT_SECONDS + 2 * remote.SSHD_SECONDS  # the address, the banner, the login
    assert slowest < remote.COMMAND_SECONDS < doctor.SECONDS, "a slow host is not reported as unreachable"
    assert client._LISTEN_SECONDS < server_status._DOWN_SECONDS, "a starting server has time to listen"


def test_healthy_hosts_are_one_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    for clock, largest in (("999.999", "ps-0, +4 ms"), ("999.995", "worker-0, -5 ms")):
        (finding,) = run_host_checks(monkeypatch, ps_0="1000.004\n 12%\n", worker_0=f"{clock}\n 3%\n\n")
        assert finding == ok(f"2 of 2 hosts reachable; the largest clock difference is that of {largest}")
    (finding,) = run_host_checks(monkeypatch, ps_0="nonsense")
    assert finding.what == "ps-0 returned unexpected output"


def test_each_problem_of_a_host_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = run_host_checks(
        monkeypatch,
        ps_0=None,
        ps_1="1060.0\n 12%\n",
        worker_0="1000.0\n 91%\nscaletier-firewall.service\n",
        worker_1="1000.0\n 99%\n",
        worker_2="sh: date: not found\n",
    )
    assert [(str(finding.severity), finding.what) for finding in findings] == [
        ("error", "ps-0 (10.0.0.1) does not answer"),
        ("warning", "the clock of ps-1 is +60000 ms off this one's"),
        ("warning", "the disk of worker-0 is 91 % full"),
        ("error", "scaletier-firewall.service failed on worker-0"),
        ("error", "the disk of worker-1 is 99 % full"),
        ("error", "worker-2 returned unexpected output"),
    ]
    assert [finding.remedy for finding in findings] == [
        "pulumi up",
        "fab shell ps-1 -- timedatectl",
        "fab shell worker-0 -- sudo du -xh --max-depth 3 /var",
        "fab shell worker-0 -- sudo systemctl restart scaletier-firewall.service",
        "fab shell worker-1 -- sudo du -xh --max-depth 3 /var",
        "fab shell worker-2",
    ]


@pytest.mark.parametrize(
    ("percent", "expected"),
    [(89, None), (90, (Severity.WARNING, 90)), (97, (Severity.WARNING, 97)), (98, (Severity.ERROR, 98))],
)
def test_a_nearly_full_disk_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, percent: int, expected: tuple[Severity, int] | None
) -> None:
    findings = run_host_checks(monkeypatch, ps_0=f"1000.0\n {percent}%\n")[:-1]
    assert [(finding.severity, int(finding.what.split()[-3])) for finding in findings] == ([expected] if expected else [])


@pytest.mark.parametrize(("ahead", "wrong"), [(5.9, False), (6.1, True), (-5.9, False), (-6.1, True)])
def test_a_clock_is_compared_at_the_middle_of_the_call(monkeypatch: pytest.MonkeyPatch, ahead: float, wrong: bool) -> None:
    """Check with a call that takes 10 s, whose half is uncertain, in addition to one second."""
    times = iter([1000.0, 1010.0])
    monkeypatch.setattr(doctor.time, "time", lambda: next(times))
    cluster: Any = SimpleNamespace(inventory=SimpleNamespace(names=("ps-0",)), fleet=Fleet({"ps-0": f"{1005 + ahead}\n 1%\n"}))
    *warnings, last = doctor.hosts(cluster)
    difference = f"{ahead * 1000:+.0f} ms"
    assert last == ok(f"1 of 1 host reachable; the largest clock difference is that of ps-0, {difference}")
    assert [finding.what for finding in warnings] == [f"the clock of ps-0 is {difference} off this one's"] * wrong


def test_an_error_without_the_name_of_its_host_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_to_connect(_: Fleet, name: str) -> None:
        raise OSError("no\nroute")

    monkeypatch.setattr(Fleet, "connection", fail_to_connect)
    assert run_host_checks(monkeypatch, ps_0="") == [fail("ps-0: no route", "pulumi up")]


@pytest.mark.parametrize("truncated", ["", "1000.0", "1000.0\n", "1000.0\n 9", "1000.0\n a%\n"])
def test_a_truncated_output_does_not_hide_other_hosts(monkeypatch: pytest.MonkeyPatch, truncated: str) -> None:
    findings = run_host_checks(monkeypatch, ps_0=truncated, worker_0="1000.0\n 99%\nx.service\n", worker_1="1000.0\n 1%\n")
    what = [finding.what for finding in findings]
    assert ("ps-0 returned unexpected output" in what) is (truncated != "1000.0\n 9")
    assert {"the disk of worker-0 is 99 % full", "x.service failed on worker-0"} <= {*what}
    assert what[-1].startswith("2 of 3 hosts" if len(findings) == 4 else "3 of 3 hosts")


def test_a_readable_key_is_made_private(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    for name in ("id_ed25519", "known_hosts", "ssh_config"):
        (tmp_path / name).touch(mode=0o600)
    for name in ("known_hosts", "ssh_config"):
        (tmp_path / name).chmod(0o644)
    assert list(doctor.keys(tmp_path)) == [ok("the stack's key is there, and private")]
    (tmp_path / "id_ed25519").chmod(0o644)
    tmp_path.chmod(0o755)
    findings = list(doctor.keys(tmp_path))
    what = "{} has mode {}, and others may read it: ssh refuses such a key"
    assert findings == [
        fail(what.format(tmp_path, "0755"), f"chmod 0700 {tmp_path}"),
        fail(what.format(tmp_path / "id_ed25519", "0644"), f"chmod 0600 {tmp_path}/id_ed25519"),
    ]
    for finding in findings:
        assert finding.fix
        finding.fix()
    assert (tmp_path.stat().st_mode & 0o777, (tmp_path / "id_ed25519").stat().st_mode & 0o777) == (0o700, 0o600)
    (tmp_path / "ssh_config").unlink()
    missing = fail(f"{tmp_path}/ssh_config cannot be used (No such file or directory)", "fab connect")
    assert list(doctor.keys(tmp_path)) == [missing]
    (tmp_path / "ssh_config").touch()
    (tmp_path / "id_ed25519").chmod(0o640)
    assert [finding.remedy for finding in doctor.keys(tmp_path)] == [f"chmod 0600 {tmp_path}/id_ed25519"]


def test_errors_set_the_exit_code_and_fix_prints_its_fixes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    host = {"off": True}

    def checks(root: Path, fix: bool) -> dict[str, Any]:
        start = fail("host ps-0 is stopped", "pulumi up", lambda: host.update(off=False))
        raised = warning("small", "enlarge it", lambda: None)
        return {
            "hosts": lambda: [start] if host["off"] else [ok("all run")],
            "kernel": lambda: [warning("low", "raise it"), warning("old"), *([raised] if fix else [])],
        }

    monkeypatch.setattr(doctor, "_checks", checks)
    assert doctor.doctor(fix=False, as_json=True, root=tmp_path) == FAILED
    output = json.loads(capsys.readouterr().out)
    check("ops.show.doctor.doctor", output)
    unfixed = {"fixed": False, "fixError": None}
    assert output == {
        "errors": 1,
        "findings": [
            {"check": "hosts", "severity": "error", "what": "host ps-0 is stopped", "remedy": "pulumi up", **unfixed},
            {"check": "kernel", "severity": "warning", "what": "low", "remedy": "raise it", **unfixed},
            {"check": "kernel", "severity": "warning", "what": "old", "remedy": None, **unfixed},
        ],
    }
    assert doctor.doctor(fix=True, as_json=False, root=tmp_path) == DONE
    lines = capsys.readouterr()
    assert lines.out.splitlines() == [
        "fixed    hosts     host ps-0 is stopped",
        "fixed    kernel    small",
        "warning  kernel    low: raise it",
        "warning  kernel    old",
        "ok       hosts     all run",
    ]
    assert lines.err == "0 errors, 2 warnings\n"
    assert doctor.doctor(fix=False, as_json=False, root=tmp_path) == DONE


def test_the_reason_of_a_failed_fix_is_printed_while_its_problem_remains(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    gone: list[str] = []

    def fail_to_fix() -> None:
        gone.append("of itself")
        raise OSError("nft: permission denied")

    def checks(_: Path, fix: bool) -> dict[str, Any]:
        problems = [fail("the firewall is off", "start it", fail_to_fix), fail("the firewall is old", "pulumi up")]
        return {"firewall": lambda: [*problems, *([] if gone else [warning("low", "raise it", fail_to_fix)])]}

    monkeypatch.setattr(doctor, "_checks", checks)
    assert doctor.doctor(fix=True, as_json=False, root=tmp_path) == FAILED
    assert capsys.readouterr().out.splitlines() == [
        "error    firewall  the firewall is off (and cannot be fixed: nft: permission denied): start it",
        "error    firewall  the firewall is old: pulumi up",
    ]
    gone.clear()
    assert doctor.doctor(fix=True, as_json=True, root=tmp_path) == FAILED
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert [(each["what"], each["fixError"]) for each in findings] == [
        ("the firewall is off", "nft: permission denied"),
        ("the firewall is old", None),
    ]


def test_without_a_stack_only_the_machine_is_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def raise_no_stack(_: Path) -> None:
        raise UsageError("no stack is up here: run pulumi up")

    monkeypatch.setattr(doctor, "load", raise_no_stack)
    checks = doctor._checks(tmp_path, False)
    assert checks.keys() == {"stack", "infra"}
    (finding,) = checks["stack"]()
    assert (finding.severity, finding.what) == (Severity.WARNING, "no stack is up here: run pulumi up")


def test_the_largest_jobs_of_a_full_bucket_are_named(monkeypatch: pytest.MonkeyPatch, inventory: Inventory) -> None:
    full = [warning("the bucket is 90% full", "fab prune"), fail("the bucket is gone")]
    monkeypatch.setattr(doctor, "infra_findings", lambda *_: iter(full))
    commands: list[tuple[str, str]] = []

    class Full:
        output: str | None = "2000000\t/bucket/jobs/large\n40960\t/bucket/jobs/job01\n"

        def run(self, name: str, command: str) -> SimpleNamespace:
            commands.append((name, command))
            if self.output is None:
                raise HostError(name, "does not answer")
            return SimpleNamespace(output=self.output)

    fleet: Any = Full()
    used = warning("most of the bucket is used by large (2.0 MB), job01 (41.0 kB)", "fab delete large, once it has ended")
    assert list(doctor._infra(ClusterClient(inventory, fleet), False)) == [full[0], used, full[1]]
    assert commands == [("master-0", "du -s --block-size=1 /bucket/jobs/* 2>/dev/null | sort -rn | head -n 3")]
    for fleet.output in ("", "sh: du: not found", None):
        assert list(doctor._infra(ClusterClient(inventory, fleet), False)) == full


@pytest.mark.parametrize("where", ["storage pool default", "this machine"])
def test_the_largest_jobs_on_a_full_disk_are_named_once(
    monkeypatch: pytest.MonkeyPatch, inventory: Inventory, where: str
) -> None:
    few, enough = free_space(where, 1 << 30), free_space(where, 8 << 30)
    assert (few.severity, enough.severity) == (Severity.WARNING, Severity.OK)
    used = SimpleNamespace(output="200000000000\t/bucket/jobs/large\n40960\t/bucket/jobs/job01\n")
    fleet: Any = SimpleNamespace(run=lambda *_: used)
    named = warning("most of the bucket is used by large (200.0 GB)", "fab delete large, once it has ended")
    for found, expected in (
        ([enough, few, few], [enough, few, named, few]),
        ([few, warning("the bucket is 90% full")], [few, named, warning("the bucket is 90% full")]),
    ):
        monkeypatch.setattr(doctor, "infra_findings", lambda *_, found=found: iter(found))
        assert list(doctor._infra(ClusterClient(inventory, fleet), False)) == expected
    used.output = "40960\t/bucket/jobs/job01\n"
    assert list(doctor._infra(ClusterClient(inventory, fleet), False)) == [
        few,
        warning("the bucket is 90% full"),
        warning("most of the bucket is used by job01 (41.0 kB)", "fab delete job01, once it has ended"),
    ]


def test_infra_findings_come_from_a_process_and_other_output_is_ignored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "infra").mkdir()
    (tmp_path / "infra" / "findings.py").write_text((doctor.CHECKOUT / "infra" / "findings.py").read_text())
    program = tmp_path / "infra" / "doctor.py"
    monkeypatch.setattr(doctor, "CHECKOUT", tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    line = json.dumps(ok("well").to_dict())
    program.write_text(
        f"import sys\nprint('a warning of a library')\nprint({line!r})\nassert sys.argv[1:] == ['local', '--fix']\n"
    )
    assert list(doctor.infra_findings("local", fix=True)) == [ok("well")]
    program.write_text(
        "import json, os, sys\nfrom infra.findings import ok\n"
        "values = [*sys.argv[1:], os.environ.get('PULUMI_STACK'), os.environ['PATH'].split(os.pathsep)[0]]\n"
        "print(json.dumps(ok(f'{values} {sys.stdin.read()!r}').to_dict()))\n"
        "print('one', file=sys.stderr)\n"
        "raise SystemExit('no such module')\n"
    )
    failed = fail("the infrastructure checks failed (no such module)", "make venv")
    bin_dir = str(Path(sys.prefix, "bin"))
    assert list(doctor.infra_findings(None, fix=False)) == [ok(f"{[None, bin_dir]} ''"), failed]
    assert list(doctor.infra_findings("big", fix=False)) == [ok(f"{['big', 'big', bin_dir]} ''"), failed]
    program.write_text("raise SystemExit(3)\n")
    assert list(doctor.infra_findings(None, fix=False)) == [fail("the infrastructure checks failed (3)", "make venv")]
