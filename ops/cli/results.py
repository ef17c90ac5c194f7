"""Commands on the results of jobs: output, report, curves."""

from typing import Any

from ops.cli.task import JOB, JSON, load_cluster, task


@task(
    positionals=["job", "path", "dest"],
    help={
        "job": JOB,
        "path": "file or folder of the job's output (default: all of it); a name that is not in the output is taken as DEST",
        "dest": "a new or empty directory, or for a file a new name (default: ID, or the name of PATH)",
        "json": JSON,
    },
)
def get(_: Any, job: str | None = None, path: str | None = None, dest: str | None = None, json: bool = False) -> int:
    """Fetch a job's output: checkpoints, summaries and the exported model. No local file is overwritten.

    fab get job01
    fab get job01 export/Servo model
    fab get job01 --dest /tmp/job01

    SavedModels are below export/Servo, the folder's name in the samples of Cloud ML.
    """
    from ops.show.fetch import get as run

    return run(load_cluster(), job, path, dest, json)


@task(positionals=["job", "dest"], help={"job": JOB, "dest": "a new directory (default: export/ID/TIMESTAMP)", "json": JSON})
def export(_: Any, job: str | None = None, dest: str | None = None, json: bool = False) -> int:
    """Fetch the newest SavedModel of a job, or export its latest checkpoint first; show its signatures.

    fab export job01
    fab export job01 /tmp/model
    """
    from ops.models.export import export as run

    return run(load_cluster(), job, dest, json)


@task(
    positionals=["job"] * 7,
    iterable=["job"],
    help={
        "job": f"{JOB}; several are compared",
        "output": "the file to write (default: report-ID.html); only a page of this command is overwritten",
        "json": "print the content of the report as JSON, for programs",
    },
)
def report(_: Any, job: Any = None, output: str | None = None, json: bool = False) -> int:
    """Write a page about a job: curves, throughput, timeline, cost, errors, inputs; or compare several.

    fab report job01
    fab report job01 job02 --output compared.html

    The page is one file that needs no network, and is readable on a phone and in print. For a running job it shows the state
    so far.
    """
    from ops.report.command import report as run

    return run(load_cluster(), job, output, json)


@task(
    positionals=["job", "dest"],
    help={
        "job": JOB,
        "dest": "the file to write (default: ID-bundle.tar.gz)",
        "force": "overwrite an existing file",
        "json": JSON,
    },
)
def bundle(_: Any, job: str | None = None, dest: str | None = None, force: bool = False, json: bool = False) -> int:
    """Write one file with the evidence of a job's failure: host diagnoses, records, ends of logs.

    fab bundle job01
    fab bundle job01 /tmp/job01.tar.gz --force

    Its summary.txt begins with the job's first error. It includes what the trainer printed.
    """
    from ops.report.bundle import bundle as run

    return run(load_cluster(), job, dest, force, json)


@task(
    positionals=["job"],
    help={
        "job": JOB,
        "all": "every job of the cluster, side by side",
        "port": "port of this machine (default: 6006, or the next one that is free)",
    },
)
def tensorboard(_: Any, job: str | None = None, all: bool = False, port: str | None = None) -> int:  # noqa: A002
    """Show a job in TensorBoard, also while it runs; TensorBoard runs on the master's host. Ctrl-C ends it.

    fab tensorboard job01
    fab tensorboard --all
    """
    from ops.models.tensorboard import tensorboard as run

    return run(load_cluster(), job, all, port)
