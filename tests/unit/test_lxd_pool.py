"""The storage pool that set-up creates and removes; LXD and the disk are fakes here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from infra.lxd import pool
from infra.templates import ROOT

GIB = 2**30


class Pools:
    """LXD's storage pools by name."""

    def __init__(self) -> None:
        self.by_name: dict[str, SimpleNamespace] = {}

    def exists(self, name: str) -> bool:
        return name in self.by_name

    def get(self, name: str) -> SimpleNamespace:
        return self.by_name[name]

    def create(self, body: dict[str, Any]) -> None:
        used: list[str] = []
        self.by_name[body["name"]] = SimpleNamespace(**body, used_by=used, delete=lambda: self.by_name.pop(body["name"]))


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Pools:
    pools = Pools()
    monkeypatch.setattr(pool, "client", lambda: SimpleNamespace(storage_pools=pools))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=200 * GIB))
    return pools


def call(action: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run the module, and return its exit code and its line of output."""
    code = pool.main([action, "scaletier"])
    out, err = capsys.readouterr()
    assert (out == "") is (code != 0)
    return code, out or err


@pytest.mark.parametrize(("free", "size"), [(200 * GIB, 40), (50 * GIB, 25), (8 * GIB, 4)])
def test_a_pool_gets_at_most_half_the_free_disk_and_can_be_removed(
    pools: Pools, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, free: int, size: int
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    assert call("make", capsys) == (0, f"lxd: made storage pool scaletier (btrfs, {size} GiB at most)\n")
    assert (pools.get("scaletier").driver, pools.get("scaletier").config) == ("btrfs", {"size": str(size * GIB)})
    assert call("make", capsys) == (0, "lxd: storage pool scaletier is there\n")
    assert call("remove", capsys) == (0, "lxd: removed storage pool scaletier\n")
    assert not pools.exists("scaletier")
    assert call("remove", capsys) == (0, "lxd: storage pool scaletier is gone\n")


def test_a_disk_that_is_nearly_full_gets_no_pool(
    pools: Pools, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=8 * GIB - 2))
    assert call("make", capsys) == (1, "lxd: the disk is nearly full: 8.0 GiB free, a storage pool needs 8 GiB\n")
    assert not pools.exists("scaletier")


def test_the_least_free_disk_is_documented() -> None:
    for file in ("setup/needs.sh", "docs/get-started.md"):
        assert f"{2 * pool._MIN_SIZE // GIB} GB must be free" in (ROOT / file).read_text(), file


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"description": "mine"}, "set-up did not make it"),
        ({"used_by": ["/1.0/instances/a", "/1.0/images/b"]}, "2 instances, images or volumes use it"),
    ],
)
def test_a_foreign_or_used_pool_is_not_removed(
    pools: Pools, capsys: pytest.CaptureFixture[str], change: dict[str, Any], reason: str
) -> None:
    pool.make("scaletier")
    vars(pools.get("scaletier")).update(change)
    assert call("remove", capsys) == (1, f"lxd: storage pool scaletier stays: {reason}\n")
    assert pools.exists("scaletier")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(["mkae", "scaletier"], "argument action: invalid choice: 'mkae'"), (["remove"], "arguments are required: name")],
)
def test_a_wrong_call_changes_nothing(
    pools: Pools, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    pool.make("scaletier")
    with pytest.raises(SystemExit):
        pool.main(arguments)
    assert reason in capsys.readouterr().err
    assert pools.exists("scaletier")
