"""Train twice from one seed: the results are identical, down to the bytes of the checkpoint."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from forked import Program
from waiting import limit

from trainer import records
from trainer.mnist import Split

ROOT = Path(__file__).resolve().parents[2]
COUNT = 200
STEPS = 40


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write images of noise in two files, whose first pixels encode the digit."""
    directory = tmp_path_factory.mktemp("data")
    noise = bytes((pixel * 7919 + pixel // 13) % 256 for pixel in range(COUNT * 784))
    labels = bytes(number % 10 for number in range(COUNT))
    for split in ("train", "test"):
        for shard in range(2):
            records.write_shard(directory / f"{split}-0000{shard}-of-00002.tfrecord", Split(noise, labels), shard, 2)
    return directory


def run(data: Path, folder: Path, seed: int, *, forked: bool) -> tuple[list[str], bytes]:
    """Return the lines without times, and the last checkpoint."""
    env = {key: value for key, value in os.environ.items() if key != "TF_CONFIG"}
    env |= {"SCALETIER_DATA": str(data), "JOB_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    flags = ["--model=mlp", "--batch-size=20", f"--max-steps={STEPS}", f"--seed={seed}"]
    words, log = ["-m", "trainer.task", *flags], folder / "log"
    if forked:
        assert Program(*words, env=env, folder=folder, log=log).wait(limit()) == 0, log.read_text()
    else:
        with log.open("wb") as output:
            subprocess.run([sys.executable, *words], env=env, cwd=folder, stdout=output, timeout=limit(), check=True)
    lines = [line for line in log.read_text().splitlines() if re.match(r"(Eval|Final)", line)]
    return lines, (folder / f"checkpoints/model-{STEPS}.data-00000-of-00001").read_bytes()


def test_the_same_seed_gives_the_same_model_and_another_gives_another(data: Path, tmp_path: Path) -> None:
    runs = []
    for place, seed in enumerate((5, 5, 6)):
        (tmp_path / str(place)).mkdir()
        # Forks share what Python draws at its start, such as the hashes of strings: one run is not a fork.
        runs.append(run(data, tmp_path / str(place), seed, forked=place != 1))
    first, repeated, other = runs
    assert first[0][-1].startswith(f"Final metrics after {STEPS} steps")
    assert repeated[0][-1] == first[0][-1]
    assert repeated[1] == first[1]
    assert other[1] != first[1]
