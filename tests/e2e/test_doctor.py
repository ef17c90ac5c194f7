"""`fab doctor` on real hosts: it reports what is broken, and `--fix` repairs what is safe to repair."""

from __future__ import annotations

import json
from typing import Any

from stacks import Stack

from infra.lxd import nft
from infra.lxd.api import client


def _look(stack: Stack, *flags: str) -> tuple[int, list[dict[str, Any]]]:
    result = stack.fab("doctor", "--json", *flags)
    assert "Traceback" not in result.text
    return result.code, json.loads(result.out)["findings"]


def _wrong(found: list[dict[str, Any]]) -> set[tuple[str, str]]:
    return {(each["check"], each["what"].partition(" (")[0]) for each in found if each["severity"] == "error"}


def test_errors_are_reported_and_safe_remedies_applied(cluster: Stack) -> None:
    key, table = cluster.folder / "id_ed25519", cluster.names.table
    before = nft.listed(table)
    failed = "until [ $(systemctl is-failed breaks) = failed ]; do sleep 0.1; done"
    instance = client(cluster.names.project).instances.get("worker-1")
    try:
        instance.stop(force=True, wait=True)
        nft.load(f"insert rule bridge {table} between accept\n")
        cluster.must_ssh("ps-1", f"sudo systemd-run --unit breaks false; {failed}")
        key.chmod(0o644)
        code, found = _look(cluster)
        assert code == 1
        assert {check for check, _ in _wrong(found)} == {"keys", "hosts", "firewall", "ssh"}
        whats = " ".join(what for _, what in _wrong(found))
        for problem in ("id_ed25519 has mode 0644", "host worker-1 is stopped", "+ accept", "breaks.service failed on ps-1"):
            assert problem in whats
        code, found = _look(cluster, "--fix")
        assert {each["check"] for each in found if each["fixed"]} == {"keys", "hosts", "firewall"}
        assert nft.listed(table) == before
        assert key.stat().st_mode & 0o777 == 0o600
        cluster.must_ssh("ps-1", "sudo systemctl reset-failed breaks")
        assert cluster.hosts() == ["ps-0", "ps-1", "master-0", "worker-0", "worker-1", "evaluator-0"]
        code, found = _look(cluster)
        assert (code, _wrong(found)) == (0, set())
        assert {"kernel", "machine", "python"} <= {each["check"] for each in found if each["severity"] == "ok"}
        assert not [each for each in found if each["check"] == "orphans" and "e2e" in each["what"]]
    finally:
        key.chmod(0o600)


def test_without_a_firewall_and_without_a_stack(cluster: Stack, empty_stack: Stack) -> None:
    nft.remove(cluster.names.table)
    code, found = _look(cluster)
    assert (code, {check for check, _ in _wrong(found)}) == (1, {"firewall"})
    assert _look(cluster, "--fix")[0] == 0
    assert nft.listed(cluster.names.table)
    code, found = _look(empty_stack)
    assert {"stack", "daemon", "pulumi"} <= {each["check"] for each in found}
