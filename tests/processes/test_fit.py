"""`scaletier.fit` on one process equals `model.fit` in history, weights and files."""

from __future__ import annotations

import csv
import functools
import importlib
import signal
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import scaletier
from scaletier.checkpoint import latest_path
from scaletier.loop import PreemptedError, Round
from scaletier.savedmodel import export, make_serving_module
from scaletier.tensorflow_setup import import_tensorflow
from scaletier.training import ChiefTasks

tf = import_tensorflow()
import keras  # noqa: E402 - TensorFlow imports it, without its log messages
from keras import callbacks, layers  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
EPOCHS, BATCH = 3, 8
RANDOM = np.random.default_rng(3)
X = RANDOM.normal(size=(70, 3)).astype(np.float32)  # the last batch is a smaller one
KINDS = RANDOM.integers(0, 2, 70)
ONE_HOT = np.eye(2, dtype=np.float32)[KINDS]


def model(rate: Any = 0.05, **settings: Any) -> Any:
    model_layers = [
        layers.Dense(8, "tanh"),
        layers.BatchNormalization(),
        layers.Dropout(0.2, seed=3),
        layers.Dense(2, "softmax"),
    ]
    compiled = keras.Sequential([keras.Input((3,)), *model_layers])
    metrics, weighted = ["accuracy", keras.metrics.AUC(name="auc"), keras.metrics.F1Score(name="f1")], ["accuracy"]
    compiled.compile(
        keras.optimizers.Adam(rate, **settings), "categorical_crossentropy", metrics=metrics, weighted_metrics=weighted
    )
    return compiled


def small(rate: Any = 0.05, **settings: Any) -> Any:
    compiled = keras.Sequential([keras.Input((3,)), layers.Dense(2, "softmax")])
    compiled.compile(keras.optimizers.Adam(rate, **settings), "categorical_crossentropy", metrics=["accuracy"])
    return compiled


@functools.cache
def trained_file() -> Path:
    """Return a file of a model that Keras has trained, with the state of its optimizer."""
    trained = small(keras.optimizers.schedules.CosineDecay(0.1, 40))
    trained.fit(X, ONE_HOT, verbose=0, shuffle=False)
    trained.save(path := Path(tempfile.mkdtemp()) / "trained.keras")
    return path


def loaded() -> Any:
    return keras.models.load_model(trained_file())


def fast() -> Any:
    compiled = small()
    compiled.compile("adam", "categorical_crossentropy", metrics=["accuracy"], steps_per_execution=4, jit_compile=True)
    return compiled


def labels() -> Any:
    compiled = keras.Sequential([keras.Input((3,)), layers.Dense(2, "softmax")])
    compiled.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return compiled


@keras.saving.register_keras_serializable()
class Pool(layers.Layer):  # type: ignore[misc]
    """The mean over the existing words."""

    def call(self, inputs: Any) -> Any:
        return tf.reduce_mean(inputs, 1)


@keras.saving.register_keras_serializable()
class Counts(layers.Layer):  # type: ignore[misc]
    """Change the inputs by the number of calls and a random number, also in an evaluation."""

    def build(self, _shape: Any) -> None:
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")
        self.generator = keras.random.SeedGenerator(3)

    def call(self, inputs: Any) -> Any:
        self.calls.assign_add(1.0)
        return inputs + self.calls / 50 + keras.random.uniform((), seed=self.generator)


def counts() -> Any:
    compiled = keras.Sequential([keras.Input((3,)), Counts(), layers.Dense(2, "softmax")])
    compiled.compile("sgd", "categorical_crossentropy")
    return compiled


def nested() -> Any:
    first, second = keras.Input((3,), name="first"), keras.Input((2,), name="second")
    joined = layers.Concatenate()([first, second])
    outputs = {"a": {"price": layers.Dense(1)(joined)}, "b": layers.Dense(2)(joined)}
    compiled = keras.Model({"p": [first], "q": second}, outputs)
    compiled.compile("sgd", "mse")
    return compiled


@keras.saving.register_keras_serializable()
class Plus(layers.Layer):  # type: ignore[misc]
    """The sum of two inputs, the second of which is optional."""

    def call(self, inputs: Any, other: Any = None) -> Any:
        return inputs if other is None else inputs + other

    def compute_output_spec(self, inputs: Any, other: Any = None) -> Any:
        return keras.KerasTensor(inputs.shape, inputs.dtype)


def optional() -> Any:
    first, second = keras.Input((3,), name="first"), keras.Input((3,), name="second", optional=True)
    compiled = keras.Model({"first": first, "second": second}, layers.Dense(2, "softmax")(Plus()(first, second)))
    compiled.compile("sgd", "categorical_crossentropy")
    return compiled


@keras.saving.register_keras_serializable()
class Sizes(layers.Layer):  # type: ignore[misc]
    """Measure the mean size of the inputs."""

    def build(self, _shape: Any) -> None:
        self.size = keras.metrics.Mean(name="size")

    def call(self, inputs: Any) -> Any:
        self.size.update_state(tf.abs(inputs))
        return inputs


def sizes() -> Any:
    compiled = keras.Sequential([keras.Input((3,)), layers.Dense(4), Sizes(), layers.Dense(2, "softmax")])
    compiled.compile("sgd", "categorical_crossentropy")
    return compiled


def ragged() -> Any:
    inputs = keras.Input((None,), dtype="int64", ragged=True, name="words")
    compiled = keras.Model(inputs, layers.Dense(2, "softmax")(Pool()(layers.Embedding(9, 2)(inputs))))
    compiled.compile("sgd", "categorical_crossentropy")
    return compiled


def texts() -> Any:
    inner = [layers.Embedding(9, 2), layers.GlobalAveragePooling1D(), layers.Dense(2, "softmax")]
    compiled = keras.Sequential([keras.Input((None,), dtype="int64"), *inner])
    compiled.compile("adam", "categorical_crossentropy")
    return compiled


def sparse() -> Any:
    compiled = keras.Sequential([keras.Input((3,), sparse=True, name="sparse"), layers.Dense(2, "softmax")])
    compiled.compile("sgd", "categorical_crossentropy")
    return compiled


class Halves(callbacks.Callback):  # type: ignore[misc]
    """Halve all weights after each epoch."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.set_weights([weight / 2 for weight in self.model.get_weights()])


class Measures(callbacks.Callback):  # type: ignore[misc]
    """Evaluate as an epoch begins, which counts in its metrics, and log the metrics that the evaluation at its end left."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.evaluate(X, ONE_HOT, verbose=0)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["left"] = float(self.model.get_metrics_result()["accuracy"])


class Restarts(callbacks.Callback):  # type: ignore[misc]
    """Begin the learning rate's schedule again after each epoch."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.optimizer.iterations.assign(0)


class Pages(keras.utils.PyDataset):  # type: ignore[misc]
    """Batches of rows that record the epochs."""

    def __init__(self) -> None:
        super().__init__(workers=2)
        self.calls = list[str]()

    def __len__(self) -> int:
        return 9

    def __getitem__(self, at: int) -> Any:
        rows = slice(BATCH * (at % 9), BATCH * (at % 9 + 1))
        return X[rows], ONE_HOT[rows]

    def on_epoch_begin(self) -> None:
        self.calls.append("begin")

    def on_epoch_end(self) -> None:
        self.calls.append("end")


class Texts(Pages):
    """Batches whose texts have other lengths."""

    def __getitem__(self, at: int) -> Any:
        _, targets = super().__getitem__(at)
        return np.arange(len(targets) * (at + 2)).reshape(len(targets), -1) % 9, targets


class Endless(Pages):
    """Batches without end."""

    @property
    def num_batches(self) -> None:
        return None


def batches() -> Any:
    return tf.data.Dataset.from_tensor_slices((X, ONE_HOT)).batch(BATCH)


def shuffled() -> Any:
    return tf.data.Dataset.from_tensor_slices((X, ONE_HOT)).shuffle(70, seed=3).batch(BATCH)


def slower() -> Any:
    compiled = small()
    compiled.optimizer.learning_rate = 0.01
    return compiled


def falling(epoch: int, rate: float) -> float:
    return rate * 0.5 if epoch else rate


PAGES = Pages, Endless, Texts
Row = tuple[Callable[[], Any], Any, Sequence[Callable[[], Any]], dict[str, Any]]
# A model, its data, callbacks, and further arguments of both `fit` functions.
ROWS: dict[str, Row] = {
    "arrays, a smaller last batch": (model, (X, ONE_HOT), [], {}),
    "a tf.data.Dataset": (small, batches, [], {}),
    "a tf.data.Dataset that shuffles": (small, shuffled, [], {}),
    "a rate that the model's function sets": (slower, (X, ONE_HOT), [], {}),
    "a PyDataset": (small, Pages, [], {}),
    "class weights of labels": (labels, (X, KINDS), [], {"class_weight": {0: 0.5, 1: 3.0}}),
    "a weight of one class": (labels, (X, KINDS), [], {"class_weight": {0: 3.0}}),
    "class weights of one-hot targets": (small, (X, ONE_HOT), [], {"class_weight": {0: 0.5, 1: 3.0}}),
    "targets and no weights": (small, (X, ONE_HOT, None), [], {}),
    "nested inputs and outputs": (nested, ({"p": [X], "q": ONE_HOT}, {"a": {"price": X[:, :1]}, "b": ONE_HOT}), [], {}),
    "ragged inputs": (
        ragged,
        (tf.RaggedTensor.from_row_lengths(np.arange(180) % 9, [1, 4, 2, 3, 1, 4, 3] * 10), ONE_HOT),
        [],
        {},
    ),
    "sparse inputs": (sparse, (tf.sparse.from_dense(np.maximum(X, 0)), ONE_HOT), [], {}),
    "an optional input that is None": (optional, ({"first": X, "second": None}, ONE_HOT), [], {}),
    "a metric of a layer": (sizes, (X, ONE_HOT), [], {}),
    "a PyDataset without end": (small, Endless, [], {"steps_per_epoch": 4}),
    "states and random numbers of evaluations": (counts, (X, ONE_HOT), [], {}),
    "a callback that sets weights": (small, (X, ONE_HOT), [Halves], {}),
    "a callback that evaluates, and reads metrics": (small, (X, ONE_HOT), [Measures], {}),
    "a callback that restarts a schedule": (
        lambda: small(keras.optimizers.schedules.CosineDecay(0.1, 12)),
        (X, ONE_HOT),
        [Restarts],
        {},
    ),
    "a PyDataset with strings of different lengths": (texts, Texts, [], {}),
    "a loaded model with its optimizer": (loaded, (X, ONE_HOT), [], {}),
    "steps_per_execution and jit_compile": (fast, (X, ONE_HOT), [], {}),
    "averaged weights": (lambda: small(use_ema=True, ema_momentum=0.5), (X, ONE_HOT), [], {}),
    "SwapEMAWeights": (lambda: small(use_ema=True, ema_momentum=0.5), (X, ONE_HOT), [callbacks.SwapEMAWeights], {}),
    "SwapEMAWeights of epochs": (
        lambda: small(use_ema=True, ema_momentum=0.5),
        (X, ONE_HOT),
        [lambda: callbacks.SwapEMAWeights(swap_on_epoch=True)],
        {},
    ),
    "EarlyStopping, best weights": (
        small,
        (X, ONE_HOT),
        [lambda: callbacks.EarlyStopping("val_loss", min_delta=9.0, patience=1, restore_best_weights=True)],
        {},
    ),
    "ReduceLROnPlateau": (
        small,
        (X, ONE_HOT),
        [lambda: callbacks.ReduceLROnPlateau("loss", factor=0.1, patience=1, min_delta=1.0)],
        {},
    ),
    "LearningRateScheduler": (small, (X, ONE_HOT), [lambda: callbacks.LearningRateScheduler(falling)], {}),
}


# The names of inputs and outputs of exported models.
SIGNATURES = {
    "nested inputs and outputs": (["p_0", "q"], ["a_price", "b"]),
    "an optional input that is None": (["first"], ["outputs"]),
    "ragged inputs": (["inputs", "inputs_1"], ["outputs"]),
    "sparse inputs": (["inputs", "inputs_1", "inputs_2"], ["outputs"]),
}


@pytest.fixture(autouse=True)
def single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)


FULL = pytest.mark.full("[arrays, a smaller last batch] and [EarlyStopping, best weights] prove what these have in common")
QUICK = "arrays, a smaller last batch", "EarlyStopping, best weights"


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else FULL) for name in ROWS])
def test_one_process_trains_like_keras(name: str, tmp_path: Path) -> None:
    make, data, called, more = ROWS[name]
    trained_file()
    train_data = data() if data in PAGES else data
    tested = data[:2] if isinstance(data, tuple) else Texts()[0] if data is Texts else (X, ONE_HOT)
    result = scaletier.fit(
        make,
        train_data,
        tested,
        epochs=EPOCHS,
        batch_size=BATCH,
        shuffle=False,
        callbacks=[one() for one in called],
        arguments=[f"--job-dir={tmp_path}"],
        **more,
    )
    keras.models.load_model(tmp_path / "export/model.keras")  # a program may make further models
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    reference = make()
    x, y = train_data[:2] if isinstance(train_data, tuple) else (data(), None)
    expected = reference.fit(
        x,
        y,
        batch_size=BATCH if y is not None else None,
        validation_data=tested,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=[one() for one in called],
        **more,
    )
    assert result.epoch == expected.epoch
    assert result.history.keys() == expected.history.keys()
    for key, values in expected.history.items():
        assert np.asarray(result.history[key]) == pytest.approx(np.asarray(values), rel=1e-5, abs=1e-5), key
    pairs = zip(
        reference.variables + reference.optimizer.variables,
        result.model.variables + result.model.optimizer.variables,
        strict=True,
    )
    for variable, value in pairs:
        np.testing.assert_allclose(np.asarray(value), np.asarray(variable), rtol=1e-5, atol=1e-5, err_msg=variable.path)
    reference.save(tmp_path / "reference.keras")
    loaded = [keras.models.load_model(tmp_path / name) for name in ("export/model.keras", "reference.keras")]
    for trained, like in ((result.model, reference), loaded):
        evaluated, expected_metrics = (
            np.hstack(keras.tree.flatten(one.evaluate(*tested, verbose=0))) for one in (trained, like)
        )
        assert evaluated == pytest.approx(expected_metrics, abs=1e-5)
    if data in PAGES:
        assert train_data.calls == x.calls == ["end", *["begin", "end"] * EPOCHS]
    if name in SIGNATURES:
        (exported,) = (tmp_path / "export/Servo").iterdir()
        signature = tf.saved_model.load(exported).signatures["serving_default"]
        names = signature.structured_input_signature[1], signature.structured_outputs
        assert tuple(sorted(part) for part in names) == SIGNATURES[name]
    assert name != "EarlyStopping, best weights" or len(result.epoch) < EPOCHS
    assert name != "ReduceLROnPlateau" or result.history["learning_rate"][-1] < result.history["learning_rate"][0]


def test_batches_of_unknown_number_are_counted(tmp_path: Path) -> None:
    def filtered() -> Any:
        rows = tf.data.Dataset.from_tensor_slices((X, KINDS)).shuffle(70, seed=3)
        return rows.filter(lambda inputs, _: inputs[0] > -1.0).batch(BATCH)

    result = scaletier.fit(labels, filtered, filtered, epochs=EPOCHS, arguments=[f"--job-dir={tmp_path}"])
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    reference = labels()  # with an optimizer that computes without its steps: Keras counts one more at the end of each epoch
    expected = reference.fit(filtered(), validation_data=filtered(), epochs=EPOCHS, shuffle=False, verbose=0)
    for key, values in expected.history.items():
        assert result.history[key] == pytest.approx(values, rel=1e-5, abs=1e-5), key
    for value, weight in zip(result.model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(value, weight, rtol=1e-5, atol=1e-5)
    assert int(result.model.optimizer.iterations) == EPOCHS * len(list(filtered()))


def test_the_manual_shows_the_table_of_fit() -> None:
    expected = "".join(f"| {name} | the same history and weights |\n" for name in ROWS)
    assert f"| `fit` with | result |\n|---|---|\n{expected}\n" in (ROOT / "docs/library.md").read_text()


def start_again() -> None:
    """Forget the job directories of this process, as a program does that starts again."""
    importlib.import_module("scaletier.fit")._trained.clear()


class Spoils(callbacks.Callback):  # type: ignore[misc]
    """Move the weights before each epoch but the first one."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch:
            self.model.set_weights([weight + np.array([5.0, -5.0]) for weight in self.model.get_weights()])


def test_a_restart_keeps_the_state_of_callbacks(tmp_path: Path) -> None:
    def train(folder: Path, epochs: int) -> Any:
        start_again()
        folder.mkdir(exist_ok=True)
        chosen = [
            Spoils(),
            callbacks.CSVLogger(folder / "log.csv"),
            callbacks.ModelCheckpoint(folder / "best.keras", monitor="loss", save_best_only=True),
            callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1),
            callbacks.EarlyStopping("loss", patience=3),
        ]
        arguments = [f"--job-dir={folder}"]
        settings = {"epochs": epochs, "batch_size": BATCH, "shuffle": False, "arguments": arguments}
        return scaletier.fit(small, (X, ONE_HOT), callbacks=chosen, **settings)

    expected = train(tmp_path / "undisturbed", 9)
    train(tmp_path / "restarted", 2)
    result = train(tmp_path / "restarted", 9)
    assert expected.epoch == result.epoch == [0, 1, 2, 3]
    assert result.history == expected.history
    assert expected.history["learning_rate"] == pytest.approx([0.05, 0.05, 0.025, 0.0125])
    for name in ("log.csv", "best.keras", "export/model.keras"):
        first, second = tmp_path / "undisturbed" / name, tmp_path / "restarted" / name
        if name.endswith("csv"):
            assert first.read_text() == second.read_text()
            continue
        weights, others = (keras.models.load_model(path).get_weights() for path in (first, second))
        for one, other in zip(weights, others, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)
    best = keras.models.load_model(tmp_path / "restarted/best.keras").get_weights()
    assert not np.allclose(best[0], result.model.get_weights()[0]), "the first epoch was the best one"


@pytest.mark.parametrize(
    ("columns", "names"),
    [
        (("price", "age"), ("price", "age")),
        (("sepal width", "1stFloor"), ("sepal_width", "arg_1stFloor")),
        (("class", "_id"), ("arg_class", "arg__id")),
        (("self", "\u00e9t\u00e9"), ("arg_self", "arg__t_")),
        (("a-b", "a_b"), ("inputs", "inputs_1")),
        (("a", "A"), ("inputs", "inputs_1")),
    ],
)
def test_a_model_is_served_by_the_names_of_its_columns(
    columns: tuple[str, str], names: tuple[str, str], tmp_path: Path
) -> None:
    first, second = columns
    inputs = OrderedDict((column, tf.TensorSpec([8], tf.float32)) for column in columns)
    network: Any = SimpleNamespace(
        model=keras.Sequential([layers.Dense(1)]), slots=(), predict=lambda _, __, given: given[first] - 10 * given[second]
    )
    job: Any = SimpleNamespace(serving=None)
    module = tf.saved_model.load(export(make_serving_module(job, network, [], [], inputs), str(tmp_path)))
    values = dict(zip(names, ([1.0], [2.0]), strict=True))
    assert (
        module.signatures["serving_default"](**{name: tf.constant(value) for name, value in values.items()})["outputs"] == -19
    )


def interrupt() -> None:
    raise InterruptedError


class Stops(callbacks.Callback):  # type: ignore[misc]
    """End the program as the evaluation of an epoch begins."""

    def __init__(self, epoch: int, end: Callable[[], None] = interrupt) -> None:
        super().__init__()
        self.epochs, self.epoch, self.end = 0, epoch, end

    def on_test_begin(self, logs: Any = None) -> None:
        self.epochs += 1
        if self.epochs == self.epoch:
            self.end()


def test_a_restart_within_an_epoch_keeps_its_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("scaletier.fit"), "exit_process", sys.exit)

    def auc() -> Any:
        compiled = keras.Sequential([keras.Input((3,)), layers.Dense(2, "softmax", name="block.1")], name="net-v1.2")
        compiled.compile(
            keras.optimizers.Adam(0.05),
            "categorical_crossentropy",
            metrics=["accuracy", keras.metrics.AUC(), keras.metrics.F1Score()],
        )
        return compiled

    def train(folder: str, *called: Any) -> Any:
        start_again()
        arguments = [f"--job-dir={tmp_path / folder}", "--checkpoint-steps=4", "--sync-period=1"]
        return scaletier.fit(
            auc, (X, ONE_HOT), (X, ONE_HOT), epochs=3, batch_size=BATCH, shuffle=False, callbacks=called, arguments=arguments
        )

    expected = train("undisturbed").history
    for callback, error, step in (
        (Stops(1, lambda: signal.raise_signal(signal.SIGTERM)), SystemExit, 9),  # of 9 steps an epoch
        (Stops(2), InterruptedError, 17),
        (Stops(2), InterruptedError, 27),
    ):
        with pytest.raises(error):
            train("restarted", callback)
        assert latest_path(str(tmp_path / "restarted")).endswith(f"-{step}")
    result = train("restarted").history
    assert result.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(result[name], values, rtol=1e-6, err_msg=name)
    assert [one.tolist() for one in result["f1_score"]], "those of the checkpoint are arrays, too"


def test_the_metrics_of_the_round_before_sigterm_are_kept() -> None:
    added = list[Round]()

    def end() -> None:
        raise PreemptedError

    chief: Any = SimpleNamespace(_callbacks=SimpleNamespace(add=added.append), _end_if_preempted=end)
    with pytest.raises(PreemptedError):
        ChiefTasks.run_due(chief, Round(1, 1, 0.5))
    assert added == [Round(1, 1, 0.5)]


def test_files_of_callbacks_exist_and_a_job_resumes(tmp_path: Path) -> None:
    called: list[tuple[str, int | None, list[str]]] = []

    class Watches(callbacks.Callback):  # type: ignore[misc]
        """Record each call, and check that weights change."""

    for hook in ("on_train_begin", "on_train_end", "on_test_begin", "on_test_end"):
        setattr(Watches, hook, lambda _, logs=None, hook=hook: called.append((hook, None, sorted(logs or ()))))
    for hook in ("on_epoch_begin", "on_epoch_end"):
        setattr(Watches, hook, lambda _, epoch, logs=None, hook=hook: called.append((hook, epoch, sorted(logs or ()))))
    arguments = [f"--job-dir={tmp_path}", "--checkpoint-steps=3"]
    best = callbacks.ModelCheckpoint(tmp_path / "best.keras", monitor="loss", save_best_only=True)
    callback_list = [callbacks.CSVLogger(tmp_path / "log.csv"), best, Watches()]
    first = scaletier.fit(labels, (X, KINDS), (X, KINDS), steps=18, batch_size=8, callbacks=callback_list, arguments=arguments)
    tested = [("on_test_begin", None, []), ("on_test_end", None, ["accuracy", "loss"])]
    logs = ["accuracy", "loss", "val_accuracy", "val_loss"]
    epochs = [[("on_epoch_begin", at, []), *tested, ("on_epoch_end", at, logs)] for at in range(2)]
    assert called == [("on_train_begin", None, []), *epochs[0], *epochs[1], ("on_train_end", None, [])]
    assert [row["epoch"] for row in csv.DictReader((tmp_path / "log.csv").open())] == ["0", "1"]
    saved = keras.models.load_model(tmp_path / "best.keras")
    np.testing.assert_array_equal(saved.get_weights()[0], first.model.get_weights()[0])
    assert int(saved.optimizer.iterations) == 18
    called.clear()
    start_again()
    resumed = scaletier.fit(labels, (X, KINDS), steps=31, batch_size=8, callbacks=[Watches()], arguments=arguments)
    assert resumed.epoch == [0, 1, 2, 3]
    assert int(resumed.model.optimizer.iterations) == 31
    assert [hook for hook, *_ in called].count("on_test_begin") == 0
    assert not np.array_equal(resumed.model.get_weights()[0], first.model.get_weights()[0])


def test_the_hooks_of_pages_are_called_between_those_of_callbacks(tmp_path: Path) -> None:
    def train(fit: Any, *arguments: Any, **settings: Any) -> list[str]:
        pages, tested, calls = Pages(), Pages(), list[str]()
        pages.calls = tested.calls = calls

        def note(hook: str) -> Callable[..., None]:
            return lambda *_, **__: calls.append(hook)

        watch = callbacks.LambdaCallback(on_epoch_begin=note("epoch begins"), on_epoch_end=note("epoch ends"))
        watch.on_test_begin, watch.on_test_end = note("test begins"), note("test ends")
        fit(*arguments, pages, validation_data=tested, epochs=2, shuffle=False, callbacks=[watch], **settings)
        return calls

    assert train(scaletier.fit, small, arguments=[f"--job-dir={tmp_path}"]) == train(small().fit, verbose=0)


def test_a_series_of_pandas_is_a_column_as_in_keras(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Series:
        def __array__(self, *_: Any, **__: Any) -> Any:
            return X[:, 0]

    shapes = list[Any]()

    class Watched(keras.losses.Loss):  # type: ignore[misc]
        def call(self, y_true: Any, y_pred: Any) -> Any:
            shapes.append(tuple(y_true.shape))
            return keras.ops.mean(keras.ops.square(y_true - y_pred), -1)

    def regression() -> Any:
        model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
        model.compile("sgd", Watched())
        return model

    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(Series=Series))
    scaletier.fit(regression, (X, Series()), steps=1, batch_size=7, arguments=[f"--job-dir={tmp_path}"])
    assert {shape[1:] for shape in shapes} == {(1,)}


def test_arrays_are_reshuffled_in_each_epoch() -> None:
    rows = np.arange(20, dtype=np.float32)
    data = importlib.import_module("scaletier.fit")._dataset((rows, rows), 8, 5)
    epochs = [tuple(int(one) for inputs, _ in data for one in inputs) for _ in range(2)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(20))] * 2
    assert len({*epochs, tuple(range(20))}) == 3
