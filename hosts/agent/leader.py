"""Lead a job: hold its lease and change its record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from hosts.agent.job_rules import View, decide, replicas_to_start, stopped
from jobs import progress
from jobs.host_power import HostStarter
from jobs.lease import ChangeTimer, Clock
from jobs.ledger import Ledger, Stored
from jobs.records import Event, JobRecord, Plan, ReplicaRecord, with_events
from jobs.states import JobState, ReplicaState

_RANKS = 5
"""From this rank in the plan on, all replicas wait equally long before they take the lease."""


class Leader:
    """Lead a job while this replica holds the job's lease; every replica has such an object.

    The lease is free once the submitter has handed the job over. It expires when its holder is silent. Then the replicas try to
    take it, in the order of the plan.
    """

    def __init__(
        self,
        plan: Plan,
        name: str,
        incarnation: str,
        ledger: Ledger,
        clock: Clock,
        now: Callable[[], str],
        starter: HostStarter | None = None,
    ) -> None:
        """Prepare to lead a job; `starter` starts hosts that are off, None if no host can be started."""
        self._plan, self._name, self._ledger, self._clock, self._now = plan, name, ledger, clock, now
        self._starter = starter
        startable = starter.hosts if starter else frozenset()
        self._startable = frozenset(replica for replica, host in plan.hosts.items() if host in startable)
        self._me = f"{name}/{incarnation}"
        self._timer = ChangeTimer(clock)
        self._renew_at = 0.0
        self._end_by: float | None = None
        self._rank = min(plan.replicas.index(name), _RANKS)

    def leads(self, job: JobRecord) -> bool:
        """Return True while this replica holds the lease."""
        return job.lease.holder == self._me

    def may_take(self, job: JobRecord) -> bool:
        """Return True if there is no leader, or its lease has expired.

        If the submitter still holds the lease but is silent, the queue monitor ends the job; the lease is not taken.
        """
        lease = job.lease
        silent = self._timer.observe("lease", lease)
        if lease.submitter:
            return False
        if lease.is_assigned_to(self._name):
            return True  # an earlier incarnation of this replica, which has ended
        expiry = 0.0 if lease.free else self._plan.leaseSeconds
        return silent >= expiry + self._rank * self._plan.leaseSeconds / 2 / _RANKS

    def take(self, job: Stored[JobRecord]) -> Stored[JobRecord]:
        """Take the lease; Conflict if another replica was quicker."""
        stored = self._ledger.change_job(job, job.record.with_holder(self._me))
        self._schedule_renewal()
        return stored

    def act(self, job: Stored[JobRecord], replicas: Mapping[str, ReplicaRecord], cancel_requested: bool) -> Stored[JobRecord]:
        """Apply the rules, renew the lease if due, return the job's record; Conflict, without a change, if another leads."""
        record = job.record
        if record.state is JobState.RUNNING:
            # Add the time in which this leader saw the job run; the next leader continues from these sums.
            seen = self._timer.observe("runs", True)
            run, attempt = (round(seconds + seen, 3) for seconds in (record.runSeconds, record.attemptSeconds))
            record = replace(record, runSeconds=run, attemptSeconds=attempt)
        hosts = list(self._plan.hosts.values())
        hosts_changed = bool(hosts) and not record.final and record.state is not JobState.QUEUED and record.hosts != hosts
        if hosts_changed:
            record = replace(record, hosts=hosts)  # the queue was corrupt, and was rebuilt since the job was submitted
        view = self._view(record, replicas, cancel_requested)
        new = decide(record, view)
        if self._starter:
            lines = self._starter.request_starts(self._plan.hosts[name] for name in replicas_to_start(record, view))
            if lines and not record.final:
                current = new or record
                new = replace(current, events=with_events(current.events, *(Event(view.now, line) for line in lines)))
        if record.final:
            self._end_by = self._end_by or self._clock() + self._plan.stopSeconds + 2 * self._plan.heartbeatSeconds
        if new is None and not hosts_changed and self._clock() < self._renew_at:
            return job
        new = new or record
        reports = {n: r.progress for n, r in replicas.items()}
        new = replace(
            new, progress=progress.merge_replicas(reports, self._plan.chief, new.steps, not new.final) or new.progress
        )
        stored = self._ledger.change_job(job, replace(new, lease=new.lease.renewed()))
        self._schedule_renewal()
        self._timer.reset("runs")
        self._timer.observe("runs", True)
        return stored

    def replicas_stopped(self, job: JobRecord, replicas: Mapping[str, ReplicaRecord]) -> bool:
        """Return True once every replica of an ended job has stopped, or the time for that is over."""
        view = self._view(job, replicas, False)
        return stopped(job, view) or (self._end_by is not None and self._clock() > self._end_by)

    def _schedule_renewal(self) -> None:
        self._renew_at = self._clock() + self._plan.leaseSeconds / 3

    def _view(self, job: JobRecord, replicas: Mapping[str, ReplicaRecord], cancel_requested: bool) -> View:
        """Return the leader's view; its durations are measured since this leader first saw a value.

        Its own replica is never silent: its record is the present one.
        """
        timer, names, now = self._timer, self._plan.replicas, self._clock()
        silence = {
            n: timer.observe(("beat", n), (r.incarnation, r.heartbeatSeq) if (r := replicas.get(n)) else None, now)
            for n in names
        } | {self._name: 0.0}
        since_exit, since_disruption = {}, {}
        for name, record in replicas.items():
            if record.succeeded or (record.state is ReplicaState.EXITED and record.attempt == job.attempt):
                since_exit[name] = timer.observe(("exit", name), (record.attempt, record.restarts, record.exitCode), now)
            if record.attempt != job.attempt:
                continue
            expired = silence[name] >= self._plan.lostAfterSeconds
            if record.restarts or record.awaits_restart or expired:
                since_disruption[name] = timer.observe(
                    ("disruption", name), (record.attempt, record.restarts, record.awaits_restart, expired), now
                )
        printed = tuple(record.lines for record in replicas.values())
        # While a needed replica waits for its busy host, the others may wait for it: this time does not count.
        busy = any(r.hostBusy and not self._plan.is_optional(n) for n, r in replicas.items())
        return View(
            self._plan,
            replicas,
            self._now(),
            silence,
            since_exit,
            since_disruption,
            max(timer.observe("state", (job.state, job.attempt)), job.attemptSeconds),
            timer.observe("printed", (printed, job.attempt, now if busy else None), now),
            cancel_requested,
            self._startable,
        )
