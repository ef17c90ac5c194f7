"""`fab doctor` with fake hosts: what it says, what it mends, and its exit code."""

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
    """Hosts that print what a test says, or do not answer."""

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


def asked(monkeypatch: pytest.MonkeyPatch, **outputs: str | None) -> list[Finding]:
    monkeypatch.setattr(doctor.time, "time", lambda: 1000.0)
    named = {name.replace("_", "-"): output for name, output in outputs.items()}
    cluster = SimpleNamespace(inventory=SimpleNamespace(names=tuple(named)), fleet=Fleet(named))
    return list(doctor.hosts(cluster))  # type: ignore[arg-type]


def test_hosts_that_are_well(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = asked(monkeypatch, ps_0="1000.004\n 12%\n", worker_0="999.999\n 3%\n\n")
    assert found == ok("2 of 2 hosts reachable; the largest clock difference is that of ps-0, +4 ms")


def test_hosts_of_which_something_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    found = asked(
        monkeypatch,
        ps_0=None,
        ps_1="1060.0\n 12%\n",
        worker_0="1000.0\n 91%\nscaletier-firewall.service\n",
        worker_1="1000.0\n 99%\n",
        worker_2="sh: date: not found\n",
    )
    assert [(str(each.severity), each.what) for each in found] == [
        ("error", "ps-0 (10.0.0.1) does not answer"),
        ("warning", "the clock of ps-1 is +60000 ms off this one's"),
        ("warning", "the disk of worker-0 is 91 % full"),
        ("error", "scaletier-firewall.service failed on worker-0"),
        ("error", "the disk of worker-1 is 99 % full"),
        ("error", "worker-2 gives an answer that is none of a host"),
    ]
    assert found[3].remedy == "fab shell worker-0 -- sudo systemctl restart scaletier-firewall.service"


@pytest.mark.parametrize("cut", ["", "1000.0", "1000.0\n", "1000.0\n 9", "1000.0\n a%\n"])
def test_an_answer_that_was_cut_hides_nothing_of_other_hosts(monkeypatch: pytest.MonkeyPatch, cut: str) -> None:
    found = asked(monkeypatch, ps_0=cut, worker_0="1000.0\n 99%\nx.service\n", worker_1="1000.0\n 1%\n")
    what = [each.what for each in found]
    assert ("ps-0 gives an answer that is none of a host" in what) is (cut != "1000.0\n 9")
    assert {"the disk of worker-0 is 99 % full", "x.service failed on worker-0"} <= {*what}
    assert what[-1].startswith("2 of 3 hosts" if len(found) == 4 else "3 of 3 hosts")


def test_a_key_that_others_may_read_is_made_private(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    for name in ("id_ed25519", "known_hosts", "ssh_config"):
        (tmp_path / name).touch(mode=0o600)
    assert list(doctor.keys(tmp_path)) == [ok("the stack's key is there, and private")]
    (tmp_path / "id_ed25519").chmod(0o644)
    tmp_path.chmod(0o755)
    found = list(doctor.keys(tmp_path))
    assert [each.remedy for each in found] == [f"chmod 0700 {tmp_path}", f"chmod 0600 {tmp_path}/id_ed25519"]
    for each in found:
        assert each.fix
        each.fix()
    assert (tmp_path.stat().st_mode & 0o777, (tmp_path / "id_ed25519").stat().st_mode & 0o777) == (0o700, 0o600)
    (tmp_path / "ssh_config").unlink()
    (gone,) = doctor.keys(tmp_path)
    assert gone.remedy == "fab connect"


def test_what_is_broken_decides_the_exit_code_and_fix_says_what_it_did(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    there = {"off": True}

    def checks(root: Path, fix: bool) -> dict[str, Any]:
        start = fail("host ps-0 is stopped", "pulumi up", lambda: there.update(off=False))
        return {"hosts": lambda: [start] if there["off"] else [ok("all run")], "kernel": lambda: [warning("low", "raise it")]}

    monkeypatch.setattr(doctor, "_checks", checks)
    assert doctor.doctor(fix=False, as_json=True, root=tmp_path) == FAILED
    said = json.loads(capsys.readouterr().out)
    check("ops.show.doctor.doctor", said)
    assert said["errors"] == 1
    assert doctor.doctor(fix=True, as_json=False, root=tmp_path) == DONE
    lines = capsys.readouterr()
    assert lines.out.splitlines() == [
        "fixed    hosts     host ps-0 is stopped",
        "warning  kernel    low: raise it",
        "ok       hosts     all run",
    ]
    assert lines.err == "0 errors, 1 warning\n"
    assert doctor.doctor(fix=False, as_json=False, root=tmp_path) == DONE


def test_without_a_stack_the_machine_is_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def none_is_up(_: Path) -> None:
        raise UsageError("no stack is up here: run pulumi up")

    monkeypatch.setattr(doctor, "load", none_is_up)
    checks = doctor._checks(tmp_path, False)
    assert checks.keys() == {"stack", "infra"}
    (found,) = checks["stack"]()
    assert (found.severity, found.what) == (Severity.WARNING, "no stack is up here: run pulumi up")


def test_infra_is_asked_in_a_process_and_what_is_no_finding_is_passed_over(
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
    (found,) = doctor.infra_findings(None, fix=False)
    assert found == fail("infra cannot look (no such module)", "make venv")
    assert sys.executable
