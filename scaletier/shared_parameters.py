"""Exchange the parameters that asynchronous replicas share (docs/dev/training.md).

A replica pulls them as half-precision floats, and pushes its delta to just these as half-precision floats, so that rounding
errors do not accumulate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from scaletier.functional_model import FunctionalModel
from scaletier.round_graph import Exchange, LocalResult, State
from scaletier.runtime import import_tensorflow

tf = import_tensorflow()

# The largest value after scaling: a half-precision float holds up to 65,504.
_HALF_MOST = 32_768.0
_WIRE_BYTES = 2
# The most elements of a piece, 16 MB.
_MOST_ELEMENTS = 4_000_000


class SharedParameters(Exchange):
    """All shared parameters, spread evenly over devices, and the global step, on the first of them.

    The variables are concatenated to a flat vector, which is cut into equal parts, one for each device. A part is held in
    pieces, so that temporary tensors are smaller than the part.
    """

    def __init__(
        self, network: FunctionalModel, devices: Sequence[str], values: Sequence[npt.NDArray[np.float32]], step: int
    ) -> None:
        self._specs = network.shared
        ends = np.cumsum([0, *(spec.size for spec in self._specs)]).tolist()
        self._spans = list(pairwise(ends))
        cuts = list(pairwise(_split_evenly(0, ends[-1], len(devices))))
        self.bytes_per_round = [2 * _WIRE_BYTES * (end - begin) for begin, end in cuts]
        self._pieces, self._cuts = [], list[tuple[int, int]]()
        flat = [value.reshape(-1) for value in values]
        for device, (begin, end) in zip(devices, cuts, strict=True):
            for cut in pairwise(_split_evenly(begin, end, max(1, math.ceil((end - begin) / _MOST_ELEMENTS)))):
                with tf.device(device):
                    self._pieces.append(
                        tf.Variable(np.concatenate(_overlap(cut, self._spans, flat) or [np.zeros(0, np.float32)]))
                    )
                self._cuts.append(cut)
        # The span of each variable in each piece; each has a scale of its own.
        self._parts = [_parts_of(cut, self._spans) for cut in self._cuts]
        with tf.device(devices[0]):
            self._step = tf.Variable(np.int64(step))
        self._pull_exact = tf.function(lambda: ([piece.read_value() for piece in self._pieces], self.step()), autograph=False)
        self._pull_exact = self._pull_exact.get_concrete_function()

    carried = ("local",)

    def begin(self, _position: Any, state: State) -> tuple[Any, State]:
        return self.step(), State(self.pull_fp16(), state.local)

    def end(self, start: State, reached: State, taken: LocalResult) -> tuple[State, Any, Any]:
        """Push a live host's share of its parameter delta; the state after it has the parameters that were pulled."""
        share = tf.cast(1.0 / tf.cast(taken.live, tf.float64), tf.float32)
        step = self.push_delta(start.shared, reached.shared, share, taken.steps)
        return State(start.shared, reached.local), step, taken.results

    def pull_fp16(self) -> tuple[Any, ...]:
        """Return all variables in the network's order, with half precision."""
        read = list[Any]()
        for piece, parts in zip(self._pieces, self._parts, strict=True):
            with tf.device(piece.device):
                packed = _pack(_split(piece.read_value(), parts))
            read += _unpack(*packed, parts)
        spans = [part for parts in self._parts for part in parts]
        parameters = [_concat(_overlap(span, spans, read)) for span in self._spans]
        return tuple(tf.reshape(value, spec.shape) for value, spec in zip(parameters, self._specs, strict=True))

    def step(self) -> Any:
        return self._step.read_value()

    def push_delta(self, start: Sequence[Any], reached: Sequence[Any], share: Any, steps: Any) -> Any:
        """Add this share of a parameter delta, given by its two ends, and count its steps, int64; return the global step.

        The steps are counted first: a replica that is lost in between leaves no uncounted change in the parameters.
        """
        with tf.device(self._step.device):
            step = self._step.assign_add(steps)
        step = tf.identity(step)  # on the replica: parameter servers do not see each other
        ends = [[tf.reshape(one, [-1]) for one in each] for each in (start, reached)]
        for piece, cut, parts in zip(self._pieces, self._cuts, self._parts, strict=True):
            before, after = (_overlap(cut, self._spans, end) or [tf.zeros([0])] for end in ends)
            packed = _pack([(late - early) * share for late, early in zip(after, before, strict=True)])
            with tf.control_dependencies([step]):
                packed = tuple(map(tf.identity, packed))
            with tf.device(piece.device):
                piece.assign_add(_concat(_unpack(*packed, parts)), read_value=False)
        return step

    def pull_exact(self) -> tuple[list[npt.NDArray[np.float32]], int]:
        """Return all parameters, exactly, in the network's order, and the global step."""
        pieces, step = self._pull_exact()
        arrays = [piece.numpy() for piece in pieces]
        parameters = [np.concatenate(_overlap(span, self._cuts, arrays) or [np.zeros(0, np.float32)]) for span in self._spans]
        return [value.reshape(spec.shape) for value, spec in zip(parameters, self._specs, strict=True)], int(step)


def _split_evenly(begin: int, end: int, parts: int) -> list[int]:
    return np.linspace(begin, end, parts + 1).astype(int).tolist()  # type: ignore[no-any-return]


def _parts_of(cut: tuple[int, int], spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the parts of a cut that spans cover, in order: the cut, divided where a span begins."""
    parts = [(max(begin, cut[0]), min(end, cut[1])) for begin, end in spans]
    return [(begin, end) for begin, end in parts if begin < end] or [cut]


def _overlap(span: tuple[int, int], spans: Sequence[tuple[int, int]], values: Sequence[Any]) -> list[Any]:
    """Return the parts of vectors at `spans` that are within this one, in order, as slices or whole."""
    pieces = []
    for (begin, end), value in zip(spans, values, strict=True):
        low, high = max(begin, span[0]), min(end, span[1])
        if low < high:
            pieces.append(value if (low, high) == (begin, end) else value[low - begin : high - begin])
    return pieces


def _split(vector: Any, parts: Sequence[tuple[int, int]]) -> Any:
    return tf.split(vector, [end - begin for begin, end in parts])


def _concat(parts: Sequence[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    return tf.concat(parts, 0) if parts else tf.zeros([0])


def _pack(parts: Sequence[Any]) -> tuple[Any, Any]:
    """Return numbers in half precision, end to end, as their bits, and the scale of each vector.

    The scale makes the largest of each fit. So a variance of a billion takes no precision from the weights beside it.
    TensorFlow would have casts after a concat rather than before, and has no quick concat of halves: these are no halves.
    """
    scales = tf.stack([tf.reduce_max(tf.abs(part)) if part.shape[0] else tf.constant(0.0) for part in parts]) / _HALF_MOST
    scales = tf.where(tf.equal(scales, 0.0), 1.0, scales)
    return _concat(
        [tf.bitcast(tf.cast(part / scale, tf.float16), tf.uint16) for part, scale in _zip_scales(parts, scales)]
    ), scales


def _unpack(bits: Any, scales: Any, parts: Sequence[tuple[int, int]]) -> list[Any]:
    halves = [tf.bitcast(part, tf.float16) for part in _split(bits, parts)]
    return [tf.cast(part, tf.float32) * scale for part, scale in _zip_scales(halves, scales)]


def _zip_scales(parts: Sequence[Any], scales: Any) -> Iterator[tuple[Any, Any]]:
    return zip(parts, tf.unstack(scales, len(parts)), strict=True)
