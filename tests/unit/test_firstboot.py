"""The first-boot script of a local host, run here with fakes of the tools that it calls."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "ansible/roles/host/files/root/usr/lib/scaletier/firstboot"
ADDRESS = r"2: eth0    inet 10.60.0.4/24 brd 10.60.0.255 scope global eth0\       valid_lft forever preferred_lft forever"


@pytest.mark.parametrize(("address", "line"), [(ADDRESS, ["10.60.0.4 worker-0"]), ("", [])])
def test_a_host_s_name_resolves_to_its_address_in_the_cluster(tmp_path: Path, address: str, line: list[str]) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n::1 localhost\n")
    for name, body in {"ip": f"echo '{address}'", "uname": "echo worker-0", "ssh-keygen": "true"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    text = SCRIPT.read_text().replace("/etc/hosts", str(hosts)).replace("/dev/", f"{tmp_path}/")
    for _ in range(2):  # a first run may have been interrupted
        subprocess.run(["sh", "-c", text], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=True)
    assert hosts.read_text().splitlines()[2:] == line
