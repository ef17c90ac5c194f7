"""Installation of Python packages: pip's settings reach uv, and pip does what uv cannot."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from setup_scripts import SETUP, load

from infra.runtime import settings

LISTED = """:env:.find-links='/opt/wheels /more'
:env:.disable-pip-version-check='1'
download.index-url='https://no.example'
global.cert='/etc/ca.pem'
global.index-url='https://one.example/simple'
install.index-url='https://two.example/simple'
"""


@pytest.fixture(scope="module")
def packages() -> ModuleType:
    return load("packages")


def test_pip_settings_of_the_environment_come_first() -> None:
    assert settings.parse(LISTED) == {
        "cert": "/etc/ca.pem",
        "disable-pip-version-check": "1",
        "find-links": "/opt/wheels /more",
        "index-url": "https://two.example/simple",
    }
    output = "global.cert='a'\n:env:.cert='b'\n"
    assert settings.parse(output) == {"cert": "b"}


def test_pip_settings_become_uv_settings() -> None:
    environment = {"HOME": "/root", "UV_INDEX": "https://mine.example"}
    options = settings.parse(LISTED) | {"extra-index-url": "https://a.example\nhttps://b.example"}
    assert settings.translate(options, {"HOME": "/root"}) == {
        "HOME": "/root",
        "SSL_CERT_FILE": "/etc/ca.pem",
        "UV_DEFAULT_INDEX": "https://two.example/simple",
        "UV_FIND_LINKS": "/opt/wheels,/more",
        "UV_INDEX": "https://a.example https://b.example",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }
    assert settings.translate(options, environment)["UV_INDEX"] == "https://mine.example", "a uv setting stays"


@pytest.mark.parametrize(("no_index", "options"), [("1", ["--no-index"]), ("True", ["--no-index"]), ("0", []), (None, [])])
def test_pips_no_index_is_an_option_of_uv(no_index: str | None, options: list[str]) -> None:
    assert settings.options({} if no_index is None else {"no-index": no_index}) == options


def test_pips_settings_are_listed_by_pip_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\n[ \"$*\" = '-m pip config list' ] && echo \"global.cert='a'\"; exit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert settings.read_pip() == {"cert": "a"}


def test_a_setting_that_uv_lacks_is_named() -> None:
    assert settings.unsupported({"require-hashes": "true", "index-url": "https://one.example", "quiet": "1"}) == [
        "require-hashes"
    ]


@pytest.mark.parametrize(
    ("pip_settings", "failing", "tools"),
    [
        ("", "", ["pip", "uv"]),
        ("", "/uv", ["pip", "uv", "pip"]),
        ("", "--only-binary=:all:", ["pip", "pip"]),
        ("global.require-hashes='1'", "", ["pip"]),
    ],
)
def test_pip_installs_if_uv_cannot(
    packages: ModuleType, monkeypatch: pytest.MonkeyPatch, pip_settings: str, failing: str, tools: list[str]
) -> None:
    commands: list[tuple[str, ...]] = []

    def run(*command: str, environment: Any = None) -> int:
        commands.append(command)
        return int(bool(failing) and any(word.endswith(failing) for word in command))

    class Listed:
        stdout = pip_settings

    monkeypatch.setattr(packages, "run", run)
    monkeypatch.setattr(packages.subprocess, "run", lambda *_, **__: Listed)
    assert packages.install("image") == 0
    assert ["uv" if command[0].endswith("uv") else "pip" for command in commands] == tools
    assert commands[-1][-2:] == ("--editable", ".[image]")
    assert all("--python" in command for command in commands if command[0].endswith("uv"))
    files = {word for command in commands for before, word in pairwise(command) if before in ("-r", "--constraint")}
    assert all((SETUP.parent / file).is_file() for file in files)


def test_a_package_whose_installation_was_killed_is_installed_again(packages: ModuleType, tmp_path: Path) -> None:
    """A wheel has a RECORD of its own; that of an installed package is written last."""
    for name, record in {"whole": "whole-1.dist-info/INSTALLER,,4", "killed": "killed-1.dist-info/METADATA,,9"}.items():
        (info := tmp_path / f"{name}-1.dist-info").mkdir()
        (info / "RECORD").write_text(f"{name}/__init__.py,,0\n{record}\n")
    (tmp_path / "at_once-1.dist-info").mkdir()
    (of_conda := tmp_path / "conda-1.dist-info").mkdir()
    (of_conda / "INSTALLER").write_text("conda\n")
    packages.drop_unfinished(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"whole-1.dist-info", "conda-1.dist-info"}


def test_the_fab_script_is_this_project_s(packages: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fabric has a script of that name too, and uv installs packages in parallel."""
    commands: list[str] = []
    (tmp_path / "pyvenv.cfg").touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(packages, "drop_unfinished", lambda _: commands.append("drop"))
    monkeypatch.setattr(packages.fcntl, "flock", lambda file, _: commands.append(f"lock {file.name}"))
    monkeypatch.setattr(packages, "install", lambda extra: 0)
    monkeypatch.setattr(packages, "run", lambda *command: commands.append(" ".join(command[1:4])) or 0)
    monkeypatch.setattr(sys, "argv", ["packages.py", "image"])
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    fab = tmp_path / "fab"
    fab.write_text("from fabric.main import program")
    assert packages.main() == 0
    locked = [f"lock {tmp_path}/pyvenv.cfg", "drop"]
    assert commands == [*locked, "-m pip install", "-m compileall -qq"], "another checkout may share the environment"
    fab.write_text("from ops.cli.start import main")
    commands.clear()
    assert packages.main() == 0
    assert commands == [*locked, "-m compileall -qq"]
