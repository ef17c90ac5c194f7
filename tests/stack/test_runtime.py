"""Check the hosts' Python runtime: its name, uv's command line, the archive's layout; and errors of unready hosts."""

from __future__ import annotations

import dataclasses
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from infra.gcp import ready
from infra.gcp.runtime import _SHA256, _stored_sha256
from infra.runtime import atomic_dir, build, uv
from infra.runtime.recipe import Recipe, recipe
from infra.scale_tiers import Accelerator

SMALL = Recipe("3.11", ("a==1",), ("b==2",))


def test_the_name_depends_on_the_requirements() -> None:
    assert recipe("2.21.0", None) == recipe("2.21.0", None)
    others = [
        SMALL,
        *(dataclasses.replace(SMALL, **{key: value}) for key, value in {"python": "3.12", "constraints": ()}.items()),
    ]
    assert len({variant.name for variant in [*others, recipe("2.21.0", None), recipe("2.21.0", Accelerator("nvidia-l4"))]}) == 5
    assert SMALL.path == f"runtimes/{SMALL.name}.tar.gz"


def test_uv_installs_for_the_hosts_on_any_machine(tmp_path: Path) -> None:
    argv = uv.command(tmp_path / "site", "3.11", "--only-binary=:all:")
    assert {"--python-version=3.11", "--python-platform=x86_64-manylinux_2_36", "--link-mode=copy"} <= set(argv)
    assert argv[-2:] == ["--requirements=-", "--only-binary=:all:"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def install(_: Recipe, site: Path, verbose: bool) -> None:
        (site / "bin").mkdir()
        (site / "bin" / "script").write_text("#!/here/python\n")
        (site / "tensorflow/include").mkdir(parents=True)
        (site / "tensorflow/include/op.h").write_text("")
        (site / "mine").mkdir()
        (site / "mine" / "__init__.py").write_text("def f(): raise ValueError\n")
        (site / "mine" / "tool").write_text("")
        (site / "mine" / "tool").chmod(0o755)

    monkeypatch.setattr(build, "KEPT", tmp_path)
    monkeypatch.setattr(build, "_install", install)
    return tmp_path


def test_the_folder_is_a_venv_of_the_hosts_python(cache: Path) -> None:
    built = build.folder(SMALL)
    assert built == cache / SMALL.name == build.folder_of(SMALL)
    assert (built / "bin/python").readlink() == Path("python3.11")
    assert (built / "bin/python3.11").readlink() == Path("/usr/bin/python3.11")
    assert (built / "lib/python3.11/site-packages/mine/__pycache__/__init__.cpython-311.pyc").exists()
    (built / "mark").touch()
    assert (build.folder(SMALL) / "mark").exists(), "it was built again"


def test_other_users_can_read_it_under_any_umask(cache: Path) -> None:
    umask = os.umask(0o077)
    try:
        built = build.folder(SMALL)
    finally:
        os.umask(umask)
    folders = (".", "bin", "lib", "lib/python3.11", "lib/python3.11/site-packages")
    assert {(built / folder).stat().st_mode & 0o777 for folder in folders} == {0o755}
    assert (built / "pyvenv.cfg").stat().st_mode & 0o777 == 0o644


def test_the_archive_is_a_read_only_venv(cache: Path) -> None:
    file = build.archive(SMALL)
    assert [path.name for path in cache.iterdir()] == [f"{SMALL.name}.tar.gz"]
    with tarfile.open(file) as tar:
        members = {member.name: member for member in tar}
        code = tar.extractfile("lib/python3.11/site-packages/mine/__pycache__/__init__.cpython-311.pyc")
        assert code is not None
        assert b"/opt/scaletier/venv/lib/python3.11/site-packages/mine/__init__.py" in code.read()
    links = {name: member.linkname for name, member in members.items() if member.issym()}
    assert links == {"bin/python3.11": "/usr/bin/python3.11", "bin/python3": "python", "bin/python": "python3.11"}
    site = "lib/python3.11/site-packages/mine"
    assert (members[f"{site}/__init__.py"].mode, members[f"{site}/tool"].mode) == (0o444, 0o555)
    assert not [name for name in members if name.endswith(("script", ".h"))]
    assert {(member.uid, member.gid) for member in members.values()} == {(0, 0)}


def test_an_archive_is_made_from_an_existing_folder(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build.folder(SMALL)
    monkeypatch.setattr(build, "_install", None)
    with tarfile.open(build.archive(SMALL)) as tar:
        assert "lib/python3.11/site-packages/mine/__init__.py" in tar.getnames()


def test_an_existing_archive_is_reused(cache: Path) -> None:
    (cache / f"{SMALL.name}.tar.gz").write_bytes(b"there")
    assert build.archive(SMALL).read_bytes() == b"there"


@pytest.mark.parametrize("make", [build.folder, build.archive])
def test_another_process_may_build_the_same_first(
    cache: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Recipe], Path]
) -> None:
    install = build._install

    def build_in_between(recipe: Recipe, site: Path, verbose: bool) -> None:
        monkeypatch.setattr(build, "_install", install)
        with monkeypatch.context() as other:
            other.setattr(atomic_dir.os, "getpid", lambda: 1)  # a running process
            make(SMALL)
        install(recipe, site, verbose)

    monkeypatch.setattr(build, "_install", build_in_between)
    assert [make(SMALL)] == list(cache.iterdir())


@pytest.mark.parametrize("make", [build.folder, build.archive])
def test_a_failed_rename_is_one_line(cache: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Recipe], Path]) -> None:
    def fail(path: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(build.BuildError, match=r"^.* cannot be made: check the free space and the folder's permissions$"):
        make(SMALL)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("make", [build.folder, build.archive])
def test_leftovers_of_a_killed_build_are_deleted(cache: Path, make: Callable[[Recipe], Path]) -> None:
    names = (".making-abc123", f".making-{SMALL.name}-99999999", f".making-x-{os.getpid()}", ".making-x-1")
    for name in names:
        (cache / name / "lib").mkdir(parents=True)
    own = SMALL.name if make is build.folder else f"{SMALL.name}.tar.gz"  # of an earlier process with this one's id
    (cache / f".making-{own}-{os.getpid()}" / "lib/python3.11/site-packages").mkdir(parents=True)
    built = make(SMALL)
    assert {path.name for path in cache.iterdir()} == {built.name, *names[2:]}


@pytest.mark.parametrize("make", [build.folder, build.archive])
def test_a_build_is_synced_before_its_rename(
    cache: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Recipe], Path]
) -> None:
    synced: list[tuple[bool, list[str]]] = []
    target = cache / (SMALL.name if make is build.folder else f"{SMALL.name}.tar.gz")

    def sync() -> None:
        synced.append((target.exists(), [path.name for path in cache.rglob("*")]))

    monkeypatch.setattr(atomic_dir.os, "sync", sync)
    assert make(SMALL) == target
    ((existed, names),) = synced
    assert not existed
    assert {"pyvenv.cfg", "mine"} <= {*names}


def test_uvs_reason_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "KEPT", tmp_path)
    failing = ["sh", "-c", "cat; printf 'error: no\\n  cause: none\\n' >&2; exit 1"]
    monkeypatch.setattr(uv, "command", lambda *_: failing)
    with pytest.raises(build.BuildError, match=r"^uv: no none$"):
        build.archive(SMALL)
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


@pytest.mark.parametrize(
    ("blob", "sha256"),
    [(None, None), (SimpleNamespace(metadata=None), None), (SimpleNamespace(metadata={_SHA256: "abc"}), "abc")],
)
def test_an_archive_without_a_recorded_hash_is_built_again(blob: SimpleNamespace | None, sha256: str | None) -> None:
    assert _stored_sha256(SimpleNamespace(get_blob=lambda _: blob), "runtimes/a") == sha256
