"""The evaluator: a replica outside the cluster that evaluates each new checkpoint of the job until it is told to end."""

from __future__ import annotations

import signal
import threading
import time

from scaletier import checkpoint
from scaletier.data import evaluation
from scaletier.evaluation import make_evaluate
from scaletier.flags import Flags
from scaletier.job import Job, JobError
from scaletier.lines import EvalInterval, eval_line
from scaletier.network import Network
from scaletier.runtime import prepare_process, say
from scaletier.summaries import Summaries


def run(job: Job, flags: Flags) -> None:
    """Evaluates until SIGTERM or SIGINT; DataError, JobError or CheckpointError where there is nothing to go on with."""
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    prepare_process()
    if job.eval_data is None:
        raise JobError("the job has no eval_data for an evaluator: pass Job(eval_data=…), or take a cluster without one")
    batches = evaluation(job.eval_data)
    network = Network(job, batches.element_spec, flags.seed)
    copy = checkpoint.LocalCopy(network)
    evaluate = make_evaluate(network, copy.outputs, batches.once(), job.inspector)
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
            step = copy.restore(checkpoint.Reader(found, network))
        except checkpoint.CheckpointError:
            if checkpoint.latest(flags.job_dir) == found:
                raise
            continue  # it was deleted for a newer one while it was read
        metrics = evaluate()
        say(eval_line(step, metrics.loss, metrics.metrics))
        summaries.scalars(step, {"eval/loss": metrics.loss, **{f"eval/{name}": x for name, x in metrics.metrics.items()}})
        if metrics.inspector:
            metrics.inspector.done(step, {"loss": metrics.loss, **metrics.metrics}, summaries, flags.job_dir, False)
        adjusted = interval.record(start, time.monotonic())
        if adjusted:
            say(adjusted)
        seen = found
