"""`scaletier.fit` refuses invalid training in one line; lengths of its jobs and epochs."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import math
import os
import re
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock, call

import numpy as np
import pytest
from waiting import limit

import scaletier
from scaletier.callbacks import Callbacks
from scaletier.checkpoint import TrainingState
from scaletier.data import BatchSource, add_class_weights
from scaletier.fit import _dataset, _map_in_order
from scaletier.flags import flags_of
from scaletier.functional_model import FunctionalModel
from scaletier.job import Job, JobError
from scaletier.tensorflow_setup import StopRequest, import_tensorflow
from scaletier.training import ChiefTasks

tf = import_tensorflow()
import keras  # noqa: E402 - TensorFlow imports it, without its log messages

X, Y = np.ones((8, 3), np.float32), np.ones((8, 1), np.float32)


def model() -> Any:
    compiled = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    compiled.compile(keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 9)), "mse")
    return compiled


def parse(text: str) -> Any:
    return json.loads(text)


def failing() -> Any:
    return parse("no JSON")


AT = failing.__code__.co_firstlineno
IMAGES = np.zeros((8, 8, 8, 3), np.float32)


def cropping() -> Any:
    """Return a model whose random crops have another size if it does not train."""
    crop = keras.layers.RandomCrop(6, 6)
    made = keras.Sequential([keras.Input([8, 8, 3]), crop, keras.layers.Flatten(), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    return made


class Batches(keras.callbacks.Callback):  # type: ignore[misc]
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Never called."""


class Freezes(keras.callbacks.Callback):  # type: ignore[misc]
    def on_train_begin(self, logs: Any = None) -> None:
        self.model.layers[0].trainable = False


class Remakes(keras.callbacks.Callback):  # type: ignore[misc]
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.make_train_function(force=True)


class Schedules(keras.callbacks.Callback):  # type: ignore[misc]
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5)


class Decays(keras.callbacks.Callback):  # type: ignore[misc]
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.optimizer.weight_decay = 0.1


HOOKS = "Valid: on_train_begin, on_train_end, on_epoch_begin, on_epoch_end, on_test_begin, on_test_end"
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a hook of batches": (
        {"callbacks": [keras.callbacks.CSVLogger("none.csv"), Batches()]},
        f"the callback Batches is invalid: it has on_train_batch_end, which is not called. {HOOKS}",
    ),
    "a function of batches": (
        {"callbacks": lambda: [keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: None)]},
        f"the callback LambdaCallback is invalid: it has on_train_batch_begin, which is not called. {HOOKS}",
    ),
    "Keras's own of batches": (
        {"callbacks": [keras.callbacks.TensorBoard()]},
        "the callback TensorBoard is invalid: summaries are automatic, in JOB_DIR/summaries. Valid: fit without it. Run: fab ",
    ),
    "Keras's own that resumes": (
        {"callbacks": keras.callbacks.BackupAndRestore("backup")},
        "the callback BackupAndRestore is invalid: checkpoints and resuming are automatic. Valid: fit without it; --check",
    ),
    "a checkpoint every 9 batches": (
        {"callbacks": [keras.callbacks.ModelCheckpoint("a.keras", save_freq=9)]},
        "the callback ModelCheckpoint is invalid: save_freq=9 counts batches. Valid: save_freq='epoch'",
    ),
    "an argument of Keras's fit": ({"verbose": 0}, "fit has no argument 'verbose'. Valid: model_fn, train_data, "),
    "no callback": ({"callbacks": ["stop"]}, "the callback is invalid: it is of type str. Valid: a keras.callbacks.Callback"),
    "a rate of a schedule": (
        {"callbacks": [keras.callbacks.ReduceLROnPlateau()]},
        "the callback ReduceLROnPlateau is invalid: the optimizer's learning rate is a schedule. Valid: a learning rate that",
    ),
    "layers that a callback freezes": (
        {"callbacks": [Freezes()]},
        "a callback has changed what is trainable, or a setting of the optimizer, when training began. Valid: set them in the",
    ),
    "a train function that a callback makes": (
        {"callbacks": [Remakes()]},
        "a callback is invalid: it has called make_train_function, or fit, which change no step of a job. Valid: one that sets",
    ),
    "a schedule that a callback sets": (
        {"callbacks": [Schedules()]},
        "a callback has changed what is trainable, or a setting of the optimizer, when training began. Valid: set them in the",
    ),
    "a weight decay that a callback sets": (
        {"callbacks": [Decays()]},
        "a callback has changed what is trainable, or a setting of the optimizer, when training began. Valid: set them in the",
    ),
    "no steps": ({"steps": 0}, "steps=0 is invalid. Valid: a whole number of at least 1"),
    "half an epoch": ({"epochs": 0.5}, "epochs=0.5 is invalid. Valid: a whole number of at least 1"),
    "steps and epochs": ({"steps": 9, "epochs": 1}, "steps and epochs are invalid together. Valid: one of them"),
    "epochs without end": (
        {"train_data": lambda: tf.data.Dataset.from_tensors((X, Y)).repeat(), "epochs": 3},
        "epochs=3 is invalid: train_data does not say how many batches it has. Valid: steps, or steps_per_epoch beside it, or "
        "data with .apply(tf.data.experimental.assert_cardinality(n))",
    ),
    "a model's function that fails": (
        {"model_fn": failing},
        f"model_fn failed at {os.path.relpath(__file__)}:{AT + 1}, {os.path.relpath(__file__)}:{AT - 3}: JSONDecodeError: "
        "Expecting value: line 1 column 1 (char 0)",
    ),
    "arrays of other lengths": (
        {"train_data": (X, Y[:4])},
        "the arrays are invalid: they have 4, 8 samples. Valid: the same number in each",
    ),
    "a generator": (
        {"train_data": (batch for batch in [(X, Y)])},
        "the data is of type generator. Valid: arrays, a PyDataset, a tf.data.Dataset, a function that makes one",
    ),
    "a number": (
        {"train_data": 3.0},
        "the data is of type float. Valid: arrays, a PyDataset, a tf.data.Dataset, a function that makes one",
    ),
    "classes of two outputs": (
        {"train_data": lambda: tf.data.Dataset.from_tensors((X, (Y, Y))), "class_weight": {0: 1.0}},
        "class_weight is invalid: the data has no targets of one output, as numbers. Valid: elements (inputs, targets) for",
    ),
    "classes and weights": (
        {"train_data": (X, Y, Y[:, 0]), "class_weight": {0: 1.0}},
        "class_weight is invalid: the data has sample weights. Valid: elements (inputs, targets) for a model with one output",
    ),
    "classes that are no numbers": (
        {"class_weight": {"cat": 1.0}},
        "class_weight={'cat': 1.0} is invalid. Valid: a number for each class, such as {0: 0.5, 1: 3.0}",
    ),
    "classes as a word, beside a dataset": (
        {"train_data": tf.data.Dataset.from_tensors((X, Y)), "class_weight": "balanced"},
        "class_weight='balanced' is invalid. Valid: a number for each class, such as {0: 0.5, 1: 3.0}",
    ),
    "no batch size": ({"batch_size": 0}, "batch_size=0 is invalid. Valid: a whole number of at least 1"),
    "a path": (
        {"train_data": "data.csv"},
        "the data is of type str. Valid: arrays, a PyDataset, a tf.data.Dataset, a function that makes one",
    ),
    "arrays of objects": (
        {"train_data": (X.astype(object), Y)},
        "the arrays are invalid: one is of type object, with elements of type float. Valid: arrays of one type, such as",
    ),
    "arguments as a text": ({"arguments": "--max-steps=1"}, "arguments='--max-steps=1' is invalid. Valid: a list, such as"),
    "validation data of another structure": (
        {"validation_data": (X[:, :2], Y)},
        "the model sequential does not take inputs of eval_data of float32 [?, 2]: ",
    ),
    "a model that only training fits": (
        {"model_fn": cropping, "train_data": (IMAGES, Y), "validation_data": (IMAGES, Y)},
        "the model sequential does not take inputs of eval_data of float32 [?, 8, 8, 3]: ",
    ),
}


@pytest.mark.parametrize(
    "targets", [[2, -1, 1], [[2.0], [-1.0], [1.0]], [1.4, -0.7, 9.0]], ids=["labels", "a column", "rounded"]
)
def test_a_class_without_a_weight_weighs_one(targets: Any) -> None:
    data = tf.data.Dataset.from_tensors((np.zeros((3, 1)), np.asarray(targets)))
    ((_, same, weights),) = add_class_weights(data, {3: 5.0, -1: 3.0})
    np.testing.assert_array_equal(same, targets)
    np.testing.assert_array_equal(weights, [1, 3, 1])


@pytest.mark.parametrize("kind", [bool, int, float])
def test_classes_may_be_one_hot(kind: type) -> None:
    data = tf.data.Dataset.from_tensors((np.zeros((3, 1)), np.asarray([[0, 0, 1], [1, 0, 0], [0, 1, 0]], kind)))
    ((_, _, weights),) = add_class_weights(data, {np.int64(0): 3.0})
    np.testing.assert_array_equal(weights, [1, 3, 1])
    ((_, _, weights),) = add_class_weights(tf.data.Dataset.from_tensors((np.zeros((2, 1)), np.asarray([0, 1], kind))), {1: 3.0})
    np.testing.assert_array_equal(weights, [1, 3])


@pytest.mark.parametrize(
    "given",
    [None, [], one := keras.callbacks.Callback(), [one, None], (one,), [[one]], {one}, lambda: one, lambda: iter([one])],
)
def test_callbacks_are_given_in_any_form_of_keras(given: Any) -> None:
    called = Callbacks(given)
    called.check()
    assert called._callbacks in ([], [one])
    assert bool(called._callbacks) is (given is not None and given != [])


def test_the_state_of_callbacks_is_kept_whatever_they_log() -> None:
    called = Callbacks()
    called.history = keras.callbacks.History()
    called.history.history = {"matrix": [np.eye(2)], "tensor": [tf.constant(2.0)], "other": [ValueError]}
    called._network = cast(FunctionalModel, SimpleNamespace(local=[]))
    called._rate_indices = []
    ((name, state),) = called._callbacks_state()["callbacks"]
    assert (name, state["history"]["matrix"], state["history"]["tensor"]) == ("History", [[[1, 0], [0, 1]]], [2])
    assert "ValueError" in state["history"]["other"][0]


def test_numbers_of_metrics_that_evaluations_alone_have_are_arrays_again() -> None:
    called = Callbacks()
    called.history = keras.callbacks.History()
    stored = {"val_f": [[0.25, 0.5], [1.0, math.nan]], "loss": [1.0, 2.0], "words": [["1"], [None], [[1], [2, 3]]]}
    called._rate_indices = []
    called._restore({"callbacks": [["History", {"history": stored}]], "given_rates": [], "rates": []})
    history = called.history.history
    assert [one.dtype for one in history["val_f"]] == [np.float32, np.float32]
    assert (history["val_f"][0].tolist(), history["loss"]) == ([0.25, 0.5], [1.0, 2.0])
    assert history["words"] == [["1"], [None], [[1], [2, 3]]]


def scaled() -> Any:
    compiled = model()
    compiled.compile(keras.optimizers.LossScaleOptimizer(compiled.optimizer), "mse")
    return compiled


@pytest.mark.parametrize(
    ("make", "hook", "path", "value", "refused"),
    [
        (model, "set_model", "optimizer.clipnorm", 0.1, True),
        (model, "on_train_begin", "optimizer.clipnorm", 0.1, True),
        (model, "on_train_begin", "optimizer.momentum", np.float32(0.5), True),
        (scaled, "on_train_begin", "optimizer.dynamic_growth_steps", 1, True),
        (scaled, "on_train_begin", "optimizer.inner_optimizer.nesterov", True, True),
        (model, "on_train_begin", "optimizer._learning_rate.alpha", 0.5, True),
        (model, "on_train_begin", "optimizer.own_number", 3, False),
    ],
)
def test_a_setting_that_a_callback_changes_is_refused(make: Any, hook: str, path: str, value: Any, refused: bool) -> None:
    class Sets(keras.callbacks.Callback):  # type: ignore[misc]
        def set_model(self, model: Any) -> None:
            super().set_model(model)
            self.set("set_model")

        def on_train_begin(self, logs: Any = None) -> None:
            self.set("on_train_begin")

        def set(self, called: str) -> None:
            *parts, name = path.split(".")
            if called == hook:
                setattr(functools.reduce(getattr, parts, self.model), name, value)

    network = FunctionalModel(Job(make, data := tf.data.Dataset.from_tensors((X, Y))), data.element_spec, 0)
    state, callbacks = TrainingState(network), Callbacks([Sets()])
    network.attach(state.shared, state.local)
    callbacks.check()
    expected = pytest.raises(JobError, match=r"^a callback has changed what is trainable, or a setting")
    with expected if refused else contextlib.nullcontext():
        callbacks.begin(network, state.local, replace(flags_of([]), max_steps=1, eval_steps=1), None)


@pytest.mark.parametrize("name", WRONG)
def test_invalid_training_is_refused_in_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    settings, line = WRONG[name]
    with pytest.raises(SystemExit) as error:
        scaletier.fit(**{"model_fn": model, "train_data": (X, Y), "arguments": [f"--job-dir={tmp_path}"], **settings})
    assert error.value.code == 2
    out, err = capfd.readouterr()
    assert "Train [" not in out
    assert re.search(f"^error: {re.escape(line)}", err, re.MULTILINE), err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("trained", "jobs", "line"),
    [
        ("here", {}, "the job directory here is invalid: a fit of this program has trained into it. Valid: another --job-dir;"),
        ("there", {"worker": ["127.0.0.1:2"], "ps": ["127.0.0.1:3"]}, "fit is invalid a second time: the other processes of"),
    ],
)
def test_a_second_fit_does_not_continue_the_first(
    trained: str, jobs: dict[str, Any], line: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.import_module("scaletier.fit"), "_trained", {trained})
    cluster = {"cluster": {"chief": ["127.0.0.1:1"], **jobs}, "task": {"type": "chief", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster if jobs else {}))
    with pytest.raises(SystemExit) as error:
        scaletier.fit(model, lambda: tf.data.Dataset.from_tensors((X, Y)), arguments=["--job-dir=here"])
    assert error.value.code == 2
    assert capfd.readouterr().err.startswith(f"error: {line}")


def test_arrays_are_tensors_in_the_graph_of_their_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    """An array would become part of the graph, which has at most 2 GB."""
    gather, gathered = tf.gather, list[Any]()
    monkeypatch.setattr(tf, "gather", lambda array, at: gathered.append(array) or gather(array, at))
    importlib.import_module("scaletier.fit")._dataset((X, Y, None), 2, None)
    assert len(gathered) == 2
    assert all(tf.is_tensor(array) for array in gathered)


def test_arrays_are_refused_for_several_processes(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    cluster = {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], "ps": ["127.0.0.1:3"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "ps", "index": 0}}))
    with pytest.raises(SystemExit):
        scaletier.fit(model, lambda: tf.data.Dataset.from_tensors((X, Y)), (X, Y), arguments=[])
    assert capfd.readouterr().err == (
        "error: validation_data is invalid: arrays and PyDatasets are in the memory of one process, and several train. "
        "Valid: a function that makes a tf.data.Dataset\n"
    )


@pytest.mark.parametrize(
    ("arguments", "epochs", "of_epoch", "length", "steps", "every"),
    [
        (["--max-steps=100"], None, None, 40, 100, 40),
        (["--max-steps=100"], 9, 30, 40, 100, 30),
        (["--max-steps=100", "--eval-steps=7"], None, 30, 40, 100, 7),
        (["--max-steps=100"], None, None, 4000, 100, 100),
        (["--max-steps=100"], None, None, None, 100, 10),
        (["--max-steps=3"], None, None, None, 3, 1),
        ([], 3, None, 40, 120, 40),
        ([], 3, 30, 40, 90, 30),
        ([], 3, 30, None, 90, 30),
    ],
)
def test_lengths_of_jobs_and_epochs(
    arguments: list[str], epochs: int | None, of_epoch: int | None, length: int | None, steps: int, every: int
) -> None:
    flags = flags_of(arguments)
    flags = flags if arguments else replace(flags, max_steps=0)
    planned = Callbacks((), epochs, of_epoch).plan(flags, length)
    assert (planned.max_steps, planned.eval_steps) == (steps, every)


def test_batches_are_counted_with_one_process_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def batches() -> Any:
        return tf.data.Dataset.from_tensors((X, Y)).repeat(3).filter(lambda *_: True)

    source = BatchSource(batches)
    assert source.length is None
    planned = Callbacks((), 2).plan(replace(flags_of([]), max_steps=0), source.length, source.count)
    assert (planned.max_steps, planned.eval_steps) == (6, 3)
    assert capfd.readouterr().out.startswith("Counts the batches of train_data by a pass over it; .apply(tf.data.")
    cluster = {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], "ps": ["127.0.0.1:3"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}}))
    monkeypatch.setattr(importlib.import_module("scaletier.fit"), "exit_process", sys.exit)
    with pytest.raises(SystemExit):
        scaletier.fit(model, batches, epochs=2, arguments=[f"--job-dir={tmp_path}"])
    assert capfd.readouterr().err.startswith("error: epochs=2 is invalid: train_data does not say how many batches it has")


def test_a_long_count_is_reported_and_data_that_cannot_be_read_again_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    once = iter([(X, Y)] * 40)
    specs = tf.TensorSpec([8, 3]), tf.TensorSpec([8, 1])
    source = BatchSource(tf.data.Dataset.from_generator(lambda: once, output_signature=specs))
    monkeypatch.setattr("scaletier.data.LOG_SECONDS", 0.0)
    with pytest.raises(JobError, match=r"^the job's data is invalid: it can be read only once, .* Valid: steps_per_epoch, or "):
        source.count()
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "Still counts, 1 batches so far; train_data must end. Valid: steps_per_epoch"


@pytest.mark.parametrize(
    ("steps", "of_epoch", "length", "lines"),
    [
        (100, 50, 40, ["An epoch has 50 steps, and train_data 40 batches: it is repeated within an epoch"]),
        (100, 30, 40, ["An epoch has 30 steps, and train_data 40 batches: it is repeated within an epoch"]),
        (30, 50, 40, []),
        (40, 30, 40, []),
        (100, 20, 40, []),
        (100, 40, 40, []),
        (100, 50, None, []),
    ],
)
def test_data_that_is_repeated_within_an_epoch_is_reported(
    steps: int, of_epoch: int, length: int | None, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Callbacks((), None, of_epoch).plan(flags_of([f"--max-steps={steps}"]), length)
    assert capsys.readouterr().out.splitlines() == lines


@pytest.mark.parametrize(("arguments", "pauses"), [([], False), (["--eval-steps=5"], True)])
def test_the_replicas_continue_before_an_evaluation_unless_it_goes_by_steps(arguments: list[str], pauses: bool) -> None:
    callbacks, order, chief = Callbacks((), None, 5), MagicMock(), ChiefTasks.__new__(ChiefTasks)
    flags = callbacks.plan(flags_of(["--max-steps=20", *arguments]), None)
    callbacks.add = callbacks.end_epoch = order.end_epoch  # type: ignore[method-assign]
    chief._callbacks, chief._flags, chief._evaluate, chief.next_eval_step = callbacks, flags, None, 5
    budget = SimpleNamespace(allow_until=order.allow_until)
    chief._training = SimpleNamespace(refresh=order.refresh, budget=budget)
    chief._network = SimpleNamespace(replicas=1)
    order.refresh.return_value = 6
    assert chief._evaluate_now() == 6
    release = [] if pauses else [call.allow_until(10)]
    assert order.mock_calls == [call.refresh(), *release, call.end_epoch(5, None)]


class Numbers(keras.utils.PyDataset):  # type: ignore[misc]
    """Seven batches, of their numbers."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, at: int) -> Any:
        return np.full([2, 1], at), np.zeros([2, 1])


@pytest.mark.parametrize("seed", [None, 5])
def test_a_pydataset_resumes_in_the_order_of_each_pass(seed: int | None) -> None:
    def read(step: int) -> list[int]:
        source = BatchSource(functools.partial(_dataset, Numbers(), 8, seed))
        return [int(inputs[0, 0]) for inputs, _ in source.training_batches(step=step).take(28 - step)]

    read_from_begin = read(0)
    passes = [tuple(read_from_begin[at : at + 7]) for at in range(0, 28, 7)]
    assert [sorted(each) for each in passes] == [list(range(7))] * 4
    assert len({*passes}) == (4 if seed else 1)
    for step in (3, 7, 16, 21):
        assert read(step) == read_from_begin[step:]


@pytest.mark.parametrize("steps_per_epoch", [None, 7])
def test_epochs_read_shuffled_data_in_the_order_of_keras(steps_per_epoch: int | None) -> None:
    """Without steps_per_epoch, Keras starts a pass at the end of each epoch that it does not read."""

    def data() -> Any:
        return tf.data.Dataset.range(7).shuffle(7, seed=3).batch(1)

    dataset, expected = data(), list[int]()
    for _ in range(3):
        expected += [int(batch[0]) for batch in dataset]
        if steps_per_epoch is None:
            iter(dataset)
    source = BatchSource(data)
    source.stride = Callbacks(epochs=3, steps_per_epoch=steps_per_epoch).stride
    for step in (0, 3, 7, 16):
        assert [int(batch[0]) for batch in source.training_batches(step=step).take(21 - step)] == expected[step:]


def test_the_rate_and_the_steps_that_a_model_s_function_sets_count() -> None:
    def made() -> Any:
        compiled = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        compiled.compile("sgd", "mse")
        compiled.optimizer.learning_rate = 0.25
        compiled.optimizer.iterations.assign(7)
        return compiled

    data = tf.data.Dataset.from_tensors((X, Y))
    network = FunctionalModel(Job(made, data), data.element_spec, 0)
    assert [network.initial(spec) for spec in (*network.learning_rates, *network.iterations)] == [0.25, 7]


def test_threads_compute_items_ahead_in_their_order() -> None:
    together = threading.Barrier(2)

    def item(at: int) -> int:
        together.wait(limit())
        return at * at

    assert list(_map_in_order(item, [3, 1, 2, 0], 2, 2)) == [9, 1, 4, 0]
    assert list(_map_in_order(lambda at: threading.get_ident(), [0], 1, 9)) == [threading.get_ident()]
    with pytest.raises(ZeroDivisionError):
        list(_map_in_order(lambda at: 1 // at, [1, 0], 2, 9))


def test_steps_of_the_command_line_override_those_of_the_program() -> None:
    parsed = scaletier.parser().parse_args(["--max-steps=7"])
    assert flags_of([], max_steps=9).max_steps == 9
    assert flags_of(["--max-steps=7"], max_steps=9).max_steps == 7
    assert flags_of(["--max-steps=7"], max_steps=0).max_steps == 7
    assert flags_of([], max_steps=0).max_steps == 0
    assert flags_of([], max_steps=None).max_steps == 2000
    assert flags_of(parsed, max_steps=None).max_steps == 7
    assert flags_of(parsed, max_steps=9).max_steps == 7
    assert flags_of(parsed, max_steps=0).max_steps == 7
    unset = scaletier.parser().parse_args([])
    assert flags_of(unset, max_steps=9).max_steps == 9
    assert flags_of(unset, max_steps=None).max_steps == 2000
    assert flags_of(scaletier.parser().parse_args(["--max-steps=2000"]), max_steps=9).max_steps == 2000


def test_callbacks_are_recognized_by_their_methods() -> None:
    class Plain(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            """Called."""

    callbacks = [
        keras.callbacks.EarlyStopping(),
        keras.callbacks.ModelCheckpoint("a.keras"),
        keras.callbacks.CSVLogger("a"),
        keras.callbacks.SwapEMAWeights(),  # it has hooks of `predict`
        keras.callbacks.TerminateOnNaN(),  # its hook of batches asks for what is done anyway
        Plain(),
    ]
    Callbacks(callbacks).check()

    class Ends(keras.callbacks.TerminateOnNaN):  # type: ignore[misc]
        def on_batch_end(self, batch: int, logs: Any = None) -> None:
            """Not called."""

    with pytest.raises(JobError, match="Ends is invalid: it has on_batch_end"):
        Callbacks([*callbacks, Ends()]).check()


def test_averages_are_swapped_in_one_process_only() -> None:
    callbacks = Callbacks([keras.callbacks.SwapEMAWeights()])
    callbacks.check()
    several: Any = SimpleNamespace(replicas=2, learning_rates=[])
    with pytest.raises(JobError, match="the callback SwapEMAWeights is invalid: several replicas train, and average what"):
        callbacks.begin(several, [], flags_of([]), None)


def test_a_part_of_evaluations_alone_is_no_change_of_what_is_trained() -> None:
    class Judged(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.out, self.judge = keras.layers.Dense(1, name="out"), keras.layers.Dense(1)

        def call(self, inputs: Any, training: bool = False) -> Any:
            return self.out(inputs) if training else self.judge(self.out(inputs))

    def judged() -> Any:
        made = Judged()
        made.compile("adam", "mse")
        return made

    data = tf.data.Dataset.from_tensors((X, Y))
    network = FunctionalModel(Job(judged, data), data.element_spec, 0)
    state = TrainingState(network)
    network.attach(state.shared, state.local)
    callbacks = Callbacks()
    callbacks.check()
    callbacks.begin(network, state.local, replace(flags_of([]), max_steps=1, eval_steps=1), None)
    assert [spec.name for spec in network.trained] == ["out/kernel", "out/bias"]
    assert len(network.model.trainable_variables) == 4
    assert len(network.model.optimizer.variables) == len(network.slots)


@pytest.mark.parametrize("replicas", [1, 3])
def test_the_model_has_the_trained_optimizer_also_with_a_rate_by_replicas(replicas: int) -> None:
    def optimizer(replicas: int) -> Any:
        return keras.optimizers.SGD(0.05 * replicas, momentum=0.9)

    data = tf.data.Dataset.from_tensors((tf.zeros([4, 3]), tf.zeros([4, 1])))
    network = FunctionalModel(Job(model, data, optimizer=optimizer), data.element_spec, 0, replicas)
    state = TrainingState(network)
    shared, local = state.shared, state.local
    local[-1].assign_add(tf.ones_like(local[-1]))
    network.attach(shared, local)
    trained_optimizer = network.model.optimizer
    assert float(trained_optimizer.learning_rate) == pytest.approx(0.05 * replicas)
    np.testing.assert_array_equal(trained_optimizer.variables[-1], local[-1])
    trained_optimizer.learning_rate = 0.5  # as a callback does
    assert [float(value) for spec, value in state.pairs() if spec in network.learning_rates] == [0.5]


def test_a_sigterm_after_the_last_round_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    signals = list[int]()

    def train(*_: object) -> int:
        signal.signal(signal.SIGTERM, stop := StopRequest())
        stop(signal.SIGTERM, None)
        return 0

    monkeypatch.setattr(importlib.import_module("scaletier.fit"), "train", train)
    handler = signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    try:
        scaletier.fit(model, (X, Y), steps=1, arguments=["--job-dir", "sigterm"])
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert signals == [signal.SIGTERM]
