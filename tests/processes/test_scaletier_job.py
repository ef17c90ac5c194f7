"""A whole job in one process: an error is one line, and a damaged or ended job resumes."""

from __future__ import annotations

import functools
import json
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from loopback import METRIC

import scaletier
from scaletier.checkpoint import TrainingState
from scaletier.data import BatchSource
from scaletier.evaluation import make_evaluate
from scaletier.functional_model import FunctionalModel
from scaletier.job import JobError
from scaletier.tensorflow_setup import import_tensorflow

tf = import_tensorflow()
import keras  # noqa: E402 - TensorFlow imports it, without its log messages
from keras import layers  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
INPUTS = np.random.default_rng(3).normal(size=(24, 3)).astype(np.float32)
TARGETS = INPUTS @ np.array([[1.0], [-2.0], [0.5]], np.float32)
Main = Callable[..., int]


def dataset(*parts: Any, batch: int = 4) -> Any:
    return tf.data.Dataset.from_tensor_slices(parts or (INPUTS, TARGETS)).batch(batch)


def keyword_optimizer(*, replicas: int) -> Any:
    raise AssertionError(replicas)


def make_model() -> Any:
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, name="out")], name="line")


def make_pair() -> Any:
    inputs = keras.Input((3,))
    return keras.Model(inputs, [keras.layers.Dense(1, name=name)(inputs) for name in ("first", "second")], name="pair")


def pair_of_datasets(inputs: Any, first: Any, second: Any) -> Any:
    return inputs, (first, second)


def job(**settings: Any) -> scaletier.Job:
    return scaletier.Job(**{"model": make_model, "data": dataset(), "loss": "mse", "optimizer": "sgd", **settings})


@pytest.fixture
def main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Main:
    """Run a job in this process; return its exit code."""
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    return lambda program, *flags: scaletier.main(program, [f"--job-dir={tmp_path}", "--max-steps=4", *flags])


class Subclassed(keras.Model):  # type: ignore[misc]
    """A model without `build`, whose variables are created by its first data."""

    def __init__(self) -> None:
        super().__init__(name="subclassed")
        self.layer = keras.layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        return self.layer(inputs)


class Stepped(Subclassed):
    """A model with a training step of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "stepped"

    def train_step(self, data: Any) -> Any:
        return {"loss": data[0]}


class EachSample(Subclassed):
    """A model with a metric that has a number for each sample."""

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return {"each": y_pred[:, 0]}


def endless_data() -> Any:
    return dataset().repeat()


def short_data() -> Any:
    return tf.data.Dataset.from_tensors((INPUTS[:4], TARGETS[:3]))


def unbatched_data() -> Any:
    return tf.data.Dataset.from_tensors((tf.constant(1.0), tf.constant(1.0)))


def shapeless_data() -> Any:
    return tf.data.Dataset.from_generator(lambda: iter([(INPUTS, TARGETS)]), output_types=(tf.float32, tf.float32))


def failing_data() -> Any:
    return tf.data.TextLineDataset("/nowhere/file").batch(4).map(lambda line: (line, line))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no data": ({"data": None}, "the job has no data: pass Job(data=…), a tf.data.Dataset of batches or a function"),
    "no dataset": (
        {"data": lambda: INPUTS},
        "the job's data is of type numpy.ndarray; valid is a tf.data.Dataset of batches, or a function that makes one",
    ),
    "no pair": (
        {"data": lambda: tf.data.Dataset.from_tensor_slices(INPUTS).batch(4)},
        "the job's data has no targets; valid are elements (inputs, targets)",
    ),
    "four of them": (
        {"data": lambda: tf.data.Dataset.from_tensors((INPUTS,) * 4)},
        "the data's elements are a tuple of 4; valid are inputs, (inputs, targets) and (inputs, targets, sample_weight)",
    ),
    "other sizes": (
        {"data": short_data},
        "a batch of the job's data has parts of 3, 4 samples. Valid: the same number of inputs, targets and weights",
    ),
    "no batches": (
        {"data": unbatched_data},
        "the job's data has a single number in place of one for each sample: add .batch(…)",
    ),
    "no targets": (
        {"data": lambda: dataset().map(lambda inputs, _: (inputs, None))},
        "the job's data has no targets; valid are elements (inputs, targets)",
    ),
    "no shapes": (
        {"data": shapeless_data},
        "the job's data does not say how many dimensions it has; give from_generator an output_signature",
    ),
    "no files": ({"data": lambda: tf.data.Dataset.list_files("/nowhere/*.tfrecord")}, "the job's data cannot be made: "),
    "empty": ({"data": lambda: dataset().take(0)}, "the job's data has no batch: it ends before the first one"),
    "unreadable": ({"data": failing_data}, "the job's data cannot be read: /nowhere/file; No such file or directory"),
    "empty eval_data": (
        {"eval_data": lambda: dataset().take(0)},
        "the job's eval_data has no batch: it ends before the first one",
    ),
    "endless eval_data": ({"eval_data": endless_data}, "the job's eval_data has no end; pass a dataset without .repeat()"),
    "other eval_data": (
        {"eval_data": lambda: dataset(INPUTS[:, :2], TARGETS)},
        "the model line does not take inputs of eval_data of float32 [?, 2]: ",
    ),
    "other targets to evaluate by": (
        {"eval_data": lambda: dataset(INPUTS, np.zeros((24, 7), np.float32))},
        "the loss does not fit: the model gives float32 [?, 1], the targets of eval_data are float32 [?, 7]: ",
    ),
    "no model": ({"model": None}, "the job has no model: pass Job(model=…), a Keras 3 model or a function that makes one"),
    "a number for a model": ({"model": 5}, "the model is of type int; valid is a Keras 3 model"),
    "a model as a function of its inputs": (
        {"model": lambda inputs: inputs},
        "the job's model is a function of an argument; valid is one of nothing, which makes a Keras model",
    ),
    "a layer": (
        {"model": lambda: keras.layers.Dense(1, name="only")},
        "the model is of type keras.src.layers.core.dense.Dense; valid is a Keras 3 model",
    ),
    "nothing to train": (
        {"model": lambda: keras.Sequential([keras.Input((3,)), keras.layers.Flatten()], name="flat")},
        "the model flat has no variable to train",
    ),
    "other inputs": (
        {"model": lambda: keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)], name="five")},
        "the model five does not take inputs of float32 [?, 3]: ",
    ),
    "a loss that does not fit": (
        {"data": lambda: dataset(INPUTS, np.zeros((24, 7), np.float32)), "loss": "categorical_crossentropy"},
        "the loss does not fit: the model gives float32 [?, 1], the targets are float32 [?, 7]: ",
    ),
    "a loss by name that would be spread": (
        {"data": lambda: dataset(INPUTS, np.zeros((24, 7), np.float32)), "loss": "mse", "metrics": ()},
        "the loss does not fit: the model gives float32 [?, 1], the targets are float32 [?, 7]: mean_squared_error compares "
        "elementwise, so both must have one shape",
    ),
    "a loss of Keras that would be spread": (
        {"data": lambda: dataset(INPUTS, np.zeros((24, 2, 3), np.float32)), "loss": keras.losses.Huber(), "metrics": ()},
        "the loss does not fit: the model gives float32 [?, 1], the targets are float32 [?, 2, 3]: huber compares ",
    ),
    "a loss of another output": (
        {"loss": {"other": "mse"}},
        "the loss does not fit: the model gives float32 [?, 1], the targets are float32 [?, 1]: ",
    ),
    "unknown loss": ({"loss": "least_squares"}, "the loss does not fit: the model gives float32 [?, 1], "),
    "unknown metric": ({"metrics": ["precise"]}, "the metrics do not fit: the model gives float32 [?, 1], "),
    "a metric of another output": (
        {
            "model": make_pair,
            "metrics": {"other": ["mae"]},
            "data": lambda: dataset(INPUTS, TARGETS, TARGETS).map(pair_of_datasets),
        },
        "the metrics are invalid: the model pair has no output 'other'. Valid: first, second",
    ),
    "unknown optimizer": ({"optimizer": "quick"}, "the optimizer is invalid: Could not interpret optimizer identifier"),
    "an optimizer by a keyword": (
        {"optimizer": keyword_optimizer},
        "keyword_optimizer needs replicas, which scaletier does not pass. Valid: at most one positional argument, and defaults",
    ),
    "data of two arguments": (
        {"data": lambda context, folder: dataset()},
        "<lambda> needs context, folder, which scaletier does not pass. Valid: at most one positional argument, and defaults",
    ),
    "no optimizer": ({"optimizer": lambda: 5}, "the optimizer is invalid: "),
    "a metric for each sample": (
        {"model": EachSample},
        "the metric each is invalid: its shape is (None,). Valid: one number, or, unless it is the loss, an array of fixed",
    ),
    "a metric that does not fit": (
        {"metrics": ["top_k_categorical_accuracy"], "data": lambda: dataset(INPUTS, TARGETS[:, 0])},
        "the metrics do not fit: the model gives float32 [?, 1], the targets are float32 [?]: ",
    ),
    "a loss of no weight": (
        {"loss": lambda targets, outputs: tf.reduce_mean(targets, -1)},
        "the loss of the model line does not depend on any of its weights: nothing would train",
    ),
    "nothing to serve": (
        {"serving": lambda predict: predict},
        "the job's serving returned a function; valid is a tf.function with an input_signature",
    ),
    "a step of its own": (
        {"model": Stepped},
        "the model stepped is invalid: its class Stepped overrides train_step, which scaletier does not call. Valid: ",
    ),
    "no loss": ({"loss": None}, "the job has no loss: compile the model with one, model.compile(loss=…), or pass Job(loss=…)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_invalid_job_is_one_line_and_exit_code_2(
    case: str, main: Main, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings, message = WRONG[case]
    assert main(job(**settings)) == 2
    stderr = capfd.readouterr().err
    assert stderr.startswith(f"error: {message}")
    assert stderr.count("\n") == 1
    assert not (tmp_path / "checkpoints").exists()


def test_an_evaluator_without_eval_data_reports_it_and_waits(
    main: Main, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    handlers = queue.SimpleQueue[Callable[[], None]]()
    monkeypatch.setenv("TF_CONFIG", json.dumps({"task": {"type": "evaluator", "index": 1}}))
    monkeypatch.setattr("signal.signal", lambda number, handler: handlers.put(handler))
    ending = threading.Timer(0.2, lambda: handlers.get()())
    ending.start()
    assert main(job()) == 0
    ending.join()
    assert capfd.readouterr().out == "Idle [evaluator/1]: the job has no eval_data; this one waits for the job's end\n"


def test_a_checkpoint_of_another_job_is_refused_by_its_first_difference(
    main: Main, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def make_wider() -> Any:
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="out")], name="wide")

    def make_other() -> Any:
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, name="in")], name="other")

    assert main(job()) == 0
    capfd.readouterr()
    for model_function, targets, difference in (
        (make_wider, np.hstack([TARGETS, TARGETS]), "wide has variable out/kernel (3, 2), it holds it as (3, 1)"),
        (make_other, TARGETS, "other has variable in/kernel (3, 1), it has none"),
    ):
        assert main(job(model=model_function, data=dataset(INPUTS, targets))) == 2
        assert capfd.readouterr().err == (
            f"error: checkpoint {tmp_path}/checkpoints/model-4 is of another model: {difference}; "
            "pass another --job-dir, or the checkpoint's model\n"
        )


def damage(tmp_path: Path, step: int) -> None:
    (data,) = tmp_path.glob(f"checkpoints/model-{step}.data-*")
    data.write_bytes(data.read_bytes()[:20])


def test_a_damaged_checkpoint_is_replaced_by_the_previous_one(
    main: Main, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(job()) == 0
    assert main(job(), "--max-steps=8") == 0
    damage(tmp_path, 8)
    capfd.readouterr()
    assert main(job(), "--max-steps=12") == 0
    lines = capfd.readouterr().out.splitlines()
    (passed,) = [line for line in lines if "cannot be read" in line]
    assert passed.startswith(f"checkpoint {tmp_path}/checkpoints/model-8 cannot be read: ")
    assert passed.endswith("; continues from an older one")
    assert f"Resuming from {tmp_path}/checkpoints/model-4, step 4" in lines
    assert (tmp_path / "checkpoints/model-12.index").exists()
    damage(tmp_path, 12)
    for step in (4, 8):
        (tmp_path / f"checkpoints/model-{step}.index").unlink(missing_ok=True)
    assert main(job(), "--max-steps=12") == 2
    stderr = capfd.readouterr().err
    assert re.fullmatch(rf"error: checkpoint {tmp_path}/checkpoints/model-\d+ cannot be read: .*\n", stderr)


@pytest.mark.parametrize("torn", ["", 'model_checkpoint_path: "model-', None], ids=["empty", "cut short", "gone"])
def test_checkpoints_are_found_without_tensorflow_s_list(
    main: Main, tmp_path: Path, capfd: pytest.CaptureFixture[str], torn: str | None
) -> None:
    assert main(job()) == 0
    assert main(job(), "--max-steps=12") == 0
    checkpoint_list = tmp_path / "checkpoints/checkpoint"
    if torn is None:
        checkpoint_list.unlink()
    else:
        checkpoint_list.write_text(torn)
    capfd.readouterr()
    assert main(job(), "--max-steps=16", "--keep-checkpoints=2") == 0
    assert f"Resuming from {tmp_path}/checkpoints/model-12, step 12" in capfd.readouterr().out
    assert sorted(path.stem for path in tmp_path.glob("checkpoints/*.index")) == ["model-12", "model-16"]


def test_a_damaged_checkpoint_stops_neither_export_nor_evaluator(
    main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(job()) == 0
    assert main(job(), "--max-steps=8") == 0
    damage(tmp_path, 8)
    capfd.readouterr()
    assert scaletier.export(job(), [f"--job-dir={tmp_path}"]) == 0
    passed, exported = capfd.readouterr().out.splitlines()
    assert passed.endswith("; continues from an older one")
    assert exported.startswith(f"{tmp_path}/export/Servo/")
    handlers = list[Callable[[], None]]()
    monkeypatch.setenv("TF_CONFIG", json.dumps({"task": {"type": "evaluator", "index": 0}}))
    monkeypatch.setattr("signal.signal", lambda number, handler: handlers.append(handler))
    monkeypatch.setattr("scaletier.evaluation.say", lambda line: (print(line), line.endswith("the next one") and handlers[0]()))
    assert main(job(eval_data=dataset()), "--eval-interval=0.1") == 0
    assert re.search(
        r"^checkpoint \S+/model-8 cannot be read: .*; waits for the next one$", capfd.readouterr().out, re.MULTILINE
    )


def valid_then_invalid(valid: Any, invalid: Any, batches: int = 400) -> Any:
    """Yield N valid batches, then invalid ones."""
    return tf.data.Dataset.from_tensors(valid).repeat(batches).concatenate(tf.data.Dataset.from_tensors(invalid).repeat())


def generated() -> Any:
    def batches() -> Any:
        for _ in range(400):
            yield INPUTS, TARGETS
        raise KeyError("the source is gone")

    return tf.data.Dataset.from_generator(
        batches, output_signature=(tf.TensorSpec([None, 3], tf.float32), tf.TensorSpec([None, 1], tf.float32))
    )


def classes() -> Any:
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])


KINDS = np.zeros(24, np.int64)
CROSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
LATE: dict[str, tuple[dict[str, Any], str]] = {
    "a label that is no class": (
        {"model": classes, "data": lambda: valid_then_invalid((INPUTS, KINDS), (INPUTS, KINDS + 2)), "loss": CROSS},
        "Received a label value of 2 which is outside the valid range of [0, 2)",
    ),
    "a program's own error": ({"data": generated}, "the source is gone"),
}


@pytest.mark.parametrize("case", LATE)
def test_a_late_invalid_batch_is_one_line_and_training_is_saved(
    case: str, main: Main, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings, message = LATE[case]
    assert main(job(**settings), "--max-steps=5000", "--checkpoint-steps=100000") == 2
    output = capfd.readouterr()
    *_, last = output.err.splitlines()
    assert last.startswith("error: a batch of the job cannot be made, or does not go through its model: ")
    assert message in last
    assert "Traceback" not in output.err
    saved = re.search(r"^A checkpoint of step (\d+) is saved$", output.out, re.MULTILINE)
    assert saved
    assert 100 < int(saved[1]) <= 400
    assert (tmp_path / f"checkpoints/model-{saved[1]}.index").exists()


def test_on_data_error_replaces_the_message(main: Main, capfd: pytest.CaptureFixture[str]) -> None:
    settings, _ = LATE["a label that is no class"]
    assert main(job(**settings, on_data_error=lambda error: f"by {type(error).__name__}"), "--max-steps=5000") == 2
    assert capfd.readouterr().err.splitlines()[-1] == "error: by InvalidArgumentError"


class ReservedNames(keras.Model):  # type: ignore[misc]
    """A layer whose variables have the names of other checkpoint entries."""

    def __init__(self) -> None:
        super().__init__(name="odd")
        names = ("data_begin", "data_of", "global_step", "replicas", "root", "save_counter")
        self.parts = [self.add_weight(name=name, shape=(3, 1), initializer="zeros") for name in names]

    def call(self, inputs: Any) -> Any:
        return sum(inputs @ part for part in self.parts)


def test_variables_with_reserved_names_are_restored(main: Main, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(job(model=ReservedNames)) == 0
    assert main(job(model=ReservedNames), "--max-steps=8") == 0
    assert f"Resuming from {tmp_path}/checkpoints/model-4, step 4" in capfd.readouterr().out
    tensors_by_name = {key.partition("/")[0]: value for key, value in tensors(tmp_path, 8).items()}
    names = ("data_begin:", "data_of:", "global_step:", "replicas:", "root:", "save_counter:")
    assert all(tensors_by_name[name].any() for name in names)


def test_unwritable_folders_are_one_line_and_summaries_end_no_job(
    main: Main, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "summaries").write_text("a file")
    (tmp_path / "export").write_text("a file")
    assert main(job(eval_data=dataset())) == 2
    output = capfd.readouterr()
    assert output.out.count(f"There are no summaries from here on: {tmp_path}/summaries cannot be written to: ") == 1
    assert "Final metrics after 4 steps, loss: " in output.out
    assert output.err.startswith(f"error: {tmp_path}/export/Servo cannot be written to: ")
    assert output.err.endswith("; make room there, and run the job again\n")
    for file in tmp_path.glob("checkpoints/*"):
        file.unlink()
    (tmp_path / "checkpoints").rmdir()
    (tmp_path / "checkpoints").write_text("a file")
    assert main(job()) == 2
    assert capfd.readouterr().err.startswith(f"error: {tmp_path}/checkpoints cannot be written to: ")


def test_an_optimizer_function_with_a_required_argument_gets_the_replica_count(main: Main) -> None:
    arguments = list[Any]()
    for function in (
        lambda rate=0.25: arguments.append(rate),
        lambda replicas: arguments.append(replicas),
        functools.partial(lambda first, second=0.5: arguments.append((first, second)), 0.125),
    ):
        assert main(job(optimizer=function)) == 2
    assert arguments == [0.25, 1, (0.125, 0.5)]
    assert main(job(optimizer=keras.optimizers.Adam)) == 0


@pytest.mark.parametrize("serialize", [False, True])
def test_a_function_returns_the_data_of_each_replica(serialize: bool) -> None:
    def make(context: Any) -> Any:
        return tf.data.Dataset.range(10 * context.input_pipeline_id, 10 * context.input_pipeline_id + 2).batch(2)

    source = BatchSource(make, serialize=serialize)
    assert [next(iter(source.training_batches(replica, 3))).numpy().tolist() for replica in range(3)] == [
        [0, 1],
        [10, 11],
        [20, 21],
    ]
    assert next(iter(source.training_batches_on_device(2, 3))).numpy().tolist() == [20, 21]
    shared = BatchSource(tf.data.Dataset.range(8).batch(2), serialize=serialize)
    assert [next(iter(shared.training_batches(replica, 3))).numpy().tolist() for replica in range(3)] == [
        [0, 1],
        [2, 3],
        [4, 5],
    ]


def read_batches(dataset: Any, batches: int) -> list[Any]:
    return [batch.numpy().tolist() for batch in dataset.take(batches)]


def shuffled() -> Any:
    return tf.data.Dataset.range(14).shuffle(14, seed=3).batch(2)


UNBOUNDED = {
    "a pass": shuffled,
    "without end": lambda: shuffled().repeat(),
    "of unknown size": lambda: shuffled().filter(lambda batch: True),
    "of a replica": lambda context: shuffled(),
}


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("kind", UNBOUNDED)
def test_data_continues_at_a_step_like_an_unbroken_run(kind: str, replicas: int) -> None:
    """A pass is 7 batches; in each pass a replica gets other ones."""
    all_batches = read_batches(BatchSource(UNBOUNDED[kind]).training_batches(replicas - 1, replicas), 40)
    assert all_batches[:7] != all_batches[7:14]
    for step in (0, 1, 5, 13, 14, 33):
        source, begin = BatchSource(UNBOUNDED[kind]), step // replicas
        assert read_batches(source.training_batches(replicas - 1, replicas, step), 7) == all_batches[begin : begin + 7]
        assert read_batches(source.training_batches_on_device(replicas - 1, replicas, step), 1) == [all_batches[begin]]


@pytest.mark.parametrize("data", [dataset, lambda context: dataset()])
def test_batches_are_made_before_they_are_needed(data: Any) -> None:
    assert type(BatchSource(data).training_batches(1, 2)).__name__ == "_PrefetchDataset"


def shared_batch(size: int) -> Callable[[Any], Any]:
    return lambda context: dataset(batch=context.get_per_replica_batch_size(size)).filter(lambda *_: True)


def test_a_batch_that_the_replicas_cannot_share_is_refused_with_a_size_that_they_can() -> None:
    source = BatchSource(shared_batch(8))
    with pytest.raises(JobError, match=r"3 replicas cannot share a batch of 8 evenly\. Valid: a multiple of 3, such as 9$"):
        source.training_batches(0, 3)
    source = BatchSource(lambda context: dataset().unbatch().batch(context.get_per_replica_batch_size(8), drop_remainder=True))
    assert next(iter(source.training_batches_on_device(1, 4)))[0].shape == (2, 3)


@pytest.mark.parametrize(
    ("momentum", "steps", "reported"), [(0.9, 40, False), (0.75, 4, False), (0.9, 4, True), (1.0, 4, True)]
)
@pytest.mark.parametrize(("replicas", "part"), [(1, "first ones"), (2, "last tenth")])
def test_averages_over_more_steps_than_the_job_has_are_reported(
    momentum: float, steps: int, reported: bool, replicas: int, part: str
) -> None:
    optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=momentum)
    line = FunctionalModel(job(optimizer=optimizer), dataset().element_spec, 0, replicas).ema_warning(replicas * steps)
    span = {0.9: "10", 1.0: "1,000,000,000"}.get(momentum)
    expected = (
        f"ema_momentum={momentum:g} averages weights over {span} steps, and each replica takes 4: the averages are mostly of "
        f"its {part}. Valid: at most 0.75"
    )
    assert line == (expected if reported else None)


def test_averages_are_reported_before_training(main: Main, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(job(optimizer=keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9))) == 0
    out = capfd.readouterr().out
    assert out.index("ema_momentum=0.9 averages weights over 10 steps") < out.index("Train [")


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_model_that_needs_more_memory_than_the_host_has_is_refused(
    lacking: int, main: Main, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)  # with velocities, a rate, and a count of 64 bits
    needed = 2 * (4 * (4 + 4 + 1) + 8) + 4 * 4
    monkeypatch.setattr("scaletier.training.available_memory", lambda: needed - lacking)
    assert main(job(optimizer=optimizer)) == 2 * lacking
    err = capfd.readouterr().err
    assert err.startswith("error: the model line is invalid: master/0 needs at least 0 MB of memory to train it") == bool(
        lacking
    )
    assert err.count("\n") == lacking


def test_memory_is_returned_after_start_and_first_round_before_a_pull_and_after_the_export(
    main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = list[str]()
    monkeypatch.setattr("scaletier.training.give_memory_back", lambda: lines.append("returned"))
    monkeypatch.setattr("scaletier.asynchronous.give_memory_back", lambda: lines.append("pulls"))
    monkeypatch.setattr("scaletier.training.say", lines.append)
    monkeypatch.setattr("scaletier.asynchronous.say", lines.append)
    assert main(job(eval_data=None), "--log-interval=1000") == 0
    words = [line.split()[0] for line in lines]
    assert words[:3] == ["returned", "Train", "returned"]
    assert words[words.index("Exporting") - 2 :] == ["pulls", "returned", "Exporting", "Final"]


def test_finished_passes_are_not_read_again() -> None:
    read = list[int]()

    def data() -> Any:
        numbers = tf.data.Dataset.range(7)
        observed = numbers.map(lambda one: tf.numpy_function(lambda at: (read.append(at), at)[1], [one], tf.int64))
        return observed.map(lambda one: tf.ensure_shape(one, [])).batch(1)

    source = BatchSource(data)
    read.clear()
    assert read_batches(source.training_batches(step=7 * 1000 + 2), 1) == [[2]]
    assert read[:3] == [0, 1, 2]
    assert len(read) < 2 * 7, "and some batches ahead"


def test_only_batches_of_one_size_are_skipped() -> None:
    source = BatchSource(lambda: tf.data.Dataset.range(5).batch(2))
    assert source.fix_batch_size() == 2
    assert read_batches(source.training_batches_on_device(0, 1, 3), 2) == [[2, 3], [0, 1]]


def test_batches_of_one_size_are_of_dense_or_ragged_tensors() -> None:
    def batches(change: Callable[[Any], Any]) -> BatchSource:
        return BatchSource(dataset(batch=7).map(lambda inputs, targets: (change(inputs), targets, None)))

    for change in (tf.identity, tf.RaggedTensor.from_tensor):
        source = batches(change)
        assert source.fix_batch_size() == 7
        assert [part if part is None else part.shape[0] for part in next(iter(source.training_batches()))] == [7, 7, None]
    for change, kind in ((tf.sparse.from_dense, "SparseTensor"), (lambda inputs: {"a": inputs, "b": None}, "NoneType")):
        line = rf"^the job's data is invalid with --strategy model-parallel: a batch has a part of type {kind}\. Valid: dense "
        with pytest.raises(JobError, match=line):
            batches(change).fix_batch_size()


def test_other_data_starts_from_the_beginning_and_is_reported(
    main: Main, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data is compared without being copied."""
    monkeypatch.setattr(tf.raw_ops, "DatasetToGraphV2", None)
    begins = []
    for steps, size in ((3, 4), (5, 2), (6, 2)):
        assert main(job(data=lambda size=size: dataset(INPUTS, TARGETS, batch=size)), f"--max-steps={steps}") == 0
        tensors_by_name = {key.partition("/")[0]: value for key, value in tensors(tmp_path, steps).items()}
        begins.append((int(tensors_by_name["data_begin"]), "The data starts from its beginning" in capfd.readouterr().out))
    assert begins == [(0, False), (3, True), (3, False)]


def test_a_stopped_chief_breaks_off_its_evaluation(
    monkeypatch: pytest.MonkeyPatch, main: Main, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    handlers, batches = list[Callable[[], None]](), list[int]()

    class StopsAfterThreeBatches:
        def on_batch(self, *_: Any) -> None:
            batches.append(len(batches))
            if len(batches) == 3:
                handlers[0]()

        def on_end(self, *_: Any) -> None:
            raise AssertionError("it was not evaluated")

    monkeypatch.setattr("signal.signal", lambda number, handler: handlers.append(handler))
    assert main(job(eval_data=dataset(), eval_callback=StopsAfterThreeBatches), "--eval-steps=1", "--max-steps=1000") == 143
    assert len(batches) == 3
    output = capfd.readouterr()
    assert "Eval" not in output.out
    assert re.fullmatch(r"Ends by SIGTERM at step (\d+); a checkpoint is saved\n", output.err)
    assert [*tmp_path.glob("checkpoints/model-*.index")]


def test_another_optimizer_starts_from_scratch_and_is_reported(main: Main, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(job()) == 0
    assert main(job(optimizer="adam"), "--max-steps=8") == 0
    assert re.search(
        r"model-4 has no optimizer/\S+: the optimizer and random numbers start from scratch$",
        capfd.readouterr().out,
        re.MULTILINE,
    )


def test_another_optimizer_leaves_frozen_weights_of_float64(main: Main, tmp_path: Path) -> None:
    def make() -> Any:
        frozen = layers.Dense(2, trainable=False, dtype="float64", name="frozen")
        return keras.Sequential([keras.Input((3,)), frozen, layers.Dense(1, name="out")])

    assert main(job(model=make)) == 0
    assert main(job(model=make, optimizer="adam"), "--max-steps=8", "--seed=1") == 0
    readers = [tf.train.load_checkpoint(str(tmp_path / f"checkpoints/model-{step}")) for step in (4, 8)]
    first, second = (reader.get_tensor("frozen:kernel/.ATTRIBUTES/VARIABLE_VALUE") for reader in readers)
    assert first.dtype == np.float64
    np.testing.assert_array_equal(second, first)


class Quiet(layers.Layer):  # type: ignore[misc]
    """A layer with a generator that draws nothing from it."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.random.SeedGenerator(1)

    def call(self, inputs: Any) -> Any:
        return inputs


@pytest.mark.parametrize("kind", [lambda: layers.Dropout(0.5), Quiet])
def test_an_added_layer_without_weights_starts_from_scratch_and_is_reported(
    kind: Callable[[], Any], main: Main, capfd: pytest.CaptureFixture[str]
) -> None:
    def make_with_layer() -> Any:
        return keras.Sequential([keras.Input((3,)), kind(), layers.Dense(1, name="out")], name="line")

    assert main(job()) == 0
    assert main(job(model=make_with_layer), "--max-steps=8") == 0
    assert "seed_generator_state: the optimizer and random numbers start from scratch" in capfd.readouterr().out


def test_the_learning_rate_is_the_job_s_not_the_checkpoint_s(main: Main, tmp_path: Path) -> None:
    """The loss is the weight, so it falls by the rate plus half of the last change."""

    def last_weight() -> float:
        newest = tf.train.latest_checkpoint(str(tmp_path / "checkpoints"))
        return float(tf.train.load_checkpoint(newest).get_tensor("out:kernel/.ATTRIBUTES/VARIABLE_VALUE").item())

    def falling(rate: float) -> scaletier.Job:
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", name="out")
        model = keras.Sequential([keras.Input((1,)), layer], name="weight")
        ones = dataset(np.ones((24, 1), np.float32), TARGETS)
        return job(
            model=model, data=ones, loss=lambda _, outputs: outputs, optimizer=keras.optimizers.SGD(rate, 0.5, name="sgd")
        )

    assert main(falling(1.0), "--max-steps=1") == 0
    assert last_weight() == -1.0
    assert main(falling(0.25), "--max-steps=2") == 0
    assert last_weight() == -1.0 - 0.25 - 0.5 * 1.0


def test_no_loss_is_printed_if_nothing_is_left_to_train(main: Main, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(job()) == 0
    assert "Final metrics after 4 steps, loss: " in capfd.readouterr().out
    assert main(job()) == 0
    output = capfd.readouterr().out
    assert "Nothing is left to train" in output
    assert "Final metrics" not in output


def make_words() -> Any:
    lookup = keras.layers.StringLookup(vocabulary=["good", "bad"])
    layers = [keras.layers.Embedding(3, 2), keras.layers.Flatten(), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((1,), dtype="string"), lookup, *layers], name="words")


INPUT_WORDS = np.array([["good"], ["bad"]] * 12)


@pytest.mark.parametrize("strategy", ["async", "model-parallel"])
def test_a_model_with_a_lookup_is_refused_on_several_hosts(
    strategy: str, main: Main, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster = {"ps": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], "chief": ["127.0.0.1:3"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}}))
    assert main(job(model=make_words, data=dataset(INPUT_WORDS, TARGETS)), f"--strategy={strategy}") == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: the model words looks words up in a table, which no other host can be given: ")


def test_a_loss_that_is_no_mean_is_refused_on_parts_of_a_model(
    main: Main, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster = {"worker": ["127.0.0.1:2"], "chief": ["127.0.0.1:3"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}}))
    monkeypatch.setattr("scaletier.training.available_memory", lambda: 0)  # no host has the whole model
    total = keras.losses.MeanSquaredError(reduction="sum", name="total")
    assert main(job(loss=total), "--strategy=model-parallel") == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: the loss total is invalid with --strategy model-parallel: its reduction is sum. Valid: ")


def test_a_model_with_a_lookup_is_exported_with_its_vocabulary(main: Main, tmp_path: Path) -> None:
    assert main(job(model=make_words, data=dataset(INPUT_WORDS, TARGETS))) == 0
    (exported,) = (tmp_path / "export/Servo").iterdir()
    ask = tf.saved_model.load(str(exported)).signatures["serving_default"]
    first, second, third = ask(inputs=tf.constant([["good"], ["bad"], ["good"]]))["outputs"].numpy()[:, 0].tolist()
    assert first == third != second


def test_an_export_holds_nothing_of_the_optimizer(main: Main, tmp_path: Path) -> None:
    assert main(job(optimizer="adam")) == 0
    (exported,) = (tmp_path / "export/Servo").iterdir()
    values = [
        shape
        for name, shape in tf.train.list_variables(f"{exported}/variables/variables")
        if name.startswith(("shared", "local"))
    ]
    assert sorted(values) == [[1], [3, 1]]


def frozen(value: float) -> Callable[[], Any]:
    """Return a model of a layer that is not trained, and one that is."""

    def make() -> Any:
        first = layers.Dense(3, kernel_initializer=keras.initializers.Constant(value), name="first", trainable=False)
        return keras.Sequential([keras.Input((3,)), first, layers.Dense(1, name="out")], name="frozen")

    return make


def test_frozen_variables_are_saved_and_restored_but_not_exchanged(main: Main, tmp_path: Path) -> None:
    network = FunctionalModel(job(model=frozen(1.0)), dataset().element_spec, 0)
    assert [spec.name for spec in network.constants] == ["first/kernel", "first/bias"]
    assert [spec.name for spec in network.shared] == ["out/kernel", "out/bias"]
    assert main(job(model=frozen(1.0))) == 0
    assert main(job(model=frozen(2.0), optimizer="adam"), "--max-steps=8") == 0
    tensors_by_name = {key.partition("/")[0]: value for key, value in tensors(tmp_path, 8).items()}
    assert tensors_by_name["first:kernel"].tolist() == np.ones((3, 3)).tolist()


def test_an_adapted_layer_is_restored_on_resume(main: Main, tmp_path: Path) -> None:
    def adapted_model(scale: float) -> Callable[[], Any]:
        def make() -> Any:
            norm = layers.Normalization()
            norm.adapt(INPUTS * scale)
            return keras.Sequential([keras.Input((3,)), norm, layers.Dense(1, kernel_initializer="ones")], name="norm")

        return make

    same = keras.optimizers.SGD(0.0)
    assert main(job(model=adapted_model(1.0), optimizer=same)) == 0
    assert main(job(model=adapted_model(5.0), optimizer=same), "--max-steps=8") == 0
    first, second = (
        tf.saved_model.load(str(path)).signatures["serving_default"](inputs=tf.constant(INPUTS))["outputs"]
        for path in sorted((tmp_path / "export/Servo").iterdir())
    )
    np.testing.assert_allclose(first, ((INPUTS - INPUTS.mean(0)) / INPUTS.std(0)).sum(1, keepdims=True), atol=1e-4)
    np.testing.assert_allclose(second, first, atol=1e-5)


def test_a_model_with_another_vocabulary_does_not_resume(main: Main, capfd: pytest.CaptureFixture[str]) -> None:
    def texts(words: str) -> Callable[[], Any]:
        def make() -> Any:
            vectorizer = layers.TextVectorization(output_mode="multi_hot", max_tokens=3)
            vectorizer.adapt(tf.constant([words]))
            return keras.Sequential([keras.Input((1,), dtype="string"), vectorizer, layers.Dense(1)], name="texts")

        return make

    data = dataset(np.array([["a"], ["b"]] * 12), TARGETS)
    assert main(job(model=texts("a a b"), data=data)) == 0
    assert main(job(model=texts("a a a b b c"), data=data), "--max-steps=8") == 0
    assert main(job(model=texts("a b b"), data=data), "--max-steps=12") == 2
    assert capfd.readouterr().err.endswith(
        "/checkpoints/model-8 is invalid: the layers of texts had another vocabulary. Valid: the same vocabulary, or another "
        "--job-dir\n"
    )


def falling(**settings: Any) -> scaletier.Job:
    """Return a job whose gradient and inputs are 1: its weight, and its loss, falls from 0 by 1 in each step."""

    def model() -> Any:
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", name="out")
        return keras.Sequential([keras.Input((1,)), layer])

    ones = dataset(np.ones((24, 1), np.float32), TARGETS)
    optimizer = keras.optimizers.SGD(1.0, **settings)
    return job(model=model, data=ones, eval_data=ones, loss=lambda _, outputs: outputs, optimizer=optimizer)


def exported_weights(folder: Path) -> list[float]:
    """Return the weight of each exported model of `falling`, in the order of their times."""
    signatures = (tf.saved_model.load(str(path)).signatures for path in sorted((folder / "export/Servo").iterdir()))
    return [float(one["serving_default"](inputs=tf.ones([1, 1]))["outputs"][0, 0]) for one in signatures]


def test_averages_are_evaluated_and_exported(main: Main, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The averages by a half of the weights -1, -2, -3, -4 are -1, -1.5, -2.25, -3.125."""
    averaging = falling(use_ema=True, ema_momentum=0.5)
    assert main(averaging, "--eval-steps=2") == 0
    lines = capfd.readouterr().out.splitlines()
    assert "Eval, step 2: loss: -1.500" in lines
    assert lines[-1] == "Final metrics after 4 steps, loss: -3.125"
    assert float(tensors(tmp_path, 4)["out:kernel/.ATTRIBUTES/VARIABLE_VALUE"][0, 0]) == -4.0
    assert scaletier.export(averaging, [f"--job-dir={tmp_path}"]) == 0
    assert exported_weights(tmp_path) == [-3.125] * 2


def test_an_evaluator_evaluates_averages(main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    averaging = falling(use_ema=True, ema_momentum=0.5)
    assert main(averaging) == 0
    handlers, lines = list[Callable[[], None]](), list[str]()

    def record(line: str) -> None:
        lines.append(line)
        if line.startswith("Eval, "):
            handlers[0]()

    monkeypatch.setenv("TF_CONFIG", json.dumps({"task": {"type": "evaluator", "index": 0}}))
    monkeypatch.setattr("signal.signal", lambda _, handler: handlers.append(handler))
    monkeypatch.setattr("scaletier.evaluation.say", record)
    assert main(averaging) == 0
    assert "Eval, step 4: loss: -3.125" in lines


def test_averages_begin_with_the_weights_of_a_checkpoint_without_them(
    main: Main, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """From -4 on, the averages by a half of -5, -6, -7, -8 are -4.5, -5.25, -6.125, -7.0625."""
    assert main(falling()) == 0
    assert main(falling(use_ema=True, ema_momentum=0.5), "--max-steps=8") == 0
    assert "start from scratch" not in capfd.readouterr().out
    assert exported_weights(tmp_path) == [-4.0, -7.0625]


def test_a_subclassed_model_without_build_trains(main: Main, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(job(model=Subclassed, eval_data=dataset(), metrics=["mae"]), "--max-steps=60") == 0
    assert re.search(rf"^Final metrics after 60 steps, loss: {METRIC}, mae: {METRIC}$", capfd.readouterr().out, re.MULTILINE)


def test_an_eval_callback_gets_arrays_of_any_inputs() -> None:
    """Sparse inputs, an optional one that is None, and no targets."""

    class Both(layers.Layer):  # type: ignore[misc]
        def call(self, values: Any, more: Any = None) -> Any:
            self.add_loss(tf.reduce_sum(tf.sparse.to_dense(values)))
            return tf.sparse.to_dense(values)

        def compute_output_spec(self, values: Any, more: Any = None) -> Any:
            return keras.KerasTensor(values.shape, values.dtype)

    def model() -> Any:
        inputs = {"a": keras.Input([3], sparse=True, name="a"), "b": keras.Input([3], optional=True, name="b")}
        return keras.Model(inputs, layers.Dense(1)(Both()(inputs["a"], inputs["b"])))

    data, given = dataset().map(lambda inputs, _: {"a": tf.sparse.from_dense(inputs), "b": None}), list[Any]()
    network = FunctionalModel(scaletier.Job(model, data), data.element_spec, 0)
    callback = SimpleNamespace(on_batch=lambda *parts: given.append(parts))
    assert make_evaluate(network, TrainingState(network), data.take(1), lambda: callback)(lambda: False)
    ((inputs, targets, outputs),) = given
    np.testing.assert_array_equal(inputs["a"], INPUTS[:4])
    assert (inputs["b"], targets, outputs.shape) == (None, None, (4, 1))


@pytest.mark.parametrize(("asked", "length", "said"), [(True, None, True), (True, 1, False), (False, None, False)])
def test_a_line_says_that_xla_compiles_no_step_or_that_a_step_is_a_graph(
    asked: bool, length: int | None, said: bool, main: Main, capfd: pytest.CaptureFixture[str]
) -> None:
    def compiled() -> Any:
        model = keras.Sequential([keras.Input([length, 3]), layers.GlobalAveragePooling1D(), layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=asked, run_eagerly=not asked)
        return model

    data = tf.data.Dataset.from_tensor_slices((INPUTS[:, None], TARGETS)).padded_batch(4, ([length, 3], [1]))
    assert main(scaletier.Job(compiled, data)) == 0
    out = capfd.readouterr().out
    assert ("XLA compiles no step: that takes one process or --strategy sync, one " in out) is said
    assert ("run_eagerly=True has no effect: a step is a graph, and its Python code runs once" in out) is not asked


def test_a_compiled_model_fills_missing_job_settings(main: Main, capfd: pytest.CaptureFixture[str]) -> None:
    def compiled() -> Any:
        model = make_model()
        model.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae"])
        return model

    assert main(scaletier.Job(compiled, dataset(), eval_data=dataset()), "--max-steps=60") == 0
    final = re.search(r"^Final metrics after 60 steps, loss: (\S+), mae: (\S+)$", capfd.readouterr().out, re.MULTILINE)
    assert final
    assert float(final[1]) < 1.0


def tensors(folder: Path, step: int) -> dict[str, Any]:
    reader = tf.train.load_checkpoint(str(folder / f"checkpoints/model-{step}"))
    kinds = reader.get_variable_to_dtype_map()
    return {key: reader.get_tensor(key) for key, kind in kinds.items() if kind.is_floating or kind.is_integer}


def test_the_library_is_imported_without_tensorflow() -> None:
    code = "import scaletier, sys; print({'tensorflow', 'keras', 'numpy'} & {*sys.modules})"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "set()\n"
