"""The inventory: what it reads, which stack it takes, and what it says of names that are not there."""

from __future__ import annotations

from pathlib import Path

import pytest
from opsdata import inventory_json

from infra.spec import SpecError
from ops.cluster.inventory import Inventory, choose_stack, load, parse
from ops.errors import UsageError


def test_the_chief_leads(inventory: Inventory) -> None:
    assert inventory.chief.name == "master-0"
    assert inventory.replicas == ("master-0", "ps-0", "worker-0", "worker-1", "evaluator-0")


def test_the_cluster_of_tf_config_never_has_the_evaluator(inventory: Inventory) -> None:
    expected = {"ps": ["10.0.0.32:2222"], "chief": ["10.0.0.2:2222"], "worker": ["10.0.0.64:2222", "10.0.0.65:2222"]}
    assert inventory.cluster() == expected
    assert list(inventory.cluster("master")) == ["ps", "master", "worker"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("worker-1", ["worker-1"]),
        ("master-replica-0", ["master-0"]),
        ("worker", ["worker-0", "worker-1"]),
        ("all", ["ps-0", "master-0", "worker-0", "worker-1", "evaluator-0"]),
    ],
)
def test_a_selection(inventory: Inventory, text: str, names: list[str]) -> None:
    assert [host.name for host in inventory.select(text)] == names


@pytest.mark.parametrize("text", ["chief-0", "worker-2", "workers", "", "ALL"])
def test_an_unknown_replica_is_told_what_is_valid(inventory: Inventory, text: str) -> None:
    with pytest.raises(UsageError, match="ps-0, master-0, worker-0, worker-1, evaluator-0, ps, master, worker, evaluator, all"):
        inventory.select(text)
    with pytest.raises(SpecError, match="worker-1"):
        inventory.host(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "cannot be read"),
        ("{}", "'schema'"),
        (inventory_json(schema=2), "schema 2, this version reads 1"),
        (inventory_json(hosts=[]), "cannot be read"),
        (inventory_json(hosts=[{"name": "x-0", "role": "x"}]), "'x'"),
    ],
)
def test_what_is_no_inventory_asks_for_pulumi_up(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError, match="run pulumi up") as error:
        parse(text, tmp_path)
    assert says in str(error.value)


def test_the_stack() -> None:
    assert choose_stack(["local"], {}, None) == "local"
    assert choose_stack(["a", "local"], {"PULUMI_STACK": "local"}, None) == "local"
    assert choose_stack(["a", "local"], {"PULUMI_STACK": "organization/scaletier/local"}, None) == "local"
    assert choose_stack(["a", "local"], {}, "a") == "a"


@pytest.mark.parametrize(
    ("folders", "environment", "says"),
    [
        ([], {}, "no stack is up: run pulumi up"),
        (["a", "b"], {}, "set PULUMI_STACK to one of a, b"),
        (["a"], {"PULUMI_STACK": "b"}, "stack 'b' .* is not up, up are a: run pulumi up --stack b"),
        ([], {"PULUMI_STACK": "b"}, "none is up"),
    ],
)
def test_no_stack_to_take(folders: list[str], environment: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        choose_stack(folders, environment, None)


def test_load_finds_the_only_stack(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no stack is up"):
        load(tmp_path)
    folder = tmp_path / ".scaletier" / "test"
    folder.mkdir(parents=True)
    (folder / "inventory.json").write_text(inventory_json())
    assert load(tmp_path).folder == folder
