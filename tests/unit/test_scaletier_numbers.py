"""A job's numbers equal those of plain NumPy, and of the same model trained by Keras."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaletier import checkpoint, private
from scaletier.checkpoint import TrainingState
from scaletier.evaluation import make_evaluate
from scaletier.functional_model import Batch, FunctionalModel
from scaletier.job import Job, JobError
from scaletier.loop import Round
from scaletier.round_graph import (
    LocalResult,
    handle_specs,
    initial_local,
    list_handles,
    make_round,
    named_handles,
    replica_variables,
    run_round,
)
from scaletier.shared_parameters import SharedParameters, _divide_packed, _expand, _pack, parts_within
from scaletier.stages import Stage, forward_backward, make_layer_groups, partition
from scaletier.synchronous import AllReduce
from scaletier.tensorflow_setup import import_tensorflow
from scaletier.variables import Variables, VariableSpec

tf = import_tensorflow()
import keras  # noqa: E402 - TensorFlow imports it, without its log messages

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


def train_round(
    job: Job, steps: int, position: int = 0, replicas: int = 1, devices: Sequence[str] = DEVICES
) -> tuple[FunctionalModel, TrainingState, Round]:
    """Train `steps` steps in one round from the job's begin; the state is the first device's."""
    network, states, round_ = train_devices(job, steps, position, replicas, devices)
    return network, states[0], round_


def train_devices(
    job: Job, steps: int, position: int, replicas: int, devices: Sequence[str]
) -> tuple[FunctionalModel, list[TrainingState], Round]:
    """Train a round, and return the variables of each device."""
    network = FunctionalModel(job, job.data.element_spec, 0, replicas * len(devices))
    iterator = iter(job.data)
    run = make_round(network, None, iterator, devices)
    states = [TrainingState(network) for _ in devices]
    for variable in (states[0].step, *(one for spec, one in states[0].pairs() if spec in network.iterations)):
        variable.assign_add(position)
    return network, states, run_round(network, run, iterator, states, steps, replicas)


def by_name(network: FunctionalModel, values: Sequence[Any]) -> dict[str, Array]:
    return {spec.name: np.asarray(value) for spec, value in zip(network.shared, values, strict=True)}


def loss_and_gradients(kernel: Array, bias: Array, inputs: Array, targets: Array) -> tuple[float, Array, Array]:
    """Return the mean squared error of a linear model, and its gradients."""
    error = inputs @ kernel + bias - targets
    return float((error**2).mean()), 2 * inputs.T @ error / error.size, 2 * error.sum(0) / error.size


def batches() -> list[tuple[Array, Array]]:
    return [(INPUTS[at : at + BATCH].astype(float), TARGETS[at : at + BATCH].astype(float)) for at in range(0, 20, BATCH)]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_local_steps_of_sgd_with_nesterov_momentum(momentum: float) -> None:
    optimizer = keras.optimizers.SGD(0.1, momentum=momentum, nesterov=momentum > 0)
    job = Job(linear, dataset(INPUTS, TARGETS), "mse", ["mae"], optimizer)
    network, state, round_ = train_round(job, STEPS)
    weights = [network.initial(spec).astype(float) for spec in network.shared]
    velocities, losses, errors = [np.zeros_like(one) for one in weights], [], []
    for inputs, targets in batches():
        errors.append(np.abs(inputs @ weights[0] + weights[1] - targets).mean())
        loss, *gradients = loss_and_gradients(*weights, inputs=inputs, targets=targets)
        losses.append(loss)
        velocities = [momentum * v - 0.1 * g for v, g in zip(velocities, gradients, strict=True)]
        weights = [w + momentum * v - 0.1 * g for w, v, g in zip(weights, velocities, gradients, strict=True)]
    for actual, expected in zip(state.shared, weights, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5)
    assert round_.loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert round_.metrics["mae"] == pytest.approx(np.mean(errors), rel=1e-5)
    assert (round_.steps, round_.global_step, round_.staleness) == (STEPS, STEPS, 0)


def test_local_steps_of_adam_continue_the_previous_round() -> None:
    job = Job(linear, dataset(INPUTS, TARGETS), "mse", optimizer=keras.optimizers.Adam(0.01))
    network = FunctionalModel(job, job.data.element_spec, 0)
    iterator = iter(job.data)
    run = make_round(network, None, iterator, DEVICES)
    state = TrainingState(network)
    first, second = (run_round(network, run, iterator, [state], steps, 1) for steps in (2, 3))
    assert (first.global_step, second.global_step) == (2, 5)
    weights = [network.initial(spec).astype(float) for spec in network.shared]
    means, squares = [np.zeros_like(one) for one in weights], [np.zeros_like(one) for one in weights]
    for count, (inputs, targets) in enumerate(batches(), 1):
        _, *gradients = loss_and_gradients(*weights, inputs=inputs, targets=targets)
        means = [0.9 * m + 0.1 * g for m, g in zip(means, gradients, strict=True)]
        squares = [0.999 * s + 0.001 * g * g for s, g in zip(squares, gradients, strict=True)]
        rate = 0.01 * np.sqrt(1 - 0.999**count) / (1 - 0.9**count)
        weights = [w - rate * m / (np.sqrt(s) + 1e-7) for w, m, s in zip(weights, means, squares, strict=True)]
    for actual, expected in zip(state.shared, weights, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5)


class Position(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """A learning rate that equals the step."""

    def __call__(self, step: Any) -> Any:
        return tf.cast(step, tf.float32)


@pytest.mark.parametrize("scaled", [False, True], ids=["", "of a scaled loss"])
@pytest.mark.parametrize(("position", "replicas", "before"), [(0, 1, 0), (100, 1, 0), (100, 3, 0), (0, 1, 7), (0, 3, 7)])
def test_a_schedule_is_evaluated_at_the_global_step(position: int, replicas: int, before: int, scaled: bool) -> None:
    """The gradient is 1, so the weight falls by the sum of the rates; other replicas step in between.

    The program has set the optimizer's steps to `before`.
    """
    data = tf.data.Dataset.from_tensors((tf.ones([2, 1]), tf.zeros([2, 1]))).repeat()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])

    def optimizer() -> Any:
        plain = keras.optimizers.SGD(Position())
        plain.iterations.assign(before)
        return keras.optimizers.LossScaleOptimizer(plain, initial_scale=8.0) if scaled else plain

    job = Job(model, data, lambda targets, outputs: outputs, optimizer=optimizer)
    _, state, round_ = train_round(job, 4, position, replicas)
    assert float(state.shared[0][0, 0]) == -sum(position + before + replicas * step for step in range(4))
    assert round_.global_step == position + 4


def test_a_schedule_does_not_count_steps_that_are_skipped() -> None:
    """The gradient is 8; scaled by 2 ** 126 and by half of that it is not finite."""
    data = tf.data.Dataset.from_tensors((tf.ones([2, 1]), tf.zeros([2, 1]))).repeat()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(Position()), initial_scale=2.0**126)
    _, state, _ = train_round(Job(model, data, lambda targets, outputs: 8.0 * outputs, optimizer=optimizer), 5)
    assert float(state.shared[0][0, 0]) == -8.0 * (0 + 1 + 2)


@pytest.mark.parametrize(
    ("replicas", "own", "is_stored", "count"), [(3, 90, True, 99), (1, 90, True, 90), (3, 33, False, 99), (1, 90, False, 90)]
)
def test_one_process_counts_the_steps_that_all_replicas_took_before(
    replicas: int, own: int, is_stored: bool, count: int, tmp_path: Path
) -> None:
    job = Job(linear, dataset(INPUTS, TARGETS), "mse")
    networks = [FunctionalModel(job, job.data.element_spec, 0, each) for each in (replicas, 1)]
    states = [TrainingState(network) for network in networks]
    states[0].step.assign(99)
    for state, network in zip(states, networks, strict=True):
        (counted,) = (variable for spec, variable in state.pairs() if spec in network.iterations)
        if state is states[0]:
            counted.assign(own)
            variables = state.variables | ({checkpoint.REPLICAS: tf.Variable(replicas)} if is_stored else {})
            checkpoint.Saver(variables, state.step, str(tmp_path), 1).save()
    reader = checkpoint.open_newest(str(tmp_path), networks[1])
    assert reader
    states[1].restore(reader)
    assert int(counted) == count


def test_a_variable_resumes_though_its_type_has_changed(tmp_path: Path) -> None:
    job = Job(linear, dataset(INPUTS, TARGETS), "mse")
    network = FunctionalModel(job, job.data.element_spec, 0)
    state, (spec,) = TrainingState(network), network.iterations
    stored = {checkpoint.key_of(spec): tf.Variable(np.float32(90)), checkpoint.REPLICAS: tf.Variable(1)}
    checkpoint.Saver(state.variables | stored, state.step, str(tmp_path), 1).save()
    resumed = TrainingState(network, checkpoint.open_newest(str(tmp_path), network))
    (counted,) = (variable for each, variable in resumed.pairs() if each is spec)
    assert (int(counted), counted.dtype) == (90, tf.as_dtype(spec.dtype))


@pytest.mark.parametrize(("scheduled", "halved"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("live", [1, 2, 3])
def test_a_rate_by_replicas_follows_the_training_replicas(live: int, scheduled: bool, halved: bool) -> None:
    """Some of three replicas are lost; the gradient is 1, so the weight falls by the rate."""
    data = tf.data.Dataset.from_tensors((tf.ones([2, 1]), tf.zeros([2, 1]))).repeat()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])

    def optimizer(replicas: int) -> Any:
        rate = 0.25 * replicas
        falling = keras.optimizers.schedules.PolynomialDecay(rate, 8, rate / 2)
        return keras.optimizers.SGD(falling if scheduled else rate)

    network = FunctionalModel(Job(model, data, lambda targets, outputs: outputs, optimizer=optimizer), data.element_spec, 0, 3)
    state, iterator = TrainingState(network), iter(data)
    parameters = SharedParameters(network, DEVICES, state.shared, 4)
    rates = [variable for spec, variable in state.pairs() if spec in network.learning_rates]
    assert len(rates) == (not scheduled)
    if halved:  # by a callback
        rates[0].assign(rates[0] / 2)
    run_round(network, make_round(network, parameters, iterator, DEVICES), iterator, [state], 1, live)
    rate = 0.25 * live * (0.75 if scheduled else 0.5 if halved else 1.0)
    assert float(pulled_exactly(parameters)[0][0][0, 0]) == pytest.approx(-rate / live, rel=1e-3)


@pytest.mark.parametrize(("steps", "each"), [(1, (1, 0)), (5, (3, 2))])
def test_devices_of_a_host_share_its_steps_and_continue_from_their_mean(steps: int, each: tuple[int, int]) -> None:
    """The gradient is 1, so a device's weight falls by the sum of its rates plus its velocity's part."""
    data = tf.data.Dataset.from_tensors((tf.ones([2, 1]), tf.zeros([2, 1]))).repeat()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    job = Job(model, data, lambda targets, outputs: outputs, optimizer=lambda: keras.optimizers.SGD(Position(), momentum=0.5))
    network, states, round_ = train_devices(job, steps, 10, 1, DEVICES * 2)
    delta, velocities = [], []
    for device_steps in each:
        at, velocity = 0.0, 0.0
        for step in range(device_steps):
            velocity = 0.5 * velocity - (10 + 2 * step)
            at += velocity
        delta.append(at)
        velocities.append(velocity)
    assert float(states[0].shared[0][0, 0]) == pytest.approx(np.average(delta, weights=each))
    pairs = [pair for state in states for pair in zip(network.local, state.local, strict=True)]
    stored = [float(value[0, 0]) for spec, value in pairs if "momentum" in spec.name]
    assert stored == pytest.approx(velocities)
    assert (round_.steps, round_.global_step) == (steps, 10 + steps)


def round_to_fp16(values: Array) -> Array:
    """Return numbers after a transfer in fp16."""
    scale = np.float32(np.abs(values).max() / 32_768 if values.size else 0) or np.float32(1)
    return (values / scale).astype(np.float16).astype(np.float32) * scale


def make_parameters(values: Sequence[Array], devices: int, step: int = 7) -> SharedParameters:
    shared = [VariableSpec(f"variable{at}", value.shape, "float32", None) for at, value in enumerate(values)]
    network = SimpleNamespace(shared=shared, local=[], ema_pairs=lambda *_: [])
    return SharedParameters(network, ["/device:CPU:0"] * devices, values, step)  # type: ignore[arg-type]


def pulled_exactly(parameters: SharedParameters) -> tuple[list[Array], int]:
    variables = empty_variables(parameters)
    step = in_graph(parameters, variables, parameters.pull_exact)
    return [variable.numpy() for variable in variables.shared], step


def pulled_rounded(parameters: SharedParameters) -> list[Array]:
    """Return the parameters that a round begins with."""
    variables = empty_variables(parameters)
    in_graph(parameters, variables, lambda handles: parameters.begin(handles)[0])
    return [variable.numpy() for variable in variables.shared]


def empty_variables(parameters: SharedParameters) -> Variables:
    """Return variables without values for parameters."""
    network = parameters.network
    return Variables(
        *([tf.Variable(tf.zeros([0]), shape=tf.TensorShape(None)) for _ in part] for part in (network.shared, network.local)),
        step=tf.Variable(0, dtype=tf.int64),
    )


def in_graph(parameters: SharedParameters, variables: Variables, function: Callable[[Variables], Any]) -> int:
    """Call a function of handles of variables; it gives them a global step, which is returned."""
    network = parameters.network
    graph = tf.function(lambda handles: function(named_handles(network, handles)), autograph=False)
    step = int(graph.get_concrete_function(handle_specs(network))(list_handles(variables)))
    assert step == int(variables.step)
    return step


def push(parameters: SharedParameters, delta: Sequence[Array], share: float, steps: int) -> int:
    """Push a share of a delta and its steps; return the global step."""
    flat = [tf.zeros([one.size]) for one in delta]
    start = []
    for piece_range, ranges in zip(parameters._piece_ranges, parameters._slice_ranges, strict=True):
        zeros = parts_within(piece_range, parameters._variable_ranges, flat) or [tf.zeros([0])]
        start.append(_divide_packed(*_pack(zeros), ranges))
    reached = [tf.constant(one) for one in delta]
    return int(parameters.push_delta(start, reached, tf.constant(share), tf.constant(steps, tf.int64)))


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
    np.zeros((0, 3), np.float32),
    np.array([1e-12, -2e-9], np.float32),
]


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_parameters_are_split_over_devices_and_reassembled(devices: int) -> None:
    parameters = make_parameters(VALUES, devices)
    pulled, step = pulled_exactly(parameters)
    assert step == 7
    for actual, value in zip(pulled, VALUES, strict=True):
        assert np.array_equal(actual, value)
        assert actual.shape == value.shape
    for actual, expected in zip(pulled_rounded(parameters), by_device(VALUES, devices, round_to_fp16), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6)
    assert sum(parameters.bytes_per_round) == 4 * sum(value.size for value in VALUES)
    assert max(parameters.bytes_per_round) - min(parameters.bytes_per_round) <= 4


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_a_share_of_a_delta_is_added_in_fp16(devices: int) -> None:
    parameters = make_parameters(VALUES, devices)
    delta = [RANDOM.normal(size=value.shape).astype(np.float32) for value in VALUES]
    assert push(parameters, delta, 0.25, 4) == 11
    pulled, step = pulled_exactly(parameters)
    assert step == 11
    added = by_device(delta, devices, lambda part: round_to_fp16(part * np.float32(0.25)))
    for actual, value, one in zip(pulled, VALUES, added, strict=True):
        np.testing.assert_allclose(actual, value + one, rtol=1e-6, atol=1e-6)


def test_a_round_is_right_after_tensorflows_optimizer() -> None:
    """The optimizer infers shapes of what is read from those of what is assigned: here first of empty values."""
    parameters = make_parameters(VALUES, 2)
    variables = empty_variables(parameters)

    def add_one(handles: Sequence[Any]) -> Any:
        given = named_handles(parameters.network, handles)
        step, start = parameters.begin(given)
        with tf.control_dependencies([step]):
            grown = [one.assign(one.read_value() + 1.0) for one in given.shared]
        with tf.control_dependencies(grown):
            result = LocalResult(tf.constant(4, tf.int64), step, tf.constant(1, tf.int64), tf.zeros([1]))
            return parameters.end(start, given, result)[0]

    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})  # a job in this process may have set it
    graph = tf.function(add_one, autograph=False).get_concrete_function(handle_specs(parameters.network))
    assert int(graph(list_handles(variables))) == 11
    for actual, value in zip(pulled_exactly(parameters)[0], VALUES, strict=True):
        assert actual.shape == value.shape
        np.testing.assert_allclose(actual, value + 1, rtol=2e-3)


@pytest.mark.parametrize("maximum", [1, 2, 3, 5])
def test_a_part_in_pieces_equals_the_whole_part(maximum: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece has its own scale, so it is at least as precise as the whole part."""
    monkeypatch.setattr("scaletier.shared_parameters._MIN_ELEMENTS", maximum)
    parameters = make_parameters(VALUES, 2)
    assert len(parameters._pieces) >= sum(value.size for value in VALUES) / maximum
    assert all(piece.shape[0] <= maximum for piece in parameters._pieces)
    for actual, value in zip(pulled_exactly(parameters)[0], VALUES, strict=True):
        assert np.array_equal(actual, value)
        assert actual.shape == value.shape
    pulled = [np.asarray(one) for one in pulled_rounded(parameters)]
    for actual, value, coarse in zip(pulled, VALUES, by_device(VALUES, 2, round_to_fp16), strict=True):
        assert np.abs(actual - value).max(initial=0) <= np.abs(coarse - value).max(initial=0)
    delta = [RANDOM.normal(size=value.shape).astype(np.float32) for value in VALUES]
    push(parameters, delta, 0.5, 4)
    pulled, step = pulled_exactly(parameters)
    assert (step, sum(parameters.bytes_per_round)) == (11, 4 * sum(value.size for value in VALUES))
    for actual, value, one in zip(pulled, VALUES, delta, strict=True):
        np.testing.assert_allclose(actual, value + 0.5 * one, rtol=1e-6, atol=2**-11 * np.abs(one).max(initial=0))


def test_fewer_parameters_than_devices_work() -> None:
    parameters = make_parameters([np.array([1.5], np.float32)], 3)
    assert [float(one[0]) for one in pulled_rounded(parameters)] == [1.5]
    push(parameters, [np.array([2.0], np.float32)], 0.5, 1)
    assert pulled_exactly(parameters)[0][0].tolist() == [2.5]


@given(st.lists(st.floats(-1.0, 1.0), min_size=1, max_size=20), st.integers(-30, 30))
def test_half_precision_is_relative_to_the_largest_value(values: list[float], exponent: int) -> None:
    original = (np.array(values) * 10.0**exponent).astype(np.float32)
    (packed,) = _divide_packed(*_pack([tf.constant(original)]), [(0, len(original))])
    # The largest value keeps 11 bits, and no error is larger than its last bit.
    np.testing.assert_allclose(
        _expand(packed), original, rtol=2**-11, atol=2**-25 / 32_768 * 1.001 * np.abs(original).max() + 1e-33
    )


def test_a_large_statistic_does_not_reduce_the_precision_of_weights() -> None:
    weights, variance = RANDOM.normal(size=100).astype(np.float32), np.array([1e12, 1.0], np.float32)
    parameters = make_parameters([weights, variance], 1)
    np.testing.assert_allclose(pulled_rounded(parameters)[0], weights, rtol=2**-11, atol=1e-6)
    delta = [np.full(100, 1e-3, np.float32), np.array([1e9, 0.0], np.float32)]
    push(parameters, delta, 1.0, 1)
    np.testing.assert_allclose(pulled_exactly(parameters)[0][0], weights + delta[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_non_finite_values_stay_non_finite_after_transfer(odd: float) -> None:
    parameters = make_parameters([np.array([1.0, odd, 2.0], np.float32)], 1)
    assert not np.isfinite(pulled_rounded(parameters)[0]).all()
    sound = make_parameters([np.ones(3, np.float32)], 1)
    push(sound, [np.array([0.0, odd, 1.0], np.float32)], 1.0, 1)
    assert not np.isfinite(pulled_exactly(sound)[0][0]).all()


def averaging(replicas: int, decay: float | None = 0.5) -> tuple[Any, FunctionalModel]:
    """Return the data and the network of a job whose optimizer averages weights."""
    optimizer = keras.optimizers.SGD(0.1, use_ema=decay is not None, ema_momentum=decay or 0.0)
    job = Job(linear, dataset(INPUTS, TARGETS).repeat(), "mse", optimizer=optimizer)
    return job.data, FunctionalModel(job, job.data.element_spec, 0, replicas)


@pytest.mark.parametrize("devices", [1, 3])
def test_servers_average_their_parameters_at_each_push(devices: int) -> None:
    """The decay is for each step of one of two replicas, and lower at first."""
    _, network = averaging(2)
    values = [variable.numpy() for variable in TrainingState(network).shared]
    parameters = SharedParameters(network, DEVICES * devices, values, 0, values)
    expected, position = values, 0
    for steps in (4, 2, 0, 30, 6):
        delta = [np.full(value.shape, steps - 3.0, np.float32) for value in values]
        push(parameters, delta, 0.5, steps)
        kept = min(0.5 ** (steps / 2), position / (position + 18)) if steps else 1.0
        state = TrainingState(network)
        in_graph(parameters, state, parameters.pull_exact)  # type: ignore[arg-type]
        expected = [now + kept * (one - now) for now, one in zip(state.shared, expected, strict=True)]
        position += steps
        for actual, value in zip(state.ema_shared, expected, strict=True):
            np.testing.assert_allclose(actual, value, rtol=1e-5, atol=1e-5)


def test_servers_average_nothing_unless_the_optimizer_does() -> None:
    _, network = averaging(2, None)
    values = [variable.numpy() for variable in TrainingState(network).shared]
    assert SharedParameters(network, DEVICES, values, 0, values)._ema == []


@pytest.mark.parametrize(("position", "share"), [(0, 1.0), (20, 1 - 0.5**2)])
def test_devices_of_a_host_have_one_average(position: int, share: float) -> None:
    """Each of two devices takes two steps."""
    data, network = averaging(2)
    states, iterator = [TrainingState(network), TrainingState(network)], iter(data)
    states[0].step.assign(position)
    run_round(network, make_round(network, None, iterator, DEVICES * 2), iterator, states, 4, 1)
    for average, value in network.ema_pairs(states[0].shared, states[0].local):
        np.testing.assert_allclose(average, share * value.numpy(), rtol=1e-5)


def test_synchronous_replicas_average_the_weights_that_they_share() -> None:
    """Both of two replicas have the same delta."""
    data, network = averaging(2)
    state, iterator = TrainingState(network), iter(data)
    state.step.assign(20)
    run = make_round(network, AllReduce(network, 2, lambda value: 2.0 * value), iterator, DEVICES)
    run_round(network, run, iterator, [state], 3, 2)
    assert int(state.step) == 26
    assert len({id(one) for one in (*state.ema_shared, *state.shared)}) == 4
    for average, value in zip(state.ema_shared, state.shared, strict=True):
        np.testing.assert_allclose(average, (1 - 0.5**3) * value.numpy(), rtol=1e-5)


def test_only_the_first_replica_gets_the_averages() -> None:
    _, network = averaging(2)
    values = [np.ones(spec.shape, spec.dtype) for spec in network.local]
    for replica in (0, 1):
        given = zip(network.local, initial_local(network, values, replica, 8), strict=True)
        assert {float(value.max()) for spec, value in given if spec.name in network.ema_slots} == {1.0 - replica}


def test_a_round_starts_from_the_servers_parameters_and_adds_its_share() -> None:
    job = Job(linear, dataset(INPUTS, TARGETS).repeat(), "mse", optimizer=keras.optimizers.SGD(0.1))
    network = FunctionalModel(job, job.data.element_spec, 0, 2)
    state = TrainingState(network)
    initial_values = [variable.numpy() for variable in state.shared]
    parameters = SharedParameters(network, ["/device:CPU:0"] * 2, state.shared, 10)
    iterator = iter(job.data)
    run = make_round(network, parameters, iterator, DEVICES)
    round_ = run_round(network, run, iterator, [state], STEPS, 2)
    assert (round_.steps, round_.global_step, round_.staleness) == (STEPS, 10 + STEPS, 0)
    _, alone, _ = train_round(job, STEPS)
    for reached, stored, before, after in zip(
        state.shared, pulled_exactly(parameters)[0], initial_values, alone.shared, strict=True
    ):
        np.testing.assert_allclose(reached, after, rtol=2**-9, atol=1e-4)
        np.testing.assert_allclose(stored, before + 0.5 * (after - before), rtol=1e-3, atol=1e-4)
    expected = [value + 1 for value in pulled_exactly(parameters)[0]]
    push(parameters, [np.ones(value.shape, np.float32) for value in expected], 1.0, 7)  # another replica's
    round_ = run_round(network, run, iterator, [state], 0, 2)
    assert (round_.steps, round_.global_step) == (0, 10 + STEPS + 7)
    for reached, stored in zip(state.shared, expected, strict=True):
        np.testing.assert_allclose(reached, stored, rtol=2**-10, atol=2e-3)


# From here on, Keras's result for the same batches is the reference.


def deep() -> Any:
    """Return a model with most kinds of layers and no randomness."""
    words = keras.Input((4,), dtype="int64", name="words")
    x = keras.layers.Flatten()(keras.layers.Embedding(9, 3)(words))
    x = keras.layers.Dense(6, "relu", kernel_regularizer="l2", name="middle")(x)
    x = keras.layers.Dropout(0.0)(keras.layers.BatchNormalization(momentum=0.5)(x))
    return keras.Model(words, keras.layers.Dense(2, name="out")(x), name="deep")


def two() -> Any:
    """Return a model of two named outputs, one of which uses a part of the other's layers."""
    x = keras.Input((WIDTH,), name="x")
    middle = keras.layers.Dense(4, "tanh", name="middle")(x)
    first = keras.layers.Dense(2, name="first_layer")(middle)
    second = keras.layers.Dense(1, "sigmoid", name="second_layer")(middle)
    return keras.Model(x, {"first": first, "second": second}, name="two")


def one() -> Any:
    return keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(1, name="out")], name="one")


def masked() -> Any:
    """Return a model in which word 0 is masked, for the layers, the loss and the metrics."""
    embedding = keras.layers.Embedding(9, 3, mask_zero=True)
    layers = [embedding, keras.layers.Dense(4, "tanh"), keras.layers.Dense(2, name="out")]
    return keras.Sequential([keras.Input((4,), dtype="int64"), *layers], name="masked")


class Inner(keras.layers.Layer):  # type: ignore[misc]
    """A layer of layers whose `call` has no training argument."""

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
def test_steps_equal_those_of_keras(case: str) -> None:
    make, parts, loss, metrics = CASES[case]
    model = make()
    initial_weights = model.get_weights()
    job = Job(model, dataset(*parts), loss, metrics, keras.optimizers.SGD(0.05, 0.9))
    network, state, round_ = train_round(job, STEPS)
    after = by_name(network, state.shared)
    model.set_weights(initial_weights)
    model.compile(keras.optimizers.SGD(0.05, 0.9), loss, metrics=metrics, run_eagerly=True)
    measured = {name: values[-1] for name, values in model.fit(dataset(*parts), verbose=0, shuffle=False).history.items()}
    for variable in model.variables:
        expected, name = np.asarray(variable), variable.path.removeprefix(f"{model.name}/")
        np.testing.assert_allclose(after[name], expected, atol=2e-5, err_msg=name)
    assert {"loss": round_.loss, **round_.metrics} == pytest.approx(measured, rel=1e-4)


@pytest.mark.parametrize("case", ["labels of one column", "weighted", "deep", "masked", "two outputs"])
def test_an_evaluation_equals_that_of_keras(case: str) -> None:
    """Use batches of different sizes: the last is smaller."""
    make, parts, loss, metrics = CASES[case]
    model = make()
    data = dataset(*parts, batch=7)
    network = FunctionalModel(Job(model, data, loss, metrics), data.element_spec, 0)
    evaluation = make_evaluate(network, initial_state(network), data, None)(lambda: False)
    assert evaluation
    model.compile("sgd", loss, metrics=metrics)
    expected = model.evaluate(data, verbose=0, return_dict=True)
    assert {"loss": evaluation.loss, **evaluation.metrics} == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("lasts", [False, True])
def test_a_metric_that_does_not_reset_goes_on(lasts: bool) -> None:
    class Lasting(keras.metrics.MeanAbsoluteError):  # type: ignore[misc]
        def reset_state(self) -> None:
            if not lasts:
                super().reset_state()

    job = Job(linear, dataset(INPUTS, TARGETS), "mse", lambda: [Lasting(name="mae")], keras.optimizers.SGD(0.0))
    network = FunctionalModel(job, job.data.element_spec, 0)
    state, iterator = TrainingState(network), iter(job.data)
    run = make_round(network, None, iterator, DEVICES)
    rounds = [run_round(network, run, iterator, [state], 1, 1).metrics["mae"] for _ in range(2)]
    network.attach(state.shared, state.local)
    evaluation = make_evaluate(network, state, job.data, None)(lambda: False)
    assert evaluation
    errors = np.abs(INPUTS @ np.asarray(state.shared[0]) + np.asarray(state.shared[1]) - TARGETS).reshape(STEPS, -1).mean(1)
    first, *others = [0, 1], [0, 1, 0, 1, 2, 3, 4] if lasts else [0, 1, 2, 3, 4]
    assert rounds == pytest.approx([errors[0], errors[first].mean() if lasts else errors[1]], rel=1e-5)
    assert evaluation.metrics["mae"] == pytest.approx(errors[others[0]].mean(), rel=1e-5)
    state.end_test(evaluation.test_state)
    assert float(network.model.get_metrics_result()["mae"]) == pytest.approx(evaluation.metrics["mae"], rel=1e-5)


def test_an_evaluation_of_one_sample_equals_that_of_keras() -> None:
    model, data = linear(), dataset(INPUTS[:1], TARGETS[:1], batch=1)
    network = FunctionalModel(Job(model, data, "mse"), data.element_spec, 0)
    evaluation = make_evaluate(network, initial_state(network), data, None)(lambda: False)
    model.compile("sgd", "mse")
    assert evaluation
    assert evaluation.loss == pytest.approx(model.evaluate(data, verbose=0), rel=1e-4)


def initial_state(network: FunctionalModel) -> TrainingState:
    """Return the state at a job's start."""
    return TrainingState(network)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_loss_function_is_computed_in_float32_for_any_policy(policy: str) -> None:
    """The square of 301 is more than float16 holds, and bfloat16 takes 301 for 302; by `fit` it is 90,601."""
    data = tf.data.Dataset.from_tensors((tf.zeros([2, 1]), tf.fill([2, 1], 301.0))).repeat()
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", dtype=policy)
    model = keras.Sequential([keras.Input((1,)), layer])
    _, _, round_ = train_round(Job(model, data, "mse", optimizer="sgd"), 1)
    assert round_.loss == 301.0**2


def test_one_replica_alone_trains_weights_of_another_type() -> None:
    double = keras.layers.Dense(2, dtype="float64"), keras.layers.BatchNormalization(dtype="float64")
    job = Job(keras.Sequential([keras.Input((WIDTH,)), *double]), dataset(INPUTS, TARGETS), "mse", optimizer="sgd")
    network = FunctionalModel(job, job.data.element_spec, 0)
    names = [spec.name.rpartition("/")[2] for spec in network.shared]
    assert names == ["kernel", "bias", "gamma", "beta", "moving_mean", "moving_variance"]
    for refused, where in (
        (lambda: FunctionalModel(job, job.data.element_spec, 0, 2), "several replicas"),
        (network.require_splittable, "--strategy model-parallel"),
    ):
        with pytest.raises(JobError, match=rf"^the variable dense\S*/kernel is invalid with {where}: it is float64. Valid: fl"):
            refused()


def test_one_replica_alone_trains_in_bfloat16() -> None:
    keras.config.set_floatx("bfloat16")
    try:
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        model.compile(keras.optimizers.SGD(0.25), "mse", metrics=["mae"])
        _, _, round_ = train_round(Job(model, tf.data.Dataset.from_tensors((tf.ones([2, 1]), tf.ones([2, 1]))).repeat()), 1)
    finally:
        keras.config.set_floatx("float32")
    assert (round_.loss, round_.metrics) == (1.0, {"mae": 1.0})


class Noise(keras.layers.Layer):  # type: ignore[misc]
    """Adds random numbers, by a generator of its own or by none."""

    def __init__(self, own_generator: bool) -> None:
        super().__init__()
        self.generator = keras.random.SeedGenerator(1) if own_generator else None

    def call(self, inputs: Any) -> Any:
        return inputs + keras.random.normal((4, 1), seed=self.generator)


@pytest.mark.parametrize("own_generator", [True, False])
def test_random_numbers_differ_at_each_step(own_generator: bool) -> None:
    model = keras.Sequential([keras.Input((WIDTH,)), Noise(own_generator), keras.layers.Dense(2)], name="noisy")
    network, state, _ = train_round(Job(model, dataset(INPUTS, TARGETS), "mse", optimizer="sgd"), 2)
    (generator,) = (value for spec, value in zip(network.local, state.local, strict=True) if "seed" in spec.name)
    assert not np.array_equal(generator, network.initial(next(spec for spec in network.local if "seed" in spec.name)))


def test_a_late_replica_continues_the_master_s_optimizer_with_other_random_numbers() -> None:
    layers = keras.layers.Dropout(0.5), keras.layers.Dense(2)
    model = keras.Sequential([keras.Input((WIDTH,)), *layers])
    job = Job(model, dataset(INPUTS, TARGETS), "mse", optimizer=keras.optimizers.Adam())
    network, state, _ = train_round(job, STEPS)
    values = [variable.numpy() for variable in state.local]
    initial_values = [list(initial_local(network, values, number, step)) for number, step in ((0, 8), (1, 8), (1, 16))]
    generators = set()
    for spec, value, *others in zip(network.local, state.local, *initial_values, strict=True):
        assert np.array_equal(others[0], value), spec.name
        if private.is_seed(spec.variable):
            generators |= {tuple(other.tolist()) for other in others}
        else:
            assert all(np.array_equal(other, value) for other in others), spec.name
    assert len(generators) == 3
    assert any(np.any(value) for spec, value in zip(network.local, initial_values[1], strict=True) if "velocity" in spec.name)


def test_each_device_of_each_replica_has_its_own_random_numbers() -> None:
    model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dropout(0.5), keras.layers.Dense(2)])
    network, state, _ = train_round(Job(model, dataset(INPUTS, TARGETS), "mse", optimizer=keras.optimizers.Adam()), STEPS)
    devices = ["/device:CPU:0"] * 2
    variables = [one for replica in (0, 1) for one in replica_variables(network, state, replica, 2, devices, 8, False)]
    generators = set()
    for spec, value, *others in zip(network.local, state.local, *(one.local for one in variables), strict=True):
        if private.is_seed(spec.variable):
            generators |= {tuple(other.numpy().tolist()) for other in others}
        else:
            assert all(np.array_equal(other, value) for other in others), spec.name
    assert len(generators) == 4


def test_a_function_may_return_metrics_that_need_shapes() -> None:
    data = dataset(INPUTS, TARGETS)
    job = Job(linear, data, "mse", metrics=lambda: [keras.metrics.R2Score()], optimizer=keras.optimizers.SGD(0.0))
    _, state, round_ = train_round(job, STEPS)
    outputs = INPUTS @ np.asarray(state.shared[0]) + np.asarray(state.shared[1])
    expected = 1 - ((TARGETS - outputs) ** 2).sum(0) / ((TARGETS - TARGETS.mean(0)) ** 2).sum(0)
    assert round_.metrics == pytest.approx({"r2_score": expected.mean()}, rel=1e-4)


@pytest.mark.parametrize("metrics", ["mae", keras.metrics.MeanAbsoluteError(name="mae"), keras.losses.mean_absolute_error])
def test_one_metric_needs_no_list(metrics: Any) -> None:
    job = Job(linear, dataset(INPUTS, TARGETS), "mse", metrics)
    (name,) = FunctionalModel(job, job.data.element_spec, 0).metric_shapes
    assert name in ("mae", "mean_absolute_error")


def test_metrics_of_one_name_are_numbered() -> None:
    job = Job(linear, dataset(INPUTS, TARGETS), "mse", ["mae", keras.metrics.MeanAbsoluteError(name="mae"), "mse"])
    assert [*FunctionalModel(job, job.data.element_spec, 0).metric_shapes] == ["mae", "mae_1", "mse"]


def split_stages(network: FunctionalModel, count: int) -> list[Stage]:
    """Return the model's parts on `count` hosts, all on this device."""
    parts = make_layer_groups(network)
    cuts = partition([group.size for group in parts], count)
    assert len(cuts) == count + 1
    model_stages = [Stage(f"worker/{at}", "/device:CPU:0", parts[begin:end]) for at, (begin, end) in enumerate(pairwise(cuts))]
    for stage in model_stages:
        specs = (spec for group in stage.groups for spec in (*group.trained, *group.untrained))
        stage.variables.update({spec.name: tf.Variable(network.initial(spec)) for spec in specs})
    return model_stages


def gradients(model: Any, loss: Callable[[Any, Any, Any], Any], batch: Sequence[Any], cuts: list[int]) -> tuple[Any, float]:
    """Return Keras's gradients of the model for a batch in these parts, and the mean loss."""
    sums, mean = [np.zeros(variable.shape) for variable in model.trainable_variables], 0.0
    for begin, end in pairwise(cuts):
        part = [tf.nest.map_structure(lambda one, b=begin, e=end: one[b:e], each) for each in batch]
        with tf.GradientTape() as tape:
            value = loss(part, model(part[0], training=True), None) + sum(model.losses)
        share = (end - begin) / (cuts[-1] - cuts[0])
        tape_gradients = tape.gradient(value, [variable.value for variable in model.trainable_variables])
        sums = [one + share * tf.convert_to_tensor(change).numpy() for one, change in zip(sums, tape_gradients, strict=True)]
        mean += share * float(value)
    return dict(zip((id(variable) for variable in model.trainable_variables), sums, strict=True)), mean


def keras_loss(case: str) -> Callable[[Any, Any, Any], Any]:
    _, _, loss, _ = CASES[case]

    def weighted_loss(loss_name: Any, targets: Any, outputs: Any, weights: Any) -> Any:
        losses = keras.losses.get(loss_name)
        losses = losses.call(targets, outputs) if isinstance(losses, keras.losses.Loss) else losses(targets, outputs)
        return tf.reduce_mean(losses if weights is None else losses * weights)

    def whole_loss(part: Any, outputs: Any, _: Any) -> Any:
        weights = part[2] if len(part) == 3 else None
        if isinstance(loss, dict):
            return sum(weighted_loss(loss[key], part[1][key], outputs[key], weights) for key in loss)
        return weighted_loss(loss, part[1], outputs, weights)

    return whole_loss


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize(
    ("case", "hosts"), [("deep", 2), ("deep", 4), ("deep, weighted", 3), ("nested", 2), ("two outputs", 2)]
)
def test_forward_and_backward_through_stages_give_the_gradients_of_the_model(case: str, hosts: int, microbatches: int) -> None:
    make, parts, loss, metrics = CASES[case]
    size, model = 7, make()
    data = dataset(*parts, batch=size)
    network = FunctionalModel(Job(model, data, loss, metrics), data.element_spec, 0)
    batch = next(iter(data))
    result = forward_backward(network, split_stages(network, hosts), Batch.of(batch), size, microbatches, lambda loss: loss)
    cuts = [size * at // microbatches for at in range(microbatches + 1)]
    expected, mean = gradients(model, keras_loss(case), batch, cuts)
    assert {*result.gradients} == {spec.name for spec in network.trained}
    for spec in network.trained:
        np.testing.assert_allclose(result.gradients[spec.name], expected[id(spec.variable)], atol=1e-5, err_msg=spec.name)
    assert float(result.loss) == pytest.approx(mean, rel=1e-5)
    for spec in network.shared[len(network.trained) :]:  # the moving means and variances, which Keras has updated by now
        np.testing.assert_allclose(result.untrained[spec.name], np.asarray(spec.variable), atol=1e-5, err_msg=spec.name)


def test_metrics_of_microbatches_equal_those_of_the_batch() -> None:
    make, parts, loss, _ = CASES["labels"]
    data = dataset(*parts, batch=7)
    network = FunctionalModel(Job(make, data, loss, ["accuracy"]), data.element_spec, 0)
    batch, state = Batch.of(next(iter(data))), TrainingState(network)
    outputs = network.predict(state.shared, state.local, batch.inputs)
    for microbatches in (1, 3):
        result = forward_backward(network, split_stages(network, 1), batch, 7, microbatches, lambda loss: loss)
        expected = np.mean(np.argmax(outputs, 1) == batch.targets.numpy())
        assert float(result.results[0]) == pytest.approx(expected)


def test_a_shared_layer_with_weights_is_refused_on_several_hosts() -> None:
    begin, twice = keras.Input((WIDTH,)), keras.layers.Dense(4, name="twice")
    middle = keras.layers.Dense(4, name="middle")(keras.layers.ReLU()(twice(keras.layers.Dense(4, name="first")(begin))))
    model = keras.Model(begin, keras.layers.Dense(2, name="out")(twice(middle)), name="tied")
    job = Job(model, dataset(INPUTS, TARGETS), "mse")
    expected = r"^the model tied cannot be divided among several hosts: it calls one layer more than once$"
    with pytest.raises(JobError, match=expected):
        make_layer_groups(FunctionalModel(job, job.data.element_spec, 0))


def test_a_functional_model_with_its_own_call_is_refused_on_several_hosts() -> None:
    class Scales(keras.Model):  # type: ignore[misc]
        def call(self, inputs: Any) -> Any:
            return super().call(inputs / 255)

    begin = keras.Input((WIDTH,))
    job = Job(Scales(begin, keras.layers.Dense(2)(begin), name="own"), dataset(INPUTS, TARGETS), "mse")
    with pytest.raises(JobError, match=r"^the model own cannot be divided among several hosts: it has its own call; valid are"):
        make_layer_groups(FunctionalModel(job, job.data.element_spec, 0))


def test_masks_are_passed_between_stages() -> None:
    make, parts, loss, metrics = CASES["masked"]
    model, data = make(), dataset(*parts, batch=7)
    network = FunctionalModel(Job(model, data, loss, metrics), data.element_spec, 0)
    batch = next(iter(data))
    result = forward_backward(network, split_stages(network, 2), Batch.of(batch), 7, 1, lambda loss: loss)
    model.compile("sgd", loss, metrics=metrics, run_eagerly=True)
    expected = model.evaluate(*batch, verbose=0, return_dict=True)
    assert float(result.loss) == pytest.approx(expected["loss"], rel=1e-5)
    assert float(result.results[0]) == pytest.approx(expected["mae"], rel=1e-5)


def mask_around() -> list[Any]:
    """Return layers with a mask from the first layer: the mean is of unmasked words."""
    names = keras.layers.Embedding(9, 3, mask_zero=True, name="words"), keras.layers.Dense(4, name="each")
    mean = keras.layers.GlobalAveragePooling1D(name="mean")
    return [*names, mean, keras.layers.Dense(3, name="two"), keras.layers.Dense(2, name="out")]


def functional(begin: Any, layers: Sequence[Any]) -> Any:
    outputs = begin
    for layer in layers:
        outputs = layer(outputs)
    return keras.Model(begin, outputs)


@pytest.mark.parametrize("make", [lambda begin, layers: keras.Sequential([begin, *layers]), functional])
def test_a_skip_connection_keeps_its_layers_together(make: Callable[[Any, Any], Any]) -> None:
    model, data = make(keras.Input((4,), dtype="int64"), mask_around()), dataset(WORDS, TARGETS, batch=7)
    network = FunctionalModel(Job(model, data, "mse"), data.element_spec, 0)
    layers = [[name for name in group.name.split() if not name.startswith("not_equal")] for group in make_layer_groups(network)]
    assert layers == [["words", "each", "mean"], ["two"], ["out"]]
    batch = Batch.of(next(iter(data)))
    result = forward_backward(network, split_stages(network, 2), batch, 7, 1, lambda loss: loss)
    outputs = model(batch.inputs, training=True)
    assert float(result.loss) == pytest.approx(float(np.mean((outputs - batch.targets) ** 2)), rel=1e-5)


class IgnoresTraining(keras.Model):  # type: ignore[misc]
    """Its `call` has no training argument, so Keras does not pass it to the layers."""

    def __init__(self) -> None:
        super().__init__(name="bare")
        self.norm = keras.layers.BatchNormalization(momentum=0.5)
        self.out = keras.layers.Dense(2, kernel_regularizer="l2")

    def call(self, inputs: Any) -> Any:
        return self.out(self.norm(inputs))


class PassesTraining(IgnoresTraining):
    """Its `call` does not pass the training argument to its layers, but Keras does."""

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        return super().call(inputs)


@pytest.mark.parametrize("kind", [IgnoresTraining, PassesTraining])
def test_layers_of_a_subclassed_model_get_the_training_flag_like_in_keras(kind: Any) -> None:
    model = kind()
    model(INPUTS[:1])
    initial_weights = model.get_weights()
    network, state, _ = train_round(Job(model, dataset(INPUTS, TARGETS), "mse", optimizer="sgd"), STEPS)
    after = by_name(network, state.shared) | {spec.name: network.initial(spec) for spec in network.constants}
    model.set_weights(initial_weights)
    model.compile("sgd", "mse", run_eagerly=True)
    model.fit(dataset(INPUTS, TARGETS), verbose=0, shuffle=False)
    for variable in model.variables:
        name = variable.path.removeprefix("bare/")
        np.testing.assert_allclose(after[name], np.asarray(variable), atol=2e-5, err_msg=name)


def test_weighted_metrics_of_a_compiled_model_are_weighted() -> None:
    model, data = linear(), dataset(INPUTS, TARGETS, WEIGHTS)
    model.compile("sgd", "mse", metrics=["mae"], weighted_metrics=["mse"], run_eagerly=True)
    network = FunctionalModel(Job(model, data), data.element_spec, 0)
    evaluation = make_evaluate(network, initial_state(network), data, None)(lambda: False)
    assert evaluation
    model.compile("sgd", "mse", metrics=["mae"], weighted_metrics=["mse"], run_eagerly=True)
    assert {"loss": evaluation.loss, **evaluation.metrics} == pytest.approx(
        model.evaluate(data, verbose=0, return_dict=True), rel=1e-4
    )
