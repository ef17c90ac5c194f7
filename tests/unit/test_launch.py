"""The launcher of a host: what it lets through, and a program behind it from its start to its end."""

from __future__ import annotations

import errno
import fcntl
import getpass
import json
import os
import pwd
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from launching import SCRIPT, Host, load_program
from replicahosts import PATIENCE, until
from waiting import scale, wait_for

from hosts.agent import launcher_client
from hosts.agent.__main__ import spawn
from hosts.agent.launcher_client import Launched, Launcher, request
from hosts.agent.log import Log
from hosts.agent.process import Child, ProcessRun, TrainerStart
from hosts.agent.replica_rules import Exit
from hosts.agent.supervisor import Assignment
from hosts.agent.trainer import Trainer
from infra.ports import PEER_PORTS
from jobs import paths
from jobs.records import Plan

launch, at_the_end = load_program("launch"), load_program("post-stop")
HOME = "/var/lib/scaletier/jobs/job01"
GOOD: dict[str, Any] = {
    "job": "job01",
    "argv": ["python", "-m", "task"],
    "env": {"A": "b"},
    "cwd": f"{HOME}/package",
    "output": "/bucket/jobs/job01/output",
    "names": ["/bucket/data/mnist", "/bucket/jobs/old/output/model-7"],
    "scratch": "",
    "peers": {},
    "stopSeconds": 10.0,
}
NETWORK = "10.77.0.0/24"


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    made.close()


def run(host: Host, code: str, *args: str, **env: str) -> ProcessRun:
    return ProcessRun("job01", [sys.executable, "-c", code, *args], host.package, {"PATH": os.environ["PATH"], **env})


def finished(trainer: Trainer) -> int:
    return wait_for(trainer.poll, "the trainer's end").status


def started(host: Host, tmp_path: Path, code: str, *args: str, **env: str) -> Trainer:
    return trainer(host, tmp_path, run(host, code, *args, **env))


def trainer(host: Host, tmp_path: Path, run: ProcessRun, start: TrainerStart | None = None) -> Trainer:
    return Trainer(run, Log(tmp_path / "logs", "job01", "master-0"), start or host.launcher)


def printed(tmp_path: Path) -> list[str]:
    chunks = sorted((tmp_path / "logs/job01").glob("*.jsonl"))
    return [json.loads(line)["message"] for chunk in chunks for line in chunk.read_text().splitlines()]


def test_an_id_is_what_it_is_everywhere() -> None:
    assert launch.JOB_ID.pattern == paths.JOB_ID.pattern.strip("^$")


def test_what_a_job_is_shown_of_the_bucket() -> None:
    found = launch.run_of(GOOD, "/bucket")
    assert found["shown"] == ["/bucket/data", "/bucket/jobs/old/output"]
    line = launch.command(found, "/bucket", "scaletier-launch@1.service")
    told = [line[index + 1] for index, word in enumerate(line) if word == "-p"]
    assert told == [
        'TemporaryFileSystem="/var/lib/scaletier":ro',
        'TemporaryFileSystem="/bucket":ro',
        'BindReadOnlyPaths=-"/bucket/data":"/bucket/data"',
        'BindReadOnlyPaths=-"/bucket/jobs/old/output":"/bucket/jobs/old/output"',
        f'BindPaths="{HOME}/package":"{HOME}/package"',
        f'BindPaths="{HOME}/home":"{HOME}/home"',
        'BindPaths="/bucket/jobs/job01/output":"/bucket/jobs/job01/output"',
        f'BindPaths="{HOME}/tmp":"/tmp"',
        f'BindPaths="{HOME}/var-tmp":"/var/tmp"',
        "TimeoutStopSec=10.0",
        "BindsTo=scaletier-launch@1.service",
        "After=scaletier-launch@1.service",
    ]
    assert "--uid=trainer" in line
    assert not {"python", "task", "A=b"} & set(line), "what is told by a command line is seen by all"


def test_a_trainer_may_hold_thousands_of_files_open_and_give_nobody_s_rights_to_one() -> None:
    """The unit's soft limit would be systemd's, 1024."""
    unit = (SCRIPT.parents[3] / "etc/systemd/system/scaletier-trainer.service.d/hardening.conf").read_text().splitlines()
    assert {"LimitNOFILE=1048576", "RestrictSUIDSGID=yes"} <= set(unit)


def test_on_google_there_is_no_folder_to_hide() -> None:
    found = launch.run_of({**GOOD, "output": "", "names": []}, "")
    assert 'TemporaryFileSystem="/var/lib/scaletier":ro' in launch.command(found, "", "")
    assert not [word for word in launch.command(found, "", "") if "bucket" in word and word not in launch.ENTER]


@pytest.mark.parametrize(
    ("path", "shown", "written"),
    [
        ("/bucket/data/mnist/x", "/bucket/data", True),
        ("/bucket/mine/deep/x", "/bucket/mine", True),
        ("/bucket/models/m/v1", "/bucket/models/m", False),
        ("/bucket/models", None, False),
        ("/bucket/jobs/a/output/model-7", "/bucket/jobs/a/output", True),
        ("/bucket/jobs/a/outputs", None, False),
        ("/bucket/jobs/a/job.json", None, False),
        ("/bucket/jobs/a", None, False),
        ("/bucket/jobs", None, False),
        ("/bucket/cluster/queue.json", None, False),
        ("/bucket", None, False),
        ("/bucket/", None, False),
        ("/bucketeer/x", None, False),
        ("/etc/passwd", None, False),
    ],
)
def test_what_of_the_bucket_is_whose(path: str, shown: str | None, written: bool) -> None:
    assert launch.readable(path, "/bucket") == shown
    assert launch.writable(path, "/bucket") is written


def test_of_models_a_job_sees_those_that_it_names() -> None:
    assert launch.run_of({**GOOD, "names": ["/bucket/models/m/v1", "/bucket/cluster/x", 5]}, "/bucket")["shown"] == [
        "/bucket/data",
        "/bucket/models/m",
    ]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"job": "../job02"}, "no id of a job"),
        ({"job": "job01\n"}, "no id of a job"),
        ({"job": 5}, "no id of a job"),
        ({"argv": []}, "no list of words"),
        ({"argv": "sh"}, "no list of words"),
        ({"argv": ["sh", "a\0b"]}, "no list of words"),
        ({"argv": ["sh", 5]}, "no list of words"),
        ({"env": {"A=B": "c"}}, "no mapping"),
        ({"env": {"": "c"}}, "no mapping"),
        ({"env": {"A": None}}, "no mapping"),
        ({"env": ["A"]}, "no mapping"),
        ({"cwd": "/etc"}, "not in the package"),
        ({"cwd": f"{HOME}/package/../../job02/package"}, "not in the package"),
        ({"cwd": f"{HOME}/home"}, "not in the package"),
        ({"cwd": "/var/lib/scaletier/jobs/job02/package"}, "not in the package"),
        ({"output": "/bucket/jobs/job01"}, "no place for the output"),
        ({"output": "/bucket/jobs/job01/output/../.."}, "no place for the output"),
        ({"output": "/bucket/cluster"}, "no place for the output"),
        ({"output": "/etc"}, "no place for the output"),
        ({"output": '/bucket/x" "/etc'}, "no place for the output"),
        ({"output": "/bucket/x\nUser=root"}, "no place for the output"),
        ({"output": "/bucket/%h"}, "no place for the output"),
        ({"scratch": "../jobs"}, "no place for what a trial tells"),
        ({"names": "all"}, "no list of paths"),
        ({"peers": ["10.77.0.3"]}, "no mapping of names to addresses"),
        (
            {"peers": {"a": "10.77.0.3", "b": "10.77.1.3"}},
            "'10.77.1.3' is no address of a host of this cluster: they are in 10.77.0.0/24",
        ),
        *(
            ({"peers": {"worker-0": address}}, "no address of a host")
            for address in (
                "10.77.0.1",
                "10.77.0.255",
                "127.0.0.1",
                "10.77.0.0/24",
                "10.77.0.3 accept",
                "10.77.0.3\n",
                "::ffff:10.77.0.3",
                172818435,
            )
        ),
        *(
            ({"peers": {name: "10.77.0.3"}}, "is no name of a host")
            for name in ("", "localhost", "a b", "a\n", "A", "a.b", "-a", "a-", "#", "a" * 64)
        ),
        *(
            ({"stopSeconds": seconds}, "is no number of seconds from 0 to 10000000")
            for seconds in ("10", None, True, -1, 1e8, float("nan"), float("inf"))
        ),
        ({"properties": ["User=root"]}, "has the fields"),
    ],
)
def test_what_is_no_request_is_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises(launch.RunRefused, match=why):
        launch.run_of({**GOOD, **change}, "/bucket", NETWORK)


def test_peers_are_hosts_of_the_cluster_that_this_one_was_made_in() -> None:
    asked = {**GOOD, "peers": {"worker-0": "10.77.0.2", "ps-0": "10.77.0.254"}}
    assert launch.run_of(asked, "/bucket", NETWORK)["peers"] == asked["peers"]
    for network in ("", "10.77.0.2/32", "fd00::/64", "all"):
        with pytest.raises(launch.RunRefused, match=r"'10.77.0.2' is no address of a host"):
            launch.run_of(asked, "/bucket", network)


def test_a_folder_may_have_any_name_that_folders_have() -> None:
    found = launch.run_of({**GOOD, "cwd": f"{HOME}/package/it's 100 %", "output": "/bucket/it's (né)"}, "/bucket")
    assert 'BindPaths="/bucket/it\'s (né)":"/bucket/it\'s (né)"' in launch.command(found, "/bucket", "")


@given(st.text(max_size=30))
@example("/bucket/a\nExecStart=x")
@example('"/bucket/a":"/"')
def test_no_path_becomes_a_property_of_its_own(text: str) -> None:
    asked = {**GOOD, "output": f"/bucket/{text}", "names": [text, f"/bucket/{text}"]}
    try:
        line = launch.command(launch.run_of(asked, "/bucket"), "/bucket", "")
    except launch.RunRefused:
        return
    for index, word in enumerate(line):
        if word == "-p":
            name, _, value = line[index + 1].partition("=")
            if (name, value) == ("TimeoutStopSec", "10.0"):
                continue
            assert name in ("TemporaryFileSystem", "BindReadOnlyPaths", "BindPaths")
            assert not set("\n%\\") & set(value)
            folder = shlex.split(value.removeprefix("-").replace(":", " "))[0]
            assert folder in ("/var/lib/scaletier", "/bucket") or folder.startswith(("/bucket/", f"{HOME}/"))


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner),
    )
)
def test_whatever_comes_is_refused_in_a_line(asked: Any) -> None:
    with pytest.raises(launch.RunRefused):
        launch.run_of(asked, "/bucket")


def test_a_folder_is_made_for_the_trainer_and_a_link_is_not_followed(tmp_path: Path) -> None:
    launch._folder(str(tmp_path), ["a", "output"], os.getuid(), os.getgid(), 0o770, 0o775)
    assert [permissions(tmp_path / name) for name in ("a", "a/output")] == ["0o775", "0o770"]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "a/link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="link"):
        launch._folder(str(tmp_path), ["a", "link", "deeper"], os.getuid(), os.getgid(), 0o770, 0o775)
    assert not list((tmp_path / "elsewhere").iterdir())


def permissions(path: Path) -> str:
    return oct(path.stat().st_mode & 0o7777)


def test_a_new_folder_above_the_output_has_the_group_of_its_bucket(tmp_path: Path) -> None:
    (other,) = {*os.getgroups(), 4711} - {os.getgid()} if os.getuid() else {4711}
    (tmp_path / "bucket").mkdir()
    os.chown(tmp_path / "bucket", -1, other)
    launch._folder(str(tmp_path / "bucket"), ["mine", "a", "output"], os.getuid(), os.getgid(), 0o775, 0o775)
    groups = [(tmp_path / "bucket" / name).stat().st_gid for name in ("mine", "mine/a", "mine/a/output")]
    assert groups == [other, other, os.getgid()]


def test_a_job_dir_that_the_replica_made_becomes_the_trainer_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`cp -a results/. $JOB_DIR` sets the times and the mode of JOB_DIR itself, which its owner alone may."""
    (tmp_path / "jobs/job01/output").mkdir(parents=True)
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(launch, "STATE", str(tmp_path / "state"))
    monkeypatch.setattr(launch.os, "fchown", lambda _, uid, gid: given.append((uid, gid)))
    monkeypatch.setattr(launch.pwd, "getpwnam", lambda name: SimpleNamespace(**users[name]))
    users = {"trainer": {"pw_uid": 900, "pw_gid": 901}, "replica": {"pw_uid": os.getuid(), "pw_gid": 902}}
    (tmp_path / "state/jobs/job01").mkdir(parents=True)
    run = {"job": "job01", "scratch": "", "package": "", "shown": [], "output": f"{tmp_path}/jobs/job01/output"}
    launch.prepare(run, str(tmp_path))
    assert given == [(900, 901)] * 4, "home, tmp, var-tmp and JOB_DIR"
    users["replica"]["pw_uid"] += 1
    launch.prepare(run, str(tmp_path))
    assert given[4:] == [(-1, 901)] * 4, "what is somebody else's stays so"


def test_what_a_program_closed_to_others_in_its_output_is_open_to_its_group_once_it_has_ended(
    host: Host, tmp_path: Path
) -> None:
    output, elsewhere = host.bucket / "jobs/job01/output", tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (elsewhere / "key").touch(0o600)
    code = (
        "import os, sys, tempfile; os.umask(0o077); os.chdir(os.environ['JOB_DIR'])\n"
        "tempfile.NamedTemporaryFile(dir='.', delete=False).close(); os.makedirs('deep/er'); open('deep/er/model', 'w')\n"
        "os.symlink(sys.argv[1], 'folder'); os.symlink(sys.argv[1] + '/key', 'link'); os.mkfifo('pipe'); os.chmod('.', 0o700)"
    )
    assert finished(started(host, tmp_path, code, str(elsewhere), JOB_DIR=str(output))) == 0
    (temporary,) = output.glob("tmp*")
    assert [permissions(path) for path in (temporary, output / "deep/er/model")] == ["0o640"] * 2
    assert [permissions(path) for path in (output, output / "deep", output / "deep/er")] == ["0o750"] * 3
    assert [permissions(path) for path in (elsewhere, elsewhere / "key")] == ["0o700", "0o600"], "a link leads nowhere"
    assert permissions(output / "pipe") == "0o600"


def test_an_output_that_takes_too_long_or_is_somebody_else_s_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own/deep").mkdir(parents=True, mode=0o700)
    (tmp_path / "own/deep/model").touch(0o600)
    monkeypatch.setattr(launch, "USER", getpass.getuser())
    monkeypatch.setattr(launch, "SECONDS", -1.0)
    launch.share_output(f"{tmp_path}/own", str(tmp_path))
    assert capsys.readouterr().err == f"not all of {tmp_path}/own is open to its group: it took more than -1 s\n"
    monkeypatch.setattr(launch, "SECONDS", PATIENCE)
    monkeypatch.setattr(launch.pwd, "getpwnam", lambda _: SimpleNamespace(pw_uid=os.getuid() + 1))
    launch.share_output(f"{tmp_path}/own", str(tmp_path))
    assert permissions(tmp_path / "own/deep/model") == "0o600"
    monkeypatch.undo()
    monkeypatch.setattr(launch, "USER", getpass.getuser())
    launch.share_output(f"{tmp_path}/own", str(tmp_path))
    assert permissions(tmp_path / "own/deep/model") == "0o640"


def test_folders_of_an_older_bucket_lose_the_bit_that_a_program_may_not_copy(host: Host, tmp_path: Path) -> None:
    output, data, kept = (host.bucket / name for name in ("jobs/job01/output", "data", "own"))
    (tmp_path / "elsewhere").mkdir()
    for top in (output, data, kept):
        (top / "a/b").mkdir(parents=True)
        (top / "a/b/file").touch()
        (top / "a/link").symlink_to(tmp_path / "elsewhere")
    every = [folder for top in (output, data, kept) for folder in (top, top / "a", top / "a/b")]
    for folder in (*every, tmp_path / "elsewhere"):
        folder.chmod(0o2775)
    assert finished(started(host, tmp_path, "print(1)", JOB_DIR=str(output))) == 0
    assert [permissions(folder) for folder in every] == ["0o775"] * 6 + ["0o2775"] * 3, "of what the job sees"
    assert permissions(tmp_path / "elsewhere") == "0o2775", "a link leads nowhere"


def test_a_folder_deeper_than_descriptors_last_keeps_no_job_waiting(tmp_path: Path) -> None:
    top = os.open(tmp_path, os.O_RDONLY)
    here, deep = os.dup(top), 1200
    for _ in range(deep):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    try:
        tmp_path.chmod(0o2775)
        launch._clear_set_group_id(top)
        assert permissions(tmp_path) == "0o775"
    finally:
        os.close(top)
        subprocess.run(["rm", "-rf", tmp_path / "d"], check=True)  # pytest's own deletion ends at some depth


def test_a_package_that_the_replica_fetched_becomes_the_trainer_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "fetched/job01/package"
    (package / "deep").mkdir(parents=True, mode=0o755)
    for name in ("task.py", "deep/run.sh"):
        (package / name).touch()
    (package / "link").symlink_to("/etc")
    mark = package.with_name("package.sha256")
    mark.touch()
    given: dict[str, tuple[int, int]] = {}
    name_of = {(path.stat().st_dev, path.stat().st_ino): path for path in (package, package / "deep")}

    def fchown(descriptor: int, uid: int, gid: int) -> None:
        state = os.fstat(descriptor)
        given[name_of[state.st_dev, state.st_ino].name] = (uid, gid)

    def chown(name: str, uid: int, gid: int, *, dir_fd: int, follow_symlinks: bool) -> None:
        assert not follow_symlinks
        assert name in os.listdir(dir_fd)
        given[name] = (uid, gid)

    monkeypatch.setattr(launch, "STATE", str(tmp_path))
    monkeypatch.setattr(launch.os, "fchown", fchown)
    monkeypatch.setattr(launch.os, "chown", chown)
    monkeypatch.setattr(launch, "CALLER", getpass.getuser())
    trainer = pwd.struct_passwd(("trainer", "x", 900, 901, "", "", ""))
    for path in (mark, package / "task.py"):
        os.utime(path, (0, 0))
    launch._give_package(str(package), trainer)
    assert mark.stat().st_mtime > 0, "what changed until now came with the package"
    assert list(given) == ["run.sh", "deep", "task.py", "package"], "its own folder last, and nothing through a link"
    assert set(given.values()) == {(900, 901)}
    assert [permissions(each) for each in (package, package / "deep")] == ["0o775"] * 2
    given.clear()
    monkeypatch.setattr(launch, "CALLER", "nobody")
    launch._give_package(str(package), trainer)
    assert not given, "what is not the replica's stays as it is"


def test_a_program_runs_from_its_first_word_to_its_last(host: Host, tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; print(sys.argv[1:], os.environ['WHAT'], os.getcwd(), sys.stdin.read(), sorted(os.environ))\n"
        "print(os.getpid())\nsys.stdout.write('x\\n' * 50000)\nsys.exit(3)"
    )
    odd = b"\xff\n".decode("utf-8", "surrogateescape")
    trainer = started(host, tmp_path, code, "a b", odd, WHAT="it's")
    assert finished(trainer) == 3
    first, second, *rest = printed(tmp_path)
    assert first.startswith(f"{['a b', odd]} it's {host.package}  [")
    assert "'WHAT'" in first
    assert "EXIT" not in first
    assert second == str(trainer.pid)
    assert rest == ["x"] * 50000
    assert (host.state / "jobs/job01/home").is_dir()
    assert not (host.root / "transient/scaletier-trainer.service").exists()


def test_a_program_finds_the_signals_as_they_usually_are(host: Host, tmp_path: Path) -> None:
    shows = ProcessRun("job01", ["grep", "SigIgn", "/proc/self/status"], host.package, {"PATH": os.environ["PATH"]})
    assert finished(trainer(host, tmp_path, shows)) == 0
    assert int(printed(tmp_path)[0].split()[1], 16) & (1 << signal.SIGPIPE - 1) == 0


@pytest.mark.parametrize(
    ("code", "status"),
    [("sys.exit(-1)", 255), ("sys.exit(137)", 137), ("os.kill(os.getpid(), 9)", -9), ("os.kill(os.getpid(), 11)", -11)],
)
def test_a_signal_is_told_from_an_exit_code(host: Host, tmp_path: Path, code: str, status: int) -> None:
    assert finished(started(host, tmp_path, f"import os, sys; {code}")) == status


def test_what_a_program_left_running_is_said(host: Host, tmp_path: Path) -> None:
    """`python train.py &` at the end of a script: the job SUCCEEDED at once, and nothing was trained."""
    (host.root / "left").write_text(f"#!/bin/sh\necho 2 >{host.root}/run/left\n")
    (host.root / "left").chmod(0o755)
    said = "2 of its processes still ran when the program ended with 0, and were ended: it must wait for what it starts in"
    assert finished(started(host, tmp_path, "print(1)")) == 0
    assert printed(tmp_path) == ["1", f"{said} the background"]
    assert finished(started(host, tmp_path, "raise SystemExit(3)")) == 3
    assert len(printed(tmp_path)) == 2, "each is asked anew"


@pytest.mark.parametrize(
    ("groups", "file"),
    [
        ("0::/u\n", "u/cgroup.procs"),
        ("4:memory:/m\n1:name=systemd:/u\n0::/none\n", "systemd/u/cgroup.procs"),
    ],
    ids=["version 2", "version 1"],
)
def test_what_is_left_running_is_counted_but_for_who_counts(tmp_path: Path, groups: str, file: str) -> None:
    (tmp_path / "own").write_text(groups)
    (tmp_path / file).parent.mkdir(parents=True)
    text = (SCRIPT.parent / "left").read_text().replace("/proc/self/cgroup", str(tmp_path / "own"))
    text = text.replace("/sys/fs/cgroup", str(tmp_path)).replace("/run/scaletier/left", str(tmp_path / "left"))
    environ = {"PATH": os.environ["PATH"]}
    (tmp_path / file).write_text("1\n2\n")
    fill = f"echo $$ >>{tmp_path / file}\n"
    subprocess.run(["sh", "-c", fill + text, "left"], env=environ, check=True)
    assert (tmp_path / "left").read_text() == "2\n"
    (tmp_path / "left").unlink()
    subprocess.run(["sh", "-c", text, "left"], env={**environ, "MAINPID": "7"}, check=True)
    assert not (tmp_path / "left").exists(), "a unit that is stopped has left nothing by itself"


@pytest.mark.parametrize(("name", "number"), [("KILL", 9), ("RTMIN+3", 37), ("64", 64), ("NONE", 9)])
def test_the_number_of_a_signal(name: str, number: int) -> None:
    assert at_the_end.signal_number(name) == number


def test_its_output_folder_is_there_and_what_it_names_is_shown(host: Host, tmp_path: Path) -> None:
    output = f"{host.bucket}/jobs/job01/output/1"
    trainer = started(
        host, tmp_path, "import sys; print(1)", f"--data={host.bucket}/own/a,{host.bucket}/jobs/b/output", JOB_DIR=output
    )
    assert finished(trainer) == 0
    assert permissions(Path(output)) == "0o775"
    for shown in (
        f'BindReadOnlyPaths=-"{host.bucket}/own"',
        f'BindReadOnlyPaths=-"{host.bucket}/jobs/b/output"',
        f'BindPaths="{output}"',
    ):
        assert shown in host.systemd_run_calls


def test_a_program_that_is_not_there_says_so(host: Host, tmp_path: Path) -> None:
    assert finished(trainer(host, tmp_path, ProcessRun("job01", ["/no/such", "x"], host.package, {}))) == 127
    assert printed(tmp_path) == ["the trainer cannot start: /no/such: No such file or directory"]


def test_its_peers_are_written_down_before_it_begins(host: Host, tmp_path: Path) -> None:
    file = host.root / "run/peers"
    (host.root / "etc/network").write_text(f"{NETWORK}\n")

    def seen(**peers: str) -> str:
        told = replace(run(host, "import sys; print(open(sys.argv[1]).read().split())", str(file)), peers=peers)
        assert finished(trainer(host, tmp_path, told)) == 0
        return printed(tmp_path)[-1]

    assert seen(worker="10.77.0.2", ps="10.77.0.128") == "['10.77.0.2', '10.77.0.128']"
    assert f'BindReadOnlyPaths="{host.root}/run/hosts":"/etc/hosts"' in host.systemd_run_calls, (
        "torchrun tells peers the name of its host"
    )
    names = (host.root / "run/hosts").read_text()
    assert names == Path("/etc/hosts").read_text().rstrip("\n") + "\n10.77.0.2 worker\n10.77.0.128 ps\n"
    (host.root / "systemd-run-calls").unlink()
    assert seen() == "[]", "what was left open by the one before is closed with this one's beginning"
    assert "/etc/hosts" not in host.systemd_run_calls
    file.unlink()
    assert finished(started(host, tmp_path, "import os, sys; print(os.path.exists(sys.argv[1]))", str(file))) == 0
    assert printed(tmp_path)[-1] == "False", "who has no peers waits for nothing"


@pytest.mark.parametrize("has_firewall", [True, False], ids=["local", "google"])
def test_peers_are_let_through_and_then_nobody(tmp_path: Path, has_firewall: bool) -> None:
    script = (SCRIPT.parent / "peers").read_text().replace("/run/scaletier/peers", str(tmp_path / "peers"))
    asked = tmp_path / "asked"
    fakes = {
        "id": "echo 997",
        "ip": f'[ "$2" != rule ] || {{ echo "12: from all to 10.77.0.9 lookup main"; exit; }}\ncat >>{asked}',
        "nft": f'[ "$1" != list ] || exit {0 if has_firewall else 1}\ncat >>{asked}',
    }
    for name, text in fakes.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)

    def told(*words: str) -> list[str]:
        asked.write_text("")
        environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        assert subprocess.run(["sh", "-c", script, "peers", *words], env=environ, check=True, capture_output=True).stderr == b""
        return asked.read_text().splitlines()

    assert told() == told("close") == []
    (tmp_path / "peers").write_text("10.77.0.2\n10.77.0.128\n")
    rule = "rule add pref 12 uidrange 997-997 to {} protocol kernel lookup main"
    element = "add element inet scaletier peers {{ {} }}"
    flush = ["flush set inet scaletier peers"]
    assert told() == [
        *("rule del pref 12", rule.format("10.77.0.2"), rule.format("10.77.0.128")),
        *([*flush, element.format("10.77.0.2"), element.format("10.77.0.128")] if has_firewall else []),
    ]
    assert told("close") == ["rule del pref 12", *(flush if has_firewall else [])]
    assert told("close") == []


def test_a_trainer_reaches_its_peers_alone_and_these_while_it_runs(tmp_path: Path) -> None:
    network, asked = tmp_path / "network", tmp_path / "asked"
    network.write_text(f"{NETWORK}\n")
    for name, text in {"id": "echo 997", "ip": f'echo "$@" >>{asked}'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    script = (SCRIPT.parent / "block-metadata").read_text().replace("/etc/scaletier/network", str(network))
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["sh", "-c", script], env=environ, check=True)
    added = [line for line in asked.read_text().splitlines() if " add " in line]
    (_, low), (high, _) = PEER_PORTS
    others = [f"dport 1-{PEER_PORTS[0][0] - 1} lookup main", f"dport {low + 1} lookup main", "prohibit"]
    assert low + 1 == high - 1
    assert added[:3] == [
        f"-4 rule add pref {place} uidrange 997-997 protocol kernel to {NETWORK} {what}"
        for place, what in enumerate(others, 13)
    ]
    network.unlink()
    assert subprocess.run(["sh", "-c", script], env=environ, capture_output=True, check=False).returncode != 0
    conf = SCRIPT.parents[3] / "etc/systemd/system/scaletier-trainer.service.d/hardening.conf"
    lines = [line for line in conf.read_text().splitlines() if line.startswith("Exec")]
    assert lines[:2] == ["ExecStartPre=+/usr/lib/scaletier/peers", "ExecStopPost=+-/usr/lib/scaletier/peers close"]
    assert "ExecStop=+-/usr/lib/scaletier/left" in lines


def test_what_a_shell_leaves_has_the_seconds_of_the_job(host: Host, tmp_path: Path) -> None:
    """The shell of `./run.sh` dies of SIGTERM at once: from then on systemd counts, unless a drop-in says otherwise."""
    log = Log(tmp_path / "logs", "job01", "master-0")
    for seconds, asked in ((90.0, "90.0"), (0, "0.1")):
        plan = Plan("job01", ["master-0"], "task", [], {}, stopSeconds=seconds, command=["true"])
        assignment = Assignment(plan, "master-0", host.package, {"PATH": os.environ["PATH"]}, sys.executable, log)
        assert finished(spawn(host.launcher, assignment)) == 0
        assert f"'TimeoutStopSec={asked}'" in host.systemd_run_calls
    unit = SCRIPT.parents[3] / "etc/systemd/system/scaletier-trainer.service.d/hardening.conf"
    assert not [line for line in unit.read_text().splitlines() if line.startswith("TimeoutStop")]


def test_a_stop_is_a_request_first_and_then_none(host: Host, tmp_path: Path) -> None:
    polite = started(
        host,
        tmp_path,
        "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(9))\nprint('up', flush=True)\ntime.sleep(600)",
    )
    until(lambda: polite.lines == 1)
    polite.stop(PATIENCE)
    assert finished(polite) == 9
    rude = started(
        host, tmp_path, "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(600)"
    )
    until(lambda: rude.lines == 1)
    rude.stop(0.2)
    assert finished(rude) == -9


# A program with a child of its own: both write down when they are told to end, the first one what its file says as well.
FAMILY = """
import os, pathlib, signal, sys, time
out = pathlib.Path(sys.argv[1])
def told(*_):
    text = pathlib.Path(os.environ["SCALETIER_STOP_FILE"]).read_text()
    (out / ("child" if child == 0 else "first")).write_text(text)
    if child == 0 or "stays" not in sys.argv:
        os._exit(0 if child == 0 else 143)
child = -1
signal.signal(15, told)
child = os.fork()
(out / f"up{bool(child)}").touch()
while True:
    time.sleep(600)
"""


@pytest.mark.parametrize("launcher", [True, False])
@pytest.mark.parametrize(
    ("stop_signal", "stays", "who"),
    [("main", False, ["first"]), ("main", True, ["child", "first"]), ("all", True, ["child", "first"])],
)
def test_who_is_told_to_end(host: Host, tmp_path: Path, launcher: bool, stop_signal: str, stays: bool, who: list[str]) -> None:
    (out := tmp_path / "out").mkdir()
    file = host.root / "run/stop" if launcher else tmp_path / "stop"
    file.write_text("of one before")
    asked = run(host, FAMILY, str(out), *(["stays"] if stays else []), SCALETIER_STOP_FILE=str(file))
    family = trainer(host, tmp_path, replace(asked, stop_signal=stop_signal), host.launcher if launcher else Child)
    until(lambda: len(list(out.iterdir())) == 2)
    assert not file.exists()
    seconds = scale() if stays else PATIENCE
    family.stop(seconds)
    assert finished(family) == (-9 if stays else 143)
    assert sorted(path.name for path in out.iterdir() if path.name[:2] != "up") == who
    assert (out / "first").read_text() == f"{seconds:.1f}\n"


@pytest.mark.parametrize("line", [b"", b"15x", b"1 main 5.0", b"main 15 5.0", b"\xff", b"9.0"])
def test_what_is_no_signal_is_passed_over(line: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.subprocess, "run", lambda *_, **__: pytest.fail("it is none"))
    launch.pass_on(line)


def test_where_the_replica_ends_so_does_its_trainer(host: Host, tmp_path: Path) -> None:
    first = Launched(
        launcher_client._connected(host.address),
        request(run(host, "import time; time.sleep(600)"), str(host.bucket)),
        os.open(os.devnull, os.O_WRONLY),
    )
    first._channel.shutdown(socket.SHUT_RDWR)
    second = started(host, tmp_path, "print('next')")
    assert finished(second) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(first.pid, 0)


@pytest.mark.parametrize(
    ("told", "status"),
    [
        (b'{"outOfMemory": true, "memoryLimit": 9, "code": 3, "signal": null, "left": 0}\n', 3),
        (b'{"outOfMemory": true, "memoryLimit": 9, "code": 137, "signal": 15, "left": 0}\n', -15),
        (b"", -9),
        (b"what?\n", -9),
    ],
)
def test_the_end_of_what_was_launched_wakes_the_replica_as_a_child_s_does(
    monkeypatch: pytest.MonkeyPatch, told: bytes, status: int
) -> None:
    woken = list[tuple[bool, int, int]]()
    monkeypatch.setattr(os, "kill", lambda pid, number: woken.append((made.ended(), pid, number)))
    here, there = socket.socketpair()
    with there, Path(os.devnull).open() as output:
        there.sendall(b'{"pid": 7}\n')
        made = Launched(here, {}, output.fileno())
        assert (made.pid, made.ended(), woken) == (7, False, [])
        there.sendall(told)
        there.shutdown(socket.SHUT_WR)
        until(lambda: bool(woken))
    assert woken == [(True, os.getpid(), signal.SIGCHLD)], "it is over by then"
    assert made.reap() == (Exit(status, True, 9) if told[:1] == b"{" else Exit(-9))


def test_a_launcher_that_waits_is_used_and_one_that_is_gone_is_not(host: Host, tmp_path: Path) -> None:
    starts = host.launcher
    starts.warm()
    starts.warm()
    until(lambda: len(host.processes) == 1)
    assert finished(trainer(host, tmp_path, run(host, "print(1)"), starts)) == 0
    assert len(host.processes) == 1
    starts.warm()
    until(lambda: len(host.processes) == 2)
    host.processes[1].kill()
    host.processes[1].wait()
    assert finished(trainer(host, tmp_path, run(host, "print(2)"), starts)) == 0
    assert printed(tmp_path) == ["1", "2"]


def test_one_waits_until_nothing_is_left_of_the_one_before(host: Host, tmp_path: Path) -> None:
    done = str(tmp_path / "done")
    first = started(host, tmp_path, "import pathlib, sys, time; time.sleep(1); pathlib.Path(sys.argv[1]).touch()", done)
    second = started(host, tmp_path, "import os, sys; print(os.path.exists(sys.argv[1]))", done)
    assert (finished(first), finished(second)) == (0, 0)
    assert printed(tmp_path) == ["True"]


def test_how_another_one_ended_counts_for_none(host: Host, tmp_path: Path) -> None:
    (host.root / "run/ended").write_text('{"code": 0, "outOfMemory": false, "memoryLimit": null, "left": 0}')
    (host.root / "post-stop").write_text("#!/bin/sh\n")
    assert finished(started(host, tmp_path, "raise SystemExit(3)")) == -9


def test_what_is_refused_is_said(host: Host, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"'/bucket/jobs/b/job.json' is no place|not in the package"):
        Launched(launcher_client._connected(host.address), {**GOOD, "cwd": "/etc"}, 1)
    with pytest.raises(OSError, match=r"not whole, or too large|Broken pipe|reset"):
        Launched(launcher_client._connected(host.address), {**GOOD, "env": {"A": "x" * (9 << 20)}}, 1)
    with pytest.raises(ValueError, match="null"):
        started(host, tmp_path, "a\0b")


def test_nobody_else_is_served(tmp_path: Path) -> None:
    host = Host(tmp_path, caller="nobody")
    try:
        with pytest.raises(OSError, match="not for you"):
            Launcher(host.address, "/bucket").tidy([])
    finally:
        host.close()


def left(host: Host) -> list[str]:
    """Return the content of the state's folders, and what waits there to be deleted."""
    here = [path.name for path in host.state.glob(".gone-*")]
    return sorted([*here, *(path.relative_to(host.state).as_posix() for path in host.state.glob("[!.]*/*"))])


def tidy(host: Host, *keep: str) -> None:
    host.launcher.tidy(keep)


def slow_to_delete(host: Host) -> Path:
    """Make the host's `rm` wait for this file."""
    go = host.root / "go"
    (host.root / "bin/rm").write_text(
        f'#!/bin/sh\nwhile [ -e {host.state} -a ! -e {go} ]; do sleep 0.02; done\nexec /bin/rm "$@"\n'
    )
    (host.root / "bin/rm").chmod(0o755)
    return go


def test_what_jobs_have_left_is_taken_away(host: Host) -> None:
    elsewhere = host.root / "elsewhere"
    (elsewhere / "kept").mkdir(parents=True)
    for name in ("jobs/job02/home", "jobs/job03/package", "fetched/job03/package", "fetched/job02/package"):
        (host.state / name).mkdir(parents=True)
    (host.state / "jobs/job03/home").symlink_to(elsewhere)
    tidy(host, "job01", "job02")
    until(lambda: left(host) == ["fetched/job02", "jobs/job01", "jobs/job02"])
    assert (elsewhere / "kept").is_dir()


def test_what_trials_have_left_is_taken_away(host: Host) -> None:
    (host.state / "trials/trial-0abc/own").mkdir(parents=True)
    (host.state / "trials/trial-0abc/own/file").touch()
    (host.state / "trials/trial-0abc/own").chmod(0o700)
    tidy(host, "job01")
    until(lambda: left(host) == ["jobs/job01"])


def test_a_trial_that_starts_has_those_before_it_taken_away(host: Host, tmp_path: Path) -> None:
    for name in ("trials/trial-old/own", "trials/trial-new", "jobs/job01/tmp/model", "jobs/job01/home/kept"):
        (host.state / name).mkdir(parents=True)
    trial = replace(run(host, "print(1)"), scratch=host.state / "trials/trial-new")
    assert finished(trainer(host, tmp_path, trial)) == 0
    until(lambda: left(host) == ["jobs/job01", "trials/trial-new"])
    assert not list((host.state / "jobs/job01/tmp").iterdir()), "no trial goes on from a checkpoint of another's in /tmp"
    assert (host.state / "jobs/job01/home/kept").is_dir()


@pytest.mark.parametrize("place", ["jobs/job02/home", "fetched/job02/package", "trials/trial-0abc"])
def test_no_depth_of_folders_stays(host: Host, place: str) -> None:
    subprocess.run(["mkdir", "-p", host.state / place / "/".join("d" * 1200)], check=True)
    tidy(host, "job01")
    until(lambda: left(host) == ["jobs/job01"])


def test_a_program_starts_while_it_is_deleted_what_others_have_left(host: Host, tmp_path: Path) -> None:
    go = slow_to_delete(host)
    for job in ("job02", "job03"):
        (host.state / "jobs" / job).mkdir()
        tidy(host, "job01")
    assert finished(started(host, tmp_path, "print(1)")) == 0
    assert [name[:6] for name in left(host)] == [".gone-", ".gone-", "jobs/j"]
    until(lambda: host.processes[1].poll() is not None)
    assert host.processes[0].poll() is None, "one deletes, and the next one leaves it to that"
    go.touch()
    until(lambda: left(host) == ["jobs/job01"])
    assert host.processes[0].wait() == 0


def test_what_a_loss_of_power_has_left_goes_with_the_next(host: Host) -> None:
    (host.state / ".gone-1-0/deep").mkdir(parents=True)
    tidy(host, "job01")
    until(lambda: left(host) == ["jobs/job01"])


def test_a_deletion_that_fails_is_said(host: Host) -> None:
    (host.root / "bin/rm").write_text("#!/bin/sh\nexit 1\n")
    (host.root / "bin/rm").chmod(0o755)
    (host.state / "jobs/job02").mkdir()
    tidy(host, "job01")
    assert host.processes[0].wait(PATIENCE) == 1


def test_what_nobody_waits_for_any_more_is_not_done(host: Host, tmp_path: Path) -> None:
    (host.state / "jobs/job02").mkdir()
    request_of_run = request(run(host, "import sys; open(sys.argv[1], 'w')", str(tmp_path / "ran")), str(host.bucket))
    with (host.root / "run/launch.lock").open("w") as lock, Path(os.devnull).open() as output:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for asked, descriptors in (({"keep": ["job01"]}, []), (request_of_run, [output.fileno()])):
            with launcher_client._connected(host.address) as channel:
                launcher_client._ask(channel, asked, descriptors)
    until(lambda: len(host.processes) == 2)
    assert [each.wait(PATIENCE) for each in host.processes] == [0, 0]
    assert left(host) == ["jobs/job01", "jobs/job02"]
    assert not host.systemd_run_calls


@pytest.mark.parametrize(
    ("own", "files", "found"),
    [
        ("0::/u\n", {"u/memory.max": "700\n", "u/memory.events": "oom 4\noom_kill 2\n"}, (700, 2)),
        ("0::/u\n", {"u/memory.max": "max\n", "u/memory.events": "oom 4\noom_kill 0\n"}, (None, 0)),
        (
            "4:memory:/u\n0::/u\n",
            {"memory/u/memory.limit_in_bytes": "700\n", "memory/u/memory.oom_control": "oom_kill 1\n"},
            (700, 1),
        ),
        ("4:memory:/u\n0::/u\n", {"memory/u/memory.limit_in_bytes": "9223372036854771712\n"}, (None, 0)),
        ("0::/gone\n", {}, (None, 0)),
    ],
)
def test_what_the_kernel_says_of_memory(tmp_path: Path, own: str, files: dict[str, str], found: tuple[int | None, int]) -> None:
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert at_the_end.memory(tmp_path / "own", tmp_path) == found


def test_what_is_on_a_full_disk_is_deleted_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A quota that is used up allows no other name, and no new folder, but lets go."""

    def full(*_: object) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    (tmp_path / "jobs/job01/home/deep").mkdir(parents=True)
    (tmp_path / "jobs/job02").mkdir()
    monkeypatch.setattr(launch, "STATE", str(tmp_path))
    monkeypatch.setattr(launch.os, "rename", full)
    assert launch.put_aside([*launch.left_by_jobs(("jobs",), {"job02"}), f"{tmp_path}/none"])
    assert [path.name for path in (tmp_path / "jobs").iterdir()] == ["job02"]
