"""The launcher of a host as a process: a program from its start to its end, and the deletion of what jobs left."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from launcherhost import GOOD, NETWORK, SCRIPT, Host, load_program, permissions
from replicahosts import PATIENCE
from waiting import scale, until, wait_for

from hosts.agent import launcher_client
from hosts.agent import trainer as trainer_module
from hosts.agent.__main__ import spawn
from hosts.agent.launcher_client import LaunchedProgram, Launcher, request
from hosts.agent.log import Log
from hosts.agent.process import Child, HostBusyError, ProgramSpec, StartProgram
from hosts.agent.supervisor import Assignment
from hosts.agent.trainer import Trainer
from infra.ports import PEER_PORTS
from jobs.records import Plan

launch = load_program("launch")


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path)
    yield host
    host.close()


def run(host: Host, code: str, *args: str, **env: str) -> ProgramSpec:
    return ProgramSpec("job01", [sys.executable, "-c", code, *args], host.package, {"PATH": os.environ["PATH"], **env})


def wait_for_exit(trainer: Trainer) -> int:
    return wait_for(trainer.poll, "the trainer's end").status


def start_code(host: Host, tmp_path: Path, code: str, *args: str, **env: str) -> Trainer:
    return trainer(host, tmp_path, run(host, code, *args, **env))


def trainer(host: Host, tmp_path: Path, run: ProgramSpec, start: StartProgram | None = None) -> Trainer:
    return Trainer(run, Log(tmp_path / "logs", "job01", "master-0"), start or host.launcher)


def read_log(tmp_path: Path) -> list[str]:
    chunks = sorted((tmp_path / "logs/job01").glob("*.jsonl"))
    return [json.loads(line)["message"] for chunk in chunks for line in chunk.read_text().splitlines()]


def test_the_output_becomes_group_readable_once_the_program_ended(host: Host, tmp_path: Path) -> None:
    output, elsewhere = host.bucket / "jobs/job01/output", tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (elsewhere / "key").touch(0o600)
    code = (
        "import os, sys, tempfile; os.umask(0o077); os.chdir(os.environ['JOB_DIR'])\n"
        "tempfile.NamedTemporaryFile(dir='.', delete=False).close(); os.makedirs('deep/er'); open('deep/er/model', 'w')\n"
        "os.symlink(sys.argv[1], 'folder'); os.symlink(sys.argv[1] + '/key', 'link'); os.mkfifo('pipe'); os.chmod('.', 0o700)"
    )
    assert wait_for_exit(start_code(host, tmp_path, code, str(elsewhere), JOB_DIR=str(output))) == 0
    (temporary,) = output.glob("tmp*")
    assert [permissions(path) for path in (temporary, output / "deep/er/model")] == ["0o640"] * 2
    assert [permissions(path) for path in (output, output / "deep", output / "deep/er")] == ["0o750"] * 3
    assert [permissions(path) for path in (elsewhere, elsewhere / "key")] == ["0o700", "0o600"], "links are not followed"
    assert permissions(output / "pipe") == "0o600"


def test_folders_of_an_older_bucket_lose_the_setgid_bit(host: Host, tmp_path: Path) -> None:
    output, data, unseen = (host.bucket / name for name in ("jobs/job01/output", "data", "own"))
    (tmp_path / "elsewhere").mkdir()
    for top in (output, data, unseen):
        (top / "a/b").mkdir(parents=True)
        (top / "a/b/file").touch()
        (top / "a/link").symlink_to(tmp_path / "elsewhere")
    every = [folder for top in (output, data, unseen) for folder in (top, top / "a", top / "a/b")]
    for folder in (*every, tmp_path / "elsewhere"):
        folder.chmod(0o2775)
    assert wait_for_exit(start_code(host, tmp_path, "print(1)", JOB_DIR=str(output))) == 0
    assert [permissions(folder) for folder in every] == ["0o775"] * 6 + ["0o2775"] * 3, "only of what the job sees"
    assert permissions(tmp_path / "elsewhere") == "0o2775", "links are not followed"


def test_a_very_deep_folder_does_not_delay_a_job(tmp_path: Path) -> None:
    top = os.open(tmp_path, os.O_RDONLY)
    descriptor, depth = os.dup(top), 1200
    for _ in range(depth):
        os.mkdir("d", dir_fd=descriptor)
        child = os.open("d", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = child
    os.close(descriptor)
    try:
        tmp_path.chmod(0o2775)
        launch._clear_set_group_id(top)
        assert permissions(tmp_path) == "0o775"
    finally:
        os.close(top)
        subprocess.run(["rm", "-rf", tmp_path / "d"], check=True)  # pytest's own deletion fails at some depth


def test_a_program_s_arguments_environment_and_output_are_unchanged(host: Host, tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; print(sys.argv[1:], os.environ['WHAT'], os.getcwd(), sys.stdin.read(), sorted(os.environ))\n"
        "print(os.getpid())\nsys.stdout.write('x\\n' * 50000)\nsys.exit(3)"
    )
    not_utf8 = b"\xff\n".decode("utf-8", "surrogateescape")
    trainer = start_code(host, tmp_path, code, "a b", not_utf8, WHAT="it's")
    assert wait_for_exit(trainer) == 3
    first, second, *rest = read_log(tmp_path)
    assert first.startswith(f"{['a b', not_utf8]} it's {host.package}  [")
    assert "'WHAT'" in first
    assert "EXIT" not in first
    assert second == str(trainer.pid)
    assert rest == ["x"] * 50000
    assert (host.state / "jobs/job01/home").is_dir()
    assert not (host.root / "transient/scaletier-trainer.service").exists()


def test_an_agent_sees_whether_anything_was_ever_written_to_a_private_folder(host: Host, tmp_path: Path) -> None:
    folders = [host.state / f"jobs/job01/{name}" for name in ("home", "tmp", "var-tmp")]
    for code, expected in (
        ("", [0, 0, 0]),
        (f"import os; os.unlink(os.open('{folders[1]}/x', os.O_CREAT) and '{folders[1]}/x')", [0, 1, 0]),
        ("", [0, 1, 0]),
    ):
        assert wait_for_exit(start_code(host, tmp_path, code)) == 0
        assert [min(folder.stat().st_mtime_ns, 1) for folder in folders] == expected


def test_a_program_has_the_default_signal_handlers(host: Host, tmp_path: Path) -> None:
    grep = ProgramSpec("job01", ["grep", "SigIgn", "/proc/self/status"], host.package, {"PATH": os.environ["PATH"]})
    assert wait_for_exit(trainer(host, tmp_path, grep)) == 0
    assert int(read_log(tmp_path)[0].split()[1], 16) & (1 << signal.SIGPIPE - 1) == 0


@pytest.mark.parametrize(
    ("code", "status"),
    [("sys.exit(-1)", 255), ("sys.exit(137)", 137), ("os.kill(os.getpid(), 9)", -9), ("os.kill(os.getpid(), 11)", -11)],
)
def test_signals_and_exit_codes_are_distinguished(host: Host, tmp_path: Path, code: str, status: int) -> None:
    assert wait_for_exit(start_code(host, tmp_path, f"import os, sys; {code}")) == status


def test_processes_that_a_program_left_running_are_reported(host: Host, tmp_path: Path) -> None:
    """With `python train.py &` at the end of a script, the job would have SUCCEEDED at once without training."""
    (host.root / "left").write_text(f"#!/bin/sh\necho 2 >{host.root}/run/left\n")
    (host.root / "left").chmod(0o755)
    warning = "2 of its processes still ran when the program ended with 0, and were ended: it must wait for what it starts in"
    assert wait_for_exit(start_code(host, tmp_path, "print(1)")) == 0
    assert read_log(tmp_path) == ["1", f"{warning} the background"]
    assert wait_for_exit(start_code(host, tmp_path, "raise SystemExit(3)")) == 3
    assert len(read_log(tmp_path)) == 2, "the count of the run before is not reported again"


@pytest.mark.parametrize(
    ("groups", "file"),
    [("0::/u\n", "u/cgroup.procs"), ("4:memory:/m\n1:name=systemd:/u\n0::/none\n", "systemd/u/cgroup.procs")],
    ids=["version 2", "version 1"],
)
def test_left_processes_are_counted_without_the_counting_shell(tmp_path: Path, groups: str, file: str) -> None:
    (tmp_path / "own").write_text(groups)
    (tmp_path / file).parent.mkdir(parents=True)
    text = (SCRIPT.parent / "left").read_text().replace("/proc/self/cgroup", str(tmp_path / "own"))
    text = text.replace("/sys/fs/cgroup", str(tmp_path)).replace("/run/scaletier/left", str(tmp_path / "left"))
    environ = {"PATH": os.environ["PATH"]}
    (tmp_path / file).write_text("1\n2\n")
    fill = f"echo $$ >>{tmp_path / file}\n"
    subprocess.run(["sh", "-c", fill + text, "left"], env=environ, check=True)
    assert (tmp_path / "left").read_text() == "2\n"
    ending = f"(sleep 0.02; : >{tmp_path / file}) &\n"  # such as multiprocessing's resource tracker
    subprocess.run(["sh", "-c", ending + text, "left"], env=environ, check=True)
    assert (tmp_path / "left").read_text() == "0\n"
    (tmp_path / "left").unlink()
    subprocess.run(["sh", "-c", text, "left"], env={**environ, "MAINPID": "7"}, check=True)
    assert not (tmp_path / "left").exists(), "a stopped unit left no process running"


def test_the_output_folder_is_created_and_named_paths_are_bound(host: Host, tmp_path: Path) -> None:
    output = f"{host.bucket}/jobs/job01/output/1"
    trainer = start_code(
        host, tmp_path, "import sys; print(1)", f"--data={host.bucket}/own/a,{host.bucket}/jobs/b/output", JOB_DIR=output
    )
    assert wait_for_exit(trainer) == 0
    assert permissions(Path(output)) == "0o775"
    for binding in (
        f'BindReadOnlyPaths=-"{host.bucket}/own"',
        f'BindReadOnlyPaths=-"{host.bucket}/jobs/b/output"',
        f'BindPaths="{output}"',
    ):
        assert binding in host.systemd_run_calls


def test_a_missing_program_is_reported(host: Host, tmp_path: Path) -> None:
    assert wait_for_exit(trainer(host, tmp_path, ProgramSpec("job01", ["/no/such", "x"], host.package, {}))) == 127
    assert read_log(tmp_path) == ["the trainer cannot start: /no/such: No such file or directory"]


def test_a_program_s_peers_are_written_before_it_starts(host: Host, tmp_path: Path) -> None:
    file = host.root / "run/peers"
    (host.root / "etc/network").write_text(f"{NETWORK}\n")

    def peers_at_start(**peers: str) -> str:
        run_with_peers = replace(run(host, "import sys; print(open(sys.argv[1]).read().split())", str(file)), peers=peers)
        assert wait_for_exit(trainer(host, tmp_path, run_with_peers)) == 0
        return read_log(tmp_path)[-1]

    assert peers_at_start(worker="10.77.0.2", ps="10.77.0.128") == "['10.77.0.2', '10.77.0.128']"
    assert f'BindReadOnlyPaths="{host.root}/run/hosts":"/etc/hosts"' in host.systemd_run_calls, (
        "torchrun tells peers the name of its host"
    )
    opens = f"'ExecStartPre=+{host.root}/peers', '-p', 'ExecStopPost=+-{host.root}/peers close'"
    assert opens in host.systemd_run_calls, "systemd closes the network however the trainer ends"
    names = (host.root / "run/hosts").read_text()
    assert names == Path("/etc/hosts").read_text().rstrip("\n") + "\n10.77.0.2 worker\n10.77.0.128 ps\n"
    (host.root / "systemd-run-calls").unlink()
    assert peers_at_start() == "[]", "the peers of the run before are removed at the start"
    assert "/etc/hosts" not in host.systemd_run_calls
    assert opens in host.systemd_run_calls
    (host.root / "systemd-run-calls").unlink()
    file.unlink()
    assert wait_for_exit(start_code(host, tmp_path, "import os, sys; print(os.path.exists(sys.argv[1]))", str(file))) == 0
    assert read_log(tmp_path)[-1] == "False", "without peers there is no file to wait for"
    assert "Exec" not in host.systemd_run_calls


@pytest.mark.parametrize("has_firewall", [True, False], ids=["local", "google"])
def test_peers_are_allowed_while_the_trainer_runs(tmp_path: Path, has_firewall: bool) -> None:
    script = (SCRIPT.parent / "peers").read_text().replace("/run/scaletier/peers", str(tmp_path / "peers"))
    calls = tmp_path / "calls"
    fakes = {
        "id": "echo 997",
        "ip": f'[ "$2" != rule ] || {{ echo "12: from all to 10.77.0.9 lookup main"; exit; }}\ncat >>{calls}',
        "nft": f'[ "$1" != list ] || exit {0 if has_firewall else 1}\ncat >>{calls}',
    }
    for name, text in fakes.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)

    def run_script(*words: str) -> list[str]:
        calls.write_text("")
        environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        assert subprocess.run(["sh", "-c", script, "peers", *words], env=environ, check=True, capture_output=True).stderr == b""
        return calls.read_text().splitlines()

    assert run_script() == run_script("close") == []
    (tmp_path / "peers").write_text("10.77.0.2\n10.77.0.128\n")
    rule = "rule add pref 12 uidrange 997-997 to {} protocol kernel lookup main"
    element = "add element inet scaletier peers {{ {} }}"
    flush = ["flush set inet scaletier peers"]
    assert run_script() == [
        *("rule del pref 12", rule.format("10.77.0.2"), rule.format("10.77.0.128")),
        *([*flush, element.format("10.77.0.2"), element.format("10.77.0.128")] if has_firewall else []),
    ]
    assert run_script("close") == ["rule del pref 12", *(flush if has_firewall else [])]
    assert run_script("close") == []


def test_a_trainer_reaches_only_its_peers_and_only_while_it_runs(tmp_path: Path) -> None:
    network, calls = tmp_path / "network", tmp_path / "calls"
    network.write_text(f"{NETWORK}\n")
    ip = f'echo "$@" >>{calls}\necho "$IP_SAYS" >&2\ntest -z "$IP_SAYS"'
    for name, text in {"id": "echo 997", "ip": ip}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    script = (SCRIPT.parent / "block-metadata").read_text().replace("/etc/scaletier/network", str(network))
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["sh", "-c", script], env=environ, check=True)
    added = calls.read_text().splitlines()
    again = {**environ, "IP_SAYS": "RTNETLINK answers: File exists"}
    assert subprocess.run(["sh", "-c", script], env=again, capture_output=True, check=True).stderr == b""
    assert calls.read_text().splitlines() == added * 2, "rules are never deleted, not even to be added again"
    failing = {**environ, "IP_SAYS": "RTNETLINK answers: Operation not permitted"}
    failed = subprocess.run(["sh", "-c", script], env=failing, capture_output=True, check=False)
    assert (failed.returncode, failed.stderr.decode().strip()) == (1, failing["IP_SAYS"])
    (_, low), (high, _) = PEER_PORTS
    actions = [f"dport 1-{PEER_PORTS[0][0] - 1} lookup main", f"dport {low + 1} lookup main", "prohibit"]
    assert low + 1 == high - 1
    assert added[:3] == [
        f"-4 rule add pref {priority} uidrange 997-997 protocol kernel to {NETWORK} {action}"
        for priority, action in enumerate(actions, 13)
    ]
    network.unlink()
    assert subprocess.run(["sh", "-c", script], env=environ, capture_output=True, check=False).returncode != 0
    conf = SCRIPT.parents[3] / "etc/systemd/system/scaletier-trainer.service.d/hardening.conf"
    commands = {line for line in conf.read_text().splitlines() if line.startswith("Exec")}
    assert commands == {"ExecStopPost=+/usr/lib/scaletier/post-stop", "ExecStop=+-/usr/lib/scaletier/left"}


def test_children_of_a_shell_have_the_job_s_stop_seconds(host: Host, tmp_path: Path) -> None:
    """The shell of `./run.sh` dies of SIGTERM at once; from then on systemd's TimeoutStopSec applies."""
    log = Log(tmp_path / "logs", "job01", "master-0")
    for seconds, expected in ((90.0, "90.0"), (0, "0.1")):
        plan = Plan("job01", ["master-0"], "task", [], {}, stopSeconds=seconds, command=["true"])
        assignment = Assignment(plan, "master-0", host.package, {"PATH": os.environ["PATH"]}, sys.executable, log)
        assert wait_for_exit(spawn(host.launcher, assignment)) == 0
        assert f"'TimeoutStopSec={expected}'" in host.systemd_run_calls
    unit = SCRIPT.parents[3] / "etc/systemd/system/scaletier-trainer.service.d/hardening.conf"
    assert not [line for line in unit.read_text().splitlines() if line.startswith("TimeoutStop")]


def test_a_stop_sends_sigterm_and_then_sigkill(host: Host, tmp_path: Path) -> None:
    obeying = start_code(
        host,
        tmp_path,
        "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(9))\nprint('up', flush=True)\ntime.sleep(600)",
    )
    until(lambda: obeying.lines == 1)
    obeying.stop(PATIENCE)
    assert wait_for_exit(obeying) == 9
    ignoring = start_code(
        host, tmp_path, "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(600)"
    )
    until(lambda: ignoring.lines == 1)
    ignoring.stop(0.2)
    assert wait_for_exit(ignoring) == -9


# A program with a child: both write the content of the stop file when they get SIGTERM.
FAMILY = """
import os, pathlib, signal, sys, time
out = pathlib.Path(sys.argv[1])
def stop(*_):
    text = pathlib.Path(os.environ["SCALETIER_STOP_FILE"]).read_text()
    (out / ("child" if child == 0 else "first")).write_text(text)
    if child == 0 or "stays" not in sys.argv:
        os._exit(0 if child == 0 else 143)
child = -1
signal.signal(15, stop)
child = os.fork()
(out / f"up{bool(child)}").touch()
while True:
    time.sleep(600)
"""


@pytest.mark.parametrize("launcher", [True, False])
@pytest.mark.parametrize(
    ("stop_signal_to", "stays", "signalled"),
    [("main", False, ["first"]), ("main", True, ["child", "first"]), ("all", True, ["child", "first"])],
)
def test_sigterm_reaches_the_main_process_or_all(
    host: Host,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    launcher: bool,
    stop_signal_to: str,
    stays: bool,
    signalled: list[str],
) -> None:
    if stays:
        monkeypatch.setattr(trainer_module, "FIRST_PROCESS_SHARE", 0.1)  # the rest of the time is for the other processes
    (out := tmp_path / "out").mkdir()
    file = host.root / "run/stop" if launcher else tmp_path / "stop"
    file.write_text("of the run before")
    command = run(host, FAMILY, str(out), *(["stays"] if stays else []), SCALETIER_STOP_FILE=str(file))
    family = trainer(host, tmp_path, replace(command, stop_signal_to=stop_signal_to), host.launcher if launcher else Child)
    until(lambda: len(list(out.iterdir())) == 2)
    assert not file.exists()
    seconds = 2 * scale() if stays else PATIENCE
    family.stop(seconds)
    assert wait_for_exit(family) == (-9 if stays else 143)
    assert sorted(path.name for path in out.iterdir() if path.name[:2] != "up") == signalled
    assert (out / "first").read_text() == f"{seconds:.1f}\n"


def test_a_trainer_ends_with_its_agent(host: Host, tmp_path: Path) -> None:
    first = LaunchedProgram(
        launcher_client._connect(host.address),
        request(run(host, "import time; time.sleep(600)"), str(host.bucket)),
        os.open(os.devnull, os.O_WRONLY),
    )
    first._channel.shutdown(socket.SHUT_RDWR)
    second = start_code(host, tmp_path, "print('next')")
    assert wait_for_exit(second) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(first.pid, 0)


def test_a_waiting_launcher_is_used_and_a_dead_one_is_replaced(host: Host, tmp_path: Path) -> None:
    launcher = host.launcher
    launcher.connect_early()
    launcher.connect_early()
    until(lambda: len(host.processes) == 1)
    assert wait_for_exit(trainer(host, tmp_path, run(host, "print(1)"), launcher)) == 0
    assert len(host.processes) == 1
    launcher.connect_early()
    until(lambda: len(host.processes) == 2)
    host.processes[1].kill()
    host.processes[1].wait()
    assert wait_for_exit(trainer(host, tmp_path, run(host, "print(2)"), launcher)) == 0
    assert read_log(tmp_path) == ["1", "2"]


def test_a_program_waits_for_the_end_of_the_one_before(host: Host, tmp_path: Path) -> None:
    done = str(tmp_path / "done")
    first = start_code(host, tmp_path, "import pathlib, sys, time; time.sleep(1); pathlib.Path(sys.argv[1]).touch()", done)
    second = start_code(host, tmp_path, "import os, sys; print(os.path.exists(sys.argv[1]))", done)
    assert (wait_for_exit(first), wait_for_exit(second)) == (0, 0)
    assert read_log(tmp_path) == ["True"]


def test_a_program_that_does_not_end_makes_the_host_busy(host: Host, tmp_path: Path) -> None:
    script = host.root / "launch"
    script.write_text(script.read_text().replace("LOCK_SECONDS = 40.0", "LOCK_SECONDS = 0.1"))
    with (host.root / "run/launch.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(HostBusyError, match=r"^an earlier program on this host has not ended yet$"):
            start_code(host, tmp_path, "print(1)")
        with pytest.raises(HostBusyError):
            host.launcher.tidy([])
        assert [each.wait(PATIENCE) for each in host.processes] == [1, 1], "a host has few connections to its launcher"
    assert wait_for_exit(start_code(host, tmp_path, "print(2)")) == 0
    assert read_log(tmp_path) == ["2"]


def test_the_end_of_an_earlier_program_is_not_reported_again(host: Host, tmp_path: Path) -> None:
    (host.root / "run/ended").write_text('{"code": 0, "outOfMemory": false, "memoryLimit": null, "left": 0}')
    (host.root / "post-stop").write_text("#!/bin/sh\n")
    assert wait_for_exit(start_code(host, tmp_path, "raise SystemExit(3)")) == -9


def test_refusals_are_reported(host: Host, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"'/bucket/jobs/b/job.json' is no place|not in the package"):
        LaunchedProgram(launcher_client._connect(host.address), {**GOOD, "cwd": "/etc"}, 1)
    with pytest.raises(OSError, match=r"not whole, or too large|Broken pipe|reset"):
        LaunchedProgram(launcher_client._connect(host.address), {**GOOD, "env": {"A": "x" * (9 << 20)}}, 1)
    with pytest.raises(ValueError, match="null"):
        start_code(host, tmp_path, "a\0b")


def test_other_users_are_refused(tmp_path: Path) -> None:
    host = Host(tmp_path, caller="nobody")
    try:
        with pytest.raises(OSError, match="not for you"):
            Launcher(host.address, "/bucket").tidy([])
    finally:
        host.close()


def test_a_host_may_be_in_a_folder_with_a_long_path(tmp_path: Path) -> None:
    host = Host(tmp_path / ("long" * 25))
    try:
        host.launcher.tidy([])
    finally:
        host.close()
    assert not Path(host.address).parent.exists()


def remaining_folders(host: Host) -> list[str]:
    """Return the content of the state's folders, with folders that wait for their deletion."""
    pending = [path.name for path in host.state.glob(".gone-*")]
    return sorted([*pending, *(path.relative_to(host.state).as_posix() for path in host.state.glob("[!.]*/*"))])


def tidy(host: Host, *keep: str) -> None:
    host.launcher.tidy(keep)


def delay_deletion(host: Host) -> Path:
    """Make the host's `rm` wait for this file."""
    go = host.root / "go"
    (host.root / "bin/rm").write_text(
        f'#!/bin/sh\nwhile [ -e {host.state} -a ! -e {go} ]; do sleep 0.02; done\nexec /bin/rm "$@"\n'
    )
    (host.root / "bin/rm").chmod(0o755)
    return go


def test_folders_of_other_jobs_are_deleted(host: Host) -> None:
    elsewhere = host.root / "elsewhere"
    (elsewhere / "kept").mkdir(parents=True)
    for name in ("jobs/job02/home", "jobs/job03/package", "fetched/job03/package", "fetched/job02/package"):
        (host.state / name).mkdir(parents=True)
    (host.state / "jobs/job03/home").symlink_to(elsewhere)
    tidy(host, "job01", "job02")
    until(lambda: remaining_folders(host) == ["fetched/job02", "jobs/job01", "jobs/job02"])
    assert (elsewhere / "kept").is_dir()


def test_folders_of_trials_are_deleted(host: Host) -> None:
    (host.state / "trials/trial-0abc/own").mkdir(parents=True)
    (host.state / "trials/trial-0abc/own/file").touch()
    (host.state / "trials/trial-0abc/own").chmod(0o700)
    tidy(host, "job01")
    until(lambda: remaining_folders(host) == ["jobs/job01"])


def test_a_trial_s_start_deletes_earlier_trials(host: Host, tmp_path: Path) -> None:
    for name in ("trials/trial-old/own", "trials/trial-new", "jobs/job01/tmp/model", "jobs/job01/home/kept"):
        (host.state / name).mkdir(parents=True)
    trial = replace(run(host, "print(1)"), scratch=host.state / "trials/trial-new")
    assert wait_for_exit(trainer(host, tmp_path, trial)) == 0
    until(lambda: remaining_folders(host) == ["jobs/job01", "trials/trial-new"])
    assert not list((host.state / "jobs/job01/tmp").iterdir()), "no trial continues from another's checkpoint in /tmp"
    assert (host.state / "jobs/job01/home/kept").is_dir()


@pytest.mark.parametrize("folder", ["jobs/job02/home", "fetched/job02/package", "trials/trial-0abc"])
def test_folders_of_any_depth_are_deleted(host: Host, folder: str) -> None:
    subprocess.run(["mkdir", "-p", host.state / folder / "/".join("d" * 1200)], check=True)
    tidy(host, "job01")
    until(lambda: remaining_folders(host) == ["jobs/job01"])


def test_a_program_starts_while_folders_are_deleted(host: Host, tmp_path: Path) -> None:
    go = delay_deletion(host)
    for job in ("job02", "job03"):
        (host.state / "jobs" / job).mkdir()
        tidy(host, "job01")
    assert wait_for_exit(start_code(host, tmp_path, "print(1)")) == 0
    assert [name[:6] for name in remaining_folders(host)] == [".gone-", ".gone-", "jobs/j"]
    until(lambda: host.processes[1].poll() is not None)
    assert host.processes[0].poll() is None, "one process deletes, and the next does not wait for it"
    go.touch()
    until(lambda: remaining_folders(host) == ["jobs/job01"])
    assert host.processes[0].wait() == 0


def test_a_deletion_interrupted_by_a_power_loss_is_finished_later(host: Host) -> None:
    (host.state / ".gone-1-0/deep").mkdir(parents=True)
    tidy(host, "job01")
    until(lambda: remaining_folders(host) == ["jobs/job01"])


def test_a_deletion_that_fails_is_an_error(host: Host) -> None:
    (host.root / "bin/rm").write_text("#!/bin/sh\nexit 1\n")
    (host.root / "bin/rm").chmod(0o755)
    (host.state / "jobs/job02").mkdir()
    tidy(host, "job01")
    assert host.processes[0].wait(PATIENCE) == 1


def test_requests_of_clients_that_disconnected_are_dropped(host: Host, tmp_path: Path) -> None:
    (host.state / "jobs/job02").mkdir()
    request_of_run = request(run(host, "import sys; open(sys.argv[1], 'w')", str(tmp_path / "ran")), str(host.bucket))
    with (host.root / "run/launch.lock").open("w") as lock, Path(os.devnull).open() as output:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for fields, descriptors in (({"keep": ["job01"]}, []), (request_of_run, [output.fileno()])):
            with launcher_client._connect(host.address) as channel:
                launcher_client._send_message(channel, fields, descriptors)
    until(lambda: len(host.processes) == 2)
    assert [each.wait(PATIENCE) for each in host.processes] == [0, 0]
    assert remaining_folders(host) == ["jobs/job01", "jobs/job02"]
    assert not host.systemd_run_calls


def test_folders_on_a_full_disk_are_deleted_in_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An exhausted quota allows no rename and no new folder, but deletion."""

    def full(*_: object) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    (tmp_path / "jobs/job01/home/deep").mkdir(parents=True)
    (tmp_path / "jobs/job02").mkdir()
    monkeypatch.setattr(launch, "STATE", str(tmp_path))
    monkeypatch.setattr(launch.os, "rename", full)
    assert launch.put_aside([*launch.left_by_jobs(("jobs",), {"job02"}), f"{tmp_path}/none"])
    assert [path.name for path in (tmp_path / "jobs").iterdir()] == ["job02"]
