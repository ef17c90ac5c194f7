"""The output folder: results, errors, metrics, and the progress, each file written atomically.

| file | content |
|---|---|
| `prediction.results-00000-of-00020` | a line for each instance of a shard |
| `prediction.errors_stats-00000-of-00001` | a line for each instance without a result |
| `metrics.json` | the numbers of both; it comes last |
| `.parts/plan.json` | the input files, by the chief |
| `.parts/counts-0.json` | record counts of a replica's shards, if the model takes record numbers |
| `.parts/00000.json` | the outcome of a shard that is done |
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from hosts.batch.shards import Count, InputFile, Shard, ShardOutcome, Tally
from hosts.serving.saved import tensorflow

T = TypeVar("T")
ERRORS = "prediction.errors_stats-00000-of-00001"
METRICS = "metrics.json"
_PARTS = ".parts"
_PLAN = f"{_PARTS}/plan.json"


class BatchError(Exception):
    """An end without predictions: one line, and the exit code."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class PredictionOutput:
    """A folder, of a file system or of a bucket such as `gs://name/path`."""

    def __init__(self, folder: str) -> None:
        self._folder = folder.rstrip("/")

    @property
    def _io(self) -> Any:
        return tensorflow().file_io

    def plan(self) -> list[InputFile] | None:
        """Return the input files, or None if the chief has not inspected them yet."""
        return self._read_list(_PLAN, InputFile)

    def keep_plan(self, files: Sequence[InputFile]) -> None:
        self._write(_PLAN, [json.dumps([asdict(file) for file in files]).encode()])

    def counts(self, rank: int) -> list[Count] | None:
        """Return the records of a replica's shards, or None if it has not counted them yet."""
        return self._read_list(_counts(rank), Count)

    def keep_counts(self, rank: int, counts: Sequence[Count]) -> None:
        self._write(_counts(rank), [json.dumps([asdict(count) for count in counts]).encode()])

    def done(self, shard: Shard) -> ShardOutcome:
        """Return the outcome of a shard that is done."""
        content = self._read(_part(shard))
        if content is None:
            raise FileNotFoundError(f"{self._folder}/{_part(shard)}")
        data = json.loads(content)
        return ShardOutcome(**{**data, "count": Count(**data["count"])})

    def not_done(self, shards: Iterable[Shard]) -> list[Shard]:
        """Return the shards to do; none if all were done and merged."""
        try:
            there = set(self._io.list_directory_v2(f"{self._folder}/{_PARTS}"))
        except tensorflow().errors.NotFoundError:
            return []
        return [shard for shard in shards if _part(shard).rpartition("/")[2] not in there]

    def keep_results(self, shard: Shard, lines: Iterable[bytes]) -> None:
        """Write the results of a shard; the name is as in Cloud ML."""
        self._write(f"prediction.results-{shard.number:05d}-of-{shard.total:05d}", lines)

    def keep_done(self, shard: Shard, done: ShardOutcome) -> None:
        """Record a shard as done; call it after `keep_results`.

        If the process is killed in between, the shard is done again, with the same result.
        """
        self._write(_part(shard), [json.dumps(asdict(done)).encode()])

    @property
    def metrics(self) -> dict[str, int] | None:
        """Counts of `instances` and `errors`, once all is done."""
        content = self._read(METRICS)
        return None if content is None else dict(json.loads(content))

    def finish(self, files: Sequence[InputFile], shards: Sequence[Shard]) -> dict[str, int]:
        """Merge the outcomes of all shards, in their order, and return the counts.

        Results behind damage are dropped: their line and record numbers are unknown.

        Raises:
            BatchError: no file has a record.
        """
        metrics, records, first = {"instances": 0, "errors": 0}, 0, "all is empty"

        def errors() -> Iterator[bytes]:
            nonlocal records, first
            tally = Tally()
            for shard in shards:
                path, outcome = files[shard.file].path, self.done(shard)
                valid, damage = tally.add(shard, outcome.count)
                if valid:
                    line, errors = tally.line - outcome.count.records, outcome.errors
                    records += outcome.count.records
                    metrics["instances"] += outcome.instances
                else:
                    self.keep_results(shard, ())
                    line, errors = tally.line, [{"line": 1, "error": damage}] if damage else []
                if errors and not metrics["errors"]:
                    first = f"{path} {errors[0]['error']}"
                metrics["errors"] += len(errors)
                for error in errors:
                    whole = {"file": path, "line": line + error["line"], "error": error["error"]}
                    yield json.dumps(whole, ensure_ascii=False).encode() + b"\n"

        self._write(ERRORS, errors())
        if not records:
            raise BatchError(f"nothing could be read: {first}")
        self._write(METRICS, [json.dumps(metrics).encode()])
        return metrics

    def tidy(self) -> None:
        """Delete the intermediate files."""
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
        path, part = f"{self._folder}/{name}", f"{self._folder}/{_PARTS}/.{name.rpartition('/')[2]}.{os.getpid()}"
        self._io.recursive_create_dir_v2(f"{self._folder}/{_PARTS}")
        with self._io.FileIO(part, "wb") as file:
            file.write(b"")  # creates the file even if there are no pieces
            for piece in pieces:
                file.write(piece)
        self._io.rename_v2(part, path, overwrite=True)


def _counts(rank: int) -> str:
    return f"{_PARTS}/counts-{rank}.json"


def _part(shard: Shard) -> str:
    return f"{_PARTS}/{shard.number:05d}.json"
