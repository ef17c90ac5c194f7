"""Call a Keras model, with its loss, metrics and optimizer, as pure functions of tensors (docs/dev/training.md).

Source: Keras's stateless API, `keras.StatelessScope`, `Optimizer.stateless_apply`; `train_step` of its TensorFlow trainer.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import math
import os
import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from scaletier import private
from scaletier.job import DataError, Job, JobError, Metrics, kind_of, wants_argument
from scaletier.scopes import RecordingScope, ValueScope, get_value
from scaletier.tensorflow_setup import import_tensorflow, one_line
from scaletier.variables import FLOAT32, Handle, Values, VariableSpec, VariableWriter, make_variable_specs

tf = import_tensorflow()
import keras  # noqa: E402 - after TensorFlow, whose log messages are held back

# The files of this library, and of Python's and installed ones.
_PACKAGE, _LIBRARY_FILE = f"{Path(__file__).parent}/", re.compile(r"/lib/python3[.\d]*/|^<frozen ")
# Losses of Keras that compare targets and outputs elementwise.
_BY_PLACE = [
    getattr(keras.losses, name)
    for name in (
        *("mean_squared_error", "mean_absolute_error", "mean_absolute_percentage_error", "mean_squared_logarithmic_error"),
        *("log_cosh", "huber", "hinge", "squared_hinge", "categorical_hinge", "poisson", "kl_divergence", "cosine_similarity"),
    )
]


class Batch(NamedTuple):
    """A dataset's element for one step; `weights` are those of the samples, or None."""

    inputs: Any
    targets: Any = None
    weights: Any = None

    @classmethod
    def of(cls, element: Any) -> Batch:
        parts = element if isinstance(element, tuple) else (element,)
        if 1 <= len(parts) <= 3:  # the spec of an input that is None is no spec of a tensor
            return cls(*parts).map(lambda one: one if hasattr(one, "shape") else None)
        valid = "inputs, (inputs, targets) and (inputs, targets, sample_weight)"
        raise JobError(f"the data's elements are a tuple of {len(parts)}; valid are {valid}")

    def map(self, function: Callable[[Any], Any]) -> Batch:
        return Batch(*(None if part is None else tf.nest.map_structure(function, part) for part in self))


class GlobalStepSchedule(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """The learning rate at the job's global step; `rates` are those for one device, for two and so on, or one for all.

    A schedule gets the optimizer's variable `iterations`, as in Keras, with the global step as its value. If all rates are
    numbers, `variable` is the last one; once a callback sets it, the others change in proportion.
    """

    def __init__(self, rates: Sequence[Any], iterations: Any) -> None:
        self._rates = [np.asarray(rate) if isinstance(rate, keras.Variable) else rate for rate in rates]
        self._iterations = iterations
        self._now: Any = None
        self.variable: Any = None
        if all(isinstance(rate, keras.Variable) for rate in rates):
            self.variable, last = rates[-1], self._rates[-1]
            self._rates = [rate / last if last else np.ones_like(rate) for rate in self._rates]

    def set_step(self, step: Any, live_devices: Any) -> None:
        """Set the rate for a global step and the number of devices of all hosts that train now."""
        with ValueScope([(self._iterations, step)], initialize_variables=False):
            values = tf.stack([tf.cast(_rate(rate, self._iterations), tf.float32) for rate in self._rates])
        self._now = values[0 if len(self._rates) == 1 else tf.minimum(live_devices, len(self._rates)) - 1]

    def __call__(self, step: Any) -> Any:
        rate = _rate(self._rates[-1], step) if self._now is None else self._now
        return rate if self.variable is None else self.variable * rate


class FunctionalModel:
    """A model's step, evaluation and prediction by Keras's own methods, and its variables.

    In this package `network` is always a FunctionalModel; `model` is one of Keras.

    Attributes:
        model: the Keras model.
        metric_shapes: the shapes of the metrics, by name; `test_shapes` are those of an evaluation.
        shared: the variables that replicas have in common, with several replicas float32: trained weights first, then those
            that a step changes, such as moving means.
        local: the variables that each replica has for itself: others that a step changes (states of random generators and of
            layers, counts), then `constants`, which no step changes, and `slots`, the optimizer's.
        learning_rates: the slots that are a constant rate, which the job sets each time it starts.
        iterations: the slots that count an optimizer's steps.
        ema_slots: the slots that are moving averages of weights, by name, with the weight's place in `shared`.
        ema_decay: their decay for each step of a replica.
        compiles: True if XLA compiles a step on GPUs.
        replicas: the number of devices, on all hosts, that each train the whole model.
    """

    def __init__(
        self,
        job: Job,
        element: Any,
        seed: int,
        replicas: int = 1,
        place: Callable[[Any], Any] | None = None,
        eval_element: Any = None,
    ) -> None:
        """Take the element_spec of a job's data, and of its eval_data if there is any.

        `seed` is for the initial values of a model that a function makes, `place` a context in which the optimizer updates a
        variable. Raises JobError if model, data, loss, metrics and optimizer do not go together.
        """
        self.replicas, self._seed, batch_spec = replicas, seed, Batch.of(element)
        self._scope = ValueScope(initialize_variables=False)
        if job.model is None:
            raise JobError("the job has no model: pass Job(model=…), a Keras 3 model or a function that makes one")
        self.model = self._make_model(job.model)
        if not isinstance(self.model, keras.Model):
            raise JobError(f"the model is {kind_of(self.model)}; valid is a Keras {keras.__version__.partition('.')[0]} model")
        _require_keras_steps(self.model)
        compiled = private.compile_settings(self.model)
        self._in_graph = " in a graph, and run_eagerly=True has no effect" if compiled.get("run_eagerly") else ""
        self._compile(job, compiled, self._optimizer_of(job, compiled, replicas))
        scope, self.metric_shapes, weights = self._check(batch_spec, "", True)  # which also creates missing variables
        self.test_shapes = self.metric_shapes
        generator = keras.random.SeedGenerator
        for weight in self.model.variables:
            if private.stored(weight) is None and isinstance(private.initializer_seed(weight), generator):
                path = weight.path.removeprefix(f"{self.model.name}/")
                line = f"the weight {path} is invalid: its initializer draws from a SeedGenerator."
                raise JobError(f"{line} Valid: a seed that is a number")
        for one in self.model.optimizer.variables:  # such as a rate that the model's function has set
            if (assigned := self._scope.get_current_value(one)) is not None:
                one.assign(assigned)
        # A copy, so that the model is saved with the optimizer that its user knows.
        optimizer, self._originals = private.copy_optimizer(self.model.optimizer)
        private.keep_weights_without_decay(optimizer, weights)
        self._writer: VariableWriter | None = None
        self._optimizer = private.make_stateless(optimizer, place, self._update)
        self._optimizer.build(weights)
        self._inner_optimizers = private.inner_optimizers(self._optimizer)
        with _as_job_error(f"the optimizer {type(optimizer).__name__} is invalid"):
            self._schedules = self._own_schedules(job, compiled)
        # Values that exist already are kept as arrays: TensorFlow forgets them when this process joins a cluster.
        variables = [one for one in (*self._optimizer.variables, *self.model.variables) if private.stored(one) is not None]
        self._initial_values = {id(one): np.asarray(one) for one in variables if self._scope.get_current_value(one) is None}
        if job.optimizer is None and (trained := compiled.get("optimizer")) is not None and trained.built:
            self._continue_from(trained)
        self._iterations_before = int(self._initial_values[id(private.iterations_of(self._optimizer))])
        self._group(scope, weights)
        # For XLA each shape is another program, which takes it seconds to compile.
        self.compiles = bool(self.model.jit_compile) and all(map(_is_of_one_shape, tf.nest.flatten(tuple(batch_spec))))
        if eval_element is not None:  # some layers compute differently in an evaluation
            self._check(Batch.of(eval_element), " of eval_data", False)
        private.forget_uninitialized()

    @functools.cached_property
    def vocabulary(self) -> str:
        """A hash of the vocabularies of layers, which are no variables; empty if there are none."""
        words = [layer.get_vocabulary() for layer in private.layers(self.model) if hasattr(layer, "get_vocabulary")]
        return hashlib.sha256(repr(words).encode()).hexdigest() if words else ""

    def _continue_from(self, optimizer: Any) -> None:
        """Begin with the variables of an optimizer that was trained before, as Keras does."""
        both = self._optimizer.variables, optimizer.variables
        shapes, others = ([tuple(one.shape) for one in variables] for variables in both)
        if shapes != others:
            line = f"the optimizer {type(optimizer).__name__} is invalid: it was built for other weights than the model trains."
            raise JobError(f"{line} Valid: compile the model again")
        values = (self._scope.get_current_value(one) for one in optimizer.variables)
        arrays = [np.asarray(one if value is None else value) for one, value in zip(optimizer.variables, values, strict=True)]
        self._initial_values |= {id(one): value for one, value in zip(self._optimizer.variables, arrays, strict=True)}

    def require_transferable(self) -> None:
        """Raise JobError if the model has parts that cannot be sent to another host."""
        for one in private.resources(self.model)[:1]:
            what = "uses a loaded SavedModel" if private.is_loaded(one) else "looks words up in a table"
            line = f"the model {self.model.name} {what}, which no other host can be given"
            raise JobError(f"{line}: do that in the job's data, or train by sync, or on one host")

    def _require_float32(self, where: str) -> None:
        if wrong := next((spec for spec in self.trained if spec.dtype != FLOAT32), None):
            line = f"the variable {wrong.name} is invalid {where}: it is {wrong.dtype}. Valid: float32, even if layers compute"
            raise JobError(f"{line} in another type; or one replica without model-parallel")

    def require_splittable(self) -> None:
        self._require_float32("with --strategy model-parallel")
        for name in ("compute_loss", "compute_metrics"):
            if _overrides(self.model, name):
                line = f"the model {self.model.name} is invalid with --strategy model-parallel: it overrides {name}."
                raise JobError(f"{line} Valid: --strategy async or sync, or a model without it")
        for one in self._foreign[:1]:
            line = f"the model {self.model.name} is invalid with --strategy model-parallel:"
            if id(one) in map(id, private.metric_variables(self.model)):
                line = f"{line} a metric does not reset its variable {one.path}. Valid: a metric whose reset_state resets all"
                raise JobError(f"{line} its variables, or --strategy async or sync")
            line = f"{line} a step uses the variable {one.path}, which belongs to no layer. Valid: one that is an attribute of"
            raise JobError(f"{line} its layer, as a SeedGenerator, or --strategy async or sync")
        for loss in private.losses(self.model):
            if loss.reduction in ("sum", "none", None, "mean_with_sample_weight"):
                line = f"the loss {loss.name} is invalid with --strategy model-parallel: its reduction is {loss.reduction}."
                raise JobError(f"{line} Valid: a mean over the batch, or --strategy async or sync")
        for part in self._inner_optimizers:
            settings = part.gradient_accumulation_steps, part.use_ema and part.ema_overwrite_frequency
            for name, value in zip(("gradient_accumulation_steps", "ema_overwrite_frequency"), settings, strict=True):
                if value:  # by a branch, whose results are on one host
                    line = f"the optimizer has {name}={value}, with which --strategy model-parallel would send all weights to"
                    raise JobError(f"{line} one host in each step. Valid: larger batches, or --strategy async or sync")

    def _make_model(self, model: Any) -> Any:
        """Return a model, or what a function makes; its variables have values only if the function needs them."""
        if not callable(model) or isinstance(model, keras.Model | keras.Layer):
            return model
        if not inspect.isclass(model) and wants_argument(model):
            raise JobError("the job's model is a function of an argument; valid is one of nothing, which makes a Keras model")
        with _with_place("model_fn"):
            for scope in (self._scope, None):
                private.clear_session()
                keras.utils.set_random_seed(self._seed)
                if scope is None:
                    return model()
                try:
                    with scope, private.optimizers_in_stateless_scope():
                        return model()
                except (ValueError, AttributeError, TypeError):
                    self._scope = ValueScope(initialize_variables=False)
        return None

    def _optimizer_of(self, job: Job, compiled: Mapping[str, Any], replicas: int) -> Any:
        """Return the job's optimizer for N replicas, or the compiled model's, not built."""
        configured = job.optimizer or compiled.get("optimizer") or "rmsprop"
        with _as_job_error("the optimizer is invalid", (ValueError,)):
            if callable(configured):
                configured = configured(replicas) if wants_argument(configured) else configured()
            optimizer = keras.optimizers.get(configured)
        if not isinstance(optimizer, keras.optimizers.Optimizer):
            raise JobError(f"the optimizer is {kind_of(optimizer)}; valid is one of keras.optimizers, its name, or a function")
        parts = private.inner_optimizers(optimizer)
        for part in (optimizer, *parts):
            if type(part).apply_gradients is not keras.optimizers.Optimizer.apply_gradients:
                line = f"the optimizer {type(part).__name__} is invalid: it overrides apply_gradients, which scaletier does not"
                raise JobError(f"{line} call. Valid: an optimizer that overrides update_step instead")
        if free := next((part for part in parts if type(part).__name__ == "ScheduleFreeAdamW"), None):
            line = f"the optimizer {type(free).__name__} is invalid: Keras computes it in another way with TensorFlow than"
            raise JobError(f"{line} elsewhere. Valid: another optimizer, such as AdamW")
        if not optimizer.built:
            return optimizer
        with _as_job_error(f"the optimizer {type(optimizer).__name__} is invalid: it is built already, and cannot be copied"):
            return private.unbuilt_copy(optimizer)

    def _compile(self, job: Job, compiled: Mapping[str, Any], optimizer: Any) -> None:
        self._compile_settings = {
            "loss": compiled.get("loss") if job.loss is None else dict(job.loss) if isinstance(job.loss, Mapping) else job.loss,
            "loss_weights": compiled.get("loss_weights") if job.loss is None else None,
            "metrics": _metrics_of(job.metrics) or compiled.get("metrics"),
            "weighted_metrics": _metrics_of(job.weighted_metrics) or compiled.get("weighted_metrics"),
        }
        more = {name: compiled[name] for name in ("jit_compile", "run_eagerly", "steps_per_execution") if name in compiled}
        more["auto_scale_loss"] = not compiled or isinstance(compiled["optimizer"], keras.optimizers.LossScaleOptimizer)
        with _as_job_error(f"the model {self.model.name} cannot be compiled", (ValueError, TypeError)):
            # Not the class's own `compile`, which may take other arguments.
            keras.Model.compile(self.model, optimizer, **self._compile_settings, **more)

    def _own_schedules(self, job: Job, compiled: Mapping[str, Any]) -> list[GlobalStepSchedule]:
        """Replace learning rates that depend on the step, or on the number of replicas, by `GlobalStepSchedule`."""
        schedules = []
        counts = range(1, self.replicas) if callable(job.optimizer) and wants_argument(job.optimizer) else ()
        fewer = [private.inner_optimizers(self._optimizer_of(job, compiled, count)) for count in counts]
        for at, part in enumerate(self._inner_optimizers):
            if self.replicas > 1 and (frequency := part.use_ema and part.ema_overwrite_frequency):
                line = f"the optimizer has ema_overwrite_frequency={frequency}: several replicas train, and average what they"
                raise JobError(f"{line} share. Valid: use_ema=True alone, whose average is exported, or one process")
            rates = [private.rate_of(parts[at]) for parts in (*fewer, self._inner_optimizers)]
            # With one replica the optimizer's own steps count, as in Keras, without those that it skips.
            if fewer or (self.replicas > 1 and isinstance(rates[-1], keras.optimizers.schedules.LearningRateSchedule)):
                part.learning_rate = scheduled = GlobalStepSchedule(rates, private.iterations_of(part))
                schedules.append(scheduled)
        return schedules

    def _group(self, scope: RecordingScope, trained: Sequence[Any]) -> None:
        """Divide the variables by what a step or an evaluation assigned in `scope`.

        Those of layers that only evaluations call are not trained, as in Keras.
        """
        by_id = {id(one): one for one in (*trained, *self.model.variables)}
        others = list(by_id.values())[len(trained) :]
        ids = {id(one) for one in (*trained, *others, *self._metric_variables)}
        # Variables that a step uses and the model does not list: states of Keras's layers, the default random generator, and
        # weights of layers that are no attribute of the model.
        optimizers = {id(one) for one in self.model.optimizer.variables}
        self._foreign = foreign = [one for key, one in scope.used.items() if key not in ids | optimizers]
        states = {id(one) for one in foreign}
        self._initial_values |= {id(one): np.asarray(one) for one in foreign if private.stored(one) is not None}
        specs = make_variable_specs(self.model.name, [*trained, *others, *foreign])
        self.trained, rest = specs[: len(trained)], specs[len(trained) :]
        if self.replicas > 1:
            self._require_float32("with several replicas")
        changed = [spec for spec in rest if id(spec.variable) in scope.assigned]
        shareable = {FLOAT32} if self.replicas > 1 else {spec.dtype for spec in changed if tf.as_dtype(spec.dtype).is_floating}
        floats = [spec for spec in changed if spec.dtype in shareable and id(spec.variable) not in states]
        self.constants = [spec for spec in rest if id(spec.variable) not in scope.assigned]
        self._changing = [spec for spec in changed if spec not in floats]
        self.shared = [*self.trained, *floats]
        self.slots = make_variable_specs("", self._optimizer.variables, "optimizer/")
        self.local = [*self._changing, *self.constants, *self.slots]
        # The job's learning rates count, whatever a checkpoint has.
        rates = {id(private.rate_of(part)) for part in self._inner_optimizers} | {id(one.variable) for one in self._schedules}
        self.learning_rates = [spec for spec in self.slots if id(spec.variable) in rates]
        counts = {id(private.iterations_of(part)) for part in (self._optimizer, *self._inner_optimizers)}
        self.iterations = [spec for spec in self.slots if id(spec.variable) in counts]
        averages = {id(one) for part in self._inner_optimizers for one in private.ema_variables(part)}
        weights = ((spec, self.weight_of(spec)) for spec in self.slots if id(spec.variable) in averages)
        self.ema_slots = {spec.name: self.trained.index(weight) for spec, weight in weights if weight}
        self.ema_decay = next((float(part.ema_momentum) for part in self._inner_optimizers if part.use_ema), 0.0)
        for part in self._inner_optimizers if self.replicas > 1 else ():
            part.use_ema = False  # the average is of what the replicas share: see `Exchange.update_ema`
        self._known = ids | {id(one) for one in (*foreign, *self._optimizer.variables)}

    def initial(self, spec: VariableSpec) -> npt.NDArray[Any]:
        """Return a variable's initial value; the same each time, for one seed."""
        if (stored := self._initial_values.get(id(spec.variable))) is not None:
            return stored
        assigned = self._scope.get_current_value(spec.variable)
        value = spec.variable.value if assigned is None else assigned
        return np.asarray(_to_array(value), spec.dtype)

    def set_constants(self, values: Sequence[Any]) -> None:
        """Set the initial values of the variables that no step changes; layers compute from them again."""
        mapping = [(spec.variable, np.asarray(value)) for spec, value in zip(self.constants, values, strict=True)]
        self._initial_values |= {id(variable): value for variable, value in mapping}
        with RecordingScope(mapping):
            for layer in private.layers(self.model):
                if layer.variables and hasattr(layer, "finalize_state"):
                    layer.finalize_state()

    def attach(self, shared: Sequence[Any], local: Sequence[Any]) -> None:
        """Have the Keras model and its optimizer hold these tf.Variables, in the order of `shared` and `local`."""
        count, optimizer = len(local) - len(self.slots), self.model.optimizer
        self._initial_values |= {id(spec.variable): self.initial(spec) for spec in self.local[:count]}
        variables = [spec.variable for spec in (*self.shared, *self.local[:count])]
        for variable, value in zip(variables, (*shared, *local[:count]), strict=True):
            private.attach(variable, value)
        for variable, value in zip(self._metric_variables, self._initial_metrics, strict=True):
            private.attach(variable, tf.Variable(value))
        optimizer.build([spec.variable for spec in self.trained])
        for variable, value in zip(optimizer.variables, local[count:], strict=True):
            private.attach(variable, value)

    def weight_of(self, spec: VariableSpec) -> VariableSpec | None:
        """Return the trained weight that an optimizer's variable belongs to; None for one of all, such as the iterations."""
        weights = (part.weights_by_slot.get(id(spec.variable)) for part in self._inner_optimizers)
        weight = next((one for one in weights if one is not None), None)
        return next((one for one in self.trained if one.variable is weight), None)

    def predict(self, shared: Sequence[Any], local: Sequence[Any], inputs: Any) -> Any:
        """Return the model's outputs for a batch of inputs, and keep what that changes in these tf.Variables, as Keras does.

        The optimizer's part of `local` may be left out.
        """
        with self._enter(shared, local, self.initial_metrics()) as scope:  # a layer may update metrics
            outputs = self._call(inputs, False)
        for spec, variable in zip((*self.shared, *self.local), (*shared, *local), strict=False):
            if id(spec.variable) in scope.assigned:
                variable.assign(scope.get_current_value(spec.variable))
        return outputs

    def initial_metrics(self) -> list[Any]:
        return [tf.constant(value) for value in self._initial_metrics]

    @property
    def metrics(self) -> list[Any]:
        """The tf.Variables of the model's metrics, once `attach` was called."""
        return list(map(private.stored, self._metric_variables))

    def changing(self, shared: Values, local: Values) -> list[Any]:
        """Return what steps change of the `shared` and `local` variables, besides the weights and the optimizer's."""
        return [*shared[len(self.trained) :], *local[: len(self._changing)]]

    def initial_test_state(self, shared: Values, local: Values) -> list[Any]:
        """Return the state before an evaluation's first batch: the `changing` variables, and the metrics'."""
        return [*map(tf.convert_to_tensor, self.changing(shared, local)), *self.initial_metrics()]

    def test(self, shared: Values, local: Values, state: Values, batch: Batch) -> tuple[Any, Any, list[Any], Any]:
        """Evaluate a batch.

        Returns the mean loss of samples since the evaluation began, the outputs, the state after it, and the numbers of the
        metrics in the order of `test_shapes`, float32 [M].
        """
        first, count = len(self.trained), len(self._changing)
        ends = len(shared) - first, len(shared) - first + count
        changed = [*shared[:first], *state[: ends[0]]], [*state[ends[0] : ends[1]], *local[count:]]
        scope = self._enter(*changed, state[ends[1] :])
        with scope:
            outputs = self._call(batch.inputs, False)
            mean_loss = private.track_loss(self.model, self._compute_loss(batch, outputs, False), batch.inputs)
            results = self._compute_metrics(batch, outputs)
        after = [*scope.values(self.changing(self.shared, self.local)), *self._metrics_after(scope)]
        mean_loss, self.test_shapes = results.pop("loss", mean_loss), _shapes_of(results)
        return mean_loss, outputs, after, _stack(results.values())

    def step(
        self,
        shared: Sequence[Handle],
        local: Sequence[Handle],
        metrics: Values,
        batch: Batch,
        global_step: Any,
        live_devices: Any,
    ) -> tuple[list[Any], Any, Any]:
        """Train variables in place on a batch at a global step, int64, as one of `live_devices` of all hosts.

        Returns:
            The metrics' variables after it; the batch's loss, computed once all variables are written; the mean loss of samples
            and the numbers of the metrics in the order of `metric_shapes`, since the metrics were reset, float32 [1 + M].
        """
        writer = VariableWriter([*zip(self.shared, shared, strict=True), *zip(self.local, local, strict=True)])
        values = writer.read(self.shared)
        scope = self._enter(values, writer.read(self.local), metrics)
        with tf.GradientTape(watch_accessed_variables=False) as tape, scope, scope.watched(self.trained, tape) as versions:
            outputs = self._call(batch.inputs, True)
            loss = self._compute_loss(batch, outputs, True)
            scaled = self._optimizer.scale_loss(loss)
            mean_loss = private.track_loss(self.model, loss, batch.inputs)
        # Current values: a layer may assign its own weights, for example to normalize them.
        trained = scope.values(self.trained)
        # Those of an Embedding are IndexedSlices, with an entry for each occurrence of a word in the batch, as in Keras.
        with scope:  # tf.recompute_grad calls layers again
            gradients = [_sum(each) for each in tape.gradient(scaled, versions)]
        if all(gradient is None for gradient in gradients):
            line = f"the loss of the model {self.model.name} does not depend on any of its weights: nothing would train"
            raise JobError(line)
        with tf.control_dependencies([one for one in tf.nest.flatten(gradients, expand_composites=True) if one is not None]):
            computed = tf.no_op()
        with tf.control_dependencies([computed]):
            moved, slots = self._apply(writer, trained, gradients, global_step, live_devices)
            for spec, value in zip((*self.trained, *self.slots), (*moved, *slots), strict=True):
                scope.set(spec.variable, value)
                if (original := self._originals.get(id(spec.variable))) is not None:
                    scope.set(original, value)
            with scope:
                results = self._compute_metrics(batch, outputs)
            if unknown := set(scope.assigned) - self._known:
                line = (
                    f"the model {self.model.name} is invalid: a step changes the variable {scope.assigned[unknown.pop()].path},"
                )
                raise JobError(f"{line} which the steps before did not. Valid: a model whose steps change the same variables")
            for spec in (*self.shared, *self.local):
                writer.write(spec.variable, scope.get_current_value(spec.variable))
        with tf.control_dependencies(writer.written):
            mean = _mean(loss)
        return self._metrics_after(scope), mean, _stack([results.pop("loss", mean_loss), *results.values()])

    def measure(self, state: Values, batch: Batch, outputs: Any, added: Sequence[Any] = ()) -> tuple[Any, Any, list[Any], Any]:
        """Return the batch's loss and metrics from its outputs; `added` are losses of layers.

        Returns:
            The loss, with the added ones; its mean over samples since `state` was initial; the metrics' state after the batch;
            and the numbers of the metrics in the order of `metric_shapes`, float32 [M].
        """
        scope = self._enter((), (), state)
        with scope:
            compiled = private.compiled_loss(self.model)
            loss = _mean(compiled(batch.targets, outputs, batch.weights)) if compiled else tf.constant(0.0)
            loss = tf.add_n([loss, *added])
            mean_loss = private.track_loss(self.model, loss, batch.inputs)
            results = self._compute_metrics(batch, outputs)
        return loss, results.pop("loss", mean_loss), self._metrics_after(scope), _stack(results.values())

    def scale_loss(self, loss: Any, slots: Values) -> Any:
        """Return the loss to differentiate, which a LossScaleOptimizer scales."""
        with RecordingScope(list(zip((spec.variable for spec in self.slots), slots, strict=True))):
            return self._optimizer.scale_loss(loss)

    def apply(self, trained: Sequence[Handle], slots: Sequence[Handle], gradients: Values, global_step: Any) -> list[Any]:
        """Update weights and optimizer variables in place along gradients, at a global step; return the operations."""
        pairs = list(zip((*self.trained, *self.slots), (*trained, *slots), strict=True))
        writer = VariableWriter(pairs)
        weights, others = self._apply(writer, writer.read(self.trained), gradients, global_step, 1)
        for (spec, _), value in zip(pairs, (*weights, *others), strict=True):
            writer.write(spec.variable, value)
        return writer.written

    def _apply(
        self, writer: VariableWriter, trained: Values, gradients: Values, global_step: Any, live_devices: Any
    ) -> tuple[list[Any], list[Any]]:
        """Return weights and optimizer variables after a step along gradients; what kernels update is already written."""
        self._writer = writer
        with (
            _as_job_error(f"the optimizer {type(self._optimizer).__name__} is invalid"),
            ValueScope(initialize_variables=False),
        ):
            for schedule in self._schedules:
                schedule.set_step(global_step + self._iterations_before, live_devices)
            moved, slots = self._optimizer.stateless_apply(writer.read(self.slots), list(gradients), list(trained))
        return list(moved), list(slots)

    def _update(self, *arguments: Any) -> bool:
        return self._writer is not None and self._writer.update(*arguments)

    def min_memory_bytes(self, on_gpu: bool) -> int:
        """Return the minimum of bytes to train: all variables once on a GPU; else twice, plus the gradients."""
        everything = sum(spec.bytes for spec in (*self.shared, *self.local))
        return everything if on_gpu else 2 * everything + sum(spec.bytes for spec in self.trained)

    def ema_warning(self, max_steps: int) -> str | None:
        """Return a warning if averages of weights span more steps than each replica takes; else None.

        With one replica the averages would be mostly of its first steps. With several replicas, whose decay is low at first
        (see `ema_share`), they would be mostly of the last tenth.
        """
        momentum, part = self.ema_decay, "first ones" if self.replicas == 1 else "last tenth"
        steps = max(max_steps // self.replicas, 1)
        if (1.0 - momentum) * steps >= 1.0:
            return None
        line = f"ema_momentum={momentum:g} averages weights over {1.0 / max(1.0 - momentum, 1e-9):,.0f} steps, and each replica"
        return f"{line} takes {steps:,}: the averages are mostly of its {part}. Valid: at most {1.0 - 1.0 / steps:.4g}"

    def ema_share(self, steps: Any, global_step: Any) -> Any:
        """Return the share, float32, of the difference by which averages move to the weights after steps at a global step.

        The share is large at first. Source: tf.train.ExponentialMovingAverage, whose decay is at most (1 + n) / (10 + n).
        """
        each, taken = (tf.cast(one, tf.float32) / self.replicas for one in (steps, global_step))
        return tf.where(each > 0.0, 1.0 - tf.minimum(self.ema_decay**each, taken / (taken + 9.0)), 0.0)

    def ema_pairs(self, shared: Sequence[Any], local: Sequence[Any]) -> list[tuple[Any, Any]]:
        """Return each average of `local` with its weight of `shared`."""
        places = ((self.ema_slots.get(spec.name), value) for spec, value in zip(self.local, local, strict=True))
        return [(value, shared[at]) for at, value in places if at is not None]

    def _enter(self, shared: Values, local: Values, metrics: Values = ()) -> RecordingScope:
        """Return a scope in which variables have these values; of `local` and of the metrics the last may be left out."""
        specs = [*self.shared[: len(shared)], *self.local[: len(local)]]
        pairs = list(zip((spec.variable for spec in specs), (*shared, *local), strict=True))
        # Those of the model's own optimizer, such as its iterations, which a model may read.
        slots = zip(self.slots, local[len(self.local) - len(self.slots) :], strict=False)
        pairs += [(one, value) for spec, value in slots if (one := self._originals.get(id(spec.variable))) is not None]
        return RecordingScope([*pairs, *zip(self._metric_variables[: len(metrics)], metrics, strict=True)])

    def _metrics_after(self, scope: RecordingScope) -> list[Any]:
        return [scope.get_current_value(variable) for variable in self._metric_variables]

    def _call(self, inputs: Any, training: bool) -> Any:
        error = None
        try:
            outputs = self.model(inputs, **make_training_argument(self.model.call, training))
        except (TypeError, ValueError) as raised:
            if "is out of scope" not in str(raised):
                raise
            error = raised
        if error or private.captures_other_graph():
            line = f"the model {self.model.name} is invalid: a layer uses a tensor of another graph, such as one made in build."
            raise JobError(f"{line} Valid: tensors made in __init__, or a keras.Input before the layer") from error
        return outputs

    def _compute_loss(self, batch: Batch, outputs: Any, training: bool) -> Any:
        options = make_training_argument(self.model.compute_loss, training)
        computed = self.model.compute_loss(batch.inputs, batch.targets, outputs, batch.weights, **options)
        if computed is None:
            raise ValueError("compute_loss returns None")
        return tf.convert_to_tensor(computed)

    def _compute_metrics(self, batch: Batch, outputs: Any) -> dict[str, Any]:
        """Update the metrics; return their results by name, with `loss` if one of them has that name."""
        computed = self.model.compute_metrics(batch.inputs, batch.targets, outputs, sample_weight=batch.weights)
        if _overrides(self.model, "compute_metrics") and set(found := self.model.get_metrics_result()) == set(computed):
            computed = found  # as `fit` of Keras reports
        if several := next((name for name, value in computed.items() if isinstance(value, Mapping)), None):
            raise ValueError(f"the result of the metric {several} is invalid: it is a dict. Valid: a number or an array")
        return {name: tf.convert_to_tensor(get_value(value)) for name, value in computed.items()}

    def _check(
        self, batch_spec: Batch, of: str, training: bool
    ) -> tuple[RecordingScope, dict[str, tuple[int, ...]], list[Any]]:
        """Trace a step on the data `of` a name; return its scope, the metrics' shapes, and the weights that it trains."""
        model, traced, wrong = self.model, list[Any](), f"the model {self.model.name} is invalid:"
        variables = list({id(one): one for one in model.variables}.values())

        def check(values: Any, batch: Batch) -> None:
            with RecordingScope(list(zip(variables, values, strict=True))) as scope, self._outside_of_loops(scope):
                with _as_job_error(
                    f"the model {model.name} does not take inputs{of} of {_shapes(batch_spec.inputs)}{self._in_graph}"
                ):
                    outputs = self._call(batch.inputs, training)
                for one in model.trainable_variables:  # what the call has made has no value, which a regularizer needs
                    if id(one) not in scope.state_mapping:
                        scope.set(one, tf.zeros(one.shape, one.dtype))
                self._require_outputs(outputs, batch)
                if batch.targets is None and private.compiled_loss(model):
                    line = f"the job's {of.removeprefix(' of ') or 'data'} has no targets; valid are elements (inputs, targets)"
                    raise JobError(line)
                shapes = f"the model gives {_shapes(outputs)}, the targets{of} are {_shapes(batch.targets)}"
                with _as_job_error(f"the loss does not fit: {shapes}"):
                    private.track_loss(model, self._compute_loss(batch, outputs, training), batch.inputs)
                    if not model.trainable_variables:
                        raise JobError(f"the model {model.name} has no variable to train")
                    with private.checked_losses(model, _compare):
                        self._compute_loss(batch, outputs, training)
                with _as_job_error(f"the metrics do not fit: {shapes}"):
                    results = self._compute_metrics(batch, outputs)
                hidden = [one.path for one in model.trainable_variables if training and scope.hides(one)]
            if hidden:
                line = f"{wrong} tf.custom_gradient, tf.recompute_grad or keras.remat gives no gradient to {', '.join(hidden)}."
                raise JobError(f"{line} Valid: weights that are arguments of its function, or none within it")
            for name, value in results.items():
                if not value.shape.is_fully_defined() or (name == "loss" and value.shape.rank):
                    line = f"the metric {name} is invalid: its shape is {value.shape}. Valid: one number, or, unless it is the"
                    raise JobError(f"{line} loss, an array of fixed shape")
            results.pop("loss", None)
            traced.extend((scope, _shapes_of(results), model.trainable_variables))

        specs = [tf.TensorSpec(one.shape, one.dtype) for one in variables]
        with warnings.catch_warnings():  # an error says the same
            warnings.simplefilter("ignore", SyntaxWarning)
            graph = tf.function(check, autograph=False).get_concrete_function(specs, batch_spec).graph
            if training and make_training_argument(model.call, training):
                changed = set(traced[0].assigned)
                self._record_evaluation(traced[0], variables, specs, batch_spec)
                if lost := [one.path for one in traced[2] if id(one) in traced[0].assigned.keys() - changed]:
                    line = f"{wrong} an evaluation assigns the weight {lost[0]}, and a step does not: its value would not last."
                    raise JobError(f"{line} Valid: a variable with trainable=False")
        known = {id(private.stored(one)) for one in (*traced[0].used.values(), *variables)}
        if unknown := [one.name for one in graph.variables if id(one) not in known]:
            line = f"{wrong} a step uses the tf.Variable {unknown[0]}, of which Keras does not know."
            raise JobError(f"{line} Valid: a keras.Variable(…, trainable=False)")
        used = {id(one) for one in graph.variables}
        if fixed := [one.path for one in model.trainable_variables if id(private.stored(one)) in used]:
            line = f"{wrong} a graph that it has loaded, as in a TFSMLayer, uses the weight {fixed[0]}, which would not train."
            raise JobError(f"{line} Valid: a layer with trainable=False")
        with RecordingScope(()) as reset:
            model.reset_metrics()
        # Variables that reset_metrics does not reset are like states of layers.
        self._metric_variables = [one for one in private.metric_variables(model) if id(one) in reset.assigned]
        # Their values before any batch.
        self._initial_metrics = [_to_array(reset.get_current_value(one)) for one in self._metric_variables]
        return traced[0], traced[1], traced[2]

    @contextlib.contextmanager
    def _outside_of_loops(self, scope: RecordingScope) -> Iterator[None]:
        """Raise JobError if a variable gets its value within another graph, also in place of an error that follows from it."""
        here, error = tf.compat.v1.get_default_graph(), None
        try:
            yield
        except Exception as raised:  # noqa: BLE001 - raised below
            error = raised
        for one in sorted(scope.assigned.values(), key=lambda one: not one.trainable):  # a branch may assign others
            if getattr(scope.get_current_value(one), "graph", here) is not here:
                where = "a tf.function, a branch or a loop. Valid: no @tf.function, as a step is a graph anyway, and"
                where = f"{where} assignments outside of branches and loops"
                for layer in private.layers(self.model):
                    if not getattr(layer, "unroll", True) and id(one) in map(id, layer.variables):
                        where = f"the loop of {layer.name}. Valid: unroll=True in that layer, for sequences of one length"
                raise JobError(f"the model {self.model.name} is invalid: it assigns {one.path} within {where}") from error
        if error:
            raise error

    def _record_evaluation(
        self, scope: RecordingScope, variables: Sequence[Any], specs: Sequence[Any], batch_spec: Batch
    ) -> None:
        """Add to the scope the variables that an evaluation or a prediction uses and changes, if the model can be called so."""

        def call(values: Any, batch: Batch) -> None:
            with RecordingScope(list(zip(variables, values, strict=True))) as traced:
                self._call(batch.inputs, False)
            scope.used |= traced.used
            scope.assigned |= traced.assigned

        with contextlib.suppress(Exception):
            tf.function(call, autograph=False).get_concrete_function(specs, batch_spec)

    def _require_outputs(self, outputs: Any, batch: Batch) -> None:
        """Raise JobError for losses, metrics or weights of an output that the model lacks."""
        names = list(getattr(self.model, "output_names", ()))
        names += [name for name in outputs if name not in names] if isinstance(outputs, Mapping) else []
        for what, setting in (*self._compile_settings.items(), ("sample weights", batch.weights)):
            unknown = [key for key in setting if key not in names] if names and isinstance(setting, Mapping) else []
            if unknown:
                line = f"the {what.replace('_', ' ')} {'is' if what == 'loss' else 'are'} invalid: the model {self.model.name}"
                raise JobError(f"{line} has no output {unknown[0]!r}. Valid: {', '.join(map(str, names))}")
        if isinstance(batch.weights, Mapping) and isinstance(outputs, list | tuple):
            raise JobError(
                f"the sample weights are invalid: they are by name, and the outputs of the model {self.model.name} are a list. "
                f"Valid: a tuple of weights in the order of the outputs{': ' if names else ''}{', '.join(names)}"
            )


@contextlib.contextmanager
def _as_job_error(what: str, errors: tuple[type[Exception], ...] = (Exception,)) -> Iterator[None]:
    """Raise JobError with this text for an error."""
    try:
        yield
    except JobError:
        raise
    except errors as error:
        if "No loss to compute" in str(error):
            raise JobError(
                "the job has no loss: compile the model with one, model.compile(loss=…), or pass Job(loss=…)"
            ) from None
        raise JobError(f"{what}: {one_line(error)}") from error


@contextlib.contextmanager
def _with_place(function: str) -> Iterator[None]:
    """Raise JobError, with the user's lines, for an error in a user's function."""
    try:
        yield
    except Exception as error:
        if isinstance(error, JobError | DataError) or private.is_lost_host(error):
            raise
        frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(_PACKAGE)]
        own = [one for one in frames if not _LIBRARY_FILE.search(one.filename)] or frames[:1]
        places = ", ".join(f"{min(one.filename, os.path.relpath(one.filename), key=len)}:{one.lineno}" for one in own[-3:])
        line = f"{function} failed{places and f' at {places}'}: {type(error).__name__}: {one_line(error)}"
        raise JobError(line.removesuffix(": ")) from error


def _rate(given: Any, step: Any) -> Any:
    if isinstance(given, keras.optimizers.schedules.LearningRateSchedule):
        return given(step)
    return given() if callable(given) else given


def make_training_argument(function: Callable[..., Any], training: bool) -> dict[str, bool]:
    """Return `training` as a keyword argument if the function takes it."""
    return {"training": training} if "training" in inspect.signature(function).parameters else {}


def _overrides(model: Any, name: str) -> bool:
    return getattr(getattr(model, name), "__func__", None) is not getattr(keras.Model, name)


def _require_keras_steps(model: Any) -> None:
    for name in ("train_step", "test_step", "make_train_function", "make_test_function"):
        if _overrides(model, name):
            line = f"the model {model.name} is invalid: its class {type(model).__name__} overrides {name}, which scaletier"
            raise JobError(f"{line} does not call. Valid: a model that overrides compute_loss or compute_metrics instead")


def _is_of_one_shape(spec: Any) -> bool:
    """Return True if a spec is None, or of a tensor of numbers whose shape is known except for the size of the batch."""
    return spec is None or (isinstance(spec, tf.TensorSpec) and spec.dtype != tf.string and spec.shape[1:].is_fully_defined())


def _shapes(specs: Any) -> str:
    """Return `float32 [?, 784]`, or several of these, by name if they have names; `[…]` if the rank is unknown."""

    def one(spec: Any) -> str:
        shape = tf.TensorShape(spec.shape)
        sizes = "…" if shape.rank is None else ", ".join("?" if size is None else str(size) for size in shape)
        return f"{tf.as_dtype(spec.dtype).name} [{sizes}]"

    if isinstance(specs, Mapping):
        return " and ".join(f"{name} {_shapes(part)}" for name, part in specs.items())
    return " and ".join("none" if spec is None else one(spec) for spec in tf.nest.flatten(specs))


def _metrics_of(given: Metrics) -> Any:
    """Return a job's metrics as `compile` takes them; a function without arguments makes them."""
    if callable(given) and not isinstance(given, keras.metrics.Metric) and not inspect.signature(given).parameters:
        given = given()
    if isinstance(given, Mapping):
        return dict(given)
    return list(given) if isinstance(given, list | tuple) else [given]


def _compare(function: Callable[..., Any], targets: Any, outputs: Any, **more: Any) -> Any:
    """Return a loss of Keras; ValueError if it would broadcast targets over outputs, which `fit` of Keras does."""
    if function in _BY_PLACE and not targets.shape.is_compatible_with(outputs.shape):
        raise ValueError(f"{function.__name__} compares elementwise, so both must have one shape")
    return function(targets, outputs, **more)


def _to_array(value: Any) -> npt.NDArray[Any]:
    """Return a tensor's or a variable's value; `convert_to_numpy` of Keras fails for one number in bfloat16."""
    return np.asarray(tf.convert_to_tensor(value).numpy())


def _sum(gradients: Sequence[Any]) -> Any:
    """Return the sum of the gradients that are not None; None if there is none."""
    present = [one for one in gradients if one is not None]
    return tf.add_n(present) if len(present) > 1 else next(iter(present), None)


def _mean(losses: Any) -> Any:
    return tf.reduce_mean(tf.cast(losses, tf.float32))


def _stack(values: Iterable[Any]) -> Any:
    """Return all numbers of tensors, one after another."""
    return tf.concat([tf.zeros([0]), *(tf.reshape(tf.cast(value, tf.float32), [-1]) for value in values)], 0)


def _shapes_of(results: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in results.items()}


def metrics_by_name(shapes: Mapping[str, tuple[int, ...]], numbers: Any) -> dict[str, Any]:
    """Return metrics, whose numbers follow one another: each as a float, or several numbers as an array, as in Keras."""
    *parts, _ = np.split(np.asarray(numbers, np.float32), np.cumsum([math.prod(shape) for shape in shapes.values()]))
    return {
        name: float(part[0]) if len(part) == 1 else part.reshape(shape)
        for (name, shape), part in zip(shapes.items(), parts, strict=True)
    }
