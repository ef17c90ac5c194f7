"""The privileged program for fab on a host, /usr/lib/scaletier/root-helper: its refusals and its effects."""

from __future__ import annotations

import errno
import getpass
import gzip
import io
import json
import os
import shlex
import tarfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from launcherhost import SCRIPT, load_program
from opsdata import inventory_json

from hosts.agent import token_broker
from infra.inventory import Inventory
from infra.lxd.layout import BUCKET
from jobs import paths
from ops.cluster import host_files, root_helper
from ops.cluster.inventory import parse
from ops.models import server
from ops.package import host_stream
from ops.submit import job_plan

host = load_program("root-helper")
MEMBER = st.one_of(
    st.text(),
    st.sampled_from(["/etc/passwd", "../x", "opt/scaletier/.new/package/../../x", "opt/scaletier/.new/jobs/../../x.py"]),
    st.builds("opt/scaletier/.new/{}{}".format, st.sampled_from(["", "jobs/", "package/", "package/a/", "/"]), st.text()),
    st.builds("var/lib/scaletier/secrets/{}.json".format, st.text()),
)


def pack(members: Iterable[tuple[tarfile.TarInfo, bytes]]) -> io.BytesIO:
    """Return a stream in fab's format."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for entry, content in members:
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return io.BytesIO(gzip.compress(archive.getvalue()))


def member(name: str, kind: bytes = tarfile.REGTYPE, mode: int = 0o644) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = kind, mode
    return entry


def test_the_helper_accepts_what_fab_sends(inventory: Inventory, tmp_path: Path) -> None:
    """Check the files for both targets, with and without GPUs."""
    hosts = json.loads(inventory_json())["hosts"]
    hosts[1]["accelerator"] = {"type": "nvidia-tesla-t4", "count": 1}
    google = parse(inventory_json(hosts=hosts, bucket="gs://my-bucket.b_1", operatorBucket="gs://b"), tmp_path)
    for cluster in (inventory, google):
        for files in host_files.render(cluster).values():
            assert {file.path for file in files} == {host.HOST, *host.OF_JOBS}
            for file in files:
                assert host.checked(file.path, file.content.encode()) == file.content.encode()
                whose = ("root", "replica", 0o640) if file.path == host.HOST else ("root", "root", 0o644)
                assert host.whose(file.path) == whose, "the agent reads the first"
        for each in cluster.hosts:
            assert host.checked(host.OF_SERVING, server.conf(cluster, each).encode())
    assert host.whose(f"{job_plan.SECRETS}/job01.json") == ("replica", "replica", 0o600)
    assert all(host.REPLICA.fullmatch(name) for name in host_stream.code(SCRIPT.parents[8])[0])
    served = [file.path for file in server._files(SCRIPT.parents[8], "") if file.path != host.OF_SERVING]
    assert all(host.MODELS.fullmatch(path.removeprefix(f"{host.NEW_SERVER}/")) for path in served)
    assert (host.NEW, host.NEW_SERVER, host.PYTHON, host.STATE) == (
        host_stream.NEW_DIR,
        server._NEW_CODE,
        paths.PYTHON,
        paths.STATE_DIR,
    )
    assert (host.JOB_ID.pattern, host.BUCKET) == (paths.JOB_ID.pattern.strip("^$"), BUCKET)
    assert f"/{SCRIPT.with_name('root-helper').relative_to(SCRIPT.parents[3])}" == root_helper.PROGRAM
    sudoers = (SCRIPT.parents[3] / "etc/sudoers.d/scaletier").read_text().splitlines()
    assert [line for line in sudoers if line.startswith("scaletier")] == [
        f"scaletier ALL=(root) NOPASSWD: {root_helper.PROGRAM}"
    ]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("scaletier.service", "User=root"),
        ("scaletier.service", "ExecStartPre=+/bin/sh"),
        ("scaletier.service", "MemoryMax=1\\"),
        ("scaletier.service", "# a comment that continues \\"),
        ("scaletier.service", "MemoryMax=1\rUser=root"),
        ("scaletier.service", "MemoryMax=1\x00User=root"),
        ("scaletier.service", " MemoryMax=1"),
        ("scaletier.service", "MemoryMax=infinity"),
        ("scaletier.service", "MemoryMax=\u0661"),
        ("scaletier.timer", "Unit=evil.service"),
        ("scaletier.timer", "[Service]"),
        ("scaletier-trainer.service", "BindPaths=/etc"),
        ("scaletier-trainer.service", "TemporaryFileSystem=/dev/shm:mode=1777,size=1 /usr"),
        ("scaletier-serving.service", 'Environment="SERVES=--bucket /etc --host 1 --port 1 --poll-seconds 1"'),
        ("scaletier-serving.service", 'Environment="SERVES=--bucket /bucket --host 1 --port 1 --poll-seconds 1" LD_PRELOAD=x'),
        ("scaletier-serving.service", 'Environment="LD_PRELOAD=/bucket/x"'),
    ],
)
def test_a_unit_s_drop_in_may_only_set_numbers(name: str, line: str) -> None:
    path = f"/etc/systemd/system/{name}.d/host.conf"
    section = "Timer" if name.endswith("timer") else "Service"
    assert host.checked(path, f"[{section}]\n# Made.\n".encode())
    with pytest.raises(host.Refused, match="has what no host takes"):
        host.checked(path, f"[{section}]\n{line}\n".encode())


@given(st.text(), st.sampled_from(sorted(host.CONFS)))
@example("[Service]\nMemoryMax=1\nUser=root\n", "/etc/systemd/system/scaletier.service.d/host.conf")
def test_no_accepted_drop_in_sets_a_program_or_a_user(text: str, path: str) -> None:
    try:
        host.checked(path, text.encode(errors="surrogatepass"))
    except (host.Refused, UnicodeDecodeError):
        return
    keys = {line.partition("=")[0] for line in text.split("\n") if not line.startswith("#")}
    assert keys <= {"", "[Service]", "[Timer]", "MemoryMax", "OnUnitInactiveSec", "PrivateDevices", "ProtectClock", "TasksMax"}
    assert "\\" not in text


@pytest.mark.parametrize(
    "bucket", ["/etc", "/bucket/", "/bucket/..", "", None, 7, "gs://", "gs://b/c", "gs://../x", "s3://abc"]
)
def test_an_invalid_bucket_is_refused(bucket: object) -> None:
    with pytest.raises(host.Refused, match="is no bucket"):
        host.checked(host.HOST, json.dumps({"bucket": bucket}).encode())


@given(
    MEMBER,
    st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE]),
    st.integers(0, 0o7777),
)
@example("opt/scaletier/.new/package/tool", tarfile.REGTYPE, 0o6755)
@example("opt/scaletier/.new/package/link", tarfile.SYMTYPE, 0o777)
@example("opt/scaletier/.new/package/a/../../../../../tmp/x", tarfile.REGTYPE, 0o644)
@example("opt/scaletier/.new//package/x", tarfile.REGTYPE, 0o644)
@example("opt/scaletier/.new/hosts/../x.py", tarfile.REGTYPE, 0o644)
@example("var/lib/scaletier/secrets/../x.json", tarfile.REGTYPE, 0o644)
@example("usr/lib/scaletier/root-helper", tarfile.REGTYPE, 0o755)
def test_a_member_is_a_file_below_its_folder_or_refused(
    tmp_path_factory: pytest.TempPathFactory, name: str, kind: bytes, mode: int
) -> None:
    top = tmp_path_factory.mktemp("top")
    inside = top / "new"
    inside.mkdir()
    given_name = name.replace("opt/scaletier/.new", str(inside).lstrip("/"))
    entry = member(given_name, kind, mode)
    entry.linkname, entry.uname, entry.uid = "/etc/shadow", "root", 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "USER", getpass.getuser())
        try:
            stream = pack([(entry, b"x" if kind == tarfile.REGTYPE else b"")])
        except (ValueError, UnicodeError):
            return
        try:
            files = host.unpack(stream, str(inside), host.REPLICA, host.OF_JOBS, job=True)
        except (host.Refused, OSError, ValueError, tarfile.TarError):
            files = {}
            refused = True
        else:
            refused = False
    assert kind == tarfile.REGTYPE or refused
    assert all(host._is_secret(path) and os.path.normpath(path) == path for path in files)
    created = [path for path in top.rglob("*") if path != inside]
    assert all(path.is_relative_to(inside) for path in created)
    assert not [path for path in created if path.is_symlink() or (path.is_file() and path.stat().st_mode & 0o7022)]


@pytest.mark.parametrize(
    "name",
    [
        "/new/package/../x",
        "/new/package/a/../../x",
        "/new/package//x",
        "/new/package/./x",
        "/new/package",
        "/new/jobs/a.pyc",
        "/new/jobs/a/b.py",
        "/new/other/a.py",
        "/newer/jobs/a.py",
        f"{job_plan.SECRETS}/1.json",
        f"{job_plan.SECRETS}/a b.json",
        f"{job_plan.SECRETS}/a/b.json",
        f"{job_plan.SECRETS}/job01",
        "/etc/systemd/system/scaletier.service",
        "/etc/systemd/system/ssh.service.d/host.conf",
        "/etc/systemd/system/scaletier-serving.service.d/host.conf",
    ],
)
def test_other_paths_are_refused_by_name(tmp_path: Path, name: str) -> None:
    stream = pack([(member(name.replace("/new", f"{tmp_path}/new").lstrip("/")), b"{}")])
    (tmp_path / "new").mkdir()
    with pytest.raises(host.Refused, match=r"is nothing that this host takes: where fab is newer than it, pulumi up$"):
        host.unpack(stream, f"{tmp_path}/new", host.REPLICA, host.OF_JOBS, job=True)
    assert not list((tmp_path / "new").iterdir())


def test_code_that_a_host_has_is_not_unpacked_again(tmp_path: Path) -> None:
    files = [(member(f"{tmp_path}/jobs/a.py".lstrip("/")), b"1"), (member(f"{tmp_path}/package.sha256".lstrip("/")), b"2")]
    host.unpack(pack(files), str(tmp_path), host.REPLICA, host.OF_JOBS, job=True, known=True)
    assert [path.name for path in tmp_path.iterdir()] == ["package.sha256"]


@pytest.mark.parametrize(
    "folder",
    [
        "",
        "/",
        "/etc",
        "bucket/a",
        "/bucket",
        "/bucket/",
        "/bucket/../etc",
        "/bucket/a/../../etc",
        "/bucket/./a",
        "/bucketeer",
        '/bucket/a" "/etc',
        "/bucket/a:/etc",
        "/bucket/%h",
        "/bucket/a\\",
        "/bucket/a\n",
        "-p",
    ],
)
def test_a_writable_folder_must_be_in_the_bucket(folder: str) -> None:
    assert host.sandbox_command("writing", "1", "/bucket/jobs/a/output", "--", "sh")
    with pytest.raises(host.Refused, match="is no folder in the bucket"):
        host.sandbox_command("writing", "1", folder, "--", "sh")


def test_duplicate_and_too_large_members_are_refused(tmp_path: Path) -> None:
    name = f"{tmp_path}/jobs/a.py".lstrip("/")
    with pytest.raises(FileExistsError):
        host.unpack(pack([(member(name), b"1"), (member(name), b"2")]), str(tmp_path), host.REPLICA, host.OF_JOBS, job=True)
    with pytest.raises(host.Refused, match="too large"):
        host.checked(host.HOST, b" " * (host.LIMIT + 1))
    with pytest.raises(host.Refused, match="nothing that this host takes"):
        host.unpack(pack([(member(f"{tmp_path}/package/a".lstrip("/")), b"")]), str(tmp_path), host.MODELS, {host.OF_SERVING})
    with pytest.raises(host.Refused, match="nothing that this host takes"):
        host.unpack(pack([(member(host.HOST.lstrip("/")), b"{}")]), str(tmp_path), host.MODELS, {host.OF_SERVING})


@given(st.text(max_size=40))
@example("job01\n")
@example("..")
def test_an_invalid_job_id_is_refused(name: str) -> None:
    if paths.JOB_ID.fullmatch(name):
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "_run", lambda *_: pytest.fail("it ran"))
        for verb in (host.remove, host.forget, lambda job: host.take_in("ab", job) if job else host.forget(job)):
            with pytest.raises(host.Refused):
                verb(name)


def parse_systemd_run(line: list[str]) -> tuple[list[str], list[str]]:
    """Return the properties and the program of a command line of systemd-run."""
    separator = line.index("--")
    return [line[n + 1] for n, word in enumerate(line[:separator]) if word == "-p"], line[separator + 1 :]


def sandbox_line(command: str) -> list[str]:
    """Return the systemd-run command line for a command line of fab."""
    words = shlex.split(command)
    assert words[:4] == ["sudo", "-n", root_helper.PROGRAM, "sandbox"]
    line: list[str] = host.sandbox_command(*words[4:])
    return line


def test_a_reading_program_is_a_dynamic_user_with_low_priority(inventory: Inventory) -> None:
    properties, argv = parse_systemd_run(
        sandbox_line(root_helper.reader_command(inventory.chief, ["env", "A=$B", "--", "-p", "User=root"]))
    )
    assert {"DynamicUser=yes", "SupplementaryGroups=trainer", "MemoryMax=800000000", "CPUWeight=20"} <= {*properties}
    assert {"OOMScoreAdjust=900", "ProtectSystem=strict", "NoNewPrivileges=yes", "CapabilityBoundingSet="} <= {*properties}
    assert not [each for each in properties if each.startswith(("BindPaths", "ReadWritePaths", "User="))]
    assert argv == ["env", "A=$$B", "--", "-p", "User=root"], "systemd expands no variables"


def test_a_writing_program_is_the_trainer_with_one_folder(inventory: Inventory) -> None:
    properties, argv = parse_systemd_run(
        sandbox_line(root_helper.writer_command(inventory.chief, ["sh"], "/bucket/jobs/job01/output/"))
    )
    assert argv == ["sh"]
    assert {"User=trainer", 'TemporaryFileSystem="/bucket":ro', 'BindReadOnlyPaths=-"/bucket/data"'} <= {*properties}
    assert [each for each in properties if each.startswith("BindPaths=")] == ['BindPaths="/bucket/jobs/job01/output"']
    assert "DynamicUser=yes" not in properties


def test_a_program_that_writes_to_google_s_bucket_gets_scoped_access(inventory: Inventory) -> None:
    broker, _, run = root_helper.writer_command(inventory.chief, ["sh"], "gs://b/jobs/job01/output").partition(" -- ")
    assert broker == "cd /opt/scaletier && venv/bin/python -m hosts.agent.token_broker gs://b/jobs/job01/output"
    assert token_broker.PORT in shlex.split(run)
    properties, argv = parse_systemd_run(sandbox_line(run.replace(token_broker.PORT, "4321")))
    assert argv == ["sh"]
    assert "Environment=GCE_METADATA_HOST=127.0.0.1:4321 GCE_METADATA_IP=127.0.0.1:4321" in properties
    assert not [each for each in properties if each.startswith("BindPaths=")]
    assert 'TemporaryFileSystem="/bucket":ro' in properties


def test_a_push_waits_for_space_on_a_full_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A job's files are removed shortly after its end; the next job may be pushed before that."""
    pauses: list[float] = []

    def urandom(_: int) -> bytes:
        if len(pauses) < 3:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        return b"some"

    monkeypatch.setattr(host, "CODE", str(tmp_path))
    monkeypatch.setattr(host.os, "urandom", urandom)
    monkeypatch.setattr(host.time, "sleep", pauses.append)
    host._await_room()
    assert pauses == [1, 1, 1]
    assert not list(tmp_path.iterdir())
    pauses.clear()
    monkeypatch.setattr(host, "ROOM_SECONDS", -1.0)
    with pytest.raises(OSError, match="Disk quota exceeded"):
        host._await_room()
