"""docs/get-started.md, run command by command."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from stacks import ROOT, Stack
from waiting import limit

DIGITS = [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
"""The labels of the first ten test images of MNIST."""
# The cluster exists already, and stays.
SKIPPED = ("make ", "source ", "pulumi ")


def commands() -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / "docs" / "get-started.md").read_text(), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if not line.startswith(SKIPPED)]


def test_the_tutorial_runs_command_by_command(cluster: Stack, tmp_path: Path) -> None:
    (tmp_path / ".cache").symlink_to(ROOT / ".cache")
    environ = {**cluster.env, "SCALETIER_PROJECT": str(ROOT)}
    outputs = {}
    for line in commands():
        result = subprocess.run(
            line, shell=True, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=limit(600), check=False
        )
        assert result.returncode == 0, f"{line} ended with {result.returncode}:\n{result.stdout}{result.stderr}"
        outputs[line] = result.stdout
    assert len(outputs) == 15
    accuracy = re.search(r"Final metrics after 3000 steps, .*accuracy: (0\.\d+)", outputs["fab logs master-0 --lines 5"])
    assert accuracy is not None
    assert float(accuracy[1]) > 0.9
    assert (tmp_path / "model").is_dir()
    heads, *rows = outputs["fab predict --model MNIST --json-instances request.json"].splitlines()
    assert heads.split() == ["KEY", "CLASSES", "PROBABILITIES"]
    predictions = [(int(row.split()[1]), json.loads(row.split(maxsplit=2)[2])) for row in rows]
    assert sum(digit == expected for (digit, _), expected in zip(predictions, DIGITS, strict=True)) >= 9
    assert all(len(p) == 10 and abs(sum(p) - 1) < 1e-3 and p.index(max(p)) == digit for digit, p in predictions)
