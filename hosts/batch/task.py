"""`python -m hosts.batch.task`: this process's part of a batch prediction.

Exit codes: 0 done, also where some instances have no result; 1 nothing could be read, or the model is not what was deployed;
2 the call was wrong; 143 the input, or the bucket, could not be reached for a while: to be started again.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from hosts.batch.inputs import InputReader, UnreadableError, looked_at, why
from hosts.batch.library import tensorflow
from hosts.batch.output import PredictionOutput
from hosts.batch.predicting import Predicting, done_of
from hosts.batch.request import Request
from hosts.batch.saved import PredictorModel
from hosts.batch.shards import InputFile, Shard, cut, mine
from hosts.serving.download import fetch
from hosts.serving.rest import SIGNATURE, RestError

_POLL_SECONDS = 0.25
# As a signal would end it.
_AGAIN = 143


class BatchError(Exception):
    """An end without predictions: one line, and the exit code."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m hosts.batch.task", description="Predict a batch.")
    parser.add_argument("--data", required=True, help="the files of the input, as they were asked for")
    parser.add_argument("--model", required=True, help="the folder of the model")
    parser.add_argument("--job-dir", default=os.environ.get("JOB_DIR"), help="the output")
    parser.add_argument("--signature", default=SIGNATURE, help="signature of the model")
    flags = parser.parse_args(arguments)
    if not flags.job_dir:
        parser.error("--job-dir is missing")
    rank, replicas = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    errors = tensorflow().errors
    try:
        _run(Request.of_package(), flags.model, PredictionOutput(flags.job_dir), flags.signature, rank, replicas)
    except BatchError as error:
        return _fail(str(error), error.code)
    except UnreadableError as error:
        return _fail(str(error), _AGAIN if error.passing else 1)
    except (errors.UnavailableError, errors.DeadlineExceededError, errors.AbortedError) as error:
        return _fail(f"the bucket does not answer: {why(error)}", _AGAIN)
    return 0


def _fail(message: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr, flush=True)
    return code


def _run(request: Request, model: str, output: PredictionOutput, signature: str, rank: int, replicas: int) -> None:
    start = time.monotonic()
    if output.metrics is None:
        if rank == 0 and output.plan() is None:
            output.keep_plan([looked_at(path) for path in request.inputs])
        _predict_mine(request, model, output, signature, rank, replicas)
    if rank > 0:
        return
    counts = output.metrics or _summed_up(output, replicas)
    output.tidy()
    seconds = time.monotonic() - start
    _say(f"Predicted {counts['instances']} instances, {counts['errors']} errors ({seconds:.1f} sec)")


def _predict_mine(request: Request, model: str, output: PredictionOutput, signature: str, rank: int, replicas: int) -> None:
    """Predict the shards of this replica that are not done yet."""
    files = _plan(output)
    if files is None:
        return
    if not any(file.count for file in files):
        if rank > 0:
            return
        raise BatchError(f"nothing could be read: {next((f'{f.path} {f.damage}' for f in files if f.damage), 'all is empty')}")
    shards = cut([file.count for file in files], replicas)
    todo = output.not_done(mine(shards, rank, replicas))
    if not todo:
        return
    with tempfile.TemporaryDirectory(prefix="model-") as scratch:
        predicting = _loaded(request, model, signature, Path(scratch))
        reader = InputReader()
        for shard in todo:
            _predict(predicting, reader, output, files[shard.file], shard, len(shards))


def _plan(output: PredictionOutput) -> list[InputFile] | None:
    """Return the counted input files; None if another process finished the job meanwhile."""
    while (files := output.plan()) is None:
        if output.metrics is not None:
            return None
        time.sleep(_POLL_SECONDS)
    return files


def _loaded(request: Request, model: str, signature: str, scratch: Path) -> Predicting:
    file_io, errors = tensorflow().file_io, tensorflow().errors

    def download(path: str, target: Path) -> bool:
        try:
            file_io.copy_v2(f"{model}/{path}", str(target), overwrite=True)
        except errors.NotFoundError:
            return False
        return True

    try:
        fetch(request.files, scratch / "model", download)
        return Predicting(PredictorModel(scratch / "model"), signature)
    except ValueError as error:
        raise BatchError(f"the model in {model} cannot be loaded: {error}") from None
    except RestError as error:
        raise BatchError(str(error), 2) from None


def _predict(
    predicting: Predicting, reader: InputReader, output: PredictionOutput, file: InputFile, shard: Shard, shards: int
) -> None:
    start = time.monotonic()
    errors = list[dict[str, object]]()
    counted = 0

    def results() -> Iterator[bytes]:
        nonlocal counted
        for line in predicting.shard(file, shard, reader.read(file, shard), errors):
            counted += 1
            yield line

    output.keep_results(shard, shards, results())
    outcome = done_of(file, shard.end == file.count, counted, [*errors, *reader.lacking(file, shard)])
    output.keep_done(shard, outcome)
    seconds = time.monotonic() - start
    _say(
        f"Shard {shard.number + 1} of {shards}: {outcome.instances} instances, {len(outcome.errors)} errors ({seconds:.3f} sec)"
    )


def _summed_up(output: PredictionOutput, replicas: int) -> dict[str, int]:
    """Return the counts once every replica has done its part.

    If one does not, the end of the job ends the wait.
    """
    shards = cut([file.count for file in output.plan() or ()], replicas)
    while output.not_done(shards):
        time.sleep(_POLL_SECONDS)
    return output.finish(shards)


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
