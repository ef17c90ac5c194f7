"""`python -m trainer.task`: this process's part of a training job.

Exit codes: 0 done; 1 the training failed for good; 2 the call was wrong; RETRY_EXIT_CODE the job should go on from its last
checkpoint, because a host was lost or this one was told to end.
"""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from trainer.cluster import Cluster, ClusterError, parse, unfit
from trainer.flags import Flags
from trainer.flags import parse as parse_flags

# Codes of 128 and above mean "not the program's fault, run it again" to whoever supervises it. This one is SIGTERM's, 128 + 15.
RETRY_EXIT_CODE = 143
_INTERRUPT_EXIT_CODE = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit code. An error of the program itself ends in its traceback, and in 1."""
    flags = parse_flags(arguments)
    try:
        cluster = parse(os.environ.get("TF_CONFIG"))
    except ClusterError as error:
        return _fail(str(error), 2)
    problem = unfit(cluster, flags.strategy)
    if problem:
        return _fail(problem, 2)
    if cluster.task_type == "ps" and flags.strategy != "async":
        from trainer.server import idle

        return idle(cluster, flags.strategy)
    if cluster.task_type == "ps" or (cluster.task_type == "worker" and flags.strategy != "sync"):
        from trainer.server import serve

        serve(cluster)
    return _train(flags, cluster)


def _train(flags: Flags, cluster: Cluster) -> int:
    # Only here, so that a parameter server or a worker starts without TensorFlow's Python; first what says that there is none.
    from trainer.runtime import import_tensorflow, one_line

    errors = import_tensorflow().errors

    from trainer.checkpoint import CheckpointError
    from trainer.data import DataError, damaged, find_files
    from trainer.keeper import PreemptedError
    from trainer.replica import DivergedError

    try:
        _runner(flags, cluster)()
    except (DataError, CheckpointError) as error:
        return _fail(str(error), 2)
    except DivergedError as error:
        return _fail(str(error), 1)
    except PreemptedError as error:
        return _fail(str(error), RETRY_EXIT_CODE)
    except (errors.UnavailableError, errors.AbortedError) as error:
        return _fail(f"a host of the cluster is lost: {one_line(error)}", RETRY_EXIT_CODE)
    except errors.DataLossError as error:
        files = [*find_files(flags.train_data, "train"), *find_files(flags.eval_data, "test")]
        return _fail(damaged(files) or one_line(error), 2)
    return 0


def _runner(flags: Flags, cluster: Cluster) -> Callable[[], None]:
    """What this task does until its end; each strategy is imported only where it is asked for."""
    if cluster.task_type == "evaluator":
        from trainer import evaluator

        return functools.partial(evaluator.run, flags)
    if flags.strategy == "sync":
        from trainer.synchronous import Synchronous

        return Synchronous(flags, cluster).run
    if flags.strategy == "model-parallel":
        from trainer.pipeline import ModelParallel

        return ModelParallel(flags, cluster).run
    from trainer.asynchronous import Asynchronous

    return Asynchronous(flags, cluster).run


def _fail(message: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr, flush=True)
    return code


def _run() -> NoReturn:
    """Runs the command and ends the process by its exit code, and nothing else.

    The threads of a cluster's coordinator can abort the interpreter while it takes itself down, which would read as a kill.
    """
    try:
        code = main()
    except KeyboardInterrupt:
        code = _INTERRUPT_EXIT_CODE
    except Exception:  # noqa: BLE001 - shown as Python shows it, and then not lost
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _run()
