"""Exchange the parameters that asynchronous replicas share (docs/dev/training.md).

A replica pulls the parameters rounded to half precision. It pushes the difference between its new values and the rounded values
that it pulled, also in half precision; so rounding errors do not accumulate.

All variables are concatenated to one flat vector. A *range* is a pair of offsets in it, the second exclusive. The vector is
divided evenly into *sections*, one for each device. A section is stored in *pieces*, one tf.Variable each, of which two are in
transfer at a time, so that temporary tensors are smaller than a section. A *slice* is the part of one variable in one piece;
each slice has its own scale.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from scaletier.functional_model import FunctionalModel
from scaletier.round_graph import Exchange, LocalResult
from scaletier.tensorflow_setup import import_tensorflow, on_this_process
from scaletier.variables import Handle, Variables

tf = import_tensorflow()

Range = tuple[int, int]

# The largest value of a slice after scaling; half precision can represent up to 65,504.
_MAX_SCALED = 32_768.0
_HALF_BYTES = 2
# A section has _PIECES pieces, or fewer of at least _MIN_ELEMENTS, 4 MB; _IN_FLIGHT of a device are in transfer at a time.
_PIECES, _MIN_ELEMENTS = 32, 1_000_000
_IN_FLIGHT = 2


class SharedParameters(Exchange):
    """Hold the shared parameters, spread evenly over devices, and on the first device the global step.

    If the optimizer has moving averages of weights, each device updates those of its section at each push, without network
    traffic; `ema` are their initial values.
    """

    def __init__(
        self, network: FunctionalModel, devices: Sequence[str], values: Sequence[Any], step: int, ema: Sequence[Any] = ()
    ) -> None:
        """Create the pieces one by one from `values` and `ema`, arrays or tf.Variables of this host."""
        super().__init__(network)
        self._specs = network.shared
        offsets = np.cumsum([0, *(spec.size for spec in self._specs)]).tolist()
        self._variable_ranges = list(pairwise(offsets))
        sections = list(pairwise(split_evenly(0, offsets[-1], len(devices))))
        self.bytes_per_round = [2 * _HALF_BYTES * (end - begin) for begin, end in sections]
        self._pieces, self._ema, self._piece_ranges = list[Any](), list[Any](), list[Range]()
        kinds = [(self._pieces, values), *([(self._ema, ema)] if ema and network.ema_slots else [])]
        flat = [(pieces, [tf.reshape(value, [-1]) for value in arrays]) for pieces, arrays in kinds]
        for device, (begin, end) in zip(devices, sections, strict=True):
            count = max(1, min(_PIECES, math.ceil((end - begin) / _MIN_ELEMENTS)))
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

    def find_lost_host(self) -> Exception | None:
        """Return TensorFlow's error if a device's host is lost, or has restarted without its pieces; else None."""
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
        """Pull the parameters; return the global step, and each piece's packed slices, from which `end` computes the delta."""
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
        """Push this host's share of the delta, which is 1 / `result.live_hosts`."""
        share = tf.cast(1.0 / tf.cast(result.live_hosts, tf.float64), tf.float32)
        return self.push_delta(start, [one.read_value() for one in variables.shared], share, result.steps), result.results

    def _pull(self, pieces: Sequence[Any], function: Callable[[Any, Sequence[Range]], Any]) -> list[Any]:
        """Return the results of a function of each piece and its slices' ranges, computed on the piece's device."""
        results, pulled = list[Any](), defaultdict[str, list[Any]](list)
        for piece, ranges in zip(pieces, self._slice_ranges, strict=True):
            with _limit_in_flight(pulled[piece.device]):
                with tf.device(piece.device):
                    result = function(piece.read_value(), ranges)
                results.append(tf.nest.map_structure(tf.identity, result))
            pulled[piece.device].append(tf.nest.flatten(results[-1]))
        return results

    def push_delta(self, start: Sequence[Any], end: Sequence[Any], share: Any, steps: Any) -> Any:
        """Add a share of a parameter delta and its steps; return the new global step.

        The steps are added first, so that a replica that is lost meanwhile leaves no change without its steps.

        Args:
            start: the parameters before the steps, as each piece's packed slices.
            end: the parameters after the steps.
            share: the factor of the delta, float32.
            steps: the number of steps, int64.
        """
        with tf.device(self._step.device):
            step = self._step.assign_add(steps)
        step = tf.identity(step)  # on the replica, as parameter servers do not communicate with each other
        ema_share = self.network.ema_share(steps, step - steps) if self._ema else None
        flat = [tf.reshape(value, [-1]) for value in end]
        pushed = defaultdict[str, list[Any]](list)
        for at, (piece, piece_range, ranges) in enumerate(
            zip(self._pieces, self._piece_ranges, self._slice_ranges, strict=True)
        ):
            with _limit_in_flight(pushed[piece.device]):
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
        """Assign the exact parameters, their moving averages and the global step to variables; return the step."""
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
        """Assign each piece's slices to variables, by their indices; see `assign_parts`."""
        chosen = [(variable, self._variable_ranges[index]) for index, variable in variables]
        ranges, parts = ([one for each in kind for one in each] for kind in (self._slice_ranges, slices))
        return assign_parts(chosen, ready, ranges, parts, expand)


def assign_parts(
    variables: Sequence[tuple[Handle, Range]],
    ready: Sequence[Any],
    ranges: Sequence[Range],
    parts: Sequence[Any],
    expand: Callable[[Any], Any] = lambda one: one,
) -> list[Any]:
    """Assign parts of the flat vector to variables, once the tensors `ready` exist; return the operations.

    The old values are freed first, so that the memory never has both. A part is expanded when it is assigned.
    """
    with tf.control_dependencies(ready):
        freed = [variable.free() for variable, _ in variables]
    written = list[Any]()
    for variable, variable_range in variables:
        with tf.control_dependencies(freed), _limit_in_flight([[one] for one in written]):
            value = _concat(list(map(expand, parts_within(variable_range, ranges, parts))))
            # TensorFlow's optimizer drops a reshape to the same shape, or a bitcast back, with its control dependencies.
            shaped = value if len(variable.spec.shape) == 1 else tf.reshape(value, variable.spec.shape)
            written.append(variable.assign(shaped))
    return written


def _limit_in_flight(ends: Sequence[Sequence[Any]]) -> Any:
    """Return a context for a device's next piece, which waits until less than _IN_FLIGHT pieces are in transfer.

    `ends` are the last operations of each of the pieces before, in order.
    """
    return tf.control_dependencies(ends[-_IN_FLIGHT] if len(ends) >= _IN_FLIGHT else [])


def split_evenly(begin: int, end: int, count: int) -> list[int]:
    """Return the `count` + 1 offsets that divide a range evenly, including its begin and end."""
    return np.linspace(begin, end, count + 1).astype(int).tolist()  # type: ignore[no-any-return]


def _divide(piece_range: Range, variable_ranges: Sequence[Range]) -> list[Range]:
    """Return the ranges of a piece's slices, in order: its own range, divided where a variable begins."""
    ranges = [(max(begin, piece_range[0]), min(end, piece_range[1])) for begin, end in variable_ranges]
    return [(begin, end) for begin, end in ranges if begin < end] or [piece_range]


def parts_within(bounds: Range, ranges: Sequence[Range], vectors: Sequence[Any]) -> list[Any]:
    """Return the parts of vectors with these ranges that are within `bounds`, in order: slices, or whole vectors."""
    slices = []
    for (begin, end), vector in zip(ranges, vectors, strict=True):
        low, high = max(begin, bounds[0]), min(end, bounds[1])
        if low < high:
            slices.append(vector if (low, high) == (begin, end) else vector[low - begin : high - begin])
    return slices


def _split(vector: Any, ranges: Sequence[Range]) -> Any:
    """Divide a vector into slices with the lengths of the ranges."""
    return tf.split(vector, [end - begin for begin, end in ranges])


def _concat(slices: Sequence[Any]) -> Any:
    if len(slices) == 1:
        return slices[0]
    return tf.concat(slices, 0) if slices else tf.zeros([0])


def _pack(slices: Sequence[Any]) -> tuple[Any, Any]:
    """Return the bits of all slices in half precision, concatenated, and the scale of each slice.

    A slice is divided by its scale, so that its largest value fits. Each slice has its own: a variance of a billion takes no
    precision from the weights beside it. The bits are concatenated as uint16: a concat of float16 is slow, and TensorFlow
    would move the casts behind it.
    """
    scales = tf.stack([tf.reduce_max(tf.abs(each)) if each.shape[0] else tf.constant(0.0) for each in slices]) / _MAX_SCALED
    scales = tf.where(tf.equal(scales, 0.0), 1.0, scales)
    return _concat(
        [tf.bitcast(tf.cast(each / scale, tf.float16), tf.uint16) for each, scale in _zip_scales(slices, scales)]
    ), scales


def _divide_packed(bits: Any, scales: Any, ranges: Sequence[Range]) -> list[tuple[Any, Any]]:
    """Return each slice of a result of `_pack`, in half precision, and its scale; only the lengths of the ranges matter."""
    return list(_zip_scales([tf.bitcast(each, tf.float16) for each in _split(bits, ranges)], scales))


def _expand(packed: tuple[Any, Any]) -> Any:
    """Return a slice in float32."""
    return tf.cast(packed[0], tf.float32) * packed[1]


def _zip_scales(slices: Sequence[Any], scales: Any) -> Iterator[tuple[Any, Any]]:
    return zip(slices, tf.unstack(scales, len(slices)), strict=True)
