"""Run one replica's part of a batch prediction: `python -m hosts.batch.task`.

Exit codes: 0: done, even if some instances have no result. 1: no instance has a result, the model is not the deployed one, or
TensorFlow failed, for example without enough memory or disk space. 2: the command line is invalid. 143: the input or the
bucket did not answer for a while; start the task again.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hosts.batch.inference import ShardPredictor
from hosts.batch.inputs import InputReader, UnreadableError, error_line, inspect_file
from hosts.batch.output import BatchError, PredictionOutput
from hosts.batch.shards import InputFile, InputPosition, RecordCount, Shard, ShardOutcome, cut, shards_of
from hosts.serving.rest import SIGNATURE, RestError
from hosts.serving.saved import SavedModel, tensorflow
from jobs.batch_request import RESTART_EXIT, Request
from jobs.model_download import fetch

T = TypeVar("T")
_POLL_SECONDS = 0.25


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hosts.batch.task", description="Predict a batch.")
    parser.add_argument("--data", required=True, help="the input files as the user gave them")
    parser.add_argument("--model", required=True, help="the folder of the model")
    parser.add_argument("--job-dir", default=os.environ.get("JOB_DIR"), help="the output")
    parser.add_argument("--signature", default=SIGNATURE, help="signature of the model")
    flags = parser.parse_args(arguments)
    if not flags.job_dir:
        parser.error("--job-dir is missing")
    rank, replicas = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    errors = tensorflow().errors
    try:
        BatchTask(Request.from_package(), flags.model, PredictionOutput(flags.job_dir), flags.signature, rank, replicas).run()
    except BatchError as error:
        return _fail(str(error), error.code)
    except UnreadableError as error:
        return _fail(str(error), RESTART_EXIT if error.temporary else 1)
    except (errors.UnavailableError, errors.DeadlineExceededError, errors.AbortedError) as error:
        return _fail(f"the bucket does not answer: {error_line(error)}", RESTART_EXIT)
    except errors.OpError as error:
        return _fail(f"TensorFlow cannot continue: {error_line(error)} ({type(error).__name__})", 1)
    return 0


def _fail(message: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr, flush=True)
    return code


@dataclass(frozen=True)
class BatchTask:
    """Do a replica's part of a batch prediction; the chief, rank 0, also inspects the files and merges the outcomes."""

    request: Request
    model: str
    output: PredictionOutput
    signature: str
    rank: int
    replicas: int

    def run(self) -> None:
        """Predict this replica's shards, except those that an earlier run has done; the chief also finishes the output."""
        start = time.monotonic()
        output = self.output
        if output.metrics is None:
            if self.rank == 0 and output.input_files() is None:
                output.write_input_files([inspect_file(path) for path in self.request.inputs])
            if files := self._wait_for(output.input_files):
                shards = cut(files, self.replicas)
                self._predict_all(files, shards)
                if self.rank == 0:
                    self._wait_for(lambda: not output.not_done(shards))
                    output.finish(files, shards)
        if self.rank == 0 and (metrics := output.metrics):
            output.delete_parts()
            seconds = time.monotonic() - start
            print(f"Predicted {metrics['instances']} instances, {metrics['errors']} errors ({seconds:.1f} sec)", flush=True)

    def _wait_for(self, read: Callable[[], T | None]) -> T | None:
        """Wait until another replica has written what `read` returns, and return it; None if the batch is finished.

        There is no timeout: the wait ends only with the job.
        """
        while not (value := read()):
            if self.output.metrics is not None:
                return None
            time.sleep(_POLL_SECONDS)
        return value

    def _predict_all(self, files: Sequence[InputFile], shards: Sequence[Shard]) -> None:
        """Predict the shards of this replica that are not done yet."""
        own = shards_of(shards, self.rank, self.replicas)
        todo = self.output.not_done(own)
        if not todo:
            return
        with tempfile.TemporaryDirectory(prefix="model-") as scratch:
            predictor = self._load(Path(scratch))
            needs_keys = predictor.takes_key and any(file.records for file in files)
            keys = self._count(files, shards) if needs_keys and self.replicas > 1 else None
            reader, position = InputReader(), InputPosition()
            for shard in own:
                if shard in todo:
                    key = keys[shard.number] if keys else position.key
                    outcome = self._predict(predictor, reader, files[shard.file], shard, key)
                    self.output.write_outcome(shard, outcome)
                else:
                    outcome = self.output.outcome(shard)
                position.advance(shard, outcome.count)

    def _count(self, files: Sequence[InputFile], shards: Sequence[Shard]) -> list[int]:
        """Return the number of each shard's first record in the whole input, counting only this replica's shards itself."""
        if self.output.counts(self.rank) is None:
            reader, counts = InputReader(), list[RecordCount]()
            for shard in shards_of(shards, self.rank, self.replicas):
                for _ in reader.read(files[shard.file], shard):
                    pass
                counts.append(reader.count)
            self.output.write_counts(self.rank, counts)
        ranks = range(min(self.replicas, len(shards)))
        by_rank = [self._wait_for(partial(self.output.counts, rank)) or [] for rank in ranks]
        position, keys = InputPosition(), list[int]()
        for shard in shards:
            keys.append(position.key)
            position.advance(shard, by_rank[shard.number % self.replicas][shard.number // self.replicas])
        return keys

    def _load(self, scratch: Path) -> ShardPredictor:
        """Download the model to a temporary folder and load it."""
        file_io, errors = tensorflow().file_io, tensorflow().errors

        def download(path: str, target: Path) -> bool:
            try:
                file_io.copy_v2(f"{self.model}/{path}", str(target))
            except errors.NotFoundError:
                return False
            return True

        try:
            fetch(self.request.model_digests, scratch / "model", download)
            saved = SavedModel(scratch / "model")
            return ShardPredictor(saved.run, saved.signatures, self.signature)
        except ValueError as error:
            raise BatchError(f"the model in {self.model} cannot be loaded: {error}") from None
        except RestError as error:
            raise BatchError(str(error), 2) from None

    def _predict(self, predictor: ShardPredictor, reader: InputReader, file: InputFile, shard: Shard, key: int) -> ShardOutcome:
        """Predict a shard, whose first record has the number `key`, write its results, and return its outcome."""
        start = time.monotonic()
        errors = list[dict[str, Any]]()
        instances = 0

        def results() -> Iterator[bytes]:
            nonlocal instances
            for line in predictor.predict(reader.read(file, shard), not file.records, key, errors):
                instances += 1
                yield line

        self.output.write_results(shard, results())
        count = reader.count
        if count.damage:
            errors.append({"line": count.records + 1, "error": count.damage})
        seconds = time.monotonic() - start
        number = f"{shard.number + 1} of {shard.total}"
        print(f"Shard {number}: {instances} instances, {len(errors)} errors ({seconds:.3f} sec)", flush=True)
        return ShardOutcome(count, instances, errors)


if __name__ == "__main__":
    sys.exit(main())
