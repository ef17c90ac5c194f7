"""What goes to a host: the exact commands, and a stream that unpacks to the right files."""

from __future__ import annotations

import gzip
import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from ops.train import push
from ops.train.render import File

ROOT = Path(push.__file__).parents[2]
UNIT, TIMER = "etc/systemd/system/scaletier.service", "etc/systemd/system/scaletier.timer"
TRAINER = "etc/systemd/system/scaletier-trainer.service.d/host.conf"


def test_the_command_that_takes_a_job_in() -> None:
    assert push.take_in_command("4f1c", "job01") == (
        "sudo -n sh -c 'set -e\n"
        "cd /etc/systemd/system\n"
        "exec 9>/run/scaletier-push.lock\n"
        "flock 9\n"
        "trap '\"'\"'systemctl start --no-block scaletier.timer'\"'\"' EXIT\n"
        'other=$([ "$(cat /opt/scaletier/replica/VERSION 2>/dev/null)" = "$1" ] || echo yes)\n'
        '[ -z "$other" ] || systemctl stop scaletier.timer 2>/dev/null || true\n'
        "rm -rf /opt/scaletier/.new\n"
        "mkdir -m 0700 /opt/scaletier/.new\n"
        "units=$(cat scaletier.service scaletier.timer scaletier-trainer.service.d/host.conf 2>/dev/null || true)\n"
        "tar -xzpf - -C /\n"
        "job=/var/lib/scaletier/jobs/$2\n"
        'if [ -n "$2" ] && ! cmp -s /opt/scaletier/.new/package.sha256 $job/package.sha256; then\n'
        "  rm -rf $job\n"
        "  mkdir -m 0755 $job\n"
        "  mv /opt/scaletier/.new/package /opt/scaletier/.new/package.sha256 $job/\n"
        "fi\n"
        "rm -rf /opt/scaletier/.new/package\n"
        'if [ -n "$other" ]; then\n'
        "  /opt/scaletier/venv/bin/python -m compileall -qq --invalidation-mode checked-hash"
        " -s /opt/scaletier/.new -p /opt/scaletier /opt/scaletier/.new || true\n"
        "  rm -f /opt/scaletier/replica/VERSION\n"
        "  for name in jobs replica tuner; do rm -rf /opt/scaletier/$name; mv /opt/scaletier/.new/$name /opt/scaletier/; done\n"
        "fi\n"
        "rm -rf /opt/scaletier/.new\n"
        '[ "$units" = "$(cat scaletier.service scaletier.timer scaletier-trainer.service.d/host.conf)" ]'
        " || systemctl daemon-reload\n"
        "systemctl reload-or-restart scaletier.service || { sleep 3;"
        " systemctl reload-or-restart scaletier.service; }' sh 4f1c job01"
    )


def taken_in(
    host: Path, version: str, code: dict[str, bytes], unit: str, package: dict[str, bytes] | None = None, mark: str = ""
) -> tuple[list[str], set[str]]:
    """What systemd was told on a host that takes a job in, and the files of ours that are there afterwards."""
    for folder in ("etc/systemd/system", "opt/scaletier/venv", "tmp", "bin", "run", "var/lib/scaletier/jobs"):
        (host / folder).mkdir(parents=True, exist_ok=True)
    for tool, body in {"systemctl": f"echo $* >>{host}/tmp/told", "sudo": 'shift; exec "$@"'}.items():
        (host / "bin" / tool).write_text(f"#!/bin/sh\n{body}\n")
        (host / "bin" / tool).chmod(0o755)
    (host / "tmp/told").write_text("")
    command = push.take_in_command(version, "job01" if package else "")
    for place in ("/etc/", "/opt/", "/run/", "/var/"):
        command = command.replace(place, f"{host}{place}")
    command = command.replace("tar -xzpf - -C /", f"tar -xzf - --no-same-owner -C {host}")
    own = [File(f"/{UNIT}", unit), File(f"/{TIMER}", "timer"), File(f"/{TRAINER}", "limits")]
    stream = push.shared_stream(code, package, mark) + push.host_stream(own)
    environ = {"PATH": f"{host}/bin:/usr/bin:/bin"}
    subprocess.run(command, shell=True, input=stream, env=environ, check=True)
    there = {path.relative_to(host).as_posix() for path in (host / "opt").rglob("*") if path.is_file()}
    return (host / "tmp/told").read_text().splitlines(), there


def test_a_host_takes_in_what_has_changed_and_wakes_its_replica(tmp_path: Path) -> None:
    hold, wake = "stop scaletier.timer", ["reload-or-restart scaletier.service", "start --no-block scaletier.timer"]
    first = {"jobs/old.py": b"", "replica/__main__.py": b"1", "replica/VERSION": b"1", "tuner/run.py": b"1"}
    names = {f"opt/scaletier/{name}" for name in first}
    assert taken_in(tmp_path, "1", first, "unit") == ([hold, "daemon-reload", *wake], names)
    assert (tmp_path / UNIT).read_text() == "unit"
    (tmp_path / "opt/scaletier/jobs/compiled").touch()
    kept = {*names, "opt/scaletier/jobs/compiled"}
    assert taken_in(tmp_path, "1", first, "unit") == (wake, kept), "the same again: what is compiled stays"
    assert taken_in(tmp_path, "1", first, "another unit") == (["daemon-reload", *wake], kept)
    second = {"jobs/new.py": b"", "replica/__main__.py": b"2", "replica/VERSION": b"2", "tuner/run.py": b"1"}
    told, there = taken_in(tmp_path, "2", second, "another unit")
    assert (told, there) == ([hold, *wake], {f"opt/scaletier/{name}" for name in second}), "nothing of another version is left"


def test_a_package_takes_the_place_of_another_whole_and_of_its_own_never(tmp_path: Path) -> None:
    code = {"jobs/a.py": b"", "replica/VERSION": b"1", "tuner/a.py": b""}
    home = tmp_path / "var/lib/scaletier/jobs/job01"
    taken_in(tmp_path, "1", code, "unit", {"mine/task.py": b"1", "mine/old.py": b""}, "a")
    (home / "package/mine/beside").touch()
    (home / "home").mkdir()
    taken_in(tmp_path, "1", code, "unit", {"mine/task.py": b"1", "mine/old.py": b""}, "a")
    assert (home / "package/mine/beside").exists(), "a program may run from it"
    (tmp_path / "elsewhere").mkdir()
    (home / "package/mine/old.py").unlink()
    (home / "package/mine/deeper").symlink_to(tmp_path / "elsewhere")
    taken_in(tmp_path, "1", code, "unit", {"mine/task.py": b"2", "mine/deeper/evil.py": b""}, "b")
    assert not list((tmp_path / "elsewhere").iterdir()), "what a trainer has put there leads nowhere"
    there = sorted(path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_file())
    assert there == ["package.sha256", "package/mine/deeper/evil.py", "package/mine/task.py"]
    assert ((home / "package.sha256").read_text(), (home / "package/mine/task.py").read_text()) == ("b", "2")


def test_a_stream_that_breaks_off_wakes_nobody(tmp_path: Path) -> None:
    code = {"replica/__main__.py": b"1"}
    with pytest.MonkeyPatch.context() as patch, pytest.raises(subprocess.CalledProcessError):
        patch.setattr(push, "host_stream", lambda _: b"")  # the end mark is in the host's own part
        patch.setattr(push, "shared_stream", lambda *_: b"\x1f\x8b")
        taken_in(tmp_path, "1", code, "unit")
    assert (tmp_path / "tmp/told").read_text().splitlines() == ["stop scaletier.timer", "start --no-block scaletier.timer"]


def test_the_command_that_checks_a_host() -> None:
    check = push.check_command(["/var/lib/scaletier", "/my bucket"])
    state, df = check.rsplit("; ", 1)
    assert df == "df --output=avail -B1 -- /var/lib/scaletier '/my bucket' | tail -n +2"
    check = push.check_command(["/var/lib/scaletier", "/my bucket"], {"tensorflow": "x", "numpy": "y"})
    code = "'import importlib.util as u, sys; print(*[n for n in sys.argv[1:] if u.find_spec(n) is None])'"
    assert check == f"{state}; {df}; /opt/scaletier/venv/bin/python -c {code} numpy tensorflow"


def _on_a_host(folder: Path, command: str) -> str:
    return command.replace(push.PYTHON, sys.executable).replace("/run/", f"{folder}/").replace(push.LAUNCH, "/")


@pytest.mark.parametrize("said", ["preparing: runtime", "failed: image: it has no curl"])
def test_a_host_that_is_not_ready_says_so_and_nothing_else(tmp_path: Path, said: str) -> None:
    (tmp_path / "scaletier-state").write_text(f"{said}\n")
    command = _on_a_host(tmp_path, push.check_command(["/"], ["no_such_module"]))
    assert subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout == f"{said}\n"


def test_a_host_without_its_python_prepares(tmp_path: Path) -> None:
    command = push.check_command(["/"]).replace(push.PYTHON, str(tmp_path / "none")).replace("/run/", f"{tmp_path}/")
    assert subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout == "preparing\n"


def test_a_host_without_a_launcher_is_made_anew(tmp_path: Path) -> None:
    command = _on_a_host(tmp_path, push.check_command(["/"])).replace("[ -e / ]", f"[ -e {tmp_path}/none ]")
    said = subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout
    assert said == "failed: it is older than this scaletier: pulumi up\n"


def test_reading_what_the_check_says(tmp_path: Path) -> None:
    command = _on_a_host(tmp_path, push.check_command([str(tmp_path), "/"], ["json", "no_such_module", "numpy_no"]))
    ran = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert push.read_state(ran.stdout) == "ready"
    free, missing = push.read_check(ran.stdout, [str(tmp_path), "/"])
    assert free.keys() == {str(tmp_path), "/"}
    assert all(room > 0 for room in free.values())
    assert missing == ["no_such_module", "numpy_no"]
    with pytest.raises(ValueError, match="df told nothing"):
        push.read_check("", ["/"])


def test_the_stream_unpacks_as_one(tmp_path: Path) -> None:
    code, package = {"replica/__main__.py": b"", "jobs/__init__.py": b""}, {"mine/task.py": b"x = 1\n"}
    shared = push.shared_stream(code, package, "ab12")
    own = push.host_stream([File("/etc/scaletier/host.json", "é{}", 0o640, "replica"), File("/etc/link", link="../unit")])
    # As on a host: GNU tar, through gzip's two members.
    subprocess.run(["tar", "-xzf", "-", "-C", str(tmp_path), "--no-same-owner"], input=shared + own, check=True)
    home = tmp_path / "opt/scaletier/.new"
    assert (home / "package/mine/task.py").read_text() == "x = 1\n"
    assert (home / "package.sha256").read_text() == "ab12"
    assert (tmp_path / "opt/scaletier/.new/replica/__main__.py").read_bytes() == b""
    assert (tmp_path / "etc/scaletier/host.json").read_text() == "é{}"
    assert (tmp_path / "etc/link").readlink() == Path("../unit")
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(shared + own))) as tar:
        entries = {entry.name: (entry.uname, entry.gname, oct(entry.mode), entry.mtime) for entry in tar}
    assert entries == {
        "opt/scaletier/.new/jobs/__init__.py": ("root", "root", "0o644", 0),
        "opt/scaletier/.new/replica/__main__.py": ("root", "root", "0o644", 0),
        "opt/scaletier/.new/package": ("trainer", "trainer", "0o2775", 0),
        "opt/scaletier/.new/package/mine": ("trainer", "trainer", "0o2775", 0),
        "opt/scaletier/.new/package/mine/task.py": ("trainer", "trainer", "0o644", 0),
        "opt/scaletier/.new/package.sha256": ("root", "root", "0o644", 0),
        "etc/scaletier/host.json": ("root", "replica", "0o640", 0),
        "etc/link": ("root", "root", "0o644", 0),
    }
    # Half a package has no mark, as that comes last.
    assert list(entries).index("opt/scaletier/.new/package.sha256") > max(
        index for index, name in enumerate(entries) if "package/" in name
    )
    assert shared == push.shared_stream(code, package, "ab12")


def test_a_job_that_waits_sends_no_package() -> None:
    stream = push.shared_stream({"replica/__main__.py": b""}) + push.host_stream([])
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(stream))) as tar:
        assert tar.getnames() == ["opt/scaletier/.new/replica/__main__.py"]


def test_what_runs_on_hosts_is_all_that_goes_along() -> None:
    sent, version = push.code(ROOT)
    assert {name.partition("/")[0] for name in sent} == {"jobs", "replica", "tuner"}
    assert {"jobs/__init__.py", "jobs/ledger.py", "replica/__init__.py", "replica/__main__.py"} <= sent.keys()
    assert sent["replica/VERSION"].decode() == version
    assert len(push.shared_stream(sent)) < 100_000, "each host gets it with each job"


def test_what_is_sent_runs_by_itself(tmp_path: Path) -> None:
    sent, _ = push.code(ROOT)
    for name, content in sent.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    say = "import replica.__main__, jobs.objects, tuner.run; print(replica.__file__)"
    ran = subprocess.run([sys.executable, "-c", say], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.stdout == f"{tmp_path}/replica/__init__.py\n", ran.stderr


def test_the_version_is_that_of_the_code(tmp_path: Path) -> None:
    for folder in push.CODE:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text("1")
    before = push.code(tmp_path)[1]
    assert push.code(tmp_path)[1] == before
    (tmp_path / "jobs/a.py").write_text("2")
    changed = push.code(tmp_path)[1]
    (tmp_path / "jobs/a.py").rename(tmp_path / "jobs/b.py")
    assert len({before, changed, push.code(tmp_path)[1]}) == 3
