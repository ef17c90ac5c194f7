"""The image of local hosts: its name, its import and its removal; LXD is a fake here."""

from __future__ import annotations

import io
import platform
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infra.lxd import image
from infra.lxd.api import LxdError


class Images:
    """LXD's images, by their aliases."""

    def __init__(self) -> None:
        self.aliases: list[tuple[str, str]] = []
        self.created: list[tuple[bytes, bytes]] = []

    def exists(self, name: str, alias: bool) -> bool:
        assert alias
        return name in [alias_name for alias_name, _ in self.aliases]

    def create(self, rootfs: bytes, metadata: bytes, wait: bool) -> SimpleNamespace:
        assert wait
        self.created.append((rootfs, metadata))
        return SimpleNamespace(add_alias=lambda name, description: self.aliases.append((name, description)))

    def all(self) -> list[SimpleNamespace]:
        def delete(alias: tuple[str, str], wait: bool) -> None:
            assert wait
            self.aliases.remove(alias)

        return [
            SimpleNamespace(aliases=[{"name": alias[0]}], delete=lambda wait, alias=alias: delete(alias, wait))
            for alias in self.aliases
        ] + [SimpleNamespace(aliases=[])]


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch) -> Images:
    images = Images()
    monkeypatch.setattr(image, "client", lambda: SimpleNamespace(images=images))
    return images


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (folder := tmp_path / "ansible").mkdir()
    (folder / "host.yml").write_text("a")
    monkeypatch.setattr(image, "ROOT", tmp_path)
    monkeypatch.setattr(image, "_ANSIBLE", folder)
    return folder


def test_the_name_follows_the_recipes_files_and_their_names(recipe: Path) -> None:
    names = [image.name()]
    (recipe / "__pycache__").mkdir()
    (recipe / "__pycache__" / "x.pyc").write_text("b")
    for stray in (".host.yml.swp", "host.yml~", ".DS_Store", "#host.yml#", "host.yml.orig"):
        (recipe / stray).write_bytes(b"\xff")
    (recipe / ".idea").mkdir()
    (recipe / ".idea" / "x.xml").touch()
    assert image.name() == names[0], "byte code and files of editors are no part of the recipe"
    (recipe / "host.yml").write_text("b")
    names.append(image.name())
    (recipe / "host.yml").rename(recipe / "other.yml")
    names.append(image.name())
    (recipe / "empty").touch()
    names.append(image.name())
    assert len(set(names)) == 4
    assert all(image._ALIAS.fullmatch(name) for name in names)


@pytest.mark.usefixtures("recipe")
def test_an_image_is_imported_once_and_all_are_removed(
    images: Images, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "image.squashfs").write_bytes(b"rootfs")
    assert image.main([]) == 1
    for _ in range(2):
        assert image.main(["import", str(tmp_path)]) == 0
    assert image.main([]) == 0
    own = image.name()
    assert capsys.readouterr().out == f"{own} is missing\n{own} is there\n{own} is there\n{own} is there\n"
    assert images.aliases == [(own, "scaletier host")]
    ((rootfs, metadata),) = images.created
    assert rootfs == b"rootfs"
    with tarfile.open(fileobj=io.BytesIO(metadata)) as archive:
        (member,) = archive.getmembers()
        content = archive.extractfile(member)
        lines = content.read().decode().splitlines()
    assert member.name == "metadata.yaml"
    assert (lines[0], lines[2]) == (f"architecture: {platform.machine()}", "properties: {description: scaletier host}")
    assert lines[1].startswith("creation_date: ")
    images.aliases += [("scaletier-0123456789ab", ""), ("debian", "")]
    assert image.main(["remove"]) == 0
    assert images.aliases == [("debian", "")]
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("recipe")
def test_an_error_of_lxd_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> Any:
        raise LxdError("LXD does not answer")

    monkeypatch.setattr(image, "client", refuse)
    assert image.main([]) == 1
    assert capsys.readouterr() == ("", "image: LXD does not answer\n")


@pytest.mark.usefixtures("recipe")
def test_the_image_and_the_python_are_required(images: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "folder_path", lambda _: tmp_path / "runtime")
    with pytest.raises(LxdError, match="the image of the hosts is missing"):
        image.require()
    with pytest.raises(LxdError, match="the Python of the hosts is missing"):
        image.require_runtime()
    images.aliases.append((image.name(), ""))
    (tmp_path / "runtime").mkdir()
    assert (image.require(), image.require_runtime()) == (image.name(), tmp_path / "runtime")
