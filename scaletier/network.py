"""A Keras model, with its loss, metrics and optimizer, as pure functions of tensors.

Keras keeps values in variables. Here a variable is a name, a shape and how it begins, and values are handed in and out: one
graph then serves every replica, wherever its values lie, and no host holds a model that it does not train.
Source: Keras's stateless API, `keras.StatelessScope`, `Optimizer.stateless_apply`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from scaletier import private
from scaletier.job import Job, JobError, Metrics, kind_of, wants_argument
from scaletier.runtime import import_tensorflow, one_line

tf = import_tensorflow()
import keras  # noqa: E402 - TensorFlow imports it, without its noise

Values = Sequence[Any]
_FLOAT = "float32"
_HALVES = (tf.float16, tf.bfloat16)
# Losses of Keras that compare each target with the output in its place.
_BY_PLACE = (
    keras.losses.mean_squared_error,
    keras.losses.mean_absolute_error,
    keras.losses.mean_absolute_percentage_error,
    keras.losses.mean_squared_logarithmic_error,
    keras.losses.log_cosh,
    keras.losses.huber,
    keras.losses.hinge,
    keras.losses.squared_hinge,
    keras.losses.categorical_hinge,
    keras.losses.poisson,
    keras.losses.kl_divergence,
    keras.losses.cosine_similarity,
)


class Spec(NamedTuple):
    """A variable: its name, which no other has, its shape, its dtype by name, and Keras's own."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    variable: Any

    @property
    def size(self) -> int:
        """How many elements."""
        return math.prod(self.shape)


class Batch(NamedTuple):
    """What a dataset gives for one step; `weights` are those of the samples, or None."""

    inputs: Any
    targets: Any
    weights: Any = None

    @classmethod
    def of(cls, element: Any) -> Batch:
        """A dataset's element, or its spec; JobError for one that is not a pair or a triple."""
        if isinstance(element, tuple) and len(element) in (2, 3):
            return cls(*element)
        held = f"a tuple of {len(element)}" if isinstance(element, tuple) else f"a {type(element).__name__}"
        raise JobError(f"the data's elements are {held}; valid are (inputs, targets) and (inputs, targets, sample_weight)")

    def map(self, function: Callable[[Any], Any]) -> Batch:
        """The batch with this done to each tensor."""
        return Batch(*(None if part is None else tf.nest.map_structure(function, part) for part in self))


class Scheduled(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """A learning rate schedule that is asked at `at`, the job's global step, and not at the optimizer's own count."""

    def __init__(self, schedule: Any) -> None:
        self.schedule, self.at = schedule, None

    def __call__(self, step: Any) -> Any:
        return self.schedule(step if self.at is None else self.at)


class Network:
    """The functions, and the variables that they are of:

    `shared`: what replicas have in common, float32: trained weights first, then what is kept of the data, such as moving means.
    `own`: what each has for itself: the optimizer's variables, the states of random generators, and counts.
    `anew`: of these what the job says each time it starts, the learning rate.
    """

    def __init__(
        self,
        job: Job,
        element: Any,
        seed: int,
        replicas: int = 1,
        place: Callable[[Any], Any] | None = None,
        evaluated: Any = None,
    ) -> None:
        """`element` is the data's element_spec, `evaluated` that of the eval_data if there is any, `replicas` how many train,
        `place(variable)` where the optimizer updates it.

        Raises JobError where model, data, loss and metrics do not go together.
        """
        self.replicas, self._seed, spec = replicas, seed, Batch.of(element)
        self._scope = keras.StatelessScope(initialize_variables=False)
        self._deferred = False
        if job.model is None:
            raise JobError("the job has no model: pass Job(model=…), a Keras 3 model or a function that makes one")
        self.model = self._made(job.model)
        if not isinstance(self.model, keras.Model):
            raise JobError(f"the model is {kind_of(self.model)}; valid is a Keras {keras.__version__.partition('.')[0]} model")
        if not self.model.built or not self.model.variables:
            self._build(spec.inputs)
        compiled = _compiled(self.model) if job.loss is None or job.optimizer is None else {}
        loss = compiled.get("loss") if job.loss is None else job.loss
        if loss is None:
            raise JobError("the job has no loss, and its model is not compiled with one: pass Job(loss=…)")
        optimizer = job.optimizer or compiled.get("optimizer") or "rmsprop"
        self._optimizer = self._stateless(optimizer, replicas, place)
        # What has a value already is kept as such: TensorFlow forgets it where this process joins a cluster.
        with_values = [*self._optimizer.variables, *([] if self._deferred else self.model.variables)]
        self._begun = {id(variable): np.asarray(variable) for variable in with_values}
        trained = list(self.model.trainable_variables)
        if not trained:
            raise JobError(f"the model {self.model.name} has no variable to train")
        with self._scope:
            self._optimizer.build(trained)
        specs = _specs(self.model.name, self.model.variables)
        ids = {id(spec.variable): spec for spec in specs}
        self._others = [ids[id(variable)] for variable in self.model.non_trainable_variables]
        self.trained = [ids[id(variable)] for variable in trained]
        kept = [spec for spec in self._others if spec.dtype == _FLOAT]
        self._counts = [spec for spec in self._others if spec.dtype != _FLOAT]
        if wrong := next((spec for spec in self.trained if spec.dtype != _FLOAT), None):
            raise JobError(
                f"the variable {wrong.name} is {wrong.dtype}; valid is float32, also where it computes in another type"
            )
        self.shared = [*self.trained, *kept]
        self.slots = _specs("", self._optimizer.variables, "optimizer/")
        self.own = [*self._counts, *self.slots]
        # What counts is as the job has it now, whatever a checkpoint has.
        self.anew = [spec for spec in self.slots if spec.variable is self._rate]
        losses = _per_output(loss, _loss_function)
        weights = _loss_weights(compiled.get("loss_weights") if job.loss is None else None, losses, self.model.name)
        self._losses = {key: _times(weights.get(key), one) for key, one in losses.items()}
        self._outputs = self._look(spec)
        plain = _made_here(job.metrics) or compiled.get("metrics") or ()
        weighted = _made_here(job.weighted_metrics) or compiled.get("weighted_metrics") or ()
        self._metrics = [*self._metric_objects(plain, spec, False), *self._metric_objects(weighted, spec, True)]
        self._unmeasured = [np.asarray(variable) for _, metric, _ in self._metrics for variable in metric.variables]
        self.metric_names = _distinct(
            [metric.name if key is None else f"{key}_{metric.name}" for key, metric, _ in self._metrics]
        )
        self._measure(spec, self._outputs)
        if evaluated is not None and evaluated != element:
            given = Batch.of(evaluated)
            self._measure(given, self._look(given, " of eval_data"), " of eval_data")

    def require_portable(self) -> None:
        """JobError where the model has what no other host can be given."""
        if private.tables(self.model):
            raise JobError(
                f"the model {self.model.name} looks words up in a table, which no other host can be given: do that in the "
                "job's data, or train by sync, or on one host"
            )

    def _made(self, model: Any) -> Any:
        """The model of a function, without values for its variables; with them where its maker needs some."""
        if not callable(model) or isinstance(model, keras.Model | keras.Layer):
            return model
        if not inspect.isclass(model) and wants_argument(model):
            raise JobError("the job's model is a function of an argument; valid is one of nothing, which makes a Keras model")
        for scope in (self._scope, None):
            keras.utils.clear_session()
            keras.utils.set_random_seed(self._seed)
            if scope is None:
                return model()
            try:
                with scope:
                    made = model()
                self._deferred = True
                return made
            except (ValueError, AttributeError, TypeError):
                self._scope = keras.StatelessScope(initialize_variables=False)
        return None

    def _build(self, inputs: Any) -> None:
        symbolic = tf.nest.map_structure(lambda spec: keras.KerasTensor(spec.shape, spec.dtype), inputs)
        try:
            with self._scope:
                self.model(symbolic)
        except Exception as error:
            raise JobError(
                f"the model {self.model.name} does not take inputs of {_shapes(inputs)}: {one_line(error)}"
            ) from error

    def _stateless(self, optimizer: Any, replicas: int, place: Callable[[Any], Any] | None) -> Any:
        try:
            given = optimizer
            if callable(optimizer):
                given = optimizer(replicas) if wants_argument(optimizer) else optimizer()
            found = keras.optimizers.get(given)
        except ValueError as error:
            raise JobError(f"the optimizer cannot be had: {one_line(error)}") from None
        if not isinstance(found, keras.optimizers.Optimizer):
            raise JobError(f"the optimizer is {kind_of(found)}; valid is one of keras.optimizers, its name, or a function")
        if found.built:
            found = type(found).from_config(found.get_config())
        for each in (found, getattr(found, "inner_optimizer", found)):
            for name in ("gradient_accumulation_steps", "ema_overwrite_frequency"):
                if value := getattr(each, name, None):
                    raise JobError(f"the optimizer has {name}={value}, which goes by Keras's own way to train; leave it out")
        self._schedule = None
        steps = getattr(found, "inner_optimizer", found)  # of one that scales the loss for another
        if isinstance(rate := private.rate_of(steps), keras.optimizers.schedules.LearningRateSchedule):
            steps.learning_rate = self._schedule = Scheduled(rate)
        self._rate = private.rate_of(steps)
        return private.stateless(found, place)

    def initial(self, spec: Spec) -> npt.NDArray[Any]:
        """How a variable begins; the same each time, for one seed."""
        if (begun := self._begun.get(id(spec.variable))) is not None:
            return begun
        told = self._scope.get_current_value(spec.variable)
        value = spec.variable.value if told is None else told
        return np.asarray(keras.ops.convert_to_numpy(value), spec.dtype)

    def weight_of(self, spec: Spec) -> Spec | None:
        """The trained weight that a variable of the optimizer is for; None for one that is for all, such as its count."""
        inner = getattr(self._optimizer, "inner_optimizer", self._optimizer)
        reference = inner.references.get(id(spec.variable))
        return next((one for one in self.trained if one.variable is reference), None)

    def predict(self, shared: Values, own: Values, inputs: Any) -> Any:
        """What the model makes of a batch of inputs, as after training."""
        outputs, _, _ = called(self.model, *self._split(shared, own), inputs, False)
        return outputs

    def loss(self, batch: Batch, outputs: Any) -> Any:
        """The mean loss of a batch, float32, without what layers add."""
        terms = [function(*_at(key, batch.targets, outputs), batch.weights) for key, function in self._losses.items()]
        return tf.add_n(terms)

    def metrics(self) -> list[Any]:
        """The metrics' variables before any batch."""
        return [tf.constant(value) for value in self._unmeasured]

    def measured(self, state: Values, batch: Batch, outputs: Any) -> list[Any]:
        """The metrics' variables after a batch: a sample counts by its weight in `weighted_metrics` alone, as with Keras."""
        state, after = list(state), []
        with keras.StatelessScope(initialize_variables=False):
            for key, metric, weighted in self._metrics:
                count = len(metric.variables)
                mine, state = state[:count], state[count:]
                targets, found = _at(key, batch.targets, outputs)
                after += metric.stateless_update_state(mine, targets, found, sample_weight=batch.weights if weighted else None)
        return after

    def results(self, state: Values) -> list[Any]:
        """The metrics, in the order of `metric_names`, float32 []."""
        state, found = list(state), []
        with keras.StatelessScope(initialize_variables=False):
            for _, metric, _ in self._metrics:
                count = len(metric.variables)
                mine, state = state[:count], state[count:]
                found.append(tf.cast(metric.stateless_result(mine), tf.float32))
        return found

    def step(self, shared: Values, own: Values, batch: Batch, position: Any) -> tuple[list[Any], list[Any], Any, Any]:
        """The variables after a step on a batch, taken at a global step, int64; the mean loss, and the outputs."""
        trained, others = self._split(shared, own)
        with keras.StatelessScope(initialize_variables=False), tf.GradientTape() as tape:
            tape.watch(trained)
            outputs, others, added = called(self.model, trained, others, batch.inputs, True)
            loss = tf.add_n([self.loss(batch, outputs), *(tf.cast(term, tf.float32) for term in added)])
            scaled = self.scaled(loss, own[len(self._counts) :])
        changes = [None if change is None else tf.convert_to_tensor(change) for change in tape.gradient(scaled, trained)]
        if all(change is None for change in changes):
            raise JobError(
                f"the loss of the model {self.model.name} does not depend on any of its weights: nothing would train"
            )
        moved, slots = self.apply(trained, own[len(self._counts) :], changes, position)
        kept, counts = self._parted(others)
        return [*moved, *kept], [*counts, *slots], loss, outputs

    def scaled(self, loss: Any, slots: Values) -> Any:
        """The loss as its gradients are taken of it: an optimizer for float16 scales it."""
        mapping = list(zip((spec.variable for spec in self.slots), slots, strict=True))
        with keras.StatelessScope(mapping, initialize_variables=False):
            return self._optimizer.scale_loss(loss)

    def apply(self, trained: Values, slots: Values, changes: Values, position: Any) -> tuple[list[Any], list[Any]]:
        """Trained weights and the optimizer's variables after a step along these gradients, at a global step, int64."""
        if self._schedule is not None:
            self._schedule.at = position
        with keras.StatelessScope(initialize_variables=False):
            moved, slots = self._optimizer.stateless_apply(list(slots), list(changes), list(trained))
        return list(moved), list(slots)

    def _split(self, shared: Values, own: Values) -> tuple[list[Any], list[Any]]:
        """Trained weights, and the others in the order of Keras."""
        kept, counts = iter(shared[len(self.trained) :]), iter(own)
        return list(shared[: len(self.trained)]), [next(kept if spec.dtype == _FLOAT else counts) for spec in self._others]

    def _parted(self, others: Values) -> tuple[list[Any], list[Any]]:
        """The others by whether replicas share them."""
        pairs = list(zip(self._others, others, strict=True))
        kept = [value for spec, value in pairs if spec.dtype == _FLOAT]
        return kept, [value for spec, value in pairs if spec.dtype != _FLOAT]

    def _look(self, spec: Batch, of: str = "") -> Any:
        """The specs of the outputs; JobError where model, loss and data do not fit, `of` saying which data where it is not the
        job's own.
        """
        symbolic = tf.nest.map_structure(lambda one: keras.KerasTensor(one.shape, one.dtype), spec.inputs)
        try:
            with keras.StatelessScope(initialize_variables=False):  # Keras's own gives every variable a value as it ends
                found = self.model.compute_output_spec(symbolic)
        except Exception as error:
            raise JobError(
                f"the model {self.model.name} does not take inputs{of} of {_shapes(spec.inputs)}: {one_line(error)}"
            ) from error
        outputs = tf.nest.map_structure(lambda one: tf.TensorSpec(one.shape, one.dtype), found)
        check = tf.function(lambda batch, outputs: self.loss(batch, outputs), autograph=False)
        try:
            check.get_concrete_function(spec, outputs)
        except Exception as error:
            shapes = f"the model gives {_shapes(outputs)}, the targets{of} are {_shapes(spec.targets)}"
            raise JobError(f"the loss does not fit: {shapes}: {one_line(error)}") from error
        return outputs

    def _measure(self, spec: Batch, outputs: Any, of: str = "") -> None:
        """JobError where the metrics and data do not fit, `of` as of `_look`."""
        check = tf.function(lambda batch, found: self.measured(self.metrics(), batch, found), autograph=False)
        try:
            check.get_concrete_function(spec, outputs)
        except Exception as error:
            shapes = f"the model gives {_shapes(outputs)}, the targets{of} are {_shapes(spec.targets)}"
            raise JobError(f"the metrics do not fit: {shapes}: {one_line(error)}") from error

    def _metric_objects(self, metrics: Any, spec: Batch, weighted: bool) -> list[tuple[Any, Any, bool]]:
        """Metrics with the key of their output, which is None where there is one output, and whether samples have weights."""
        by_output = metrics if isinstance(metrics, Mapping) else {None: metrics}
        found = []
        for key, given in by_output.items():
            try:
                targets, outputs = _at(key, spec.targets, self._outputs)
            except (KeyError, IndexError, TypeError):
                shapes = f"the model gives {_shapes(self._outputs)}, the targets are {_shapes(spec.targets)}"
                raise JobError(f"there are metrics for an output {key!r}, which there is not: {shapes}") from None
            for one in given if isinstance(given, list | tuple) else [given]:
                try:
                    metric = _metric(one, targets, outputs)
                    result = metric.result()
                except Exception as error:
                    raise JobError(f"the metric {one!r} cannot be had: {one_line(error)}") from error
                if isinstance(result, Mapping) or np.ndim(result):
                    raise JobError(f"the metric {metric.name} gives several numbers; valid is one, such as their mean")
                found.append((key, metric, weighted))
        return found


def called(model: Any, trained: Values, others: Values, inputs: Any, training: bool) -> tuple[Any, list[Any], list[Any]]:
    """A model's outputs, by values of its variables; those of the variables that are not trained after it; and what layers add
    to the loss.

    `Layer.stateless_call` goes past the model's `__call__`, which alone tells the layers within that this is training. One
    whose `call` has no such argument is not told, as Keras does not.
    """
    told = {"training": training} if "training" in inspect.signature(model.call).parameters else {}
    mapping = list(zip([*model.trainable_variables, *model.non_trainable_variables], [*trained, *others], strict=True))
    with keras.StatelessScope(mapping, collect_losses=True, initialize_variables=False) as scope:
        outputs, added = model(inputs, **told), list(model.losses)
    known = {id(variable) for variable, _ in mapping} | {id(variable) for variable in model.metrics_variables}
    if not known.issuperset(scope.state_mapping):
        raise JobError(
            f"the model {model.name} changes a variable that is none of its own, and what it changes would be lost: random "
            "numbers, for example, need a keras.random.SeedGenerator that is an attribute of the layer"
        )
    return outputs, [scope.get_current_value(variable) for variable in model.non_trainable_variables], added


def _shapes(specs: Any) -> str:
    """`float32 [?, 784]`, or several of these."""
    found = [
        f"{one.dtype.name} [{', '.join('?' if size is None else str(size) for size in one.shape)}]"
        for one in tf.nest.flatten(specs)
    ]
    return " and ".join(found)


def _specs(model: str, variables: Sequence[Any], prefix: str = "") -> list[Spec]:
    """Variables by their paths, below the model's; of one path that several have, the later are numbered."""
    names = _distinct([prefix + variable.path.removeprefix(f"{model}/") for variable in variables])
    return [
        Spec(name, tuple(variable.shape), keras.backend.standardize_dtype(variable.dtype), variable)
        for name, variable in zip(names, variables, strict=True)
    ]


def _distinct(names: Sequence[str]) -> list[str]:
    """Names, of which those that come again are numbered."""
    found: dict[str, None] = {}
    for name in names:
        numbered = (f"{name}_{number}" if number else name for number in range(len(names) + 1))
        found[next(one for one in numbered if one not in found)] = None
    return list(found)


def _compiled(model: Any) -> Mapping[str, Any]:
    """What a model was compiled with, by the names of `keras.Model.compile`; nothing where it was not."""
    if not model.compiled:
        return {}
    weights, metrics, weighted = private.compiled(model)
    found = {"loss": model.loss, "optimizer": model.optimizer, "loss_weights": weights}
    return {**found, "metrics": metrics, "weighted_metrics": weighted}


def _made_here(metrics: Metrics) -> Any:
    """Metrics as they are, or as a function without arguments makes them; one of targets and outputs is a metric itself."""
    if not callable(metrics) or isinstance(metrics, keras.metrics.Metric) or inspect.signature(metrics).parameters:
        return metrics
    return metrics()


def _per_output(given: Any, resolve: Callable[[Any], Any]) -> dict[Any, Any]:
    """By a model's outputs, None being the only one."""
    if isinstance(given, Mapping):
        return {key: resolve(one) for key, one in given.items()}
    if isinstance(given, list | tuple):
        return {key: resolve(one) for key, one in enumerate(given)}
    return {None: resolve(given)}


def _loss_weights(given: Any, losses: Mapping[Any, Any], model: str) -> dict[Any, Any]:
    """Numbers by output, as the losses are; JobError for anything else."""
    found = _per_output(given, lambda weight: weight)
    if len(found) == 1 and list(losses) == [None]:
        found = {None: next(iter(found.values()))}
    if given is not None and not (set(found) <= set(losses) and all(isinstance(one, int | float) for one in found.values())):
        raise JobError(f"the model {model} is compiled with loss_weights={given!r}; valid are numbers, by output as its losses")
    return found


def _at(key: Any, targets: Any, outputs: Any) -> tuple[Any, Any]:
    """Those of one of a model's outputs, None being the only one."""
    return (targets, outputs) if key is None else (targets[key], outputs[key])


class _Reduced(keras.losses.Loss):  # type: ignore[misc]
    """The mean of what a function made of each sample, by Keras's own rules for weights and for what the model masks."""

    def call(self, losses: Any, _outputs: Any) -> Any:
        return losses


def _loss_function(given: Any) -> Callable[[Any, Any, Any], Any]:
    """A function of targets, outputs and the samples' weights or None to the mean loss, float32 []."""
    try:
        found = keras.losses.get(given)
    except ValueError as error:
        raise JobError(f"the loss cannot be had: {one_line(error)}") from None
    if isinstance(found, keras.losses.Loss):
        if found.reduction == "sum":
            raise JobError(f"the loss {found.name} is a sum over the batch; valid is the mean, without reduction='sum'")
        return lambda targets, outputs, weights: _mean(found(*_alike(found, targets, outputs), sample_weight=weights))
    reduced = _Reduced(name="loss", dtype=_FLOAT)
    return lambda targets, outputs, weights: _mean(
        reduced(found(*_alike(found, *_aligned(targets, _whole(outputs)))), outputs, sample_weight=weights)
    )


def _mean(losses: Any) -> Any:
    return tf.reduce_mean(tf.cast(losses, tf.float32))


def _whole(outputs: Any) -> Any:
    """Outputs in float32 where a layer gives them in half precision: a square of theirs may be larger than that can hold."""
    return tf.nest.map_structure(lambda one: tf.cast(one, tf.float32) if one.dtype in _HALVES else one, outputs)


def _alike(loss: Any, targets: Any, outputs: Any) -> tuple[Any, Any]:
    """Targets and outputs as they are; ValueError where a loss that compares them place by place would spread the one over the
    other, as NumPy does: Keras's `fit` says nothing then, and learns something else.
    """
    function, (ours, theirs) = getattr(loss, "fn", loss), _aligned(targets, outputs)
    if function in _BY_PLACE and tf.is_tensor(ours) and not ours.shape.is_compatible_with(theirs.shape):
        raise ValueError(f"{function.__name__} compares place by place, so both must be of one shape")
    return targets, outputs


def _aligned(targets: Any, outputs: Any) -> tuple[Any, Any]:
    """Targets [N] and outputs [N, 1] as being of one shape, by the rule of `keras.Model.compile` for functions."""
    if not (tf.is_tensor(targets) and tf.is_tensor(outputs)):
        return targets, outputs
    more = outputs.shape.rank - targets.shape.rank
    if more == 1 and outputs.shape[-1] == 1:
        return (targets[:, None], outputs) if targets.shape.rank == 1 else (targets, tf.squeeze(outputs, -1))
    if more == -1 and targets.shape[-1] == 1:
        return (targets, outputs[:, None]) if outputs.shape.rank == 1 else (tf.squeeze(targets, -1), outputs)
    return targets, outputs


def _times(weight: Any, function: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    if weight is None:
        return function
    return lambda targets, outputs, weights: function(targets, outputs, weights) * weight


def _metric(given: Any, targets: Any, outputs: Any) -> Any:
    """A metric; `accuracy` is of the kind that targets and outputs ask for, by the rule of `keras.Model.compile`.

    One that is given by a name goes by that.
    """
    if given in ("accuracy", "acc"):
        last = outputs.shape[-1]
        sparse = targets.shape.rank < outputs.shape.rank or (targets.shape[-1] == 1 and last != 1)
        kind = "Binary" if last == 1 else "SparseCategorical" if sparse else "Categorical"
        return getattr(keras.metrics, f"{kind}Accuracy")(name=given)
    found = keras.metrics.get(given)
    if not isinstance(found, keras.metrics.Metric):
        found = keras.metrics.MeanMetricWrapper(found, name=found.__name__)
    if isinstance(given, str):
        found.name = given
    if not found.variables or not private.built(found):  # some make theirs when they first see shapes
        zeros = [tf.zeros([size or 1 for size in one.shape], one.dtype) for one in (targets, outputs)]
        found.update_state(*zeros)
    found.reset_state()
    return found
