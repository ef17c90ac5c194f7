"""The hosts' Python: its name, uv's command line, the archive's layout; and errors of unready hosts."""

from __future__ import annotations

import dataclasses
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.gcp import ready
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
    assert len({found.name for found in [*others, recipe("2.21.0", None), recipe("2.21.0", Accelerator("nvidia-l4"))]}) == 5
    assert SMALL.path == f"runtimes/{SMALL.name}.tar.gz"


def test_uv_installs_for_the_hosts_on_any_machine(tmp_path: Path) -> None:
    argv = uv.command(tmp_path / "site", "3.11", "--only-binary=:all:")
    assert {"--python-version=3.11", "--python-platform=x86_64-manylinux_2_36", "--link-mode=copy"} <= set(argv)
    assert argv[-2:] == ["--requirements=-", "--only-binary=:all:"]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def install(_: Recipe, site: Path, told: bool) -> None:
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


def test_the_folder_is_a_venv_of_the_hosts_python(kept: Path) -> None:
    made = build.folder(SMALL)
    assert made == kept / SMALL.name == build.folder_of(SMALL)
    assert (made / "bin/python").readlink() == Path("python3.11")
    assert (made / "bin/python3.11").readlink() == Path("/usr/bin/python3.11")
    assert (made / "lib/python3.11/site-packages/mine/__pycache__/__init__.cpython-311.pyc").exists()
    (made / "mark").touch()
    assert (build.folder(SMALL) / "mark").exists(), "it was made once more"


def test_other_users_can_read_it_under_any_umask(kept: Path) -> None:
    before = os.umask(0o077)
    try:
        made = build.folder(SMALL)
    finally:
        os.umask(before)
    folders = (".", "bin", "lib", "lib/python3.11", "lib/python3.11/site-packages")
    assert {(made / folder).stat().st_mode & 0o777 for folder in folders} == {0o755}
    assert (made / "pyvenv.cfg").stat().st_mode & 0o777 == 0o644


def test_the_archive_is_a_venv_that_nobody_may_change(kept: Path) -> None:
    file = build.archive(SMALL)
    assert [path.name for path in kept.iterdir()] == [f"{SMALL.name}.tar.gz"]
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


def test_an_archive_is_made_of_the_folder_that_is_there(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build.folder(SMALL)
    monkeypatch.setattr(build, "_install", None)
    with tarfile.open(build.archive(SMALL)) as tar:
        assert "lib/python3.11/site-packages/mine/__init__.py" in tar.getnames()


def test_what_was_made_is_kept(kept: Path) -> None:
    (kept / f"{SMALL.name}.tar.gz").write_bytes(b"there")
    assert build.archive(SMALL).read_bytes() == b"there"


@pytest.mark.parametrize("make", [build.folder, build.archive])
def test_another_process_may_build_the_same_first(
    kept: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Recipe], Path]
) -> None:
    install = build._install

    def slow(recipe: Recipe, site: Path, told: bool) -> None:
        monkeypatch.setattr(build, "_install", install)
        with monkeypatch.context() as other:
            other.setattr(atomic_dir.os, "getpid", lambda: 1)  # which runs
            make(SMALL)
        install(recipe, site, told)

    monkeypatch.setattr(build, "_install", slow)
    assert [make(SMALL)] == list(kept.iterdir())


@pytest.mark.parametrize("make", [build.folder, build.archive])
def test_what_cannot_take_its_place_is_one_line(
    kept: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Recipe], Path]
) -> None:
    def fails(path: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(build.BuildError, match=r"^.* cannot be made: check the free space and the folder's permissions$"):
        make(SMALL)
    assert list(kept.iterdir()) == []


@pytest.mark.parametrize("make", [build.folder, build.archive])
def test_what_one_who_was_killed_left_goes(kept: Path, make: Callable[[Recipe], Path]) -> None:
    names = (".making-abc123", f".making-{SMALL.name}-99999999", f".making-x-{os.getpid()}", ".making-x-1")
    for name in names:
        (kept / name / "lib").mkdir(parents=True)
    own = SMALL.name if make is build.folder else f"{SMALL.name}.tar.gz"  # by a process that had the number of this one
    (kept / f".making-{own}-{os.getpid()}" / "lib/python3.11/site-packages").mkdir(parents=True)
    made = make(SMALL)
    assert {path.name for path in kept.iterdir()} == {made.name, *names[2:]}


@pytest.mark.parametrize("make", [build.folder, build.archive])
def test_it_is_on_the_disk_before_it_has_its_name(
    kept: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Recipe], Path]
) -> None:
    synced: list[tuple[bool, list[str]]] = []
    there = kept / (SMALL.name if make is build.folder else f"{SMALL.name}.tar.gz")

    def sync() -> None:
        synced.append((there.exists(), [path.name for path in kept.rglob("*")]))

    monkeypatch.setattr(atomic_dir.os, "sync", sync)
    assert make(SMALL) == there
    ((named, what),) = synced
    assert not named
    assert {"pyvenv.cfg", "mine"} <= {*what}


def test_uvs_reason_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "KEPT", tmp_path)
    failing = ["sh", "-c", "cat; printf 'error: no\\n  cause: none\\n' >&2; exit 1"]
    monkeypatch.setattr(uv, "command", lambda *_: failing)
    with pytest.raises(build.BuildError, match=r"^uv: no none$"):
        build.archive(SMALL)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("said", "state"),
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
def test_what_a_host_said_of_another_script_is_of_no_account(said: dict[str, str], state: str) -> None:
    assert ready.state(said, "new") == state


def test_who_is_late_is_named() -> None:
    states = {"master-0": "ready", "worker-0": "preparing: runtime", "worker-1": "failed: image: it has no curl"}
    late = {host: said for host, said in states.items() if said != "ready"}
    assert (
        ready.progress(states) == "1 of 3 hosts are ready: worker-0 preparing: runtime, worker-1 failed: image: it has no curl"
    )
    assert ready.progress({"master-0": "ready"}) == "1 of 1 hosts are ready"
    assert ready.describe_late(late, 900).startswith("not ready after 900 s: worker-0 preparing: runtime, ")
    assert ready.describe_late({"worker-1": late["worker-1"]}, 900) == "not ready: worker-1 failed: image: it has no curl"
