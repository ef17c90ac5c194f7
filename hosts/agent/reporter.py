"""Exchange one replica's state with its job, in a thread of its own: write its heartbeat, then read the job's record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from hosts.agent.leader import Leader
from hosts.agent.supervisor import Supervisor
from jobs import paths
from jobs.bucket import Conflict
from jobs.host_power import HostStarter
from jobs.lease import Clock
from jobs.ledger import Ledger, Stored
from jobs.notification import Notification
from jobs.records import JobRecord, ReplicaRecord, Usage
from jobs.serialization import RecordError
from jobs.states import JobState


@dataclass(frozen=True)
class HostFunctions:
    """Functions by which the agent queries its host, and starts others; the defaults return nothing.

    `usage` reads the trainer's resource usage. `connections` takes a map of peers' addresses to their names, and reads the
    state of the host's sockets. `preempted` reads whether the host is being preempted. `starter` creates a client that starts
    other hosts.
    """

    usage: Callable[[], Usage | None] = lambda: None
    connections: Callable[[Mapping[str, str]], list[str]] = lambda _: []
    preempted: Callable[[], bool] = lambda: False
    starter: Callable[[], HostStarter | None] = lambda: None


class Reporter:
    """Exchange records between a supervisor and the bucket. A cycle may block on the bucket; no other thread waits for it."""

    def __init__(
        self,
        supervisor: Supervisor,
        incarnation: str,
        ledger: Ledger,
        clock: Clock,
        now: Callable[[], str],
        version: str | None,
        host_functions: HostFunctions = HostFunctions(),
        notify: Callable[[JobRecord], Notification | None] = lambda _: None,
    ) -> None:
        """Prepare to report a replica.

        `version` is that of the replica's record in the bucket, which an earlier incarnation wrote; None if there is none.
        `notify` begins to report the job's end to the target of `--notify`; it returns the result, None until it is known.
        """
        plan, name = supervisor.assignment.plan, supervisor.assignment.name
        self._plan, self._name, self._incarnation, self._log = plan, name, incarnation, supervisor.assignment.log
        self._ledger, self._supervisor, self._clock, self._now = ledger, supervisor, clock, now
        self._leader = Leader(plan, name, incarnation, ledger, clock, now, host_functions.starter())
        self._version, self._host, self._notify = version, host_functions, notify
        self._peers = {plan.addresses[host]: replica for replica, host in plan.hosts.items() if host in plan.addresses}
        self._usage: Usage | None = None
        self._connections: list[str] = []
        self._lines = -1
        self._published: ReplicaRecord | None = None
        self._heartbeat_seq = 0
        self._heartbeat_at = self._measure_at = 0.0
        self._epoch = 0
        self._job: JobRecord | None = None
        self.finished = False
        """True once the job has ended and this replica has nothing left to do for it."""
        self.due_at_once = False
        """True if the job's state changed: the rules may change it again, so the next cycle should start at once."""
        self.another_leads = False
        """True while another replica leads the job; that one monitors the queue."""

    @property
    def job(self) -> JobRecord | None:
        """The job's record as it was last read; None before the first cycle."""
        return self._job

    @property
    def unpublished(self) -> bool:
        """True while the bucket does not have the replica's current record."""
        return self._published != self._supervisor.record

    def publish(self) -> None:
        """Write this replica's record if it changed or its heartbeat is due; BucketError if the bucket cannot be reached.

        Do nothing if the record was deleted with its job, or if a later job has the same id.
        """
        record = self._supervisor.record
        if self._published == record and self._clock() < self._heartbeat_at:
            return
        self._heartbeat_seq += 1
        new = self._with_status(record)
        try:
            self._version = self._ledger.write_replica(self._plan.jobId, new, self._version)
        except Conflict:
            # Our own last write succeeded but its answer was lost, or a late write of an earlier incarnation came first.
            stored = self._ledger.job(self._plan.jobId)
            if stored and stored.record.is_of_same_job(record):
                self._version = self._ledger.replica_version(self._plan.jobId, self._name)
                self._version = self._ledger.write_replica(self._plan.jobId, new, self._version)
        self._published = record
        self._heartbeat_at = self._clock() + self._plan.heartbeatSeconds

    def _with_status(self, record: ReplicaRecord) -> ReplicaRecord:
        """Return the record with the heartbeat, and with what changes all the time: lines, usage, progress, connections."""
        lines = self._supervisor.lines
        current = replace(
            record,
            lines=lines,
            runSeconds=self._supervisor.run_seconds,
            usage=self._usage,
            progress=self._supervisor.progress,
            connections=self._connections,
            heartbeatTime=self._now(),
        )
        return replace(current, incarnation=self._incarnation, heartbeatSeq=self._heartbeat_seq)

    def run_cycle(self) -> None:
        """Write this replica's record, read the job's, lead it with its lease; BucketError, RecordError end only this cycle."""
        self.due_at_once = False
        self.publish()
        stored = self._ledger.job(self._plan.jobId)
        if stored is None or not stored.record.is_of_same_job(self._supervisor.record):
            raise RecordError(f"{paths.job(self._plan.jobId)} is gone")
        if stored.record.lease.epoch < self._epoch:
            return  # an outdated answer: a later holder of the lease was seen already
        replicas: dict[str, ReplicaRecord] = {}
        with suppress(Conflict):  # another replica was quicker: the next cycle reads its change
            if not self._leader.leads(stored.record) and self._leader.may_take(stored.record):
                stored = self._leader.take(stored)
            if self._leader.leads(stored.record):
                replicas = self._replicas(stored.record)
                stored = self._lead(stored, replicas)
        self.another_leads = not self._leader.leads(stored.record) and not stored.record.lease.submitter
        self._apply_job_state(stored.record)
        self._check_finished(stored, replicas)
        self._measure()

    def _measure(self) -> None:
        """Read the trainer's usage after a cycle, so that the next heartbeat need not wait for it."""
        if self._clock() >= self._measure_at:
            self._usage = self._host.usage()
            lines = self._supervisor.lines
            quiet = lines == self._lines and not self._supervisor.idle
            self._lines, self._connections = lines, self._host.connections(self._peers) if quiet else []
            self._measure_at = self._clock() + self._plan.heartbeatSeconds / 2

    def _replicas(self, job: JobRecord) -> dict[str, ReplicaRecord]:
        """Return the records of all replicas of the job."""
        others = [name for name in self._plan.replicas if name != self._name]
        stored = self._ledger.replicas(self._plan.jobId, others)
        replicas = {name: record for name, record in stored.items() if job.is_of_same_job(record)}
        replicas[self._name] = self._with_status(self._supervisor.record)
        return replicas

    def _lead(self, stored: Stored[JobRecord], replicas: dict[str, ReplicaRecord]) -> Stored[JobRecord]:
        before = stored.record
        stored = self._leader.act(stored, replicas, not before.final and self._ledger.cancel_requested(self._plan.jobId))
        after = stored.record
        if (after.state, after.attempt) != (before.state, before.attempt):
            attempt = f", attempt {after.attempt}" if after.attempt else ""
            self._log.write_message(f"job {after.state}{attempt}", "ERROR" if after.state is JobState.FAILED else "INFO")
            self.due_at_once = True
        for event in after.events:
            if event not in before.events:
                self._log.write_message(event.cause, "WARNING")
        return stored

    def _apply_job_state(self, job: JobRecord) -> None:
        """Give the supervisor the job's attempt, and order its trainer to end if the job ends."""
        self._epoch = job.lease.epoch
        self._job = job
        ending = job.final or job.state is JobState.CANCELLING
        self._supervisor.set_target_state(job.attempt, f"job {job.state}" if ending else "")

    def _check_finished(self, stored: Stored[JobRecord], replicas: dict[str, ReplicaRecord]) -> None:
        """Set `finished` once there is nothing left to do for an ended job.

        Call it after `_apply_job_state`: without the order to end, an idle trainer could be about to restart.
        """
        job = stored.record
        if not job.final or not self._supervisor.idle or self.unpublished:
            return
        if self._leader.leads(job):
            if not self._leader.replicas_stopped(job, replicas) or not self._notified(stored):
                return
            self._ledger.free_hosts(job.jobId)
        self.finished = True

    def _notified(self, stored: Stored[JobRecord]) -> bool:
        """Return True once the notification is in the job's record, or if none is configured."""
        job = stored.record
        if not self._plan.notify or (job.notification and job.notification.time):
            return True
        if self._supervisor.record.unsaved is None:
            return False  # the search for files would time out behind a slow command
        if (result := self._notify(job)) is None:
            return False
        try:
            self._ledger.change_job(stored, replace(job, notification=result))
        except Conflict:
            return False  # the next cycle tries again with the new record
        failed = f"failed: {result.error}" if result.error else "done"
        self._log.write_message(f"notify: {result.target} {failed}", "WARNING" if result.error else "INFO")
        return True
