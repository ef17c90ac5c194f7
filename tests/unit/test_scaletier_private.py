"""The assumptions of scaletier/private.py about the installed TensorFlow and Keras, by behaviour."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scaletier
from scaletier import private
from scaletier.checkpoint import TrainingState
from scaletier.functional_model import FunctionalModel
from scaletier.job import Job, JobError
from scaletier.round_graph import list_handles, named_handles
from scaletier.scopes import RecordingScope, ValueScope
from scaletier.tensorflow_setup import import_tensorflow

tf = import_tensorflow()
import keras  # noqa: E402 - TensorFlow imports it, without its log messages

ROOT = Path(__file__).resolve().parents[2]
STEPS = 3
RANDOM = np.random.default_rng(5)
BEGIN = [RANDOM.normal(size=(4, 3)).astype(np.float32), RANDOM.normal(size=3).astype(np.float32)]
CHANGES = [[RANDOM.normal(size=value.shape).astype(np.float32) for value in BEGIN] for _ in range(STEPS)]


def test_the_installed_version_is_supported() -> None:
    assert keras.__version__.rpartition(".")[0] in private.VERSIONS[tf.__version__.rpartition(".")[0]]
    private.check_keras()


def test_an_unsupported_keras_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It is reported before the library imports names that this version may lack."""
    monkeypatch.setattr(keras, "__version__", "3.4.1")
    monkeypatch.setitem(sys.modules, "scaletier.checkpoint", None)
    version = tf.__version__.rpartition(".")[0]
    for call in (scaletier.main, scaletier.export):
        assert call(Job(), []) == 2
        assert capsys.readouterr().err == (
            f"error: Keras 3.4 is invalid with TensorFlow {version}. Valid: 3.13, 3.14, 3.15. "
            "Run: pip install 'keras==3.15.*'\n"
        )


def optimizer_names() -> list[str]:
    """Return every optimizer that can be created with its defaults."""
    names = []
    for name, kind in vars(keras.optimizers).items():
        if inspect.isclass(kind) and issubclass(kind, keras.optimizers.Optimizer) and kind is not keras.optimizers.Optimizer:
            with contextlib.suppress(TypeError):
                kind()
                names.append(name)
    return sorted(names)


def keras_update(optimizer: Any) -> list[Any]:
    """Return the weights after Keras's own update."""
    variables = [keras.Variable(value, name=f"weight{at}") for at, value in enumerate(BEGIN)]
    optimizer.build(variables)
    for changes in CHANGES:
        optimizer.apply([tf.constant(change) for change in changes], variables)
    return [np.asarray(variable) for variable in variables]


def stateless_update(optimizer: Any, place: Any = None) -> tuple[list[Any], Any]:
    """Return the weights after a stateless update in a graph, and the optimizer."""
    variables = [keras.Variable(value, name=f"weight{at}") for at, value in enumerate(BEGIN)]
    optimizer_stateless = private.make_stateless(optimizer, place)
    optimizer_stateless.build(variables)

    def step(slots: Any, changes: Any, values: Any) -> Any:
        with ValueScope(initialize_variables=False):
            return optimizer_stateless.stateless_apply(slots, changes, values)

    graph = tf.function(step, autograph=False)
    values, slots = (
        [tf.constant(value) for value in BEGIN],
        [tf.constant(np.asarray(one)) for one in optimizer_stateless.variables],
    )
    for changes in CHANGES:
        values, slots = graph(slots, [tf.constant(change) for change in changes], values)
    assert all(np.array_equal(np.asarray(variable), value) for variable, value in zip(variables, BEGIN, strict=True)), (
        "untouched"
    )
    return [value.numpy() for value in values], optimizer_stateless


def test_all_optimizers_of_keras_are_tested() -> None:
    assert {"SGD", "Adam", "AdamW", "Adafactor", "Adagrad", "Ftrl", "Lamb", "Lion", "Nadam", "RMSprop"} <= {*optimizer_names()}


# With TensorFlow this one reads the variable after the update, where it means the value before it.
KEEPS_NOTHING = {"ScheduleFreeAdamW"}


@pytest.mark.parametrize("name", sorted({*optimizer_names()} - KEEPS_NOTHING))
def test_a_stateless_optimizer_updates_like_a_stateful_one(name: str) -> None:
    kind = getattr(keras.optimizers, name)
    updated, _ = stateless_update(kind())
    for one, expected, before in zip(updated, keras_update(kind()), BEGIN, strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-5, atol=1e-6)
        assert not np.array_equal(one, before), "the weight changed"


SETTINGS: dict[str, dict[str, Any]] = {
    "clipnorm": {"clipnorm": 0.1},
    "clipvalue": {"clipvalue": 0.05},
    "global_clipnorm": {"global_clipnorm": 0.1},
    "weight_decay": {"weight_decay": 0.1},
    "use_ema": {"use_ema": True, "ema_momentum": 0.5},
    "ema_overwrite_frequency": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
    "gradient_accumulation_steps": {"gradient_accumulation_steps": 2, "clipnorm": 0.1},
    "a schedule": {"learning_rate": keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)},
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_optimizer_settings_apply_to_stateless_updates(settings: str) -> None:
    updated, _ = stateless_update(keras.optimizers.Adam(**SETTINGS[settings]))
    for one, expected in zip(updated, keras_update(keras.optimizers.Adam(**SETTINGS[settings])), strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-5, atol=1e-6)


def test_weights_that_replicas_share_are_not_overwritten_by_averages() -> None:
    data = tf.data.Dataset.from_tensors((tf.zeros([2, 3]), tf.zeros([2, 1])))
    for wrap in (lambda plain: plain, keras.optimizers.LossScaleOptimizer):
        optimizer = wrap(keras.optimizers.Adam(use_ema=True, ema_overwrite_frequency=3))
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        with pytest.raises(
            JobError, match=r"^the optimizer has ema_overwrite_frequency=3: several replicas train, and average"
        ):
            FunctionalModel(Job(model, data, "mse", optimizer=optimizer), data.element_spec, 0, replicas=2)


def test_an_optimizer_that_fails_is_one_line() -> None:
    class Broken(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
        def __call__(self, step: Any) -> Any:
            raise ValueError("no such step")

    def step(replicas: int) -> None:
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        job = Job(model, data, "mse", optimizer=lambda: keras.optimizers.SGD(Broken()))
        network = FunctionalModel(job, data.element_spec, 0, replicas)
        variables = named_handles(network, list_handles(TrainingState(network)))
        network.apply(variables.shared, variables.local, [tf.zeros([3, 1]), tf.zeros([1])], 0)

    data = tf.data.Dataset.from_tensors((tf.zeros([2, 3]), tf.zeros([2, 1])))
    for replicas in (1, 2):
        with pytest.raises(JobError, match=r"^the optimizer SGD is invalid: no such step$"):
            step(replicas)


def test_a_scaled_loss_is_unscaled_and_an_overflowing_step_is_skipped() -> None:
    def make() -> Any:
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), initial_scale=4.0)

    updated, optimizer = stateless_update(make())
    for one, expected in zip(updated, keras_update(make()), strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-5)
    slots = [np.asarray(variable) for variable in optimizer.variables]
    with keras.StatelessScope(initialize_variables=False):
        overflow = [tf.fill(value.shape, np.float32(np.inf)) for value in BEGIN]
        values_after, slots_after = optimizer.stateless_apply(slots, overflow, [tf.constant(value) for value in BEGIN])
    assert all(np.array_equal(one, value) for one, value in zip(values_after, BEGIN, strict=True))
    assert any(float(np.max(one)) == 2.0 for one in slots_after), "the scale is halved"


@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="this version of Keras has no MultiOptimizer")
def test_several_optimizers_update_along_a_scaled_loss() -> None:
    def make() -> Any:
        several = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1), {"weight1": keras.optimizers.Adam(0.1)})
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.MultiOptimizer(several), initial_scale=4.0)

    updated, _ = stateless_update(make())
    for one, expected in zip(updated, keras_update(make()), strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-5)


def test_optimizer_variables_are_placed_and_updated_with_their_weights() -> None:
    placed = list[str]()

    def place(variable: Any) -> Any:
        placed.append(variable.name)
        return contextlib.nullcontext()

    _, optimizer = stateless_update(keras.optimizers.Adam(), place)
    weights = [reference.name for reference in optimizer.weights_by_slot.values()]
    assert sorted(weights) == ["weight0", "weight0", "weight1", "weight1"]
    assert placed == ["weight0", "weight1"], "once, as the graph is traced"


def test_gradients_on_several_hosts_are_clipped_by_one_norm_in_place() -> None:
    """Only a number per gradient and the common factor move between devices."""

    def make(clip_norm: float) -> Any:
        return keras.optimizers.SGD(0.1, global_clipnorm=clip_norm)

    for clip_norm in (0.1, 1e9):
        updated, optimizer = stateless_update(make(clip_norm), lambda variable: contextlib.nullcontext())
        for one, expected in zip(updated, keras_update(make(clip_norm)), strict=True):
            np.testing.assert_allclose(one, expected, rtol=1e-5, atol=1e-7)

    def step(*changes: Any) -> Any:
        placed = []
        for at, change in enumerate(changes):
            with tf.device(f"/device:CPU:{at + 1}"):
                placed.append(tf.negative(change))
        return optimizer._clip_gradients(placed)

    graph = tf.function(step, autograph=False).get_concrete_function(*map(tf.constant, CHANGES[0])).graph
    elementwise = [op for op in graph.get_operations() if op.type in ("Mul", "L2Loss") and op.inputs[0].shape.rank]
    assert len(elementwise) == 2 * len(BEGIN)
    assert all(op.device == op.inputs[0].device != "" for op in elementwise)


def test_an_optimizer_computes_on_the_device_of_each_variable() -> None:
    def make() -> Any:
        return keras.optimizers.Adam(0.01, weight_decay=0.1, clipnorm=0.5, use_ema=True)

    devices = ["/device:CPU:1", "/device:CPU:2"]
    updated, optimizer = stateless_update(make(), lambda variable: tf.device(devices[int(variable.name[-1])]))
    for one, expected in zip(updated, keras_update(make()), strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-5)
    of_weights = {
        id(variable): int(weight.name[-1])
        for variable, weight in ((v, optimizer.weights_by_slot.get(id(v))) for v in optimizer.variables)
        if weight is not None
    }

    def assert_on_device(at: int, value: Any) -> Any:
        with tf.device(devices[at]):
            return tf.identity(value)

    def step(changes: Any, weights: Any, slots: Any) -> Any:
        changes, weights = ([assert_on_device(at, value) for at, value in enumerate(values)] for values in (changes, weights))
        slots = [
            assert_on_device(of_weights[id(one)], value) if id(one) in of_weights else value
            for one, value in zip(optimizer.variables, slots, strict=True)
        ]
        with keras.StatelessScope(initialize_variables=False):
            return optimizer.stateless_apply(slots, changes, weights)

    slots = [tf.constant(np.asarray(variable)) for variable in optimizer.variables]
    arguments = [[tf.constant(value) for value in values] for values in (CHANGES[0], BEGIN)]
    graph = tf.function(step, autograph=False).get_concrete_function(*arguments, slots).graph
    placed = {value.name for op in graph.get_operations() if op.device for value in op.outputs}
    operations = [op for op in graph.get_operations() if op.type != "Identity" and any(one.shape.rank for one in op.inputs)]
    assert len(operations) > 30
    for op in operations:
        inputs = {one.device for one in op.inputs if one.shape.rank and one.name in placed}
        assert inputs == {op.device}, op


def test_each_slot_finds_its_weight_also_with_a_scaled_loss() -> None:
    data = tf.data.Dataset.from_tensors((tf.zeros([2, 3]), tf.zeros([2, 1])))
    for optimizer in (keras.optimizers.Adam(), keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, name="out")])
        network = FunctionalModel(Job(model, data, "mse", optimizer=optimizer), data.element_spec, 0)
        slot_weights = [network.weight_of(spec) for spec in network.slots]
        assert sorted(one.name for one in slot_weights if one) == ["out/bias", "out/bias", "out/kernel", "out/kernel"]
        assert network.local == network.slots


def test_the_rate_of_an_optimizer_is_a_schedule_or_a_variable() -> None:
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
    assert private.rate_of(keras.optimizers.SGD(schedule)) is schedule
    plain = keras.optimizers.SGD(0.1)
    assert any(private.rate_of(plain) is variable for variable in plain.variables)


def test_an_uninitialized_variable_is_recognized() -> None:
    with keras.StatelessScope(initialize_variables=False):
        later = keras.Variable("zeros", shape=(2,), dtype="float32")
    assert private.stored(later) is None
    assert private.stored(keras.Variable([1.0])) is not None


def test_an_optimizer_in_a_stateless_scope_has_its_numbers_and_the_scope_goes_on() -> None:
    with keras.StatelessScope(initialize_variables=False), private.optimizers_in_stateless_scope():
        optimizer = keras.optimizers.Adam(0.5)
        with pytest.raises(ValueError, match="not recognized"):
            keras.optimizers.Adam(unknown=1)
        later = keras.Variable("zeros", shape=(2,), dtype="float32")
    assert (float(optimizer.learning_rate), int(optimizer.iterations)) == (0.5, 0)
    assert private.stored(later) is None
    with keras.StatelessScope(initialize_variables=False), pytest.raises(ValueError, match="stateless scope"):
        keras.optimizers.Adam()


def test_a_function_is_traced_once_in_a_scope_while_what_it_reads_is_unchanged() -> None:
    weight, other, traced = keras.Variable([1.0]), keras.Variable([1.0]), list[int]()
    called = type(tf.function(lambda: None)).__call__

    def triple(value: Any) -> Any:
        traced.append(len(value))
        return weight * value

    inner = tf.function(triple)
    outer, compiled = tf.function(lambda value: inner(value)), tf.function(lambda: weight * 3.0, jit_compile=True)
    assert float(outer(tf.constant([2.0]))[0]) == 2.0
    for begin in (5.0, 7.0):
        with RecordingScope([(weight, tf.constant([begin])), (other, tf.constant([0.0]))]):
            traced.clear()
            for _ in range(3):
                assert [float(one(tf.constant([2.0]))[0]) for one in (inner, outer)] == [2 * begin, 2 * begin]
                other.assign(other + 1.0)
            assert inner(tf.constant([2.0, 3.0]))[1] == 3 * begin
            assert traced == [1, 2]
            weight.assign(weight + 1.0)
            assert [float(one(tf.constant([2.0]))[0]) for one in (outer, inner)] == [2 * begin + 2, 2 * begin + 2]
            assert traced == [1, 2, 1]
            assert float(compiled()[0]) == 3 * begin + 3
            traced.clear()
            thread = threading.Thread(target=lambda: traced.append(float(outer(tf.constant([4.0]))[0])))
            thread.start()
            thread.join()
            assert traced == [4.0], "another thread has the trace from before, with the variable's own value"
    weight.assign([4.0])
    assert (float(outer(tf.constant([2.0]))[0]), outer.experimental_get_tracing_count()) == (8.0, 1)
    assert type(outer).__call__ is called


def test_a_function_that_assigns_is_traced_at_each_call() -> None:
    first, state = keras.Variable(1.0, trainable=False), keras.Variable(0.0, trainable=False)

    @tf.function  # type: ignore[untyped-decorator]
    def reset() -> None:
        state.assign(first)

    @tf.function  # type: ignore[untyped-decorator]
    def outer() -> None:
        reset()

    with RecordingScope([(first, tf.constant(1.0)), (state, tf.constant(0.0))]):
        for one in (reset, outer, reset, outer):
            state.assign(state + 2.0)
            one()
            assert float(state.value) == 1.0


def test_branches_assign_and_are_traced_few_times_within_branches() -> None:
    count, on, depths = keras.Variable(0.0, trainable=False), tf.constant(True), list[int]()

    def add(number: Any, depth: int) -> None:
        depths.append(depth)
        if not depth:
            count.assign_add(number)
        else:
            tf.cond(number > 0.0 if depth % 2 else on, lambda: add(number, depth - 1), lambda: None)

    def added(number: Any) -> Any:
        with RecordingScope([(count, tf.constant(1.0))]):
            add(number, 8)
            return count.value

    graph = tf.function(added, autograph=False).get_concrete_function(tf.TensorSpec([]))
    assert (float(graph(tf.constant(2.0))), float(graph(tf.constant(-2.0)))) == (3.0, 1.0)
    assert len(depths) == sum(range(10))  # not 2 ** 9


def test_a_function_that_is_called_again_hides_and_gives_gradients_as_before() -> None:
    weight, hidden = (keras.Variable(1.0, name=name) for name in ("weight", "hidden"))
    inner = tf.function(lambda: weight * 2.0)
    outer = tf.function(lambda: inner() + 1.0)

    @tf.function  # type: ignore[untyped-decorator]
    def own() -> Any:
        return tf.custom_gradient(lambda value: (value * hidden * inner(), lambda gradient: gradient))(tf.constant(1.0))

    with RecordingScope([(weight, tf.constant(1.0)), (hidden, tf.constant(1.0))]) as scope:
        assert [float(one()) for one in (own, own)] == [2.0, 2.0]
        assert scope.hides(weight)
        assert [float(one()) for one in (inner, outer, own)] == [2.0, 3.0, 2.0], "it is also read outside"
        assert (scope.hides(weight), scope.hides(hidden)) == (False, True)
        weight.assign(3.0)
        assert [float(one()) for one in (outer, own)] == [7.0, 6.0], "what a function reads by another one has changed"


def test_a_function_with_its_own_gradient_is_recognized_but_not_its_arguments() -> None:
    seen = list[tuple[str, str]]()

    class Argument:
        def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> Any:
            seen.append(("argument", private.custom_gradient_around()))
            return tf.constant(1.0)

    tf.register_tensor_conversion_function(Argument, lambda value, dtype=None, name=None, as_ref=False: value.__tf_tensor__())

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def own(value: Any) -> Any:
        seen.append(("own", private.custom_gradient_around()))
        return value, lambda gradient: gradient

    def again(value: Any) -> Any:
        seen.append(("again", private.custom_gradient_around()))
        return value

    @tf.function  # type: ignore[untyped-decorator]
    def graph() -> Any:
        seen.append(("graph", private.custom_gradient_around()))
        return own(Argument()) + tf.recompute_grad(again)(tf.constant(1.0))

    graph()
    assert dict(seen) == {"graph": "", "argument": "", "own": "own", "again": "recompute"}


def test_a_tensor_of_another_graph_is_found_but_not_one_of_a_graph_around() -> None:
    made, found = list[Any](), list[bool]()

    def use(value: Any) -> Any:
        used = value + made[-1]
        found.append(private.captures_other_graph())
        return used

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def graph(makes: bool) -> Any:
        if makes:
            made.append(tf.random.uniform([]))
        return tf.while_loop(lambda value: value < 1.0, lambda value: [use(value)], [0.0])

    for makes in (True, False):
        graph.get_concrete_function(makes)
    assert (found[0], found[-1]) == (False, True)
    made.append(1.0)
    assert float(use(tf.constant(1.0))) == 2.0
    assert not found[-1]


def test_the_seed_of_an_initializer_is_found() -> None:
    with keras.StatelessScope(initialize_variables=False):
        weight = keras.Variable(keras.initializers.RandomNormal(seed=3), (2,))
    assert (private.initializer_seed(weight), private.initializer_seed(keras.Variable([1.0]))) == (3, None)


def test_the_state_of_a_random_generator_is_recognized_by_name() -> None:
    assert private.is_seed(keras.layers.Dropout(0.5).seed_generator.state)
    assert not private.is_seed(keras.Variable([1.0]))


def test_lookup_tables_of_nested_layers_are_found() -> None:
    within = keras.Sequential([keras.Input((), dtype="string"), keras.layers.StringLookup(vocabulary=["a", "b"])])
    model = keras.Sequential([keras.Input((), dtype="string"), within, keras.layers.Embedding(3, 2), keras.layers.Dense(1)])
    assert len(private.resources(model)) == 1


def test_tables_in_mappings_are_found_and_objects_that_have_any_attribute_are_not() -> None:
    class Config:
        def __init__(self, refuses: bool) -> None:
            self.refuses = refuses

        def __getattr__(self, name: str) -> None:
            if self.refuses:
                raise KeyError(name)

    layer = keras.layers.Dense(1)
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["a"], [1]), 0)
    layer.configs, layer.tables = (Config(True), Config(False)), {"a": [table], 2: table}
    assert private.resources(keras.Sequential([keras.Input((2,)), layer])) == [table]


def test_settings_of_a_compiled_model_are_read() -> None:
    def metric(targets: Any, outputs: Any) -> Any:
        return tf.reduce_mean(outputs - targets)

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae", metric], weighted_metrics=["mse"])
    assert private.compile_settings(model) == {
        "optimizer": model.optimizer,
        "loss": "mse",
        "loss_weights": None,
        "metrics": ["mae", metric],
        "weighted_metrics": ["mse"],
        "run_eagerly": False,
        "steps_per_execution": 1,
        "jit_compile": False,
    }
    assert private.compile_settings(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])) == {}


def test_losses_of_a_compiled_model_are_checked_after_alignment() -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    checked = list[Any]()

    def check(function: Any, targets: Any, outputs: Any) -> Any:
        checked.append((function, targets.shape, outputs.shape))
        return function(targets, outputs)

    parts = tf.zeros([2]), tf.ones([2, 1])
    loss = private.compiled_loss(model)
    assert float(loss(*parts)) == 1.0
    with private.checked_losses(model, check):
        assert float(loss(*parts)) == 1.0
    loss(*parts)
    assert checked == [(keras.losses.mean_squared_error, (2, 1), (2, 1))]
    assert [one.name for one in private.losses(model)] == ["mse"]


def test_metric_variables_include_those_omitted_by_the_model() -> None:
    class Quiet(keras.Sequential):  # type: ignore[misc]
        @property
        def metrics(self) -> list[Any]:
            return []

    model = Quiet([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    model.compute_metrics(None, tf.zeros([2, 1]), tf.ones([2, 1]))
    assert len(private.metric_variables(model)) == 4


def test_a_mask_is_copied_with_its_tensor() -> None:
    masked = keras.layers.Embedding(3, 2, mask_zero=True)(tf.constant([[0, 1]]))
    copied = private.copy_to_device(masked)
    assert copied._keras_mask.numpy().tolist() == [[False, True]]
    assert np.array_equal(copied, masked)
    assert not hasattr(private.copy_to_device(tf.ones([2])), "_keras_mask")


def test_a_server_imports_little_of_tensorflow() -> None:
    code = (
        "import sys\nfrom scaletier.private import server_library\nServer, ConfigProto = server_library()\n"
        "server = Server({'local': ['localhost:0']}, protocol='grpc', config=ConfigProto(inter_op_parallelism_threads=2))\n"
        "assert server.target.startswith('grpc://'), server.target\n"
        "print(sorted({'keras', 'tensorflow.python.ops.nn'} & {*sys.modules}), hasattr(sys.modules['tensorflow'], 'constant'))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "[] False\n"


def test_internals_of_tensorflow_s_coordinator_exist() -> None:
    coordinator = importlib.import_module("tensorflow.python.distribute.coordinator.cluster_coordinator")
    executor = importlib.import_module("tensorflow.python.eager.executor").new_executor(
        enable_async=False, enable_streaming_enqueue=False
    )
    assert callable(executor.wait)
    context = importlib.import_module("tensorflow.python.eager.context").context()
    assert callable(context.remove_function)
    assert isinstance(inspect.getattr_static(type(context), "executor"), property)
    assert inspect.getattr_static(type(context), "executor").fset
    source = inspect.getsource(coordinator)
    for name in ("self._cluster = ", "self.workers = ", "self.closure_queue = ", "self.executor", "self._error = None"):
        assert name in source, name
    assert [*inspect.signature(coordinator.Cluster.schedule).parameters] == ["self", "function", "args", "kwargs"]
    queue = coordinator._CoordinatedClosureQueue()
    assert queue._error is None
    assert isinstance(queue._queue_lock, type(threading.Lock()))
