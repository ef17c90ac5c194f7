"""The privileged program for fab on a host, /usr/lib/scaletier/root-helper, run with a fake of systemd: its effects."""

from __future__ import annotations

import getpass
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launcherhost import SCRIPT

from ops.cluster.host_files import RemoteFile
from ops.package import host_stream

PLACES = ("/etc/", "/opt/", "/var/lib/")
CODE = {"jobs/a.py": b"", "hosts/VERSION": b"1", "hosts/tuner/a.py": b""}


def program_for(root: Path) -> str:
    """Return the program's text for a host whose root is that folder."""
    user, text = getpass.getuser(), SCRIPT.with_name("root-helper").read_text()
    for place in PLACES:
        text = text.replace(place, f"{root}{place}")
    for text_in_program, replacement in (
        ("/bucket", f"{root}/bucket"),
        ("/run", f"{root}/run"),
        ("replica", user),
        ("trainer", user),
    ):
        text = text.replace(f'"{text_in_program}"', f'"{replacement}"', 1)
    return text.replace('"/usr/sbin:/usr/bin', f'"{root}/bin:/usr/bin')


class Machine:
    """A host that is a folder, with a fake of systemd."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.script = root, root / "usr/host"
        folders = ("etc/systemd/system", "etc/scaletier", "opt/scaletier/venv/bin", "bin", "run", "usr", "bucket/jobs")
        for folder in (*folders, *(f"var/lib/scaletier/{name}" for name in ("jobs", "logs", "fetched", "secrets"))):
            (root / folder).mkdir(parents=True, exist_ok=True)
        self.script.write_text(program_for(root))
        for program, body in {
            "bin/systemctl": f'echo "$*" >>{root}/systemctl-calls',
            "opt/scaletier/venv/bin/python": "",
        }.items():
            (root / program).write_text(f"#!/bin/sh\n{body}\n")
            (root / program).chmod(0o755)
        self.home, self.units = root / "var/lib/scaletier", root / "etc/systemd/system"
        monkeypatch.setattr(host_stream, "NEW_DIR", f"{root}/opt/scaletier/.new")

    def call(self, *words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        (self.root / "systemctl-calls").write_text("")
        return subprocess.run([sys.executable, "-ISB", self.script, *words], input=stdin, capture_output=True, check=False)

    @property
    def systemctl_calls(self) -> list[str]:
        """Return the calls of systemctl."""
        return (self.root / "systemctl-calls").read_text().splitlines()

    def files(self, memory: int = 1, more: Iterable[RemoteFile] = ()) -> list[RemoteFile]:
        """Return the host's own files of a push."""
        contents = {
            "etc/scaletier/host.json": '{"bucket": "/bucket"}',
            "etc/systemd/system/scaletier.service.d/host.conf": f"[Service]\nMemoryMax={memory}\n",
            "etc/systemd/system/scaletier.timer.d/host.conf": "[Timer]\nOnUnitInactiveSec=60\n",
            "etc/systemd/system/scaletier-trainer.service.d/host.conf": "[Service]\n",
        }
        return [*(RemoteFile(f"{self.root}/{path}", content) for path, content in contents.items()), *more]

    def push(
        self,
        version: str,
        code: Mapping[str, bytes],
        memory: int = 1,
        package: Mapping[str, bytes] | None = None,
        mark: str = "",
        job: str = "job01",
        more: Iterable[RemoteFile] = (),
    ) -> tuple[list[str], set[str]]:
        """Push to the host, and return the calls of systemctl and the code's files afterwards."""
        stream = host_stream.shared_stream(code, package, mark) + host_stream.files_stream(self.files(memory, more))
        done = self.call("take-in", version, *([job] if package else []), stdin=stream)
        assert done.returncode == 0, done.stderr
        return self.systemctl_calls, self.code

    @property
    def code(self) -> set[str]:
        """Return the paths of the code that the host runs."""
        top = self.root / "opt/scaletier"
        files = (path.relative_to(top) for path in top.rglob("*") if path.is_file())
        return {path.as_posix() for path in files if path.parts[0] != "venv"}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("sh",),
        ("take-in",),
        ("take-in", "not a hash"),
        ("take-in", "ab12", "../x"),
        ("take-in", "ab12", "job01", "more"),
        ("wake",),
        ("wake", "not a hash"),
        ("wake", "ab12", "more"),
        ("serve", "../x"),
        ("end-serving", "sshd"),
        ("remove",),
        ("remove", "../../etc"),
        ("remove", ".."),
        ("remove", "a", "b"),
        ("remove", "job01\n"),
        ("forget",),
        ("forget", "job01", "../../../etc"),
        ("forget", ""),
        ("sandbox", "reading"),
        ("sandbox", "reading", "1"),
        ("sandbox", "reading", "1", "--"),
        ("sandbox", "reading", "1", "-p", "User=root", "--", "sh"),
        ("sandbox", "reading", "infinity", "--", "sh"),
        ("sandbox", "reading", "1 -p User=root", "--", "sh"),
        ("sandbox", "reading", "1", "/bucket/jobs", "--", "sh"),
        ("sandbox", "else", "1", "--", "sh"),
        ("sandbox", "writing", "1", "/bucket/a", "/bucket/b", "--", "sh"),
        ("sandbox", "writing", "1", "/etc", "--", "sh"),
        ("sandbox", "writing", "1", "--", "sh"),
    ],
)
def test_an_invalid_call_is_refused(machine: Machine, words: tuple[str, ...]) -> None:
    (machine.root / "bin/systemd-run").write_text("#!/bin/sh\necho ran\n")
    (machine.root / "bin/systemd-run").chmod(0o755)
    before = sorted(path for path in machine.root.rglob("*") if path.name != "systemctl-calls")
    done = machine.call(*words)
    assert (done.returncode, done.stdout, done.stderr.count(b"\n"), done.stderr[:9]) == (1, b"", 1, b"refused: ")
    assert machine.systemctl_calls == []
    assert sorted(path for path in machine.root.rglob("*") if path.name != "systemctl-calls") == before


def test_an_agent_wakes_early_only_for_the_code_and_files_that_it_has(machine: Machine) -> None:
    def wake(version: str, memory: int = 1) -> list[str]:
        top = str(machine.root)
        files = [replace(file, path=file.path.removeprefix(top)) for file in machine.files(memory)]
        done = machine.call("wake", host_stream.wake_digest(version, files))
        assert (done.returncode, done.stderr) == (0, b"")
        return machine.systemctl_calls

    assert wake("1") == [], "a new host has nothing"
    code = {"jobs/a.py": b"", "hosts/VERSION": b"1"}
    machine.push("1", code)
    assert wake("2") == wake("1", memory=2) == []
    assert wake("1") == ["start --no-block scaletier.service"]


def test_a_push_replaces_what_changed_and_wakes_the_agent(machine: Machine) -> None:
    hold = "stop scaletier.timer"
    # An agent that is just ending may miss the signal, and is started again.
    signal = "kill --kill-whom=main --signal=HUP scaletier.service"
    wake = ["start scaletier.service scaletier.timer", signal, "start scaletier.service"]
    first = {"jobs/old.py": b"", "hosts/agent/__main__.py": b"1", "hosts/VERSION": b"1", "hosts/tuner/run.py": b"1"}
    assert machine.push("1", first) == ([hold, "daemon-reload", *wake], {*first})
    assert (machine.units / "scaletier.service.d/host.conf").read_text() == "[Service]\nMemoryMax=1\n"
    for link in ("multi-user.target.wants/scaletier.service", "timers.target.wants/scaletier.timer"):
        assert (machine.units / link).readlink() == Path("..", Path(link).name)
    (machine.root / "opt/scaletier/jobs/compiled").touch()
    with_compiled = {*first, "jobs/compiled"}
    assert machine.push("1", first) == (wake, with_compiled), "compiled files survive an identical push"
    assert machine.push("1", first, memory=2) == (["daemon-reload", *wake], with_compiled)
    second = {"jobs/new.py": b"", "hosts/agent/__main__.py": b"2", "hosts/VERSION": b"2", "hosts/tuner/run.py": b"1"}
    assert machine.push("2", second, memory=2) == ([hold, *wake], {*second}), "no file of the other version is left"
    assert not list(machine.units.rglob(".*")), "no partial file is left"


def test_a_package_replaces_another_one_but_not_itself(machine: Machine, tmp_path: Path) -> None:
    home = machine.home / "jobs/job01"
    machine.push("1", CODE, package={"mine/task.py": b"1", "mine/old.py": b""}, mark="a")
    (home / "package/mine/beside").touch()
    (home / "home").mkdir()
    machine.push("1", CODE, package={"mine/task.py": b"1", "mine/old.py": b""}, mark="a")
    assert (home / "package/mine/beside").exists(), "a program may be running from it"
    (tmp_path / "elsewhere").mkdir()
    (home / "package/mine/old.py").unlink()
    (home / "package/mine/deeper").symlink_to(tmp_path / "elsewhere")
    machine.push("1", CODE, package={"mine/task.py": b"2", "mine/deeper/evil.py": b""}, mark="b")
    assert not list((tmp_path / "elsewhere").iterdir()), "links of a trainer are not followed"
    files = sorted(path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_file())
    assert files == ["package.sha256", "package/mine/deeper/evil.py", "package/mine/task.py"]
    assert ((home / "package.sha256").read_text(), (home / "package/mine/task.py").read_text()) == ("b", "2")
    assert oct((home / "package/mine/deeper").stat().st_mode) == "0o40775", "a program may write to its folder, and copy it"


def test_secrets_are_private_and_follow_no_link(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "shadow").write_text("root")
    (machine.home / "secrets/job01.json").symlink_to(tmp_path / "shadow")
    machine.push("1", CODE, more=[RemoteFile(f"{machine.home}/secrets/job01.json", "{}")])
    assert (tmp_path / "shadow").read_text() == "root"
    assert not (machine.home / "secrets/job01.json").is_symlink()
    assert oct((machine.home / "secrets/job01.json").stat().st_mode) == "0o100600"


@pytest.mark.parametrize("damage", ["in the middle", "after the shared part", "damaged"])
def test_an_incomplete_stream_changes_nothing(machine: Machine, damage: str) -> None:
    machine.push("1", CODE)
    before = {path: path.read_bytes() for path in (machine.root / "opt").rglob("*") if path.is_file()}
    shared = host_stream.shared_stream({**CODE, "hosts/VERSION": b"2"})
    complete = shared + host_stream.files_stream(machine.files(memory=2))
    damaged = bytearray(complete)
    damaged[-6] ^= 1
    stream = {"in the middle": complete[:-30], "after the shared part": shared, "damaged": bytes(damaged)}[damage]
    done = machine.call("take-in", "2", stdin=stream)
    assert (done.returncode, done.stderr.count(b"\n")) == (1, 1), done.stderr
    assert machine.systemctl_calls == ["stop scaletier.timer", "start --no-block scaletier.timer"]
    assert {path: path.read_bytes() for path in (machine.root / "opt").rglob("*") if path.is_file()} == before
    assert (machine.units / "scaletier.service.d/host.conf").read_text() == "[Service]\nMemoryMax=1\n"


def test_a_push_for_a_job_must_contain_its_package(machine: Machine) -> None:
    done = machine.call(
        "take-in", "1", "job01", stdin=host_stream.shared_stream(CODE) + host_stream.files_stream(machine.files())
    )
    assert done.stderr == b"refused: the package did not come along\n"
    assert not (machine.root / "opt/scaletier/.new").exists()


def test_an_up_to_date_server_is_not_restarted(machine: Machine) -> None:
    def serve(version: str, memory: int) -> list[str]:
        code = [RemoteFile(f"{machine.root}/opt/scaletier/.server/hosts/serving/__main__.py", version)]
        conf = RemoteFile(f"{machine.units}/scaletier-serving.service.d/host.conf", f"[Service]\nMemoryMax={memory}\n")
        done = machine.call("serve", version, stdin=host_stream.files_stream([*code, conf]))
        assert done.returncode == 0, done.stderr
        assert (machine.root / "opt/scaletier/server/hosts/serving/__main__.py").read_text() == version
        assert (machine.units / "multi-user.target.wants/scaletier-serving.service").is_symlink()
        assert (machine.units / "scaletier-serving.service.d/host.conf").read_text() == conf.content
        assert not (machine.root / "opt/scaletier/.server").exists()
        return machine.systemctl_calls

    assert machine.call("end-serving").returncode == 0
    assert machine.systemctl_calls == [], "there is no server"
    assert serve("1", 1) == ["daemon-reload", "restart scaletier-serving.service"]
    assert serve("1", 1) == ["start scaletier-serving.service"]
    assert serve("2", 2) == ["daemon-reload", "restart scaletier-serving.service"]
    assert machine.call("end-serving").returncode == 0
    assert machine.systemctl_calls == ["disable --now --quiet scaletier-serving.service"]


def test_a_job_s_folder_is_removed_without_following_links(machine: Machine, tmp_path: Path) -> None:
    job, other = machine.root / "bucket/jobs/job01", tmp_path / "other"
    deep = job / "output" / "/".join(["d"] * 1500)
    subprocess.run(["mkdir", "-p", deep], check=True)
    (job / "job.json").touch()
    other.mkdir()
    (other / "kept").touch()
    (job / "output/link").symlink_to(other)
    (machine.root / "bucket/jobs/linked").symlink_to(other)
    for name in ("job01", "linked"):
        done = machine.call("remove", name)
        assert done.returncode == 0, done.stderr
    assert (list((machine.root / "bucket/jobs").iterdir()), list(other.iterdir())) == ([], [other / "kept"])
    assert machine.call("remove", "job01").returncode == 1, "the job is already removed"


def test_a_bucket_folder_that_is_a_link_is_not_followed(machine: Machine, tmp_path: Path) -> None:
    """Users who may write the bucket may replace its folders by links."""
    (tmp_path / "elsewhere/etc").mkdir(parents=True)
    (machine.root / "bucket/jobs").rmdir()
    (machine.root / "bucket/jobs").symlink_to(tmp_path / "elsewhere")
    assert machine.call("remove", "etc").returncode == 1
    assert (tmp_path / "elsewhere/etc").exists()


def test_forget_removes_a_host_s_files_of_jobs(machine: Machine) -> None:
    for job in ("job01", "job02", "job03"):
        for folder in (f"logs/{job}", f"jobs/{job}", f"fetched/{job}"):
            (machine.home / folder).mkdir()
        (machine.home / f"logs/{job}.jsonl").touch()
    assert machine.call("forget", "job01", "job02", "job09").returncode == 0
    remaining: set[Any] = {path.relative_to(machine.home).as_posix() for path in machine.home.glob("*/*")}
    assert remaining == {"logs/job03", "logs/job03.jsonl", "jobs/job03", "fetched/job03"}
