"""Exchange the parameters that asynchronous replicas share (docs/dev/training.md).

A replica pulls them rounded to half precision. It pushes its difference from the rounded values that it pulled, in half
precision, too; so rounding errors do not accumulate.

All variables are concatenated to one flat vector. A *range* is a pair of places in it, from the first to before the second. The
vector is divided evenly into *sections*, one for each device. A section is stored in *pieces*, one tf.Variable each, of which
two are on their way at a time, so that temporary tensors are smaller than a section. A *slice* is what one piece has of one
variable; each slice has its own scale.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from scaletier.functional_model import FunctionalModel, Handle, Variables
from scaletier.round_graph import Exchange, LocalResult
from scaletier.tensorflow_setup import import_tensorflow, on_this_process

tf = import_tensorflow()

Range = tuple[int, int]

# The largest value of a slice after scaling; half precision can represent up to 65,504.
_HALF_MOST = 32_768.0
_WIRE_BYTES = 2
# A section has this many pieces, or fewer of at least these elements, 4 MB; and the pieces of a device on their way at a time.
_PIECES, _LEAST_ELEMENTS = 32, 1_000_000
_IN_FLIGHT = 2


class SharedParameters(Exchange):
    """Hold the shared parameters, spread evenly over devices, and the global step, on the first of them.

    If the optimizer averages weights, each device averages its section at each push, without network traffic; `ema` are
    their initial values.
    """

    def __init__(
        self, network: FunctionalModel, devices: Sequence[str], values: Sequence[Any], step: int, ema: Sequence[Any] = ()
    ) -> None:
        """Create the pieces one by one from `values` and `ema`, arrays or tf.Variables of this host."""
        super().__init__(network)
        self._specs = network.shared
        places = np.cumsum([0, *(spec.size for spec in self._specs)]).tolist()
        self._variable_ranges = list(pairwise(places))
        sections = list(pairwise(split_evenly(0, places[-1], len(devices))))
        self.bytes_per_round = [2 * _WIRE_BYTES * (end - begin) for begin, end in sections]
        self._pieces, self._ema, self._piece_ranges = list[Any](), list[Any](), list[Range]()
        kinds = [(self._pieces, values), *([(self._ema, ema)] if ema and network.ema_slots else [])]
        flat = [(pieces, [tf.reshape(value, [-1]) for value in arrays]) for pieces, arrays in kinds]
        for device, (begin, end) in zip(devices, sections, strict=True):
            count = max(1, min(_PIECES, math.ceil((end - begin) / _LEAST_ELEMENTS)))
            for piece_range in pairwise(split_evenly(begin, end, count)):
                for pieces, vectors in flat:
                    slices = parts_within(piece_range, self._variable_ranges, vectors)
                    with tf.device(device):
                        pieces.append(tf.Variable(np.concatenate(slices or [np.zeros(0, np.float32)])))
                self._piece_ranges.append(piece_range)
        # For each piece, the ranges of its slices.
        self._slice_ranges = [_divide(piece_range, self._variable_ranges) for piece_range in self._piece_ranges]
        with tf.device(devices[0]):
            self._step = tf.Variable(np.int64(step))

    def error(self) -> Exception | None:
        """Return TensorFlow's error if a device's host is lost, or has started again without its pieces."""
        try:
            for piece in {piece.device: piece for piece in self._pieces}.values():
                initialized = tf.raw_ops.VarIsInitializedOp(resource=piece.handle)
                with on_this_process():
                    tf.raw_ops.LogicalNot(x=initialized)  # the error comes with the value
        except tf.errors.OpError as error:
            lost: Exception = error
            return lost
        return None

    def begin(self, variables: Variables) -> tuple[Any, Any]:
        """Pull the parameters; return the global step, and each piece's slices, packed, from which `end` makes the delta."""
        step = self._step.read_value()
        pieces = self._pull(self._pieces, lambda piece, ranges: _pack(_split(piece, ranges)))
        slices = [
            _divide_packed(bits, scales, ranges) for (bits, scales), ranges in zip(pieces, self._slice_ranges, strict=True)
        ]
        ready = [step, *(bits for each in slices for bits, _ in each)]
        with tf.control_dependencies(self._assign_slices(enumerate(variables.shared), ready, slices, _expand)):
            counted = variables.step.assign(step)
        with tf.control_dependencies([counted]):
            return tf.identity(step), slices

    def end(self, start: Any, variables: Variables, result: LocalResult) -> tuple[Any, Any]:
        """Push this host's share of the delta: 1 / `result.live_hosts`, the number of hosts that train now."""
        share = tf.cast(1.0 / tf.cast(result.live_hosts, tf.float64), tf.float32)
        return self.push_delta(start, [one.read_value() for one in variables.shared], share, result.steps), result.results

    def _pull(self, pieces: Sequence[Any], function: Callable[[Any, Sequence[Range]], Any]) -> list[Any]:
        """Return the results of a function of each piece and its slices' ranges, which is called where the piece is."""
        results, pulled = list[Any](), defaultdict[str, list[Any]](list)
        for piece, ranges in zip(pieces, self._slice_ranges, strict=True):
            with _in_turn(pulled[piece.device]):
                with tf.device(piece.device):
                    result = function(piece.read_value(), ranges)
                results.append(tf.nest.map_structure(tf.identity, result))
            pulled[piece.device].append(tf.nest.flatten(results[-1]))
        return results

    def push_delta(self, start: Sequence[Any], reached: Sequence[Any], share: Any, steps: Any) -> Any:
        """Add a share of a parameter delta and its steps; return the new global step.

        The steps are added first: so a replica that is lost in between leaves no change without its steps.

        Args:
            start: the parameters before the steps, as each piece's packed slices.
            reached: the parameters after them.
            share: the factor of the delta, float32.
            steps: the number of steps, int64.
        """
        with tf.device(self._step.device):
            step = self._step.assign_add(steps)
        step = tf.identity(step)  # on the replica: parameter servers do not communicate with each other
        ema_share = self.network.ema_share(steps, step - steps) if self._ema else None
        flat = [tf.reshape(value, [-1]) for value in reached]
        pushed = defaultdict[str, list[Any]](list)
        for at, (piece, piece_range, ranges) in enumerate(
            zip(self._pieces, self._piece_ranges, self._slice_ranges, strict=True)
        ):
            with _in_turn(pushed[piece.device]):
                before = map(_expand, start[at])
                after = parts_within(piece_range, self._variable_ranges, flat) or [tf.zeros([0])]
                packed = _pack([(new - old) * share for new, old in zip(after, before, strict=True)])
            with tf.control_dependencies([step]):
                packed = tuple(map(tf.identity, packed))
            with tf.device(piece.device):
                added = piece.assign_add(_concat(list(map(_expand, _divide_packed(*packed, ranges)))), read_value=False)
                if self._ema:
                    with tf.control_dependencies([added]):
                        average = self._ema[at]
                        moved = ema_share * (piece.read_value() - average.read_value())
                        added = average.assign_add(moved, read_value=False)
            pushed[piece.device].append([added])
        return step

    def pull_exact(self, variables: Variables) -> Any:
        """Give variables all parameters without rounding, and their averages; return the global step, which they have, too."""
        step = self._step.read_value()
        with tf.control_dependencies(self._assign_exact(enumerate(variables.shared), self._pieces, step)):
            written = [variables.step.assign(step)]
        if self._ema:
            averages = self.network.ema_pairs(range(len(variables.shared)), variables.local)
            with tf.control_dependencies(written):
                written = self._assign_exact(((at, average) for average, at in averages), self._ema, tf.identity(step))
        with tf.control_dependencies(written):
            return tf.identity(step)

    def _assign_exact(self, variables: Iterable[tuple[int, Handle]], pieces: Sequence[Any], step: Any) -> list[Any]:
        values = self._pull(pieces, lambda piece, _: piece)
        slices = [_split(*pair) for pair in zip(values, self._slice_ranges, strict=True)]
        return self._assign_slices(variables, [step, *values], slices)

    def _assign_slices(
        self,
        variables: Iterable[tuple[int, Handle]],
        ready: Sequence[Any],
        slices: Sequence[Sequence[Any]],
        expand: Callable[[Any], Any] = lambda one: one,
    ) -> list[Any]:
        """Assign each piece's slices to variables, by their places; see `assign_parts`."""
        chosen = [(variable, self._variable_ranges[place]) for place, variable in variables]
        ranges, parts = ([one for each in kind for one in each] for kind in (self._slice_ranges, slices))
        return assign_parts(chosen, ready, ranges, parts, expand)


def assign_parts(
    variables: Sequence[tuple[Handle, Range]],
    ready: Sequence[Any],
    ranges: Sequence[Range],
    parts: Sequence[Any],
    expand: Callable[[Any], Any] = lambda one: one,
) -> list[Any]:
    """Assign parts of the flat vector to variables, once tensors are `ready`; return the operations.

    The old values are freed first, so that both are not there at a time. A part is expanded when it is needed.
    """
    with tf.control_dependencies(ready):
        freed = [variable.free() for variable, _ in variables]
    written = list[Any]()
    for variable, variable_range in variables:
        with tf.control_dependencies(freed), _in_turn([[one] for one in written]):
            value = _concat(list(map(expand, parts_within(variable_range, ranges, parts))))
            # TensorFlow's optimizer drops a reshape to the same shape, or a bitcast back, and with it the order.
            shaped = value if len(variable.spec.shape) == 1 else tf.reshape(value, variable.spec.shape)
            written.append(variable.assign(shaped))
    return written


def _in_turn(ends: Sequence[Sequence[Any]]) -> Any:
    """Return a context for the next piece of a device, which waits until one piece less than the most is on its way.

    `ends` are the last operations of the pieces before, in order.
    """
    return tf.control_dependencies(ends[-_IN_FLIGHT] if len(ends) >= _IN_FLIGHT else [])


def split_evenly(begin: int, end: int, count: int) -> list[int]:
    """Return the `count` + 1 places that divide a range evenly."""
    return np.linspace(begin, end, count + 1).astype(int).tolist()  # type: ignore[no-any-return]


def _divide(piece_range: Range, variable_ranges: Sequence[Range]) -> list[Range]:
    """Return the ranges of a piece's slices, in order: its own range, divided where a variable begins."""
    ranges = [(max(begin, piece_range[0]), min(end, piece_range[1])) for begin, end in variable_ranges]
    return [(begin, end) for begin, end in ranges if begin < end] or [piece_range]


def parts_within(wanted: Range, ranges: Sequence[Range], vectors: Sequence[Any]) -> list[Any]:
    """Return what vectors with these ranges have within the wanted range, in order: slices, or whole vectors."""
    slices = []
    for (begin, end), vector in zip(ranges, vectors, strict=True):
        low, high = max(begin, wanted[0]), min(end, wanted[1])
        if low < high:
            slices.append(vector if (low, high) == (begin, end) else vector[low - begin : high - begin])
    return slices


def _split(vector: Any, ranges: Sequence[Range]) -> Any:
    """Divide a vector into slices with the lengths of these ranges."""
    return tf.split(vector, [end - begin for begin, end in ranges])


def _concat(slices: Sequence[Any]) -> Any:
    if len(slices) == 1:
        return slices[0]
    return tf.concat(slices, 0) if slices else tf.zeros([0])


def _pack(slices: Sequence[Any]) -> tuple[Any, Any]:
    """Return the bits of all slices in half precision, concatenated, and the scale of each slice.

    A slice is divided by its scale, so that its largest value fits. Each has its own scale: a variance of a billion takes no
    precision from the weights beside it. The bits are concatenated as uint16: concat of float16 is slow, and TensorFlow would
    move the casts behind it.
    """
    scales = tf.stack([tf.reduce_max(tf.abs(each)) if each.shape[0] else tf.constant(0.0) for each in slices]) / _HALF_MOST
    scales = tf.where(tf.equal(scales, 0.0), 1.0, scales)
    return _concat(
        [tf.bitcast(tf.cast(each / scale, tf.float16), tf.uint16) for each, scale in _zip_scales(slices, scales)]
    ), scales


def _divide_packed(bits: Any, scales: Any, ranges: Sequence[Range]) -> list[tuple[Any, Any]]:
    """Return each slice of what `_pack` returned, in half precision, and its scale; only the lengths of the ranges matter."""
    return list(_zip_scales([tf.bitcast(each, tf.float16) for each in _split(bits, ranges)], scales))


def _expand(packed: tuple[Any, Any]) -> Any:
    """Return a slice in float32."""
    return tf.cast(packed[0], tf.float32) * packed[1]


def _zip_scales(slices: Sequence[Any], scales: Any) -> Iterator[tuple[Any, Any]]:
    return zip(slices, tf.unstack(scales, len(slices)), strict=True)
