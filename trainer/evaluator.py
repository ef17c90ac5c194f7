"""The evaluator: a replica outside the cluster that evaluates each new checkpoint of the job until it is told to end."""

from __future__ import annotations

import signal
import threading
import time

from trainer import checkpoint
from trainer.evaluation import make_evaluate
from trainer.flags import Flags
from trainer.keeper import evaluation_data
from trainer.lines import EvalInterval, eval_line
from trainer.model import make_model
from trainer.runtime import prepare_process, say
from trainer.summaries import Summaries


def run(flags: Flags) -> None:
    """Evaluates until SIGTERM or SIGINT; DataError or CheckpointError where there is nothing to go on with."""
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    prepare_process()
    model = make_model(flags.model, flags.hidden_units)
    files = evaluation_data(flags)
    copy = checkpoint.LocalCopy(model)
    evaluate = make_evaluate(copy.logits, files)
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
            step = copy.restore(checkpoint.Reader(found, model))
        except checkpoint.CheckpointError:
            if checkpoint.latest(flags.job_dir) == found:
                raise
            continue  # it was deleted for a newer one while it was read
        metrics = evaluate()
        say(eval_line(step, metrics.loss, metrics.accuracy))
        summaries.scalars(step, eval__loss=metrics.loss, eval__accuracy=metrics.accuracy)
        summaries.mistakes(step, metrics.mistakes)
        adjusted = interval.record(start, time.monotonic())
        if adjusted:
            say(adjusted)
        seen = found
