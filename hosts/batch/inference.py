"""Run a shard through the model: each instance gives a line, or an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hosts.batch.instances import KEY, of_line, of_record
from hosts.serving.rest import Arrays, RestError, chosen, lines, predict
from hosts.serving.signatures import Signature

BATCH = 128


class ShardPredictor:
    """A signature of a model; RestError if there is none of that name."""

    def __init__(self, run: Callable[[str, Arrays], Arrays], signatures: Mapping[str, Signature], name: str) -> None:
        self._run, self._name = run, name
        self._signature = chosen(signatures, name)
        self._rows = BATCH if self._signature.by_rows else 1

    @property
    def takes_key(self) -> bool:
        """True if the model takes the number of a record."""
        key = self._signature.inputs.get(KEY)
        return key is not None and key.dtype is not None and np.dtype(key.dtype).kind in "iu"

    def predict(self, records: Iterator[bytes], as_lines: bool, key: int, errors: list[dict[str, Any]]) -> Iterator[bytes]:
        """Yield an output line for each record, or line of JSON, of a shard; add those that fail to `errors`.

        An error has its line number in the shard, from 1; `key` is the first record's number in the input.
        """
        waiting: list[tuple[int, Any]] = []
        for number, record in enumerate(records):
            if as_lines and not record.strip():
                continue
            try:
                waiting.append((number, of_line(record) if as_lines else of_record(record, self._signature, key + number)))
            except RestError as error:
                waiting.append((number, error))
            if len(waiting) == self._rows:
                yield from self._predict_batch(waiting, errors)
                waiting = []
        yield from self._predict_batch(waiting, errors)

    def _predict_batch(self, instances: Sequence[tuple[int, Any]], errors: list[dict[str, Any]]) -> Iterator[bytes]:
        good = iter(self._results([value for _, value in instances if not isinstance(value, RestError)]))
        for number, value in instances:
            result = value if isinstance(value, RestError) else next(good)
            if isinstance(result, RestError):
                errors.append({"line": number + 1, "error": str(result)})
            else:
                yield result + b"\n"

    def _results(self, instances: Sequence[Any]) -> list[bytes | RestError]:
        """Return each instance's result; if some are refused, halve the batch to find them."""
        if not instances:
            return []
        try:
            inputs, _ = predict({"instances": list(instances)}, self._signature)
            return [*lines(self._run(self._name, inputs), len(instances))]
        except RestError as error:
            if len(instances) == 1:
                return [error]
        half = len(instances) // 2
        return [*self._results(instances[:half]), *self._results(instances[half:])]
