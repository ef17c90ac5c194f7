"""Divide a model into stages on several hosts, and pass a batch forward and backward through them."""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from scaletier.functional_model import Batch, FunctionalModel, VariableSpec, call_part
from scaletier.job import JobError
from scaletier.private import copy_to_device
from scaletier.runtime import import_tensorflow

tf = import_tensorflow()
import keras  # noqa: E402 - it comes with TensorFlow, whose import is the quiet one

_TWICE = "the model {} cannot be laid on several hosts: it goes through one layer more than once"


@dataclass(frozen=True)
class Unit:
    """The smallest piece of a model that can be placed on a host: one or more layers.

    A single tensor passes from one to the next.
    """

    name: str
    model: Any
    trained: tuple[VariableSpec, ...]
    others: tuple[VariableSpec, ...]

    @property
    def specs(self) -> tuple[VariableSpec, ...]:
        return *self.trained, *self.others

    @property
    def size(self) -> int:
        return sum(spec.size for spec in self.specs)


@dataclass(frozen=True)
class Stage:
    """Consecutive units on one host; `variables` by name, those of the units."""

    replica: str
    device: str
    units: Sequence[Unit]
    variables: dict[str, Any] = field(default_factory=dict)

    def forward(self, values: Mapping[str, Any], inputs: Any, training: bool) -> tuple[Any, dict[str, Any], list[Any]]:
        """Return the output, the other variables' values after it, and the layers' losses, on the stage's device."""
        after, added = dict[str, Any](), list[Any]()
        for unit in self.units:
            trained, others = ([values[spec.name] for spec in specs] for specs in (unit.trained, unit.others))
            with warnings.catch_warnings():  # Keras warns because masks are attached to inner layers; we pass them on
                warnings.filterwarnings("ignore", ".* does not support masking")
                inputs, updated, losses = call_part(unit.model, trained, others, inputs, training)
            after.update(zip((spec.name for spec in unit.others), updated, strict=True))
            added += losses
        return inputs, after, added


def units(network: FunctionalModel) -> list[Unit]:
    """Return the pieces into which a model can be cut, in order; JobError if it has none."""
    specs = {id(spec.variable): spec for spec in (*network.shared, *network.local)}
    unit_list = []
    for name, piece in _pieces(network.model):
        trained, others = (
            tuple(specs[id(variable)] for variable in kind)
            for kind in (piece.trainable_variables, piece.non_trainable_variables)
        )
        unit_list.append(Unit(name, piece, trained, others))
    names = [spec.name for unit in unit_list for spec in unit.specs]
    if len(names) > len(set(names)):
        raise JobError(_TWICE.format(network.model.name))
    return unit_list


def _pieces(model: Any) -> list[tuple[str, Any]]:
    whole = model
    if isinstance(model, keras.Sequential):  # rebuild it as a functional model, where masks are operations too
        with keras.StatelessScope(initialize_variables=False):
            whole = keras.Model(model.inputs[0], model.outputs[0])
    if not (operations := getattr(whole, "operations", None)):
        valid = "valid are Sequential models and those made of keras.Input"
        raise JobError(f"the layers of the model {model.name} cannot be laid on several hosts, as it is subclassed; {valid}")
    inputs = {id(tensor) for tensor in model.inputs}
    layers = [layer for layer in operations if not isinstance(layer, keras.layers.InputLayer)]
    try:
        edges = [(layer, _flat(layer.input), _flat(layer.output)) for layer in layers]
    except (ValueError, AttributeError):
        raise JobError(_TWICE.format(model.name)) from None
    last = {id(tensor) for tensor in model.outputs}
    pieces, begin, names, alive = [], whole.input, list[str](), set(inputs)
    tensors_by_id = {id(tensor): tensor for _, _, tensors in edges for tensor in tensors}
    for at, (layer, _, outputs) in enumerate(edges):
        names.append(layer.name)
        alive |= {id(tensor) for tensor in outputs}
        needed = {id(tensor) for _, sources, _ in edges[at + 1 :] for tensor in sources} | last
        crossing, ends = alive & needed, at == len(edges) - 1
        if ends or (len(crossing) == 1 and not crossing & inputs):
            reached = whole.output if ends else tensors_by_id[next(iter(crossing))]
            with keras.StatelessScope(initialize_variables=False):
                pieces.append((" ".join(names), keras.Model(begin, reached)))
            begin, names, alive = reached, [], crossing
    return pieces


def _flat(tensors: Any) -> list[Any]:
    return list(tensors) if isinstance(tensors, list | tuple) else [tensors]


def partition(sizes: Sequence[int], count: int) -> list[int]:
    """Divide layers of these sizes into at most `count` groups; the largest is as small as possible.

    Each group has consecutive layers, at least one.

    Returns:
        Where each group begins, and the end: [0, 2, 3] are the layers 0 and 1, and the layer 2.
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
        changes: gradients by the weights' names, each on its stage's host.
        others: new values of the variables that are not trained, by name.
        loss: the batch's mean loss.
        metrics: the variables of the metrics, such as a total and a count.
        results: the values of the metrics, computed from these variables.
    """

    changes: dict[str, Any]
    others: dict[str, Any]
    loss: Any
    metrics: list[Any]
    results: Any = None


def forward_backward(
    network: FunctionalModel, stages: Sequence[Stage], batch: Batch, size: int, microbatches: int, scaled: Callable[[Any], Any]
) -> StepResult:
    """Run a batch of this size forward and backward through all stages, in microbatches.

    TensorFlow runs them in parallel, as only data dependencies order them. `scaled` applies the optimizer's loss scale.
    """
    values: dict[str, Any] = {}
    for stage in stages:
        with tf.device(stage.device):
            values |= {name: variable.read_value() for name, variable in stage.variables.items()}
    total = StepResult({}, {}, tf.constant(0.0), network.initial_metrics())
    backs = []
    for begin, end in pairwise(size * at // microbatches for at in range(microbatches + 1)):
        microbatch = batch.map(operator.itemgetter(slice(begin, end)))
        backs.append(_forward(network, stages, microbatch, (end - begin) / size, values, total, scaled))
    for back in backs:
        back(total.changes)
    return total


def _forward(
    network: FunctionalModel,
    stages: Sequence[Stage],
    microbatch: Batch,
    weight: float,
    values: dict[str, Any],
    total: StepResult,
    scaled: Callable[[Any], Any],
) -> Callable[[dict[str, Any]], None]:
    """Run a microbatch forward through all stages; `weight` is its fraction of the batch.

    Returns:
        A function of sums of gradients by name: it runs the backward pass and adds to them.
    """
    passed: list[tuple[Stage, Any, Any, list[Any], list[Any]]] = []
    outputs = microbatch.inputs
    for stage in stages:
        with tf.device(stage.device):
            inputs = tf.nest.map_structure(copy_to_device, outputs)
            names = [spec.name for unit in stage.units for spec in unit.trained]
            floating = [one for one in tf.nest.flatten(inputs) if one.dtype.is_floating]
            with tf.GradientTape() as tape:
                tape.watch(floating)
                tape.watch([values[name] for name in names])
                outputs, after, added = stage.forward(values, inputs, True)
                terms = [tf.add_n([tf.reduce_sum(tf.cast(term, tf.float32)) for term in added]) * weight] if added else []
                if stage is stages[-1]:
                    here = microbatch.map(tf.identity)
                    loss, _, total.metrics, total.results = network.measure(total.metrics, here, outputs)
                    terms, tensors = [tf.add_n([loss * weight, *terms])], []
                else:
                    tensors = tf.nest.flatten(outputs)
                targets = [*tensors, *(scaled(term) for term in terms)]
            values |= after
            total.others |= after
            total.loss += tf.add_n(terms) if terms else 0.0
            passed.append((stage, tape, [*floating, *(values[name] for name in names)], targets, names))

    def back(sums: dict[str, Any]) -> None:
        upstream: list[Any] = []
        for stage, tape, sources, targets, names in reversed(passed):
            with tf.device(stage.device):
                gradients = [*(tf.identity(one) for one in upstream), *(tf.ones([]) for _ in targets[len(upstream) :])]
                changes = tape.gradient(targets, sources, output_gradients=gradients, unconnected_gradients="zero")
                upstream = changes[: len(changes) - len(names)]
                for name, change in zip(names, changes[len(changes) - len(names) :], strict=True):
                    change = tf.convert_to_tensor(change)
                    sums[name] = change if name not in sums else sums[name] + change

    return back
