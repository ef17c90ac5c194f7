"""Parts of the start-up script, run: which packages are missing, and when an idle host stops."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from infra.gcp.image import constraint_lines, requirement_lines, startup_script
from infra.spec import Accelerator

SCRIPT = startup_script("2.21.0", Accelerator("nvidia-l4"), 1800)


def test_the_same_words_make_the_same_script() -> None:
    assert startup_script("2.21.0", Accelerator("nvidia-l4"), 1800) == SCRIPT
    assert startup_script("2.21.0", None, 1800) != SCRIPT


def test_the_runtime_is_pinned_as_the_project_was_tried() -> None:
    server = ["httptools", "orjson", "prometheus-client", "starlette", "uvicorn"]
    trainer = ["fsspec", "numpy", "tensorboard", "gcsfs"]
    assert requirement_lines("tensorflow-cpu==2.21.0") == [*trainer, *server, "optuna", "tensorflow-cpu==2.21.0"]
    constraints = constraint_lines("2.21.0")
    assert any(line.startswith("numpy==") for line in constraints)
    assert "tensorboard==2.21.0" in constraints
    assert not any(line.lower().startswith("tensorflow") for line in constraints)
    assert constraint_lines("2.20.0") == []


def test_files_are_the_roles_of_ansible_but_for_what_google_does_itself() -> None:
    written = set(re.findall(r"/dev/stdin (\S+) <<", SCRIPT))
    assert {"/etc/ssh/sshd_config", "/etc/sudoers.d/scaletier", "/etc/tmpfiles.d/scaletier-host.conf"} <= written
    assert not {path for path in written if "firstboot" in path or path.startswith("/etc/systemd/network/")}


@pytest.mark.parametrize(("installed", "missing"), [({"a", "b"}, False), ({"a"}, True), (set(), True)])
def test_a_package_that_is_missing_is_seen(tmp_path: Path, installed: set[str], missing: bool) -> None:
    query = tmp_path / "dpkg-query"
    lines = "".join(f'[ "$name" = {name} ] && echo "install ok installed" && continue; ' for name in sorted(installed))
    query.write_text(f"#!/bin/bash\nshift 3\nfailed=0\nfor name; do {lines}failed=1; done\nexit $failed\n")
    query.chmod(0o755)
    (function,) = re.findall(r"^missing\(\) .*$", SCRIPT, re.MULTILINE)
    script = f"set -euo pipefail\n{function}\nif missing a b; then echo yes; else echo no; fi"
    done = subprocess.run(
        ["bash", "-c", script], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ("yes" if missing else "no")


@pytest.mark.parametrize(
    ("age", "job", "other", "stops"),
    [
        (2000, None, "", True),
        (1000, None, "", False),
        (2000, 25, "", False),
        (2000, 4000, "", False),
        (2000, 3, "", True),  # the timer's look whether a job waits is no work
        (2000, None, "login", False),
        (2000, 3, "login", False),
        (2000, None, "models", False),
    ],
)
def test_a_host_stops_when_it_has_had_nothing_to_do(tmp_path: Path, age: int, job: int | None, other: str, stops: bool) -> None:
    """`job`: for so many seconds the unit has been active, None where it is not; `other`: what else there is to do."""
    script = re.search(r"/usr/lib/scaletier/idle <<'SCALETIER_FILE'\n(.*?)SCALETIER_FILE\n", SCRIPT, re.DOTALL)
    assert script
    busy, off, uptime = tmp_path / "busy", tmp_path / "off", tmp_path / "uptime"
    busy.touch()
    os.utime(busy, (busy.stat().st_mtime - age,) * 2)
    uptime.write_text("9000.27 17000.50\n")
    since = 0 if job is None else (9000 - job) * 1_000_000 + 123_456
    asked = "--property ActiveEnterTimestampMonotonic --value scaletier.service"
    active = ["scaletier.service"] * (job is not None) + ["scaletier-serving.service"] * (other == "models")
    is_active = f'is-active) case " {" ".join(active)} " in *" $3 "*) ;; *) exit 3;; esac;;'
    tools = {
        "systemctl": f'case "$1" in {is_active} show) [ "$*" = "show {asked}" ] && echo {since};; poweroff) touch {off};; esac',
        "ss": "echo 0 0 10.64.0.2:22 35.235.240.9:40000" if other == "login" else "true",
    }
    for name, body in tools.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    text = script[1].replace("/run/scaletier-busy", str(busy)).replace("/proc/uptime", str(uptime))
    subprocess.run(["sh", "-c", text], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=True)
    assert off.exists() is stops
