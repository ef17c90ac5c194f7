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
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from scaletier.functional_model import FunctionalModel
from scaletier.round_graph import Exchange, LocalResult, State
from scaletier.runtime import import_tensorflow

tf = import_tensorflow()

Range = tuple[int, int]

# The largest value of a slice after scaling; half precision can represent up to 65,504.
_HALF_MOST = 32_768.0
_WIRE_BYTES = 2
# The most elements of a piece, 16 MB, and the pieces of a device that are on their way at a time.
_MOST_ELEMENTS = 4_000_000
_IN_FLIGHT = 2


class SharedParameters(Exchange):
    """Hold the shared parameters, spread evenly over devices, and the global step, on the first of them.

    If the optimizer averages weights, each device averages its section at each push, which sends nothing: `averages` are the
    first ones.
    """

    def __init__(
        self, network: FunctionalModel, devices: Sequence[str], values: Sequence[Any], step: int, averages: Sequence[Any] = ()
    ) -> None:
        """Create the pieces one by one from `values` and `averages`, arrays or tf.Variables of this host."""
        super().__init__(network)
        self._specs = network.shared
        places = np.cumsum([0, *(spec.size for spec in self._specs)]).tolist()
        self._variable_ranges = list(pairwise(places))
        sections = list(pairwise(_split_evenly(0, places[-1], len(devices))))
        self.bytes_per_round = [2 * _WIRE_BYTES * (end - begin) for begin, end in sections]
        self._pieces, self._averages, self._piece_ranges = list[Any](), list[Any](), list[Range]()
        kinds = [(self._pieces, values), *([(self._averages, averages)] if averages and network.averages else [])]
        flat = [(pieces, [tf.reshape(value, [-1]) for value in arrays]) for pieces, arrays in kinds]
        for device, (begin, end) in zip(devices, sections, strict=True):
            for piece_range in pairwise(_split_evenly(begin, end, max(1, math.ceil((end - begin) / _MOST_ELEMENTS)))):
                for pieces, vectors in flat:
                    slices = _overlap(piece_range, self._variable_ranges, vectors)
                    with tf.device(device):
                        pieces.append(tf.Variable(np.concatenate(slices or [np.zeros(0, np.float32)])))
                self._piece_ranges.append(piece_range)
        # For each piece, the ranges of its slices.
        self._slice_ranges = [_divide(piece_range, self._variable_ranges) for piece_range in self._piece_ranges]
        with tf.device(devices[0]):
            self._step = tf.Variable(np.int64(step))
        self._pull_exact = tf.function(lambda: ([piece.read_value() for piece in self._pieces], self.step()), autograph=False)
        self._pull_exact = self._pull_exact.get_concrete_function()

    # A round passes only its local variables to the next round; the shared parameters are pulled at its beginning.
    carried = ("local",)

    def begin(self, _position: Any, state: State) -> tuple[Any, State]:
        """Return the global step, whatever step the caller knows, and the state with freshly pulled parameters."""
        return self.step(), State(self.pull_fp16(), state.local)

    def end(self, start: State, reached: State, taken: LocalResult) -> tuple[State, Any, Any]:
        """Push this host's share of the delta from the round's `start` to the state that its steps `reached`.

        The share is 1 / `taken.live`, the number of hosts that train now; `taken` is the round's result. The state after the
        round has the parameters that were pulled, as the pushed ones are known only to the servers.
        """
        share = tf.cast(1.0 / tf.cast(taken.live, tf.float64), tf.float32)
        step = self.push_delta(start.shared, reached.shared, share, taken.steps)
        return State(start.shared, reached.local), step, taken.results

    def pull_fp16(self) -> tuple[Any, ...]:
        """Return all variables in the network's order, rounded to half precision."""
        slices, pulled = list[Any](), defaultdict[str, list[Any]](list)
        for piece, ranges in zip(self._pieces, self._slice_ranges, strict=True):
            with tf.device(piece.device), _in_turn(pulled[piece.device]):
                packed = _pack(_split(piece.read_value(), ranges))
            slices += (unpacked := _unpack(*packed, ranges))
            pulled[piece.device].append(unpacked)
        all_ranges = [each for ranges in self._slice_ranges for each in ranges]
        parameters = [_concat(_overlap(variable_range, all_ranges, slices)) for variable_range in self._variable_ranges]
        return tuple(tf.reshape(value, spec.shape) for value, spec in zip(parameters, self._specs, strict=True))

    def step(self) -> Any:
        """Return the global step."""
        return self._step.read_value()

    def push_delta(self, start: Sequence[Any], reached: Sequence[Any], share: Any, steps: Any) -> Any:
        """Add a share of a parameter delta and its steps; return the new global step.

        The steps are added first: so a replica that is lost in between leaves no change without its steps.

        Args:
            start: the parameters before the steps.
            reached: the parameters after them.
            share: the factor of the delta, float32.
            steps: the number of steps, int64.
        """
        with tf.device(self._step.device):
            step = self._step.assign_add(steps)
        step = tf.identity(step)  # on the replica: parameter servers do not communicate with each other
        part = self.network.average_share(steps, step - steps) if self._averages else None
        flat_start, flat_reached = ([tf.reshape(value, [-1]) for value in values] for values in (start, reached))
        pushed = defaultdict[str, list[Any]](list)
        for at, (piece, piece_range, ranges) in enumerate(
            zip(self._pieces, self._piece_ranges, self._slice_ranges, strict=True)
        ):
            with _in_turn(pushed[piece.device]):
                before, after = (
                    _overlap(piece_range, self._variable_ranges, flat) or [tf.zeros([0])] for flat in (flat_start, flat_reached)
                )
                packed = _pack([(new - old) * share for new, old in zip(after, before, strict=True)])
            with tf.control_dependencies([step]):
                packed = tuple(map(tf.identity, packed))
            with tf.device(piece.device):
                added = piece.assign_add(_concat(_unpack(*packed, ranges)), read_value=False)
                if self._averages:
                    with tf.control_dependencies([added]):
                        average = self._averages[at]
                        added = average.assign_add(part * (piece.read_value() - average.read_value()), read_value=False)
            pushed[piece.device].append([added])
        return step

    def pull_exact(self) -> tuple[Iterator[npt.NDArray[np.float32]], int]:
        """Return all parameters in the network's order, without rounding, one at a time, and the global step."""
        pieces, step = self._pull_exact()
        return self._variables(pieces), int(step)

    def pull_averages(self) -> list[npt.NDArray[np.float32]]:
        """Return the averages of all parameters in the network's order, or nothing if there are none."""
        return list(self._variables([piece.read_value() for piece in self._averages])) if self._averages else []

    def _variables(self, pieces: list[Any]) -> Iterator[npt.NDArray[np.float32]]:
        """Yield variables from the pieces, one of which is here at a time."""
        index, piece = -1, np.zeros(0, np.float32)
        for (begin, end), spec in zip(self._variable_ranges, self._specs, strict=True):
            value = np.empty(end - begin, np.float32)
            for at, (first, last) in enumerate(self._piece_ranges):
                low, high = max(begin, first), min(end, last)
                if low < high:
                    if at != index:
                        index, piece, pieces[at] = at, pieces[at].numpy(), None
                    value[low - begin : high - begin] = piece[low - first : high - first]
            yield value.reshape(spec.shape)


def _in_turn(ends: Sequence[Sequence[Any]]) -> Any:
    """Return a context for the next piece of a device, which waits until one piece less than the most is on its way.

    `ends` are the last operations of the pieces before, in order.
    """
    return tf.control_dependencies(ends[-_IN_FLIGHT] if len(ends) >= _IN_FLIGHT else [])


def _split_evenly(begin: int, end: int, count: int) -> list[int]:
    """Return the `count` + 1 places that divide a range evenly."""
    return np.linspace(begin, end, count + 1).astype(int).tolist()  # type: ignore[no-any-return]


def _divide(piece_range: Range, variable_ranges: Sequence[Range]) -> list[Range]:
    """Return the ranges of a piece's slices, in order: its own range, divided where a variable begins."""
    ranges = [(max(begin, piece_range[0]), min(end, piece_range[1])) for begin, end in variable_ranges]
    return [(begin, end) for begin, end in ranges if begin < end] or [piece_range]


def _overlap(wanted: Range, ranges: Sequence[Range], vectors: Sequence[Any]) -> list[Any]:
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


def _unpack(bits: Any, scales: Any, ranges: Sequence[Range]) -> list[Any]:
    """Return the float32 slices of what `_pack` returned; only the lengths of the ranges matter."""
    halves = [tf.bitcast(each, tf.float16) for each in _split(bits, ranges)]
    return [tf.cast(each, tf.float32) * scale for each, scale in _zip_scales(halves, scales)]


def _zip_scales(slices: Sequence[Any], scales: Any) -> Iterator[tuple[Any, Any]]:
    return zip(slices, tf.unstack(scales, len(slices)), strict=True)
