"""The agent's main process: its configuration, its messages to systemd, and wake-ups that arrive while it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from waiting import limit, wait_for

from hosts.agent.__main__ import Loop, notify_systemd, read_stamp, started_by_timer
from hosts.agent.agent import Agent
from hosts.agent.config import load
from jobs.bucket import TimeLimited
from jobs.folder_bucket import FolderBucket
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

agent = SimpleNamespace(finished=False, status="", run_cycle=run_cycle, watched="")
agent.supervisor = SimpleNamespace(step=step, record=SimpleNamespace(state=None))
loop = Loop(agent)
loop.run()
if "after" in sys.argv:
    os.kill(os.getpid(), signal.SIGHUP)
if "terminated" in sys.argv:
    os.kill(os.getpid(), signal.SIGTERM)
sys.exit(75 if loop.woken_late else 0)
"""

_MAIN = """
import os, signal, sys, time
from pathlib import Path
import hosts.agent.__main__ as main

def run(loop):
    print(loop._agent._is_current_version(), loop._agent._idle_seconds)
    loop._report_requested = "woken" in sys.argv[2]
    loop._terminated_at = time.monotonic() if "stopped" in sys.argv[2] else None
    host = Path(os.environ["SCALETIER_ETC"], "host.json")
    {
        "other": lambda: version.write_text("2"),
        "moved": lambda: host.write_text('{"name": "ps-0", "bucket": "/other"}'),
        "replaced": version.unlink,
    }.get(sys.argv[2], list)()

def again(program, argv):
    assert (program, signal.getsignal(signal.SIGHUP)) == (sys.executable, signal.SIG_IGN)
    print("again", *argv[-2:], flush=True)
    os._exit(0)

version = main._VERSION = Path(sys.argv[1])
main.Loop.run, os.execv = run, again
sys.exit(main.main())
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


@pytest.mark.parametrize(
    ("what", "code"),
    [("other", 75), ("moved", 75), ("replaced", 75), ("nothing", 0), ("woken", None), ("woken and stopped", 0)],
)
def test_an_agent_starts_again_for_new_code_or_a_job(tmp_path: Path, what: str, code: int | None) -> None:
    """Start by systemd with exit code 75, or for a job in its own place."""
    version = tmp_path / "VERSION"
    version.write_text("1")
    environ = {**os.environ, **write(tmp_path, {"name": "ps-0", "bucket": str(tmp_path)}), "SCALETIER_STATE": str(tmp_path)}
    command = [sys.executable, "-c", _MAIN, str(version), what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit(), check=False, env=environ)
    assert (done.returncode, done.stderr) == (code or 0, "")
    assert done.stdout == "True 60.0\n" + (f"again {version} {what}\n" if code is None else "")


@pytest.mark.parametrize(("seconds_ago", "by_timer"), [(None, False), (0.5, True), (20.0, True), (60.0, False)])
def test_a_start_by_the_timer_is_recognized(seconds_ago: float | None, by_timer: bool) -> None:
    then = time.monotonic() - (seconds_ago or 0.0)
    environ = {} if seconds_ago is None else {"TRIGGER_TIMER_MONOTONIC_USEC": f"{then * 1e6:.0f}"}
    assert started_by_timer(environ) is by_timer


def test_a_change_of_the_watched_object_begins_the_next_cycle(tmp_path: Path) -> None:
    bucket = FolderBucket(tmp_path)
    records, cycles = TimeLimited(bucket, limit()), 0
    item = bucket.create("record", b"1")

    class Watching:
        finished, watched, status, supervisor = False, "record", "", None

        def run_cycle(self) -> float:
            nonlocal cycles
            cycles += 1
            if cycles == 2:
                bucket.replace("record", b"3", bucket.read("record").version)
            elif cycles == 3:
                self.watched = "none"
            elif cycles == 4:
                self.finished = True
                return 0.0
            return 3600.0

    agent = Watching()
    loop = Loop(cast("Agent", agent), partial(read_stamp, bucket, records))
    thread = threading.Thread(target=loop._report)
    thread.start()
    wait_for(lambda: cycles == 1, "the first cycle")
    bucket.replace("record", b"2", item)
    thread.join(limit())
    assert (thread.is_alive(), cycles) == (False, 4), "also of a change during a cycle, and of what is watched"
    assert read_stamp(bucket, records, "none") is None


@pytest.mark.parametrize(
    ("when", "code"),
    [("never", 0), ("during", 75), ("tidying", 75), ("after", -signal.SIGHUP), ("terminated", -signal.SIGTERM)],
)
def test_an_agent_woken_while_it_ends_asks_for_a_restart(when: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM, when], capture_output=True, text=True, timeout=limit(), check=False)
    assert done.returncode == code, done.stderr
