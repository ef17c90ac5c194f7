"""The output folder: results, errors, metrics, and the progress, each file written atomically.

| file | what | |---|---| | `prediction.results-00000-of-00020` | a line for each instance of a shard | |
`prediction.errors_stats-00000-of-00001` | a line for each instance without a result | | `metrics.json` | how many of both; it
comes last | | `.parts/plan.json`, `.parts/00000.json` | how the input is cut, and which shards are done; gone at the end |
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from typing import Any

from hosts.batch.library import tensorflow
from hosts.batch.shards import Done, InputFile, Shard, plan_from_json, plan_to_json

ERRORS = "prediction.errors_stats-00000-of-00001"
METRICS = "metrics.json"
_PARTS = ".parts"
_PLAN = f"{_PARTS}/plan.json"


def results(shard: int, shards: int) -> str:
    """Return the name of a shard's results, as in Cloud ML."""
    return f"prediction.results-{shard:05d}-of-{shards:05d}"


class PredictionOutput:
    """A folder, of a file system or of a bucket such as `gs://name/path`."""

    def __init__(self, folder: str) -> None:
        self._folder = folder.rstrip("/")

    @property
    def _io(self) -> Any:
        return tensorflow().file_io

    def plan(self) -> list[InputFile] | None:
        """Return the counted input files, or None if they are not counted yet."""
        content = self._read(_PLAN)
        return None if content is None else plan_from_json(content)

    def keep_plan(self, files: Sequence[InputFile]) -> None:
        self._write(_PLAN, [plan_to_json(files)])

    def done(self, shard: Shard) -> Done | None:
        """Return the outcome of a shard, or None while it is not done."""
        content = self._read(_part(shard))
        return None if content is None else Done.from_json(content)

    def not_done(self, shards: Iterable[Shard]) -> list[Shard]:
        """Return the shards to do; none if all were done and merged."""
        try:
            there = set(self._io.list_directory_v2(f"{self._folder}/{_PARTS}"))
        except tensorflow().errors.NotFoundError:
            return []
        return [shard for shard in shards if _part(shard).rpartition("/")[2] not in there]

    def keep_results(self, shard: Shard, shards: int, lines: Iterable[bytes]) -> None:
        self._write(results(shard.number, shards), lines)

    def keep_done(self, shard: Shard, done: Done) -> None:
        """Record a shard as done; call it after `keep_results`.

        If the process is killed in between, the shard is done again, with the same result.
        """
        self._write(_part(shard), [done.to_json()])

    @property
    def metrics(self) -> dict[str, int] | None:
        """Counts of `instances` and `errors`, once all is done."""
        content = self._read(METRICS)
        return None if content is None else dict(json.loads(content))

    def finish(self, shards: Sequence[Shard]) -> dict[str, int]:
        """Put together what became of all the shards, in their order; the counts."""
        counts = {"instances": 0, "errors": 0}

        def errors() -> Iterable[bytes]:
            for shard in shards:
                outcome = self.done(shard)
                if outcome is None:
                    raise FileNotFoundError(f"{self._folder}/{_part(shard)}")
                counts["instances"] += outcome.instances
                counts["errors"] += len(outcome.errors)
                yield from (json.dumps(error, ensure_ascii=False).encode() + b"\n" for error in outcome.errors)

        self._write(ERRORS, errors())
        self._write(METRICS, [json.dumps(counts).encode()])
        return counts

    def tidy(self) -> None:
        """Forget what is of no use any more."""
        if self._io.file_exists_v2(f"{self._folder}/{_PARTS}"):
            self._io.delete_recursively_v2(f"{self._folder}/{_PARTS}")

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
            file.write(b"")  # without a byte, too, it is to be there
            for piece in pieces:
                file.write(piece)
        self._io.rename_v2(part, path, overwrite=True)


def _part(shard: Shard) -> str:
    return f"{_PARTS}/{shard.number:05d}.json"
