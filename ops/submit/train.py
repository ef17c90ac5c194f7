"""Check a job, first on this machine and then on its hosts."""

from __future__ import annotations

import posixpath
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache

from infra.inventory import Inventory
from infra.templates import ROOT as CHECKOUT
from jobs import paths
from jobs.background import Background
from jobs.ledger import Ledger, Stored, Trials
from jobs.paths import DATA
from jobs.queue import QueueEntry, place
from ops import terminal
from ops.cluster import host_files
from ops.cluster.cluster import ClusterClient
from ops.cluster.inventory import ROOT
from ops.cluster.ledger import existing_job, find_job
from ops.cluster.output import find
from ops.cluster.power_on import start_and_wait, startable_hosts
from ops.cluster.remote import ADVICE, Fleet
from ops.errors import HostError, SeveralHostsError, UsageError
from ops.package import host_stream, package
from ops.package.imports import describe_missing
from ops.package.trainer_config import check_frameworks
from ops.submit import job_plan, program, tuning
from ops.submit.claim import DuplicateIdError
from ops.submit.config import JobFlags, build_job
from ops.submit.submit import Submission

# The check starts a Python on each host; local hosts all share the processors of one machine.
_CHECK_SECONDS = 120.0
# The time limit for a host that was just created or started, and the interval of its polls.
_READY_SECONDS, _POLL_SECONDS = 900.0, 2.0
START_ADVICE = (
    "fab train --start-hosts (or startHosts: true in config.yaml) starts those that are stopped, and so does pulumi up"
)
# The space that a job needs on a host besides its package: logs, and TensorFlow's temporary files.
_FREE_BYTES = 100_000_000


def prepare_job(cluster: ClusterClient, flags: JobFlags, folder: str | None, dry: bool = False) -> Submission:
    """Check a job as far as possible without its hosts; UsageError if it is invalid."""
    job_flags = resume_flags(cluster, flags, folder) if flags.resume is not None else flags
    return add_earlier_trials(cluster, prepare(cluster.inventory, job_flags, folder, dry))


def resume_flags(cluster: ClusterClient, flags: JobFlags, folder: str | None = None) -> JobFlags:
    """Return the flags of a job that resumes from an earlier one's checkpoints.

    UsageError if the job cannot be resumed, or ran the user's program and the flags name none: the shipped one would run.
    """
    if flags.job_dir is not None:
        raise UsageError("--resume continues in the output of that job, and --job-dir names another: use only one of them")
    record = existing_job(cluster.ledger, flags.resume)
    if not record.final:
        raise UsageError(
            f"job {record.jobId} is {record.state}, and two jobs cannot write to one output: wait for it, or cancel it"
        )
    if "hyperparameters" in record.trainingInput:
        raise UsageError(f"job {record.jobId} tuned hyperparameters: --job-dir with the folder of a trial continues that one")
    ran = str(record.trainingInput.get("pythonModule") or " ".join(record.trainingInput.get("command", ())))
    if ran and not (folder or flags.script or flags.command) and ran.partition(".")[0] != program.SHIPPED.name:
        raise UsageError(
            f"job {record.jobId} ran {ran}, and package {program.SHIPPED.name} would continue it: name its own by --package, "
            "--script or --command"
        )
    output = find(cluster, record)
    if not output.checkpoints:
        raise UsageError(f"job {record.jobId} left no checkpoint in {output.job_dir}: there is nothing to resume from")
    return replace(flags, job_dir=output.job_dir)


def add_earlier_trials(cluster: ClusterClient, submission: Submission) -> Submission:
    """Return a tuning job with the results of the one that it resumes from, if it names one."""
    study = submission.job.study
    if study is None or not study.resumePreviousJobId:
        return submission
    record = existing_job(cluster.ledger, study.resumePreviousJobId)
    plan = cluster.ledger.plan(record.jobId)
    trials = Trials(cluster.ledger, record.jobId).read()
    resumed_study = tuning.add_earlier_results(study, plan.study if plan else None, trials)
    return replace(submission, job=replace(submission.job, study=resumed_study))


def prepare(inventory: Inventory, flags: JobFlags, folder: str | None, dry: bool = False) -> Submission:
    """Check a job, its package and its data, and build its runtime unless `dry`; UsageError if it is invalid."""
    return prepare_program(inventory, flags, program.find(folder, flags.module, flags.script, flags.command), dry)


def prepare_program(inventory: Inventory, flags: JobFlags, job_program: program.JobProgram, dry: bool = False) -> Submission:
    """Prepare a job of a program. With `dry` no runtime is built: the existing one is used, else an empty one."""
    source = job_program.source
    command, folder = job_program.command, job_program.folder
    job = build_job(flags, inventory, source.name, source.files, command, folder, source.executables)
    source = replace(source, sets_pythonpath="PYTHONPATH" in job.environment)
    installed = None
    if job.runtime:
        from ops.package import runtimes  # imports packaging, which is slow

        check_frameworks(job.declared, source.name, job.runtime.lines, complete=False)
        installed = runtimes.read_existing(inventory, job.runtime) if dry else runtimes.build(inventory, job.runtime)
        if installed or not dry:
            check_frameworks(job.declared, source.name, map("==".join, installed.items()), complete=True)
        else:
            terminal.note(
                f"the runtime {job.runtime.name} would be built first; what the package needs besides it is not shown"
            )
            source = replace(source, requirements=None)
    else:
        check_frameworks(job.declared, source.name, _host_versions(inventory), complete=False, on_hosts=True)
    built = package.build(source, job.module, job_program.script, installed, inventory.python)
    data = job.declared.data_for(job.args)
    return Submission(inventory, job, built, data.local_files(ROOT) if data else {})


def _host_versions(inventory: Inventory) -> list[str]:
    """Return the versions of packages on the hosts that are known here, as lines of a requirements.txt.

    `hostpython.host_packages` returns them, too, but imports packaging, which is slow.
    """
    if inventory.tensorflow:
        return [f"tensorflow=={inventory.tensorflow}"]
    return (CHECKOUT / "constraints.txt").read_text().splitlines()


def check_hosts(cluster: ClusterClient, submission: Submission) -> Submission:
    """Check that the job can run on the hosts that it would get; start those that are stopped if the job says so.

    If one of them does not answer, or the job will have to wait, all its candidates are checked. The result excludes
    unreachable ones if others can replace them.
    """
    candidate_hosts = submission.candidates
    candidates = [name for name in cluster.inventory.names if any(name in hosts for hosts in candidate_hosts.values())]
    digests = _wake_digests(cluster.inventory)
    lookup = Background(lambda: _expected_hosts(cluster.ledger, submission))  # concurrently with the checks of hosts
    expected_hosts = cache(lambda: set(lookup.join(_CHECK_SECONDS)))
    checked: set[str] = set()
    unreachable: dict[str, Exception] = {}
    targets = set(place(candidate_hosts, ()).values())
    while new := [name for name in candidates if name in targets - checked]:
        failures = _connect(cluster.fleet, new)
        stopped = startable_hosts(cluster.inventory, failures)
        if stopped and submission.job.start_hosts:
            expected_hosts()  # no host is started for a job whose id was used before
            unstarted = start_and_wait(cluster.fleet, stopped)
            failures = {
                name: unstarted.get(name, error) for name, error in failures.items() if name in unstarted or name not in stopped
            }
        unreachable |= failures
        if len(place(candidate_hosts, unreachable)) < len(candidate_hosts):
            raise SeveralHostsError(
                unreachable, START_ADVICE if stopped and not submission.job.start_hosts else ADVICE, UsageError.code
            )
        _check_capabilities(cluster, submission, [name for name in new if name not in failures], digests)
        checked.update(new)
        targets = set(candidates) if unreachable else expected_hosts()
    for error in unreachable.values():
        terminal.note(f"{error}: the job does not use this host")
    _check_data(cluster, submission)
    _check_output(cluster, submission)
    return replace(submission, excluded=frozenset(unreachable))


def _expected_hosts(ledger: Ledger, submission: Submission) -> list[str]:
    """Return the hosts that a job would get now, or all that it may wait for; UsageError if its id was used before."""
    job = submission.job
    if find_job(ledger, job.id):
        raise DuplicateIdError(job.id)
    entry = QueueEntry(job.id, [], candidates=submission.candidates, priority=job.priority)
    return sorted(ledger.queue().added(entry).entries[-1].usable_hosts())


def _connect(fleet: Fleet, names: Sequence[str]) -> Mapping[str, Exception]:
    """Map each host that does not answer to the reason."""
    with terminal.ProgressLine(f"connecting to {terminal.plural(len(names), 'host')}") as step:
        return fleet.connect_each(names, terminal.counter(step, len(names))).failures


def _wake_digests(inventory: Inventory) -> dict[str, str]:
    """Return the digest of the code and files of each host on which jobs run."""
    _, version = host_stream.code(CHECKOUT)
    return {name: host_stream.wake_digest(version, files) for name, files in host_files.render(inventory).items()}


def _check_capabilities(
    cluster: ClusterClient, submission: Submission, names: Sequence[str], digests: Mapping[str, str]
) -> None:
    """Check that these hosts can run the job, and wake their agents by the digests; wait until they are set up.

    SeveralHostsError if a host cannot be checked, or is not set up in time; UsageError if it lacks disk space or a module.
    """
    inventory, fleet = cluster.inventory, cluster.fleet
    directories = [paths.STATE_DIR, *([inventory.bucket] if inventory.bucket.startswith("/") else [])]
    python = job_plan.python(inventory, submission.job) or paths.PYTHON

    def check(name: str) -> str:
        imports = submission.package.imports if name == names[0] else ()
        command = host_stream.check_command(directories, imports, python, digests[name])
        return fleet.check_output(name, command, "could not be checked, it ended")

    for name, output in _await_ready(fleet, names, check).items():
        try:
            free, modules = host_stream.read_check(output, directories)
        except ValueError as error:
            failure = HostError(name, f"could not be checked ({error})", output=output)
            raise SeveralHostsError({name: failure}, ADVICE, UsageError.code) from None
        missing = [module for module in modules if module in submission.package.imports]  # a runtime may print other lines
        _check_host(name, free, missing, submission)


def _await_ready(fleet: Fleet, names: Sequence[str], check: Callable[[str], str]) -> dict[str, str]:
    """Return the output of `check` for each host, once all are ready; SeveralHostsError if some failed, or take too long."""
    outputs: dict[str, str] = {}
    deadline = time.monotonic() + _READY_SECONDS
    with terminal.ProgressLine("checking the hosts") as step:
        while pending := [name for name in names if name not in outputs]:
            outcome = fleet.each(pending, check, _CHECK_SECONDS)
            states = {name: host_stream.read_state(output) for name, output in outcome.results.items()}
            outputs |= {name: outcome.results[name] for name, state in states.items() if state == host_stream.READY}
            late = {name: state for name, state in states.items() if state != host_stream.READY}
            failed = {name: HostError(name, f"is {state}") for name, state in late.items() if state == host_stream.OLD}
            for name, state in late.items():
                if state.startswith(host_stream.FAILED):
                    failed[name] = HostError(name, f"could not be set up: {state.removeprefix(host_stream.FAILED)}")
            if failed or outcome.failures:
                raise SeveralHostsError({**outcome.failures, **failed}, ADVICE, UsageError.code)
            if late and time.monotonic() > deadline:
                slow = {name: HostError(name, f"is not ready after {_READY_SECONDS:.0f} s: {late[name]}") for name in late}
                raise SeveralHostsError(slow, ADVICE, UsageError.code)
            if late:
                step.what = f"waiting for {', '.join(f'{name} ({state})' for name, state in late.items())}"
                time.sleep(_POLL_SECONDS)
    return outputs


def _check_host(name: str, free: dict[str, int], missing: list[str], submission: Submission) -> None:
    built = submission.package
    needed = 5 * len(built.archive) + _FREE_BYTES
    for directory, free_bytes in free.items():
        if free_bytes < needed:
            what = f"only {terminal.size(free_bytes)} free in {directory}, a job needs {terminal.size(needed)}"
            raise UsageError(f"{name} has {what}: make room (fab shell {name}), or give it a larger disk")
    if missing:
        raise UsageError(describe_missing(missing, built.imports, built.name, built.files, submission.job.folder))


def _check_output(cluster: ClusterClient, submission: Submission) -> None:
    """Check that no other job writes to the output at the same time; jobs that need the same host never do.

    A tuning job's output must be empty: files of an earlier trial would be read as a new one's.
    """
    if submission.job.study and find(cluster, submission.record()).files:
        raise UsageError(
            f"--job-dir {submission.job.job_dir} is not empty, and trials must find nothing of others: give another"
        )
    mine = QueueEntry(submission.job.id, [], candidates=submission.candidates)
    entries = cluster.ledger.queue().entries
    records = cluster.ledger.jobs_named(entry.jobId for entry in entries)
    for entry in entries:
        if not isinstance(stored := records.get(entry.jobId), Stored):
            continue  # it is being created, or is unreadable
        record = stored.record
        folder = str(record.trainingInput.get("jobDir", ""))
        if overlap(folder, submission.job.job_dir) and entry.required_hosts().isdisjoint(mine.required_hosts()):
            raise UsageError(
                f"job {entry.jobId}, which is {record.state}, writes to {folder}, and this job would at the same time: wait "
                "for it (fab wait), or give another --job-dir"
            )


def overlap(one: str, other: str) -> bool:
    """Return True if two folders are the same, or one is in the other."""
    first, second = (posixpath.normpath(path) + "/" for path in (one, other))
    return bool(one and other) and (first.startswith(second) or second.startswith(first))


def _check_data(cluster: ClusterClient, submission: Submission) -> None:
    job = submission.job
    data = job.declared.data_for(job.args)
    if data and not submission.data and not cluster.bucket.sizes(f"{DATA}/{data.name}"):
        raise data.missing_error()
