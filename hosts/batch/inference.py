"""Run the records of a shard through the model; each record gives a line of output or an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hosts.batch.instances import KEY, parse_line, parse_record
from hosts.serving.rest import Arrays, RestError, get_signature, parse_request, prediction_rows
from hosts.serving.saved import tensorflow
from jobs.model_signatures import Signature

BATCH = 128


class ShardPredictor:
    """Predict with one signature of a model; RestError if the model has none of that name."""

    def __init__(self, run: Callable[[str, Arrays], Arrays], signatures: Mapping[str, Signature], name: str) -> None:
        self._run, self._name = run, name
        self._signature = get_signature(signatures, name)
        # Records can be batched only if the signature gives one output row for each input row.
        self._batch_size = BATCH if self._signature.batchable else 1

    @property
    def takes_key(self) -> bool:
        """True if the signature has an integer input `key`, which gets the number of a TFRecord that has no feature for it."""
        key = self._signature.inputs.get(KEY)
        return key is not None and key.dtype is not None and np.dtype(key.dtype).kind in "iu"

    def predict(self, records: Iterator[bytes], as_lines: bool, key: int, errors: list[dict[str, Any]]) -> Iterator[bytes]:
        """Yield a line of output for each record of a shard that has a result; append an error for each other record.

        Args:
            records: the shard's TFRecords, or its lines if `as_lines` is set; empty lines are skipped.
            key: the number of the shard's first record in the whole input.
            errors: gets, for each record without a result, `line`, its number in the shard from 1, and `error`, the reason.
        """
        pending: list[tuple[int, Any]] = []
        for number, record in enumerate(records):
            if as_lines and not record.strip():
                continue
            try:
                value = parse_line(record, self._signature) if as_lines else parse_record(record, self._signature, key + number)
                pending.append((number, value))
            except RestError as error:
                pending.append((number, error))
            if len(pending) == self._batch_size:
                yield from self._predict_batch(pending, errors)
                pending = []
        yield from self._predict_batch(pending, errors)

    def _predict_batch(self, instances: Sequence[tuple[int, Any]], errors: list[dict[str, Any]]) -> Iterator[bytes]:
        results = iter(self._compute_results([value for _, value in instances if not isinstance(value, RestError)]))
        for number, value in instances:
            result = value if isinstance(value, RestError) else next(results)
            if isinstance(result, RestError):
                errors.append({"line": number + 1, "error": str(result)})
            else:
                yield result + b"\n"

    def _compute_results(self, instances: Sequence[Any]) -> list[bytes | RestError]:
        """Return each instance's result or error. Halve a batch that the model refuses or that is too large for memory."""
        if not instances:
            return []
        try:
            inputs, _ = parse_request({"instances": list(instances)}, self._signature)
            return [*prediction_rows(self._run(self._name, inputs), len(instances))]
        except RestError as error:
            if len(instances) == 1:
                return [error]
        except tensorflow().errors.ResourceExhaustedError:
            if len(instances) == 1:
                raise
        half = len(instances) // 2
        return [*self._compute_results(instances[:half]), *self._compute_results(instances[half:])]
