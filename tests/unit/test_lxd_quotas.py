"""The quota accounting of a btrfs pool; the kernel is a folder here, and btrfs a script."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from infra.lxd import bucket, quotas

VOLUME = {"project": "p", "pool": "scaletier", "name": "bucket", "size": 2**34}


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fake the kernel's folder of a pool that stopped accounting, and of another file system."""
    groups = tmp_path / "sys" / "a" / "qgroups"
    groups.mkdir(parents=True)
    (groups / "inconsistent").write_text("1\n")
    (groups / "drop_subtree_threshold").write_text("3\n")
    (groups.parent / "label").write_text("scaletier\n")
    (tmp_path / "sys" / "b").mkdir()
    (tmp_path / "sys" / "b" / "label").write_text("other\n")
    program = tmp_path / "btrfs"
    program.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\necho 0 >{groups}/inconsistent; echo done; exit 1\n')
    program.chmod(0o755)
    monkeypatch.setattr(quotas, "_argv", lambda pool: [str(program), pool])
    return tmp_path / "sys"


def test_stopped_quota_accounting_is_restarted(kernel: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert not quotas.is_accounting("scaletier", kernel)
    quotas.enable_accounting("scaletier", kernel)
    assert quotas.is_accounting("scaletier", kernel)
    assert (kernel / "a/qgroups/drop_subtree_threshold").read_text() == "8"
    quotas.enable_accounting("scaletier", kernel)
    assert (tmp_path / "calls").read_text() == "scaletier\n", "working accounting is not restarted"
    assert capfd.readouterr() == ("", "")


def test_other_pools_and_pools_without_limits_are_unchanged(kernel: Path, tmp_path: Path) -> None:
    for pool in ("other", "zfs"):
        assert quotas.is_accounting(pool, kernel)
        quotas.enable_accounting(pool, kernel)
    assert not (tmp_path / "calls").exists()


def test_without_root_rights_the_command_is_printed(kernel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "_argv", lambda _: ["/no/such/btrfs"])
    quotas.enable_accounting("scaletier", kernel)
    assert not quotas.is_accounting("scaletier", kernel)
    mount = SimpleNamespace(mountpoint="/var/snap/lxd/common/lxd/storage-pools/scaletier")
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: [mount])  # noqa: A006  psutil's name
    assert quotas.command("scaletier") == f"sudo btrfs quota rescan -w {mount.mountpoint}"


def test_a_limit_without_accounting_is_a_drift_that_up_fixes(monkeypatch: pytest.MonkeyPatch) -> None:
    is_counted, done = [False], list[str]()
    monkeypatch.setattr(bucket, "get_volume", lambda _: {"config": {"size": str(2**34)}})
    monkeypatch.setattr(bucket, "_configure", lambda *_: None)
    monkeypatch.setattr(quotas, "is_accounting", lambda _: is_counted[0])
    monkeypatch.setattr(quotas, "enable_accounting", lambda pool: done.append(pool))
    drifted = bucket.read("bucket", VOLUME)
    assert drifted == {**VOLUME, "size": "not counted"}
    assert bucket.update("bucket", drifted, VOLUME) == VOLUME
    assert done == ["scaletier"]
    is_counted[0] = True
    assert bucket.read("bucket", VOLUME) == VOLUME


@pytest.mark.parametrize(("path", "root"), [("/sbin/btrfs", True), (None, False)])
def test_the_rescan_runs_as_root(monkeypatch: pytest.MonkeyPatch, path: str | None, root: bool) -> None:
    other = SimpleNamespace(mountpoint="/mnt/storage-pools/another-scaletier")
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: [other] if all else [])  # noqa: A006  psutil's name
    monkeypatch.setattr(quotas.shutil, "which", lambda _: path)
    monkeypatch.setattr(quotas.os, "geteuid", lambda: 0 if root else 1000)
    argv = [path or "/usr/bin/btrfs", "quota", "rescan", "-w", "/var/lib/lxd/storage-pools/scaletier"]
    assert quotas._argv("scaletier") == ([] if root else ["sudo", "-n"]) + argv


def test_a_kernel_that_does_not_report_accounting_counts(kernel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (kernel / "a/qgroups/inconsistent").unlink()
    (kernel / "a/qgroups/drop_subtree_threshold").unlink()
    (kernel / "a/qgroups").chmod(0o500)
    assert quotas.is_accounting("scaletier", kernel)
    monkeypatch.setattr(quotas, "_argv", lambda _: ["/no/such/btrfs"])
    quotas.enable_accounting("scaletier", kernel)
    (kernel / "a/label").unlink()
    (kernel / "a/label").mkdir()
    assert quotas._qgroups("scaletier", kernel) is None, "an unreadable label"
