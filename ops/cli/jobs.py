"""Commands for jobs: run, observe, end and delete them."""

import sys
from typing import Any

from ops.cli.commandline import after_dashes
from ops.cli.task import JOB, JSON, NEW_JOB, TRAINER, load_cluster, task


@task(
    positionals=["job"],
    rest=TRAINER,
    iterable=["labels", "env", "secret"],
    help={
        "job": f"{NEW_JOB} (default: the package's name and the time)",
        "package": "directory of the trainer package, or of its setup.py or pyproject.toml (default: trainer)",
        "module": "module to run (default: pythonModule of --config, else PACKAGE.task)",
        "script": "a Python script to run instead, in --package or a single file",
        "command": 'a program to run instead of the module, such as "./run.sh fast": a file of --package, a program installed '
        "on the hosts, or one local file",
        "runtime": "a requirements.txt; the job gets its own Python with only these packages, not the hosts' Python with "
        "TensorFlow",
        "runtime-version": "version of TensorFlow, such as 2.20 (default: the one that the hosts have)",
        "config": "Cloud ML's config.yaml: trainingInput with scaleTier, args, jobDir, …; the command line wins over it",
        "args": 'arguments of the trainer, quoted as for a shell: --args "--max-steps 500"; or put them last, behind --',
        "scale-tier": "use no more of the cluster than this tier, such as BASIC (default: all that --strategy uses)",
        "replicas": "use these replicas: worker=2,ps=1 for counts, worker for all workers; a master is always included",
        "strategy": "name of a strategy in the package's scaletier.yaml; the trainer gets it as --strategy NAME, before --args",
        "labels": "labels of the job, key=value,key=value; may be repeated",
        "job-dir": "where the output goes, in the bucket (default: jobs/ID/output there)",
        "resume": "id of an ended job: the new job continues from its checkpoints and writes to its output folder; it does not "
        "take over the old job's package and arguments",
        "env": "NAME=VALUE for the trainer's environment; may be repeated, and is recorded",
        "env-file": "file with a NAME=VALUE on each line; --env wins",
        "secret": "NAME of a variable of this shell for the trainer's environment; its value is recorded nowhere",
        "secret-file": "file with a NAME=VALUE on each line, all of them secrets",
        "priority": "whole number: of the waiting jobs, the one with the highest starts next (default: 0)",
        "queue": "wait if another job has the hosts; --no-queue refuses instead",
        "start-hosts": "start hosts that are stopped, and wait until they are up",
        "notify": "URL that gets the job's record by POST when the job ends, or a command that one of its hosts then runs",
        "follow": "show the logs until the job ends, and exit 0 only if it SUCCEEDED; --no-follow starts it and returns",
        "plain": "print plain lines, also on a terminal",
        "dry-run": "show the files, their size, the plan and each TF_CONFIG, and send nothing",
        "json": f"{JSON}: the job's record; logs go to stderr",
    },
)
def train(
    _: Any,
    job: str | None = None,
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
    resume: str | None = None,
    env: Any = None,
    env_file: str | None = None,
    secret: Any = None,
    secret_file: str | None = None,
    priority: str | None = None,
    queue: bool = True,
    start_hosts: bool = False,
    notify: str | None = None,
    follow: bool = True,
    plain: bool = False,
    dry_run: bool = False,
    json: bool = False,
) -> int:
    """Run a job on the cluster and follow it; if its hosts are busy, it waits as QUEUED.

    fab train
    fab train --job job01
    fab train --job job02 --config config.yaml --args "--max-steps 500"
    fab train --job job03 --strategy sync
    fab train --scale-tier BASIC --package mytrainer
    fab train --resume job03 -- --max-steps 4000
    fab train --start-hosts
    fab train --replicas worker=2 --strategy sync --dry-run
    fab train --scale-tier BASIC --script train.py -- --epochs 3
    fab train --job job04 --package mytrainer --module mytrainer.main -- --learning-rate 0.01

    On a terminal a screen shows its progress, every replica, and the newest lines of the logs. Ctrl-C leaves the job running
    and prints how to follow it again.
    """
    options = locals()
    cluster = load_cluster()
    if not dry_run:
        from ops.cluster.cluster import connect_early

        connect_early(cluster)  # while the modules below are imported
    from ops.submit import runner
    from ops.submit.config import JobFlags

    flags = JobFlags.of(options, after_dashes(sys.argv))
    if dry_run:
        return runner.dry_run(cluster, flags, package, json)
    return runner.train(cluster, flags, package, queue, follow, json, plain)


@task(
    help={
        "filter": "only jobs that match all of these, separated by commas: state=FAILED, by=ann, LABEL=VALUE, a part of the id",
        "limit": "only the newest N",
        "json": JSON,
    },
)
def jobs(_: Any, filter: str | None = None, limit: str | None = None, json: bool = False) -> int:  # noqa: A002
    """List the jobs, the newest first.

    fab jobs --limit 5
    fab jobs --filter state=FAILED,by=ann
    """
    from ops.show.jobs import jobs as run

    return run(load_cluster(), filter, limit, json)


@task(positionals=["job"], help={"job": JOB, "json": JSON})
def describe(_: Any, job: str | None = None, json: bool = False) -> int:
    """Show a job: its state, times and input, replicas with exit code and restarts, and why it failed.

    fab describe
    fab describe job01 --json
    """
    from ops.show.jobs import describe as run

    return run(load_cluster(), job, json)


@task(
    positionals=["replica", "job"],
    help={
        "replica": "replicas such as master-0,worker-1, a role such as worker, or all, which is the default; or a job's id",
        "job": JOB,
        "follow": "show lines as they come, until the job ends",
        "lines": "number of last lines of each replica, or all (default: 100; all with --since, --until, --grep or --severity)",
        "since": "only lines printed since then: 10m or 2h ago, 14:30:05 today, or 2026-01-31T12:00:00Z",
        "until": "only lines printed until then, in the same forms",
        "grep": "only lines that match this regular expression",
        "severity": "only lines of that severity and above: DEBUG, INFO, WARNING, ERROR or CRITICAL",
        "plain": "with --follow, print plain lines, also on a terminal",
        "json": "print each line as JSON with the full time, for programs",
    },
)
def logs(
    _: Any,
    replica: str | None = None,
    job: str | None = None,
    follow: bool = False,
    lines: str | None = None,
    since: str | None = None,
    until: str | None = None,
    grep: str | None = None,
    severity: str | None = None,
    plain: bool = False,
    json: bool = False,
) -> int:
    """Show the logs of replicas, merged by time.

    fab logs
    fab logs job01
    fab logs master-0
    fab logs worker --lines 20
    fab logs all --job job01 --follow
    fab logs worker-0,worker-1 --since 10m --severity WARNING
    fab logs job01 --grep "loss: nan"

    Each line has the time of this machine's time zone, the severity and the replica in front. With --follow, the exit code is 0
    only if the job SUCCEEDED.
    """
    from ops.logs.filters import parse_filter
    from ops.screen.logs import show_logs

    filters = parse_filter(lines, since, until, grep, severity)
    return show_logs(load_cluster(), replica, job, filters, follow, json, plain)


@task(positionals=["job"], help={"job": JOB, "json": f"{JSON}: the job's record"})
def wait(_: Any, job: str | None = None, json: bool = False) -> int:
    """Wait until a job has ended; exit code 0 only if it SUCCEEDED.

    fab wait job01
    """
    from ops.submit.end import wait as run

    return run(load_cluster(), job, json)


@task(
    positionals=["job"],
    help={"job": "id of the job (default: the only one that has not ended)", "json": f"{JSON}: the job's record"},
)
def cancel(_: Any, job: str | None = None, json: bool = False) -> int:
    """Cancel a job and wait until it has stopped. Works also when some hosts do not answer.

    fab cancel
    fab cancel job01
    """
    from ops.submit.end import cancel as run

    return run(load_cluster(), job, json)


@task(
    positionals=["original"],
    help={
        "original": "id of the job to run again (default: the newest that has hosts, else the newest that started)",
        "job": "id of the new run (default: ORIGINAL_2, or the next number that is free)",
        "follow": "as for fab train; after --no-follow, fab reproduce ORIGINAL --job ID follows the new run and compares",
        "json": f"{JSON}; logs go to stderr",
    },
)
def reproduce(_: Any, original: str | None = None, job: str | None = None, follow: bool = True, json: bool = False) -> int:
    """Run a past job again from the bucket alone, by its manifest, and report the differences.

    fab reproduce job01
    fab reproduce job01 --job again --no-follow
    """
    from ops.submit.reproduce import reproduce as run

    return run(load_cluster(), original, job, follow, json)


@task(
    rest=TRAINER,
    iterable=["env"],
    help={
        "package": "as for fab train",
        "module": "as for fab train",
        "config": "as for fab train",
        "args": "as for fab train",
        "env": "as for fab train",
        "env-file": "as for fab train",
        "seconds": "seconds of training here, from the first log line `Train [NAME], step N: …` on (default: 60)",
        "parameters-mb": "MB of the model's float32 parameters, for a trainer that leaves no checkpoint to count them in",
        "until": "also predict when a metric of the log lines `Eval, step N: …` reaches a value: METRIC=VALUE, such as "
        "accuracy=0.97, loss=0.2",
        "replicas": "with --until: run the job here once per number of replicas, each until the metric reaches the value "
        "(default: 1,2,5)",
        "until-seconds": "with --until: the time limit of each of these runs (default: 300)",
        "job": "id of a job that ran: compare its measured speed with the prediction, and run nothing",
        "json": JSON,
    },
)
def plan(
    _: Any,
    package: str | None = None,
    module: str | None = None,
    config: str | None = None,
    args: str | None = None,
    env: Any = None,
    env_file: str | None = None,
    seconds: str = "60",
    parameters_mb: str | None = None,
    until: str | None = None,
    replicas: str | None = None,
    until_seconds: str | None = None,
    job: str | None = None,
    json: bool = False,
) -> int:
    """Predict a job's speed on STANDARD_1 and PREMIUM_1, by running it here for a minute, as one process.

    fab plan --args "--model cnn"
    fab plan --args "--model mlp" --until accuracy=0.95
    fab plan --job job01
    """
    if job is not None:
        from ops.plan.planned import compare_with_plan

        return compare_with_plan(load_cluster(), job, json)
    from ops.plan.plan import PlanRequest, number, parse_target_flags
    from ops.plan.plan import plan as run

    target = parse_target_flags(until, replicas, until_seconds)
    size = None if parameters_mb is None else number(parameters_mb, "--parameters-mb")
    more_args = after_dashes(sys.argv)
    request = PlanRequest(
        package, module, config, args, more_args, number(seconds, "--seconds"), size, target, tuple(env or ()), env_file
    )
    return run(request, json)


@task(positionals=["job"], help={"job": "id of a job that has ended", "yes": "do not ask", "json": JSON})
def delete(_: Any, job: str | None = None, yes: bool = False, json: bool = False) -> int:
    """Delete an ended job with its package, logs and output. Asks first.

    fab delete job01
    fab delete job01 --yes

    If fab train had --job-dir, the output there is kept.
    """
    from ops.submit.end import delete as run

    return run(load_cluster(), job, yes, json)


@task(help={"keep": "number of the newest ended jobs to keep (required)", "yes": "do not ask", "json": JSON})
def prune(_: Any, keep: str | None = None, yes: bool = False, json: bool = False) -> int:
    """Delete all ended jobs except the newest ones. Asks first.

    fab prune --keep 10
    """
    from ops.submit.end import prune as run

    return run(load_cluster(), keep, yes, json)
