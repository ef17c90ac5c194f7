"""The losses and metrics of `compile` count as in Keras's own evaluate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scaletier import private
from scaletier.checkpoint import LocalCopy
from scaletier.functional_model import Batch, FunctionalModel
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
    state = LocalCopy(network)
    loss, _, _, results = state.test(state.initial_test(), element)
    metrics = {"loss": loss, **dict(zip(network.metric_names, results, strict=True))}
    keras.utils.clear_session(free_memory=False)
    model = make()
    model.run_eagerly = True  # a graph made for one batch takes ten times as long
    model.set_weights([value.numpy() for value in state.shared])
    inputs, targets, *weights = batch
    expected = model.evaluate(inputs, targets, sample_weight=weights[0] if weights else None, return_dict=True, verbose=0)
    return {name: float(value) for name, value in metrics.items()}, expected


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


@pytest.mark.parametrize("by_function", [True, False], ids=["by the model's function", "before"])
def test_a_mixed_float16_model_gets_an_optimizer_that_scales_the_loss(by_function: bool) -> None:
    def make() -> Any:
        if by_function:
            keras.config.set_dtype_policy("mixed_float16")
        return keras.Sequential([keras.Input([4]), keras.layers.Dense(1, name="out")])

    data = tf.data.Dataset.from_tensors((INPUTS, NUMBERS[:, None]))
    try:
        if not by_function:
            keras.config.set_dtype_policy("mixed_float16")
        network = FunctionalModel(Job(make, data, "mse", optimizer="adam"), data.element_spec, 0)
        assert network.model.layers[-1].compute_dtype == "float16"
        assert any("dynamic_scale" in spec.name for spec in network.slots)
    finally:
        keras.config.set_dtype_policy("float32")


def test_a_trained_model_runs_as_it_was_compiled() -> None:
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    model.compile("adam", "mse", run_eagerly=True, steps_per_execution=4)
    data = tf.data.Dataset.from_tensors((INPUTS, NUMBERS[:, None]))
    config = FunctionalModel(Job(model, data), data.element_spec, 0).model.get_compile_config()
    assert (config["run_eagerly"], config["steps_per_execution"]) == (True, 4)


def test_a_model_parallel_model_may_not_override_loss_or_metrics() -> None:
    class Own(keras.Sequential):  # type: ignore[misc]
        def compute_metrics(self, *parts: Any, **named: Any) -> Any:
            return super().compute_metrics(*parts, **named)

    data = tf.data.Dataset.from_tensors((INPUTS, NUMBERS[:, None]))
    layers = [keras.Input([4]), keras.layers.Dense(1)]
    total = keras.losses.MeanSquaredError(reduction="sum", name="total")
    for model, loss, reason in (
        (
            Own(layers, name="own"),
            "mse",
            "the model own is invalid with --strategy model-parallel: it overrides compute_metrics.",
        ),
        (keras.Sequential(layers), total, "the loss total is invalid with --strategy model-parallel: its reduction is sum."),
    ):
        with pytest.raises(JobError) as error:
            FunctionalModel(Job(model, data, loss), data.element_spec, 0).require_splittable()
        assert str(error.value).startswith(reason)


def test_a_model_is_made_with_what_the_program_has_set() -> None:
    class Twice(keras.layers.Layer):  # type: ignore[misc]
        def call(self, inputs: Any) -> Any:
            return inputs * 2

    config = keras.Sequential([keras.Input([4]), Twice(), keras.layers.Dense(1)]).get_config()
    spec = tf.data.Dataset.from_tensors((INPUTS, NUMBERS)).element_spec
    with keras.saving.custom_object_scope({"Twice": Twice}):
        FunctionalModel(Job(lambda: keras.Sequential.from_config(config), None, "mse"), spec, 0)
