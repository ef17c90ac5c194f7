"""`fab doctor` on real hosts: it reports errors, and `--fix` applies the safe remedies."""

from __future__ import annotations

import json
from typing import Any

from stacks import Stack

from infra.lxd import nft
from infra.lxd.api import client


def _run_doctor(stack: Stack, *flags: str) -> tuple[int, list[dict[str, Any]]]:
    result = stack.fab("doctor", "--json", *flags)
    assert "Traceback" not in result.text
    return result.code, json.loads(result.out)["findings"]


def _errors(findings: list[dict[str, Any]]) -> set[tuple[str, str]]:
    return {(each["check"], each["what"].partition(" (")[0]) for each in findings if each["severity"] == "error"}


def test_errors_are_reported_and_safe_remedies_applied(cluster: Stack) -> None:
    key, table = cluster.folder / "id_ed25519", cluster.names.table
    before = nft.list_table(table)
    failed = "until [ $(systemctl is-failed breaks) = failed ]; do sleep 0.1; done"
    instance = client(cluster.names.project).instances.get("worker-1")
    try:
        instance.stop(force=True, wait=True)
        nft.load(f"insert rule bridge {table} between accept\n")
        cluster.must_ssh("ps-1", f"sudo systemd-run --unit breaks false; {failed}")
        key.chmod(0o644)
        code, findings = _run_doctor(cluster)
        assert code == 1
        assert {check for check, _ in _errors(findings)} == {"keys", "hosts", "firewall", "ssh"}
        problems = " ".join(what for _, what in _errors(findings))
        for problem in ("id_ed25519 has mode 0644", "host worker-1 is stopped", "+ accept", "breaks.service failed on ps-1"):
            assert problem in problems
        code, findings = _run_doctor(cluster, "--fix")
        assert {each["check"] for each in findings if each["fixed"]} == {"keys", "hosts", "firewall"}
        assert nft.list_table(table) == before
        assert key.stat().st_mode & 0o777 == 0o600
        cluster.must_ssh("ps-1", "sudo systemctl reset-failed breaks")
        assert cluster.hosts() == ["ps-0", "ps-1", "master-0", "worker-0", "worker-1", "evaluator-0"]
        code, findings = _run_doctor(cluster)
        assert (code, _errors(findings)) == (0, set())
        assert {"kernel", "machine", "python"} <= {each["check"] for each in findings if each["severity"] == "ok"}
        assert not [each for each in findings if each["check"] == "orphans" and "e2e" in each["what"]]
    finally:
        key.chmod(0o600)


def test_the_doctor_reports_a_missing_firewall_and_an_empty_stack(cluster: Stack, empty_stack: Stack) -> None:
    nft.remove(cluster.names.table)
    code, findings = _run_doctor(cluster)
    assert (code, {check for check, _ in _errors(findings)}) == (1, {"firewall"})
    assert _run_doctor(cluster, "--fix")[0] == 0
    assert nft.list_table(cluster.names.table)
    code, findings = _run_doctor(empty_stack)
    assert {"stack", "daemon", "pulumi"} <= {each["check"] for each in findings}
