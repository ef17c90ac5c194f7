"""The operator's key and the files by which fab and ssh reach a cluster, on a disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_private_key, load_ssh_public_key

from infra import connection, operator_files, operator_key
from infra.templates import environment, render

FACTS = {
    "proxyCommand": None,
    "hosts": [
        {"name": "ps-0", "role": "ps", "index": 0, "sshHost": "10.0.0.2", "hostKey": "ssh-ed25519 B"},
        {"name": "master-0", "role": "master", "index": 0, "sshHost": "10.0.0.1", "hostKey": "ssh-ed25519 A"},
        {"name": "late-0", "role": "worker", "index": 0, "sshHost": "10.0.0.3", "hostKey": None},
    ],
}
INVENTORY = json.dumps(FACTS)
PROPS = {"folder": ".scaletier/dev", "inventory": INVENTORY, "privateKey": "PRIVATE"}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(operator_files, "ROOT", tmp_path)
    return tmp_path


def test_the_files_are_the_operators_alone_and_go_with_the_stack(root: Path) -> None:
    folder = root / ".scaletier" / "dev"
    assert operator_files.read("id", PROPS) is None
    assert operator_files.create(PROPS) == (".scaletier/dev", PROPS)
    texts = {path.name: path.read_text() for path in folder.iterdir()}
    assert texts == connection.files(folder, INVENTORY, "PRIVATE")
    assert texts.keys() == {"inventory.json", "id_ed25519", "known_hosts", "ssh_config"}
    assert (texts["inventory.json"], texts["id_ed25519"]) == (INVENTORY, "PRIVATE")
    assert texts["known_hosts"] == "10.0.0.1 ssh-ed25519 A\n10.0.0.2 ssh-ed25519 B\n"
    assert f'  IdentityFile "{folder}/id_ed25519"\n' in texts["ssh_config"]
    assert "ProxyCommand" not in texts["ssh_config"]
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    assert operator_files.read("id", PROPS) == PROPS
    (root / ".scaletier" / "prod").mkdir()
    operator_files.delete("id", PROPS)
    assert [path.name for path in (root / ".scaletier").iterdir()] == ["prod"]
    (root / ".scaletier" / "prod").rmdir()
    operator_files.delete("id", PROPS)
    assert not (root / ".scaletier").exists()


@pytest.mark.parametrize("change", ["other", "missing", "binary"])
def test_changed_files_are_written_again(root: Path, change: str) -> None:
    folder = root / ".scaletier" / "dev"
    folder.mkdir(mode=0o755, parents=True)
    operator_files.create(PROPS)
    assert folder.stat().st_mode & 0o777 == 0o700
    file = folder / "known_hosts"
    if change == "missing":
        file.unlink()
    else:
        file.write_bytes(b"x" if change == "other" else b"\xff")
    drifted = operator_files.read("id", PROPS)
    assert drifted == {**PROPS, "inventory": ""}
    assert operator_files.read("id", drifted) == drifted
    operator_files.create(PROPS)
    assert operator_files.read("id", PROPS) == PROPS


def test_the_operators_key_is_a_pair_that_an_update_keeps() -> None:
    props = {"comment": "scaletier-dev"}
    name, made = operator_key.create(props)
    assert name == "scaletier-dev"
    assert made.keys() == {"comment", "publicKey", "privateKey"}
    public = load_ssh_private_key(made["privateKey"].encode(), None).public_key()
    assert load_ssh_public_key(made["publicKey"].encode()) == public
    line = public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    assert made["publicKey"] == f"{line} scaletier-dev"
    assert operator_key.create(props)[1]["privateKey"] != made["privateKey"]
    renamed = {"comment": "scaletier-prod"}
    assert operator_key.update(name, made, renamed) == {**made, **renamed}


def test_templates_keep_their_lines_and_refuse_unknown_names() -> None:
    jinja = environment()
    text = "a\n  {% if it %}\n  {{ it | json }}\n  {% endif %}\nb\n"
    assert jinja.from_string(text).render(it={"x": None}) == 'a\n  {"x": null}\nb\n'
    with pytest.raises(Exception, match="'it' is undefined"):
        jinja.from_string(text).render()
    assert environment() is jinja
    hosts = [{"name": "ps-0", "role": "ps", "index": 0, "sshHost": "10.0.0.1"}]
    assert "\n  ProxyCommand x\n" in render("ssh_config.j2", hosts=hosts, folder="/f", proxy_command="x")
