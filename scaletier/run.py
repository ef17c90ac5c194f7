"""`run(JOB)`: this process's part of a training job, whichever task of the cluster it is.

Exit codes: 0 done; 1 the training failed for good; 2 the call or the job was wrong; RETRY_EXIT_CODE the job should go on from
its last checkpoint, because a host was lost or this one was told to end.
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from scaletier.cluster import Cluster, ClusterError, parse, unfit
from scaletier.flags import Flags, flags_of
from scaletier.flags import parse as parse_flags
from scaletier.job import Job, JobError

# SIGTERM's: the process ends by that signal, which is not the program's fault to whoever supervises it, as a code would be.
RETRY_EXIT_CODE = 128 + signal.SIGTERM
_INTERRUPT_EXIT_CODE = 130


def run(job: Job, arguments: argparse.Namespace | Sequence[str] | None = None) -> NoReturn:
    """Train, or serve the chief, and end the process with its exit code.

    `arguments` are a namespace of `scaletier.parser()`, words to parse, or sys.argv's by default. The threads of a cluster's
    coordinator can abort the interpreter while it shuts down, which would read as a kill: so nothing runs after this.
    """
    leave(code_of(job, _flags(arguments)))


def code_of(job: Job, flags: Flags) -> int:
    """The exit code of this process's part of a job, whatever ends it."""
    try:
        return train(job, flags)
    except KeyboardInterrupt:
        return _INTERRUPT_EXIT_CODE
    except Exception:  # noqa: BLE001 - shown as Python shows it, and then not lost
        traceback.print_exc()
        return 1


def leave(code: int) -> NoReturn:
    """End the process at once by an exit code."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code == RETRY_EXIT_CODE:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        signal.raise_signal(signal.SIGTERM)
    os._exit(code)


def main(job: Job, arguments: argparse.Namespace | Sequence[str] | None = None) -> int:
    """Run the job like `run`, but return the exit code. An error of the program itself is raised."""
    return train(job, _flags(arguments))


def train(job: Job, flags: Flags) -> int:
    """Take this process's part in a job; the exit code. An error of the program itself is raised."""
    try:
        cluster = parse(os.environ.get("TF_CONFIG"))
    except ClusterError as error:
        return fail(str(error), 2)
    problem = unfit(cluster, flags.strategy)
    if problem:
        return fail(problem, 2)
    if cluster.task_type == "ps" and flags.strategy != "async":
        from scaletier.server import idle

        return idle(cluster, flags.strategy)
    if cluster.task_type == "ps" or (cluster.task_type == "worker" and flags.strategy != "sync"):
        from scaletier.server import serve

        try:
            serve(cluster, flags.allow_cpu)
        except JobError as error:
            return fail(str(error), 2)
    return _train(job, flags, cluster)


def _train(job: Job, flags: Flags, cluster: Cluster) -> int:
    # Only here, so that a parameter server or a worker starts without TensorFlow's Python; first what says that there is none.
    from scaletier.runtime import import_tensorflow, one_line

    errors = import_tensorflow().errors

    from scaletier.checkpoint import CheckpointError
    from scaletier.chief import PreemptedError
    from scaletier.data import DataError, batch_errors
    from scaletier.local_steps import DivergedError
    from scaletier.private import check_keras, is_lost_host

    try:
        check_keras()
        if job.callbacks and cluster.task_type == "chief":
            job.callbacks.check()
        _runner(job, flags, cluster)()
    except (JobError, DataError, CheckpointError) as error:
        return fail(str(error), 2)
    except DivergedError as error:
        return fail(str(error), 1)
    except PreemptedError as error:
        return fail(str(error), RETRY_EXIT_CODE)
    except errors.OpError as error:
        if is_lost_host(error) and cluster.jobs:
            return fail(f"a host of the cluster is lost: {one_line(error)}", RETRY_EXIT_CODE)
        if is_lost_host(error) and not isinstance(error, errors.InternalError):
            return fail(f"a service that the job uses does not answer: {one_line(error)}", RETRY_EXIT_CODE)
        if isinstance(error, errors.DataLossError):
            return _blamed(job, error, "the job's data is damaged")
        if isinstance(error, batch_errors()):
            return _blamed(job, error, "a batch of the job cannot be had, or does not go through its model")
        raise  # an error of this host's own
    return 0


def _blamed(job: Job, error: Exception, what: str) -> int:
    """Report a failure caused by the data, with the job's own explanation if there is one."""
    from scaletier.runtime import one_line

    explanation = job.explain(error) if job.explain else None
    return fail(explanation or f"{what}: {one_line(error)}", 2)


def export(job: Job, arguments: argparse.Namespace | Sequence[str] | None = None) -> int:
    """Export the newest checkpoint in --job-dir and print the path; return 0, or 2 without a checkpoint.

    It is for a job that ended before its export; the checkpoint must be of this job's model.
    """
    flags = _flags(arguments)

    from scaletier.runtime import import_tensorflow

    errors = import_tensorflow().errors

    from scaletier.checkpoint import CheckpointError
    from scaletier.data import DataError
    from scaletier.savedmodel import export_latest

    try:
        print(export_latest(job, flags.job_dir, flags.seed), flush=True)
    except (JobError, DataError, CheckpointError) as error:
        return fail(str(error), 2)
    except errors.DataLossError as error:
        return _blamed(job, error, "the job's data is damaged")
    return 0


def _flags(arguments: argparse.Namespace | Sequence[str] | None) -> Flags:
    return flags_of(arguments) if isinstance(arguments, argparse.Namespace) else parse_flags(arguments)


def _runner(job: Job, flags: Flags, cluster: Cluster) -> Callable[[], None]:
    """Return this task's function until its end; a strategy is imported only if it is used."""
    if cluster.task_type == "evaluator":
        from scaletier import evaluator

        return functools.partial(evaluator.run, job, flags, cluster.task_index)
    if flags.strategy == "sync":
        from scaletier.synchronous import Synchronous

        return Synchronous(job, flags, cluster).run
    if flags.strategy == "model-parallel":
        from scaletier.pipeline import ModelParallel

        return ModelParallel(job, flags, cluster).run
    from scaletier.asynchronous import Asynchronous

    return Asynchronous(job, flags, cluster).run


def fail(message: str, code: int) -> int:
    """Print an error as one line on stderr; the exit code."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    return code
