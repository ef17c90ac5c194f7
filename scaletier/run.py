"""Run this process's task of a training job: chief, worker, parameter server or evaluator."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from scaletier.exit import RETRY_EXIT_CODE, exit_process, print_failure, print_lost_host
from scaletier.flags import Flags, flags_of
from scaletier.job import DataError, Job, JobError
from scaletier.private import check_keras, is_lost_host, server_library
from scaletier.tensorflow_setup import (
    ACCELERATOR,
    cpu_devices,
    give_memory_back_on_growth,
    import_tensorflow,
    one_line,
    prepare_process,
    reuse_memory,
    say,
    say_device,
    thread_counts,
)
from scaletier.tf_config import Cluster, ClusterError, cluster, strategy_problem

_INTERRUPT_EXIT_CODE = 130


def run(job: Job, arguments: argparse.Namespace | Sequence[str] | None = None) -> NoReturn:
    """Run this process's part of a job, and end the process.

    The exit code is 0 if the part is done, 1 if training failed, 2 if the call or the job is invalid. SIGTERM ends the process
    if the job should resume from its last checkpoint. No code runs after this call: the threads of a cluster's coordinator can
    abort the interpreter while it shuts down, which would look like a kill.

    Args:
        job: the job.
        arguments: a namespace of `scaletier.parser()`, or a list of command-line arguments. Default: those of the process.

    Raises:
        SystemExit: the arguments are invalid, or TensorFlow is not installed.
    """
    exit_process(run_to_exit_code(job, flags_of(arguments)))


def run_to_exit_code(job: Job, flags: Flags) -> int:
    """Run this process's part of a job; return the exit code also after an interrupt or an error of the program."""
    try:
        return train(job, flags)
    except KeyboardInterrupt:
        return _INTERRUPT_EXIT_CODE
    except Exception:  # noqa: BLE001 - printed as Python prints an uncaught one
        traceback.print_exc()
        return 1


def main(job: Job, arguments: argparse.Namespace | Sequence[str] | None = None) -> int:
    """Run this process's part of a job.

    Args:
        job: the job.
        arguments: a namespace of `scaletier.parser()`, or a list of command-line arguments. Default: those of the process.

    Returns:
        The exit code, as in `run`; 143 if the job should resume.

    Raises:
        Exception: an error of the program itself.
        SystemExit: the arguments are invalid, or TensorFlow is not installed.
    """
    return train(job, flags_of(arguments))


def train(job: Job, flags: Flags) -> int:
    """Run this process's part of a job; return the exit code. An error of the program itself is raised."""
    try:
        task = cluster()
        if problem := strategy_problem(task, flags.strategy):
            return print_failure(problem, 2)
        if task.task_type == "ps" and flags.strategy != "async":
            say(f"Idle [{task.name}]: strategy {flags.strategy} needs no parameter servers; this one waits for the job's end")
            signal.sigwait({signal.SIGTERM, signal.SIGINT})
            return 0
        if task.task_type == "ps" or (task.task_type == "worker" and flags.strategy != "sync"):
            _serve(task, flags.allow_cpu)
    except (ClusterError, JobError) as error:
        return print_failure(str(error), 2)

    return _catch_errors(job, task, lambda: _perform(job, flags, task))


def _serve(task: Cluster, allow_cpu: bool) -> NoReturn:
    """Run a parameter server or a worker, which executes the chief's requests until SIGTERM; it has nothing to save."""
    if os.environ.get(ACCELERATOR):  # else the tensorflow package need not be imported
        say_device(allow_cpu)
    reuse_memory()
    server_class, config_class = server_library()
    intra_op, inter_op = thread_counts()
    server = server_class(
        {job: list(addresses) for job, addresses in task.jobs.items()},
        job_name=task.task_type,
        task_index=task.task_index,
        protocol="grpc",
        config=config_class(
            intra_op_parallelism_threads=intra_op,
            inter_op_parallelism_threads=inter_op,
            device_count={"CPU": cpu_devices()},
        ),
    )
    work = "serves variables" if task.task_type == "ps" else "waits for the master's steps"
    say(f"Started [{task.name}] on {task.address}, {work}")
    give_memory_back_on_growth()
    server.join()
    raise SystemExit(0)


def _perform(job: Job, flags: Flags, task: Cluster) -> None:
    """Evaluate or train until the end of the task; a strategy is imported only if it is used."""
    prepare_process()
    if task.task_type == "evaluator":
        from scaletier.evaluation import run_evaluator

        run_evaluator(job, flags, task.task_index)
        return
    if job.callbacks and task.task_type == "chief":
        job.callbacks.check()
    if flags.strategy == "sync":
        from scaletier.synchronous import Synchronous as Strategy
    elif flags.strategy == "model-parallel":
        from scaletier.pipeline import ModelParallel as Strategy  # type: ignore[assignment]
    else:
        from scaletier.asynchronous import Asynchronous as Strategy  # type: ignore[assignment]
    Strategy(job, flags, task).run()


def export(job: Job, arguments: argparse.Namespace | Sequence[str] | None = None) -> int:
    """Export the newest checkpoint in --job-dir as a SavedModel.

    Args:
        job: the job, which trained in another process.
        arguments: a namespace of `scaletier.parser()`, or a list of command-line arguments. Default: those of the process.

    Returns:
        The exit code: 0, or 2 if the job is invalid or has no readable checkpoint.

    Raises:
        SystemExit: the arguments are invalid, or TensorFlow is not installed.
    """
    flags = flags_of(arguments)

    def work() -> None:
        from scaletier.savedmodel import export_latest

        say(export_latest(job, flags.job_dir, flags.seed))

    return _catch_errors(job, Cluster(), work)


def _catch_errors(job: Job, task: Cluster, work: Callable[[], None]) -> int:
    """Run `work`, which uses TensorFlow; return the exit code. Print one line for an error that is not the program's own."""
    errors = import_tensorflow().errors  # before the imports below, to report a missing TensorFlow in one line
    try:
        check_keras()
    except JobError as error:
        return print_failure(str(error), 2)

    from scaletier.checkpoint import CheckpointError
    from scaletier.data import batch_errors
    from scaletier.loop import DivergedError, PreemptedError

    try:
        work()
    except (JobError, DataError, CheckpointError) as error:
        return print_failure(str(error), 2)
    except DivergedError as error:
        return print_failure(str(error), 1)
    except PreemptedError as error:  # no `error:`, as the job may have been cancelled
        print(error, file=sys.stderr, flush=True)
        return RETRY_EXIT_CODE
    except errors.OpError as error:
        if is_lost_host(error) and task.jobs:
            return print_lost_host(error)
        if is_lost_host(error) and not isinstance(error, errors.InternalError):
            return print_failure(f"a service that the job uses does not answer: {one_line(error)}", RETRY_EXIT_CODE)
        if isinstance(error, errors.DataLossError):
            what = "the job's data is damaged"
        elif not isinstance(error, batch_errors()):
            raise  # an error of this host's own
        elif "trying to compile graph" in str(error):  # TensorFlow's words
            what = "XLA cannot compile a step of the model; valid is model.compile(…, jit_compile=False)"
        elif isinstance(error, errors.OutOfRangeError):
            what = "this replica finds no batch in the job's data"
        else:
            what = "a batch of the job cannot be made, or does not go through its model"
        return print_failure((job.on_data_error(error) if job.on_data_error else None) or f"{what}: {one_line(error)}", 2)
    return 0
