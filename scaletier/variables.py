"""Keras's variables by name, and the tf.Variables that hold their values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from scaletier import private
from scaletier.tensorflow_setup import import_tensorflow

tf = import_tensorflow()
import keras  # noqa: E402 - after TensorFlow, whose log messages are held back

Values = Sequence[Any]
FLOAT32 = "float32"


class VariableSpec(NamedTuple):
    """A variable: its unique name, its shape, its dtype by name, and Keras's own variable."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    variable: Any

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.size * int(tf.as_dtype(self.dtype).size)


class Handle(NamedTuple):
    """The handle of a tf.Variable; as an argument of a graph it lets one graph serve the variables of every host."""

    handle: Any
    spec: VariableSpec

    def read_value(self) -> Any:
        value = tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.spec.dtype)
        value.set_shape(self.spec.shape)
        return value

    def assign(self, value: Any) -> Any:
        return tf.raw_ops.AssignVariableOp(resource=self.handle, value=value)

    def free(self) -> Any:
        """Free the memory of the value, until another one is assigned.

        The shape of the assigned value is hidden from Grappler, TensorFlow's graph optimizer: it would expect that of all later
        values.
        """
        return self.assign(tf.zeros(tf.raw_ops.VariableShape(input=self.handle) * 0, self.spec.dtype))


class Variables(NamedTuple):
    """Hold what a replica trains on a device: values of `shared` and `local`, in the network's order, and their step.

    They are tf.Variables, or handles in a graph. Each local step first computes all gradients, then updates the variables in
    place: after a failed round they have the values of its last whole step.
    """

    shared: Sequence[Any]
    local: Sequence[Any]
    step: Any


class VariableWriter:
    """Write Keras variables to the tf.Variables that hold them; `written` are the operations."""

    def __init__(self, pairs: Iterable[tuple[VariableSpec, Handle]]) -> None:
        self._handles = {id(spec.variable): handle for spec, handle in pairs}
        self._values = {key: handle.read_value() for key, handle in self._handles.items()}
        self._writes = list[Any]()

    def read(self, specs: Sequence[VariableSpec]) -> list[Any]:
        return [self._values[id(spec.variable)] for spec in specs]

    def write(self, variable: Any, value: Any) -> None:
        """Assign a value, unless the variable has it."""
        if value is not self._values[id(variable)]:
            self._values[id(variable)] = value
            self._writes.append(self._handles[id(variable)].assign(value))

    def update(self, optimizer: Any, gradient: Any, variable: Any, rate: Any) -> bool:
        """Do an optimizer's update in place by a kernel of TensorFlow, in Keras's scope; return False if there is none.

        Keras's own operations have three temporary tensors of the variable's size, and as many passes over it.
        """
        if isinstance(gradient, tf.IndexedSlices) or variable.dtype != FLOAT32 or id(variable) not in self._handles:
            return False
        if (kernel := private.update_kernel(optimizer, variable)) is None:
            return False
        changed, function = kernel
        for one in changed:
            self.write(one, one.value)  # such as after weight decay
        handles = [self._handles[id(one)].handle for one in changed]
        update = function(*handles, tf.cast(gradient, tf.float32), keras.ops.cast(rate, FLOAT32))
        with tf.control_dependencies([update]):
            for one in changed:
                self._values[id(one)] = value = self._handles[id(one)].read_value()
                one.assign(value)
        self._writes.append(update)
        return True

    @property
    def written(self) -> list[Any]:
        """The write operations of the current graph. The branches of a tf.cond are other graphs; its result is in this one."""
        graph = tf.compat.v1.get_default_graph()
        return [one for one in self._writes if one.graph is graph]


def make_variable_specs(model_name: str, variables: Sequence[Any], prefix: str = "") -> list[VariableSpec]:
    """Return specs of variables, named by their paths below the model's; equal paths are numbered."""
    specs = dict[str, VariableSpec]()
    for variable in variables:
        path = prefix + variable.path.removeprefix(f"{model_name}/")
        name = next(one for one in (path, *(f"{path}_{number + 1}" for number in range(len(specs)))) if one not in specs)
        specs[name] = VariableSpec(name, tuple(variable.shape), keras.backend.standardize_dtype(variable.dtype), variable)
    return list(specs.values())
