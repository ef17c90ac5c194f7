"""The evaluator: a replica outside the cluster that evaluates each new checkpoint of the job until it is told to end."""

from __future__ import annotations

import signal
import threading
import time

from trainer import checkpoint
from trainer.corrupt import segments
from trainer.data import check, find_files
from trainer.evaluation import make_evaluate
from trainer.flags import Flags
from trainer.lines import EvalInterval, eval_line
from trainer.model import MODELS
from trainer.runtime import say, set_threads
from trainer.summaries import Summaries


def run(flags: Flags) -> None:
    """Evaluates until SIGTERM or SIGINT; DataError or CheckpointError where there is nothing to go on with."""
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    set_threads()
    model = MODELS[flags.model]
    files = segments(find_files(flags.eval_data, "test"), flags.skip_corrupt_records)
    check(files, 1)
    copy = checkpoint.LocalCopy(model, flags.job_dir, flags.keep_checkpoints)
    evaluate = make_evaluate(lambda images: model.logits(copy.variables, images, False), files)
    summaries = Summaries(f"{flags.job_dir}/evaluator")
    interval = EvalInterval(flags.eval_interval)
    say(f"Started [evaluator/0], waits for checkpoints in {checkpoint.directory(flags.job_dir)}")
    seen = None
    while not stopped.wait(min(interval.seconds, 1.0)):
        found = checkpoint.latest(flags.job_dir)
        if found is None or found == seen or not interval.due(time.monotonic()):
            continue
        start = time.monotonic()
        try:
            values, step = checkpoint.read(found, model)
        except checkpoint.CheckpointError:
            if checkpoint.latest(flags.job_dir) == found:
                raise
            continue  # it was deleted for a newer one while it was read
        copy.assign(values, step)
        metrics = evaluate()
        say(eval_line(step, metrics.loss, metrics.accuracy))
        summaries.scalars(step, eval__loss=metrics.loss, eval__accuracy=metrics.accuracy)
        summaries.mistakes(step, metrics.mistakes)
        adjusted = interval.record(start, time.monotonic())
        if adjusted:
            say(adjusted)
        seen = found
