"""Two users of one stack with remote state; the user who did not create the hosts can use them too."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from stacks import BIN, ROOT, Result, Stack
from waiting import limit

NAME = "e2e-team"


@dataclass(frozen=True)
class Colleague:
    """Another checkout of this project, with a Pulumi that knows no stack yet, and the shared state."""

    root: Path
    env: dict[str, str]

    def run(self, *command: str) -> Result:
        result = subprocess.run(
            command, cwd=self.root, env=self.env, capture_output=True, text=True, timeout=limit(600), check=False
        )
        return Result(result.returncode, result.stdout, result.stderr)

    def fab(self, *arguments: str) -> Result:
        return self.run("fab", "--project", str(self.root), *arguments)


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def shared(state: Path) -> Iterator[Stack]:
    """Bring up a BASIC cluster whose state is in a shared folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PULUMI_BACKEND_URL", f"file://{state}")
        patch.setenv("PULUMI_CONFIG_PASSPHRASE", "of the team")
        with Stack(NAME, {"scaleTier": "BASIC"}) as stack:
            stack.up()
            yield stack


@pytest.fixture
def colleague(shared: Stack, tmp_path: Path) -> Colleague:
    root = tmp_path / "checkout"
    root.mkdir()
    for name in ("Pulumi.yaml", f"Pulumi.{NAME}.yaml"):
        shutil.copy(ROOT / name, root)
    env = {key: value for key, value in os.environ.items() if key != "PULUMI_STACK"}
    return Colleague(root, {**env, "PULUMI_HOME": str(tmp_path / "home"), "PATH": f"{BIN}:{os.environ['PATH']}"})


def test_a_colleague_uses_hosts_that_another_created(shared: Stack, colleague: Colleague, state: Path) -> None:
    assert not list((ROOT / ".pulumi-state").glob(f".pulumi/stacks/*/{NAME}*")), "the state is only in the team backend"
    assert "no stack is up here" in colleague.fab("hosts").err
    assert colleague.run("pulumi", "stack", "select", NAME).code == 0

    first = colleague.fab("hosts", "--json")
    assert [host["answers"] for host in json.loads(first.out)["hosts"]] == [True], first.err
    assert "stack e2e-team was made elsewhere: 1 host, by its state" in first.err
    shared.must_ssh("master-0", "sudo tee /bucket/from-the-other </dev/null")
    assert "from-the-other" in colleague.fab("shell", "--", "ls /bucket").out
    jobs = colleague.fab("jobs", "--json")
    assert (jobs.code, jobs.errors, "made elsewhere" in jobs.err) == (0, [], False), "one question"
    key = colleague.root / ".scaletier" / NAME / "id_ed25519"
    assert key.read_text() == (shared.folder / "id_ed25519").read_text()
    assert key.stat().st_mode & 0o777 == 0o600

    outputs = json.loads(colleague.run("pulumi", "stack", "output", "--json").out)
    assert outputs["operatorKey"] == outputs["inventory"] == "[secret]"


def test_the_state_holds_no_plaintext_private_key(shared: Stack, state: Path) -> None:
    (shared.folder / "known_hosts").unlink()
    shared.up()  # which checks first, finds files missing, and writes them
    assert (shared.folder / "known_hosts").read_text()
    contents = [path.read_bytes() for path in state.rglob("*") if path.is_file()]
    assert contents
    assert not [content for content in contents if b"OPENSSH PRIVATE KEY" in content]


def test_a_colleague_sees_changes_by_the_other(shared: Stack, colleague: Colleague) -> None:
    colleague.run("pulumi", "stack", "select", NAME)
    assert colleague.fab("connect").code == 0
    shared.configure(servingCount="1")
    shared.up()
    before = json.loads(colleague.fab("hosts", "--json").out)["hosts"]
    connected = json.loads(colleague.fab("connect", "--json").out)["hosts"]
    assert (len(before), connected) == (1, ["master-0", "serving-0"])

    inventory = shared.folder / "inventory.json"
    inventory.write_text(inventory.read_text().replace("serving-0", "serving-9"))
    shared.up()
    assert "serving-9" not in inventory.read_text(), "an update corrects a wrong inventory"

    shared.pulumi("destroy", "--yes", "--skip-preview")
    refused = colleague.fab("connect")
    assert (refused.code, refused.errors) == (2, [f"error: stack {NAME} is not up: run pulumi up"])
    assert not (colleague.root / ".scaletier").exists()
