"""A table of models: 20 steps and an evaluation equal `model.fit` and `model.evaluate`, or an error.

docs/library.md shows the table's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaletier import private
from scaletier.checkpoint import TrainingState
from scaletier.data import add_class_weights
from scaletier.evaluation import make_evaluate
from scaletier.functional_model import FunctionalModel
from scaletier.job import Job, JobError
from scaletier.round_graph import make_round, run_round
from scaletier.tensorflow_setup import import_tensorflow

tf = import_tensorflow()
import keras  # noqa: E402 - TensorFlow imports it, without its log messages
from keras import layers  # noqa: E402

STEPS, BATCH, WIDTH = 20, 4, 3
ROOT = Path(__file__).resolve().parents[2]
RANDOM = np.random.default_rng(11)
X = RANDOM.normal(size=(STEPS * BATCH, WIDTH)).astype(np.float32)
Y = RANDOM.normal(size=(STEPS * BATCH, 1)).astype(np.float32)
Z = RANDOM.normal(size=(STEPS * BATCH, 2)).astype(np.float32)
KINDS = RANDOM.integers(0, 2, STEPS * BATCH)
FLAGS = KINDS[:, None].astype(np.float32)
WORDS = RANDOM.integers(0, 9, (STEPS * BATCH, 4))
WEIGHTS = RANDOM.uniform(0.5, 2, STEPS * BATCH).astype(np.float32)
OTHER_WEIGHTS = RANDOM.uniform(0.5, 2, STEPS * BATCH).astype(np.float32)
CROSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
PAIR = {"price": "mse", "size": "mae"}


@dataclass(frozen=True)
class Row:
    """A model, its data, and its `compile`; `refused` is the one line that replaces Keras's numbers."""

    make: Callable[[], Any]
    data: tuple[Any, ...] = (X, Y)
    compile: Mapping[str, Any] = field(default_factory=lambda: {"loss": "mse"})
    refused: str = ""
    batch: int = BATCH
    whole: bool = False
    class_weight: Mapping[int, float] | None = None
    needs: str = "SGD"
    tolerance: float = 1e-5


def dense(units: int = 1, **more: Any) -> Callable[[], Any]:
    """Return a model of one layer."""
    return lambda: keras.Sequential([keras.Input((WIDTH,)), layers.Dense(units, name="out", **more)], name="model")


def functional() -> Any:
    inputs = keras.Input((WIDTH,))
    return keras.Model(inputs, layers.Dense(1, name="out")(inputs), name="model")


def stack(*makers: Callable[[], Any], input_shape: Any = (WIDTH,), kind: str = "float32", out: int = 1) -> Callable[[], Any]:
    """Return layers, one after the other, and a last one of `out` units."""

    def make() -> Any:
        inner = [one() for one in makers]
        return keras.Sequential([keras.Input(input_shape, dtype=kind), *inner, layers.Dense(out, name="out")], name="model")

    return make


def pair(pack: Callable[[Any, Any], Any] = lambda first, second: [first, second], units: tuple[int, int] = (1, 1)) -> Any:
    """Return a model with two outputs, price and size."""

    def make() -> Any:
        inputs = keras.Input((WIDTH,), name="given")
        body = layers.Dense(4, "tanh", name="body")(inputs)
        outputs = [layers.Dense(units[at], name=name)(body) for at, name in enumerate(("price", "size"))]
        return keras.Model(inputs, pack(*outputs), name="model")

    return make


def by_name(first: Any, second: Any) -> Any:
    return {"price": first, "size": second}


def nested(first: Any, second: Any) -> Any:
    return {"a": {"price": first}, "b": second}


def two_inputs(pack: Callable[[Any, Any], Any]) -> Callable[[], Any]:
    """Return a model with two inputs."""

    def make() -> Any:
        first, second = keras.Input((WIDTH,), name="first"), keras.Input((2,), name="second")
        joined = layers.Concatenate()([layers.Dense(3, name="one")(first), layers.Dense(2, name="two")(second)])
        return keras.Model(pack(first, second), layers.Dense(1, name="out")(joined), name="model")

    return make


def frozen() -> Any:
    """Return a model of three layers, of which the first two are frozen; so are the second's moving means."""
    first, norm = layers.Dense(4, name="first"), layers.BatchNormalization(name="norm")
    first.trainable = norm.trainable = False
    return keras.Sequential([keras.Input((WIDTH,)), first, norm, layers.Dense(1, name="out")], name="model")


def adapted() -> Any:
    norm = layers.Normalization()
    norm.adapt(X * 3 + 1)
    return keras.Sequential([keras.Input((WIDTH,)), norm, layers.Dense(1, name="out")], name="model")


def string_lookup() -> Any:
    lookup = layers.StringLookup(vocabulary=["a", "b"])
    stack_layers = [lookup, layers.Embedding(3, 2), layers.Flatten(), layers.Dense(1, name="out")]
    return keras.Sequential([keras.Input((1,), dtype="string"), *stack_layers], name="model")


def stateful() -> Any:
    inputs = keras.Input(batch_shape=(BATCH, 4, WIDTH))
    return keras.Model(inputs, layers.Dense(1, name="out")(layers.LSTM(2, stateful=True)(inputs)), name="model")


def ragged() -> Any:
    inputs = keras.Input((None,), dtype="int64", ragged=True)
    return keras.Model(inputs, layers.Dense(1, name="out")(Pool()(layers.Embedding(9, 2)(inputs))), name="model")


def tied() -> Any:
    inputs, shared = keras.Input((WIDTH,)), layers.Dense(WIDTH, "tanh", name="shared")
    return keras.Model(inputs, layers.Dense(1, name="out")(shared(shared(inputs))), name="model")


def normalized() -> Any:
    first = layers.SpectralNormalization(layers.Dense(4, name="dense"))
    return keras.Sequential([keras.Input((WIDTH,)), first, layers.Dense(1, name="out")], name="model")


def normalized_twice() -> Any:
    inputs, layer = keras.Input((WIDTH,)), layers.SpectralNormalization(layers.Dense(3))
    both = layers.Concatenate()([layer(inputs), layer(layers.Dense(WIDTH)(inputs))])
    return keras.Model(inputs, layers.Dense(1)(both), name="model")


def adapters() -> Any:
    first = layers.Dense(4, name="first")
    first.build((None, WIDTH))
    first.enable_lora(2)
    return keras.Sequential([keras.Input((WIDTH,)), first, layers.Dense(1, name="out")], name="model")


def model_in_model() -> Any:
    inner = keras.Sequential([keras.Input((WIDTH,)), layers.Dense(4, "tanh", kernel_regularizer="l2"), Adds()], name="inner")
    inputs = keras.Input((WIDTH,))
    return keras.Model(inputs, layers.Dense(1, name="out")(inner(inputs)), name="model")


def attention() -> Any:
    inputs = keras.Input((4,), dtype="int64")
    words = layers.Embedding(9, 4, mask_zero=True)(inputs)
    attended = layers.MultiHeadAttention(2, 2, dropout=0.2, seed=1)(words, words)
    return keras.Model(inputs, layers.Dense(1, name="out")(layers.Bidirectional(layers.GRU(2))(attended)), name="model")


def vectorized() -> Any:
    vectorizer = layers.TextVectorization(vocabulary=["a", "b"], output_mode="multi_hot")
    return keras.Sequential([keras.Input((1,), dtype="string"), vectorizer, layers.Dense(1, name="out")], name="model")


def mixed_precision(policy: str) -> Callable[[], Any]:
    """Return a model with one policy for all layers, as in Keras's guide."""

    def make() -> Any:
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(policy)
        try:
            half_layers = [layers.Dense(4, "tanh", name="body"), layers.Dense(1, dtype="float32", name="out")]
            return keras.Sequential([keras.Input((WIDTH,)), *half_layers], name="model")
        finally:
            keras.config.set_dtype_policy(before)

    return make


class Pool(layers.Layer):  # type: ignore[misc]
    """The mean over the existing words."""

    def call(self, inputs: Any) -> Any:
        return tf.reduce_mean(inputs, 1)


class Adds(layers.Layer):  # type: ignore[misc]
    """Add a penalty of its outputs to the loss."""

    def call(self, inputs: Any) -> Any:
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(inputs)))
        return inputs


class Noise(layers.Layer):  # type: ignore[misc]
    """Adds random numbers, by a generator of its own or by Keras's."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.generator = keras.random.SeedGenerator(1) if own else None

    def call(self, inputs: Any, training: bool = False) -> Any:
        return inputs + keras.random.normal(keras.ops.shape(inputs), seed=self.generator) if training else inputs


class Subclassed(keras.Model):  # type: ignore[misc]
    """Its variables are created by its first data, and it passes no training argument to its layers."""

    def __init__(self) -> None:
        super().__init__(name="model")
        self.norm, self.out = layers.BatchNormalization(), layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        return self.out(self.norm(inputs))


class Requires(Subclassed):
    """Its `training` has no default."""

    def call(self, inputs: Any, training: Any) -> Any:
        return self.out(self.norm(inputs, training=training))


class Auxiliary(Subclassed):
    """Has a part that is used in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.auxiliary = layers.Dense(1, use_bias=False)

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.add_loss(keras.ops.mean(keras.ops.square(self.auxiliary(inputs))))
        return super().call(inputs)


class OwnLoss(Subclassed):
    """Trains towards the opposite, with a metric of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.far = keras.metrics.Mean(name="far")

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None) -> Any:
        self.far.update_state(keras.ops.abs(y + y_pred))
        return keras.ops.mean(keras.ops.square(y + y_pred)) + sum(self.losses)


class OwnMetrics(Subclassed):
    """Report values beside the metrics of `compile`, one of them of the last batch only."""

    def __init__(self) -> None:
        super().__init__()
        self.biggest = keras.metrics.Mean(name="biggest")

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        metrics_so_far = super().compute_metrics(x, y, y_pred, sample_weight)
        self.biggest.update_state(keras.ops.max(x))
        return {**metrics_so_far, "biggest": self.biggest.result(), "last": keras.ops.max(y_pred)}


class OneTracker(Subclassed):
    """Its `metrics` omit those of `compile`, as in Keras's documentation of compute_loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = keras.metrics.Mean(name="loss")

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool = True) -> Any:
        loss = keras.ops.mean((y_pred - y) ** 2)
        self.tracker.update_state(loss)
        return loss

    def reset_metrics(self) -> None:
        self.tracker.reset_state()

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]


class Calls(Subclassed):
    """Counts its calls, also those of an evaluation, and computes with the count and the sum of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")
        self.outputs = self.add_weight(shape=(), initializer="zeros", trainable=False, name="outputs")

    def call(self, inputs: Any) -> Any:
        self.calls.assign_add(1.0)
        self.outputs.assign_add(keras.ops.mean(outputs := super().call(inputs)))
        return outputs * self.calls / 20 + self.outputs / 20


class CountsTests(Subclassed):
    """Count the calls of evaluations, and compute with the count."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, inputs: Any, training: bool = False) -> Any:
        if not training:
            self.calls.assign_add(1.0)
        return super().call(inputs) * (self.calls + 1)


class Branches(layers.Layer):  # type: ignore[misc]
    """Count its calls, draw random numbers and normalize in a branch; the count has no gradient."""

    def __init__(self, trainable: bool = False) -> None:
        super().__init__(name="branches")
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=trainable, name="calls")
        self.norm, self.drop = layers.BatchNormalization(), layers.Dropout(0.5, seed=3)

    def build(self, shape: Any) -> None:
        self.norm.build(shape)

    def compute_output_shape(self, shape: Any) -> Any:
        return shape

    def call(self, inputs: Any, training: bool = False) -> Any:
        def normalize() -> Any:
            outputs = self.norm(inputs, training=training)
            self.calls.assign_add(keras.ops.mean(outputs**2))
            return self.drop(outputs, training=training) * self.calls

        return keras.ops.cond(keras.ops.mean(inputs) > 0.0, normalize, lambda: inputs)


class Judged(Subclassed):
    """Has a part that is used in evaluations alone."""

    def __init__(self) -> None:
        super().__init__()
        self.judge = layers.Dense(1)

    def call(self, inputs: Any, training: bool = False) -> Any:
        outputs = super().call(inputs)
        return outputs if training else self.judge(outputs)


class Traced(layers.Layer):  # type: ignore[misc]
    """Calls another layer in a tf.function."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def build(self, shape: Any) -> None:
        self.inner.build(shape)

    @tf.function  # type: ignore[misc]
    def compute(self, inputs: Any, training: bool) -> Any:
        if tf.reduce_mean(inputs) > 0.1:
            inputs = inputs * 2.0
        return self.inner(inputs, training=training)

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.compute(inputs, training)


class Recomputed(Traced):
    """Computes another layer again for its gradient."""

    def call(self, inputs: Any, training: bool = False) -> Any:
        return tf.recompute_grad(lambda one: self.inner(one, training=training))(inputs)


class Bound(Subclassed):
    """Uses the variable of a weight that it had when it was made, as a loaded graph does."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")
        self.variable = tf.Variable(2.0)
        private.attach(self.scale, self.variable)

    def call(self, inputs: Any) -> Any:
        return super().call(inputs) * self.variable


class Untracked(Subclassed):
    """Uses a layer that is no attribute of the model."""

    def __init__(self) -> None:
        super().__init__()
        layer = layers.Dense(1, name="untracked")
        layer.build((None, WIDTH))
        self.get = lambda: layer

    def call(self, inputs: Any) -> Any:
        return super().call(inputs) + self.get()(inputs)


class Anneals(Subclassed):
    """Weighs its loss by the steps of the optimizer."""

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool = True) -> Any:
        return keras.ops.mean((y_pred - y) ** 2) * keras.ops.cast(self.optimizer.iterations, "float32") / 20


class Reads(Subclassed):
    """Reads a variable beside Keras."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = tf.Variable(2.0, trainable=False, name="scale")

    def call(self, inputs: Any) -> Any:
        return super().call(inputs) * self.scale


class UsesNumpy(Subclassed):
    """Computes outside TensorFlow."""

    def call(self, inputs: Any) -> Any:
        return super().call(inputs) * float(np.mean(inputs.numpy()))


class Measures(keras.Model):  # type: ignore[misc]
    """Metrics beside those of `compile`, which `call` updates."""

    def __init__(self) -> None:
        super().__init__(name="model")
        self.out, self.size = layers.Dense(1), keras.metrics.Mean(name="size")

    def call(self, inputs: Any, training: bool = False) -> Any:
        self.size.update_state(keras.ops.max(keras.ops.abs(inputs)))
        return self.out(inputs)


class Distiller(keras.Model):  # type: ignore[misc]
    """A student of a frozen teacher, with its own `compile`, as in Keras's example of distillation."""

    def __init__(self) -> None:
        super().__init__(name="model")
        self.teacher, self.student = layers.Dense(2, name="teacher"), layers.Dense(2, name="student")
        self.teacher.trainable = False

    def build(self, shape: Any) -> None:
        self.teacher.build(shape)
        self.student.build(shape)

    def compile(self, optimizer: Any = "sgd", distance: Any = None, alpha: float = 0.5) -> None:
        super().compile(optimizer=optimizer, metrics=["mae"])
        self.distance, self.alpha = distance, alpha

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool = True) -> Any:
        student_loss = keras.ops.mean(keras.ops.square(y - y_pred))
        return self.alpha * student_loss + (1 - self.alpha) * self.distance(self.teacher(x), y_pred)

    def call(self, inputs: Any) -> Any:
        return self.student(inputs)


class Named(keras.Model):  # type: ignore[misc]
    """A dict of outputs."""

    def __init__(self) -> None:
        super().__init__(name="model")
        self.price, self.size = layers.Dense(1), layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        return {"price": self.price(inputs), "size": self.size(inputs)}


class Listed(Named):
    """A list of outputs, which have no names."""

    def call(self, inputs: Any) -> Any:
        return [self.price(inputs), self.size(inputs)]


class Encoder(keras.Model):  # type: ignore[misc]
    """A variational autoencoder, with its divergence as a loss and a metric."""

    def __init__(self) -> None:
        super().__init__(name="model")
        self.encode, self.decode = layers.Dense(4), layers.Dense(WIDTH)
        self.generator, self.divergence = keras.random.SeedGenerator(5), keras.metrics.Mean(name="divergence")

    def call(self, inputs: Any) -> Any:
        mean, spread = keras.ops.split(self.encode(inputs), 2, -1)
        divergence = keras.ops.mean(keras.ops.square(mean) + keras.ops.exp(spread) - spread - 1)
        self.add_loss(divergence)
        self.divergence.update_state(divergence)
        noise = keras.random.normal(keras.ops.shape(mean), seed=self.generator)
        return self.decode(mean + keras.ops.exp(spread / 2) * noise)


class OwnLossClass(keras.losses.Loss):  # type: ignore[misc]
    """The mean of squares."""

    def call(self, targets: Any, outputs: Any) -> Any:
        return keras.ops.mean(keras.ops.square(targets - outputs), -1)


class OwnMetricClass(keras.metrics.Metric):  # type: ignore[misc]
    """A sum of distances, whose result is its variable."""

    def __init__(self) -> None:
        super().__init__(name="own")
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, targets: Any, outputs: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(keras.ops.sum(keras.ops.abs(targets - outputs)))

    def result(self) -> Any:
        return self.total


class Counts(Subclassed):
    """Counts its calls beside Keras."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = tf.Variable(0, trainable=False, name="calls")

    def call(self, inputs: Any) -> Any:
        self.calls.assign_add(1)
        return super().call(inputs)


class OwnStep(Subclassed):
    """A step of its own."""

    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


class OwnTest(Subclassed):
    """An evaluation of its own."""

    def test_step(self, data: Any) -> Any:
        return super().test_step(data)


class SlowBias(keras.optimizers.SGD):  # type: ignore[misc]
    """Trains biases at a tenth of the rate."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        pairs = zip(grads, trainable_variables, strict=True)
        super().apply([0.1 * one if "bias" in weight.path else one for one, weight in pairs], trainable_variables)


class Decays(keras.Sequential):  # type: ignore[misc]
    """Compiled with an optimizer that is built, and excludes a weight from decay by names, or itself."""

    def __init__(self, names: tuple[str, ...] = ("kernel",)) -> None:
        super().__init__([keras.Input((WIDTH,)), layers.Dense(1, name="last")], name="model")
        self.names = names

    def compile(self, optimizer: Any, **more: Any) -> None:
        chosen = keras.optimizers.AdamW(0.01, weight_decay=0.9)
        if self.names:
            chosen.exclude_from_weight_decay(var_names=list(self.names))
        else:
            chosen.exclude_from_weight_decay(var_list=[self.layers[0].kernel])
        chosen.build(self.trainable_variables)
        super().compile(chosen, **more)


def decays() -> Any:
    chosen = keras.optimizers.AdamW(0.01, weight_decay=0.9)
    chosen.exclude_from_weight_decay(var_names=["kernel"])
    return chosen


class Excludes(keras.Sequential):  # type: ignore[misc]
    """Excludes the weight of its first layer from decay, before the second one has weights."""

    def __init__(self) -> None:
        first = layers.Dense(4)
        first.build((None, WIDTH))
        super().__init__([first, layers.Dense(1)], name="model")

    def compile(self, optimizer: Any, **more: Any) -> None:
        chosen = keras.optimizers.AdamW(0.01, weight_decay=0.9)
        chosen.exclude_from_weight_decay(var_list=[self.layers[0].kernel])
        super().compile(chosen, **more)


class Falls(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """Computes with the step as with a number of Python."""

    def __call__(self, step: Any) -> Any:
        return keras.ops.minimum(0.05 * 0.9**step, 0.1 / (1.0 + step))

    def get_config(self) -> dict[str, Any]:
        return {}


class Rates(keras.Sequential):  # type: ignore[misc]
    """Reports its learning rate as a metric."""

    def __init__(self) -> None:
        super().__init__([keras.Input((WIDTH,)), layers.Dense(1)], name="model")

    def compile(self, optimizer: Any, **more: Any) -> None:
        chosen = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5))

        def rate(_targets: Any, _outputs: Any) -> Any:
            return chosen.learning_rate

        super().compile(chosen, **{**more, "metrics": [rate]})


class Centered(keras.optimizers.SGD):  # type: ignore[misc]
    """Centers gradients before they are applied."""

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        pairs = [(gradient - keras.ops.mean(gradient), variable) for gradient, variable in grads_and_vars]
        return super().apply_gradients(pairs)


def cubed(targets: Any, outputs: Any) -> Any:
    return keras.ops.mean(keras.ops.abs(targets - outputs) ** 3, -1)


def optimizer(name: str, **settings: Any) -> Row:
    """Return a row with an optimizer."""
    return Row(dense(), compile={"loss": "mse", "optimizer": lambda: getattr(keras.optimizers, name)(**settings)}, needs=name)


def by_variable(variable: Any) -> Any:
    return keras.optimizers.Adam(0.01) if "bias" in variable.path else keras.optimizers.SGD(0.1)


def several() -> Any:
    kinds = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1), {"out/bias": keras.optimizers.Adam(0.01)})
    return keras.optimizers.MultiOptimizer(kinds)


def embedding(make: Callable[[], Any]) -> Row:
    """Return a row with words that a batch has several times, each of which has a gradient of its own."""
    words = stack(lambda: layers.Embedding(9, 3), layers.Flatten, input_shape=(4,), kind="int64")
    return Row(words, (WORDS, Y), {"loss": "mse", "optimizer": make})


MASKED = stack(
    lambda: layers.Embedding(9, 3, mask_zero=True), lambda: layers.Dense(3, "tanh"), input_shape=(4,), kind="int64", out=2
)
BOTH = (X, (Y, FLAGS))
NAMED = (X, {"price": Y, "size": FLAGS})
ROWS: dict[str, Row] = {
    # outputs
    "one output": Row(dense(), compile={"loss": "mse", "metrics": ["mae", "mse"]}),
    "targets without the outputs' one column": Row(dense(), (X, Y[:, 0]), {"loss": "mse", "metrics": ["mae"]}),
    "one output, by name": Row(functional, compile={"loss": {"out": "mse"}, "metrics": {"out": ["mae"]}}),
    "list of outputs, one loss": Row(pair(), BOTH, {"loss": "mse"}),
    "list of outputs of different shapes, one loss": Row(pair(units=(1, 2)), (X, (Y, Z)), {"loss": "mse"}),
    "list of outputs, losses and weights by position": Row(pair(), BOTH, {"loss": ["mse", "mae"], "loss_weights": [0.5, 2.0]}),
    "list of outputs, all by name": Row(
        pair(), NAMED, {"loss": PAIR, "loss_weights": {"price": 0.5, "size": 2.0}, "metrics": {"price": ["mae"], "size": "mse"}}
    ),
    "list of outputs, one without a loss": Row(pair(), BOTH, {"loss": ["mse", None]}),
    "list of outputs, metrics as a list of lists": Row(
        pair(), BOTH, {"loss": "mse", "metrics": [["mae"], ["mae", "accuracy"]]}
    ),
    "dict of outputs, one loss": Row(pair(by_name), NAMED, {"loss": "mse", "metrics": {"size": ["accuracy"]}}),
    "dict of outputs, losses and weights by name": Row(
        pair(by_name), NAMED, {"loss": {"size": "mae", "price": "mse"}, "loss_weights": {"size": 2.0, "price": 0.5}}
    ),
    "nested outputs": Row(pair(nested, (1, 2)), (X, {"a": {"price": Y}, "b": Z}), {"loss": "mse"}),
    "subclassed, a list of outputs by name": Row(Listed, NAMED, {"loss": PAIR}, "the loss does not fit"),
    "dict of outputs, one without a loss": Row(pair(by_name), NAMED, {"loss": {"price": "mse"}, "metrics": {"size": ["mae"]}}),
    # inputs
    "list of inputs": Row(two_inputs(lambda first, second: [first, second]), ((X, Z), Y)),
    "dict of inputs": Row(two_inputs(lambda first, second: {"p": first, "q": second}), ({"p": X, "q": Z}, Y)),
    "nested inputs": Row(two_inputs(lambda first, second: {"p": [first], "q": second}), ({"p": (X,), "q": Z}, Y)),
    "ragged inputs": Row(ragged, (tf.RaggedTensor.from_row_lengths(np.arange(200) % 9, [1, 4, 2, 3] * STEPS), Y)),
    # losses and metrics
    "crossentropy by its short name": Row(dense(2), (X, KINDS), {"loss": "crossentropy", "metrics": ["accuracy"]}),
    "labels, accuracy": Row(dense(2), (X, KINDS), {"loss": CROSS, "metrics": ["accuracy", "acc"]}),
    "a loss and a metric that are functions": Row(dense(), compile={"loss": cubed, "metrics": [cubed]}),
    "a custom loss and a custom metric class": Row(
        dense(), compile={"loss": OwnLossClass(), "metrics": lambda: [OwnMetricClass()]}
    ),
    "a loss without reduction": Row(dense(), compile={"loss": keras.losses.MeanSquaredError(reduction=None)}),
    "a loss that is a sum": Row(
        dense(),
        compile={"loss": keras.losses.MeanSquaredError(reduction="sum"), "optimizer": lambda: keras.optimizers.SGD(1e-3)},
    ),
    "a metric built at its first batch": Row(dense(2), (X, Z), {"loss": "mse", "metrics": lambda: [keras.metrics.R2Score()]}),
    "AUC and precision": Row(
        dense(1, activation="sigmoid"),
        (X, FLAGS),
        {"loss": "binary_crossentropy", "metrics": lambda: [keras.metrics.AUC(name="auc"), keras.metrics.Precision(name="p")]},
    ),
    "metrics of several numbers": Row(
        dense(2),
        (X, Z),
        {"loss": "mse", "metrics": lambda: [keras.metrics.F1Score(name="f1"), "mae", keras.metrics.FBetaScore(beta=2.0)]},
    ),
    "a smaller last batch": Row(pair(), BOTH, {"loss": "mse", "metrics": [["mae"], ["mae"]]}, batch=7),
    # weights
    "sample weights": Row(dense(), (X, Y, WEIGHTS), {"loss": "mse", "metrics": ["mae"], "weighted_metrics": ["mae"]}),
    "sample weights by output": Row(
        pair(),
        (*NAMED, {"price": WEIGHTS, "size": OTHER_WEIGHTS}),
        {"loss": PAIR, "weighted_metrics": {"price": ["mae"], "size": ["mae"]}},
        "the sample weights are invalid: they are by name, and the outputs of the model model are a list. Valid: a tuple",
    ),
    "sample weights by output, dict of outputs": Row(
        pair(by_name),
        (*NAMED, {"price": WEIGHTS, "size": OTHER_WEIGHTS}),
        {"loss": PAIR, "weighted_metrics": {"price": ["mae"], "size": ["mae"]}},
    ),
    "sample weights by time step": Row(
        MASKED,
        (WORDS, RANDOM.normal(size=(80, 4, 2)).astype(np.float32), RANDOM.uniform(size=(80, 4)).astype(np.float32)),
        {"loss": "mse", "weighted_metrics": ["mae"]},
    ),
    "class weights": Row(
        dense(2), (X, KINDS), {"loss": CROSS, "weighted_metrics": ["accuracy"]}, class_weight={0: 0.5, 1: 3.0}
    ),
    "class weights of one-hot targets": Row(
        dense(2, activation="softmax"),
        (X, np.eye(2, dtype=np.float32)[KINDS]),
        {"loss": "categorical_crossentropy", "weighted_metrics": ["accuracy"]},
        class_weight={0: 0.5, 1: 3.0},
    ),
    "masks": Row(MASKED, (WORDS, RANDOM.normal(size=(80, 4, 2)).astype(np.float32)), {"loss": "mse", "metrics": ["mae"]}),
    # layers
    "subclassed, BatchNorm": Row(Subclassed),
    "Embedding": Row(stack(lambda: layers.Embedding(9, 3), layers.Flatten, input_shape=(4,), kind="int64"), (WORDS, Y)),
    "a layer that is used twice": Row(tied),
    "Dropout": Row(stack(lambda: layers.Dropout(0.5, seed=3))),
    "compiled by XLA, with Dropout and BatchNormalization": Row(
        stack(layers.BatchNormalization, lambda: layers.Dropout(0.5, seed=3)),
        compile={"loss": "mse", "optimizer": keras.optimizers.Adam, "metrics": lambda: ["mae"], "jit_compile": True},
    ),
    "a seed generator": Row(stack(lambda: Noise(True))),
    "Keras's own random numbers": Row(stack(lambda: Noise(False))),
    "a stateful RNN": Row(stateful, (RANDOM.normal(size=(80, 4, WIDTH)).astype(np.float32), Y), whole=True),
    "an adapted Normalization": Row(adapted),
    "StringLookup": Row(string_lookup, (np.array([["a"], ["b"], ["c"], ["a"]] * STEPS), Y)),
    "frozen layers": Row(frozen),
    "regularizers": Row(dense(kernel_regularizer="l2", activity_regularizer="l1")),
    "regularizers, no Input": Row(lambda: keras.Sequential([layers.Dense(1, kernel_regularizer="l2")], name="model")),
    "add_loss": Row(stack(lambda: layers.Dense(2), Adds)),
    "add_loss alone": Row(stack(lambda: layers.Dense(2), Adds), compile={"loss": None}),
    "add_loss alone, inputs alone": Row(stack(lambda: layers.Dense(2), Adds), (X,), {"loss": None}),
    "mixed_float16": Row(mixed_precision("mixed_float16")),
    "mixed_bfloat16": Row(mixed_precision("mixed_bfloat16")),
    "float64": Row(
        stack(
            lambda: layers.Dense(4, "tanh", dtype="float64"),
            lambda: layers.BatchNormalization(dtype="float64"),
            lambda: layers.Dense(3, dtype="float64", trainable=False),
        ),
        compile={"loss": "mse", "optimizer": keras.optimizers.Adam, "metrics": ["mae"]},
    ),
    "bfloat16": Row(dense(dtype="bfloat16"), compile={"loss": "mse", "optimizer": keras.optimizers.Adam}),
    "a Sequential model without an Input": Row(lambda: keras.Sequential([layers.Dense(3), layers.Dense(1)], name="model")),
    "subclassed, a required `training`": Row(Requires),
    "subclassed, a part of training alone": Row(Auxiliary),
    "subclassed, a dict of outputs": Row(Named, NAMED, {"loss": PAIR, "metrics": {"price": ["mae"]}}),
    "subclassed, a list of outputs": Row(Listed, BOTH, {"loss": ["mse", "mae"], "metrics": [["mae"], ["mae"]]}),
    "a model within a model": Row(model_in_model),
    "constraints": Row(dense(kernel_constraint="unit_norm")),
    "a layer that assigns its weights": Row(normalized),
    "a layer that assigns its weights, used twice": Row(normalized_twice),
    "LoRA": Row(adapters),
    "attention, GRU, masks": Row(attention, (WORDS, Y)),
    "image augmentation": Row(
        stack(lambda: layers.RandomFlip(seed=1), layers.Flatten, input_shape=(4, 4, 1)),
        (RANDOM.normal(size=(80, 4, 4, 1)).astype(np.float32), Y),
    ),
    "TextVectorization": Row(vectorized, (np.array([["a"], ["b a"], ["c"], ["a"]] * STEPS), Y)),
    "Discretization": Row(stack(lambda: layers.Discretization([-1.0, 0.0, 1.0], output_mode="one_hot"), layers.Flatten)),
    "a variational autoencoder": Row(Encoder, (X, X)),
    "a tf.function": Row(stack(lambda: Traced(layers.Dense(WIDTH, "tanh", name="inner")))),
    "a tf.function that assigns": Row(
        stack(lambda: Traced(layers.BatchNormalization(name="norm"))),
        refused="the model model is invalid: it assigns model/traced/norm/moving_mean within a tf.function, a",
    ),
    "recompute_grad": Row(
        stack(
            lambda: layers.Dense(4, "tanh"),
            lambda: Recomputed(layers.Dropout(0.5, seed=3)),
            lambda: Recomputed(layers.Dense(3, "tanh", trainable=False)),
        )
    ),
    "recompute_grad of weights": Row(
        stack(lambda: Recomputed(layers.Dense(4, name="inner"))),
        refused="the model model is invalid: tf.custom_gradient, tf.recompute_grad or keras.remat gives no gradient to "
        "model/recomputed/inner/kernel, model/recomputed/inner/bias. Valid: weights that are arguments of its function, or",
    ),
    "Embedding, Adam": embedding(lambda: keras.optimizers.Adam(0.1, weight_decay=0.1, clipnorm=0.5)),
    "Embedding, global_clipnorm": embedding(lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.1)),
    "run_eagerly, as far as a graph can be made": Row(stack(lambda: Noise(True)), compile={"loss": "mse", "run_eagerly": True}),
    "NumPy in call": Row(
        UsesNumpy,
        compile={"loss": "mse", "run_eagerly": True},
        refused="the model model does not take inputs of float32 [?, 3] in a graph, and run_eagerly=True has no effect: ",
    ),
    "a metric with a matrix": Row(
        dense(2, activation="softmax"),
        (X, KINDS),
        {"loss": "sparse_categorical_crossentropy", "metrics": lambda: [keras.metrics.MeanIoU(2, sparse_y_pred=False)]},
    ),
    # overridden methods
    "compute_loss": Row(OwnLoss, compile={"loss": None}),
    "compute_metrics": Row(OwnMetrics, compile={"loss": "mse", "metrics": ["mae"]}),
    "compute_loss, and metrics": Row(OneTracker, compile={"loss": "mse", "metrics": ["mae"]}),
    "compute_loss, with its own mean of losses": Row(OneTracker, batch=7),
    "a distiller with its own compile": Row(Distiller, (X, Z), {"distance": keras.losses.mean_absolute_error}),
    "compute_loss that reads the optimizer's iterations": Row(Anneals),
    "metrics that call updates": Row(Measures, compile={"loss": "mse", "metrics": ["mae"]}, batch=7),
    "a weight that call assigns": Row(Calls),
    "a weight that evaluations alone assign": Row(CountsTests),
    "a branch that assigns": Row(stack(Branches)),
    "a branch that assigns a trained weight": Row(
        stack(lambda: Branches(True)), refused="the model model is invalid: it assigns branches/calls within a"
    ),
    "a part of evaluations alone": Row(Judged),
    "a layer not tracked by the model": Row(Untracked),
    "a tf.Variable that a step assigns": Row(
        Counts, refused="the model model is invalid: a step uses the tf.Variable calls:0,"
    ),
    "a tf.Variable that a step reads": Row(Reads, refused="the model model is invalid: a step uses the tf.Variable scale:0,"),
    "a weight that a loaded graph reads": Row(
        Bound,
        refused="the model model is invalid: a graph that it has loaded, as in a TFSMLayer, uses the weight model/scale, which",
    ),
    "train_step": Row(OwnStep, refused="the model model is invalid: its class OwnStep overrides train_step"),
    "test_step": Row(OwnTest, refused="the model model is invalid: its class OwnTest overrides test_step"),
    # optimizers
    **{
        name: optimizer(name)
        for name in ("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "Lamb", "Lion", "Muon", "Nadam")
    },
    "RMSprop": optimizer("RMSprop", centered=True, momentum=0.9),
    "SGD": optimizer("SGD", momentum=0.9, nesterov=True),
    "ScheduleFreeAdamW": replace(
        optimizer("ScheduleFreeAdamW"), refused="the optimizer ScheduleFreeAdamW is invalid: Keras computes it in another way"
    ),
    "apply_gradients": Row(
        dense(),
        compile={"loss": "mse", "optimizer": lambda: Centered(0.1)},
        refused="the optimizer Centered is invalid: it overrides apply_gradients, which scaletier does not call. Valid: ",
    ),
    "apply, by variable": Row(dense(), compile={"loss": "mse", "optimizer": SlowBias}),
    "weights without decay, a built optimizer": Row(Decays),
    "weights without decay, by a name": Row(dense(), compile={"loss": "mse", "optimizer": decays}),
    "weights without decay, no Input": Row(Excludes),
    "weights without decay, by variable": Row(lambda: Decays(())),
    "weights without decay, by a layer's name": Row(lambda: Decays(("last",))),
    "a schedule of its own": Row(dense(), compile={"loss": "mse", "optimizer": lambda: keras.optimizers.SGD(Falls())}),
    "an initializer with a SeedGenerator": Row(
        lambda: dense(kernel_initializer=keras.initializers.RandomNormal(seed=keras.random.SeedGenerator(3)))(),
        refused="the weight out/kernel is invalid: its initializer draws from a SeedGenerator. Valid: a seed that is a number",
    ),
    "LossScaleOptimizer": Row(
        dense(), compile={"loss": "mse", "optimizer": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(), 8.0)}
    ),
    "MultiOptimizer": Row(dense(), compile={"loss": "mse", "optimizer": several}, needs="MultiOptimizer"),
    "MultiOptimizer, by a function": optimizer("MultiOptimizer", optimizer_map=by_variable),
    "EMA": optimizer("Adam", use_ema=True, ema_momentum=0.5),
    "EMA, overwriting": Row(
        dense(),
        compile={"loss": "mse", "optimizer": lambda: keras.optimizers.SGD(use_ema=True, ema_overwrite_frequency=2)},
    ),
    "gradient accumulation": Row(
        dense(),
        compile={"loss": "mse", "optimizer": lambda: keras.optimizers.Adam(0.1, gradient_accumulation_steps=3)},
    ),
    "a schedule": optimizer("SGD", learning_rate=keras.optimizers.schedules.CosineDecay(0.1, 20)),
    "a schedule, and a metric of its rate": Row(Rates),
    "weight decay and clipping": optimizer("Adam", weight_decay=0.1, global_clipnorm=0.1),
    # refused models
    "a loss for an output that does not exist": Row(
        pair(),
        BOTH,
        {"loss": {"price": "mse", "cost": "mse"}},
        "the loss is invalid: the model model has no output 'cost'. Valid",
    ),
    "a loss weight for an output that does not exist": Row(
        pair(by_name),
        NAMED,
        {"loss": PAIR, "loss_weights": {"price": 1.0, "cost": 2.0}},
        "the loss weights are invalid: the model model has no output 'cost'. Valid: price, size",
    ),
    "metrics for an output that does not exist": Row(
        pair(),
        BOTH,
        {"loss": "mse", "metrics": {"cost": ["mae"]}},
        "the metrics are invalid: the model model has no output 'cost'",
    ),
    "sample weights for an output that does not exist": Row(
        pair(by_name),
        (*NAMED, {"cost": WEIGHTS}),
        {"loss": PAIR},
        "the sample weights are invalid: the model model has no output",
    ),
    "one list of metrics for two outputs": Row(
        pair(by_name),
        NAMED,
        {"loss": "mse", "metrics": ["mae"]},
        "the metrics do not fit: the model gives price float32 [?, 1] and",
    ),
    "outputs that would be broadcast over the targets": Row(
        dense(2), (X, RANDOM.normal(size=(80, 3, 1)).astype(np.float32)), refused="the loss does not fit: "
    ),
}


def compiled(row: Row) -> Any:
    """Return the row's model, compiled like a user's."""
    model, settings = row.make(), {"optimizer": "sgd", **row.compile}
    for name in ("optimizer", "metrics"):
        if callable(factory := settings.get(name)):
            settings[name] = factory()
    model.compile(**settings)
    return model


def dataset(row: Row) -> Any:
    """Return the row's data: inputs, targets and sample weights, with class weights among them."""
    data = tf.data.Dataset.from_tensor_slices(row.data if len(row.data) > 1 else row.data[0])
    return data.batch(row.batch, drop_remainder=row.whole)


def weighted(row: Row) -> Any:
    """Return the data with class weights as sample weights, as `scaletier.fit` does."""
    if row.class_weight is None:
        return dataset(row)
    return add_class_weights(dataset(row), row.class_weight)


# Rows whose case another row, or the test of all optimizers in test_scaletier_private.py, nearly covers.
FULL = {
    *("Adadelta", "Adafactor", "Adagrad", "AdamW", "Adamax", "Ftrl", "Lamb", "Lion", "Muon", "Nadam", "RMSprop", "SGD"),
    *("one output", "list of outputs, losses and weights by position", "dict of outputs, one loss", "list of inputs"),
    *("dict of inputs", "labels, accuracy", "a loss and a metric that are functions", "a metric built at its first batch"),
    *("AUC and precision", "Embedding", "a layer that is used twice", "Dropout", "a seed generator", "StringLookup"),
    *("a Sequential model without an Input", "subclassed, a list of outputs", "constraints", "LoRA", "image augmentation"),
    *(
        "attention, GRU, masks",
        "TextVectorization",
        "Discretization",
        "a loss without reduction",
        "sample weights by time step",
    ),
    *("add_loss", "mixed_bfloat16", "bfloat16", "compute_metrics", "LossScaleOptimizer", "MultiOptimizer", "a schedule"),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.full("a like row proves it, see FULL") if name in FULL else ()) for name in ROWS],
)
def test_a_model_trains_like_fit_or_is_refused_in_one_line(name: str) -> None:
    row = ROWS[name]
    if not hasattr(keras.optimizers, row.needs):
        pytest.skip(f"this version of Keras has no {row.needs}")
    data = weighted(row)
    steps = int(data.cardinality())
    job = Job(lambda: compiled(row), data)
    if row.refused:
        with pytest.raises(JobError) as error:
            FunctionalModel(job, data.element_spec, 0)
        assert str(error.value).startswith(row.refused)
        assert "\n" not in str(error.value)
        return
    network = FunctionalModel(job, data.element_spec, 0, eval_element=dataset(row).element_spec)
    state, iterator = TrainingState(network), iter(data)
    metrics = [tf.Variable(value) for value in network.initial_metrics()]
    run = make_round(network, None, iterator, ("/device:CPU:0",), metrics, network.compiles)
    rounds = [run_round(network, run, iterator, [state], 1, 1) for _ in range(steps)]
    assert int(state.step) == steps
    state.assign_ema()
    evaluation = make_evaluate(network, state, dataset(row), None)(lambda: False)
    assert evaluation
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    reference = compiled(row)
    keras_logs = Logs()
    reference.fit(dataset(row), class_weight=row.class_weight, verbose=0, shuffle=False, callbacks=[keras_logs], epochs=1)
    for logs, round_ in zip(keras_logs.of_batches, rounds, strict=True):
        running = {"loss": round_.mean_loss, **round_.metrics}
        assert numbers(running) == pytest.approx(numbers(logs), rel=row.tolerance, abs=row.tolerance)
    assert rounds[0].loss == pytest.approx(keras_logs.of_batches[0]["loss"], rel=row.tolerance)
    for variable, value in zip(reference.trainable_variables, state.shared, strict=False):
        assert variable.dtype == value.dtype.name
        np.testing.assert_allclose(
            tf.cast(value, tf.float64),
            np.asarray(variable, np.float64),
            rtol=row.tolerance,
            atol=row.tolerance,
            err_msg=variable.path,
        )
    expected = reference.evaluate(dataset(row), verbose=0, return_dict=True)
    evaluated = numbers({"loss": evaluation.loss, **evaluation.metrics})
    assert evaluated == pytest.approx(numbers(expected), rel=row.tolerance, abs=row.tolerance)


def test_the_manual_shows_the_table() -> None:
    expected = "".join(f"| {name} | {'refused' if row.refused else 'the same numbers'} |\n" for name, row in ROWS.items())
    assert f"| model | result |\n|---|---|\n{expected}\n" in (ROOT / "docs/library.md").read_text()


class Logs(keras.callbacks.Callback):  # type: ignore[misc]
    """The running means of loss and metrics after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.of_batches = list[dict[str, Any]]()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.of_batches.append(dict(logs))


def numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return all numbers of logs, by the names and places of their metrics."""
    return {f"{name} {at}": float(one) for name, value in logs.items() for at, one in enumerate(np.ravel(value))}
