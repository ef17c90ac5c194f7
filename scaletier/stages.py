"""Divide a model into stages on several hosts, and pass a batch forward and backward through them."""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from scaletier.functional_model import Batch, FunctionalModel, make_training_argument
from scaletier.job import JobError
from scaletier.private import copy_to_device
from scaletier.scopes import RecordingScope
from scaletier.tensorflow_setup import import_tensorflow
from scaletier.variables import Values, VariableSpec

tf = import_tensorflow()
import keras  # noqa: E402 - after TensorFlow, whose log messages are held back

_REUSED_LAYER = "the model {} cannot be divided among several hosts: it calls one layer more than once"


@dataclass(frozen=True)
class LayerGroup:
    """One or more consecutive layers that must be on one device. A single tensor passes to the next group."""

    name: str
    model: Any
    trained: tuple[VariableSpec, ...]
    untrained: tuple[VariableSpec, ...]

    @property
    def specs(self) -> tuple[VariableSpec, ...]:
        return *self.trained, *self.untrained

    @property
    def size(self) -> int:
        return sum(spec.size for spec in self.specs)


@dataclass(frozen=True)
class Stage:
    """Consecutive layer groups on one device; `variables` maps names to the tf.Variables of the groups."""

    replica: str
    device: str
    groups: Sequence[LayerGroup]
    variables: dict[str, Any] = field(default_factory=dict)

    def forward(self, values: Mapping[str, Any], inputs: Any, training: bool) -> tuple[Any, dict[str, Any], list[Any]]:
        """Return the output, the new values of untrained variables by name, and the layers' losses.

        The caller must enter the stage's device.
        """
        new_values, layer_losses = dict[str, Any](), list[Any]()
        for group in self.groups:
            trained, untrained = ([values[spec.name] for spec in specs] for specs in (group.trained, group.untrained))
            with warnings.catch_warnings():  # Keras warns of masks at inner layers, which are passed on here
                warnings.filterwarnings("ignore", ".* does not support masking")
                inputs, updated, losses = call_part(group.model, trained, untrained, inputs, training)
            new_values.update(zip((spec.name for spec in group.untrained), updated, strict=True))
            layer_losses += losses
        return inputs, new_values, layer_losses


def make_layer_groups(network: FunctionalModel) -> list[LayerGroup]:
    """Divide a model into layer groups, in order. JobError if the model is subclassed, or calls one layer more than once."""
    specs = {id(spec.variable): spec for spec in (*network.shared, *network.local)}
    groups = []
    for name, model in _split(network.model):
        trained, untrained = (
            tuple(specs[id(variable)] for variable in variables)
            for variables in (model.trainable_variables, model.non_trainable_variables)
        )
        groups.append(LayerGroup(name, model, trained, untrained))
    names = [spec.name for group in groups for spec in group.specs]
    if len(names) > len(set(names)):
        raise JobError(_REUSED_LAYER.format(network.model.name))
    return groups


def _split(model: Any) -> list[tuple[str, Any]]:
    """Return the name and the Keras model of each group; the name joins the names of its layers."""
    functional = model
    if isinstance(model, keras.Sequential):  # in a functional model masks are operations, too
        with keras.StatelessScope(initialize_variables=False):
            functional = keras.Model(model.inputs[0], model.outputs[0])
    operations: Any = getattr(functional, "operations", None)
    with keras.StatelessScope(initialize_variables=False):
        calls = [type(keras.Model(functional.input, functional.output)).call, keras.Sequential.call] if operations else []
    if type(model).call not in calls:
        valid = "valid are Sequential and functional models"
        raise JobError(f"the model {model.name} cannot be divided among several hosts: it has its own call; {valid}")
    inputs = {id(tensor) for tensor in model.inputs}
    layers = [layer for layer in operations if not isinstance(layer, keras.layers.InputLayer)]
    try:
        edges = [(layer, tf.nest.flatten(layer.input), tf.nest.flatten(layer.output)) for layer in layers]
    except (ValueError, AttributeError):
        raise JobError(_REUSED_LAYER.format(model.name)) from None
    last = {id(tensor) for tensor in model.outputs}
    groups, group_input, names, alive = [], functional.input, list[str](), set(inputs)
    tensors_by_id = {id(tensor): tensor for _, _, tensors in edges for tensor in tensors}
    for at, (layer, _, outputs) in enumerate(edges):
        names.append(layer.name)
        alive |= {id(tensor) for tensor in outputs}
        needed = {id(tensor) for _, sources, _ in edges[at + 1 :] for tensor in sources} | last
        crossing, ends = alive & needed, at == len(edges) - 1
        if ends or (len(crossing) == 1 and not crossing & inputs):
            group_output = functional.output if ends else tensors_by_id[next(iter(crossing))]
            with keras.StatelessScope(initialize_variables=False):
                groups.append((" ".join(names), keras.Model(group_input, group_output)))
            group_input, names, alive = group_output, [], crossing
    return groups


def partition(sizes: Sequence[int], count: int) -> list[int]:
    """Divide groups of these sizes into at most `count` stages, the largest of which is as small as possible.

    Each stage has consecutive groups, at least one.

    Returns:
        The index of each stage's first group, and the number of groups: [0, 2, 3] are the groups 0 and 1, and the group 2.
    """

    @functools.cache
    def best(start: int, remaining: int) -> tuple[int, tuple[int, ...]]:
        if remaining == 1:
            return sum(sizes[start:]), (start, len(sizes))
        options = []
        for end in range(start + 1, len(sizes) - remaining + 2):
            largest, rest = best(end, remaining - 1)
            options.append((max(sum(sizes[start:end]), largest), (start, *rest)))
        return min(options)

    return list(best(0, min(count, len(sizes)))[1])


@dataclass
class StepResult:
    """The result of a batch.

    Attributes:
        gradients: the gradients of the weights by name, each on its stage's host.
        untrained: the new values of untrained variables by name.
        loss: the batch's mean loss.
        metrics: the variables of the metrics, such as a total and a count.
        results: the values of the metrics, computed from these variables.
    """

    gradients: dict[str, Any]
    untrained: dict[str, Any]
    loss: Any
    metrics: list[Any]
    results: Any = None


def forward_backward(
    network: FunctionalModel,
    stages: Sequence[Stage],
    batch: Batch,
    size: int,
    microbatches: int,
    scale_loss: Callable[[Any], Any],
) -> StepResult:
    """Run a batch of `size` samples forward and backward through all stages, in microbatches.

    TensorFlow runs microbatches in parallel, as only data dependencies order them. `scale_loss` applies the optimizer's scale.
    """
    values: dict[str, Any] = {}
    for stage in stages:
        with tf.device(stage.device):
            values |= {name: variable.read_value() for name, variable in stage.variables.items()}
    total = StepResult({}, {}, tf.constant(0.0), network.initial_metrics())

    def forward(microbatch: Batch, weight: float) -> list[Any]:
        """Run a microbatch forward, the fraction `weight` of the batch; return what `backward` needs of each stage."""
        records, outputs = list[Any](), microbatch.inputs
        for stage in stages:
            with tf.device(stage.device):
                inputs = tf.nest.map_structure(copy_to_device, outputs)
                names = [spec.name for group in stage.groups for spec in group.trained]
                floating = [one for one in tf.nest.flatten(inputs) if one.dtype.is_floating]
                with tf.GradientTape() as tape:
                    tape.watch(floating)
                    tape.watch([values[name] for name in names])
                    outputs, new_values, losses = stage.forward(values, inputs, True)
                    terms = [tf.add_n([tf.reduce_sum(tf.cast(one, tf.float32)) for one in losses]) * weight] if losses else []
                    if stage is stages[-1]:
                        copied = microbatch.map(tf.identity)  # to this device
                        loss, _, total.metrics, total.results = network.measure(total.metrics, copied, outputs)
                        terms, tensors = [tf.add_n([loss * weight, *terms])], []
                    else:
                        tensors = tf.nest.flatten(outputs)
                    targets = [*tensors, *(scale_loss(term) for term in terms)]
                values.update(new_values)
                total.untrained |= new_values
                total.loss += tf.add_n(terms) if terms else 0.0
                records.append((stage, tape, [*floating, *(values[name] for name in names)], targets, names))
        return records

    def backward(records: list[Any]) -> None:
        upstream: list[Any] = []
        for stage, tape, sources, targets, names in reversed(records):
            with tf.device(stage.device):
                output_gradients = [*(tf.identity(one) for one in upstream), *(tf.ones([]) for _ in targets[len(upstream) :])]
                gradients = tape.gradient(targets, sources, output_gradients=output_gradients, unconnected_gradients="zero")
                upstream = gradients[: len(gradients) - len(names)]
                for name, gradient in zip(names, gradients[len(gradients) - len(names) :], strict=True):
                    gradient, sums = tf.convert_to_tensor(gradient), total.gradients
                    sums[name] = gradient if name not in sums else sums[name] + gradient

    parts = pairwise(size * at // microbatches for at in range(microbatches + 1))
    passes = [forward(batch.map(operator.itemgetter(slice(begin, end))), (end - begin) / size) for begin, end in parts]
    for records in passes:
        backward(records)
    return total


def call_part(model: Any, trained: Values, others: Values, inputs: Any, training: bool) -> tuple[Any, list[Any], list[Any]]:
    """Return the outputs of a part of a model, its untrained variables after it, and the losses that layers add."""
    variables = [*model.trainable_variables, *model.non_trainable_variables]
    with RecordingScope(list(zip(variables, [*trained, *others], strict=True))) as scope:
        outputs, added = model(inputs, **make_training_argument(model.call, training)), list(model.losses)
    if not {id(variable) for variable in variables}.issuperset(scope.assigned):
        raise JobError(
            "the model is invalid with --strategy model-parallel: it changes a variable that is none of its own. Valid: random "
            "numbers by a keras.random.SeedGenerator that is an attribute of the layer, and layers that are not stateful"
        )
    return outputs, [scope.get_current_value(variable) for variable in model.non_trainable_variables], added
