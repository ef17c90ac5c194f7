"""The shipped trainer's exported model: one directory each, atomic, also from a checkpoint alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobs.model_signatures import Signature, Tensor, read_signatures
from scaletier import checkpoint, savedmodel
from scaletier.data import BatchSource
from scaletier.functional_model import FunctionalModel
from scaletier.job import Job
from scaletier.tensorflow_setup import import_tensorflow
from trainer import export, flags, task

tf = import_tensorflow()


def job() -> Job:
    parsed = flags.parse(["--model=mlp", "--train-data=x", "--eval-data=x"])
    nothing = tf.data.Dataset.from_tensors((tf.zeros([1, 784]), tf.zeros([1], tf.int64)))
    return Job(**{**vars(task.job(parsed)), "data": nothing})


JOB = job()
SPEC = BatchSource(JOB.data).element_spec
NETWORK = FunctionalModel(JOB, SPEC, 3)


def save_checkpoint(job_dir: Path) -> checkpoint.TrainingState:
    """Write a checkpoint of step 7 of the initial model."""
    state = checkpoint.TrainingState(NETWORK)
    state.step.assign(7)
    checkpoint.Saver(state.variables, state.step, str(job_dir), 1).save()
    return state


def test_exports_are_complete_and_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1_800_000_000.9)
    state = checkpoint.TrainingState(NETWORK)
    folder = tmp_path / "export" / "Servo"
    (folder / "temp-1800000000").mkdir(parents=True)  # the remains of a killed export

    def export_model() -> str:
        return savedmodel.export(
            savedmodel.make_serving_module(JOB, NETWORK, state.shared, state.local, SPEC[0]), str(tmp_path)
        )

    assert export_model() == f"{folder}/1800000000"
    assert export_model() == f"{folder}/1800000001"
    assert sorted(path.name for path in folder.iterdir()) == ["1800000000", "1800000001"]
    scores = Tensor("float32", (None, 10))
    key = Tensor("int64", (None,))
    assert read_signatures((folder / "1800000000" / "saved_model.pb").read_bytes()) == {
        "serving_default": Signature(
            {"image": Tensor("float32", (None, 784)), "key": key},
            {"classes": key, "key": key, "probabilities": scores, "scores": scores},
        )
    }


def test_the_command_exports_the_latest_checkpoint(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    state = save_checkpoint(tmp_path)
    assert export.main(["--job-dir", f"{tmp_path}/", "--model", "mlp"]) == 0
    path = capfd.readouterr().out.strip()
    assert Path(path).parent == tmp_path / "export" / "Servo"
    image = np.full((1, 784), 0.5, np.float32)
    answer: Any = tf.saved_model.load(path).signatures["serving_default"](key=tf.constant([1], tf.int64), image=image)
    assert (answer["key"].numpy().tolist(), answer["classes"].numpy()) == ([1], answer["scores"].numpy().argmax(1))
    assert np.allclose(answer["scores"], tf.nn.softmax(NETWORK.predict(state.shared, state.local, image)), atol=1e-5)


def test_variables_missing_in_a_checkpoint_are_exported_with_initial_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a job with another optimizer it takes the weights, and other float32 variables that no step changes."""

    class Tripled(tf.keras.layers.Layer):  # type: ignore[misc, name-defined]
        def build(self, shape: Any) -> None:
            self.factor = self.add_weight(
                shape=(), dtype="int32", initializer=tf.keras.initializers.Constant(3), trainable=False, name="factor"
            )

        def call(self, inputs: Any) -> Any:
            return inputs * tf.cast(self.factor, inputs.dtype)

    def make(optimizer: str) -> Job:
        layers = [tf.keras.Input([2]), Tripled(name="tripled"), tf.keras.layers.Dense(1, name="end")]
        data = tf.data.Dataset.from_tensors((tf.ones([1, 2]), tf.ones([1, 1])))
        return Job(model=lambda: tf.keras.Sequential(layers), data=data, loss="mse", optimizer=optimizer)

    def return_values(job: Job, network: FunctionalModel, shared: Any, local: Any, inputs: Any) -> dict[str, Any]:
        return {
            spec.name: value.numpy() for spec, value in zip((*network.shared, *network.local), (*shared, *local), strict=True)
        }

    monkeypatch.setattr(savedmodel, "make_serving_module", return_values)
    monkeypatch.setattr(savedmodel, "export", lambda values, _: values)
    first = make("sgd")
    state = checkpoint.TrainingState(FunctionalModel(first, BatchSource(first.data).element_spec, 0))
    state.shared[0].assign([[5.0], [6.0]])
    checkpoint.Saver(state.variables, state.step, str(tmp_path), 1).save()
    exported: Any = savedmodel.export_latest(make("adam"), str(tmp_path), 0)
    assert (exported["end/kernel"].tolist(), exported["tripled/factor"]) == ([[5.0], [6.0]], 3)


def test_the_command_without_a_checkpoint_of_the_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert export.main(["--job-dir", str(tmp_path)]) == 2
    assert capfd.readouterr().err == f"error: there is no checkpoint in {tmp_path}/checkpoints\n"
    save_checkpoint(tmp_path)
    assert export.main(["--job-dir", str(tmp_path), "--model", "cnn"]) == 2
    assert "is of another model: cnn has variable conv1/kernel" in capfd.readouterr().err
    assert not (tmp_path / "export").exists()
