"""The host's configuration by `fab train`, read and checked; and the trainer's and systemd's."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hosts.agent.__main__ import notify
from hosts.agent.cgroup import processors
from hosts.agent.config import HostConfigError, load
from hosts.agent.job_files import JobFiles, threads
from hosts.agent.launcher_client import SOCKET
from jobs.folder import LocalStore
from jobs.ledger import Ledger
from jobs.records import HostFile, Plan, Task
from jobs.store import StoreError

HOST = {"name": "ps-0", "bucket": "/bucket"}


def write(etc: Path, host: dict[str, Any]) -> dict[str, str]:
    (etc / "host.json").write_text(json.dumps(host))
    return {"SCALETIER_ETC": str(etc), "SCALETIER_STATE": "/state"}


def test_load(tmp_path: Path) -> None:
    environ = write(tmp_path, HOST | {"pollSeconds": 2.5, "python": "/usr/bin/python3", "schema": 2})
    assert load(environ) == (HostFile("ps-0", "/bucket", 2.5, "/usr/bin/python3"), Path("/state"))
    assert load(write(tmp_path, HOST))[0] == HostFile("ps-0", "/bucket", 1.0, "/opt/scaletier/venv/bin/python")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": 1}, "host.json.name must be a text, not 1"),
        ({"bucket": None}, "host.json.bucket must be a text, not None"),
        ({"pollSeconds": "1"}, "host.json.pollSeconds must be a number, not '1'"),
        ({"schema": 99}, "host.json was written by a newer scaletier (schema 99"),
    ],
)
def test_a_bad_file_says_what_is_wrong(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(HostConfigError) as caught:
        load(write(tmp_path, HOST | changes))
    assert str(caught.value).startswith(f"{tmp_path}/host.json: {said}")
    assert "\n" not in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(HostConfigError, match="No such file or directory; fab train writes it"):
        load({"SCALETIER_ETC": str(tmp_path)})


def test_the_environment_of_the_trainer(tmp_path: Path) -> None:
    (tmp_path / "jobs/job01").mkdir(parents=True)
    (tmp_path / "jobs/job01/package.sha256").write_text("abc\n")
    task = Task('{"task": {}}', {"TYPE": "mine", "PYTHONPATH": "/theirs"})
    plan = Plan("job01", ["master-0", "ps-0"], "m", [], {"ps-0": task}, "abc")
    environ = {"PYTHONPATH": "/opt/scaletier", "TYPE": "ps", "HOME": "/h", "NOTIFY_SOCKET": "/run/x", "JOURNAL_STREAM": "8:1"}
    store = LocalStore(tmp_path)

    def prepared(environ: dict[str, str], plan: Plan) -> dict[str, str]:
        assignment = JobFiles(HostFile("ps-0", "/bucket"), tmp_path, Ledger(store), store, environ).prepare(plan, "ps-0")
        assert assignment.directory == tmp_path / "jobs/job01/package"
        return dict(assignment.environment)

    package = f"{tmp_path}/jobs/job01/package"
    rest = {"TF_CONFIG": '{"task": {}}', "PYTHONUNBUFFERED": "1"} | threads(processors())
    rest |= {"PATH": "/opt/scaletier/venv/bin:/bin:/usr/bin", "SCALETIER_STOP_FILE": str(tmp_path / "stop")}
    assert prepared(environ, plan) == {"HOME": "/h", "TYPE": "mine", "PYTHONPATH": f"{package}:/theirs"} | rest
    path = {"PATH": "/usr/local/bin"}
    assert prepared(environ | path, plan)["PATH"] == "/opt/scaletier/venv/bin:/usr/local/bin"
    out = Plan("job01", ["ps-0"], "m", [], {"ps-0": Task("{}", {"JOB_DIR": f"{tmp_path}/a/output"})}, "abc", data=["/none"])
    prepared({}, out)
    assert (tmp_path / "a" / "output").is_dir()
    bare = Plan("job01", ["ps-0"], "m", [], {"ps-0": Task('{"task": {}}')}, "abc", data=["/none"])
    assert prepared({}, bare) == {"PYTHONPATH": package} | rest


class Launching:
    """A launcher that notes what it is asked."""

    def __init__(self) -> None:
        self.warmed, self.kept = 0, [["nothing"]]

    def warm(self) -> None:
        self.warmed += 1

    def tidy(self, keep: list[str]) -> None:
        self.kept.append(keep)


def test_a_trainer_that_is_another_user_has_a_home_of_its_own_and_nothing_that_is_the_replica_s(tmp_path: Path) -> None:
    (tmp_path / "jobs/job01").mkdir(parents=True)
    (tmp_path / "jobs/job01/package.sha256").write_text("abc\n")
    own = {"HOME": "/h", "USER": "replica", "LOGNAME": "replica", "SHELL": "/x", SOCKET: "/run/l.sock", "LANG": "C.UTF-8"}
    launcher, store = Launching(), LocalStore(tmp_path)
    site = JobFiles(HostFile("ps-0", "/bucket"), tmp_path, Ledger(store), store, own, launcher)  # type: ignore[arg-type]
    plan = Plan("job01", ["master-0", "ps-0"], "m", [], {"ps-0": Task("{}", {"A": "b"})}, "abc")
    found = site.prepare(plan, "ps-0").environment
    told = {name: found.get(name) for name in (*own, "A")}
    home = f"{tmp_path}/jobs/job01/home"
    assert told == dict.fromkeys(own) | {"HOME": home, "USER": "trainer", "LOGNAME": "trainer", "LANG": "C.UTF-8", "A": "b"}
    assert launcher.warmed == 1
    assert site._job
    places = [("home/", home), ("tmp/", "/tmp"), ("var/tmp/", "/var/tmp")]
    assert site._job.folders.folders[1:] == [(top, prefix) for prefix, top in places], "all that a trainer may write to"
    its_own = Plan("job01", ["master-0", "ps-0"], "m", [], {"ps-0": Task("{}", {"HOME": "/mine"})}, "abc")
    assert site.prepare(its_own, "ps-0").environment["HOME"] == "/mine"


def test_what_jobs_leave_is_asked_to_be_taken_away_where_there_is_any(tmp_path: Path) -> None:
    launcher, store = Launching(), LocalStore(tmp_path)
    site = JobFiles(HostFile("ps-0", "/bucket"), tmp_path, Ledger(store), store, {}, launcher)  # type: ignore[arg-type]
    site.tidy([])
    (tmp_path / "jobs/job01").mkdir(parents=True)
    site.tidy(["job01", "job02"])
    assert launcher.kept == [["nothing"]]
    site.tidy(["job02"])
    assert launcher.kept == [["nothing"], ["job02"]]
    (tmp_path / "jobs/job01").rmdir()
    for number, name in enumerate(("fetched/job01", "trials/trial-0abc"), 3):
        (tmp_path / name).mkdir(parents=True)
        site.tidy(["job02"])
        assert len(launcher.kept) == number, name
        (tmp_path / name).rmdir()
    site.tidy(["job02"])
    assert len(launcher.kept) == 4


@pytest.mark.parametrize("address", ["{tmp}/notify", "@scaletier-{tmp}"])
def test_notify(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = address.format(tmp=tmp_path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind("\0" + address[1:] if address.startswith("@") else address)
        systemd.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        notify("READY=1", "STATUS=job job01")
        assert systemd.recv(4096) == b"READY=1\nSTATUS=job job01"
    notify("STATUS=nobody listens")
    monkeypatch.delenv("NOTIFY_SOCKET")
    notify("STATUS=nobody is there")


def test_a_local_bucket_does_without_fsspec(tmp_path: Path) -> None:
    code = "import sys, hosts.agent.__main__ as agent; agent.open_store('/bucket'); print('fsspec' in sys.modules)"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("quota", "most", "inter"), [("max 100000", 10**6, 2), ("150000 100000", 2, 2), ("10000 100000", 1, 2), ("", 10**6, 2)]
)
def test_the_processors_of_a_host(tmp_path: Path, quota: str, most: int, inter: int) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    found = processors(tmp_path / "cpu.max")
    assert found == min(len(os.sched_getaffinity(0)), most)
    assert threads(found)["TF_NUM_INTEROP_THREADS"] == str(max(inter, found))
    assert threads(found)["OMP_NUM_THREADS"] == threads(found)["TF_NUM_INTRAOP_THREADS"] == str(found)


def test_secrets_are_for_the_trainer_of_their_job(tmp_path: Path) -> None:
    (tmp_path / "jobs/job01").mkdir(parents=True)
    (tmp_path / "jobs/job01/package.sha256").write_text("abc\n")
    (tmp_path / "secrets").mkdir()
    for name in ("job01", "job02"):
        (tmp_path / "secrets" / f"{name}.json").write_text(f'{{"TOKEN": "of {name}"}}')
    plan = Plan("job01", ["ps-0"], "m", [], {"ps-0": Task("{}", {"TOKEN": "no"})}, "abc", data=["/none"], secrets=["TOKEN"])
    store = LocalStore(tmp_path)
    site = JobFiles(HostFile("ps-0", "/bucket"), tmp_path, Ledger(store), store, {})
    assert site.prepare(plan, "ps-0").environment["TOKEN"] == "of job01"
    site.tidy(["job01"])
    assert [path.name for path in (tmp_path / "secrets").iterdir()] == ["job01.json"]
    site.tidy([])
    assert list((tmp_path / "secrets").iterdir()) == []
    with pytest.raises(StoreError, match="the secrets of job01 are not on this host"):
        site.prepare(plan, "ps-0")
    (tmp_path / "secrets").rmdir()
    site.tidy([])
