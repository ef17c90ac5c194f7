"""Check that mypy finds a property that the provider does not have."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from infra.templates import ROOT

# Typical mistakes: a wrong name, a value of the wrong type, and a property that does not exist.
FAULTS = {
    "infra/gcp/network.py": ("auto_create_subnetworks=False", "auto_create_subnets=False"),
    "infra/gcp/storage.py": ("uniform_bucket_level_access=True", 'uniform_bucket_level_access="yes"'),
    "infra/gcp/instances.py": ("enable_vtpm=True", "enable_tpm=True"),
    "infra/gcp/firewall.py": ('FirewallAllowArgs(protocol="tcp"', 'FirewallAllowArgs(proto="tcp"'),
}


def run_mypy(*folders: Path) -> str:
    config = ROOT / "pyproject.toml"
    cache = ["--cache-dir", str(ROOT / ".mypy_cache")]
    argv = [sys.executable, "-m", "mypy", "--config-file", str(config), *cache, *map(str, folders)]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False).stdout


def test_a_property_outside_the_typed_arguments_fails(tmp_path: Path) -> None:
    copies = []
    for name, (good, bad) in FAULTS.items():
        text = (ROOT / name).read_text()
        assert good in text
        copies.append(tmp_path / f"bad_{Path(name).name}")
        copies[-1].write_text(text.replace(good, bad, 1))
    output = run_mypy(*copies)
    assert {Path(name).name for name in re.findall(r"(\S+\.py):\d+: error", output)} == {copy.name for copy in copies}, output
