"""Read and write the typed records in the bucket; a write replaces only the version that was read."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from jobs import paths
from jobs.bucket import Conflict, RecordStore
from jobs.queue import Queue, QueueEntry
from jobs.records import JobRecord, Plan, ReplicaRecord
from jobs.serialization import NewerSchemaError, Record, RecordError
from jobs.states import JobState
from jobs.study import Trial

K = TypeVar("K", str, int)
R = TypeVar("R", bound=Record)
_TRIES = 50


@dataclass(frozen=True)
class Stored(Generic[R]):
    """A record, and the version of it in the bucket."""

    record: R
    version: str


class Ledger:
    """Reads and writes the records of jobs. BucketError: the bucket fails. RecordError: a record is invalid."""

    def __init__(self, store: RecordStore, sleep: Callable[[float], None] = time.sleep) -> None:
        self.store = store
        self._sleep = sleep

    def job(self, job_id: str) -> Stored[JobRecord] | None:
        """Return a job's record, or None if there is none."""
        item = self.store.read(paths.job(job_id))
        return Stored(_job(job_id, item.content), item.version) if item else None

    def jobs_named(self, job_ids: Iterable[str]) -> dict[str, Stored[JobRecord] | RecordError]:
        """Return the records of those jobs that have one, or the error in it; one call of the store."""
        return self._read_all({paths.job(job_id): job_id for job_id in job_ids}, _job)

    def _read_all(self, keys: Mapping[str, K], parse: Callable[[K, bytes], R]) -> dict[K, Stored[R] | RecordError]:
        """Return the parsed objects, or the errors in them; `keys` maps their names to the keys of the result."""
        records: dict[K, Stored[R] | RecordError] = {}
        for name, item in self.store.read_all(keys).items():
            try:
                records[keys[name]] = Stored(parse(keys[name], item.content), item.version)
            except RecordError as error:
                records[keys[name]] = error
        return records

    def create_job(self, record: JobRecord) -> Stored[JobRecord]:
        """Write the first record of an id. Raises Conflict if the id was used before."""
        return Stored(record, self.store.create(paths.job(record.jobId), record.to_json()))

    def change_job(self, before: Stored[JobRecord], record: JobRecord) -> Stored[JobRecord]:
        """Write the next record of a job. Raises Conflict if another writer has changed it."""
        name = paths.job(record.jobId)
        return Stored(record, self.store.replace(name, record.to_json(), before.version))

    def jobs(self) -> tuple[list[JobRecord], dict[str, RecordError]]:
        """Return every job, the newest first, and by job id the error in each record that cannot be read."""
        records, errors = [], {}
        for name, content in self.store.scan(paths.EVERY_JOB).items():
            job_id = paths.job_of(name)
            try:
                records.append(_job(job_id, content))
            except RecordError as error:
                errors[job_id] = error
        return sorted(records, key=lambda record: record.createTime, reverse=True), errors

    def plan(self, job_id: str) -> Plan | None:
        """Return the plan that a job's replicas need, or None if it is not written yet."""
        item = self.store.read(paths.plan(job_id))
        return Plan.from_json(item.content) if item else None

    def create_plan(self, plan: Plan) -> None:
        """Write a job's plan; Conflict if it has one."""
        self.store.create(paths.plan(plan.jobId), plan.to_json())

    def replicas(self, job_id: str, names: Iterable[str]) -> dict[str, ReplicaRecord]:
        """Return the records of those replicas that have one; an unreadable record counts as missing."""
        records = self.replicas_named(job_id, names).items()
        return {name: stored.record for name, stored in records if isinstance(stored, Stored)}

    def replicas_named(self, job_id: str, names: Iterable[str]) -> dict[str, Stored[ReplicaRecord] | RecordError]:
        """Return the records of those replicas that have one, or the error in it. Raises NewerSchemaError."""
        names_by_path = {paths.replica(job_id, name): name for name in names}
        records = self._read_all(names_by_path, lambda _, content: ReplicaRecord.from_json(content))
        for record in records.values():
            if isinstance(record, NewerSchemaError):
                raise record
        return records

    def write_replica(self, job_id: str, record: ReplicaRecord, before: str | None) -> str:
        """Write a replica's record over its previous version; Conflict if another incarnation has written it."""
        name = paths.replica(job_id, record.name)
        if before is None:
            return self.store.create(name, record.to_json())
        return self.store.replace(name, record.to_json(), before)

    def replica_version(self, job_id: str, name: str) -> str | None:
        """Return the version of a replica's record, valid or not, or None if there is none."""
        item = self.store.read(paths.replica(job_id, name))
        return item.version if item else None

    def trials_numbered(self, job_id: str, numbers: Iterable[int]) -> dict[int, Stored[Trial] | RecordError]:
        """Return the records of those trials that have one, or the error in it; one call of the store."""
        return self._read_all({paths.trial(job_id, number): number for number in numbers}, _trial)

    def trial(self, job_id: str, number: int) -> Stored[Trial] | None:
        """Return a trial's record, or None if there is none."""
        item = self.store.read(paths.trial(job_id, number))
        return Stored(_trial(number, item.content), item.version) if item else None

    def create_trial(self, job_id: str, trial: Trial) -> Stored[Trial]:
        """Write the first record of a trial. Raises Conflict if another replica began this number."""
        return Stored(trial, self.store.create(paths.trial(job_id, trial.trialId), trial.to_json()))

    def change_trial(self, job_id: str, before: Stored[Trial], trial: Trial) -> Stored[Trial]:
        """Write the next record of a trial. Raises Conflict if another replica has taken it over."""
        return Stored(trial, self.store.replace(paths.trial(job_id, trial.trialId), trial.to_json(), before.version))

    def cancel_requested(self, job_id: str) -> bool:
        """Return True once the job's end was requested."""
        return self.store.read(paths.cancel(job_id)) is not None

    def request_cancel(self, job_id: str, request: bytes) -> None:
        """Request the job's end; do nothing if it was requested before."""
        with contextlib.suppress(Conflict):
            self.store.create(paths.cancel(job_id), request)

    def queue(self) -> Queue:
        """Return the queue: the jobs that have hosts and those that wait."""
        return self._queue()[0]

    def change_queue(self, change: Callable[[Queue], Queue]) -> Queue:
        """Apply a change to the newest queue and return the result.

        If another writer was quicker, the change is applied again to the newer queue. So `change` must have no further effect
        on a queue that already contains it.
        """
        for _ in range(_TRIES):
            queue, version = self._queue()
            new = change(queue)
            if new == queue:
                return queue
            try:
                if version is None:
                    self.store.create(paths.QUEUE, new.to_json())
                else:
                    self.store.replace(paths.QUEUE, new.to_json(), version)
            except Conflict:
                self._sleep(random.uniform(0.005, 0.05))  # noqa: S311  nothing is secret here
                continue
            return new
        raise Conflict(paths.QUEUE)

    def free_hosts(self, job_id: str) -> None:
        """Remove a job from the queue, which assigns its hosts to the next jobs."""
        if entry := self.queue().entry(job_id):
            self.change_queue(lambda queue: queue.without(entry))

    def _queue(self) -> tuple[Queue, str | None]:
        item = self.store.read(paths.QUEUE)
        if item is None:
            return Queue(), None
        try:
            return Queue.from_json(item.content), item.version
        except NewerSchemaError:
            raise
        except RecordError:
            return self._rebuild(), item.version

    def _rebuild(self) -> Queue:
        """Rebuild the queue from the jobs if it cannot be read: a garbled file must not stop a cluster."""
        entries: list[QueueEntry] = []
        busy: set[str] = set()
        for job in reversed(self.jobs()[0]):
            if job.final:
                continue
            has_hosts = job.state is not JobState.QUEUED and busy.isdisjoint(job.hosts)
            entry = QueueEntry(
                job.jobId,
                job.hosts if has_hosts or not job.candidates else [],
                has_hosts=has_hosts,
                priority=job.priority,
                submission_id=job.lease.holder if job.lease.submitter else "",
                submittedBy=job.submittedBy,
                createTime=job.createTime,
                candidates=job.candidates,
            )
            busy.update(entry.hosts if has_hosts else ())
            entries.append(entry)
        return Queue(entries).promoted()


class Trials:
    """The trials of one job. `bad` maps each trial with an unreadable record to its error; its number counts as used."""

    def __init__(self, ledger: Ledger, job_id: str) -> None:
        self._ledger, self._job_id = ledger, job_id
        self._known: dict[int, Trial] = {}
        self.bad: dict[int, str] = {}

    def read(self) -> list[Trial]:
        """Return all readable trials, in the order of their numbers; BucketError if the bucket fails."""
        running_numbers = [number for number, trial in self._known.items() if not trial.final]
        ahead = 1
        while True:
            first = self.next_number
            trials = self._ledger.trials_numbered(self._job_id, [*running_numbers, *range(first, first + ahead)])
            for number, stored in trials.items():
                if isinstance(stored, RecordError):
                    self._known.pop(number, None)
                    self.bad[number] = str(stored)
                else:
                    self._known[number] = stored.record
            if not any(number >= first for number in trials):
                return [self._known[number] for number in sorted(self._known)]
            running_numbers, ahead = [], 2 * ahead

    @property
    def next_number(self) -> int:
        """Return the first unused number."""
        return max((*self._known, *self.bad), default=0) + 1


def _job(job_id: str, content: bytes) -> JobRecord:
    """Return the record in a job's folder; RecordError also for the record of another job: a trainer can copy one there."""
    record = JobRecord.from_json(content)
    if record.jobId != job_id:
        raise RecordError(f"job.json says that it is that of job {record.jobId!r}")
    return record


def _trial(number: int, content: bytes) -> Trial:
    """Return the record of a trial. Raises RecordError for the record of another trial."""
    trial = Trial.from_json(content)
    if trial.trialId != number:
        raise RecordError(f"the record of trial {number} says that it is that of trial {trial.trialId}")
    return trial
