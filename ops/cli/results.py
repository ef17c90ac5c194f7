"""Tasks on what a job made: its output, a report, its curves."""

from typing import Any

from ops.cli.task import JOB, JSON, task


@task(
    words=["job", "path", "dest"],
    help={
        "job": JOB,
        "path": "file or folder of the job's output (default: all of it); a word that is none there is DEST",
        "dest": "where to put it, a new or empty directory, or for a file a new name (default: ID, or the name of PATH)",
        "json": JSON,
    },
)
def get(_: Any, job: str | None = None, path: str | None = None, dest: str | None = None, json: bool = False) -> int:
    """Fetch a job's output: checkpoints, summaries and the exported model. No local file is overwritten.

    fab get job01
    fab get job01 export/Servo model
    fab get job01 --dest /tmp/job01
    """
    from ops.cluster.cluster import ClusterClient
    from ops.show.fetch import get as run

    return run(ClusterClient.load(), job, path, dest, json)


@task(
    words=["job", "dest"],
    help={
        "job": JOB,
        "dest": "directory to make of it (default: export/ID/TIMESTAMP)",
        "json": JSON,
    },
)
def export(_: Any, job: str | None = None, dest: str | None = None, json: bool = False) -> int:
    """Fetch the newest SavedModel of a job, or export its latest checkpoint first; show its signatures.

    fab export job01
    fab export job01 /tmp/model
    """
    from ops.cluster.cluster import ClusterClient
    from ops.models.export import export as run

    return run(ClusterClient.load(), job, dest, json)


@task(
    words=["job"] * 7,
    iterable=["job"],
    help={
        "job": f"{JOB}; several are compared",
        "output": "the file to write (default: report-ID.html); one that this command has made is replaced, no other",
        "json": "print the content of the report as JSON, for programs",
    },
)
def report(_: Any, job: Any = None, output: str | None = None, json: bool = False) -> int:
    """Write a page about a job: curves, throughput, timeline, cost, errors, inputs; or compare several.

    fab report job01
    fab report job01 job02 --output compared.html

    The page is one file that opens anywhere without a network, on a phone and on paper, too. Of a running job it has what there
    is so far.
    """
    from ops.cluster.cluster import ClusterClient
    from ops.report.command import report as run

    return run(ClusterClient.load(), job, output, json)


@task(
    words=["job", "dest"],
    help={
        "job": JOB,
        "dest": "the file to write (default: ID-bundle.tar.gz)",
        "force": "write over a file that is there",
        "json": JSON,
    },
)
def bundle(_: Any, job: str | None = None, dest: str | None = None, force: bool = False, json: bool = False) -> int:
    """Write one file with the evidence of a job's failure: host diagnoses, records, ends of logs.

    fab bundle job01
    fab bundle job01 /tmp/job01.tar.gz --force

    Its summary.txt begins with the job's first error. What a trainer printed is in it.
    """
    from ops.cluster.cluster import ClusterClient
    from ops.report.bundle import bundle as run

    return run(ClusterClient.load(), job, dest, force, json)


@task(
    words=["job"],
    help={
        "job": JOB,
        "all": "every job of the cluster, side by side",
        "port": "port of this machine (default: 6006, or the next one that is free)",
    },
)
def tensorboard(_: Any, job: str | None = None, all: bool = False, port: str | None = None) -> int:  # noqa: A002
    """Show a job in TensorBoard, also while it runs; it is started where the data is. Ctrl-C ends it.

    fab tensorboard job01
    fab tensorboard --all
    """
    from ops.cluster.cluster import ClusterClient
    from ops.models.tensorboard import tensorboard as run

    return run(ClusterClient.load(), job, all, port)
