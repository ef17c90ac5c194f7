"""Batch predictions: the time of a job against one process that predicts the same."""

from __future__ import annotations

import shlex
import time
from functools import cache, partial
from pathlib import Path

from benchmarks.jobs import upload_data
from benchmarks.measure import MeasureError
from benchmarks.registry import Figure, benchmark, in_turn
from benchmarks.serving import MODEL, deployed, stop_server
from benchmarks.stack import BenchStack, job_id, say
from infra.scale_tiers import ScaleTier
from jobs.paths import PYTHON

_HOST = "master-0"
_TEST = "test-00000-of-00001.tfrecord"
_TIMES = {1: 5, 10: 3}
_NOT_EQUAL = (
    "TensorFlow, tf.data, the model, orjson into one file, by ssh on the master. Not equal: ours is a job with a queue, a log, "
    "restarts and results by shard, and checks the model's hashes; the peer takes the model from where it lies"
)


@cache
def _input(stack: BenchStack, copies: int) -> str:
    """Put copies of MNIST's 10,000 test images into the bucket, and return their pattern."""
    upload_data(stack.require(ScaleTier.STANDARD_1))
    folder = f"/bucket/data/bench{copies}"
    copy = f"for n in $(seq {copies}); do cp /bucket/data/mnist/{_TEST} {folder}/part-$n.tfrecord; done"
    stack.on(_HOST, f"mkdir -p {folder} && {copy}")
    return f"{folder}/*.tfrecord"


def _batch(stack: BenchStack, copies: int) -> Figure:
    folder = deployed(stack)
    stop_server(stack)
    pattern = _input(stack, copies)

    def ours() -> float:
        say(f"a batch of {copies} times 10,000")
        job = job_id("batch")
        output = ("--output", f"/bucket/predictions/{job}")
        return stack.fab("predict", MODEL, "--batch", "--input", pattern, *output, "--job", job).seconds

    return in_turn(_TIMES[copies], ours, lambda: _one_process(stack, folder, pattern, copies))


def _one_process(stack: BenchStack, folder: str, pattern: str, copies: int) -> float:
    line = f"env TF_CPP_MIN_LOG_LEVEL=3 {PYTHON} - {shlex.quote(folder)} /tmp/predicted {pattern}"
    program = Path(__file__).with_name("batch_once.py").read_bytes()
    began = time.monotonic()
    out = stack.on(_HOST, line, program)
    seconds = time.monotonic() - began
    if out.split() != [str(copies * 10_000)]:
        raise MeasureError(f"one process predicted {out.strip()} of {copies} times 10,000")
    return seconds


for _copies, _bar, _aim in ((1, 1.3, 1.05), (10, 1.0, 0.8)):
    # Of 10,000 most is the start, of fab and TensorFlow; of 100,000 the predictions, and the replicas share all processors.
    benchmark(
        f"batch-{_copies * 10_000}",
        what=f"seconds of `fab predict --batch` of {_copies * 10_000:,} of MNIST's test images, 10,000 a file (cnn, "
        f"STANDARD_1); medians of {_TIMES[_copies]}",
        against=f"one process: {_NOT_EQUAL}",
        bar=_bar,
        aim=_aim,
    )(partial(_batch, copies=_copies))
