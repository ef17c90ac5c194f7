"""States of layers and of random generators change in evaluations and in an exported model as in Keras."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaletier import pipeline
from scaletier.checkpoint import TrainingState
from scaletier.evaluation import make_evaluate
from scaletier.functional_model import FunctionalModel
from scaletier.job import Job, JobError
from scaletier.savedmodel import export, make_serving_module
from scaletier.scopes import RecordingScope
from scaletier.stages import Stage, make_layer_groups
from scaletier.tensorflow_setup import import_tensorflow

tf = import_tensorflow()
import keras  # noqa: E402 - TensorFlow imports it, without its log messages

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
Y = X[:, :1]


class Changes(keras.layers.Layer):  # type: ignore[misc]
    """Add a random number and a count to the inputs, except in training."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.generator = keras.random.SeedGenerator(4) if own else None
        self.count = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            return inputs
        self.count.assign_add(1)
        noise = keras.random.normal(keras.ops.shape(inputs), seed=self.generator)
        return inputs + noise + keras.ops.cast(self.count, "float32")


def compiled(inputs: Any, layer: Any) -> Any:
    model = keras.Sequential([inputs, layer, keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def own() -> Any:
    return compiled(keras.Input((3,)), Changes(True))


def default() -> Any:
    return compiled(keras.Input((3,)), Changes(False))


def recurrent() -> Any:
    return compiled(keras.Input(batch_shape=(4, 3, 1)), keras.layers.LSTM(2, stateful=True))


def dataset(inputs: Any) -> Any:
    return tf.data.Dataset.from_tensor_slices((inputs, Y)).batch(4, drop_remainder=True)


def evaluate_twice(network: FunctionalModel, state: TrainingState, data: Any) -> list[float]:
    """Return the losses of two evaluations, the second from the states after the first."""
    evaluate, losses = make_evaluate(network, state, data, None), []
    for _ in range(2):
        result = evaluate(lambda: False)
        assert result
        state.end_test(result.test_state)
        losses.append(result.loss)
    return losses


@pytest.mark.parametrize(("make", "inputs"), [(own, X), (default, X), (recurrent, X[:, :, None])])
def test_evaluations_and_calls_of_the_exported_model_change_states(
    make: Callable[[], Any], inputs: Any, tmp_path: Path
) -> None:
    data, first = dataset(inputs), inputs[:4]
    job = Job(make, data)
    network = FunctionalModel(job, data.element_spec, 0)
    state = TrainingState(network)
    losses = evaluate_twice(network, state, data)
    path = export(make_serving_module(job, network, state.shared, state.local, data.element_spec[0]), str(tmp_path))
    served: Any = tf.saved_model.load(path)
    outputs = [served.signatures["serving_default"](inputs=tf.constant(first))["outputs"] for _ in range(2)]
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    reference = make()
    assert losses == pytest.approx([reference.evaluate(data, verbose=0) for _ in range(2)], rel=1e-5)
    expected = [reference.predict(first, verbose=0) for _ in range(2)]
    assert not np.allclose(*expected)
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-5)


class Looks(keras.layers.Layer):  # type: ignore[misc]
    """Look numbers up in the first of its tables."""

    def __init__(self) -> None:
        super().__init__()
        pairs = tf.lookup.KeyValueTensorInitializer(tf.range(3, dtype=tf.int64), tf.range(3.0) * 2.0)
        self.tables = [tf.lookup.StaticHashTable(pairs, -1.0)]

    def call(self, inputs: Any) -> Any:
        return self.tables[0].lookup(tf.cast(inputs, tf.int64))


@pytest.mark.parametrize("loads", [False, True])
def test_an_exported_model_has_its_tables_and_loaded_graphs(loads: bool, tmp_path: Path) -> None:
    loaded = tf.Module()
    loaded.scale = tf.Variable(2.0, trainable=False)
    loaded.serve = tf.function(lambda inputs: inputs * loaded.scale, input_signature=[tf.TensorSpec([None, 3])])
    tf.saved_model.save(loaded, str(tmp_path / "loaded"))

    def make() -> Any:
        layer = keras.layers.TFSMLayer(str(tmp_path / "loaded"), call_endpoint="serve") if loads else Looks()
        model = keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(1, name="_out")])  # no name of a root scope
        model.compile("sgd", "mse")
        return model

    data = dataset(np.float32([[0, 1, 2]] * 8))
    network = FunctionalModel(job := Job(make, data), data.element_spec, 0)
    what = "uses a loaded SavedModel" if loads else "looks words up in a table"
    with pytest.raises(JobError, match=f"^the model sequential {what}, which no other host can be given: "):
        network.require_transferable()
    state = TrainingState(network)
    path = export(make_serving_module(job, network, state.shared, state.local, data.element_spec[0]), str(tmp_path))
    served: Any = tf.saved_model.load(path)
    kernel, bias = state.shared
    expected = np.float32([[0, 2, 4]]) @ kernel.numpy() + bias.numpy()
    np.testing.assert_allclose(served.serve(tf.constant([[0.0, 1.0, 2.0]]))["outputs"], expected, rtol=1e-5)


def test_stages_on_several_hosts_change_states(monkeypatch: pytest.MonkeyPatch) -> None:
    device, data = "/device:CPU:0", dataset(X)
    network = FunctionalModel(Job(own, data), data.element_spec, 0)
    monkeypatch.setattr(pipeline, "_CHIEF", device)
    stages = [Stage("master/0", device, [group]) for group in make_layer_groups(network)]
    losses = evaluate_twice(network, pipeline.DistributedState(network, stages, None), data)
    assert losses == pytest.approx(evaluate_twice(network, TrainingState(network), data), rel=1e-5)


def test_random_numbers_of_no_layer_are_refused_on_several_hosts() -> None:
    data = dataset(X)
    with pytest.raises(JobError, match=r"uses the variable .* which belongs to no layer\. Valid: .* as a SeedGenerator"):
        FunctionalModel(Job(default, data), data.element_spec, 0).require_splittable()


def test_a_metric_that_is_reset_in_part_is_refused_on_several_hosts() -> None:
    class Lasting(keras.metrics.MeanAbsoluteError):  # type: ignore[misc]
        def reset_state(self) -> None:
            self.total.assign(0.0)

    data = dataset(X)
    job = Job(own, data, metrics=lambda: [Lasting(name="error")])
    with pytest.raises(JobError, match=r"a metric does not reset its variable error/count\. Valid: .* whose reset_state"):
        FunctionalModel(job, data.element_spec, 0).require_splittable()


class Cell(keras.layers.Layer):  # type: ignore[misc]
    """Count the steps of a sequence."""

    state_size = 1

    def build(self, _shape: Any) -> None:
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False, name="steps")

    def call(self, inputs: Any, states: Any) -> Any:
        self.steps.assign_add(1.0)
        return inputs + states[0], [inputs + states[0]]


class Twice(keras.layers.Layer):  # type: ignore[misc]
    """Draw random numbers twice in a tf.function, the second time with the state of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.draw = tf.function(keras.layers.Dropout(0.5, seed=1))

    def call(self, inputs: Any) -> Any:
        return self.draw(self.draw(inputs, training=True), training=True)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (lambda: keras.layers.RNN(Cell(), name="sums"), "cell/steps within the loop of sums. Valid: unroll=True in"),
        (Twice, "seed_generator/seed_generator_state within a tf.function, a branch or a loop. Valid: no @tf.function, as"),
    ],
)
def test_an_assignment_within_a_loop_or_a_function_is_refused_with_its_remedy(layer: Callable[[], Any], reason: str) -> None:
    data = dataset(X[:, :, None])
    with pytest.raises(JobError) as error:
        FunctionalModel(Job(lambda: compiled(keras.Input((3, 1)), layer()), data), data.element_spec, 0)
    assert reason in str(error.value)
    if layer is not Twice:
        unrolled = Job(lambda: compiled(keras.Input((3, 1)), keras.layers.RNN(Cell(), unroll=True)), data)
        assert "rnn/cell/steps" in [spec.name for spec in FunctionalModel(unrolled, data.element_spec, 0).shared]


class Late(keras.layers.Layer):  # type: ignore[misc]
    """Scale the inputs by numbers made in `build`."""

    def build(self, shape: Any) -> None:
        self.scale = keras.ops.arange(1, shape[-1] + 1, dtype="float32")

    def call(self, inputs: Any) -> Any:
        return inputs * self.scale


def test_a_tensor_of_another_graph_is_refused_with_its_remedy() -> None:
    def unbuilt() -> Any:
        model = keras.Sequential([Late(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    data = dataset(X)
    with pytest.raises(JobError, match=r"a layer uses a tensor of another graph, such as one made in build\. Valid: tensors"):
        FunctionalModel(Job(unbuilt, data), data.element_spec, 0, eval_element=data.element_spec)
    network = FunctionalModel(Job(lambda: compiled(keras.Input((3,)), Late()), data), data.element_spec, 0)
    state = TrainingState(network)
    assert np.shape(network.predict(state.shared, state.local, X)) == (8, 1)


class Limits(keras.layers.Layer):  # type: ignore[misc]
    """Multiply by a weight, which evaluations limit."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.always, self.scale = always, self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, inputs: Any, training: bool = False) -> Any:
        if self.always or not training:
            self.scale.assign(keras.ops.minimum(self.scale, 0.5))
        return inputs * self.scale


def test_a_weight_that_evaluations_alone_assign_is_refused() -> None:
    data = dataset(X)
    with pytest.raises(JobError, match=r"an evaluation assigns the weight .*/scale, and a step does not: .* trainable=False"):
        FunctionalModel(Job(lambda: compiled(keras.Input((3,)), Limits(False)), data), data.element_spec, 0)
    network = FunctionalModel(Job(lambda: compiled(keras.Input((3,)), Limits(True)), data), data.element_spec, 0)
    assert "limits/scale" in [spec.name for spec in network.trained]


def test_an_error_that_follows_from_an_assignment_in_a_function_is_its_cause() -> None:
    data = dataset(X)
    network = FunctionalModel(Job(own, data), data.element_spec, 0)
    count = keras.Variable(0.0)

    @tf.function  # type: ignore[untyped-decorator]
    def assign() -> None:
        count.assign(tf.random.uniform([]))

    with RecordingScope([(count, tf.zeros([]))]) as scope:
        assign()
    with pytest.raises(JobError, match=r"it assigns .* within a tf\.function") as error, network._outside_of_loops(scope):
        raise (first := ValueError("out of scope"))
    assert error.value.__cause__ is first
    with pytest.raises(KeyboardInterrupt), network._outside_of_loops(scope):
        raise KeyboardInterrupt


def test_weights_that_the_loss_alone_makes_train() -> None:
    class Judged(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.judge = keras.layers.Dense(1, name="judge")

        def call(self, inputs: Any) -> Any:
            return inputs

        def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **__: Any) -> Any:
            return keras.ops.mean((self.judge(y_pred) - y) ** 2)

    def made() -> Any:
        model = Judged()
        model.compile("sgd")
        return model

    data = dataset(X)
    network = FunctionalModel(Job(made, data), data.element_spec, 0)
    assert [spec.name for spec in network.trained] == ["judge/kernel", "judge/bias"]
