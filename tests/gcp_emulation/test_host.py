"""Equal hosts of both targets: the image of a local one and the start-up script of Google's, compared."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from cloud import Cloud, Stack
from machines import PROJECT, local_host, run

from infra.gcp.image import NOT_HERE
from infra.lxd.image import require, require_runtime
from infra.runtime.build import VENV
from infra.templates import ROOT

ROLE = ROOT / "ansible" / "roles" / "host"
# What Google's guest agent adds to who logs in, on top of what the host is.
AGENTS_GROUPS = {"adm", "audio", "dip", "docker", "floppy", "google-sudoers", "lxd", "plugdev", "video"}
FAILS_IN_A_CONTAINER = {"systemd-binfmt.service"}
ASK = r"""
import grp, hashlib, json, os, pathlib, pwd, stat, subprocess, sys
asked = json.loads(sys.argv[1])
def run(*command):
    return subprocess.run(command, capture_output=True, text=True).stdout
def user(name):
    found = pwd.getpwnam(name)
    groups = sorted(grp.getgrgid(gid).gr_name for gid in os.getgrouplist(name, found.pw_gid))
    password = run("getent", "shadow", name).split(":")[1]
    own = grp.getgrgid(found.pw_gid).gr_name
    return {"home": found.pw_dir, "shell": found.pw_shell, "group": own, "groups": groups, "password": password}
def file(path):
    there = os.lstat(path)
    owner, group = pwd.getpwuid(there.st_uid).pw_name, grp.getgrgid(there.st_gid).gr_name
    content = hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest() if stat.S_ISREG(there.st_mode) else ""
    return [oct(there.st_mode), owner, group, content]
def units(*states):
    lines = run("systemctl", "list-units", "--plain", "--no-legend", "--type=service,timer,socket", *states).splitlines()
    return sorted(line.split()[0] for line in lines)
site = next(pathlib.Path(asked["venv"], "lib").glob("python3*"))
print(json.dumps({
    "users": {name: user(name) for name in asked["users"]},
    "files": {path: file(path) if os.path.lexists(path) else None for path in asked["files"]},
    "masked": [unit for unit in asked["masked"] if run("systemctl", "is-enabled", unit).strip() == "masked"],
    "sshd": sorted(run("/usr/sbin/sshd", "-T").splitlines()),
    "sysctl": {str(path): path.read_text() for path in sorted(pathlib.Path("/etc/sysctl.d").glob("*")) if path.is_file()},
    "limits": [str(path) for path in pathlib.Path("/etc/security/limits.d").glob("*")],
    "journal": run("journalctl", "--header").count("File path: /var/log/journal/") > 0,
    "packages": sorted(path.name for path in (site / "site-packages").glob("*.dist-info")),
    "python": run(f"{asked['venv']}/bin/python", "-c", "import sys; print(sys.version)"),
    "works": run(f"{asked['venv']}/bin/python", "-B", "-c", "import tensorflow as tf; print(tf.__version__)").strip(),
    "timers": [unit for unit in units("--state=active") if unit.endswith(".timer")],
    "failed": units("--state=failed"),
}))
"""


@pytest.fixture(scope="module")
def both(cloud: Cloud, cluster: Stack) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the properties of a local host, and of a Google one."""
    defaults = yaml.safe_load((ROLE / "defaults/main.yml").read_text())
    top = ROLE / "files/root"
    names = [path.relative_to(top).as_posix() for path in sorted(top.rglob("*")) if path.is_file()]
    folders = [
        line.split()[1]
        for line in (top / "etc/tmpfiles.d/scaletier-host.conf").read_text().splitlines()
        if line.startswith("d ")
    ]
    asked = {
        "users": [user["name"] for user in defaults["host_users"]],
        "files": [*(f"/{name}" for name in names if name not in NOT_HERE), *folders],
        "masked": defaults["host_masked"],
        "venv": VENV,
    }
    with local_host(require(), require_runtime(), VENV) as ours:
        google = next(iter(cloud.google.machines.values()))
        yield _said(*ours, asked), _said(PROJECT, google.name, asked)


def _said(project: str, host: str, asked: dict[str, Any]) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(run(project, host, "python3", "-c", ASK, json.dumps(asked)))
    return said


def test_users_are_the_same(both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    ours, google = (said["users"] for said in both)
    for user in google.values():
        user["groups"] = sorted(set(user["groups"]) - AGENTS_GROUPS)
    assert google == ours


@pytest.mark.parametrize("what", ["files", "sshd", "sysctl", "packages", "python", "works", "journal"])
def test_a_host_is_the_same_in(both: tuple[dict[str, Any], dict[str, Any]], what: str) -> None:
    ours, google = (said[what] for said in both)
    assert ours
    assert google == ours


def test_no_host_changes_by_itself(both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    for said in both:
        assert {"apt-daily.timer", "apt-daily-upgrade.timer", "unattended-upgrades.service"} <= set(said["masked"])
        assert said["timers"] == ["systemd-tmpfiles-clean.timer"]
        assert not set(said["failed"]) - FAILS_IN_A_CONTAINER
    assert both[0]["masked"] == both[1]["masked"]
    assert both[0]["limits"] == both[1]["limits"]
