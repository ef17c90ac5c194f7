"""Logs of a job as they are now: from its hosts, or from the bucket's copy if a host lacks the log or does not answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

from infra.scale_tiers import suggest
from jobs import paths
from jobs.bucket import Bucket
from jobs.chunks import NO_LOG, SLOW_PATTERN, LogFilter, Position
from jobs.paths import JOB_ID
from jobs.records import JobRecord
from jobs.states import JobState
from ops import terminal
from ops.cluster.cluster import ClusterClient
from ops.cluster.ledger import find_job, replica_names
from ops.cluster.remote import Stream
from ops.errors import HostError, OpsError, UsageError
from ops.logs.lines import LogLine, parse_pieces, read_command, read_source, slow_pattern_error

_EVERY = "all"
_READ_SECONDS = 60.0


def resolve_selection(cluster: ClusterClient, word: str | None, job_id: str | None) -> tuple[str, str | None]:
    """Return the replicas and the job of `fab logs REPLICAS JOB` or `fab logs JOB REPLICAS`; both are optional."""
    if word is None or _is_replica(cluster, word):
        return word or _EVERY, job_id
    other = job_id if job_id is not None else _EVERY
    if not JOB_ID.fullmatch(word) or not _is_replica(cluster, other):
        return word, job_id
    if find_job(cluster.ledger, word):
        return other, word
    jobs = [record.jobId for record in cluster.ledger.jobs()[0]]
    valid = (*(host.name for host in cluster.inventory.job_hosts), _EVERY)
    problem = f"there is no replica and no job {word!r}{suggest(word, (*valid, *jobs))}"
    raise UsageError(f"{problem}; replicas are {', '.join(valid)}, and fab jobs lists the jobs")


def _is_replica(cluster: ClusterClient, word: str) -> bool:
    hosts = cluster.inventory.job_hosts
    valid = {_EVERY, *(host.name for host in hosts), *(host.role for host in hosts)}
    return all(part.strip().replace("-replica-", "-") in valid for part in word.split(","))


def select_replicas(record: JobRecord, text: str) -> list[str]:
    """Return a job's replicas by `all`, a role such as `worker`, a name, or a list of these with commas.

    UsageError has the valid names.
    """
    names = replica_names(record)
    chosen: set[str] = set()
    for part in text.split(","):
        name_or_role = part.strip().replace("-replica-", "-")
        matches = [name for name in names if name_or_role in (_EVERY, name, name.rpartition("-")[0])]
        if not matches:
            valid = (*names, *dict.fromkeys(name.rpartition("-")[0] for name in names), _EVERY)
            problem = f"job {record.jobId} has no replica {part!r}{suggest(part, valid)}"
            raise UsageError(f"{problem}; valid are {', '.join(valid)}")
        chosen.update(matches)
    return [name for name in names if name in chosen]


def read_logs(
    cluster: ClusterClient, record: JobRecord, replicas: list[str], log_filter: LogFilter
) -> dict[str, Iterator[LogLine]]:
    """Return each replica's lines, from its host or from the bucket, read lazily; OpsError if there is no log."""
    fleet, job_id, placement = cluster.fleet, record.jobId, record.placement
    command = read_command(job_id, log_filter)
    on_hosts = [name for name in replicas if placement.get(name) in cluster.inventory.names]
    outcome = fleet.each(
        on_hosts, lambda name: _HostLog(fleet.stream(placement[name], command), name, log_filter), _READ_SECONDS
    )
    failures: dict[str, Exception] = dict(outcome.failures)
    logs: dict[str, Iterator[LogLine]] = {}
    for name in replicas:
        log = outcome.results.get(name)
        if log and log.exists:
            logs[name] = log.lines(_ArchivedLog(cluster.bucket, job_id, name))
            continue
        archived = _ArchivedLog(cluster.bucket, job_id, name)
        if archived.sizes():
            logs[name] = read_source(archived, name, log_filter)
        if error := failures.get(name) or (log and log.error):
            where = "its lines are from the bucket's copy" if name in logs else "the bucket has no log of it"
            terminal.note(f"{error}; {where}")
            failures[name] = error
    if not logs:
        reasons = "".join(f"; {error}" for error in failures.values())
        if record.state is JobState.QUEUED:
            raise OpsError(f"job {job_id} is QUEUED and has printed nothing yet: --follow waits for its turn")
        if record.final:
            why = record.errorMessage.partition("\n")[0].rstrip(".")
            problem = f"job {job_id} is {record.state}{f' ({why})' if why else ''}"
            raise OpsError(f"{problem}, and left no log of {', '.join(replicas)}{reasons}: fab describe {job_id} shows more")
        raise OpsError(f"job {job_id} has no log of {', '.join(replicas)} yet{reasons}")
    return logs


class _HostLog:
    """A host's output of a log, read only as far as it is consumed."""

    def __init__(self, stream: Stream, name: str, log_filter: LogFilter) -> None:
        """Wait for the first output; set `error` if the host cannot check whether the log exists."""
        self._stream, self._name, self._log_filter = stream, name, log_filter
        self._pieces = stream.pieces()
        self._first = next(self._pieces, b"")
        self.exists = bool(self._first)
        self.error: Exception | None = None
        if not self.exists and stream.exit_code != NO_LOG:
            self.error = self._make_error()

    def lines(self, archived: _ArchivedLog) -> Iterator[LogLine]:
        """Yield the lines; if the connection breaks, continue from the bucket."""
        position: Position | None = None
        try:
            for reached, lines in parse_pieces(chain([self._first], self._pieces), self._name):
                yield from (line for _, line in lines)
                position = reached
        except HostError as error:
            terminal.note(f"{error}; the rest of its lines is from the bucket's copy")
            yield from read_source(archived, self._name, self._log_filter, position)
            return
        if self._stream.exit_code:
            raise self._make_error()
        self._stream.close()

    def _make_error(self) -> Exception:
        if (code := self._stream.exit_code) == SLOW_PATTERN:
            return slow_pattern_error(self._log_filter)
        return HostError(self._stream.host, "cannot read its log", code, self._stream.stderr)


class _ArchivedLog:
    """The chunks of a replica's log in the bucket."""

    def __init__(self, bucket: Bucket, job_id: str, name: str) -> None:
        self._bucket, self._folder = bucket, paths.log(job_id, name)
        self._sizes: Mapping[str, int] | None = None

    def sizes(self) -> Mapping[str, int]:
        if self._sizes is None:
            self._sizes = self._bucket.sizes(self._folder)
        return self._sizes

    def read(self, name: str, start: int, end: int) -> bytes:
        return self._bucket.read_part(f"{self._folder}/{name}", start, end)
