"""A model split into parts computes the same as the whole model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scaletier.asynchronous import Asynchronous
from scaletier.checkpoint import TrainingState
from scaletier.functional_model import Batch, FunctionalModel
from scaletier.job import Job, JobError
from scaletier.pipeline import DistributedState
from scaletier.stages import Stage, make_layer_groups
from scaletier.tensorflow_setup import import_tensorflow

tf = import_tensorflow()
import keras  # noqa: E402 - TensorFlow imports it, without its log messages
from keras import layers  # noqa: E402

WORDS = np.array([[1, 2, 0, 0], [3, 0, 0, 0], [1, 2, 3, 4]], np.int32)
NUMBERS = np.random.default_rng(0).random((3, 4), np.float32)


def masked() -> Any:
    first = [keras.Input([4], dtype="int32"), layers.Embedding(9, 3, mask_zero=True, name="words")]
    return keras.Sequential([*first, layers.GRU(2, name="gru"), layers.Dense(2, name="mid"), layers.Dense(1, name="end")])


def masked_twice() -> Any:
    words = keras.Input([4], dtype="int32", name="given")
    sequence = layers.GRU(2, return_sequences=True)(layers.Embedding(9, 3, mask_zero=True)(words))
    return keras.Model(words, layers.Dense(1, name="end")(layers.GRU(2)(sequence)))


def differently_named() -> Any:
    first, second = keras.Input([4], name="zz"), keras.Input([4], name="aa")
    difference = layers.Subtract()([layers.Dense(2)(first), layers.Dense(2)(second)])
    return keras.Model({"p": first, "q": second}, layers.Dense(1, name="end")(layers.Dense(3, name="mid")(difference)))


def skipping() -> Any:
    inputs = keras.Input([4], name="given")
    hidden = layers.Dense(3, name="first")(inputs)
    hidden = layers.Add(name="add")([hidden, layers.BatchNormalization()(layers.Dense(3)(hidden))])
    return keras.Model(inputs, layers.Dense(1, name="end")(hidden))


@pytest.mark.parametrize(
    ("make", "inputs", "last"),
    [
        (masked, WORDS, ["mid", "end"]),
        (masked_twice, WORDS, ["end"]),
        (differently_named, {"p": NUMBERS, "q": NUMBERS * 2}, ["mid", "end"]),
        (skipping, NUMBERS, ["end"]),
    ],
)
def test_the_parts_in_sequence_equal_the_model(make: Callable[[], Any], inputs: Any, last: list[str]) -> None:
    data = tf.data.Dataset.from_tensors((inputs, np.zeros([3, 1], np.float32)))
    network = FunctionalModel(Job(model=make, data=data, loss="mse"), data.element_spec, 0)
    state, batch = TrainingState(network), Batch.of(next(iter(data)))
    values = {
        spec.name: value for spec, value in zip((*network.shared, *network.local), (*state.shared, *state.local), strict=True)
    }
    parts, outputs = make_layer_groups(network), batch.inputs
    assert [part.name for part in parts][-len(last) :] == last
    for part in parts:
        boundary = tf.nest.map_structure(tf.identity, outputs)  # another host gets only the values
        outputs, _, _ = Stage("master/0", "/device:CPU:0", [part]).forward(values, boundary, False)
    np.testing.assert_allclose(outputs, network.predict(state.shared, state.local, batch.inputs), rtol=1e-6)
    laid = DistributedState.__new__(DistributedState)
    laid.network, laid.stages = network, [Stage("master/0", "/device:CPU:0", [part], values) for part in parts]
    laid.shared, laid.local = state.shared, state.local
    loss, outputs, _, results = laid.test(laid.initial_test_state(), batch)
    expected = network.test(state.shared, state.local, state.initial_test_state(), batch)
    np.testing.assert_allclose(outputs, expected[1], rtol=1e-6)
    np.testing.assert_allclose([loss, *results], [expected[0], *expected[3]], rtol=1e-6)


def test_stages_are_evaluated_with_the_averages_of_weights() -> None:
    data = tf.data.Dataset.from_tensors((NUMBERS, np.zeros([3, 1], np.float32)))
    model = keras.Sequential([keras.Input([4]), layers.Dense(3), layers.Dense(1)])
    optimizer = keras.optimizers.SGD(use_ema=True)
    network = FunctionalModel(Job(model=model, data=data, loss="mse", optimizer=optimizer), data.element_spec, 0)
    state, batch = TrainingState(network), Batch.of(next(iter(data)))
    averages = [tf.ones(value.shape) for value in state.shared]
    laid = DistributedState.__new__(DistributedState)
    laid.network, laid.evaluates_ema = network, True
    for average, weight in network.ema_pairs(state.shared, state.local):
        average.assign(tf.ones(weight.shape))
    laid.shared, laid.local = state.shared, state.local
    values = {spec.name: value for spec, value in zip(network.shared, state.shared, strict=True)}
    laid.stages = [Stage("master/0", "/device:CPU:0", make_layer_groups(network), values)]
    loss, outputs, _, _ = laid.test(laid.initial_test_state(), batch)
    expected = network.test(averages, state.local, network.initial_test_state(averages, state.local), batch)
    np.testing.assert_allclose(outputs, expected[1], rtol=1e-6)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-6)


@pytest.mark.parametrize(("sizes", "refused"), [([3, 2], False), ([2, 6], True)])
def test_a_variable_of_another_host_is_refused_if_it_exceeds_a_message(
    sizes: list[int], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scaletier.pipeline.MAX_MESSAGE_BYTES", 4 * 4 * 3)
    monkeypatch.setattr(tf, "device", lambda _: nullcontext())
    model = keras.Sequential([keras.Input([4]), layers.Dense(sizes[0]), layers.Dense(2), layers.Dense(sizes[1], name="end")])
    data = tf.data.Dataset.from_tensors((NUMBERS, np.zeros([3, sizes[1]], np.float32)))
    network = FunctionalModel(Job(model=model, data=data, loss="mse"), data.element_spec, 0)
    groups, hosts = make_layer_groups(network), ("/job:chief/replica:0/task:0", "/job:worker/replica:0/task:0")
    stages = [Stage("", host, part) for host, part in zip(hosts, (groups[:1], groups[1:]), strict=True)]
    with pytest.raises(JobError, match=r"^the variable end/kernel is invalid on ") if refused else nullcontext():
        DistributedState(network, stages, None)


@pytest.mark.parametrize("sequential", [True, False])
@pytest.mark.parametrize("fixed", [True, False], ids=["batches of one size", "batches of any size"])
def test_variables_are_initialized_only_on_access(fixed: bool, sequential: bool) -> None:
    """A value from before this process joins a cluster is lost, and one host may be too small for all."""
    initialized_shapes = list[Any]()

    class RecordingInitializer(keras.initializers.Zeros):  # type: ignore[misc]
        def __call__(self, shape: Any, dtype: Any = None) -> Any:
            initialized_shapes.append(shape)
            return super().__call__(shape, dtype)

    def model() -> Any:
        inputs, end = keras.Input([4], name="given"), layers.Dense(1, kernel_initializer=RecordingInitializer())
        return keras.Sequential([inputs, end]) if sequential else keras.Model(inputs, end(inputs))

    data = tf.data.Dataset.from_tensor_slices((NUMBERS, np.zeros([3, 1], np.float32))).batch(3, drop_remainder=fixed)
    network = FunctionalModel(Job(model=model, data=data, loss="mse"), data.element_spec, 0)
    assert len(make_layer_groups(network)) == 1
    assert not initialized_shapes
    TrainingState(network)
    assert initialized_shapes == [(4, 1)]


@pytest.mark.parametrize(
    ("settings", "shape", "dtype", "compiles"),
    [
        ({"jit_compile": True}, [4], "float32", True),
        ({"jit_compile": False}, [4], "float32", False),
        ({}, [4], "float32", False),
        ({"jit_compile": True}, [None], "float32", False),
        ({"jit_compile": True}, [4], "string", False),
    ],
    ids=["as asked", "not as asked", "not on processors by default", "not batches of many shapes", "not strings"],
)
def test_xla_compiles_what_keras_would(settings: dict[str, Any], shape: list[int | None], dtype: str, compiles: bool) -> None:
    class Flat(layers.Layer):  # type: ignore[misc]
        def call(self, values: Any) -> Any:
            return tf.zeros([tf.shape(values)[0], 2])

    model = keras.Sequential([keras.Input(shape, dtype=dtype), Flat(), layers.Dense(1)])
    model.compile("sgd", "mse", **settings)
    specs = tf.TensorSpec([None, *shape], dtype), tf.TensorSpec([None, 1])
    assert FunctionalModel(Job(model=model), specs, 0).compiles is compiles


@pytest.mark.filterwarnings("ignore:Model doesn't support")
def test_xla_does_not_compile_a_layer_that_forbids_it() -> None:
    model = keras.Sequential([keras.Input([1], dtype="int32"), layers.Hashing(3, output_mode="one_hot"), layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=True)
    specs = tf.TensorSpec([None, 1], tf.int32), tf.TensorSpec([None, 1])
    assert not FunctionalModel(Job(model=model), specs, 0).compiles


@pytest.mark.parametrize(
    ("compiles", "devices", "workers", "uses_xla"),
    [
        (True, ["/device:CPU:0"], 0, True),
        (True, ["/device:GPU:0"], 0, True),
        (True, ["/device:GPU:0", "/device:GPU:1"], 0, False),
        (True, ["/device:CPU:0"], 2, False),
        (False, ["/device:CPU:0"], 0, False),
    ],
)
def test_xla_compiles_a_step_on_one_device_of_any_kind(
    compiles: bool, devices: list[str], workers: int, uses_xla: bool
) -> None:
    training = Asynchronous.__new__(Asynchronous)
    training.network, training.devices, training.worker_count = SimpleNamespace(compiles=compiles), devices, workers
    assert training.uses_xla is uses_xla
