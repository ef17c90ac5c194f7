"""Check the push to a host: the exact commands, and a stream that unpacks to the right files."""

from __future__ import annotations

import gzip
import io
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from opsdata import write_files

from jobs import paths
from ops.cluster.host_files import RemoteFile
from ops.cluster.root_helper import PROGRAM
from ops.package import host_stream

ROOT = Path(host_stream.__file__).parents[2]
LOCAL = "/var/lib/scaletier '/my bucket'"


def test_the_install_command() -> None:
    assert host_stream.install_command("4f1c", "job01") == "sudo -n /usr/lib/scaletier/root-helper take-in 4f1c job01"
    assert host_stream.install_command("4f1c") == "sudo -n /usr/lib/scaletier/root-helper take-in 4f1c"


def test_the_check_command() -> None:
    check = host_stream.check_command(["/var/lib/scaletier", "/my bucket"])
    state, df = check.rsplit("; ", 1)
    assert df == f"df --output=avail -B1 -- {LOCAL} | tail -n +2"
    check = host_stream.check_command(["/var/lib/scaletier", "/my bucket"], {"tensorflow": "x", "numpy": "y"})
    code = "'import importlib.util as u, sys; print(*[n for n in sys.argv[1:] if u.find_spec(n) is None])'"
    assert check == f"{state}; {df}; /opt/scaletier/venv/bin/python -c {code} numpy tensorflow"
    check = host_stream.check_command(["/"], digest="4f1c")
    assert check == f"{state}; {{ sudo -n {PROGRAM} wake 4f1c >/dev/null 2>&1 & }} </dev/null; {df.replace(LOCAL, '/')}"


def run_check(folder: Path, command: str, python: str = sys.executable, program: str = "/") -> str:
    """Return what a command prints on this machine, as if it was a host."""
    command = command.replace(paths.PYTHON, python).replace("/run/", f"{folder}/").replace(PROGRAM, program)
    return subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("status", ["preparing: runtime", "failed: image: it has no curl"])
def test_a_host_that_is_not_ready_prints_only_its_state(tmp_path: Path, status: str) -> None:
    (tmp_path / "scaletier-state").write_text(f"{status}\n")
    assert run_check(tmp_path, host_stream.check_command(["/"], ["no_such_module"])) == f"{status}\n"


def test_a_host_without_its_python_is_preparing_and_without_a_launcher_too_old(tmp_path: Path) -> None:
    command, none = host_stream.check_command(["/"]), str(tmp_path / "none")
    assert run_check(tmp_path, command, python=none) == "preparing\n"
    assert run_check(tmp_path, command, program=none) == "older than this scaletier\n"


def test_the_output_of_the_check_is_read(tmp_path: Path) -> None:
    command = host_stream.check_command([str(tmp_path), "/"], ["json", "no_such_module", "numpy_no"])
    output = run_check(tmp_path, command)
    assert host_stream.read_state(output) == "ready"
    free, missing = host_stream.read_check(output, [str(tmp_path), "/"])
    assert free.keys() == {str(tmp_path), "/"}
    assert all(free_bytes > 0 for free_bytes in free.values())
    assert missing == ["no_such_module", "numpy_no"]


def test_both_streams_unpack_as_one(tmp_path: Path) -> None:
    code, package = {"hosts/agent/__main__.py": b"", "jobs/__init__.py": b""}, {"mine/task.py": b"x = 1\n"}
    shared = host_stream.shared_stream(code, package, "ab12")
    own = host_stream.files_stream([RemoteFile("/etc/scaletier/host.json", "é{}")])
    # GNU tar reads it too, through gzip's two members.
    subprocess.run(["tar", "-xzf", "-", "-C", str(tmp_path), "--no-same-owner"], input=shared + own, check=True)
    home = tmp_path / "opt/scaletier/.new"
    assert (home / "package/mine/task.py").read_text() == "x = 1\n"
    assert (home / "package.sha256").read_text() == "ab12"
    assert (tmp_path / "opt/scaletier/.new/hosts/agent/__main__.py").read_bytes() == b""
    assert (tmp_path / "etc/scaletier/host.json").read_text() == "é{}"
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(shared + own))) as tar:
        entries = {entry.name: (entry.type, oct(entry.mode), entry.mtime) for entry in tar}
    sent = (*code, "package/mine/task.py", "package.sha256")
    names = {*(f"opt/scaletier/.new/{name}" for name in sent), "etc/scaletier/host.json"}
    assert entries == dict.fromkeys(names, (tarfile.REGTYPE, "0o644", 0))
    # The hash comes last, so an incomplete package has none.
    assert list(entries).index("opt/scaletier/.new/package.sha256") > max(
        index for index, name in enumerate(entries) if "package/" in name
    )
    assert shared == host_stream.shared_stream(code, package, "ab12")


def test_the_parts_of_the_check_are_told_apart() -> None:
    assert host_stream.read_check("ready\n5\n7\n", ["/a", "/b"]) == ({"/a": 5, "/b": 7}, [])
    assert host_stream.read_check("ready\n5\none\ntwo three\n", ["/a"]) == ({"/a": 5}, ["one", "two", "three"])
    with pytest.raises(ValueError, match=r"^df printed nothing of /a, /b$"):
        host_stream.read_check("ready\n5\n", ["/a", "/b"])
    with pytest.raises(ValueError, match="invalid literal"):
        host_stream.read_check("ready\nx\n", ["/a"])


def test_content_is_compressed_by_its_size_without_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, sizes, original = list[tuple[int, int]](), list[int](), gzip.GzipFile

    def compress(**settings: Any) -> gzip.GzipFile:
        calls.append((settings["compresslevel"], settings["mtime"]))
        return original(**settings)

    monkeypatch.setattr(gzip, "GzipFile", compress)
    monkeypatch.setattr(host_stream, "compression_level", lambda size: sizes.append(size) or 7)
    shared, own = host_stream.shared_stream({"a": b"x"}), host_stream.files_stream([RemoteFile("/etc/a", "x")])
    lengths = len(gzip.decompress(shared)), len(gzip.decompress(own))
    assert (lengths, calls, sizes) == ((1024, tarfile.RECORDSIZE), [(7, 0), (1, 0)], [1])


def test_a_queued_job_sends_no_package() -> None:
    stream = host_stream.shared_stream({"hosts/agent/__main__.py": b""}) + host_stream.files_stream([])
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(stream))) as tar:
        assert tar.getnames() == ["opt/scaletier/.new/hosts/agent/__main__.py"]


def test_only_code_for_hosts_is_sent() -> None:
    files, version = host_stream.code(ROOT)
    assert {name.partition("/")[0] for name in files} == {"jobs", "hosts"}
    assert {"jobs/__init__.py", "jobs/ledger.py", "hosts/agent/__init__.py", "hosts/agent/__main__.py"} <= files.keys()
    assert files["hosts/VERSION"].decode() == version
    assert len(host_stream.shared_stream(files)) < 95_000, "each host gets it for each job"


def test_code_is_sent_without_docstrings_and_comments_with_its_line_numbers(tmp_path: Path) -> None:
    for folder in host_stream.CODE:
        (tmp_path / folder).mkdir()
    source = (
        '"""A."""\n\nX = 1\n"""B.\n\nC.\n"""\n\ndef f():\n    """é."""\n    1\n    # G\n    print("é#", """D\n# F\n""")  # E\n'
    )
    (tmp_path / "jobs/a.py").write_text(source)
    files, _ = host_stream.code(tmp_path)
    assert (
        files["jobs/a.py"].decode() == '""\n\nX = 1\n""\n\n\n\n\ndef f():\n    ""\n    1\n\n    print("é#", """D\n# F\n""")\n'
    )


def test_code_is_parsed_once_for_each_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in host_stream.CODE:
        (tmp_path / folder).mkdir()
    (tmp_path / "jobs/a.py").write_text('"""É."""\n')
    first = host_stream.code(tmp_path)
    (kept,) = (tmp_path / ".cache/host-code").iterdir()
    with monkeypatch.context() as patched:
        patched.setattr(host_stream, "_strip_comments", lambda _: pytest.fail("it was parsed again"))
        assert host_stream.code(tmp_path) == first
    kept.write_text("{")  # a full disk's
    assert host_stream.code(tmp_path) == first
    (tmp_path / "jobs/a.py").write_text("X = 1\n")
    changed, version = host_stream.code(tmp_path)
    assert (changed["jobs/a.py"], version != first[1]) == (b"X = 1\n", True)
    assert kept not in (tmp_path / ".cache/host-code").iterdir()
    (tmp_path / "jobs/a.py").write_text("X = 2\n")
    (tmp_path / ".cache").rename(tmp_path / "before")
    (tmp_path / ".cache").touch()  # where no file can be written
    assert host_stream.code(tmp_path)[0]["jobs/a.py"] == b"X = 2\n"


def test_the_sent_code_runs_by_itself(tmp_path: Path) -> None:
    files, _ = host_stream.code(ROOT)
    write_files(tmp_path, files)
    code = "import hosts.agent.__main__, jobs.gcs_bucket, hosts.tuner.run; print(hosts.agent.__file__)"
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.stdout == f"{tmp_path}/hosts/agent/__init__.py\n", result.stderr


def test_the_version_is_that_of_the_code(tmp_path: Path) -> None:
    write_files(tmp_path, {f"{folder}/a.py": "1" for folder in host_stream.CODE})
    first_version = host_stream.code(tmp_path)[1]
    assert host_stream.code(tmp_path)[1] == first_version
    (tmp_path / "jobs/a.py").write_text("2")
    changed = host_stream.code(tmp_path)[1]
    (tmp_path / "jobs/a.py").rename(tmp_path / "jobs/b.py")
    assert len({first_version, changed, host_stream.code(tmp_path)[1]}) == 3
