"""A shard through the model: instances in, for each a line or why there is none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from hosts.batch.instances import of_line, of_record
from hosts.batch.shards import Done, InputFile, Shard
from hosts.serving.rest import Arrays, RestError, Signature, chosen, lines, predict

BATCH = 128


class Runs(Protocol):
    """A model, as `predictor.saved.PredictorModel` is."""

    signatures: dict[str, Signature]

    def run(self, signature: str, inputs: Arrays) -> Arrays:
        """Return the outputs.

        Raises:
            RestError: the model refuses the inputs.
        """


class Predicting:
    """A signature of a model; RestError where there is none of that name."""

    def __init__(self, model: Runs, name: str) -> None:
        self._model, self._name = model, name
        self._signature = chosen(model.signatures, name)
        self._rows = BATCH if self._signature.by_rows else 1

    def shard(
        self, file: InputFile, shard: Shard, records: Iterator[bytes], errors: list[dict[str, object]]
    ) -> Iterator[bytes]:
        """Yield the lines of a shard's results; add instances without one to `errors`.

        Lines are counted from 1, as people do.
        """
        waiting: list[tuple[int, Any]] = []
        for number, record in enumerate(records, shard.first):
            if not file.records and not record.strip():
                continue
            try:
                key = shard.key + number - shard.first
                waiting.append((number, of_record(record, self._signature, key) if file.records else of_line(record)))
            except RestError as error:
                waiting.append((number, error))
            if len(waiting) == self._rows:
                yield from self._told(file, waiting, errors)
                waiting = []
        yield from self._told(file, waiting, errors)

    def _told(self, file: InputFile, read: Sequence[tuple[int, Any]], errors: list[dict[str, object]]) -> Iterator[bytes]:
        good = iter(self.results([value for _, value in read if not isinstance(value, RestError)]))
        for number, value in read:
            result = value if isinstance(value, RestError) else next(good)
            if isinstance(result, RestError):
                errors.append({"file": file.path, "line": number + 1, "error": str(result)})
            else:
                yield result + b"\n"

    def results(self, instances: Sequence[Any]) -> list[bytes | RestError]:
        """Return each instance's result; if some are refused, halve the batch to find them."""
        if not instances:
            return []
        try:
            inputs, _ = predict({"instances": list(instances)}, self._signature)
            return [*lines(self._model.run(self._name, inputs), len(instances))]
        except RestError as error:
            if len(instances) == 1:
                return [error]
        half = len(instances) // 2
        return [*self.results(instances[:half]), *self.results(instances[half:])]


def done_of(file: InputFile, last: bool, instances: int, errors: Sequence[dict[str, object]]) -> Done:
    """Return the outcome of a shard, with the file's damage if it is the file's last one."""
    damage = [{"file": file.path, "line": file.count + 1, "error": file.damage}] if last and file.damage else []
    return Done(instances, [*errors, *damage])
