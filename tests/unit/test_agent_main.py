"""The agent's main process: its configuration, its messages to systemd, and wake-ups that arrive while it ends."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import limit

from hosts.agent.__main__ import notify_systemd
from hosts.agent.config import load
from jobs.records import HostConfig
from jobs.serialization import RecordError

HOST = {"name": "ps-0", "bucket": "/bucket"}
_PROGRAM = """
import os, signal, sys
from types import SimpleNamespace
from hosts.agent.__main__ import Loop

def run_cycle():
    if "tidying" in sys.argv:
        os.kill(os.getpid(), signal.SIGHUP)
        assert loop._due.wait()
        agent.finished = True
    return 60.0

def step():
    if "tidying" in sys.argv:
        return 60.0
    if "during" in sys.argv:
        os.kill(os.getpid(), signal.SIGHUP)
    agent.finished = True
    return 0.0

agent = SimpleNamespace(finished=False, status="", run_cycle=run_cycle)
agent.supervisor = SimpleNamespace(step=step, record=SimpleNamespace(state=None))
loop = Loop(agent)
loop.run()
if "after" in sys.argv:
    os.kill(os.getpid(), signal.SIGHUP)
sys.exit(75 if loop.woken_late else 0)
"""


def write(etc: Path, host: dict[str, Any]) -> dict[str, str]:
    (etc / "host.json").write_text(json.dumps(host))
    return {"SCALETIER_ETC": str(etc), "SCALETIER_STATE": "/state"}


def test_load_reads_host_json(tmp_path: Path) -> None:
    environ = write(tmp_path, HOST | {"pollSeconds": 2.5, "python": "/usr/bin/python3", "schema": 2})
    assert load(environ) == (HostConfig("ps-0", "/bucket", 2.5, "/usr/bin/python3"), Path("/state"))
    assert load(write(tmp_path, HOST))[0] == HostConfig("ps-0", "/bucket", 1.0, "/opt/scaletier/venv/bin/python")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": 1}, "host.json.name must be a text, not 1"),
        ({"bucket": None}, "host.json.bucket must be a text, not None"),
        ({"pollSeconds": "1"}, "host.json.pollSeconds must be a number, not '1'"),
        ({"schema": 99}, "host.json was written by a newer scaletier (schema 99"),
    ],
)
def test_an_invalid_host_json_is_one_error_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError) as caught:
        load(write(tmp_path, HOST | changes))
    assert str(caught.value).startswith(f"{tmp_path}/host.json: {message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("address", ["{tmp}/notify", "@scaletier-{tmp}"])
def test_notify_reaches_systemd_if_there_is_one(address: str, socket_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = address.format(tmp=socket_folder)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind("\0" + address[1:] if address.startswith("@") else address)
        systemd.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        notify_systemd("READY=1", "STATUS=job job01")
        assert systemd.recv(4096) == b"READY=1\nSTATUS=job job01"
    notify_systemd("STATUS=nobody listens")
    monkeypatch.delenv("NOTIFY_SOCKET")
    notify_systemd("STATUS=nobody is there")


def test_a_local_bucket_does_not_import_fsspec() -> None:
    code = "import sys, hosts.agent.__main__ as agent; agent.open_bucket('/bucket'); print('fsspec' in sys.modules)"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(("when", "code"), [("never", 0), ("during", 75), ("tidying", 75), ("after", -signal.SIGHUP)])
def test_an_agent_woken_while_it_ends_asks_for_a_restart(when: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM, when], capture_output=True, text=True, timeout=limit(), check=False)
    assert done.returncode == code, done.stderr
