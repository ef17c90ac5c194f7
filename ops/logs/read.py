"""Logs of a job: live from the hosts, from the bucket's archive for hosts that have gone, merged in the order of time."""

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
from ops.cluster.ledger import find_job, replica_names
from ops.errors import HostError, OpsError, UsageError, meant
from ops.logs.lines import NO_LOG, Format, Line, parse_log, read_command

_READ_SECONDS = 60.0


def parse_lines(text: str) -> int | None:
    """`--lines`: a number, or `all`, which is None."""
    if text == "all":
        return None
    if not text.isdecimal():
        raise UsageError(f"--lines {text!r} is no number of lines; valid are 0 and above, and all")
    return int(text)


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
    valid = (*(host.name for host in cluster.inventory.job_hosts), EVERY)
    said = f"there is no replica and no job {word!r}{meant(word, (*valid, *there))}"
    raise UsageError(f"{said}; replicas are {', '.join(valid)}, and fab jobs lists the jobs")


def _is_replica(cluster: Cluster, word: str) -> bool:
    try:
        return bool(cluster.inventory.select(word))
    except UsageError:
        return False


def follow(cluster: Cluster, record: JobRecord, replicas: list[str], lines: int | None, as_json: bool) -> JobRecord | None:
    """Print the logs as they grow; the job's final record, None where it never came to be seen."""
    from ops.logs.follow import Follower, Note

    write, end = writer(replicas, as_json), None
    state = ""
    for event in Follower(cluster.fleet, cluster.ledger, record, replicas, lines).events():
        if isinstance(event, Line):
            write(event)
            sys.stdout.flush()
        elif isinstance(event, Note):
            terminal.note(event.text)
        elif isinstance(event, JobRecord):
            end = event
            if state != end.state and not end.final:
                state = end.state
                terminal.note(f"{record.jobId} {state}")
    return end


def writer(replicas: Iterable[str], as_json: bool) -> Callable[[Line], None]:
    """What prints the lines of these replicas."""
    if as_json:
        return lambda line: terminal.write(sys.stdout, line.to_json())
    form = Format(replicas, terminal.colourful(sys.stdout))
    return lambda line: terminal.write(sys.stdout, form(line))


def selected(record: JobRecord, text: str) -> list[str]:
    """A job's replicas of `all`, of a role such as `worker`, or the one of that name; UsageError that lists what is valid."""
    names = replica_names(record)
    wanted = text.strip().replace("-replica-", "-")
    chosen = [name for name in names if wanted in (EVERY, name, name.rpartition("-")[0])]
    if not chosen:
        valid = (*names, *dict.fromkeys(name.rpartition("-")[0] for name in names), EVERY)
        said = f"job {record.jobId} has no replica {text!r}{meant(text, valid)}"
        raise UsageError(f"{said}; valid are {', '.join(valid)}")
    return chosen


def read_logs(cluster: Cluster, record: JobRecord, replicas: list[str], lines: int | None) -> dict[str, list[Line]]:
    """Each replica's lines, from its host or from the bucket; OpsError where there is not one log."""
    fleet, job_id, placement = cluster.fleet, record.jobId, record.placement
    command = read_command(job_id, lines)
    there = [name for name in replicas if placement.get(name) in cluster.inventory.names]
    outcome = fleet.each(there, lambda name: fleet.run(placement[name], command), _READ_SECONDS)
    found = {name: parse_log(ran.output, name) for name, ran in outcome.results.items() if ran.exited == 0}
    failures = outcome.failures | {
        name: HostError(ran.host, "cannot read its log", ran.exited, ran.output)
        for name, ran in outcome.results.items()
        if ran.exited not in (0, NO_LOG)
    }
    if missing := [name for name in replicas if name not in found]:
        found |= _archived(cluster.bucket, missing, job_id, lines, failures)
    if not found:
        reasons = "".join(f"; {error}" for error in failures.values())
        if record.state is JobState.QUEUED:
            raise OpsError(f"job {job_id} is QUEUED and has printed nothing yet: --follow waits for its turn")
        raise OpsError(f"job {job_id} has no log of {', '.join(replicas)} yet{reasons}")
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
