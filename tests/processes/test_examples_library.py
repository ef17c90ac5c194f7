"""Run the library's examples like a user on one machine: to the end, and resumed after a kill."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import Program
from waiting import limit, wait_for

from scaletier.tensorflow_setup import import_tensorflow

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "tabular": ["--batch-size=32", "--hidden-units", "16"],
    "text": ["--batch-size=16", "--vocabulary=2000", "--length=12"],
    "gru": ["--model=gru", "--vocabulary=400", "--length=16", "--units=16"],
    "image": ["--batch-size=16", "--filters=8", "--blocks=1"],
}


def start(folder: Path, *words: str) -> Program:
    env = {key: value for key, value in os.environ.items() if key not in ("TF_CONFIG", "JOB_DIR")}
    env |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}", "SCALETIER_DATA": "."}
    return Program(*words, "--job-dir=job", env=env, folder=folder, log=folder / "log")


def start_example(example: str, folder: Path, *flags: str) -> Program:
    return start(folder, "-m", f"{'text' if example == 'gru' else example}.task", *SMALL[example], *flags)


@pytest.mark.parametrize(
    "page", ["README.md", pytest.param("docs/library.md", marks=pytest.mark.full("the program of README.md is like it"))]
)
def test_the_program_of_a_page_trains(page: str, tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    programs = [block for block in blocks if "__main__" in block]
    assert programs
    for number, program in enumerate(programs):
        (folder := tmp_path / str(number)).mkdir()
        (folder / "task.py").write_text(program)
        np.save(folder / "inputs.npy", np.zeros([90, 20], np.float32))
        np.save(folder / "targets.npy", np.arange(90) % 3)
        process = start(folder, "task.py", "--max-steps=9")
        out = process.output(limit())
        assert process.returncode == 0, out
        assert (folder / "job/export/model.keras").exists()


def run_to_the_end(example: str, folder: Path, *flags: str) -> str:
    process = start_example(example, folder, *flags)
    out = process.output(limit())
    assert process.returncode == 0, out
    return out


def kill_midway(example: str, folder: Path) -> int:
    """Kill an example after its first checkpoint, and return the last saved step."""
    process = start_example(example, folder, "--max-steps=1000000", "--checkpoint-steps=50")
    checkpoint_list = folder / "job/checkpoints/checkpoint"
    try:
        wait_for(lambda: process.poll() is not None or checkpoint_list.exists(), "its first checkpoint")
    finally:
        process.kill()
    out = process.output(limit())
    assert process.returncode == -signal.SIGKILL, out
    last = re.match(r'model_checkpoint_path: "model-(\d+)"', checkpoint_list.read_text())
    assert last
    return int(last[1])


def predict(folder: Path, **inputs: Any) -> Any:
    tf = import_tensorflow()
    (exported,) = (folder / "job/export/Servo").iterdir()
    model = tf.saved_model.load(str(exported))
    tensors = {name: tf.constant(value) for name, value in inputs.items()}
    return {name: answer.numpy() for name, answer in model.signatures["serving_default"](**tensors).items()}


LIKE_IT = pytest.mark.full("tabular proves that an example learns")


@pytest.mark.parametrize("example", ["tabular", *(pytest.param(name, marks=LIKE_IT) for name in ("gru", "text", "image"))])
def test_an_example_learns_and_its_export_predicts(example: str, tmp_path: Path) -> None:
    resumed_step = kill_midway(example, tmp_path) if example == "tabular" else 0
    out = run_to_the_end(example, tmp_path, f"--max-steps={resumed_step + 400}")
    final = re.search(r"^Final metrics after (\d+) steps, loss: .*?accuracy: (\d\.\d+)", out, re.MULTILINE)
    assert final
    assert int(final[1]) == resumed_step + 400
    assert float(final[2]) > (0.8 if example == "tabular" else 0.55)

    if example == "tabular":
        assert f"Resuming from job/checkpoints/model-{resumed_step}, step {resumed_step}\n" in out
        spent, city = np.array([[9.0, 0.1], [0.1, 9.0]], np.float32), np.array([3, 3], np.int32)
        (outputs,) = predict(tmp_path, age=np.float32([80, 20]), spent=spent, city=city, device=np.int32([2, 0])).values()
        assert outputs.shape == (2, 1)
        assert outputs[0, 0] > 0.9 > 0.1 > outputs[1, 0]
    elif example == "image":
        answer = predict(tmp_path, picture=np.zeros([3, 20, 20, 1], np.uint8))
        np.testing.assert_allclose(answer["probabilities"].sum(1), 1.0, rtol=1e-5)
        assert answer["classes"].tolist() == answer["probabilities"].argmax(1).tolist()
    else:
        topics = np.arange(4, dtype=np.int32)  # a word's number determines its topic
        (outputs,) = predict(tmp_path, inputs=np.repeat(topics[:, None] + 8, 16 if example == "gru" else 12, 1)).values()
        assert outputs.argmax(1).tolist() == topics.tolist()


def test_the_manual_s_trainer_trains(tmp_path: Path) -> None:
    manual = (ROOT / "docs" / "library.md").read_text()
    (tmp_path / "mytrainer").mkdir()
    (tmp_path / "mytrainer" / "__init__.py").touch()
    (tmp_path / "mytrainer" / "task.py").write_text(manual.partition("```python\n")[2].partition("```")[0])
    process = start(tmp_path, "-m", "mytrainer.task", "--max-steps=2000")
    out = process.output(limit())
    assert process.returncode == 0, out
    final = re.search(r"^Final metrics after 2000 steps, loss: \S+, \w+: (\S+)$", out, re.MULTILINE)
    assert final
    assert float(final[1]) < 0.05
    assert predict(tmp_path, inputs=np.float32([[0.5, 0.5]]))["outputs"][0, 0] == pytest.approx(0.25, abs=0.1)
