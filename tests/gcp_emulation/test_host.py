"""Compare the hosts of both targets: a local image and Google's start-up script must give equal ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from cloud import Cloud, Stack
from machines import PROJECT, run, start_local_host

from infra.gcp.image import LOCAL_ONLY_FILES
from infra.lxd.image import require, require_runtime
from infra.runtime.build import VENV
from infra.templates import ROOT

ROLE = ROOT / "ansible" / "roles" / "host"
# The groups that Google's guest agent adds to the login user.
GUEST_AGENT_GROUPS = {"adm", "audio", "dip", "docker", "floppy", "google-sudoers", "lxd", "plugdev", "video"}
FAILS_IN_A_CONTAINER = {"systemd-binfmt.service"}
READ_PROPERTIES = r"""
import grp, hashlib, json, os, pathlib, pwd, stat, subprocess, sys
request = json.loads(sys.argv[1])
def run(*command):
    return subprocess.run(command, capture_output=True, text=True).stdout
def user(name):
    entry = pwd.getpwnam(name)
    groups = sorted(grp.getgrgid(gid).gr_name for gid in os.getgrouplist(name, entry.pw_gid))
    password = run("getent", "shadow", name).split(":")[1]
    primary = grp.getgrgid(entry.pw_gid).gr_name
    return {"home": entry.pw_dir, "shell": entry.pw_shell, "group": primary, "groups": groups, "password": password}
def file(path):
    status = os.lstat(path)
    owner, group = pwd.getpwuid(status.st_uid).pw_name, grp.getgrgid(status.st_gid).gr_name
    content = hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest() if stat.S_ISREG(status.st_mode) else ""
    return [oct(status.st_mode), owner, group, content]
def units(*states):
    lines = run("systemctl", "list-units", "--plain", "--no-legend", "--type=service,timer,socket", *states).splitlines()
    return sorted(line.split()[0] for line in lines)
site = next(pathlib.Path(request["venv"], "lib").glob("python3*"))
print(json.dumps({
    "users": {name: user(name) for name in request["users"]},
    "files": {path: file(path) if os.path.lexists(path) else None for path in request["files"]},
    "masked": [unit for unit in request["masked"] if run("systemctl", "is-enabled", unit).strip() == "masked"],
    "sshd": sorted(run("/usr/sbin/sshd", "-T").splitlines()),
    "sysctl": {str(path): path.read_text() for path in sorted(pathlib.Path("/etc/sysctl.d").glob("*")) if path.is_file()},
    "limits": [str(path) for path in pathlib.Path("/etc/security/limits.d").glob("*")],
    "journal": run("journalctl", "--header").count("File path: /var/log/journal/") > 0,
    "packages": sorted(path.name for path in (site / "site-packages").glob("*.dist-info")),
    "python": run(f"{request['venv']}/bin/python", "-c", "import sys; print(sys.version)"),
    "works": run(f"{request['venv']}/bin/python", "-B", "-c", "import tensorflow as tf; print(tf.__version__)").strip(),
    "timers": [unit for unit in units("--state=active") if unit.endswith(".timer")],
    "failed": units("--state=failed"),
}))
"""


@pytest.fixture(scope="module")
def properties(cloud: Cloud, cluster: Stack) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the properties of a local host, and of a Google one."""
    defaults = yaml.safe_load((ROLE / "defaults/main.yml").read_text())
    top = ROLE / "files/root"
    names = [path.relative_to(top).as_posix() for path in sorted(top.rglob("*")) if path.is_file()]
    folders = [
        line.split()[1]
        for line in (top / "etc/tmpfiles.d/scaletier-host.conf").read_text().splitlines()
        if line.startswith("d ")
    ]
    request = {
        "users": [user["name"] for user in defaults["host_users"]],
        "files": [*(f"/{name}" for name in names if name not in LOCAL_ONLY_FILES), *folders],
        "masked": defaults["host_masked"],
        "venv": VENV,
    }
    with start_local_host(require(), require_runtime(), VENV) as local_host:
        google = next(iter(cloud.google.machines.values()))
        yield read_properties(*local_host, request), read_properties(PROJECT, google.name, request)


def read_properties(project: str, host: str, request: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(run(project, host, "python3", "-c", READ_PROPERTIES, json.dumps(request)))
    return values


def test_users_are_equal_on_both_targets(properties: tuple[dict[str, Any], dict[str, Any]]) -> None:
    local, google = (host["users"] for host in properties)
    for user in google.values():
        user["groups"] = sorted(set(user["groups"]) - GUEST_AGENT_GROUPS)
    assert google == local


@pytest.mark.parametrize("name", ["files", "sshd", "sysctl", "packages", "python", "works", "journal"])
def test_a_property_is_equal_on_both_targets(properties: tuple[dict[str, Any], dict[str, Any]], name: str) -> None:
    local, google = (host[name] for host in properties)
    assert local
    assert google == local


def test_no_host_updates_itself(properties: tuple[dict[str, Any], dict[str, Any]]) -> None:
    for host in properties:
        assert {"apt-daily.timer", "apt-daily-upgrade.timer", "unattended-upgrades.service"} <= set(host["masked"])
        assert host["timers"] == ["systemd-tmpfiles-clean.timer"]
        assert not set(host["failed"]) - FAILS_IN_A_CONTAINER
    assert properties[0]["masked"] == properties[1]["masked"]
    assert properties[0]["limits"] == properties[1]["limits"]
