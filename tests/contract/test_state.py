"""A team's state in Google's storage: one machine writes it and another reads it, by Pulumi's command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import limit

from ops.cluster.inventory import connect, load
from ops.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
PULUMI = Path(sys.prefix, "bin", "pulumi")
# Pulumi's marker of a secret in exported state.
SECRET = {"4dabf18193072939515e22adb298388d": "1b47061264138c4ac30d75fd1eb44270"}
KEY = "-----BEGIN OPENSSH PRIVATE KEY-----"


@pytest.fixture
def checkout(bucket: str, gcs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with this project's Pulumi.yaml and an unused Pulumi home, set to the team's bucket."""
    (tmp_path / "Pulumi.yaml").write_bytes((ROOT / "Pulumi.yaml").read_bytes())
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"127.0.0.1:{gcs}")
    monkeypatch.setenv("GOOGLE_OAUTH_ACCESS_TOKEN", "anyone")
    monkeypatch.setenv("PULUMI_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PULUMI_BACKEND_URL", f"gs://{bucket}")
    monkeypatch.setenv("PULUMI_CONFIG_PASSPHRASE", "of the team")
    monkeypatch.delenv("PULUMI_STACK", raising=False)
    return tmp_path


def pulumi(checkout: Path, *arguments: str, stdin: str | None = None) -> str:
    argv = [str(PULUMI), *arguments, "--non-interactive"]
    result = subprocess.run(argv, cwd=checkout, input=stdin, capture_output=True, text=True, timeout=limit(), check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def import_stack(checkout: Path, **outputs: Any) -> None:
    """Import a stack with these outputs, as an update would store it."""
    exported = json.loads(pulumi(checkout, "stack", "export"))
    urn = "urn:pulumi:cloud::scaletier::pulumi:pulumi:Stack::scaletier-cloud"
    exported["deployment"]["resources"] = [{"urn": urn, "type": "pulumi:pulumi:Stack", "custom": False, "outputs": outputs}]
    pulumi(checkout, "stack", "import", stdin=json.dumps(exported))


def secret(text: str) -> dict[str, str]:
    return {**SECRET, "plaintext": json.dumps(text)}


def test_a_stack_in_google_s_storage_is_read(checkout: Path, bucket: str) -> None:
    pulumi(checkout, "stack", "init", "cloud")
    assert not (checkout / ".pulumi-state").exists()
    host = {"name": "master-0", "role": "master", "index": 0, "address": "10.64.0.2", "machineType": "n1-standard-4"}
    host |= {"cpus": 4, "memoryBytes": 15 << 30, "sshHost": "st-master-0", "hostKey": "ssh-ed25519 AAAA"}
    inventory_record = {"schema": 1, "stack": "cloud", "scaleTier": "BASIC", "hosts": [host], "proxyCommand": None}
    inventory_record |= {"bucket": "gs://b", "operatorBucket": "gs://b"}
    import_stack(checkout, inventory=secret(json.dumps(inventory_record)), operatorKey=secret(KEY), target="gcp")
    assert load(checkout).chief.address == "10.64.0.2"
    assert (checkout / ".scaletier" / "cloud" / "id_ed25519").read_text() == KEY

    import_stack(checkout)
    with pytest.raises(UsageError, match="stack cloud is not up: run pulumi up"):
        connect(False, checkout)
    assert not (checkout / ".scaletier").exists()
