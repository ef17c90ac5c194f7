"""Give Keras's variables values without assigning them, and record which of them a model uses and changes.

Source: `keras.StatelessScope`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from scaletier import private
from scaletier.tensorflow_setup import import_tensorflow
from scaletier.variables import VariableSpec

import_tensorflow()
import keras  # noqa: E402 - after TensorFlow, whose log messages are held back


class ValueScope(keras.StatelessScope):  # type: ignore[misc]
    """Give variables these values, also in a tf.function."""

    def __enter__(self) -> Any:
        private.trace_functions_in_scopes(self, True)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        private.trace_functions_in_scopes(self, False)


class RecordingScope(ValueScope):
    """Record the variables that are assigned, those that are used, and reads of weights, by their ids."""

    def __init__(self, mapping: Sequence[tuple[Any, Any]]) -> None:
        super().__init__(mapping, collect_losses=True, initialize_variables=False)
        self.assigned, self.used, self._reads = dict[int, Any](), dict[int, Any](), set[tuple[int, str]]()
        self._versions, self._tape = dict[int, list[Any]](), None

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        self.assigned[id(variable)] = self.used[id(variable)] = variable
        value = private.without_gradient(get_value(value))
        if self._tape is not None and id(variable) in self._versions:
            self._tape.watch(value)
            self._versions[id(variable)].append(value)
        self.set(variable, value)

    def set(self, variable: Any, value: Any) -> None:
        """Give a variable a value, without a record."""
        super().add_update((variable, value))

    @contextlib.contextmanager
    def watched(self, specs: Sequence[VariableSpec], tape: Any) -> Iterator[list[list[Any]]]:
        """Watch all values that variables get, and yield a list of them for each variable.

        As in Keras, an assignment has no gradient, and each read has.
        """
        values = [[value] for value in self.values(specs)]
        tape.watch(values)
        self._tape, self._versions = tape, {id(spec.variable): each for spec, each in zip(specs, values, strict=True)}
        yield values
        self._tape = None

    def get_current_value(self, variable: Any) -> Any:
        self.used[id(variable)] = variable
        if variable.trainable:
            self._reads.add((id(variable), private.custom_gradient_around()))
        return super().get_current_value(variable)

    def hides(self, variable: Any) -> bool:
        """Return True if a gradient is lost: by recomputation, or by a custom gradient if the variable is read nowhere else."""
        recomputed, own, outside = ((id(variable), around) in self._reads for around in ("recompute", "own", ""))
        return recomputed or (own and not outside)

    def values(self, specs: Sequence[VariableSpec]) -> list[Any]:
        return [self.get_current_value(spec.variable) for spec in specs]


def get_value(given: Any) -> Any:
    """Return a variable's value in the current scope, or a tensor as it is."""
    return given.value if isinstance(given, keras.Variable) else given
