"""Examples without the libraries that they train with, which are mocks here."""

from __future__ import annotations

import importlib.util
import io
import pickle
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import fsspec
import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FOLDER = "memory://bucket/jobs/ex01/output"
OUTPUT = ("table.txt", "model.pickle", "weights-7.npz")


class FittedModel:
    def score(self, *_: object) -> float:
        return 0.9


FITTED = FittedModel()


def load(monkeypatch: pytest.MonkeyPatch, file: str, mocks: dict[str, MagicMock]) -> ModuleType:
    """Run an example's file as a module whose libraries are mocks, and return it."""
    for name, mock in mocks.items():
        monkeypatch.setitem(sys.modules, name, mock)
    spec = importlib.util.spec_from_file_location("example", EXAMPLES / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def mock_tensorflow_1() -> dict[str, MagicMock]:
    tensorflow = MagicMock()
    return {"tensorflow": tensorflow, "tensorflow.compat": tensorflow.compat, "tensorflow.compat.v1": tensorflow.compat.v1}


def load_packaged(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> ModuleType:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.0")
    monkeypatch.setattr("sys.argv", ["packaged.task", *arguments])
    mocks = {"tabulate": MagicMock(), "packaged": MagicMock(), "packaged.model": MagicMock(SLOPE=3.0, INTERCEPT=-1.0)}
    mocks["tabulate"].tabulate.return_value = "step loss"
    mocks["packaged.model"].step.return_value = 0.5
    return load(monkeypatch, "packaged/src/packaged/task.py", mocks)


def load_mwms(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load(monkeypatch, "mwms/task.py", {"tensorflow": MagicMock(), "tf_keras": MagicMock()})


def test_output_is_written_to_a_job_dir_that_is_a_url(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JOB_DIR", FOLDER)
    load_packaged(monkeypatch, "--max-steps", "5").main()
    names = ("sklearn", *(f"sklearn.{name}" for name in ("datasets", "linear_model", "model_selection", "neighbors")))
    mocks = {name: MagicMock() for name in names}
    mocks["sklearn.model_selection"].train_test_split.return_value = [[]] * 4
    mocks["sklearn.model_selection"].cross_val_score.return_value.mean.return_value = 0.9
    mocks["sklearn.linear_model"].LogisticRegression.return_value.fit.return_value = FITTED
    monkeypatch.setattr("sys.argv", ["train.py"])
    load(monkeypatch, "scikit/train.py", mocks)
    model = MagicMock(**{"get_weights.return_value": [np.zeros(2)]})
    load_mwms(monkeypatch).save_weights(model, f"{FOLDER}/weights-7.npz")
    contents = {name: fsspec.filesystem("memory").cat_file(f"{FOLDER}/{name}") for name in OUTPUT}
    assert contents["table.txt"] == b"step loss"
    assert contents["model.pickle"] == pickle.dumps(FITTED)
    assert np.load(io.BytesIO(contents["weights-7.npz"]))["arr_0"].tolist() == [0, 0]
    assert not list(tmp_path.iterdir()), "no folder gs:"


def test_census_counts_the_last_batch_of_each_epoch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ("--train-files", "a.csv", "--eval-files", "b.csv", "--job-dir", "/output")
    monkeypatch.setattr("sys.argv", ["census.task", *files, "--num-epochs", "3", "--batch-size", "64"])
    census = load(monkeypatch, "census/task.py", {"tensorflow": MagicMock(), "keras": MagicMock()})
    monkeypatch.setattr(census, "load", lambda _: (np.zeros((2000, 4)), np.zeros(2000)))
    monkeypatch.setattr(census, "build", lambda *_: MagicMock(**{"evaluate.return_value": (0.3, 0.9)}))
    census.main()
    assert capsys.readouterr().out == "Final metrics after 96 steps, loss: 0.300, accuracy: 0.900\n"


def test_cloudml_reports_as_many_local_steps_as_global_ones_on_one_host(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (mocks := mock_tensorflow_1())["tensorflow.compat.v1"].train.SessionRunHook = object
    cloudml = load(monkeypatch, "cloudml/task.py", {**mocks, "cloudml": MagicMock(), "cloudml.model": MagicMock()})
    report = cloudml.Report("master/0", *[None] * 3)
    for seconds, step in enumerate((1, 2, 3)):
        monkeypatch.setattr("time.time", lambda seconds=seconds: 100.0 + seconds)
        report.after_run(None, MagicMock(results={"step": step, "loss": 0.3, "accuracy": 0.9}))
    rates = [line.partition("sec) ")[2] for line in capsys.readouterr().out.splitlines()]
    assert rates == ["1.0 global steps/s, 1.0 local steps/s"] * 2


@pytest.mark.parametrize("file", ["packaged/src/packaged/task.py", "mwms/task.py"])
def test_a_number_of_steps_below_1_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    monkeypatch.setattr("sys.argv", ["task", "--max-steps", "0"])
    names = ("tabulate", "packaged", "packaged.model", "tensorflow", "tf_keras")
    module = load(monkeypatch, file, {name: MagicMock() for name in names})
    with pytest.raises(SystemExit):
        module.main()
    assert capsys.readouterr().err.endswith("error: --max-steps must be at least 1\n")


def test_mwms_reads_files_by_their_compression(monkeypatch: pytest.MonkeyPatch) -> None:
    mwms = load_mwms(monkeypatch)
    for name, compression in (("test-0.tfrecord", ""), ("test-0.tfrecord.gz", "GZIP")):
        mwms.tf.io.gfile.glob.return_value = [name]
        mwms.records("/data", "test")
        mwms.tf.data.TFRecordDataset.assert_called_with([name], compression)
    mwms.tf.io.gfile.glob.return_value = []
    with pytest.raises(SystemExit, match="there is no test"):
        mwms.records("/data", "test")
