"""A job's numbers, compared with plain NumPy, and with the same model trained by Keras itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaletier import private
from scaletier.checkpoint import LocalCopy
from scaletier.evaluation import make_evaluate
from scaletier.job import Job, JobError
from scaletier.loop import Round
from scaletier.network import Batch, FunctionalModel, VariableSpec
from scaletier.round_graph import State, initial_local, make_round, run_round
from scaletier.runtime import import_tensorflow
from scaletier.shared_parameters import SharedParameters, _pack, _unpack
from scaletier.stages import Stage, forward_backward, partition, units

tf = import_tensorflow()
import keras  # noqa: E402 - it comes with TensorFlow, whose import is the quiet one

Array = npt.NDArray[Any]
STEPS, BATCH, WIDTH = 5, 4, 3
DEVICES = ("/device:CPU:0",)
RANDOM = np.random.default_rng(7)
INPUTS = RANDOM.normal(size=(STEPS * BATCH, WIDTH)).astype(np.float32)
TARGETS = RANDOM.normal(size=(STEPS * BATCH, 2)).astype(np.float32)


def linear() -> Any:
    return keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(2, name="out")], name="linear")


def dataset(*parts: Any, batch: int = BATCH) -> Any:
    return tf.data.Dataset.from_tensor_slices(parts).batch(batch)


def trained(
    job: Job, steps: int, position: int = 0, replicas: int = 1, devices: Sequence[str] = DEVICES
) -> tuple[FunctionalModel, State, Round]:
    """Train `steps` steps in one round from the job's begin."""
    network = FunctionalModel(job, job.data.element_spec, 0, replicas * len(devices))
    iterator = iter(job.data)
    run = make_round(network, None, iterator, devices)
    begun = State.initial(network)
    state = State(begun.shared, begun.local * len(devices))
    return network, *run_round(network, run, iterator, state, steps, position, replicas)


def named(network: FunctionalModel, values: Sequence[Any]) -> dict[str, Array]:
    return {spec.name: np.asarray(value) for spec, value in zip(network.shared, values, strict=True)}


def slopes(kernel: Array, bias: Array, inputs: Array, targets: Array) -> tuple[float, Array, Array]:
    """Return the mean squared error of a linear model, and its gradients."""
    error = inputs @ kernel + bias - targets
    return float((error**2).mean()), 2 * inputs.T @ error / error.size, 2 * error.sum(0) / error.size


def batches() -> list[tuple[Array, Array]]:
    return [(INPUTS[at : at + BATCH].astype(float), TARGETS[at : at + BATCH].astype(float)) for at in range(0, 20, BATCH)]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_walk_of_sgd_with_nesterov_s_momentum(momentum: float) -> None:
    optimizer = keras.optimizers.SGD(0.1, momentum=momentum, nesterov=momentum > 0)
    job = Job(linear, dataset(INPUTS, TARGETS), "mse", ["mae"], optimizer)
    network, state, told = trained(job, STEPS)
    weights = [network.initial(spec).astype(float) for spec in network.shared]
    velocities, losses, errors = [np.zeros_like(one) for one in weights], [], []
    for inputs, targets in batches():
        errors.append(np.abs(inputs @ weights[0] + weights[1] - targets).mean())
        loss, *gradients = slopes(*weights, inputs, targets)
        losses.append(loss)
        velocities = [momentum * v - 0.1 * g for v, g in zip(velocities, gradients, strict=True)]
        weights = [w + momentum * v - 0.1 * g for w, v, g in zip(weights, velocities, gradients, strict=True)]
    for found, wanted in zip(state.shared, weights, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert told.loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert told.metrics["mae"] == pytest.approx(np.mean(errors), rel=1e-5)
    assert (told.steps, told.global_step, told.staleness) == (STEPS, STEPS, 0)


def test_a_walk_of_adam_goes_on_where_the_one_before_it_ended() -> None:
    job = Job(linear, dataset(INPUTS, TARGETS), "mse", optimizer=keras.optimizers.Adam(0.01))
    network = FunctionalModel(job, job.data.element_spec, 0)
    iterator = iter(job.data)
    run = make_round(network, None, iterator, DEVICES)
    state, first = run_round(network, run, iterator, State.initial(network), 2, 0, 1)
    state, second = run_round(network, run, iterator, state, 3, 2, 1)
    assert (first.global_step, second.global_step) == (2, 5)
    weights = [network.initial(spec).astype(float) for spec in network.shared]
    means, squares = [np.zeros_like(one) for one in weights], [np.zeros_like(one) for one in weights]
    for count, (inputs, targets) in enumerate(batches(), 1):
        _, *gradients = slopes(*weights, inputs, targets)
        means = [0.9 * m + 0.1 * g for m, g in zip(means, gradients, strict=True)]
        squares = [0.999 * s + 0.001 * g * g for s, g in zip(squares, gradients, strict=True)]
        rate = 0.01 * np.sqrt(1 - 0.999**count) / (1 - 0.9**count)
        weights = [w - rate * m / (np.sqrt(s) + 1e-7) for w, m, s in zip(weights, means, squares, strict=True)]
    for found, wanted in zip(state.shared, weights, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)


class Position(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """A learning rate that is the step it is asked at."""

    def __call__(self, step: Any) -> Any:
        return tf.cast(step, tf.float32)


@pytest.mark.parametrize("scaled", [False, True], ids=["", "of a scaled loss"])
@pytest.mark.parametrize(("position", "replicas"), [(0, 1), (100, 1), (100, 3)])
def test_a_schedule_is_asked_at_the_global_step(position: int, replicas: int, scaled: bool) -> None:
    """The gradient is 1, so that the weight falls by the sum of the rates; between two own steps the others take theirs."""
    data = tf.data.Dataset.from_tensors((tf.ones([2, 1]), tf.zeros([2, 1]))).repeat()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])

    def optimizer() -> Any:
        plain = keras.optimizers.SGD(Position())
        return keras.optimizers.LossScaleOptimizer(plain, initial_scale=8.0) if scaled else plain

    job = Job(model, data, lambda targets, outputs: outputs, optimizer=optimizer)
    _, state, told = trained(job, 4, position, replicas)
    assert float(state.shared[0][0, 0]) == -sum(position + replicas * step for step in range(4))
    assert told.global_step == position + 4


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("live", [1, 2, 3])
def test_a_rate_for_the_number_of_replicas_follows_those_that_train(live: int, scheduled: bool) -> None:
    """Of three replicas some are lost; the gradient is 1, so that the weight falls by the rate."""
    data = tf.data.Dataset.from_tensors((tf.ones([2, 1]), tf.zeros([2, 1]))).repeat()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])

    def optimizer(replicas: int) -> Any:
        rate = 0.25 * replicas
        falling = keras.optimizers.schedules.PolynomialDecay(rate, 8, rate / 2)
        return keras.optimizers.SGD(falling if scheduled else rate)

    network = FunctionalModel(Job(model, data, lambda targets, outputs: outputs, optimizer=optimizer), data.element_spec, 0, 3)
    begun, iterator = State.initial(network), iter(data)
    held = SharedParameters(network, DEVICES, [np.asarray(value) for value in begun.shared], 4)
    run_round(network, make_round(network, held, iterator, DEVICES), iterator, State((), begun.local), 1, 0, live)
    rate = 0.25 * live * (0.75 if scheduled else 1.0)
    assert float(held.pull_exact()[0][0][0, 0]) == pytest.approx(-rate / live, rel=1e-3)


@pytest.mark.parametrize(("steps", "each"), [(1, (1, 0)), (5, (3, 2))])
def test_devices_of_a_host_share_its_steps_and_their_mean_goes_on(steps: int, each: tuple[int, int]) -> None:
    """The gradient is 1, so that a device's weight falls by the sum of its rates and of what its own velocity adds."""
    data = tf.data.Dataset.from_tensors((tf.ones([2, 1]), tf.zeros([2, 1]))).repeat()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    job = Job(model, data, lambda targets, outputs: outputs, optimizer=lambda: keras.optimizers.SGD(Position(), momentum=0.5))
    network, state, told = trained(job, steps, 10, 1, DEVICES * 2)
    delta, velocities = [], []
    for mine in each:
        at, velocity = 0.0, 0.0
        for step in range(mine):
            velocity = 0.5 * velocity - (10 + 2 * step)
            at += velocity
        delta.append(at)
        velocities.append(velocity)
    assert float(state.shared[0][0, 0]) == pytest.approx(np.average(delta, weights=each))
    kept = [float(value[0, 0]) for spec, value in zip(network.local * 2, state.local, strict=True) if "momentum" in spec.name]
    assert kept == pytest.approx(velocities)
    assert (told.steps, told.global_step) == (steps, 10 + steps)


def half(values: Array) -> Array:
    """Return numbers as they cross the network."""
    scale = np.float32(np.abs(values).max() / 32_768 if values.size else 0) or np.float32(1)
    return (values / scale).astype(np.float16).astype(np.float32) * scale


def centre(values: Sequence[Array], devices: int, step: int = 7) -> SharedParameters:
    shared = [VariableSpec(f"variable{at}", value.shape, "float32", None) for at, value in enumerate(values)]
    return SharedParameters(SimpleNamespace(shared=shared), ["/device:CPU:0"] * devices, values, step)  # type: ignore[arg-type]


def both(delta: Sequence[Array]) -> tuple[list[Any], list[Any]]:
    """Return the two ends of a walk."""
    return [tf.zeros(one.shape) for one in delta], [tf.constant(one) for one in delta]


def by_device(values: Sequence[Array], devices: int, function: Callable[[Array], Array]) -> list[Array]:
    """Apply a function to each device's part of each variable; return arrays in the variables' shapes."""
    flat = np.concatenate([value.reshape(-1) for value in values])
    ends = np.cumsum([value.size for value in values]).tolist()
    cuts = sorted({*ends, *(len(flat) * at // devices for at in range(devices + 1))})
    flat = np.concatenate([function(flat[begin:end]) for begin, end in pairwise(cuts)])
    return [part.reshape(value.shape) for part, value in zip(np.split(flat, ends[:-1]), values, strict=True)]


VALUES = [
    RANDOM.normal(size=(5, 4)).astype(np.float32),
    np.array(3.0, np.float32),
    np.array([1e6, -3e5, 65_505], np.float32),
    np.zeros((2, 3), np.float32),
    np.array([1e-12, -2e-9], np.float32),
]


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_parameters_are_cut_over_devices_and_put_together_again(devices: int) -> None:
    held = centre(VALUES, devices)
    pulled, step = held.pull_exact()
    assert step == 7
    for found, value in zip(pulled, VALUES, strict=True):
        assert np.array_equal(found, value)
        assert found.shape == value.shape
    for found, wanted in zip(held.pull_fp16(), by_device(VALUES, devices, half), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert sum(held.bytes_per_round) == 4 * sum(value.size for value in VALUES)
    assert max(held.bytes_per_round) - min(held.bytes_per_round) <= 4


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_a_share_of_a_walk_is_added_as_it_crosses_the_network(devices: int) -> None:
    held = centre(VALUES, devices)
    delta = [RANDOM.normal(size=value.shape).astype(np.float32) for value in VALUES]
    assert int(held.push_delta(*both(delta), tf.constant(0.25), tf.constant(4, tf.int64))) == 11
    pulled, step = held.pull_exact()
    assert step == 11
    came = by_device(delta, devices, lambda part: half(part * np.float32(0.25)))
    for found, value, one in zip(pulled, VALUES, came, strict=True):
        np.testing.assert_allclose(found, value + one, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("most", [1, 2, 3, 5])
def test_a_device_s_part_in_pieces_is_the_same(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece has a scale of its own, so that it comes as near at least as the whole part would."""
    monkeypatch.setattr("scaletier.shared_parameters._MOST_ELEMENTS", most)
    held = centre(VALUES, 2)
    assert len(held._pieces) >= sum(value.size for value in VALUES) / most
    assert all(piece.shape[0] <= most for piece in held._pieces)
    for found, value in zip(held.pull_exact()[0], VALUES, strict=True):
        assert np.array_equal(found, value)
        assert found.shape == value.shape
    read = [np.asarray(one) for one in held.pull_fp16()]
    for found, value, coarser in zip(read, VALUES, by_device(VALUES, 2, half), strict=True):
        assert np.abs(found - value).max(initial=0) <= np.abs(coarser - value).max(initial=0)
    delta = [RANDOM.normal(size=value.shape).astype(np.float32) for value in VALUES]
    held.push_delta(*both(delta), tf.constant(0.5), tf.constant(4, tf.int64))
    pulled, step = held.pull_exact()
    assert (step, sum(held.bytes_per_round)) == (11, 4 * sum(value.size for value in VALUES))
    for found, value, one in zip(pulled, VALUES, delta, strict=True):
        np.testing.assert_allclose(found, value + 0.5 * one, rtol=1e-6, atol=2**-11 * np.abs(one).max(initial=0))


def test_fewer_parameters_than_devices() -> None:
    held = centre([np.array([1.5], np.float32)], 3)
    assert [float(one[0]) for one in held.pull_fp16()] == [1.5]
    held.push_delta(*both([np.array([2.0], np.float32)]), tf.constant(0.5), tf.constant(1, tf.int64))
    assert held.pull_exact()[0][0].tolist() == [2.5]


@given(st.lists(st.floats(-1.0, 1.0), min_size=1, max_size=20), st.integers(-30, 30))
def test_half_precision_is_of_the_largest_whatever_that_is(values: list[float], exponent: int) -> None:
    given = (np.array(values) * 10.0**exponent).astype(np.float32)
    (found,) = _unpack(*_pack([tf.constant(given)]), [(0, len(given))])
    # Of the largest all of 11 bits are kept, and nothing is off by more than what is the last of them there.
    np.testing.assert_allclose(found, given, rtol=2**-11, atol=2**-25 / 32_768 * 1.001 * np.abs(given).max() + 1e-33)


def test_a_large_statistic_takes_nothing_from_the_weights_beside_it() -> None:
    weights, variance = RANDOM.normal(size=100).astype(np.float32), np.array([1e12, 1.0], np.float32)
    held = centre([weights, variance], 1)
    np.testing.assert_allclose(held.pull_fp16()[0], weights, rtol=2**-11, atol=1e-6)
    delta = [np.full(100, 1e-3, np.float32), np.array([1e9, 0.0], np.float32)]
    held.push_delta(*both(delta), tf.constant(1.0), tf.constant(1, tf.int64))
    np.testing.assert_allclose(held.pull_exact()[0][0], weights + delta[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_none_on_the_other_side(odd: float) -> None:
    held = centre([np.array([1.0, odd, 2.0], np.float32)], 1)
    assert not np.isfinite(held.pull_fp16()[0]).all()
    sound = centre([np.ones(3, np.float32)], 1)
    sound.push_delta(*both([np.array([0.0, odd, 1.0], np.float32)]), tf.constant(1.0), tf.constant(1, tf.int64))
    assert not np.isfinite(sound.pull_exact()[0][0]).all()


def test_a_round_begins_with_what_the_servers_hold_by_then_and_adds_its_share() -> None:
    job = Job(linear, dataset(INPUTS, TARGETS).repeat(), "mse", optimizer=keras.optimizers.SGD(0.1))
    network = FunctionalModel(job, job.data.element_spec, 0, 2)
    begun = State.initial(network)
    held = SharedParameters(network, ["/device:CPU:0"] * 2, [np.asarray(value) for value in begun.shared], 10)
    iterator = iter(job.data)
    run = make_round(network, held, iterator, DEVICES)
    state, told = run_round(network, run, iterator, State((), begun.local), STEPS, 0, 2)
    assert (told.steps, told.global_step, told.staleness) == (STEPS, 10 + STEPS, 0)
    _, alone, _ = trained(job, STEPS)
    for read, kept, before, after in zip(state.shared, held.pull_exact()[0], begun.shared, alone.shared, strict=True):
        np.testing.assert_allclose(read, before, rtol=2**-10, atol=1e-4)
        np.testing.assert_allclose(kept, before + 0.5 * (after - before), rtol=1e-3, atol=1e-4)
    wanted = [value + 1 for value in held.pull_exact()[0]]
    held.push_delta(
        *both([np.ones(value.shape, np.float32) for value in begun.shared]), 1.0, tf.constant(7, tf.int64)
    )  # another replica's
    state, told = run_round(network, run, iterator, State((), state.local), 0, 0, 2)
    assert (told.steps, told.global_step) == (0, 10 + STEPS + 7)
    for read, kept in zip(state.shared, wanted, strict=True):
        np.testing.assert_allclose(read, kept, rtol=2**-10, atol=2e-3)


# What Keras itself makes of the same batches is the reference from here on.


def deep() -> Any:
    """Return a model with most kinds of layers, and nothing random."""
    words = keras.Input((4,), dtype="int64", name="words")
    x = keras.layers.Flatten()(keras.layers.Embedding(9, 3)(words))
    x = keras.layers.Dense(6, "relu", kernel_regularizer="l2", name="middle")(x)
    x = keras.layers.Dropout(0.0)(keras.layers.BatchNormalization(momentum=0.5)(x))
    return keras.Model(words, keras.layers.Dense(2, name="out")(x), name="deep")


def two() -> Any:
    """Return two outputs by name, of which one goes through a part of the other's layers."""
    x = keras.Input((WIDTH,), name="x")
    middle = keras.layers.Dense(4, "tanh", name="middle")(x)
    first = keras.layers.Dense(2, name="first_layer")(middle)
    second = keras.layers.Dense(1, "sigmoid", name="second_layer")(middle)
    return keras.Model(x, {"first": first, "second": second}, name="two")


def one() -> Any:
    return keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(1, name="out")], name="one")


def masked() -> Any:
    """Return a model in which word 0 is masked, for the layers, the loss and the metrics."""
    words = keras.layers.Embedding(9, 3, mask_zero=True)
    layers = [words, keras.layers.Dense(4, "tanh"), keras.layers.Dense(2, name="out")]
    return keras.Sequential([keras.Input((4,), dtype="int64"), *layers], name="masked")


class Inner(keras.layers.Layer):  # type: ignore[misc]
    """A layer of layers, which does not speak of training."""

    def __init__(self) -> None:
        super().__init__(name="inner")
        self.norm = keras.layers.BatchNormalization(momentum=0.5)

    def build(self, shape: Any) -> None:
        self.norm.build(shape)

    def call(self, inputs: Any) -> Any:
        return self.norm(inputs)


def nested() -> Any:
    begin = keras.Input((WIDTH,))
    inner = Inner()(keras.layers.Dense(4, "tanh", name="first")(begin))
    return keras.Model(begin, keras.layers.Dense(2, name="out")(inner), name="nested")


WORDS = RANDOM.integers(0, 9, (20, 4))
FLAGS = RANDOM.integers(0, 2, (20, 1)).astype(np.float32)
WEIGHTS = RANDOM.uniform(0, 2, 20).astype(np.float32)
LABELS = RANDOM.integers(0, 2, 20)
BY_OUTPUT = {"first": TARGETS, "second": FLAGS}
LOSSES = {"first": "mse", "second": keras.losses.BinaryCrossentropy()}
CROSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
CASES: dict[str, tuple[Callable[[], Any], tuple[Any, ...], Any, Any]] = {
    "linear": (linear, (INPUTS, TARGETS), "mse", ["mae", "mse"]),
    "labels": (linear, (INPUTS, LABELS), CROSS, ["accuracy"]),
    "labels of one column": (linear, (INPUTS, LABELS[:, None]), CROSS, ["accuracy"]),
    "weighted": (linear, (INPUTS, TARGETS, WEIGHTS), "mse", ["mae"]),
    "weighted labels": (linear, (INPUTS, LABELS, WEIGHTS), CROSS, ["accuracy"]),
    "deep": (deep, (WORDS, TARGETS), "mse", ["mae"]),
    "deep, weighted": (deep, (WORDS, TARGETS, WEIGHTS), "huber", []),
    "one column": (one, (INPUTS, TARGETS[:, 0], WEIGHTS), lambda targets, outputs: tf.square(targets - outputs), []),
    "masked": (masked, (WORDS, RANDOM.normal(size=(20, 4, 2)).astype(np.float32)), "mse", ["mae"]),
    "nested": (nested, (INPUTS, TARGETS), "mse", []),
    "two outputs": (two, (INPUTS, BY_OUTPUT), LOSSES, {"first": ["mae"], "second": ["mae", "accuracy"]}),
}


@pytest.mark.parametrize(
    "case", ["labels", "weighted labels", "deep, weighted", "one column", "masked", "nested", "two outputs"]
)
def test_steps_are_those_of_keras(case: str) -> None:
    make, parts, loss, metrics = CASES[case]
    model = make()
    begun = model.get_weights()
    job = Job(model, dataset(*parts), loss, metrics, keras.optimizers.SGD(0.05, 0.9))
    network, state, told = trained(job, STEPS)
    after = named(network, state.shared)
    model.set_weights(begun)
    model.compile(keras.optimizers.SGD(0.05, 0.9), loss, metrics=metrics, run_eagerly=True)
    measured = {name: found[-1] for name, found in model.fit(dataset(*parts), verbose=0, shuffle=False).history.items()}
    for variable in model.variables:
        wanted, name = np.asarray(variable), variable.path.removeprefix(f"{model.name}/")
        np.testing.assert_allclose(after[name], wanted, atol=2e-5, err_msg=name)
    assert {"loss": told.loss, **told.metrics} == pytest.approx(measured, rel=1e-4)


@pytest.mark.parametrize("case", ["labels of one column", "weighted", "deep", "masked", "two outputs"])
def test_an_evaluation_is_that_of_keras(case: str) -> None:
    """Of batches of other sizes, too: the last is smaller."""
    make, parts, loss, metrics = CASES[case]
    model = make()
    data = dataset(*parts, batch=7)
    network = FunctionalModel(Job(model, data, loss, metrics), data.element_spec, 0)
    found = make_evaluate(network, copied(network), data, None)(lambda: False)
    assert found
    model.compile("sgd", loss, metrics=metrics)
    wanted = model.evaluate(data, verbose=0, return_dict=True)
    assert {"loss": found.loss, **found.metrics} == pytest.approx(wanted, rel=1e-4)


def test_an_evaluation_of_one_sample_is_that_of_keras() -> None:
    model, data = linear(), dataset(INPUTS[:1], TARGETS[:1], batch=1)
    network = FunctionalModel(Job(model, data, "mse"), data.element_spec, 0)
    found = make_evaluate(network, copied(network), data, None)(lambda: False)
    model.compile("sgd", "mse")
    assert found
    assert found.loss == pytest.approx(model.evaluate(data, verbose=0), rel=1e-4)


def copied(network: FunctionalModel) -> LocalCopy:
    """Return the local copy with which a job begins."""
    found = LocalCopy(network)
    found.assign(*State.initial(network), 0)
    return found


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_loss_that_is_a_function_is_in_float32_whatever_the_model_computes_in(policy: str) -> None:
    """The square of 301 is more than float16 holds, and bfloat16 takes 301 for 302; by `fit` it is 90,601."""
    data = tf.data.Dataset.from_tensors((tf.zeros([2, 1]), tf.fill([2, 1], 301.0))).repeat()
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", dtype=policy)
    model = keras.Sequential([keras.Input((1,)), layer])
    _, _, told = trained(Job(model, data, "mse", optimizer="sgd"), 1)
    assert told.loss == 301.0**2


class Noise(keras.layers.Layer):  # type: ignore[misc]
    """Adds random numbers, by a generator of its own or by none."""

    def __init__(self, own_generator: bool) -> None:
        super().__init__()
        self.generator = keras.random.SeedGenerator(1) if own_generator else None

    def call(self, inputs: Any) -> Any:
        return inputs + keras.random.normal((4, 1), seed=self.generator)


@pytest.mark.parametrize("own_generator", [True, False])
def test_random_numbers_are_others_at_each_step(own_generator: bool) -> None:
    model = keras.Sequential([keras.Input((WIDTH,)), Noise(own_generator), keras.layers.Dense(2)], name="noisy")
    network, state, _ = trained(Job(model, dataset(INPUTS, TARGETS), "mse", optimizer="sgd"), 2)
    (generator,) = (value for spec, value in zip(network.local, state.local, strict=True) if "seed" in spec.name)
    assert not np.array_equal(generator, network.initial(next(spec for spec in network.local if "seed" in spec.name)))


def test_a_replica_that_begins_late_continues_the_master_s_optimizer_by_other_random_numbers() -> None:
    layers = keras.layers.Dropout(0.5), keras.layers.Dense(2)
    model = keras.Sequential([keras.Input((WIDTH,)), *layers])
    job = Job(model, dataset(INPUTS, TARGETS), "mse", optimizer=keras.optimizers.Adam())
    network, state, _ = trained(job, STEPS)
    begun = [initial_local(network, state.local, index, 2, 1, step) for index, step in ((0, 8), (1, 8), (1, 16))]
    generators = set()
    for spec, value, *others in zip(network.local, state.local, *begun, strict=True):
        assert np.array_equal(others[0], value), spec.name
        if private.is_seed(spec.variable):
            generators |= {tuple(other.tolist()) for other in others}
        else:
            assert all(np.array_equal(other, value) for other in others), spec.name
    assert len(generators) == 3
    assert any(np.any(value) for spec, value in zip(network.local, begun[1], strict=True) if "velocity" in spec.name)


def test_metrics_may_be_made_by_a_function_and_wait_for_shapes() -> None:
    data = dataset(INPUTS, TARGETS)
    made = Job(linear, data, "mse", metrics=lambda: [keras.metrics.R2Score()], optimizer=keras.optimizers.SGD(0.0))
    _, state, told = trained(made, STEPS)
    outputs = INPUTS @ np.asarray(state.shared[0]) + np.asarray(state.shared[1])
    wanted = 1 - ((TARGETS - outputs) ** 2).sum(0) / ((TARGETS - TARGETS.mean(0)) ** 2).sum(0)
    assert told.metrics == pytest.approx({"r2_score": wanted.mean()}, rel=1e-4)


@pytest.mark.parametrize("metrics", ["mae", keras.metrics.MeanAbsoluteError(name="mae"), keras.losses.mean_absolute_error])
def test_one_metric_needs_no_list(metrics: Any) -> None:
    job = Job(linear, dataset(INPUTS, TARGETS), "mse", metrics)
    (name,) = FunctionalModel(job, job.data.element_spec, 0).metric_names
    assert name in ("mae", "mean_absolute_error")


def test_metrics_of_one_name_are_numbered() -> None:
    job = Job(linear, dataset(INPUTS, TARGETS), "mse", ["mae", keras.metrics.MeanAbsoluteError(name="mae"), "mse"])
    assert FunctionalModel(job, job.data.element_spec, 0).metric_names == ["mae", "mae_1", "mse"]


def stages(network: FunctionalModel, count: int) -> list[Stage]:
    """Return the model's parts on `count` hosts, all of them here."""
    parts = units(network)
    cuts = partition([unit.size for unit in parts], count)
    assert len(cuts) == count + 1
    found = [Stage(f"worker/{at}", "/device:CPU:0", parts[begin:end]) for at, (begin, end) in enumerate(pairwise(cuts))]
    for stage in found:
        specs = (spec for unit in stage.units for spec in (*unit.trained, *unit.others))
        stage.variables.update({spec.name: tf.Variable(network.initial(spec)) for spec in specs})
    return found


def gradients(model: Any, loss: Callable[[Any, Any, Any], Any], batch: Sequence[Any], cuts: list[int]) -> tuple[Any, float]:
    """Return Keras's gradients of the whole model for a batch in these parts in order; and the mean loss."""
    sums, mean = [np.zeros(variable.shape) for variable in model.trainable_variables], 0.0
    for begin, end in pairwise(cuts):
        part = [tf.nest.map_structure(lambda one, b=begin, e=end: one[b:e], each) for each in batch]
        with tf.GradientTape() as tape:
            value = loss(part, model(part[0], training=True), None) + sum(model.losses)
        share = (end - begin) / (cuts[-1] - cuts[0])
        found = tape.gradient(value, [variable.value for variable in model.trainable_variables])
        sums = [one + share * tf.convert_to_tensor(change).numpy() for one, change in zip(sums, found, strict=True)]
        mean += share * float(value)
    return dict(zip((id(variable) for variable in model.trainable_variables), sums, strict=True)), mean


def keras_loss(case: str) -> Callable[[Any, Any, Any], Any]:
    _, _, loss, _ = CASES[case]

    def one(given: Any, targets: Any, outputs: Any, weights: Any) -> Any:
        losses = keras.losses.get(given)
        losses = losses.call(targets, outputs) if isinstance(losses, keras.losses.Loss) else losses(targets, outputs)
        return tf.reduce_mean(losses if weights is None else losses * weights)

    def whole(part: Any, outputs: Any, _: Any) -> Any:
        weights = part[2] if len(part) == 3 else None
        if isinstance(loss, dict):
            return sum(one(loss[key], part[1][key], outputs[key], weights) for key in loss)
        return one(loss, part[1], outputs, weights)

    return whole


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize(
    ("case", "hosts"), [("deep", 2), ("deep", 4), ("deep, weighted", 3), ("nested", 2), ("two outputs", 2)]
)
def test_there_and_back_through_stages_are_the_gradients_of_the_whole(case: str, hosts: int, microbatches: int) -> None:
    make, parts, loss, metrics = CASES[case]
    size, model = 7, make()
    data = dataset(*parts, batch=size)
    network = FunctionalModel(Job(model, data, loss, metrics), data.element_spec, 0)
    batch = next(iter(data))
    done = forward_backward(network, stages(network, hosts), Batch.of(batch), size, microbatches, lambda loss: loss)
    cuts = [size * at // microbatches for at in range(microbatches + 1)]
    wanted, mean = gradients(model, keras_loss(case), batch, cuts)
    assert {*done.changes} == {spec.name for spec in network.trained}
    for spec in network.trained:
        np.testing.assert_allclose(done.changes[spec.name], wanted[id(spec.variable)], atol=1e-5, err_msg=spec.name)
    assert float(done.loss) == pytest.approx(mean, rel=1e-5)
    for spec in network.shared[len(network.trained) :]:  # the moving means and variances, which Keras has moved by now
        np.testing.assert_allclose(done.others[spec.name], np.asarray(spec.variable), atol=1e-5, err_msg=spec.name)


def test_metrics_of_microbatches_are_those_of_the_batch() -> None:
    make, parts, loss, _ = CASES["labels"]
    data = dataset(*parts, batch=7)
    network = FunctionalModel(Job(make, data, loss, ["accuracy"]), data.element_spec, 0)
    batch = Batch.of(next(iter(data)))
    outputs = network.predict(*State.initial(network), batch.inputs)
    for microbatches in (1, 3):
        done = forward_backward(network, stages(network, 1), batch, 7, microbatches, lambda loss: loss)
        wanted = np.mean(np.argmax(outputs, 1) == batch.targets.numpy())
        assert float(done.results[0]) == pytest.approx(wanted)


def test_a_layer_with_weights_that_is_gone_through_twice_is_on_no_two_hosts() -> None:
    begin, twice = keras.Input((WIDTH,)), keras.layers.Dense(4, name="twice")
    middle = keras.layers.Dense(4, name="middle")(keras.layers.ReLU()(twice(keras.layers.Dense(4, name="first")(begin))))
    model = keras.Model(begin, keras.layers.Dense(2, name="out")(twice(middle)), name="tied")
    job = Job(model, dataset(INPUTS, TARGETS), "mse")
    wanted = r"^the model tied cannot be laid on several hosts: it goes through one layer more than once$"
    with pytest.raises(JobError, match=wanted):
        units(FunctionalModel(job, job.data.element_spec, 0))


def test_what_is_masked_stays_so_from_stage_to_stage() -> None:
    make, parts, loss, metrics = CASES["masked"]
    model, data = make(), dataset(*parts, batch=7)
    network = FunctionalModel(Job(model, data, loss, metrics), data.element_spec, 0)
    batch = next(iter(data))
    done = forward_backward(network, stages(network, 2), Batch.of(batch), 7, 1, lambda loss: loss)
    model.compile("sgd", loss, metrics=metrics, run_eagerly=True)
    wanted = model.evaluate(*batch, verbose=0, return_dict=True)
    assert float(done.loss) == pytest.approx(wanted["loss"], rel=1e-5)
    assert float(done.results[0]) == pytest.approx(wanted["mae"], rel=1e-5)


def around() -> list[Any]:
    """Return layers with a mask: the mean is of the words that there are, by the first layer."""
    names = keras.layers.Embedding(9, 3, mask_zero=True, name="words"), keras.layers.Dense(4, name="each")
    mean = keras.layers.GlobalAveragePooling1D(name="mean")
    return [*names, mean, keras.layers.Dense(3, name="two"), keras.layers.Dense(2, name="out")]


def functional(begin: Any, layers: Sequence[Any]) -> Any:
    reached = begin
    for layer in layers:
        reached = layer(reached)
    return keras.Model(begin, reached)


@pytest.mark.parametrize("make", [lambda begin, layers: keras.Sequential([begin, *layers]), functional])
def test_what_goes_around_layers_keeps_them_together(make: Callable[[Any, Any], Any]) -> None:
    model, data = make(keras.Input((4,), dtype="int64"), around()), dataset(WORDS, TARGETS, batch=7)
    network = FunctionalModel(Job(model, data, "mse"), data.element_spec, 0)
    layers = [[name for name in unit.name.split() if not name.startswith("not_equal")] for unit in units(network)]
    assert layers == [["words", "each", "mean"], ["two"], ["out"]]
    batch = Batch.of(next(iter(data)))
    done = forward_backward(network, stages(network, 2), batch, 7, 1, lambda loss: loss)
    outputs = model(batch.inputs, training=True)
    assert float(done.loss) == pytest.approx(float(np.mean((outputs - batch.targets) ** 2)), rel=1e-5)


class Bare(keras.Model):  # type: ignore[misc]
    """Its `call` knows nothing of training, and then Keras does not tell the layers either."""

    def __init__(self) -> None:
        super().__init__(name="bare")
        self.norm = keras.layers.BatchNormalization(momentum=0.5)
        self.out = keras.layers.Dense(2, kernel_regularizer="l2")

    def call(self, inputs: Any) -> Any:
        return self.out(self.norm(inputs))


class Told(Bare):
    """Its `call` says nothing of training to its layers, which Keras does by itself."""

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        return super().call(inputs)


@pytest.mark.parametrize("kind", [Bare, Told])
def test_the_layers_within_a_subclassed_model_are_told_of_training_as_by_keras(kind: Any) -> None:
    model = kind()
    model(INPUTS[:1])
    begun = model.get_weights()
    network, state, _ = trained(Job(model, dataset(INPUTS, TARGETS), "mse", optimizer="sgd"), STEPS)
    after = named(network, state.shared) | {spec.name: network.initial(spec) for spec in network.fixed}
    model.set_weights(begun)
    model.compile("sgd", "mse", run_eagerly=True)
    model.fit(dataset(INPUTS, TARGETS), verbose=0, shuffle=False)
    for variable in model.variables:
        name = variable.path.removeprefix("bare/")
        np.testing.assert_allclose(after[name], np.asarray(variable), atol=2e-5, err_msg=name)


def test_a_compiled_model_s_metrics_are_weighted_where_it_says_so() -> None:
    model, data = linear(), dataset(INPUTS, TARGETS, WEIGHTS)
    model.compile("sgd", "mse", metrics=["mae"], weighted_metrics=["mse"], run_eagerly=True)
    network = FunctionalModel(Job(model, data), data.element_spec, 0)
    found = make_evaluate(network, copied(network), data, None)(lambda: False)
    assert found
    model.compile("sgd", "mse", metrics=["mae"], weighted_metrics=["mse"], run_eagerly=True)
    assert {"loss": found.loss, **found.metrics} == pytest.approx(model.evaluate(data, verbose=0, return_dict=True), rel=1e-4)
