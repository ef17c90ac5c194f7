"""`fab logs`: live from the hosts, from the bucket's archive for hosts that have gone, merged in the order of time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

from jobs import paths
from jobs.paths import JOB_ID
from jobs.records import JobRecord
from jobs.states import JobState
from ops import terminal
from ops.cluster.bucket import Bucket
from ops.cluster.cluster import Cluster
from ops.cluster.inventory import EVERY
from ops.cluster.ledger import existing_job, find_job
from ops.errors import DETACHED, DONE, FAILED, HostError, OpsError, UsageError, meant
from ops.logs.lines import NO_LOG, Format, Line, merge, parse_log, read_command, read_header

_READ_SECONDS = 60.0


def parse_lines(text: str) -> int | None:
    """`--lines`: a number, or `all`, which is None."""
    if text == "all":
        return None
    if not text.isdecimal():
        raise UsageError(f"--lines {text!r} is no number of lines; valid are 0 and above, and all")
    return int(text)


def show_logs(
    cluster: Cluster, selection: str | None, job_id: str | None, lines: int | None, follow: bool, as_json: bool
) -> int:
    """Print the logs of a replica, a role or all of them; of a job, where `selection` is the id of one."""
    selection, job_id = meant_by(cluster, selection, job_id)
    replicas = _replicas(cluster, selection, job_id)
    if follow:
        record = existing_job(cluster.ledger, job_id)
        if not record.final:
            return follow_job(cluster, record.jobId, replicas, lines, as_json)
        job_id = record.jobId
    found = read_logs(cluster, replicas, job_id, lines)
    write = _writer(replicas, as_json)
    for line in merge(found.values()):
        write(line)
    sys.stdout.flush()
    return FAILED if follow and record.state is not JobState.SUCCEEDED else DONE


def meant_by(cluster: Cluster, word: str | None, job_id: str | None) -> tuple[str, str | None]:
    """The replicas and the job that are meant by a word, which may be one of either, in front of the other or alone."""
    if word is None or _is_replica(cluster, word):
        return word or EVERY, job_id
    other = job_id if job_id is not None else EVERY
    if not JOB_ID.fullmatch(word) or not _is_replica(cluster, other):
        return word, job_id
    if find_job(cluster.ledger, word):
        return other, word
    there = [record.jobId for record in cluster.ledger.jobs()[0]]
    valid = (*cluster.inventory.names, EVERY)
    said = f"there is no replica and no job {word!r}{meant(word, (*valid, *there))}"
    raise UsageError(f"{said}; replicas are {', '.join(valid)}, and fab jobs lists the jobs")


def _is_replica(cluster: Cluster, word: str) -> bool:
    try:
        return bool(cluster.inventory.select(word))
    except UsageError:
        return False


def follow_job(cluster: Cluster, job_id: str, replicas: Iterable[str], lines: int | None, as_json: bool) -> int:
    """Print the logs as they grow, until the job has ended or the user has seen enough; exit code 0 where it SUCCEEDED."""
    try:
        record = follow(cluster, job_id, list(replicas), lines, as_json)
    except KeyboardInterrupt:
        return DETACHED
    if record is None:
        return FAILED
    why = record.errorMessage.partition("\n")[0]
    terminal.note(f"{job_id} {record.state}" + (f": {why}" if why else ""))
    return DONE if record.state is JobState.SUCCEEDED else FAILED


def follow(cluster: Cluster, job_id: str, replicas: list[str], lines: int | None, as_json: bool) -> JobRecord | None:
    """Print the logs as they grow; the job's final record, None where it never came to be seen."""
    from ops.logs.follow import Follower, Note

    write, record = _writer(replicas, as_json), None
    state = ""
    for event in Follower(cluster.fleet, cluster.another_ledger(), job_id, replicas, lines).events():
        if isinstance(event, Line):
            write(event)
            sys.stdout.flush()
        elif isinstance(event, Note):
            terminal.note(event.text)
        else:
            record = event
            if state != record.state and not record.final:
                state = record.state
                terminal.note(f"{job_id} {state}")
    return record


def _writer(replicas: Iterable[str], as_json: bool) -> Callable[[Line], None]:
    if as_json:
        return lambda line: terminal.write(sys.stdout, line.to_json())
    form = Format(replicas, terminal.colourful(sys.stdout))
    return lambda line: terminal.write(sys.stdout, form(line))


def _replicas(cluster: Cluster, selection: str, job_id: str | None) -> list[str]:
    """The replicas that are meant; of a job that ran when the cluster was larger, also those that are gone."""
    try:
        return [host.name for host in cluster.inventory.select(selection)]
    except UsageError:
        if job_id is None:
            raise
        then = [str(replica.get("name")) for replica in existing_job(cluster.ledger, job_id).replicas]
        wanted = selection.replace("-replica-", "-")
        chosen = [name for name in then if name == wanted or name.rpartition("-")[0] == wanted]
        if not chosen:
            raise
        return chosen


def read_logs(cluster: Cluster, replicas: list[str], job_id: str | None, lines: int | None) -> dict[str, list[Line]]:
    """Each replica's lines, from its host or from the bucket; OpsError where there is not one log."""
    fleet, command = cluster.fleet, read_command(job_id, lines)
    there = [name for name in replicas if name in cluster.inventory.names]
    outcome = fleet.each(there, lambda name: fleet.run(name, command), _READ_SECONDS)
    read: dict[str, tuple[str, float, str]] = {}
    for name, ran in outcome.results.items():
        if ran.exited == 0:
            read[name] = read_header(ran.output)
        elif ran.exited != NO_LOG:
            outcome.failures[name] = HostError(name, "cannot read its log", ran.exited, ran.output)
    if job_id is None and read:
        job_id = max(read.values(), key=lambda log: log[1])[0]
    found = {name: parse_log(text, name) for name, (job, _, text) in read.items() if job == job_id}
    if missing := [name for name in replicas if name not in found]:
        job_id = existing_job(cluster.ledger, job_id).jobId
        found |= _archived(cluster.bucket, missing, job_id, lines, outcome.failures)
    if not found:
        names = ", ".join(replicas)
        reasons = "".join(f"; {error}" for error in outcome.failures.values())
        if job_id and existing_job(cluster.ledger, job_id).state is JobState.QUEUED:
            raise OpsError(f"job {job_id} is QUEUED and has printed nothing yet: --follow waits for its turn")
        raise OpsError(f"job {job_id} has no log of {names} yet{reasons}")
    return found


def _archived(
    bucket: Bucket, replicas: list[str], job_id: str, lines: int | None, failures: dict[str, Exception]
) -> dict[str, list[Line]]:
    """What the bucket has of these replicas' logs, and a word on stderr about each host that did not answer."""
    found: dict[str, list[Line]] = {}
    for name in replicas:
        content = bucket.read(paths.log(job_id, name))
        if content is not None:
            log = parse_log(content.decode("utf-8", "replace"), name)
            found[name] = log[-lines:] if lines else log if lines is None else []
        if error := failures.get(name):
            terminal.note(
                f"{error}; " + ("its lines are the bucket's copy" if content is not None else "the bucket has no log of it")
            )
    return found
