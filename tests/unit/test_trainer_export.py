"""The exported model: one directory a time, as a whole, also from the checkpoint of a job that never came to it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from trainer.runtime import import_tensorflow

from ops.models.savedmodel import signatures
from trainer import checkpoint, export
from trainer.model import make_model

tf = import_tensorflow()
MODEL = make_model("mlp")


def saved(job_dir: Path) -> np.ndarray:
    """A checkpoint of step 7 with made-up parameters."""
    values = MODEL.initial(3)
    copy = checkpoint.LocalCopy(MODEL)
    copy.assign(values, 7)
    checkpoint.Saver(copy.variables, copy.step, str(job_dir), 1).save()
    return values


def test_exports_lie_side_by_side_and_none_is_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1_800_000_000.9)
    variables = {name: tf.Variable(tf.zeros(shape)) for name, shape in MODEL.shapes.items()}
    folder = tmp_path / "export" / "Servo"
    (folder / "temp-1800000000").mkdir(parents=True)  # what a killed export left
    assert export.export(MODEL, variables, str(tmp_path)) == f"{folder}/1800000000"
    assert export.export(MODEL, variables, str(tmp_path)) == f"{folder}/1800000001"
    assert sorted(path.name for path in folder.iterdir()) == ["1800000000", "1800000001"]
    assert signatures((folder / "1800000000" / "saved_model.pb").read_bytes()) == {
        "serving_default": {
            "inputs": {"image": "float32 [?, 784]", "key": "int64 [?]"},
            "outputs": {
                "classes": "int64 [?]",
                "key": "int64 [?]",
                "probabilities": "float32 [?, 10]",
                "scores": "float32 [?, 10]",
            },
        }
    }


def test_the_command_exports_the_latest_checkpoint(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    values = saved(tmp_path)
    assert export.main(["--job-dir", f"{tmp_path}/", "--model", "mlp"]) == 0
    path = capfd.readouterr().out.strip()
    assert Path(path).parent == tmp_path / "export" / "Servo"
    image = np.full((1, 784), 0.5, np.float32)
    answer = tf.saved_model.load(path).signatures["serving_default"](key=tf.constant([1], tf.int64), image=image)
    expected = tf.nn.softmax(MODEL.logits(MODEL.unflatten(tf.constant(values)), image, False))
    assert np.allclose(answer["scores"], expected, atol=1e-5)


def test_the_command_without_a_checkpoint_of_the_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert export.main(["--job-dir", str(tmp_path)]) == 2
    assert capfd.readouterr().err == f"error: there is no checkpoint in {tmp_path}/checkpoints\n"
    saved(tmp_path)
    assert export.main(["--job-dir", str(tmp_path), "--model", "cnn"]) == 2
    assert "is of another model: cnn has variable conv1_kernel" in capfd.readouterr().err
    assert not (tmp_path / "export").exists()
