"""Check the inventory: its parsing, the choice of the stack, and errors for unknown names."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from opsdata import inventory_json

from infra.inventory import Inventory
from infra.scale_tiers import SpecError
from ops.cluster import state
from ops.cluster.inventory import choose_stack, connect, load, parse
from ops.errors import OpsError, UsageError


def test_the_chief_is_the_first_replica(inventory: Inventory) -> None:
    assert inventory.chief.name == "master-0"
    assert inventory.replicas == ("master-0", "ps-0", "worker-0", "worker-1", "evaluator-0")


def test_tf_config_has_no_evaluator(inventory: Inventory) -> None:
    expected = {"ps": ["10.0.0.32:2222"], "chief": ["10.0.0.2:2222"], "worker": ["10.0.0.64:2222", "10.0.0.65:2222"]}
    assert inventory.cluster() == expected
    assert list(inventory.cluster("master")) == ["ps", "master", "worker"]


@pytest.mark.parametrize("text", ["chief-0", "worker-2", "workers", "", "ALL"])
def test_an_unknown_replica_lists_valid_names(inventory: Inventory, text: str) -> None:
    with pytest.raises(SpecError, match="worker-1"):
        inventory.host(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read"),
        ("{}", "'schema'"),
        (inventory_json(schema=2), "schema 2, this version reads 1"),
        (inventory_json(hosts=[]), "cannot be read"),
        (inventory_json(hosts=[{"name": "x-0", "role": "x"}]), "inventory.hosts[0] lacks index, address"),
        (inventory_json(bucket=3), "inventory.bucket must be a text, not 3"),
        (inventory_json(power={"url": "x"}), "inventory.power lacks operatorUrl, token"),
    ],
)
def test_an_invalid_inventory_asks_for_pulumi_up(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match="run pulumi up") as error:
        parse(text, tmp_path)
    assert message in str(error.value)


def test_the_chosen_stack() -> None:
    def fail_if_called() -> str:
        raise AssertionError("a named stack needs no look at the selection")

    assert choose_stack(["local"], "", lambda: None) == "local"
    assert choose_stack(["a", "local"], "local", fail_if_called) == "local"
    assert choose_stack(["a", "local"], "", lambda: "a") == "a"


@pytest.mark.parametrize(
    ("folders", "requested", "selected"),
    [([], "", None), (["a"], "b", None), (["a", "c"], "", "b"), (["a"], "", "b"), ([], "b", None)],
)
def test_an_unknown_stack_is_not_chosen(folders: list[str], requested: str, selected: str | None) -> None:
    assert choose_stack(folders, requested, lambda: selected) is None


def test_several_stacks_need_a_choice() -> None:
    with pytest.raises(UsageError, match="more than one stack is up: set --stack or PULUMI_STACK to one of a, b"):
        choose_stack(["a", "b"], "", lambda: None)


def select_stack(home: Path, project: Path, stack: str) -> None:
    """Write the selection like `pulumi stack select`."""
    name = f"scaletier-{hashlib.sha1(f'{project}/Pulumi.yaml'.encode()).hexdigest()}-workspace.json"
    (home / "workspaces").mkdir(parents=True, exist_ok=True)
    (home / "workspaces" / name).write_text(json.dumps({"stack": f"organization/scaletier/{stack}"}))


def test_the_selected_stack_is_read_from_pulumis_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, link, home = tmp_path / "project", tmp_path / "link", tmp_path / "home"
    (root / "docs").mkdir(parents=True)
    link.symlink_to(root)
    monkeypatch.setenv("PULUMI_HOME", str(home))
    monkeypatch.setattr(state, "_pulumi", lambda *_: pytest.fail("starting Pulumi takes too long"))
    assert state.selected_stack(root) is None
    select_stack(home, root, "cloud")
    select_stack(home, link, "linked")
    monkeypatch.chdir(root / "docs")
    for folder, stack in ((root / "docs", "cloud"), (link / "docs", "linked"), (tmp_path, "cloud"), (root / "gone", "cloud")):
        monkeypatch.setenv("PWD", str(folder))
        assert state.selected_stack(root) == stack
    for content in ("{}", '{"stack": ""}', "[]", "no JSON"):
        for file in (home / "workspaces").iterdir():
            file.write_text(content)
        assert state.selected_stack(root) is None


class Pulumi:
    """Replace Pulumi's command line with a script that prints given outputs."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.program, self.calls = folder / "bin" / "pulumi", folder / "calls"
        self.program.parent.mkdir()
        monkeypatch.setattr(state.sys, "prefix", str(folder))

    def set_output(self, out: str = "", err: str = "", code: int = 0) -> None:
        (self.program.parent / "out").write_text(out)
        record, show = f'echo "$PULUMI_STACK $*" >>{self.calls}', f'cat "{self.program.parent}/out"'
        self.program.write_text(f"#!/bin/sh\n{record}\n{show}\necho '{err}' >&2\nexit {code}\n")
        self.program.chmod(0o755)


@pytest.fixture
def pulumi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pulumi:
    return Pulumi(tmp_path, monkeypatch)


def test_pulumi_runs_in_the_project_s_folder_and_is_explained(
    tmp_path: Path, pulumi: Pulumi, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root := tmp_path / "project").mkdir()
    pulumi.set_output("{}")
    pulumi.program.write_text('#!/bin/sh\necho "$PWD" "$@"\ncat\necho about >&2\n')
    monkeypatch.setenv("PWD", "/nowhere")
    assert state._pulumi(root, "about") == f"{root} about --non-interactive\n"
    pulumi.program.unlink()
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    with pytest.raises(OpsError, match=r"^Pulumi cannot list the hosts \(\[Errno 2\] No such file or directory: 'pulumi'\)$"):
        state._pulumi(root, "about")
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "pulumi").symlink_to("/bin/echo")
    assert state._pulumi(root, "about") == "about --non-interactive\n", "the one of the system"


def stack_outputs(**changes: Any) -> str:
    inventory = json.loads(inventory_json(**changes)) | {"proxyCommand": "tunnel %h"}
    inventory["hosts"] = [{**host, "sshHost": f"st-{host['name']}", "hostKey": None} for host in inventory["hosts"]]
    inventory["hosts"][0]["hostKey"] = "ssh-ed25519 AAAA"
    return json.dumps({"inventory": json.dumps(inventory), "operatorKey": "PRIVATE", "scaleTier": "CUSTOM"})


def test_another_checkouts_stack_is_fetched_once_with_private_files(
    tmp_path: Path, pulumi: Pulumi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pulumi.set_output(stack_outputs())
    monkeypatch.setenv("PULUMI_STACK", "organization/scaletier/test")
    for _ in range(2):
        assert load(tmp_path).chief.address == "10.0.0.2"
    assert pulumi.calls.read_text() == "organization/scaletier/test stack output --json --show-secrets --non-interactive\n"
    assert capsys.readouterr().err == "stack test was made elsewhere: 5 hosts, by its state (fab connect reads it again)\n"
    folder = tmp_path / ".scaletier" / "test"
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == dict.fromkeys(
        ("inventory.json", "ssh_config", "known_hosts", "id_ed25519"), 0o600
    )
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "id_ed25519").read_text() == "PRIVATE"
    assert (folder / "known_hosts").read_text() == "st-ps-0 ssh-ed25519 AAAA\n"
    config = (folder / "ssh_config").read_text()
    assert f'IdentityFile "{folder}/id_ed25519"' in config
    assert "Host worker-1 worker-replica-1\n  HostName st-worker-1\n" in config
    assert "ProxyCommand tunnel %h" in config


def test_connect_always_reads_the_state(tmp_path: Path, pulumi: Pulumi, capsys: pytest.CaptureFixture[str]) -> None:
    pulumi.set_output(stack_outputs())
    assert connect(False, tmp_path) == 0
    pulumi.set_output(stack_outputs(scaleTier="BASIC"))
    assert load(tmp_path).scale_tier == "CUSTOM", "a local inventory is not refreshed by itself"
    assert connect(False, tmp_path) == 0
    assert load(tmp_path).scale_tier == "BASIC"
    folder = tmp_path / ".scaletier" / "test"
    assert capsys.readouterr().out.splitlines() == [
        f"stack test: {tier}, 5 hosts, by its state; ssh -F {folder}/ssh_config" for tier in ("CUSTOM", "BASIC")
    ]
    assert connect(True, tmp_path) == 0
    assert json.loads(capsys.readouterr().out) == {
        "stack": "test",
        "scaleTier": "BASIC",
        "hosts": ["ps-0", "master-0", "worker-0", "worker-1", "evaluator-0"],
        "folder": str(folder),
    }


def test_the_selected_stack_precedes_the_only_local_one(
    tmp_path: Path, pulumi: Pulumi, monkeypatch: pytest.MonkeyPatch
) -> None:
    local_folder = tmp_path / ".scaletier" / "local"
    local_folder.mkdir(parents=True)
    (local_folder / "inventory.json").write_text(inventory_json(stack="local"))
    monkeypatch.setenv("PULUMI_HOME", str(tmp_path / "home"))
    assert (load(tmp_path).stack, load(tmp_path).folder) == ("local", local_folder)
    select_stack(tmp_path / "home", tmp_path, "cloud")
    pulumi.set_output(stack_outputs(stack="cloud"))
    assert load(tmp_path).stack == "cloud"


def test_a_destroyed_stack_is_removed_locally(tmp_path: Path, pulumi: Pulumi, monkeypatch: pytest.MonkeyPatch) -> None:
    pulumi.set_output(stack_outputs())
    connect(False, tmp_path)
    pulumi.set_output("{}")
    monkeypatch.setenv("PULUMI_STACK", "test")
    with pytest.raises(UsageError, match="stack test is not up: run pulumi up"):
        connect(False, tmp_path)
    assert not (tmp_path / ".scaletier").exists()


@pytest.mark.parametrize(
    ("requested", "reason", "message"),
    [
        ("", "no stack selected", "no stack is up here: run pulumi up (Pulumi knows none: no stack selected)"),
        (
            "b",
            "no stack named b found",
            "stack 'b' (--stack, PULUMI_STACK) does not exist here; stacks that exist: a, local. "
            "Run: make stack STACK=b && pulumi up --stack b",
        ),
    ],
)
def test_a_missing_stack_is_an_error(
    tmp_path: Path, pulumi: Pulumi, monkeypatch: pytest.MonkeyPatch, requested: str, reason: str, message: str
) -> None:
    pulumi.set_output(err=f"error: {reason}", code=1)
    monkeypatch.setenv("PULUMI_STACK", requested)
    for stack in ("local", "a") if requested else ():
        (tmp_path / ".scaletier" / stack).mkdir(parents=True)
        (tmp_path / ".scaletier" / stack / "inventory.json").touch()
    with pytest.raises(UsageError) as error:
        load(tmp_path)
    assert str(error.value) == message


def test_a_pulumi_error_is_not_a_missing_stack(tmp_path: Path, pulumi: Pulumi) -> None:
    pulumi.set_output(err="error: getting secrets manager: incorrect passphrase", code=255)
    with pytest.raises(OpsError, match=r"^the state in \.pulumi-state of this checkout cannot be read: \S+ does not exist"):
        load(tmp_path)


def test_the_state_of_another_version_is_refused(tmp_path: Path, pulumi: Pulumi) -> None:
    pulumi.set_output('{"hosts": {}}')
    with pytest.raises(UsageError, match=r"written by another version .* run pulumi up"):
        load(tmp_path)


def outputs_without(key: str) -> str:
    """Return outputs whose first host lacks a key."""
    outputs = json.loads(stack_outputs())
    inventory = json.loads(outputs["inventory"])
    inventory["hosts"][0].pop(key)
    inventory["hosts"][0]["hostKey"] = None
    return json.dumps({**outputs, "inventory": json.dumps(inventory)})


@pytest.mark.parametrize(
    "output",
    [
        "",
        "[1]",
        stack_outputs(hosts=[{"name": "x-0", "hostKey": None}]),
        stack_outputs(stack="../../elsewhere"),
        stack_outputs(stack=".."),
        stack_outputs(stack=""),
        stack_outputs(bucket=None),
        outputs_without("role"),
        outputs_without("sshHost"),
        json.dumps({"inventory": json.dumps({**json.loads(inventory_json()), "hosts": []}), "operatorKey": "PRIVATE"}),
    ],
)
def test_an_invalid_state_is_one_line_and_writes_nothing(tmp_path: Path, pulumi: Pulumi, output: str) -> None:
    pulumi.set_output(output)
    root = tmp_path / "a" / "project"
    root.mkdir(parents=True)
    with pytest.raises(OpsError) as error:
        connect(False, root)
    assert "\n" not in str(error.value)
    assert [*(tmp_path / "a").rglob("*")] == [root]


def test_another_backend_is_named_and_does_not_delete_local_files(
    tmp_path: Path, pulumi: Pulumi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pulumi.set_output(stack_outputs())
    connect(False, tmp_path)
    monkeypatch.setenv("PULUMI_BACKEND_URL", "gs://team")
    monkeypatch.setenv("PULUMI_STACK", "test")
    (stacks := tmp_path / ".pulumi-state/.pulumi/stacks/scaletier").mkdir(parents=True)
    (stacks / "test.json").touch()
    capsys.readouterr()
    for answer in ({"out": "{}"}, {"err": "error: no stack named test found", "code": 255}):
        pulumi.set_output(**answer)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"gs://team, and this checkout has one: unset PULUMI_BACKEND_URL$"):
            connect(False, tmp_path)
        assert "the state in use is gs://team (PULUMI_BACKEND_URL)" in capsys.readouterr().err
    assert (tmp_path / ".scaletier/test/id_ed25519").exists()
