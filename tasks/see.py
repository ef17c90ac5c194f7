"""Tasks that show something: jobs, their logs and figures, hosts, files."""

import sys
from typing import Any

from ops.commandline import after_dashes
from tasks import JOB, JSON, NEW_JOB, TRAINER, task


@task(
    words=["replica", "job"],
    help={
        "replica": "a replica such as master-0, a role such as worker, or all, which is the default; or a job's id",
        "job": JOB,
        "follow": "show lines as they come, until the job ends",
        "lines": "how many of the last lines of each replica, or all (default: 100)",
        "plain": "with --follow on a terminal too, lines that stay, and no screen",
        "json": "print each line as JSON with the full time, for programs",
    },
)
def logs(
    _: Any,
    replica: str | None = None,
    job: str | None = None,
    follow: bool = False,
    lines: str = "100",
    plain: bool = False,
    json: bool = False,
) -> int:
    """Show what replicas print, merged in the order of time.

    fab logs
    fab logs job01
    fab logs master-0
    fab logs worker --lines 20
    fab logs all --job job01 --follow

    Each line has the time of this machine's time zone, the severity and the replica in front. With --follow, the exit code is 0
    only if the job SUCCEEDED.
    """
    from ops.cluster.cluster import Cluster
    from ops.logs.read import parse_lines, show_logs

    return show_logs(Cluster.load(), replica, job, parse_lines(lines), follow, json, plain)


@task(
    help={
        "filter": "only those with state=FAILED, by=ann or label=value, several with commas; or a part of the id",
        "limit": "only so many of the newest",
        "json": JSON,
    },
)
def jobs(_: Any, filter: str | None = None, limit: str | None = None, json: bool = False) -> int:  # noqa: A002
    """List the jobs, the newest first.

    fab jobs --limit 5
    fab jobs --filter state=FAILED,owner=ann
    """
    from ops.cluster.cluster import Cluster
    from ops.show.views import jobs as run

    return run(Cluster.load(), filter, limit, json)


@task(words=["job"], help={"job": JOB, "json": JSON})
def describe(_: Any, job: str | None = None, json: bool = False) -> int:
    """Show a job: its state, times and input, every replica with its exit code and restarts, and why it failed."""
    from ops.cluster.cluster import Cluster
    from ops.show.views import describe as run

    return run(Cluster.load(), job, json)


@task(help={"json": JSON})
def cost(_: Any, json: bool = False) -> int:
    """Show what the hosts that are up have cost so far by list price, role by role, and what each job has."""
    from ops.cluster.cluster import Cluster
    from ops.show.cost import cost as run

    return run(Cluster.load(), json)


@task(help={"json": JSON})
def hosts(_: Any, json: bool = False) -> int:
    """List the hosts of the cluster, and whether each of them answers; exit code 1 where none does."""
    from ops.cluster.cluster import Cluster
    from ops.show.views import hosts as run

    return run(Cluster.load(), json)


@task(help={"once": "one look, also on a terminal", "json": f"{JSON}: one look"})
def top(_: Any, once: bool = False, json: bool = False) -> int:
    """Show the whole cluster until Ctrl-C: what each host does and uses, the jobs that run and wait, and the cost so far.

    One table where there is no terminal. The figures are what the replicas themselves told last: no host is asked.
    """
    from ops.cluster.cluster import Cluster
    from ops.show.top import top as run

    return run(Cluster.load(), once, json)


@task(
    words=["job"],
    help={
        "job": JOB,
        "all": "every job of the cluster, side by side",
        "port": "port of this machine (default: 6006, or the next one that is free)",
    },
)
def tensorboard(_: Any, job: str | None = None, all: bool = False, port: str | None = None) -> int:  # noqa: A002
    """Show a job in TensorBoard, also while it runs: it is started where the data is, and ends with Ctrl-C."""
    from ops.cluster.cluster import Cluster
    from ops.models.tensorboard import tensorboard as run

    return run(Cluster.load(), job, all, port)


@task(
    words=["job"] * 7,
    iterable=["job"],
    help={
        "job": f"{JOB}; several are compared",
        "output": "the file to write (default: report-ID.html); one that this command has made is replaced, no other",
        "json": "print what the report is made of as JSON, for programs",
    },
)
def report(_: Any, job: Any = None, output: str | None = None, json: bool = False) -> int:
    """Write a page about a job: curves, throughput, time line, cost, errors, what it was made of; or compare several.

    fab report job01
    fab report job01 job02 --output compared.html

    The page is one file that opens anywhere without a network, on a phone and on paper, too. Of a running job it has what there
    is so far.
    """
    from ops.cluster.cluster import Cluster
    from ops.report.command import report as run

    return run(Cluster.load(), job, output, json)


@task(
    words=["job"],
    rest=TRAINER,
    iterable=["labels", "env", "secret"],
    help={
        "job": f"{NEW_JOB} (default: job01)",
        "package": "as of fab train",
        "module": "as of fab train",
        "script": "as of fab train",
        "command": "as of fab train",
        "runtime": "as of fab train",
        "runtime-version": "as of fab train",
        "config": "as of fab train",
        "args": "as of fab train",
        "scale-tier": "as of fab train",
        "replicas": "as of fab train",
        "strategy": "as of fab train",
        "labels": "as of fab train",
        "job-dir": "as of fab train",
        "env": "as of fab train",
        "env-file": "as of fab train",
        "secret": "as of fab train; shown by its name alone",
        "secret-file": "as of fab train; shown by their names alone",
        "json": JSON,
    },
)
def render(
    _: Any,
    job: str = "job01",
    package: str | None = None,
    module: str | None = None,
    script: str | None = None,
    command: str | None = None,
    runtime: str | None = None,
    runtime_version: str | None = None,
    config: str | None = None,
    args: str | None = None,
    scale_tier: str | None = None,
    replicas: str | None = None,
    strategy: str | None = None,
    labels: Any = None,
    job_dir: str | None = None,
    env: Any = None,
    env_file: str | None = None,
    secret: Any = None,
    secret_file: str | None = None,
    json: bool = False,
) -> int:
    """Print every file that fab train would write on every host, and touch nothing."""
    given = locals()
    from ops.cluster.inventory import load
    from ops.train.config import Flags
    from ops.train.preview import print_render

    return print_render(load(), Flags.of(given, after_dashes(sys.argv)), package, json)
