"""The trainer's flags: their defaults, their other spellings, and one line for an error."""

from __future__ import annotations

import pytest

from scaletier.flags import flags_of
from trainer.flags import parse

ENVIRON = {"SCALETIER_DATA": "/bucket/data/mnist/", "JOB_DIR": "gs://b/jobs/job01/output"}


def test_defaults_come_from_the_environment() -> None:
    assert vars(parse([], ENVIRON)) == {
        "train_data": ("/bucket/data/mnist/train*.tfrecord*",),
        "eval_data": ("/bucket/data/mnist/test*.tfrecord*",),
        "job_dir": "gs://b/jobs/job01/output",
        "strategy": "async",
        "model": "cnn",
        "hidden_units": (128, 32),
        "precision": "float32",
        "batch_size": 100,
        "max_steps": 2000,
        "learning_rate": 0.1,
        "warmup_steps": 30,
        "momentum": 0.9,
        "batch_norm": True,
        "average": None,
        "label_smoothing": 0.0,
        "shift": 0,
        "rotation": 0.0,
        "eval_interval": 1.0,
        "eval_steps": None,
        "checkpoint_steps": 500,
        "checkpoint_seconds": 60.0,
        "keep_checkpoints": 5,
        "sync_period": None,
        "communication": "auto",
        "microbatches": 4,
        "seed": 0,
        "log_interval": 1.0,
        "allow_cpu": False,
        "skip_corrupt_records": False,
    }


@pytest.mark.parametrize(
    ("train", "evaluate", "job_dir"),
    [
        ("--train-data", "--eval-data", "--job-dir"),
        ("--train_data_paths", "--eval_data_paths", "--output_path"),
        ("--train_data_paths", "--eval_data_paths", "--output-dir"),
    ],
)
def test_spellings(train: str, evaluate: str, job_dir: str) -> None:
    flags = parse([f"{train}=a,b", evaluate, "gs://c/eval.tfr.gz", job_dir, "out/"], {})
    assert (flags.train_data, flags.eval_data, flags.job_dir) == (("a", "b"), ("gs://c/eval.tfr.gz",), "out/")
    assert flags_of(flags).job_dir == "out"


def test_job_dir_defaults_to_output() -> None:
    assert parse([], {"SCALETIER_DATA": "d"}).job_dir == "output"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--train-data is missing"),
        (["--train-data", "a"], "--eval-data is missing"),
        (["--train-data", ",", "--eval-data", "b"], "--train-data is missing"),
        (["--model", "rnn"], "invalid choice: 'rnn' (choose from 'cnn', 'mlp')"),
        (["--batch-size", "0"], "--batch-size: 0 is too low; it must be at least 1"),
        (["--learning-rate", "nan"], "--learning-rate: nan must be above 0"),
        (["--hidden-units", "128,x"], "--hidden-units: 'x' is not a whole number"),
        (["--momentum", "1"], "--momentum: 1 must be from 0 to below 1"),
        (["--warmup-steps", "0"], "--warmup-steps: 0 is too low; it must be at least 1"),
        (["--average", "1"], "--average: 1 must be from 0 to below 1"),
        (["--label-smoothing", "1"], "--label-smoothing: 1 must be from 0 to below 1"),
        (["--shift", "-1"], "--shift: -1 is too low; it must be at least 0"),
        (["--rotation", "181"], "--rotation: 181 must be from 0 to 180"),
        (["--max-steps", "many"], "--max-steps: 'many' is not a whole number"),
        (["--batch", "5"], "unrecognized arguments: --batch 5"),
    ],
)
def test_a_wrong_call_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        parse(arguments, {})
    stderr = capsys.readouterr().err
    assert error.value.code == 2
    assert message in stderr
    assert stderr.startswith("error: ")
    assert stderr.count("\n") == 1


def test_gradients_are_clipped_only_with_several_replicas() -> None:
    """Gradients of a single replica, also on several hosts, are not clipped."""
    from trainer.task import job

    optimizer = job(parse([], ENVIRON)).optimizer
    assert [optimizer(replicas).global_clipnorm for replicas in (1, 2, 20)] == [None, 1.0, 1.0]


@pytest.mark.parametrize(
    ("flags", "replicas", "decay"),
    [
        ([], 1, 0.98),
        (["--max-steps=200"], 1, 0.9),
        (["--max-steps=200"], 5, 0.5),
        (["--max-steps=100"], 5, 0.0),
        (["--average=0.5"], 1, 0.5),
        (["--average=0"], 1, 0.0),
        (["--model=mlp"], 1, 0.0),
    ],
)
def test_weights_are_averaged_over_a_twentieth_of_the_job_at_most(flags: list[str], replicas: int, decay: float) -> None:
    from trainer.task import job

    optimizer = job(parse(flags, ENVIRON)).optimizer(replicas)
    assert (optimizer.use_ema, optimizer.ema_momentum) == (decay > 0, pytest.approx(decay))
