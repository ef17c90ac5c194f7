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

from infra.findings import Finding, Severity, fail, ok, warning
from ops.cluster.fanout import fan_out
from ops.errors import DONE, FAILED, HostError, UsageError
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


def test_healthy_hosts_are_one_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = run_host_checks(monkeypatch, ps_0="1000.004\n 12%\n", worker_0="999.999\n 3%\n\n")
    assert finding == ok("2 of 2 hosts reachable; the largest clock difference is that of ps-0, +4 ms")


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
        ("error", "worker-2 gives an answer that is none of a host"),
    ]
    assert findings[3].remedy == "fab shell worker-0 -- sudo systemctl restart scaletier-firewall.service"


@pytest.mark.parametrize("truncated", ["", "1000.0", "1000.0\n", "1000.0\n 9", "1000.0\n a%\n"])
def test_a_truncated_output_does_not_hide_other_hosts(monkeypatch: pytest.MonkeyPatch, truncated: str) -> None:
    findings = run_host_checks(monkeypatch, ps_0=truncated, worker_0="1000.0\n 99%\nx.service\n", worker_1="1000.0\n 1%\n")
    what = [finding.what for finding in findings]
    assert ("ps-0 gives an answer that is none of a host" in what) is (truncated != "1000.0\n 9")
    assert {"the disk of worker-0 is 99 % full", "x.service failed on worker-0"} <= {*what}
    assert what[-1].startswith("2 of 3 hosts" if len(findings) == 4 else "3 of 3 hosts")


def test_a_readable_key_is_made_private(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    for name in ("id_ed25519", "known_hosts", "ssh_config"):
        (tmp_path / name).touch(mode=0o600)
    assert list(doctor.keys(tmp_path)) == [ok("the stack's key is there, and private")]
    (tmp_path / "id_ed25519").chmod(0o644)
    tmp_path.chmod(0o755)
    findings = list(doctor.keys(tmp_path))
    assert [finding.remedy for finding in findings] == [f"chmod 0700 {tmp_path}", f"chmod 0600 {tmp_path}/id_ed25519"]
    for finding in findings:
        assert finding.fix
        finding.fix()
    assert (tmp_path.stat().st_mode & 0o777, (tmp_path / "id_ed25519").stat().st_mode & 0o777) == (0o700, 0o600)
    (tmp_path / "ssh_config").unlink()
    (missing,) = doctor.keys(tmp_path)
    assert missing.remedy == "fab connect"


def test_errors_set_the_exit_code_and_fix_prints_its_fixes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    host = {"off": True}

    def checks(root: Path, fix: bool) -> dict[str, Any]:
        start = fail("host ps-0 is stopped", "pulumi up", lambda: host.update(off=False))
        return {"hosts": lambda: [start] if host["off"] else [ok("all run")], "kernel": lambda: [warning("low", "raise it")]}

    monkeypatch.setattr(doctor, "_checks", checks)
    assert doctor.doctor(fix=False, as_json=True, root=tmp_path) == FAILED
    output = json.loads(capsys.readouterr().out)
    check("ops.show.doctor.doctor", output)
    assert output["errors"] == 1
    assert doctor.doctor(fix=True, as_json=False, root=tmp_path) == DONE
    lines = capsys.readouterr()
    assert lines.out.splitlines() == [
        "fixed    hosts     host ps-0 is stopped",
        "warning  kernel    low: raise it",
        "ok       hosts     all run",
    ]
    assert lines.err == "0 errors, 1 warning\n"
    assert doctor.doctor(fix=False, as_json=False, root=tmp_path) == DONE


def test_without_a_stack_only_the_machine_is_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def raise_no_stack(_: Path) -> None:
        raise UsageError("no stack is up here: run pulumi up")

    monkeypatch.setattr(doctor, "load", raise_no_stack)
    checks = doctor._checks(tmp_path, False)
    assert checks.keys() == {"stack", "infra"}
    (finding,) = checks["stack"]()
    assert (finding.severity, finding.what) == (Severity.WARNING, "no stack is up here: run pulumi up")


def test_infra_findings_come_from_a_process_and_other_output_is_ignored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "infra").mkdir()
    program = tmp_path / "infra" / "doctor.py"
    monkeypatch.setattr(doctor, "HERE", tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    line = json.dumps(ok("well").to_dict())
    program.write_text(
        f"import sys\nprint('a warning of a library')\nprint({line!r})\nassert sys.argv[1:] == ['local', '--fix']\n"
    )
    assert list(doctor.infra_findings("local", fix=True)) == [ok("well")]
    program.write_text("raise SystemExit('no such module')\n")
    (finding,) = doctor.infra_findings(None, fix=False)
    assert finding == fail("infra cannot look (no such module)", "make venv")
    assert sys.executable
