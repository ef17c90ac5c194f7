"""Run TensorFlow jobs on the cluster that `pulumi up` made.

Every task says what it does with `fab --help TASK`. What reads has --json. Exit codes: 0 done, 1 the job or the operation
failed, 2 the call was wrong and nothing was changed, 130 stopped by Ctrl-C.
"""

# Nothing is imported here that takes time: `fab --list` is as quick as Fabric itself, and so is the first line of a log.
import sys
from collections.abc import Callable
from typing import Any

from fabric import task
from fabric.main import program

from ops.cli import after_dashes, command, refine

refine(program)
sys.dont_write_bytecode = False  # invoke sets it, and would have ops compiled anew by every command

_JOB = "id of the job: a letter, then letters, digits and _; used once"
_JSON = "print JSON, for programs"


def _task(**options: Any) -> Callable[[Callable[..., int]], Any]:
    return lambda body: task(**options)(command(body))


@_task(
    positional=["job"],
    iterable=["labels"],
    help={
        "job": _JOB,
        "package": "directory of the trainer package, or of its setup.py or pyproject.toml (default: trainer)",
        "module": "module to run (default: pythonModule of --config, else PACKAGE.task)",
        "config": "Cloud ML's config.yaml: trainingInput with scaleTier, args, pythonModule, jobDir, …; flags win over it",
        "args": 'arguments of the trainer, quoted as for a shell: --args "--max-steps 500"; or put them last, behind --',
        "labels": "labels of the job, key=value,key=value; may be given more than once",
        "job-dir": "where the output goes, in the bucket (default: jobs/ID/output there)",
        "follow": "show the logs until the job ends, and exit 0 only if it SUCCEEDED; --no-follow starts it and returns",
    },
)
def train(
    _: Any,
    job: str,
    package: str | None = None,
    module: str | None = None,
    config: str | None = None,
    args: str | None = None,
    labels: Any = None,
    job_dir: str | None = None,
    follow: bool = True,
) -> int:
    """Run a job on the cluster and follow it.

    fab train --job job01
    fab train --job job02 --config config.yaml --args "--max-steps 500"
    fab train --job job03 --package mytrainer --module mytrainer.main -- --learning-rate 0.01

    Ctrl-C leaves the job running and says how to come back to it.
    """
    from ops.config import Flags
    from ops.inventory import load
    from ops.job import train as run

    flags = Flags(job, module, config, args, after_dashes(sys.argv), labels or (), job_dir)
    return run(load(), flags, package, follow)


@_task(
    positional=["original"],
    help={
        "original": "id of the job to run again",
        "job": "id of the new run (default: ORIGINAL_2, or the next number that is free)",
        "follow": "as of fab train; --no-follow starts it and returns, and the same command with --job compares later",
        "json": f"{_JSON}; logs go to stderr",
    },
)
def reproduce(_: Any, original: str, job: str | None = None, follow: bool = True, json: bool = False) -> int:
    """Run a past job again from the bucket alone, as its manifest says, and say what differs."""
    from ops.inventory import load
    from ops.reproduce import reproduce as run

    return run(load(), original, job, follow, json)


@_task(
    help={
        "package": "as of fab train",
        "module": "as of fab train",
        "config": "as of fab train",
        "args": "as of fab train",
        "seconds": "how long the job runs here (default: 60)",
        "parameters-mb": "MB of the model's float32 parameters, for a trainer that leaves no checkpoint to count them in",
        "job": "id of a job that ran: compare it with its plan, and run nothing",
        "json": _JSON,
    },
)
def plan(
    _: Any,
    package: str | None = None,
    module: str | None = None,
    config: str | None = None,
    args: str | None = None,
    seconds: str = "60",
    parameters_mb: str | None = None,
    job: str | None = None,
    json: bool = False,
) -> int:
    """Predict what STANDARD_1 and PREMIUM_1 would make of a job, from a minute of it as one process here.

    fab plan --args "--model cnn"
    fab plan --job job01
    """
    if job is not None:
        from ops.inventory import load
        from ops.planned import check

        return check(load(), job, json)
    from ops.plan import Call, number
    from ops.plan import plan as run

    size = None if parameters_mb is None else number(parameters_mb, "--parameters-mb")
    call = Call(package, module, config, args, after_dashes(sys.argv), number(seconds, "--seconds"), size)
    return run(call, json)


@_task(
    positional=["replica"],
    help={
        "replica": "a replica such as master-0, a role such as worker, or all",
        "job": "id of the job (default: the newest)",
        "follow": "show lines as they come, until the job ends",
        "lines": "how many of the last lines of each replica, or all (default: 100)",
        "json": "print each line as JSON with the full time, for programs",
    },
)
def logs(_: Any, replica: str, job: str | None = None, follow: bool = False, lines: str = "100", json: bool = False) -> int:
    """Show what replicas print, merged in the order of time.

    fab logs master-0
    fab logs worker --lines 20
    fab logs all --job job01 --follow

    Each line has the time of this machine's time zone, the severity and the replica in front.
    """
    from ops.inventory import load
    from ops.reading import parse_lines, show_logs

    return show_logs(load(), replica, job, parse_lines(lines), follow, json)


@_task(help={"json": _JSON})
def jobs(_: Any, json: bool = False) -> int:
    """List the jobs, the newest first."""
    from ops.inventory import load
    from ops.views import jobs as run

    return run(load(), json)


@_task(positional=["job"], help={"job": _JOB, "json": _JSON})
def describe(_: Any, job: str, json: bool = False) -> int:
    """Show a job: its state, times and input, every replica with its exit code and restarts, and why it failed."""
    from ops.inventory import load
    from ops.views import describe as run

    return run(load(), job, json)


@_task(help={"json": _JSON})
def cost(_: Any, json: bool = False) -> int:
    """Show what the hosts that are up have cost so far by list price, role by role, and what each job has."""
    from ops.cost import cost as run
    from ops.inventory import load

    return run(load(), json)


@_task(positional=["job"], help={"job": _JOB})
def cancel(_: Any, job: str) -> int:
    """Cancel a job and wait until it has stopped. Works also when some hosts do not answer."""
    from ops.cancel import cancel as run
    from ops.inventory import load

    return run(load(), job)


@_task(positional=["replica"], help={"replica": "a replica, which is also the name of its host, such as worker-2"})
def shell(_: Any, replica: str) -> int:
    """Open a shell on a replica's host, or run a command there: fab shell worker-2 -- df -h"""
    from ops.inventory import load
    from ops.shell import shell as run

    return run(load(), replica, after_dashes(sys.argv))


@_task(positional=["job", "dest"], help={"job": _JOB, "dest": "directory to put the files into; made if it is not there"})
def get(_: Any, job: str, dest: str) -> int:
    """Fetch a job's output: checkpoints, summaries and the exported model."""
    from ops.inventory import load
    from ops.output import get as run

    return run(load(), job, dest)


@_task(
    positional=["job"],
    help={
        "job": _JOB,
        "dest": "directory to make of it (default: export/ID/TIMESTAMP)",
        "json": _JSON,
    },
)
def export(_: Any, job: str, dest: str | None = None, json: bool = False) -> int:
    """Fetch the newest SavedModel that a job exported, or have one made of its latest checkpoint; show its signatures."""
    from ops.export import export as run
    from ops.inventory import load

    return run(load(), job, dest, json)


@_task(
    help={
        "job": f"{_JOB} (default: the newest)",
        "all": "every job of the cluster, side by side",
        "port": "port of this machine (default: 6006, or the next one that is free)",
    },
)
def tensorboard(_: Any, job: str | None = None, all: bool = False, port: str | None = None) -> int:  # noqa: A002
    """Show a job in TensorBoard, also while it runs: it is started where the data is, and ends with Ctrl-C."""
    from ops.inventory import load
    from ops.tensorboard import tensorboard as run

    return run(load(), job, all, port)


@_task(help={"json": _JSON})
def hosts(_: Any, json: bool = False) -> int:
    """List the hosts of the cluster, and whether each of them answers."""
    from ops.inventory import load
    from ops.views import hosts as run

    return run(load(), json)


@_task(
    iterable=["labels"],
    help={
        "job": f"{_JOB} (default: job01)",
        "module": "as of fab train",
        "config": "as of fab train",
        "args": "as of fab train",
        "labels": "as of fab train",
        "job-dir": "as of fab train",
        "json": _JSON,
    },
)
def render(
    _: Any,
    job: str = "job01",
    module: str | None = None,
    config: str | None = None,
    args: str | None = None,
    labels: Any = None,
    job_dir: str | None = None,
    json: bool = False,
) -> int:
    """Print every file that fab train would write on every host, and touch nothing."""
    from ops.config import Flags
    from ops.inventory import load
    from ops.views import print_render

    return print_render(load(), Flags(job, module, config, args, after_dashes(sys.argv), labels or (), job_dir), json)
