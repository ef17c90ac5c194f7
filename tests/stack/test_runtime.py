"""Check the hosts' Python runtime: its name, uv's command line, the archive's layout; and errors of unready hosts."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import google.api_core.exceptions
import google.auth.exceptions
import pytest
import requests
from google.cloud import storage
from shared_fakes import Clock

from infra.dynamic import ModuleProvider
from infra.gcp import ready, runtime
from infra.gcp.api import GcpError
from infra.gcp.runtime import _SHA256
from infra.runtime import atomic_dir, build, uv
from infra.runtime.recipe import RuntimeSpec, runtime_spec
from infra.scale_tiers import Accelerator

SMALL = RuntimeSpec("3.11", ("a==1",), ("b==2",))


def test_the_name_depends_on_the_requirements() -> None:
    assert runtime_spec("2.21.0", None) == runtime_spec("2.21.0", None)
    others = [
        SMALL,
        *(dataclasses.replace(SMALL, **{key: value}) for key, value in {"python": "3.12", "constraints": ()}.items()),
    ]
    assert (
        len(
            {
                variant.name
                for variant in [*others, runtime_spec("2.21.0", None), runtime_spec("2.21.0", Accelerator("nvidia-l4"))]
            }
        )
        == 5
    )
    assert SMALL.path == f"runtimes/{SMALL.name}.tar.gz"


def test_uv_installs_for_the_hosts_on_any_machine(tmp_path: Path) -> None:
    argv = uv.command(tmp_path / "site", "3.11", "--only-binary=:all:")
    assert {"--python-version=3.11", "--python-platform=x86_64-manylinux_2_36", "--link-mode=copy"} <= set(argv)
    assert argv[-2:] == ["--requirements=-", "--only-binary=:all:"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def install(_: RuntimeSpec, site: Path, verbose: bool) -> None:
        (site / "bin").mkdir()
        (site / "bin" / "script").write_text("#!/here/python\n")
        (site / "tensorflow/include").mkdir(parents=True)
        (site / "tensorflow/include/op.h").write_text("")
        (site / "mine").mkdir()
        (site / "mine" / "__init__.py").write_text("def f(): raise ValueError\n")
        (site / "mine" / "tool").write_text("")
        (site / "mine" / "tool").chmod(0o755)
        (site / "mine" / "template.py").write_text("{{ not Python }}!\n")

    monkeypatch.setattr(build, "CACHE", tmp_path)
    monkeypatch.setattr(build, "_install", install)
    return tmp_path


def test_the_folder_is_a_venv_of_the_hosts_python(cache: Path) -> None:
    built = build.ensure_folder(SMALL)
    assert built == cache / SMALL.name == build.folder_path(SMALL)
    assert (built / "bin/python").readlink() == Path("python3.11")
    assert (built / "bin/python3.11").readlink() == Path("/usr/bin/python3.11")
    assert (built / "lib/python3.11/site-packages/mine/__pycache__/__init__.cpython-311.pyc").exists()
    (built / "mark").touch()
    assert (build.ensure_folder(SMALL) / "mark").exists(), "it was built again"


def test_other_users_can_read_it_under_any_umask(cache: Path) -> None:
    umask = os.umask(0o077)
    try:
        built = build.ensure_folder(SMALL)
    finally:
        os.umask(umask)
    folders = (".", "bin", "lib", "lib/python3.11", "lib/python3.11/site-packages")
    assert {(built / folder).stat().st_mode & 0o777 for folder in folders} == {0o755}
    assert (built / "pyvenv.cfg").stat().st_mode & 0o777 == 0o644
    assert (built / "lib/python3.11/site-packages/mine/tool").stat().st_mode & 0o777 == 0o755
    assert (built / "pyvenv.cfg").read_text() == "home = /usr/bin\ninclude-system-site-packages = false\n"


def test_what_uv_prints_is_shown_for_a_folder(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[bool] = []

    def install(_: RuntimeSpec, site: Path, print_output: bool) -> None:
        shown.append(print_output)

    monkeypatch.setattr(build, "_install", install)
    build.ensure_folder(SMALL)
    build.ensure_archive(dataclasses.replace(SMALL, requirements=()))
    assert shown == [True, False]


def test_a_runtime_for_a_python_that_is_not_here_is_not_compiled(cache: Path) -> None:
    site = build.ensure_folder(dataclasses.replace(SMALL, python="3.99")) / "lib/python3.99/site-packages"
    assert sorted(path.name for path in (site / "mine").iterdir()) == ["__init__.py", "template.py", "tool"]


def test_a_folder_that_does_not_exist_gets_its_parents(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "c"
    (tmp_path / "a").mkdir()
    for _ in range(2):
        with atomic_dir.create_atomically(target, build.BuildError) as part:
            part.mkdir()
            (part / "x").touch()
        assert [path.name for path in target.iterdir()] == ["x"]
    (target.parent / ".making-x-99999999").touch()  # no folder
    atomic_dir.remove(target)
    assert [path.name for path in target.parent.iterdir()] == [".making-x-99999999"]
    with atomic_dir.temporary_path(target) as part:
        assert part.parent == target.parent
    assert not target.exists()


def test_uvs_output_without_an_error_is_its_reason() -> None:
    assert [uv.reason(text) for text in ("no\nspace\n", "", "warning: x\nerror: y\n  cause: z\nhint: w")] == [
        "no space",
        "it printed nothing",
        "y z w",
    ]


def test_uv_gets_the_lines_and_the_constraints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/mine")
    program = 'cat; echo "[$PYTHONPATH] $COLUMNS $PWD"; cat "$1"; touch .lock'

    def command(target: Path, python: str, *options: str) -> list[str]:
        assert (python, options[-2]) == ("3.11", "--only-binary=:all:")
        return ["sh", "-c", program, "sh", options[-1].removeprefix("--constraints=")]

    monkeypatch.setattr(uv, "command", command)
    printed: list[str] = []
    options = ("--only-binary=:all:", f"--constraints={__file__}")
    result = uv.install(tmp_path, "3.11", ["a==1", "b"], options, tmp_path, printed.append)
    lines = result.stdout.splitlines()
    assert lines[:3] == printed[:3] == ["a==1", "b", f"[] 10000 {tmp_path}"]
    assert lines[3] == Path(__file__).read_text().splitlines()[0]
    assert result.returncode == 0
    assert list(tmp_path.iterdir()) == []
    calls: list[tuple[Any, str]] = []

    def install(*arguments: Any, **_: object) -> Any:
        calls.append((arguments, Path(arguments[3][1].removeprefix("--constraints=")).read_text()))
        return result

    monkeypatch.setattr(uv, "install", install)
    build._install(RuntimeSpec("3.11", ("a==1",), ("b==2", "c==3")), tmp_path, False)
    ((arguments, constraints),) = calls
    assert (arguments[:3], arguments[3][0], constraints) == ((tmp_path, "3.11", ("a==1",)), "--only-binary=:all:", "b==2\nc==3")


def test_the_archive_is_a_read_only_venv(cache: Path) -> None:
    file = build.ensure_archive(SMALL)
    assert [path.name for path in cache.iterdir()] == [f"{SMALL.name}.tar.gz"]
    with tarfile.open(file) as tar:
        members = {member.name: member for member in tar}
        code = tar.extractfile("lib/python3.11/site-packages/mine/__pycache__/__init__.cpython-311.pyc")
        assert b"/opt/scaletier/venv/lib/python3.11/site-packages/mine/__init__.py" in code.read()
    links = {name: member.linkname for name, member in members.items() if member.issym()}
    assert links == {"bin/python3.11": "/usr/bin/python3.11", "bin/python3": "python", "bin/python": "python3.11"}
    site = "lib/python3.11/site-packages/mine"
    assert (members[f"{site}/__init__.py"].mode, members[f"{site}/tool"].mode) == (0o444, 0o555)
    assert not [name for name in members if name.endswith(("script", ".h"))]
    assert {(member.uid, member.gid) for member in members.values()} == {(0, 0)}


def test_an_archive_is_made_from_an_existing_folder(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build.ensure_folder(SMALL)
    monkeypatch.setattr(build, "_install", None)
    with tarfile.open(build.ensure_archive(SMALL)) as tar:
        assert "lib/python3.11/site-packages/mine/__init__.py" in tar.getnames()


def test_an_existing_archive_is_reused(cache: Path) -> None:
    (cache / f"{SMALL.name}.tar.gz").write_bytes(b"there")
    assert build.ensure_archive(SMALL).read_bytes() == b"there"


@pytest.mark.parametrize("make", [build.ensure_folder, build.ensure_archive])
def test_another_process_may_build_the_same_first(
    cache: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[RuntimeSpec], Path]
) -> None:
    install = build._install

    def build_in_between(spec: RuntimeSpec, site: Path, verbose: bool) -> None:
        monkeypatch.setattr(build, "_install", install)
        with monkeypatch.context() as other:
            other.setattr(atomic_dir.os, "getpid", lambda: 1)  # a running process
            make(SMALL)
        install(spec, site, verbose)

    monkeypatch.setattr(build, "_install", build_in_between)
    assert [make(SMALL)] == list(cache.iterdir())


@pytest.mark.parametrize("make", [build.ensure_folder, build.ensure_archive])
def test_a_failed_rename_is_one_line(cache: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[RuntimeSpec], Path]) -> None:
    def fail(path: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(build.BuildError, match=r"^.* cannot be made: check the free space and the folder's permissions$"):
        make(SMALL)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("make", [build.ensure_folder, build.ensure_archive])
def test_leftovers_of_a_killed_build_are_deleted(cache: Path, make: Callable[[RuntimeSpec], Path]) -> None:
    names = (".making-abc123", f".making-{SMALL.name}-99999999", f".making-x-{os.getpid()}", ".making-x-1")
    for name in names:
        (cache / name / "lib").mkdir(parents=True)
    own = SMALL.name if make is build.ensure_folder else f"{SMALL.name}.tar.gz"  # of an earlier process with this one's id
    (cache / f".making-{own}-{os.getpid()}" / "lib/python3.11/site-packages").mkdir(parents=True)
    built = make(SMALL)
    assert {path.name for path in cache.iterdir()} == {built.name, *names[2:]}


@pytest.mark.parametrize("make", [build.ensure_folder, build.ensure_archive])
def test_a_build_is_synced_before_its_rename(
    cache: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[RuntimeSpec], Path]
) -> None:
    synced: list[tuple[bool, list[str]]] = []
    target = cache / (SMALL.name if make is build.ensure_folder else f"{SMALL.name}.tar.gz")

    def sync() -> None:
        synced.append((target.exists(), [path.name for path in cache.rglob("*")]))

    monkeypatch.setattr(atomic_dir.os, "sync", sync)
    assert make(SMALL) == target
    ((existed, names),) = synced
    assert not existed
    assert {"pyvenv.cfg", "mine"} <= {*names}


def test_uvs_reason_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "CACHE", tmp_path)
    failing = ["sh", "-c", "cat; printf 'error: no\\n  cause: none\\n' >&2; exit 1"]
    monkeypatch.setattr(uv, "command", lambda *_: failing)
    with pytest.raises(build.BuildError, match=r"^uv: no none$"):
        build.ensure_archive(SMALL)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ({}, "nothing said yet"),
        ({"state": "preparing: files"}, "preparing: files"),
        ({"state": "ready", "script": "new"}, "ready"),
        ({"state": "failed: image: it has no curl", "script": "new"}, "failed: image: it has no curl"),
        ({"state": "preparing: files", "script": "old"}, "preparing: files"),
        ({"state": "ready", "script": "old"}, "has not run its new start-up script yet"),
        ({"state": "failed: image: it has no curl", "script": "old"}, "has not run its new start-up script yet"),
        ({"state": "ready"}, "has not run its new start-up script yet"),
    ],
)
def test_a_status_of_another_start_up_script_is_ignored(status: dict[str, str], state: str) -> None:
    assert ready.state(status, "new") == state


def test_late_hosts_are_listed() -> None:
    states = {"master-0": "ready", "worker-0": "preparing: runtime", "worker-1": "failed: image: it has no curl"}
    late = {host: host_state for host, host_state in states.items() if host_state != "ready"}
    assert (
        ready.progress(states) == "1 of 3 hosts are ready: worker-0 preparing: runtime, worker-1 failed: image: it has no curl"
    )
    assert ready.progress({"master-0": "ready"}) == "1 of 1 hosts are ready"
    assert ready.describe_late(late, 900).startswith("not ready after 900 s: worker-0 preparing: runtime, ")
    assert ready.describe_late({"worker-1": late["worker-1"]}, 900) == "not ready: worker-1 failed: image: it has no curl"


class HostStates:
    """Two hosts, their guest attributes at each request, and a clock that the wait for them advances."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.states: list[dict[str, str]] = []
        self.serial: dict[str, str] | GcpError = {}
        self.clock = Clock()
        self.began = self.clock()
        monkeypatch.setattr(ready, "time", self.clock)
        monkeypatch.setattr(ready, "session", lambda _: "session")
        monkeypatch.setattr(ready, "guest_attributes", self.read)
        monkeypatch.setattr(ready, "get_json", self.get)

    def read(self, *args: object) -> dict[str, dict[str, str]]:
        assert args == ("session", WAITING, WAITING["hosts"], "scaletier", "state")
        states = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return {host: {"state": status, "script": "v1"} for host, status in states.items()}

    def get(self, client: object, url: str) -> dict[str, str]:
        assert url == "http://x/projects/p/zones/z/instances/st-ps-0/serialPort"
        if isinstance(self.serial, GcpError):
            raise self.serial
        return self.serial

    @property
    def seconds(self) -> float:
        return self.clock() - self.began


WAITING = {
    "endpoint": "http://x/",
    "project": "p",
    "zone": "z",
    "hosts": {"ps-0": "st-ps-0", "ps-1": "st-ps-1"},
    "scripts": {"ps-0": "v1", "ps-1": "v1"},
    "timeout": 10,
}
FAILED = "failed: image: it has no curl"


@pytest.fixture
def host_states(monkeypatch: pytest.MonkeyPatch) -> HostStates:
    return HostStates(monkeypatch)


def test_hosts_are_awaited_and_their_progress_is_printed_once(
    host_states: HostStates, capsys: pytest.CaptureFixture[str]
) -> None:
    half = {"ps-0": "preparing", "ps-1": "ready"}
    host_states.states = [half, half, {"ps-0": FAILED, "ps-1": "preparing"}, {"ps-0": "ready", "ps-1": "ready"}]
    assert ready.create(WAITING) == ("ready", WAITING)
    assert host_states.seconds == 6
    assert capsys.readouterr().out == (
        "1 of 2 hosts are ready: ps-0 preparing\n"
        f"0 of 2 hosts are ready: ps-0 {FAILED}, ps-1 preparing\n"
        "2 of 2 hosts are ready\n"
    )
    host_states.states = [half]
    assert ready.create({**WAITING, "timeout": 0}) == ("ready", {**WAITING, "timeout": 0}), "it does not wait"


AGAIN = "fix it, then `gcloud compute instances reset st-ps-0 --zone z` and `pulumi up`"


@pytest.mark.parametrize(
    ("states", "serial", "seconds", "error"),
    [
        ({"ps-0": FAILED, "ps-1": "ready"}, {}, 0, f"not ready: ps-0 {FAILED}; {AGAIN}"),
        (
            {"ps-0": FAILED, "ps-1": "preparing"},
            {"contents": "1\n2\n3\n4\n"},
            12,
            f"not ready after 10 s: ps-0 {FAILED}, ps-1 preparing; {AGAIN}; ps-0's serial output ends: 2 / 3 / 4",
        ),
        ({"ps-0": "preparing", "ps-1": "ready"}, GcpError("no"), 12, f"not ready after 10 s: ps-0 preparing; {AGAIN}"),
    ],
)
def test_hosts_that_failed_or_are_late_stop_an_update(
    host_states: HostStates, states: dict[str, str], serial: Any, seconds: float, error: str
) -> None:
    host_states.states, host_states.serial = [states], serial
    with pytest.raises(GcpError) as caught:
        ready.create(WAITING)
    assert (str(caught.value), host_states.seconds) == (error, seconds)


def test_a_host_that_says_that_it_is_not_ready_is_awaited_again(host_states: HostStates) -> None:
    for status, known in (("ready", True), ("nothing said yet", True), ("preparing", False), (FAILED, False)):
        host_states.states = [{"ps-0": "ready", "ps-1": status}]
        assert ready.read("ready", WAITING) == (WAITING if known else None)


class Storage:
    """Google's library for a bucket: its objects' hashes by path, and what is done to them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.metadata: dict[str, dict[str, str] | None] = {}
        self.done: list[object] = []
        self.error: Exception | None = None
        monkeypatch.setattr(storage, "Client", self.client)
        monkeypatch.setattr(runtime, "credentials", lambda _: "mine")

    def client(self, **options: object) -> Storage:
        assert options == {"project": "p", "credentials": "mine", "client_options": {"api_endpoint": "http://x:1"}}
        return self

    def bucket(self, name: str) -> Storage:
        assert name == "a-bucket"
        return self

    def get_blob(self, path: str) -> SimpleNamespace | None:
        if self.error:
            raise self.error
        if path not in self.metadata:
            return None
        blob = SimpleNamespace(metadata=self.metadata[path])
        blob.patch = lambda: self.metadata.update({path: blob.metadata})
        return blob

    def blob(self, path: str, chunk_size: int) -> SimpleNamespace:
        def upload(file: Path, content_type: str, timeout: float) -> None:
            self.done.append((path, chunk_size, blob.metadata, file.read_bytes(), content_type, timeout))

        blob = SimpleNamespace(metadata=None, upload_from_filename=upload)
        return blob

    def list_blobs(self, prefix: str, versions: bool) -> list[SimpleNamespace]:
        return [SimpleNamespace(delete=lambda: self.done.append((prefix, versions)))] * 2


IN_BUCKET = {
    "endpoint": "http://x:1/storage/v1/",
    "project": "p",
    "bucket": "a-bucket",
    "python": "3.11",
    "requirements": ["a==1"],
    "constraints": ["b==2"],
}
DIGEST = hashlib.sha256(b"archive").hexdigest()


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> Storage:
    return Storage(monkeypatch)


def test_a_runtime_is_built_and_uploaded_once(
    stored: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (archive := tmp_path / "a").write_bytes(b"archive")
    specs: list[RuntimeSpec] = []
    monkeypatch.setattr(build, "ensure_archive", lambda spec: specs.append(spec) or archive)
    users = iter(("first", "second"))
    monkeypatch.setattr(runtime.secrets, "token_hex", lambda _: next(users))
    made = {**IN_BUCKET, "path": SMALL.path, "sha256": DIGEST, "user": "first"}
    assert runtime.create(IN_BUCKET) == (SMALL.name, made)
    assert specs == [SMALL]
    assert stored.done == [(SMALL.path, 32 * 2**20, {_SHA256: DIGEST, "user": "first"}, b"archive", "application/gzip", 120.0)]
    assert capsys.readouterr().out == (
        f"building the hosts' Python 3.11 (a minute or three, once)\nuploading 0 MB to gs://a-bucket/{SMALL.path}\n"
    )
    assert runtime.read("x", made) is None, "it is gone"
    stored.metadata[SMALL.path] = None
    assert runtime.read("x", made) is None, "it has no recorded hash"
    stored.metadata[SMALL.path] = {_SHA256: "abc", "user": "first"}
    again = {**made, "sha256": "abc", "user": "second"}
    assert runtime.create(IN_BUCKET) == (SMALL.name, again)
    assert stored.metadata[SMALL.path] == {_SHA256: "abc", "user": "second"}
    assert (len(specs), capsys.readouterr().out) == (1, "")
    assert runtime.read("x", made) == {**made, "sha256": "abc"}
    assert runtime.update("x", made, {**IN_BUCKET, "endpoint": "http://y"}) == {**made, "endpoint": "http://y"}
    stored.done.clear()
    runtime.delete("x", made)
    assert stored.done == [], "a failed update replaced it, and the next one went back to it"
    runtime.delete("x", again)
    assert stored.done == [(SMALL.path, True)] * 2


def test_an_archive_of_an_older_state_is_deleted(stored: Storage) -> None:
    made = {**IN_BUCKET, "path": SMALL.path, "sha256": "abc"}
    for stored.metadata in ({SMALL.path: {_SHA256: "abc"}}, {}):
        runtime.delete("x", made)
    assert stored.done == [(SMALL.path, True)] * 4
    stored.done.clear()
    runtime.delete("x", {**made, "user": "first"})
    assert stored.done == [(SMALL.path, True)] * 2, "old versions remain of one that is gone"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (google.api_core.exceptions.Forbidden("not\nyours"), "403 not yours"),
        (requests.ConnectionError("x"), "Google does not answer (ConnectionError)"),
        (google.auth.exceptions.TransportError("x"), "Google does not answer (TransportError)"),
        (build.BuildError("uv: no"), "uv: no"),
    ],
)
def test_an_error_of_the_bucket_is_one_line(stored: Storage, error: Exception, message: str) -> None:
    stored.error = error
    with pytest.raises(GcpError) as caught:
        runtime.create(IN_BUCKET)
    assert str(caught.value) == f"gs://a-bucket/{SMALL.path}: {message}"


def test_a_runtime_that_cannot_be_looked_at_is_as_recorded(stored: Storage) -> None:
    made = {**IN_BUCKET, "path": SMALL.path, "sha256": DIGEST}
    stored.error = requests.ConnectionError("x")
    assert runtime.read("x", made) == made
    assert ModuleProvider(runtime.__name__).diff("x", {"bucket": "a"}, {"bucket": "b"}).delete_before_replace is False
