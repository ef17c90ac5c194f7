"""The records in the bucket, typed: read together with their version, and written only over that."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from jobs import paths
from jobs.checked import Record, RecordError
from jobs.queue import Entry, Queue
from jobs.records import JobRecord, Plan, ReplicaRecord
from jobs.states import JobState
from jobs.store import Conflict, Store
from jobs.study import Trial

R = TypeVar("R", bound=Record)
_TRIES = 50


@dataclass(frozen=True)
class Stored(Generic[R]):
    """A record, and the version of it in the bucket."""

    record: R
    version: str


class Ledger:
    """Reads and writes what is said about jobs.

    StoreError: the bucket fails. RecordError: a record is not what it should be.
    """

    def __init__(self, store: Store, sleep: Callable[[float], None] = time.sleep) -> None:
        self.store = store
        self._sleep = sleep

    def job(self, job_id: str) -> Stored[JobRecord] | None:
        """A job's record, None where there is none."""
        item = self.store.read(paths.job(job_id))
        return Stored(_job(job_id, item.content), item.version) if item else None

    def jobs_named(self, job_ids: Iterable[str]) -> dict[str, Stored[JobRecord] | RecordError]:
        """The records of those jobs that have one, or what is wrong with it; one call of the store."""
        wanted = {paths.job(job_id): job_id for job_id in job_ids}
        found: dict[str, Stored[JobRecord] | RecordError] = {}
        for path, item in self.store.read_all(wanted).items():
            try:
                found[wanted[path]] = Stored(_job(wanted[path], item.content), item.version)
            except RecordError as error:
                found[wanted[path]] = error
        return found

    def create_job(self, record: JobRecord) -> Stored[JobRecord]:
        """The first record of an id; Conflict where the id was used before."""
        return Stored(record, self.store.create(paths.job(record.jobId), record.to_json()))

    def change_job(self, before: Stored[JobRecord], record: JobRecord) -> Stored[JobRecord]:
        """The next record of a job; Conflict where somebody else has moved it on."""
        name = paths.job(record.jobId)
        return Stored(record, self.store.replace(name, record.to_json(), before.version))

    def jobs(self) -> tuple[list[JobRecord], list[str]]:
        """Every job, the newest first, and a line about each record that cannot be read."""
        found, bad = [], []
        for name, content in self.store.scan(paths.EVERY_JOB).items():
            try:
                found.append(_job(paths.job_of(name), content))
            except RecordError as error:
                bad.append(f"{paths.job_of(name)}: {error}")
        return sorted(found, key=lambda record: record.createTime, reverse=True), bad

    def plan(self, job_id: str) -> Plan | None:
        """What a job's replicas need to know, None where it is not there yet."""
        item = self.store.read(paths.plan(job_id))
        return Plan.from_json(item.content) if item else None

    def create_plan(self, plan: Plan) -> None:
        """Write it, once."""
        self.store.create(paths.plan(plan.jobId), plan.to_json())

    def replicas(self, job_id: str, names: Iterable[str]) -> dict[str, ReplicaRecord]:
        """The records of those replicas that have one; one that cannot be read is as one that is not there."""
        wanted = {paths.replica(job_id, name): name for name in names}
        found = {}
        for path, item in self.store.read_all(wanted).items():
            with contextlib.suppress(RecordError):
                found[wanted[path]] = ReplicaRecord.from_json(item.content)
        return found

    def write_replica(self, job_id: str, record: ReplicaRecord, before: str | None) -> str:
        """A replica's record over the version that it wrote before; Conflict where another life of it has written."""
        name = paths.replica(job_id, record.name)
        if before is None:
            return self.store.create(name, record.to_json())
        return self.store.replace(name, record.to_json(), before)

    def replica_version(self, job_id: str, name: str) -> str | None:
        """The version of a replica's record, whatever is in it; None where there is none."""
        item = self.store.read(paths.replica(job_id, name))
        return item.version if item else None

    def trials_numbered(self, job_id: str, numbers: Iterable[int]) -> dict[int, Stored[Trial] | RecordError]:
        """The records of those trials that have one, or what is wrong with it; one call of the store."""
        wanted = {paths.trial(job_id, number): number for number in numbers}
        found: dict[int, Stored[Trial] | RecordError] = {}
        for path, item in self.store.read_all(wanted).items():
            try:
                found[wanted[path]] = Stored(_trial(wanted[path], item.content), item.version)
            except RecordError as error:
                found[wanted[path]] = error
        return found

    def trial(self, job_id: str, number: int) -> Stored[Trial] | None:
        """One of them, None where there is none."""
        item = self.store.read(paths.trial(job_id, number))
        return Stored(_trial(number, item.content), item.version) if item else None

    def create_trial(self, job_id: str, trial: Trial) -> Stored[Trial]:
        """The first record of a trial; Conflict where another replica has begun one of this number."""
        return Stored(trial, self.store.create(paths.trial(job_id, trial.trialId), trial.to_json()))

    def change_trial(self, job_id: str, before: Stored[Trial], trial: Trial) -> Stored[Trial]:
        """The next record of a trial; Conflict where another replica has it by now."""
        return Stored(trial, self.store.replace(paths.trial(job_id, trial.trialId), trial.to_json(), before.version))

    def cancel_requested(self, job_id: str) -> bool:
        """True once somebody asked for the job's end."""
        return self.store.read(paths.cancel(job_id)) is not None

    def request_cancel(self, job_id: str, request: bytes) -> None:
        """Ask for the job's end; nothing happens where somebody has asked before."""
        with contextlib.suppress(Conflict):
            self.store.create(paths.cancel(job_id), request)

    def queue(self) -> Queue:
        """Who has the hosts, and who waits."""
        return self._queue()[0]

    def change_queue(self, change: Callable[[Queue], Queue]) -> Queue:
        """The queue after a change, which is made of the newest queue, and again of a newer one where somebody was quicker.

        So `change` must come to the same when it finds its own work done.
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
        """Give a job's hosts to who comes next, or its place to who waits behind it."""
        if entry := self.queue().entry(job_id):
            self.change_queue(lambda queue: queue.without(entry))

    def _queue(self) -> tuple[Queue, str | None]:
        item = self.store.read(paths.QUEUE)
        if item is None:
            return Queue(), None
        try:
            return Queue.from_json(item.content), item.version
        except RecordError:
            if b'"schema"' in item.content and _is_newer(item.content):
                raise
            return self._rebuilt(), item.version

    def _rebuilt(self) -> Queue:
        """The queue as the jobs themselves tell it, for one that cannot be read: a garbled file must not stop a cluster."""
        entries: list[Entry] = []
        taken: set[str] = set()
        for job in reversed(self.jobs()[0]):
            if job.final:
                continue
            held = job.state is not JobState.QUEUED and taken.isdisjoint(job.hosts)
            entry = Entry(
                job.jobId,
                job.hosts if held or not job.wants else [],
                held=held,
                priority=job.priority,
                token=job.lease.holder if job.lease.submitter else "",
                submittedBy=job.submittedBy,
                createTime=job.createTime,
                wants=job.wants,
            )
            taken.update(entry.hosts if held else ())
            entries.append(entry)
        return Queue(entries).promoted()


def _job(job_id: str, content: bytes) -> JobRecord:
    """The record that lies in a job's folder; RecordError for that of another, too: anyone who trains can put one there."""
    record = JobRecord.from_json(content)
    if record.jobId != job_id:
        raise RecordError(f"job.json says that it is that of job {record.jobId!r}")
    return record


def _trial(number: int, content: bytes) -> Trial:
    """The record of a trial; RecordError for that of another."""
    trial = Trial.from_json(content)
    if trial.trialId != number:
        raise RecordError(f"the record of trial {number} says that it is that of trial {trial.trialId}")
    return trial


def _is_newer(content: bytes) -> bool:
    try:
        Queue.from_json(content)
    except RecordError as error:
        return "newer" in str(error)
    return False
