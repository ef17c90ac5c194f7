"""Read and write the output folder: results, errors, metrics and progress. Each file is written atomically.

| file | content |
|---|---|
| `prediction.results-00000-of-00020` | a line for each instance of a shard |
| `prediction.errors_stats-00000-of-00001` | a line for each instance without a result, and for each damaged file |
| `metrics.json` | the number of lines in both; written last |
| `.parts/plan.json` | the input files as the chief inspected them |
| `.parts/counts-0.json` | record counts of a replica's shards, if the model has an input `key`, the record's number |
| `.parts/00000.json` | the outcome of a shard that is done |
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from hosts.batch.shards import InputFile, InputPosition, RecordCount, Shard, ShardOutcome
from hosts.serving.saved import tensorflow

T = TypeVar("T")
ERRORS = "prediction.errors_stats-00000-of-00001"
METRICS = "metrics.json"
_PARTS = ".parts"
_INPUT_FILES = f"{_PARTS}/plan.json"


class BatchError(Exception):
    """No predictions are possible; the message is one line with the reason, and `code` is the exit code."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class PredictionOutput:
    """Access the output folder, which may be in a bucket, such as `gs://name/path`."""

    def __init__(self, folder: str) -> None:
        self._folder = folder.rstrip("/")

    @property
    def _io(self) -> Any:
        return tensorflow().file_io

    def input_files(self) -> list[InputFile] | None:
        """Return the input files, or None if the chief has not inspected them yet."""
        return self._read_list(_INPUT_FILES, InputFile)

    def write_input_files(self, files: Sequence[InputFile]) -> None:
        self._write(_INPUT_FILES, [json.dumps([asdict(file) for file in files]).encode()])

    def counts(self, rank: int) -> list[RecordCount] | None:
        """Return the counts of a replica's shards, or None if it has not counted its records yet."""
        return self._read_list(_counts(rank), RecordCount)

    def write_counts(self, rank: int, counts: Sequence[RecordCount]) -> None:
        self._write(_counts(rank), [json.dumps([asdict(count) for count in counts]).encode()])

    def outcome(self, shard: Shard) -> ShardOutcome:
        """Return the outcome of a shard that is done; FileNotFoundError if it is not."""
        content = self._read(_part(shard))
        if content is None:
            raise FileNotFoundError(f"{self._folder}/{_part(shard)}")
        data = json.loads(content)
        return ShardOutcome(**{**data, "count": RecordCount(**data["count"])})

    def not_done(self, shards: Iterable[Shard]) -> list[Shard]:
        """Return the shards that are not done; an empty list if `.parts` was deleted after the merge."""
        try:
            done = set(self._io.list_directory_v2(f"{self._folder}/{_PARTS}"))
        except tensorflow().errors.NotFoundError:
            return []
        return [shard for shard in shards if _part(shard).rpartition("/")[2] not in done]

    def write_results(self, shard: Shard, lines: Iterable[bytes]) -> None:
        """Write the results of a shard to a file with Cloud ML's name."""
        self._write(f"prediction.results-{shard.number:05d}-of-{shard.total:05d}", lines)

    def write_outcome(self, shard: Shard, outcome: ShardOutcome) -> None:
        """Write the outcome of a shard, which marks it as done; call it after `write_results`.

        If the process is killed in between, the shard is predicted again, with the same result.
        """
        self._write(_part(shard), [json.dumps(asdict(outcome)).encode()])

    @property
    def metrics(self) -> dict[str, int] | None:
        """The counts `instances` and `errors`; None until all shards are merged."""
        content = self._read(METRICS)
        return None if content is None else dict(json.loads(content))

    def finish(self, files: Sequence[InputFile], shards: Sequence[Shard]) -> dict[str, int]:
        """Merge the outcomes of all shards, in their order, and return the counts.

        Results after a damaged place in a file are discarded, because their line and record numbers are unknown.
        BatchError if no instance has a result.
        """
        metrics, records, first_error = {"instances": 0, "errors": 0}, 0, "all input files are empty"

        def errors() -> Iterator[bytes]:
            nonlocal records, first_error
            position = InputPosition()
            for shard in shards:
                path, outcome = files[shard.file].path, self.outcome(shard)
                valid, damage = position.advance(shard, outcome.count)
                if valid:
                    # `position.line` counts the records of the file so far, with this shard's.
                    line, errors = position.line - outcome.count.records, outcome.errors
                    records += outcome.count.records
                    metrics["instances"] += outcome.instances
                else:
                    self.write_results(shard, ())
                    line, errors = position.line, [{"line": 1, "error": damage}] if damage else []
                if errors and not metrics["errors"]:
                    first_error = f"{path} {errors[0]['error']}"
                metrics["errors"] += len(errors)
                for error in errors:
                    report = {"file": path, "line": line + error["line"], "error": error["error"]}
                    yield json.dumps(report, ensure_ascii=False).encode() + b"\n"

        self._write(ERRORS, errors())
        if not metrics["instances"]:
            raise BatchError(f"{'no instance has a prediction' if records else 'nothing could be read'}: {first_error}")
        self._write(METRICS, [json.dumps(metrics).encode()])
        return metrics

    def delete_parts(self) -> None:
        if self._io.file_exists_v2(f"{self._folder}/{_PARTS}"):
            self._io.delete_recursively_v2(f"{self._folder}/{_PARTS}")

    def _read_list(self, name: str, kind: type[T]) -> list[T] | None:
        content = self._read(name)
        return None if content is None else [kind(**each) for each in json.loads(content)]

    def _read(self, name: str) -> bytes | None:
        try:
            with self._io.FileIO(f"{self._folder}/{name}", "rb") as file:
                content: bytes = file.read()
                return content
        except tensorflow().errors.NotFoundError:
            return None

    def _write(self, name: str, pieces: Iterable[bytes]) -> None:
        path, partial = f"{self._folder}/{name}", f"{self._folder}/{_PARTS}/.{name.rpartition('/')[2]}.{os.getpid()}"
        self._io.recursive_create_dir_v2(f"{self._folder}/{_PARTS}")
        with self._io.FileIO(partial, "wb") as file:
            file.write(b"")  # creates the file even if there are no pieces
            for piece in pieces:
                file.write(piece)
        self._io.rename_v2(partial, path, overwrite=True)


def _counts(rank: int) -> str:
    return f"{_PARTS}/counts-{rank}.json"


def _part(shard: Shard) -> str:
    return f"{_PARTS}/{shard.number:05d}.json"
