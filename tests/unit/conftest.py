"""Fixtures of the unit tests; an audit hook blocks the network and ~/.ssh, and no test sees this machine's free disk."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import shapes
from opsdata import inventory_json
from replicahosts import make

from infra.inventory import Inventory
from infra.runtime.uv import GIT_REPOSITORY
from jobs.folder_bucket import FolderBucket
from jobs.ledger import Ledger
from ops import terminal
from ops.cluster.cluster import ClusterClient
from ops.cluster.inventory import parse

# The same examples on every machine and in every run, without time limit, and without a shared database.
hypothesis.settings.register_profile(
    "scaletier",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=100,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("scaletier")
# Only tests of this folder are guarded: other folders' tests may run in the same process.
_guarded = False
__all__ = ["make"]
_HOME_SSH = str(Path.home() / ".ssh")


class ForbiddenError(RuntimeError):
    """A unit test used the network, a file of ~/.ssh, or the free disk of this machine."""


def _guard(event: str, args: tuple[Any, ...]) -> None:
    if not _guarded:
        return
    if event in ("socket.connect", "socket.sendto") and isinstance(args[1], tuple):
        raise ForbiddenError(f"a unit test wanted to reach {args[1]}")
    if event == "socket.getaddrinfo":
        raise ForbiddenError(f"a unit test wanted to look up {args[0]}")
    if event == "open" and isinstance(args[0], str | bytes | os.PathLike) and os.fsdecode(args[0]).startswith(_HOME_SSH):
        raise ForbiddenError(f"a unit test wanted to open {args[0]!r}")


sys.addaudithook(_guard)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Block the network, ~/.ssh, the user's settings of Pulumi, and the user's repository, which a git hook names."""
    global _guarded
    for name in (*(name for name in os.environ if name.startswith("PULUMI_")), "SSH_AUTH_SOCK", *GIT_REPOSITORY):
        monkeypatch.delenv(name, raising=False)
    _guarded = True
    try:
        yield
    finally:
        _guarded = False


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no test depend on the free disk of this machine: one that needs it sets it."""

    def forbid(path: object) -> None:
        raise ForbiddenError(f"a unit test wanted the free disk of {path}")

    monkeypatch.setattr("shutil.disk_usage", forbid)


@pytest.fixture(autouse=True)
def quick_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no operation print that it takes long, however busy this machine is."""
    monkeypatch.setattr(terminal, "_FIRST_SECONDS", 1e6)


@pytest.fixture(autouse=True)
def documented_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the JSON that a command prints with docs/json.md, in every test."""
    printed = terminal.print_json

    def checked(value: Any) -> None:
        caller = sys._getframe(1)
        shapes.check(f"{caller.f_globals['__name__']}.{caller.f_code.co_name}", json.loads(json.dumps(value)))
        printed(value)

    monkeypatch.setattr(terminal, "print_json", checked)


@pytest.fixture
def inventory(tmp_path: Path) -> Inventory:
    return parse(inventory_json(), tmp_path)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(FolderBucket(tmp_path))


@pytest.fixture
def cluster(inventory: Inventory, ledger: Ledger) -> ClusterClient:
    return ClusterClient(inventory, object(), ledger=ledger)  # type: ignore[arg-type]


@pytest.fixture
def served(tmp_path: Path) -> Inventory:
    """Return the same hosts, and two more for models."""
    return parse(inventory_json(servers=2), tmp_path)


@pytest.fixture
def standard(tmp_path: Path) -> Inventory:
    """Return the same hosts, as if they were STANDARD_1's."""
    return parse(inventory_json(scaleTier="STANDARD_1"), tmp_path)


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """Make a folder with a short path, whatever TMPDIR is: a socket's path has at most 107 characters."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def index(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder of wheels, in the place of the package index."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "uv"))
    (folder := tmp_path / "index").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder
