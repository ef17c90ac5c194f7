"""One process trains a little on generated digits: checkpoints, resuming, export, and every failure."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from loopback import SMALL_METRIC

from scaletier.training import ChiefTasks
from trainer import task


@pytest.fixture
def train(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("SCALETIER_DATA", str(data))
    monkeypatch.setenv("JOB_DIR", str(tmp_path / "job"))
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    return lambda *flags: task.main(["--model=mlp", "--batch-size=10", *flags])


def test_a_job_trains_resumes_and_exports(train: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert train("--max-steps=50", "--checkpoint-steps=20") == 0
    first = capfd.readouterr().out.splitlines()
    assert re.fullmatch(
        r"Train \[master/0\], step 1: loss: \d\.\d{3}, accuracy: \d\.\d{3} \(\d\.\d{3} sec\) "
        r"\d+\.\d global steps/s, \d+\.\d local steps/s",
        first[1],
    )
    assert re.fullmatch(rf"Exporting prediction graph to {tmp_path}/job/export/Servo/\d{{10}}", first[-2])
    assert first[-1].startswith("Final metrics after 50 steps, loss: ")
    assert train("--max-steps=120") == 0
    second = capfd.readouterr().out.splitlines()
    assert second[1] == f"Resuming from {tmp_path}/job/checkpoints/model-50, step 50"
    assert re.fullmatch(rf"Final metrics after 120 steps, loss: {SMALL_METRIC}, accuracy: 1\.000", second[-1])
    assert any((tmp_path / "job/summaries").iterdir())
    evaluation = json.loads((tmp_path / "job/evaluation.json").read_text())
    assert (evaluation["step"], evaluation["confusion"]) == (120, [[4 * (i == j) for j in range(10)] for i in range(10)])
    exports = sorted((tmp_path / "job/export/Servo").iterdir())
    assert [str(path) for path in exports] == [line.rpartition(" ")[2] for line in (first[-2], second[-2])]
    assert all(b"/job:" not in (path / "saved_model.pb").read_bytes() for path in exports)


def test_bfloat16_trains_float32_variables(train: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert train("--max-steps=100", "--precision=bfloat16") == 0
    assert re.search(
        rf"^Final metrics after 100 steps, loss: {SMALL_METRIC}, accuracy: 1\.000$", capfd.readouterr().out, re.MULTILINE
    )
    assert train("--max-steps=104") == 0
    assert "Resuming from" in capfd.readouterr().out


def test_replicas_wait_for_evaluations_by_steps(
    train: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    measure, replicas_wait = ChiefTasks._evaluate_and_report, list[bool]()

    def measure_while_waiting(self: Any, *arguments: Any, **more: Any) -> Any:
        budget = self._training.budget
        replicas_wait.append(budget._until <= budget.step)
        return measure(self, *arguments, **more)

    monkeypatch.setattr(ChiefTasks, "_evaluate_and_report", measure_while_waiting)
    assert train("--max-steps=40", "--eval-steps=8", "--eval-interval=0.000001") == 0
    evaluated_steps = [int(step) for step in re.findall(r"^Eval, step (\d+): loss: ", capfd.readouterr().out, re.MULTILINE)]
    assert evaluated_steps == [8, 16, 24, 32]
    assert replicas_wait == [True] * 5


def test_a_checkpoint_of_another_model_is_refused(train: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert train("--max-steps=4") == 0
    assert train("--max-steps=8", "--model=cnn") == 2
    assert capfd.readouterr().err == (
        f"error: checkpoint {tmp_path}/job/checkpoints/model-4 is of another model: cnn has variable conv1/kernel "
        "(5, 5, 1, 32), it has none; pass another --job-dir, or the checkpoint's model\n"
    )


def test_a_nan_loss_ends_the_job(train: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert train("--max-steps=4") == 0
    assert train("--max-steps=400", "--learning-rate=1e35", "--eval-interval=1000") == 1
    assert re.search(r"^error: the loss of master/0 is (nan|inf) at step \d+; try a lower", capfd.readouterr().err)
    assert (tmp_path / "job/checkpoints/model-4.index").is_file()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--train-data=/nowhere/train*"], "data /nowhere/train* matches no file"),
        (["--batch-size=41"], "batch size 41 is larger than the data: "),
        ([f"--train-data={__file__}"], "has no intact TFRecord at byte 0 (record 0): make the file again, or pass"),
    ],
)
def test_wrong_data_is_one_line_and_exit_code_2(
    train: Any, flags: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train(*flags) == 2
    stderr = capfd.readouterr().err
    assert message in stderr
    assert stderr.count("\n") == 1


def test_a_corrupt_record_is_named_when_it_is_read(
    train: Any, data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    content = bytearray((data / "train-00000-of-00001.tfrecord").read_bytes())
    size = len(content) // 40
    content[35 * size + 100] ^= 1
    corrupt = tmp_path / "train.tfrecord"
    corrupt.write_bytes(content)
    assert train(f"--train-data={corrupt}") == 2
    place = f"byte {35 * size} (record 35)"
    assert capfd.readouterr().err.splitlines()[-1] == (
        f"error: {corrupt} has no intact TFRecord at {place}: make the file again, or pass --skip-corrupt-records"
    )


def test_a_file_as_job_dir_is_refused(train: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert train("--max-steps=4", f"--job-dir={tmp_path}/file") == 2
    assert re.fullmatch(rf"error: --job-dir {tmp_path}/file cannot be created: .*\n", capfd.readouterr().err)


def test_an_invalid_tf_config_is_one_line(
    train: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TF_CONFIG", "{")
    assert train() == 2
    assert capfd.readouterr().err.startswith("error: TF_CONFIG is not a JSON object of cluster and task")


def test_a_terminated_replica_saves_a_checkpoint(train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signal.signal", lambda number, handler: number == signal.SIGTERM and handler())
    assert train("--max-steps=1000") == 143
    assert (tmp_path / "job/checkpoints/model-1.index").is_file()


def test_data_is_found_by_directory_glob_and_path(data: Path) -> None:
    from trainer.data import DataError, find_files

    train = f"{data}/train-00000-of-00001.tfrecord"
    assert find_files([str(data)], "train") == find_files([f"{data}/train*"], "train") == find_files([train], "x") == [train]
    with pytest.raises(DataError, match=r"data .*/eval\*\.tfrecord\* matches no file"):
        find_files([f"{data}/"], "eval")
