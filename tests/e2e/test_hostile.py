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
    results: dict[str, str] = json.loads(cluster.ssh("master-0", f"cat /bucket/jobs/{job}/output/told.json").out)
    return results


def trains(cluster: Stack) -> bool:
    """Return whether a trainer runs on the master's host."""
    return cluster.ssh("master-0", "systemctl is-active scaletier-trainer").out.strip() == "active"


def test_a_full_tmp_is_its_own_alone(cluster: Stack) -> None:
    cluster.must("train", "fills", *HOSTILE, "--", "--try", "fill")
    assert _results(cluster, "fills")["fill"].startswith("refused: ")
    left = cluster.ssh("master-0", "sudo du -sxcm /tmp /var/tmp /dev/shm | tail -n 1").out
    assert int(left.split()[0]) < 50, "of its gigabytes nothing is left"


def test_a_bomb_takes_neither_its_replica_nor_the_host(cluster: Stack) -> None:
    process = cluster.start("fab", "train", "bombs", *HOSTILE, "--", "--try", "bomb")
    wait_for(lambda: trains(cluster), "the trainer runs")

    def ended() -> bool:
        cluster.must_ssh("master-0", "true")
        return process.poll() is not None

    wait_for(ended, "the job ends", 300)
    assert process.returncode == 0
    assert _results(cluster, "bombs")["bomb"].startswith("refused: ")
    (replica,) = cluster.describe("bombs")["replicas"]
    assert (replica["state"], replica["restarts"]) == ("EXITED", 0)


def test_nothing_outlives_its_job(cluster: Stack) -> None:
    cluster.must("train", "outlives", *HOSTILE, "--", "--try", "outlive")
    alive = "cat /bucket/jobs/outlives/output/alive"
    last = cluster.ssh("master-0", alive).out
    time.sleep(1)
    assert cluster.ssh("master-0", alive).out == last
    assert cluster.ssh("master-0", "pgrep -u trainer").code == 1


def test_what_a_job_leaves_goes_with_it(cluster: Stack) -> None:
    wait_for(lambda: not cluster.ssh("master-0", "ls /var/lib/scaletier/jobs").out.split(), "a host that has no job keeps none")


@pytest.mark.parametrize(
    ("words", "says"),
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
def test_who_logs_in_may_have_root_do_nothing_else(cluster: Stack, words: str, says: str) -> None:
    ran = cluster.ssh("master-0", f"sudo -n {words}", user="scaletier")
    assert ran.code == 1, ran.text
    assert says in ran.err, ran.text
    assert not ran.out


def test_who_logs_in_may_not_write_what_root_goes_by(cluster: Stack) -> None:
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
def test_a_push_puts_nothing_elsewhere(cluster: Stack, path: str, content: str) -> None:
    units = "/etc/systemd/system"
    there = f"sudo sh -c 'sha256sum /etc/sudoers.d/* {units}/*.service {units}/*/*.conf; ls -A /root /root/.ssh'"
    before = cluster.ssh("master-0", there).out
    ran = cluster.ssh("master-0", shlex.join(["python3", "-c", _UNIT, path, content]), user="scaletier")
    assert ran.out.startswith("refused: "), ran.text
    assert cluster.ssh("master-0", there).out == before


def test_units_are_as_tight_as_is_said(cluster: Stack) -> None:
    cluster.must("train", "looked_at", *TINY, "--scale-tier", "BASIC", *ENDLESS)
    rated = "systemd-analyze security --no-pager scaletier.service scaletier-trainer.service | grep -o 'level for .*'"
    try:
        wait_for(lambda: trains(cluster), "the trainer runs")
        for unit, most in (("scaletier", 2.0), ("scaletier-trainer", 1.5)):
            rating = cluster.ssh("master-0", rated.replace("scaletier.service scaletier-trainer", unit)).out
            assert float(rating.split(": ")[1].split()[0]) <= most, rating
    finally:
        cluster.must("cancel", "looked_at")
