"""`fab logs`, and the output of `fab train` while it follows its job: plain lines, or a full-screen view."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

from jobs.bucket import BucketError
from jobs.chunks import LogFilter
from jobs.firsterror import ErrorFinder, FirstError, earliest, recorded_text
from jobs.records import JobRecord
from jobs.serialization import RecordError
from jobs.states import JobState
from ops import terminal
from ops.client import Client
from ops.cluster.cluster import ClusterClient
from ops.cluster.ledger import existing_job, replica_names
from ops.errors import DETACHED, DONE, FAILED, OpsError, UsageError
from ops.logs import read
from ops.logs.follow import Note, WaitReason
from ops.logs.lines import LineFormatter, LogLine

# The agent's lines of severity ERROR begin so; they are no errors of a trainer.
_AGENT_ERRORS = ("job FAILED", "trainer ended by ", "trainer exited with ")


def show_logs(
    cluster: ClusterClient,
    selection: str | None,
    job_id: str | None,
    log_filter: LogFilter,
    follow: bool,
    as_json: bool,
    plain: bool = True,
) -> int:
    """Print logs; `selection` is a replica, a role, `all`, or the id of a job.

    With `follow`, show a full-screen view if the terminal supports it, unless `plain`.
    """
    if follow and log_filter.until:
        raise UsageError("--until is for what has been printed, --follow for what will be: use only one of them")
    selection, job_id = read.resolve_selection(cluster, selection, job_id)
    record = existing_job(cluster.ledger, job_id)
    replicas = read.select_replicas(record, selection)
    if follow and not record.final:
        return _follow(cluster, record, replicas, log_filter, as_json, plain)
    write = _writer(cluster, record, replicas, as_json)
    for line in Client(cluster).read_logs(record, replicas, log_filter):
        write(line)
    sys.stdout.flush()
    return FAILED if follow and record.state is not JobState.SUCCEEDED else DONE


def _follow(
    cluster: ClusterClient, record: JobRecord, replicas: list[str], log_filter: LogFilter, as_json: bool, plain: bool
) -> int:
    """Print the logs until the job ends or the user interrupts; return 0 if the job SUCCEEDED."""
    try:
        end = follow_job(cluster, record, replicas, log_filter, as_json, plain)
    except KeyboardInterrupt:
        return DETACHED
    if end is None:
        return FAILED
    why = end.errorMessage.partition("\n")[0]
    terminal.note(f"{record.jobId} {end.state}" + (f": {why}" if why else ""))
    return DONE if end.state is JobState.SUCCEEDED else FAILED


def follow_job(
    cluster: ClusterClient, record: JobRecord, replicas: list[str], log_filter: LogFilter, as_json: bool, plain: bool
) -> JobRecord | None:
    """Show the logs as they grow, until the job ends; return its last record, None if it was never read.

    KeyboardInterrupt after Ctrl-C has the job's state if that was read.
    """
    if plain or as_json or not terminal.supports_screen():
        return follow_plain(cluster, record, replicas, log_filter, as_json)
    from ops.screen.job import follow  # with rich, which plain lines do not wait for

    return follow(cluster, record, replicas, log_filter)


def follow_plain(
    cluster: ClusterClient, record: JobRecord, replicas: list[str], log_filter: LogFilter, as_json: bool
) -> JobRecord | None:
    """Print the logs as they grow; return the same as follow_job()."""
    write, last_record = _writer(cluster, record, replicas, as_json, live=True), None
    state, status = "", terminal.StatusLine(" …")
    try:
        for events in Client(cluster).follow(record, replicas, log_filter).batches():
            for event in events:
                if isinstance(event, WaitReason):
                    status.show(event.text)
                    continue
                status.clear()
                if isinstance(event, LogLine):
                    write(event)
                elif isinstance(event, Note):
                    terminal.note(event.text)
                elif isinstance(event, JobRecord):
                    last_record = event
                    if state != event.state and not event.final:
                        state = event.state
                        terminal.note(f"{record.jobId} {state}")
            sys.stdout.flush()
    except KeyboardInterrupt:
        raise KeyboardInterrupt(state) from None
    finally:
        status.clear()
    return last_record


def _writer(
    cluster: ClusterClient, record: JobRecord, replicas: Iterable[str], as_json: bool, live: bool = False
) -> Callable[[LogLine], None]:
    """Return a function that prints a line of these replicas, and marks the job's first error."""
    try:
        records = cluster.ledger.replicas(record.jobId, replica_names(record))
    except (BucketError, RecordError, OpsError):
        records = {}
    first = FirstErrorDetector(earliest((name, replica.firstError) for name, replica in records.items()), live)
    if as_json:
        return lambda line: terminal.write(sys.stdout, line.to_json(first(line)))
    formatter = LineFormatter(replicas, terminal.supports_colour(sys.stdout))
    return lambda line: terminal.write(sys.stdout, formatter(line, first(line)))


class FirstErrorDetector:
    """A predicate of log lines: True once, for the line that is the job's first error."""

    def __init__(self, known: tuple[str, FirstError] | None, live: bool = False) -> None:
        """Use the first error of the replicas' records.

        Args:
            known: the replica and its error; None if the records have none.
            live: if the records have none yet, detect the first error of a trainer in the lines.
        """
        self._known, self._detected = known, False
        self._finders: dict[str, ErrorFinder] | None = {} if live and known is None else None

    def __call__(self, line: LogLine) -> bool:
        if self._detected:
            return False
        self._detected = self._is_first_error(line)
        return self._detected

    def _is_first_error(self, line: LogLine) -> bool:
        if self._known:
            name, error = self._known
            return (line.replica, line.time, recorded_text(line.message)) == (name, error.time, recorded_text(error.message))
        if self._finders is None or line.message.startswith(_AGENT_ERRORS):
            return False
        finder = self._finders.setdefault(line.replica, ErrorFinder())
        return finder.add_line(line.time, line.severity, line.message, line.time)
