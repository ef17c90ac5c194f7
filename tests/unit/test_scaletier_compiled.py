"""The losses and metrics of `compile` count as in Keras's own evaluate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scaletier import private
from scaletier.checkpoint import TrainingState
from scaletier.evaluation import make_evaluate
from scaletier.functional_model import Batch, FunctionalModel, metrics_by_name
from scaletier.job import Job, JobError
from scaletier.tensorflow_setup import import_tensorflow

tf = import_tensorflow()
import keras  # noqa: E402 - TensorFlow imports it, without its log messages

INPUTS = np.random.default_rng(0).random((6, 4), np.float32)
NUMBERS, KINDS = np.arange(6, dtype=np.float32) / 6, np.arange(6) % 3
WEIGHTS = np.arange(6, dtype=np.float32)


def cubed(targets: Any, outputs: Any) -> Any:
    return keras.ops.mean(keras.ops.abs(targets - outputs) ** 3, -1)


def two_outputs() -> Any:
    inputs = keras.Input([4], name="given")
    model = keras.Model(inputs, {"a": keras.layers.Dense(1)(inputs), "b": keras.layers.Dense(3)(inputs)})
    model.compile(
        "adam",
        {"a": cubed, "b": keras.losses.SparseCategoricalCrossentropy(from_logits=True)},
        loss_weights={"a": 0.5, "b": 2.0},
        metrics={"a": ["accuracy", cubed], "b": "accuracy"},
    )
    return model


def one_output(loss: Any) -> Callable[[], Any]:
    def make() -> Any:
        inputs = keras.Input([4], name="given")
        model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(inputs))
        model.compile("adam", loss, metrics=["mae"], weighted_metrics=["accuracy"])
        return model

    return make


def evaluate_with_both(make: Callable[[], Any], *batch: Any) -> tuple[dict[str, float], dict[str, float]]:
    """Return the loss and metrics of a batch, by this library and by Keras."""
    element = Batch.of(next(iter(tf.data.Dataset.from_tensors(batch))))
    network = FunctionalModel(Job(model=make, data=None), tf.data.Dataset.from_tensors(batch).element_spec, 0)
    state = TrainingState(network)
    loss, _, _, results = state.test(state.initial_test_state(), element)
    metrics = {"loss": loss, **metrics_by_name(network.metric_shapes, results)}
    keras.utils.clear_session(free_memory=False)
    model = make()
    model.run_eagerly = True  # a graph made for one batch takes ten times as long
    model.set_weights([value.numpy() for value in state.shared])
    inputs, targets, *weights = batch
    expected = model.evaluate(inputs, targets, sample_weight=weights[0] if weights else None, return_dict=True, verbose=0)
    return {name: float(value) for name, value in metrics.items()}, expected


class Percent(keras.Sequential):  # type: ignore[misc]
    """Return percentages by the names of the metrics, for which Keras reports the metrics themselves."""

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return {name: 100 * value for name, value in super().compute_metrics(x, y, y_pred, sample_weight).items()}


class Differs(keras.Sequential):  # type: ignore[misc]
    """Return fewer metrics in an evaluation, in another order, and numbers of several types."""

    def compute_loss(self, *parts: Any, training: bool = True, **named: Any) -> Any:
        self.trains = training
        return super().compute_loss(*parts, training=training, **named)

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        found = {**super().compute_metrics(x, y, y_pred, sample_weight), "half": 0.5, "rows": 6, "big": tf.reduce_max(x) > 1}
        return found if self.trains else dict(list(found.items())[:0:-1])


def measured(kind: Any) -> Any:
    model = kind([keras.Input([4]), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def test_metrics_of_the_names_that_keras_knows_have_keras_s_values() -> None:
    metrics, expected = evaluate_with_both(lambda: measured(Percent), INPUTS, NUMBERS[:, None])
    assert metrics == pytest.approx(expected)


def test_an_evaluation_has_the_names_of_its_own_metrics() -> None:
    data = tf.data.Dataset.from_tensors((INPUTS, NUMBERS[:, None]))
    network = FunctionalModel(Job(lambda: measured(Differs), data), data.element_spec, 0)
    state = TrainingState(network)
    evaluation = make_evaluate(network, state, data, None)(lambda: False)
    model = measured(Differs)
    model.set_weights([value.numpy() for value in state.shared])
    expected = model.evaluate(data, return_dict=True, verbose=0)
    assert evaluation
    assert ([*network.metric_shapes], [*evaluation.metrics]) == (["mae", "half", "rows", "big"], ["big", "rows", "half", "mae"])
    assert evaluation.metrics == pytest.approx(expected)


def test_the_function_of_a_compiled_model_is_called_once_and_makes_no_weights() -> None:
    models = []

    def make() -> Any:
        models.append(two_outputs())
        return models[-1]

    FunctionalModel(Job(make, None), tf.data.Dataset.from_tensors((INPUTS, {"a": NUMBERS, "b": KINDS})).element_spec, 0)
    (model,) = models
    assert [private.stored(weight) for weight in model.weights] == [None] * 4


def test_losses_are_weighted_and_metrics_named_by_output() -> None:
    metrics, expected = evaluate_with_both(two_outputs, INPUTS, {"a": NUMBERS[:, None], "b": KINDS})
    assert metrics == pytest.approx(expected)


@pytest.mark.parametrize("loss", ["binary_crossentropy", "mse", cubed], ids=["named", "short", "function"])
@pytest.mark.parametrize("weights", [(), (WEIGHTS,)], ids=["plain", "weighted"])
def test_targets_may_lack_the_single_column_of_outputs(loss: Any, weights: tuple[Any, ...]) -> None:
    metrics, expected = evaluate_with_both(one_output(loss), INPUTS, (NUMBERS > 0.4).astype(np.float32), *weights)
    assert (metrics["loss"], metrics["accuracy"]) == pytest.approx((expected["loss"], expected["accuracy"]))


def test_a_loss_gets_equal_shapes_if_only_one_side_has_the_column() -> None:
    def size_loss(targets: Any, outputs: Any) -> Any:
        assert targets.shape.as_list() == outputs.shape.as_list()
        return keras.ops.mean(keras.ops.square(targets - outputs), -1)

    def make_flat() -> Any:
        inputs = keras.Input([4], name="given")
        model = keras.Model(inputs, keras.layers.Reshape([])(keras.layers.Dense(1)(inputs)))
        model.compile("adam", size_loss)
        return model

    for targets in (NUMBERS[:, None], NUMBERS):
        evaluate_with_both(one_output(size_loss), INPUTS, targets)
    evaluate_with_both(make_flat, INPUTS, NUMBERS[:, None])


@pytest.mark.parametrize("weights", [[2.0], {"out": 2.0}])
def test_the_weight_of_a_single_loss_counts(weights: Any) -> None:
    def make() -> Any:
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1, name="out")])
        model.compile("adam", "mse", weights)
        return model

    metrics, expected = evaluate_with_both(make, INPUTS, NUMBERS[:, None])
    assert metrics["loss"] == pytest.approx(expected["loss"])


@pytest.mark.parametrize("weights", [["accuracy"], [1.0, 2.0], {"out": "much"}])
def test_invalid_loss_weights_are_refused(weights: Any) -> None:
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1, name="out")], name="seq")
    model.compile("adam", "mse", weights)
    data = tf.data.Dataset.from_tensors((INPUTS, NUMBERS[:, None]))
    with pytest.raises(JobError) as error:
        FunctionalModel(Job(model, data), data.element_spec, 0)
    assert str(error.value).startswith("the loss does not fit: the model gives float32 [6, 1], ")


def test_outputs_of_unknown_rank_are_refused_in_one_line() -> None:
    class Python(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, inputs: Any) -> Any:
            return tf.py_function(lambda value: value, [self.dense(inputs)], tf.float32)

    model = Python()
    model.compile("adam", "mse")
    data = tf.data.Dataset.from_tensors((INPUTS, NUMBERS[:, None]))
    with pytest.raises(JobError, match=r"^the loss does not fit: the model gives float32 \[…\], the targets are "):
        FunctionalModel(Job(model, data), data.element_spec, 0)


def test_a_refusal_names_the_output_without_a_loss_weight() -> None:
    inputs = keras.Input([4])
    model = keras.Model(inputs, [keras.layers.Dense(1, name=name)(inputs) for name in ("price", "size")])
    model.compile("adam", {"price": "mse", "size": "mse"}, {"price": 2.0})
    data = tf.data.Dataset.from_tensors((INPUTS, (NUMBERS[:, None],) * 2))
    with pytest.raises(JobError, match=r"^the loss does not fit: .*: the key 'size' is missing$"):
        FunctionalModel(Job(model, data), data.element_spec, 0)


@pytest.mark.parametrize(
    ("by_function", "compiled", "scales"),
    [(True, None, True), (False, None, True), (True, True, True), (True, False, False)],
    ids=["by the model's function", "before", "compiled", "compiled without"],
)
def test_a_mixed_float16_model_gets_an_optimizer_that_scales_the_loss(
    by_function: bool, compiled: bool | None, scales: bool
) -> None:
    def make() -> Any:
        if by_function:
            keras.config.set_dtype_policy("mixed_float16")
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1, name="out")])
        if compiled is not None:
            model.compile("sgd", "mse", auto_scale_loss=compiled)
        return model

    data = tf.data.Dataset.from_tensors((INPUTS, NUMBERS[:, None]))
    try:
        if not by_function:
            keras.config.set_dtype_policy("mixed_float16")
        network = FunctionalModel(Job(make, data, "mse", optimizer="adam"), data.element_spec, 0)
        assert network.model.layers[-1].compute_dtype == "float16"
        assert any("dynamic_scale" in spec.name for spec in network.slots) == scales
    finally:
        keras.config.set_dtype_policy("float32")


def test_a_trained_model_runs_as_it_was_compiled() -> None:
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    model.compile("adam", "mse", run_eagerly=True, steps_per_execution=4)
    data = tf.data.Dataset.from_tensors((INPUTS, NUMBERS[:, None]))
    config = FunctionalModel(Job(model, data), data.element_spec, 0).model.get_compile_config()
    assert (config["run_eagerly"], config["steps_per_execution"]) == (True, 4)


@pytest.mark.parametrize("name", ["train_step", "test_step", "make_train_function", "make_test_function"])
def test_a_model_with_its_own_steps_is_refused(name: str) -> None:
    model = type("Own", (keras.Sequential,), {name: lambda *_: None})([keras.Input([4]), keras.layers.Dense(1)])
    data = tf.data.Dataset.from_tensors((INPUTS, NUMBERS[:, None]))
    with pytest.raises(JobError, match=rf"its class Own overrides {name}, which scaletier does not call\. Valid: "):
        FunctionalModel(Job(model, data, "mse"), data.element_spec, 0)


def test_a_model_parallel_model_may_not_override_loss_or_metrics() -> None:
    class Own(keras.Sequential):  # type: ignore[misc]
        def compute_metrics(self, *parts: Any, **named: Any) -> Any:
            return super().compute_metrics(*parts, **named)

    data = tf.data.Dataset.from_tensors((INPUTS, NUMBERS[:, None]))
    layers = [keras.Input([4]), keras.layers.Dense(1)]
    total = keras.losses.MeanSquaredError(reduction="sum", name="total")
    weighted = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight", name="weighted")

    class Weighs(keras.losses.Loss):  # type: ignore[misc]
        beta = keras.Variable(1.0, trainable=False, name="beta")

        def call(self, y_true: Any, y_pred: Any) -> Any:
            return self.beta * keras.ops.square(y_true - y_pred)

    for model, loss, reason in (
        (
            Own(layers, name="own"),
            "mse",
            "the model own is invalid with --strategy model-parallel: it overrides compute_metrics.",
        ),
        (keras.Sequential(layers), total, "the loss total is invalid with --strategy model-parallel: its reduction is sum."),
        (keras.Sequential(layers), weighted, "the loss weighted is invalid with --strategy model-parallel: its reduction is"),
        (
            keras.Sequential(layers, name="own"),
            Weighs(),
            "the model own is invalid with --strategy model-parallel: a step uses the variable beta, which belongs",
        ),
    ):
        with pytest.raises(JobError) as error:
            FunctionalModel(Job(model, data, loss), data.element_spec, 0).require_splittable()
        assert str(error.value).startswith(reason)
    for setting in ("gradient_accumulation_steps", "ema_overwrite_frequency"):
        optimizer = keras.optimizers.SGD(use_ema=True, **{setting: 2})
        network = FunctionalModel(Job(keras.Sequential(layers), data, "mse", optimizer=optimizer), data.element_spec, 0)
        with pytest.raises(JobError, match=rf"^the optimizer has {setting}=2, with which --strategy model-parallel would send"):
            network.require_splittable()


def test_a_model_is_made_with_what_the_program_has_set() -> None:
    class Twice(keras.layers.Layer):  # type: ignore[misc]
        def call(self, inputs: Any) -> Any:
            return inputs * 2

    config = keras.Sequential([keras.Input([4]), Twice(), keras.layers.Dense(1)]).get_config()
    spec = tf.data.Dataset.from_tensors((INPUTS, NUMBERS)).element_spec
    with keras.saving.custom_object_scope({"Twice": Twice}):
        FunctionalModel(Job(lambda: keras.Sequential.from_config(config), None, "mse"), spec, 0)


class Quantized(keras.layers.Layer):  # type: ignore[misc]
    """Round the weights to steps of their largest value, and pass their gradients through."""

    def build(self, shape: Any) -> None:
        self.weight = self.add_weight(shape=(shape[-1], 4), initializer="glorot_uniform")

    def call(self, inputs: Any) -> Any:
        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def rounded(weight: Any) -> Any:
            largest = tf.reduce_max(tf.abs(tf.convert_to_tensor(self.weight)))
            zeros = lambda variables: [tf.zeros_like(one) for one in variables or []]  # noqa: E731
            return tf.round(weight / largest * 7) / 7 * largest, lambda gradient, variables=None: (gradient, zeros(variables))

        return keras.ops.matmul(inputs, rounded(tf.convert_to_tensor(self.weight)))


class Halved(keras.layers.Layer):  # type: ignore[misc]
    """Divide by a variable outside of training."""

    def __init__(self) -> None:
        super().__init__()
        self.two = tf.Variable(2.0, trainable=False)

    def call(self, inputs: Any, training: bool = False) -> Any:
        return inputs if training else inputs / self.two


@pytest.mark.parametrize("layer", [Quantized, Halved])
def test_a_layer_whose_gradient_or_evaluation_is_its_own_is_not_refused(layer: type) -> None:
    model = keras.Sequential([keras.Input((3,)), layer(), keras.layers.Dense(1)])
    data = tf.data.Dataset.from_tensors((np.ones([2, 3], np.float32), np.zeros([2, 1], np.float32)))
    network = FunctionalModel(Job(model, data, keras.losses.MeanSquaredError()), data.element_spec, 0)
    assert len(network.trained) == len(model.trainable_variables)


class Projected(keras.Model):  # type: ignore[misc]
    """Has a weight from the begin, a layer that a call makes, and one that its loss makes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")
        self.out, self.head = keras.layers.Dense(2, name="out"), keras.layers.Dense(1, use_bias=False, name="head")

    def call(self, inputs: Any) -> Any:
        return self.out(inputs * self.scale)

    def compute_loss(self, x: Any, y: Any, y_pred: Any, *_: Any, **__: Any) -> Any:
        return keras.ops.mean((self.head(y_pred) - y) ** 2)


def test_weights_that_a_step_makes_are_trained_also_if_the_model_is_called_built() -> None:
    model = Projected()
    with pytest.warns(UserWarning, match="not being actually built"):
        model.build((None, 3))
    model.compile("sgd")
    data = tf.data.Dataset.from_tensors((np.ones([2, 3], np.float32), np.zeros([2, 1], np.float32)))
    network = FunctionalModel(Job(model, data), data.element_spec, 0)
    assert [spec.name.rpartition("projected/")[2] for spec in network.trained] == [
        "scale",
        "out/kernel",
        "out/bias",
        "head/kernel",
    ]
