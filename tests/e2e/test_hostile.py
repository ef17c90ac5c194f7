"""Hostile trainers on real hosts: none harms the host, the cluster's records or another job."""

from __future__ import annotations

import json
import shlex
import time

import pytest
from stacks import ENDLESS, TINY, Stack
from waiting import wait_for

HOSTILE = ("--package", "tests/trainers/hostile", "--module", "hostile.task", "--scale-tier", "BASIC")


def _results(cluster: Stack, job: str) -> dict[str, str]:
    results: dict[str, str] = json.loads(cluster.ssh("master-0", f"cat /bucket/jobs/{job}/output/outcomes.json").out)
    return results


def trainer_runs(cluster: Stack) -> bool:
    """Return whether a trainer runs on the master's host."""
    return cluster.ssh("master-0", "systemctl is-active scaletier-trainer").out.strip() == "active"


def test_a_job_that_fills_tmp_affects_only_itself(cluster: Stack) -> None:
    cluster.must("train", "fills", *HOSTILE, "--", "--try", "fill")
    assert _results(cluster, "fills")["fill"].startswith("refused: ")
    usage = cluster.ssh("master-0", "sudo du -sxcm /tmp /var/tmp /dev/shm | tail -n 1").out
    assert int(usage.split()[0]) < 50, "its gigabytes are deleted"


def test_a_fork_bomb_ends_neither_its_replica_nor_the_host(cluster: Stack) -> None:
    process = cluster.start("fab", "train", "bombs", *HOSTILE, "--", "--try", "bomb")
    wait_for(lambda: trainer_runs(cluster), "the trainer runs")

    def has_ended() -> bool:
        cluster.must_ssh("master-0", "true")
        return process.poll() is not None

    wait_for(has_ended, "the job ends", 300)
    assert process.returncode == 0
    assert _results(cluster, "bombs")["bomb"].startswith("refused: ")
    (replica,) = cluster.describe("bombs")["replicas"]
    assert (replica["state"], replica["restarts"]) == ("EXITED", 0)


def test_no_process_outlives_its_job(cluster: Stack) -> None:
    cluster.must("train", "outlives", *HOSTILE, "--", "--try", "outlive")
    read_ticks = "cat /bucket/jobs/outlives/output/alive"
    last = cluster.ssh("master-0", read_ticks).out
    time.sleep(1)
    assert cluster.ssh("master-0", read_ticks).out == last
    assert cluster.ssh("master-0", "pgrep -u trainer").code == 1


def test_files_of_a_job_are_deleted_after_it(cluster: Stack) -> None:
    wait_for(
        lambda: not cluster.ssh("master-0", "ls /var/lib/scaletier/jobs").out.split(),
        "a host without a job keeps no job folder",
    )


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("sh -c id", "a password is required"),
        ("cat /etc/shadow", "a password is required"),
        ("systemctl stop ssh", "a password is required"),
        ("-u admin id", "a password is required"),
        ("-u replica id", "a password is required"),
        ("/usr/lib/scaletier/launch", "a password is required"),
        ("/usr/lib/scaletier/root-helper", "refused: "),
        ("/usr/lib/scaletier/root-helper remove ../../etc", "refused: '../../etc' is no id of a job"),
        ("/usr/lib/scaletier/root-helper forget ../../../etc", "refused: '../../../etc' is no id of a job"),
        ("/usr/lib/scaletier/root-helper sandbox reading 1 -p User=root -- id", "refused: "),
        ("/usr/lib/scaletier/root-helper sandbox writing 99999999 /etc -- id", "refused: '/etc' is no folder in the bucket"),
    ],
)
def test_the_login_user_runs_only_the_root_helper_as_root(cluster: Stack, command: str, message: str) -> None:
    result = cluster.ssh("master-0", f"sudo -n {command}", user="scaletier")
    assert result.code == 1, result.text
    assert message in result.err, result.text
    assert not result.out


def test_the_login_user_cannot_write_files_that_root_uses(cluster: Stack) -> None:
    for path in (
        "/usr/lib/scaletier/root-helper",
        "/etc/systemd/system/x",
        "/opt/scaletier/x",
        "/var/lib/scaletier/jobs/x",
        "/home/admin/x",
    ):
        assert cluster.ssh("master-0", f"touch {path}", user="scaletier").code == 1, path


_UNIT = r"""
import gzip, io, subprocess, sys, tarfile
packed = io.BytesIO()
with tarfile.open(fileobj=packed, mode="w") as tar:
    for path, content in {"etc/scaletier/host.json": b'{"bucket": "/bucket"}', sys.argv[1]: sys.argv[2].encode()}.items():
        entry = tarfile.TarInfo(path)
        entry.size, entry.mode = len(content), 0o6755
        tar.addfile(entry, io.BytesIO(content))
line = ["sudo", "-n", "/usr/lib/scaletier/root-helper", "take-in", "ab12"]
print(subprocess.run(line, input=gzip.compress(packed.getvalue()), capture_output=True).stderr.decode())
"""


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("etc/systemd/system/scaletier.service", "[Service]\nExecStart=/bin/sh\n"),
        ("etc/systemd/system/scaletier.service.d/host.conf", "[Service]\nUser=root\n"),
        ("etc/sudoers.d/evil", "scaletier ALL=(ALL) NOPASSWD: ALL\n"),
        ("opt/scaletier/.new/../../../etc/sudoers.d/evil", "scaletier ALL=(ALL) NOPASSWD: ALL\n"),
        ("var/lib/scaletier/secrets/../jobs/x.json", "{}"),
        ("root/.ssh/authorized_keys", "ssh-ed25519 AAAA"),
    ],
)
def test_a_push_writes_only_to_its_own_paths(cluster: Stack, path: str, content: str) -> None:
    units = "/etc/systemd/system"
    list_files = f"sudo sh -c 'sha256sum /etc/sudoers.d/* {units}/*.service {units}/*/*.conf; ls -A /root /root/.ssh'"
    before = cluster.ssh("master-0", list_files).out
    result = cluster.ssh("master-0", shlex.join(["python3", "-c", _UNIT, path, content]), user="scaletier")
    assert result.out.startswith("refused: "), result.text
    assert cluster.ssh("master-0", list_files).out == before


def test_unit_sandboxes_have_the_promised_exposure_level(cluster: Stack) -> None:
    cluster.must("train", "looked_at", *TINY, "--scale-tier", "BASIC", *ENDLESS)
    rate = "systemd-analyze security --no-pager scaletier.service scaletier-trainer.service | grep -o 'level for .*'"
    try:
        wait_for(lambda: trainer_runs(cluster), "the trainer runs")
        for unit, maximum in (("scaletier", 2.0), ("scaletier-trainer", 1.5)):
            rating = cluster.ssh("master-0", rate.replace("scaletier.service scaletier-trainer", unit)).out
            assert float(rating.split(": ")[1].split()[0]) <= maximum, rating
    finally:
        cluster.must("cancel", "looked_at")
