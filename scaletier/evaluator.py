"""The evaluator: a replica outside the cluster that evaluates each new checkpoint until it is stopped."""

from __future__ import annotations

import signal
import threading
import time

from scaletier import checkpoint
from scaletier.data import evaluation
from scaletier.evaluation import make_evaluate
from scaletier.flags import Flags
from scaletier.job import Job
from scaletier.lines import EvalInterval, eval_line
from scaletier.network import FunctionalModel
from scaletier.runtime import prepare_process, say
from scaletier.summaries import Summaries


def run(job: Job, flags: Flags, index: int) -> None:
    """Evaluate until SIGTERM or SIGINT.

    Each of several evaluators has its own summaries, by its index.

    Raises:
        DataError, JobError or CheckpointError: it cannot continue.
    """
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    if job.eval_data is None:
        say(f"Idle [evaluator/{index}]: the job has no eval_data; this one waits for the job's end")
        stopped.wait()
        return
    prepare_process()
    batches = evaluation(job.eval_data)
    network = FunctionalModel(job, batches.element_spec, flags.seed)
    copy = checkpoint.LocalCopy(network)
    evaluate = make_evaluate(network, copy, batches.once(), job.inspector)
    summaries = Summaries(f"{flags.job_dir}/evaluator{f'-{index}' if index else ''}")
    interval = EvalInterval(flags.eval_interval)
    say(f"Started [evaluator/{index}], waits for checkpoints in {checkpoint.directory(flags.job_dir)}")
    evaluated = None
    while not stopped.wait(min(interval.seconds, 1.0)):
        path = checkpoint.latest(flags.job_dir)
        if path is None or path == evaluated or not interval.due(time.monotonic()):
            continue
        start = time.monotonic()
        try:
            step = copy.restore(checkpoint.CheckpointReader(path, network))
        except checkpoint.CheckpointReadError as error:
            if checkpoint.latest(flags.job_dir) == path:  # else it was deleted for a newer one while it was read
                say(f"{error}; waits for the next one")
                evaluated = path
            continue
        measured = evaluate(stopped.is_set)
        if measured is None:
            break
        say(eval_line(step, measured.loss, measured.metrics))
        measured.tell(step, summaries, flags.job_dir)
        adjusted = interval.record(start, time.monotonic())
        if adjusted:
            say(adjusted)
        evaluated = path
