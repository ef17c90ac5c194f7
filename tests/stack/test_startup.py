"""Check the start-up script's text, and run parts of it: for example when an idle host stops."""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from infra.gcp import image
from infra.gcp.image import StoredRuntime, startup_script, version
from infra.runtime.recipe import constraint_lines, requirement_lines, runtime_spec
from infra.scale_tiers import Accelerator

GPU = Accelerator("nvidia-l4")
NETWORK = ipaddress.IPv4Network("10.64.0.0/20")


def render_script(accelerator: Accelerator | None, idle_stop_seconds: int, sha256: str = "5a" * 32) -> str:
    archive = StoredRuntime(runtime_spec("2.21.0", accelerator), "a-bucket", sha256)
    return startup_script(archive, accelerator, idle_stop_seconds, NETWORK, egress_closed=True)


SCRIPT = render_script(GPU, 1800)


def test_the_script_depends_on_its_inputs_only() -> None:
    assert render_script(GPU, 1800) == SCRIPT
    assert render_script(None, 1800) != SCRIPT
    assert render_script(GPU, 1800, "6b" * 32) != SCRIPT


def test_files_of_editors_are_no_part_of_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    role = shutil.copytree(image._ROLE, tmp_path / "host")
    for stray in ("etc/.DS_Store", "etc/hosts~", "usr/lib/scaletier/.agent.swp"):
        (role / "files/root" / stray).write_bytes(b"\xff")
    monkeypatch.setattr(image, "_ROLE", role)
    assert render_script(GPU, 1800) == SCRIPT


def test_a_script_contains_its_version() -> None:
    assert version(SCRIPT) == version(render_script(GPU, 1800)) != version(render_script(GPU, 1801))
    assert SCRIPT.count(f"\nscript={version(SCRIPT)}\n") == 1


def test_hosts_with_closed_egress_install_only_a_driver() -> None:
    assert not re.search(r"\b(apt-get|pip)\s", render_script(None, 1800))
    assert "apt-get install" in SCRIPT
    assert f"url=https://storage.googleapis.com/a-bucket/{runtime_spec('2.21.0', GPU).path}\nsha256={'5a' * 32}\n" in SCRIPT


def read_step(text: str, name: str) -> str:
    """Return the lines of a step, to be run by themselves."""
    match = re.search(rf"^step {name}\n(.*?)\n(?=\n*step )", text, re.DOTALL | re.MULTILINE)
    return match[1]


def read_program(name: str) -> str:
    return re.search(rf"/usr/lib/scaletier/{name} <<'SCALETIER_FILE'\n(.*?)SCALETIER_FILE\n", SCRIPT, re.DOTALL)[1]


def run_step(folder: Path, text: str, *shell: str, status: int = 0, **tools: str) -> str:
    """Run a script, in Bash by default, with these tools; check its exit status and return its output."""
    for name, body in tools.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    command, env = [*(shell or ("bash", "-Eeuc")), text], {"PATH": f"{folder}:/usr/bin:/bin"}
    done = subprocess.run(command, env=env, check=False, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    return done.stdout


ADDRESS = "2: eth0    inet 10.64.0.5/32 metric 100 scope global dynamic eth0\\       valid_lft 86000sec"


@pytest.mark.parametrize("first", ["fe80::4001:aff:fe40:5 STREAM worker-0", "10.64.0.5 STREAM worker-0", ""])
def test_a_hosts_name_resolves_to_its_cluster_address(tmp_path: Path, first: str) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n10.64.0.9 worker-0 # scaletier\n")
    text = read_step(render_script(None, 0), "names").replace("/etc/hosts", str(hosts))
    run_step(tmp_path, text, ip=f"echo '{ADDRESS}'", getent=f"echo '{first}'", uname="echo worker-0")
    lines = hosts.read_text().splitlines()
    assert "127.0.0.1 localhost" in lines
    assert not [line for line in lines if line.startswith("10.64.0.9")], "an old address"
    assert (lines[0] == "10.64.0.5 worker-0 # scaletier") is (not first.startswith("10.64.0.5"))


@pytest.mark.parametrize("reachable", [True, False])
def test_packages_come_from_debian_if_the_network_reaches_it(tmp_path: Path, reachable: bool) -> None:
    archive = StoredRuntime(runtime_spec("2.21.0", None), "a-bucket", "5a" * 32)
    text = read_step(startup_script(archive, None, 0, NETWORK, egress_closed=False), "packages")
    calls = tmp_path / "calls"
    tools = {
        "dpkg": 'case "$2" in git|libglib2.0-0t64) ;; *) exit 1;; esac',
        "apt-get": f'echo "$*" >>{calls}; exit {0 if reachable else 100}',
        "sleep": "true",
    }
    output = run_step(tmp_path, text, **tools)
    (install,) = [line for line in calls.read_text().splitlines() if line.startswith("install")] if reachable else [""]
    assert install == "" or {"rsync", "unzip", "libgl1"} <= set(install.split())
    assert not {"git", "libglib2.0-0"} & set(install.split()), "installed packages are skipped"
    assert ("cannot install rsync unzip" in output) is not reachable


def test_a_closed_host_lists_what_it_lacks(tmp_path: Path) -> None:
    assert "does without git" in run_step(tmp_path, read_step(render_script(None, 0), "packages"), dpkg="exit 1")
    assert not run_step(tmp_path, read_step(render_script(None, 0), "packages"), dpkg="true")


@pytest.mark.parametrize("exists", [True, False])
def test_the_devices_of_cuda_exist_at_each_boot(tmp_path: Path, exists: bool) -> None:
    (tmp_path / "devices").write_text("Character devices:\n195 nvidia\n511 nvidia-uvm\n\nBlock devices:\n")
    text = read_step(SCRIPT, "NVIDIA driver".join('""')).replace("/proc/devices", str(tmp_path / "devices"))
    device = tmp_path / "nvidia-uvm"
    if exists:
        device.touch()
        (tmp_path / "nvidia-uvm-tools").touch()
    text = text.replace("/dev/nvidia", str(tmp_path / "nvidia"))
    calls = tmp_path / "calls"
    tools = {name: f'echo "{name} $*" >>{calls}' for name in ("modprobe", "mknod")}
    run_step(tmp_path, text, **{"nvidia-smi": "true", **tools})
    made = [] if exists else [f"mknod -m 666 {device} c 511 0", f"mknod -m 666 {device}-tools c 511 1"]
    assert calls.read_text().splitlines() == ["modprobe nvidia-uvm", *made]


def test_unattended_upgrades_are_masked() -> None:
    (masked,) = re.findall(r"^systemctl mask --quiet (.*)$", SCRIPT, re.MULTILINE)
    assert {"apt-daily.timer", "apt-daily-upgrade.timer", "unattended-upgrades.service"} <= set(masked.split())
    assert "systemd-logind.service" not in masked, "it powers a host off when it is preempted"


def test_the_runtime_has_the_pinned_versions() -> None:
    server = ["httptools", "orjson", "prometheus-client", "starlette", "uvicorn"]
    tuner = ["optuna"]
    trainer = ["fsspec", "numpy", "tensorboard", "gcsfs"]
    assert requirement_lines("tensorflow-cpu==2.21.0") == [*trainer, *server, *tuner, "tensorflow-cpu==2.21.0"]
    constraints = constraint_lines("2.21.0")
    assert any(line.startswith("numpy==") for line in constraints)
    assert "tensorboard==2.21.0" in constraints
    assert not any(line.lower().startswith("tensorflow") for line in constraints)
    assert constraint_lines("2.20.0") == ["keras>=3.13,<3.16"]
    assert constraint_lines("2.16.2") == [], "not a version of the library"


def test_files_are_ansibles_except_those_google_provides() -> None:
    written = set(re.findall(r"/dev/stdin (\S+) <<", SCRIPT))
    assert {"/etc/ssh/sshd_config", "/etc/sudoers.d/scaletier", "/etc/tmpfiles.d/scaletier-host.conf"} <= written
    assert not {path for path in written if "firstboot" in path or path.startswith("/etc/systemd/network/")}


def test_an_upgraded_host_keeps_its_agent_and_no_old_files(tmp_path: Path) -> None:
    text = re.search(r"^# A host from before has some.*?(?=^systemd-tmpfiles)", SCRIPT, re.DOTALL | re.MULTILINE)
    assert text
    package, units = tmp_path / "opt/scaletier/replica", tmp_path / "etc/systemd/system/scaletier-trainer.service.d"
    package.mkdir(parents=True)
    units.mkdir(parents=True)
    (package / "__main__.py").write_text("from replica import name\nprint(name.NAME)\n")
    (package / "name.py").write_text("NAME = 'the one before'\n")
    for name in ("walls.conf", "hardening.conf", "host.conf"):
        (units / name).touch()
    for _ in range(2):
        run_step(tmp_path, re.sub(r"/(?=(etc|usr|opt)/)", f"{tmp_path}/", text[0]))
    assert {path.name for path in units.iterdir()} == {"hardening.conf", "host.conf"}
    unit = Path(__file__).parents[2] / "ansible/roles/host/files/root/etc/systemd/system/scaletier.service"
    (module,) = re.findall(r"^ExecStart=.* \S+/python -m (\S+)$", unit.read_text(), re.MULTILINE)
    command = [sys.executable, "-m", module]
    run = subprocess.run(command, cwd=package.parent, env={}, capture_output=True, text=True, check=False)
    assert run.stdout == "the one before\n", run.stderr


@pytest.mark.parametrize(
    ("age", "job", "other", "stops"),
    [
        (2000, None, "", True),
        (1000, None, "", False),
        (2000, 25, "running", False),
        (2000, 60, "", True),  # an agent without a job ends a minute after its start
        (2000, 95, "", False),
        (2000, 4000, "", False),
        (2000, 3, "", True),  # the timer's poll of the queue is no work
        (2000, None, "login", False),
        (2000, 3, "login", False),
        (2000, None, "models", False),
        (2000, None, "preparing", False),
    ],
)
def test_an_idle_host_stops(tmp_path: Path, age: int, job: int | None, other: str, stops: bool) -> None:
    """`job`: seconds since the unit became active, None if it is inactive; `other`: other activity."""
    busy, stopped, uptime, started = (tmp_path / name for name in ("busy", "off", "uptime", "started"))
    busy.touch()
    if other != "preparing":
        started.touch()
    os.utime(busy, (busy.stat().st_mtime - age,) * 2)
    uptime.write_text("9000.27 17000.50\n")
    since = 0 if job is None else (9000 - job) * 1_000_000 + 123_456
    query = "--value scaletier.service"
    status = "job job01 RUNNING, trainer RUNNING, restarts 0" if other == "running" else "no job has this host"
    active = ["scaletier.service"] * (job is not None) + ["scaletier-serving.service"] * (other == "models")
    is_active = f'is-active) case " {" ".join(active)} " in *" $3 "*) ;; *) exit 3;; esac;;'
    show = f"""show) case "$*" in "show --property ActiveEnterTimestampMonotonic {query}") echo {since};;
        "show --property StatusText {query}") echo {status};; *) exit 3;; esac;;"""
    tools = {
        "systemctl": f'case "$1" in {is_active} {show} poweroff) touch {stopped};; esac',
        "ss": "echo 0 0 10.64.0.2:22 35.235.240.9:40000" if other == "login" else "true",
    }
    text = read_program("idle").replace("/run/scaletier-busy", str(busy)).replace("/proc/uptime", str(uptime))
    run_step(tmp_path, text.replace("/run/scaletier-started", str(started)), "sh", "-c", **tools)
    assert stopped.exists() is stops


@pytest.mark.parametrize(("latest", "again"), [("other", True), ("this", False), (None, False)])
def test_a_changed_script_runs_again(tmp_path: Path, latest: str | None, again: bool) -> None:
    """`latest`: the version that the metadata server has, None if it does not respond."""
    ran, restarted = tmp_path / "ran", tmp_path / "restarted"
    ran.write_text("this\n")
    curl = f"printf '#!/bin/bash\\nscript={latest}\\n  script=$(ask)\\n'" if latest else "exit 7"
    tools = {
        # The watch ends at the second request, which waits for a change.
        "curl": f'case "$*" in *wait_for_change=true*) exit 28;; *) {curl};; esac',
        "systemctl": f'[ "$*" = "restart google-startup-scripts.service" ] && touch {restarted}',
    }
    text = read_program("again").replace("/run/scaletier-script", str(ran))
    run_step(tmp_path, text, "sh", "-c", status=28, **tools)
    assert restarted.exists() is again
