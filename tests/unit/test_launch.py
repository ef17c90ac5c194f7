"""The launcher of a host: the requests that it accepts, the folders that it prepares, and its client."""

from __future__ import annotations

import getpass
import os
import pwd
import shlex
import signal
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from launcherhost import GOOD, HOME, NETWORK, SCRIPT, load_program, permissions
from replicahosts import PATIENCE
from waiting import until

from hosts.agent import launcher_client
from hosts.agent.launcher_client import LaunchedProgram, Launcher
from hosts.agent.replica_rules import Exit
from jobs import paths

launch, post_stop = load_program("launch"), load_program("post-stop")


def test_launcher_and_jobs_agree_on_job_ids() -> None:
    assert launch.JOB_ID.pattern == paths.JOB_ID.pattern.strip("^$")


def test_a_job_sees_only_its_parts_of_the_bucket() -> None:
    run = launch.run_of(GOOD, "/bucket")
    assert run["shown"] == ["/bucket/data", "/bucket/jobs/old/output"]
    line = launch.command(run, "/bucket", "scaletier-launch@1.service", False)
    properties = [line[index + 1] for index, word in enumerate(line) if word == "-p"]
    assert properties == [
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
    assert not {"python", "task", "A=b"} & set(line), "every user can read a command line"


def test_a_trainer_may_open_many_files_and_set_no_setuid_bit() -> None:
    """systemd's soft limit for a unit would be 1024. Of the filters each adds to or takes from those before."""
    unit = (SCRIPT.parents[3] / "etc/systemd/system/scaletier-trainer.service.d/hardening.conf").read_text().splitlines()
    assert {"LimitNOFILE=1048576", "RestrictSUIDSGID=yes", "NoNewPrivileges=yes", "CapabilityBoundingSet="} <= set(unit)
    filters = [line.partition("=")[2] for line in unit if line.startswith("SystemCallFilter=")]
    assert filters == ["@system-service", "~@privileged @keyring", "@chown"], "it may chown its own files to itself"


def test_on_google_no_bucket_folder_is_hidden() -> None:
    run = launch.run_of({**GOOD, "output": "", "names": []}, "")
    assert 'TemporaryFileSystem="/var/lib/scaletier":ro' in launch.command(run, "", "", False)
    assert not [word for word in launch.command(run, "", "", False) if "bucket" in word and word not in launch.ENTER]


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
def test_the_readable_and_writable_parts_of_the_bucket(path: str, shown: str | None, written: bool) -> None:
    assert launch.readable(path, "/bucket") == shown
    assert launch.writable(path, "/bucket") is written


def test_a_job_sees_only_the_models_that_it_names() -> None:
    assert launch.run_of({**GOOD, "names": ["/bucket/models/m/v1", "/bucket/cluster/x", 5]}, "/bucket")["shown"] == [
        "/bucket/data",
        "/bucket/models/m",
    ]


@pytest.mark.parametrize(
    ("change", "reason"),
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
def test_an_invalid_request_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(launch.RunRefused, match=reason):
        launch.run_of({**GOOD, **change}, "/bucket", NETWORK)


def test_peers_must_be_addresses_of_the_cluster() -> None:
    fields = {**GOOD, "peers": {"worker-0": "10.77.0.2", "ps-0": "10.77.0.254"}}
    assert launch.run_of(fields, "/bucket", NETWORK)["peers"] == fields["peers"]
    for network in ("", "10.77.0.2/32", "fd00::/64", "all"):
        with pytest.raises(launch.RunRefused, match=r"'10.77.0.2' is no address of a host"):
            launch.run_of(fields, "/bucket", network)


def test_a_folder_may_have_any_valid_name() -> None:
    run = launch.run_of({**GOOD, "cwd": f"{HOME}/package/it's 100 %", "output": "/bucket/it's (né)"}, "/bucket")
    assert 'BindPaths="/bucket/it\'s (né)":"/bucket/it\'s (né)"' in launch.command(run, "/bucket", "", False)


@given(st.text(max_size=30))
@example("/bucket/a\nExecStart=x")
@example('"/bucket/a":"/"')
def test_no_path_adds_a_systemd_property(text: str) -> None:
    fields = {**GOOD, "output": f"/bucket/{text}", "names": [text, f"/bucket/{text}"]}
    try:
        line = launch.command(launch.run_of(fields, "/bucket"), "/bucket", "", False)
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
def test_any_other_json_is_refused(fields: Any) -> None:
    with pytest.raises(launch.RunRefused):
        launch.run_of(fields, "/bucket")


def test_a_folder_is_created_for_the_trainer_without_following_links(tmp_path: Path) -> None:
    launch._folder(str(tmp_path), ["a", "output"], os.getuid(), os.getgid(), 0o770, 0o775)
    assert [permissions(tmp_path / name) for name in ("a", "a/output")] == ["0o775", "0o770"]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "a/link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="link"):
        launch._folder(str(tmp_path), ["a", "link", "deeper"], os.getuid(), os.getgid(), 0o770, 0o775)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_new_folder_above_the_output_has_the_group_of_its_bucket(tmp_path: Path) -> None:
    (other,) = {*os.getgroups(), 4711} - {os.getgid()} if os.getuid() else {4711}
    (tmp_path / "bucket").mkdir()
    os.chown(tmp_path / "bucket", -1, other)
    launch._folder(str(tmp_path / "bucket"), ["mine", "a", "output"], os.getuid(), os.getgid(), 0o775, 0o775)
    groups = [(tmp_path / "bucket" / name).stat().st_gid for name in ("mine", "mine/a", "mine/a/output")]
    assert groups == [other, other, os.getgid()]


def test_a_job_dir_created_by_the_agent_is_chowned_to_the_trainer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only the owner of JOB_DIR may set its times and mode, as `cp -a results/. $JOB_DIR` does."""
    (tmp_path / "jobs/job01/output").mkdir(parents=True)
    owners: list[tuple[int, int]] = []
    monkeypatch.setattr(launch, "STATE", str(tmp_path / "state"))
    monkeypatch.setattr(launch.os, "fchown", lambda _, uid, gid: owners.append((uid, gid)))
    monkeypatch.setattr(launch.pwd, "getpwnam", lambda name: SimpleNamespace(**users[name]))
    users = {"trainer": {"pw_uid": 900, "pw_gid": 901}, "replica": {"pw_uid": os.getuid(), "pw_gid": 902}}
    (tmp_path / "state/jobs/job01").mkdir(parents=True)
    run = {"job": "job01", "scratch": "", "package": "", "shown": [], "output": f"{tmp_path}/jobs/job01/output"}
    launch.prepare(run, str(tmp_path))
    assert owners == [(900, 901)] * 4, "home, tmp, var-tmp and JOB_DIR"
    users["replica"]["pw_uid"] += 1
    launch.prepare(run, str(tmp_path))
    assert owners[4:] == [(-1, 901)] * 4, "folders of other users keep their owner"


def test_a_huge_output_or_one_of_another_user_keeps_its_permissions(
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


def test_folders_in_an_output_are_visited_one_by_one_until_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Millions of empty folders neither delay a job's end nor fill the memory."""
    for number in range(500):
        (tmp_path / f"own/{number}").mkdir(parents=True, mode=0o700)
    opened: list[str] = []
    open_below = launch._below

    def record(here: int, name: str) -> int | None:
        opened.append(name)
        descriptor: int | None = open_below(here, name)
        return descriptor

    monkeypatch.setattr(launch, "USER", getpass.getuser())
    monkeypatch.setattr(launch, "_below", record)
    monkeypatch.setattr(launch, "SECONDS", -1.0)
    launch.share_output(f"{tmp_path}/own", str(tmp_path))
    assert opened == ["own"]
    assert "it took more than -1 s" in capsys.readouterr().err
    times = iter((0.0, 0.0, 0.0))  # the start, and two entries
    monkeypatch.setattr(launch, "SECONDS", PATIENCE)
    monkeypatch.setattr(launch, "time", SimpleNamespace(monotonic=lambda: next(times, 2 * PATIENCE)))
    launch.share_output(f"{tmp_path}/own", str(tmp_path))
    assert len(opened) == 1 + 1 + 2
    assert sum(permissions(folder) == "0o750" for folder in (tmp_path / "own").iterdir()) == 2


def test_a_package_fetched_by_the_agent_is_chowned_to_the_trainer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "fetched/job01/package"
    (package / "deep").mkdir(parents=True, mode=0o755)
    for name in ("task.py", "deep/run.sh"):
        (package / name).touch()
    (package / "link").symlink_to("/etc")
    mark = package.with_name("package.sha256")
    mark.touch()
    owners: dict[str, tuple[int, int]] = {}
    name_of = {(path.stat().st_dev, path.stat().st_ino): path for path in (package, package / "deep")}

    def fchown(descriptor: int, uid: int, gid: int) -> None:
        state = os.fstat(descriptor)
        owners[name_of[state.st_dev, state.st_ino].name] = (uid, gid)

    def chown(name: str, uid: int, gid: int, *, dir_fd: int, follow_symlinks: bool) -> None:
        assert not follow_symlinks
        assert name in os.listdir(dir_fd)
        owners[name] = (uid, gid)

    monkeypatch.setattr(launch, "STATE", str(tmp_path))
    monkeypatch.setattr(launch.os, "fchown", fchown)
    monkeypatch.setattr(launch.os, "chown", chown)
    monkeypatch.setattr(launch, "CALLER", getpass.getuser())
    trainer = pwd.struct_passwd(("trainer", "x", 900, 901, "", "", ""))
    for path in (mark, package / "task.py"):
        os.utime(path, (0, 0))
    launch._give_package(str(package), trainer)
    assert mark.stat().st_mtime > 0, "files that changed until now came with the package"
    assert list(owners) == ["run.sh", "deep", "task.py", "package"], "the package's folder last, and nothing through a link"
    assert set(owners.values()) == {(900, 901)}
    assert [permissions(each) for each in (package, package / "deep")] == ["0o775"] * 2
    owners.clear()
    monkeypatch.setattr(launch, "CALLER", "nobody")
    launch._give_package(str(package), trainer)
    assert not owners, "files of another owner are unchanged"


@pytest.mark.parametrize(("name", "number"), [("KILL", 9), ("RTMIN+3", 37), ("64", 64), ("NONE", 9)])
def test_the_number_of_a_signal(name: str, number: int) -> None:
    assert post_stop.signal_number(name) == number


@pytest.mark.parametrize("line", [b"", b"15x", b"1 main 5.0", b"main 15 5.0", b"\xff", b"9.0"])
def test_an_invalid_signal_line_is_ignored(line: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.subprocess, "run", lambda *_, **__: pytest.fail("no signal is to be sent"))
    launch.pass_on(line)


@pytest.mark.parametrize(
    ("report", "status"),
    [
        (b'{"outOfMemory": true, "memoryLimit": 9, "code": 3, "signal": null, "left": 0}\n', 3),
        (b'{"outOfMemory": true, "memoryLimit": 9, "code": 137, "signal": 15, "left": 0}\n', -15),
        (b"", -9),
        (b"what?\n", -9),
    ],
)
def test_the_end_of_a_launched_program_wakes_the_agent_by_sigchld(
    monkeypatch: pytest.MonkeyPatch, report: bytes, status: int
) -> None:
    signals = list[tuple[bool, int, int]]()
    monkeypatch.setattr(os, "kill", lambda pid, number: signals.append((launched.ended(), pid, number)))
    agent_end, launcher_end = socket.socketpair()
    with launcher_end, Path(os.devnull).open() as output:
        launcher_end.sendall(b'{"pid": 7}\n')
        launched = LaunchedProgram(agent_end, {}, output.fileno())
        assert (launched.pid, launched.ended(), signals) == (7, False, [])
        launcher_end.sendall(report)
        launcher_end.shutdown(socket.SHUT_WR)
        until(lambda: bool(signals))
    assert signals == [(True, os.getpid(), signal.SIGCHLD)], "the program has ended by then"
    assert launched.reap() == (Exit(status, True, 9) if report[:1] == b"{" else Exit(-9))


def test_a_launched_program_is_signalled_over_its_connection() -> None:
    agent_end, launcher_end = socket.socketpair()
    agent_end.settimeout(60.0)
    with launcher_end, Path(os.devnull).open() as output:
        launcher_end.sendall(b'{"pid": 7}\n')
        launched = LaunchedProgram(agent_end, {"cwd": "/"}, output.fileno(), "all")
        assert agent_end.gettimeout() is None, "it may run for days"
        launched.stop(2.5)
        launched.signal(signal.SIGKILL)
        assert launched.wait(0.0) is False
        with launcher_end.makefile("rb") as file:
            assert [file.readline() for _ in range(3)] == [b'{"cwd": "/"}\n', b"15 all 2.5\n", b"9\n"]
    assert launched.wait(PATIENCE) is True
    assert launched.reap() == Exit(-9)
    assert agent_end.fileno() < 0
    launched.signal(signal.SIGKILL)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b'{"error": "no such folder"}\n', "^no such folder$"),
        (b'{"pid"', "^the host's launcher ended without an answer$"),
        (None, "^the host's launcher did not answer in 60 s$"),
    ],
)
def test_a_connection_is_closed_if_the_launcher_starts_nothing(answer: bytes | None, reason: str) -> None:
    agent_end, launcher_end = socket.socketpair()
    agent_end.settimeout(0.01 if answer is None else PATIENCE)
    with launcher_end, Path(os.devnull).open() as output:
        if answer:
            launcher_end.sendall(answer)
            launcher_end.shutdown(socket.SHUT_WR)
        with pytest.raises(OSError, match=reason):
            LaunchedProgram(agent_end, {}, output.fileno())
    assert agent_end.fileno() < 0


def test_a_waiting_connection_is_used_unless_it_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [socket.socketpair() for _ in range(3)]
    connections = iter([ours for ours, _ in pairs])
    monkeypatch.setattr(launcher_client, "_connect", lambda _: next(connections))
    launcher = Launcher("/socket", "/bucket")
    for _ in range(2):
        launcher.connect_early()
    assert launcher._channel() is pairs[0][0]
    launcher.connect_early()
    pairs[1][1].sendall(b"x")
    assert launcher._channel() is pairs[2][0]
    assert [ours.fileno() < 0 for ours, _ in pairs] == [False, True, False]
    for pair in pairs:
        for end in pair:
            end.close()


def test_a_host_without_a_launcher_has_none(monkeypatch: pytest.MonkeyPatch, socket_folder: Path) -> None:
    assert launcher_client.launcher("/bucket", {}) is None
    found = launcher_client.launcher("/bucket", {launcher_client.SOCKET_VARIABLE: str(socket_folder / "none")})
    assert found
    sockets: list[socket.socket] = []
    real = socket.socket

    def make(*args: Any) -> socket.socket:
        sockets.append(real(*args))
        return sockets[-1]

    monkeypatch.setattr(socket, "socket", make)
    with pytest.raises(FileNotFoundError):
        found.tidy([])
    found.connect_early()
    assert [each.fileno() < 0 for each in sockets] == [True, True]


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
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
def test_the_memory_limit_and_kills_are_read_from_the_kernel(
    tmp_path: Path, cgroup: str, files: dict[str, str], expected: tuple[int | None, int]
) -> None:
    (tmp_path / "own").write_text(cgroup)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert post_stop.memory(tmp_path / "own", tmp_path) == expected
