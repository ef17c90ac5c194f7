"""Run the job that holds this host, in cycles, and monitor the queue, unless another host leads the job."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from hosts.agent import replica_rules
from hosts.agent.job_files import JobFiles
from hosts.agent.reporter import HostFunctions, Reporter
from hosts.agent.supervisor import Spawn, Supervisor
from jobs import lease, paths
from jobs.bucket import BucketError, Conflict, with_remedy
from jobs.lease import ChangeTimer, Clock
from jobs.ledger import Ledger, Stored
from jobs.queue import QueueEntry
from jobs.queue_monitor import PAUSE_SECONDS, QueueMonitor
from jobs.records import JobRecord, Plan
from jobs.serialization import RecordError
from jobs.states import JobState, ReplicaState

# Poll this many times as often while a job ends, and for these seconds after it and after the agent's start: a person waits.
_QUICK = 4
_QUICK_SECONDS = 10.0
# Poll this many times as often while `fab train` is about to hand over a job that has this host.
_HAND_OVER = 40


class Agent:
    """One incarnation of the process that a host's unit runs.

    One thread calls `run_cycle`, and may wait for the bucket. Another polls the supervisor, and must not wait.
    """

    def __init__(
        self,
        name: str,
        incarnation: str,
        ledger: Ledger,
        job_files: JobFiles,
        spawn: Spawn,
        clock: Clock,
        now: Callable[[], str],
        poll: float,
        lease_seconds: float = lease.SECONDS,
        host_functions: HostFunctions = HostFunctions(),  # noqa: B008  it never changes
        is_current_version: Callable[[], bool] = lambda: True,
        idle_seconds: float = 0.0,
    ) -> None:
        """Prepare the work of a host.

        `is_current_version` returns False once this host has another version of this program or of its configuration. Without a
        job the process ends after `idle_seconds`.
        """
        self._name, self._incarnation, self._ledger, self._job_files, self._spawn = name, incarnation, ledger, job_files, spawn
        self._clock, self._now, self._poll = clock, now, poll
        self._change_timer = ChangeTimer(clock)
        self._lease_seconds = lease_seconds
        self._me = f"{name}/{incarnation}"
        self._host, self._is_current_version = host_functions, is_current_version
        self._queue_monitor = QueueMonitor(ledger, self._change_timer, self._me, lease_seconds, host_functions.starter())
        self._quick_until = clock() + _QUICK_SECONDS
        self._idle_seconds = idle_seconds
        self._idle_until = clock() + idle_seconds
        self._reporter: Reporter | None = None
        self.supervisor: Supervisor | None = None
        self._failing = False
        self._failure = ""
        self._end_seen = ""
        self._terminated = self._preemption_checked = self._due_at_once = False
        self._monitors_others = False
        self._awaited = ""  # the job that `fab train` is about to hand over to this host
        self.finished = False
        """True once the process may end.

        That is: no job has held this host for `idle_seconds`, none waits for it, and the leaders of all other jobs are alive;
        or no job holds it and another version of this program or of its configuration is installed; or the unit is being
        stopped and the replica's record is in the bucket.
        """

    @property
    def status(self) -> str:
        """One line for `systemctl status`."""
        reporter, supervisor = self._reporter, self.supervisor
        if reporter is None or supervisor is None:
            return f"no job is here: {self._failure}" if self._failure else "no job has this host"
        job, record = reporter.job, supervisor.record
        what = f"job {job.jobId} {job.state}" if job else "job not read yet"
        return f"{what}, trainer {record.state}, restarts {record.restarts}"

    @property
    def watched(self) -> str:
        """The name of the object whose change starts the next cycle at once: the job's record, or else the queue."""
        job = self.supervisor.assignment.plan.jobId if self.supervisor else self._awaited
        return paths.job(job) if job else paths.QUEUE

    def terminate(self) -> None:
        """Stop the trainer, as the unit is being stopped. The job continues when the unit starts again."""
        self._terminated = True
        if self.supervisor:
            self.supervisor.terminate()

    def run_cycle(self) -> float:
        """Read and write the bucket as is due; log a failure; return the seconds until the next cycle."""
        try:
            self._run_cycle()
        except (OSError, RecordError, Conflict) as error:
            self._note_failure(error)
            return self._poll
        if self._failing and self.supervisor:
            self.supervisor.assignment.log.write_message("the agent's cycles succeed again")
        self._failing, self._failure = False, ""
        return self._wait()

    def _wait(self) -> float:
        reporter = self._reporter
        if self._due_at_once:
            self._due_at_once = False
            return 0.0
        if self._monitors_others:
            return max(self._poll, PAUSE_SECONDS)
        if reporter is None or reporter.job is None:
            quick = _HAND_OVER if self._awaited else _QUICK
            return self._poll / quick if self._clock() < self._quick_until else self._poll
        if reporter.due_at_once:
            return 0.0
        self._quick_until = self._clock() + _QUICK_SECONDS
        quick = reporter.job.final or reporter.job.state is JobState.CANCELLING
        return self._poll / _QUICK if quick else self._poll

    def _run_cycle(self) -> None:
        unreadable: RecordError | None = None
        if self._reporter is None and not self._terminated:
            try:
                self._claim_next_job()
            except RecordError as error:  # such a job is ended below, like one without a leader
                unreadable = error
        if self._reporter is not None:
            self._report(self._reporter)
        elif self._terminated:
            self.finished = True
        if not self._terminated and (self._reporter is None or not self._reporter.another_leads):
            self._queue_monitor.run_if_due()
            if self._monitors_others and not self._queue_monitor.stalled and not self._within_idle_seconds:
                self.finished = True
        if unreadable:
            raise unreadable

    @property
    def _within_idle_seconds(self) -> bool:
        return self._clock() < self._idle_until

    def _claim_next_job(self) -> None:
        """Claim the job that holds this host. If an earlier incarnation left the end of a job unfinished, claim that job first.

        Finish if no job has a host or waits for this host and `idle_seconds` have passed, or if another version or
        configuration is installed.
        """
        if not self._is_current_version():
            self.finished = True  # the next job is for the newer version that fab has installed
            return
        awaited, self._awaited = self._awaited, ""
        secrets = self._job_files.secrets()  # read first: a job is in the queue before its secrets are here
        queue = self._ledger.queue()
        entries = queue.entries_for(self._name)
        if (unfinished := self._unfinished()) is None:
            self._job_files.tidy([entry.jobId for entry in entries], secrets)
        entry = unfinished or queue.holder(self._name)
        # The hosts of other jobs may all be gone, so that no other process ends these.
        self._monitors_others = not entry and not entries and any(other.has_hosts for other in queue.entries)
        if entry is None:
            self.finished = not entries and not self._monitors_others and not self._within_idle_seconds
            return
        stored = self._ledger.job(entry.jobId)
        if stored is None or (stored.record.final and not unfinished):
            return  # the job's record is not there yet, or the job has ended and is not yet out of the queue
        job = stored.record
        if job.lease.submitter:  # the submission may still fail
            self._awaited = entry.jobId
            if awaited != self._awaited:
                self._quick_until = self._clock() + _QUICK_SECONDS
            self._job_files.connect_early()
            return
        try:
            plan = self._ledger.plan(entry.jobId)
            replica = entry.replica_on(self._name)
            if plan is None or replica not in plan.replicas:
                raise RecordError(f"{paths.plan(entry.jobId)} is not there, or knows no {replica}")
            self._claim(plan.with_hosts(entry.placement), replica, job)
            self._job_files.remember(entry)
        except (BucketError, RecordError) as error:
            self._end_unclaimable(stored, error)
            raise

    def _unfinished(self) -> QueueEntry | None:
        """Return the entry of a job that has ended, but whose log, diagnosis or unsaved files may be on this host alone."""
        if (entry := self._job_files.unfinished()) is None:
            return None
        with suppress(RecordError):
            stored = self._ledger.job(entry.jobId)
            if stored and stored.record.final and entry.createTime in ("", stored.record.createTime):
                return entry
        self._job_files.forget(entry.jobId)  # the job goes on, or was deleted
        return None

    def _end_unclaimable(self, stored: Stored[JobRecord], error: Exception) -> None:
        """End a job whose corrupt plan or package would keep its hosts for ever, unless it has a leader, which decides."""
        job = stored.record
        patience = Plan.preparingSeconds if isinstance(error, BucketError) and not job.final else 2 * self._lease_seconds
        tried_seconds = self._change_timer.observe(("claim", job.jobId), True)
        if job.final:
            if tried_seconds >= patience:
                self._job_files.forget(job.jobId)
            return
        is_leaderless = job.lease.free or self._change_timer.observe(("led", job.jobId), job.lease) >= self._lease_seconds
        if tried_seconds >= patience and is_leaderless:
            why = f"{self._name} cannot start it: {error.strerror or error if isinstance(error, OSError) else error}"
            self._ledger.change_job(stored, job.with_holder(self._me).ended(why))

    def _claim(self, plan: Plan, name: str, job: JobRecord) -> None:
        """Continue from the record of an earlier incarnation of this replica in the bucket, or begin."""
        version = self._ledger.replica_version(plan.jobId, name)
        previous = self._ledger.replicas(plan.jobId, [name]).get(name)
        if previous and not job.is_of_same_job(previous):
            previous = None
        assignment = self._job_files.prepare(plan, name)
        if previous and job.final:
            record = replica_rules.killed_if_running(previous)
        else:
            record = replica_rules.resume(plan, name, job.attempt, previous, self._now())
        record = replace(record, jobCreateTime=job.createTime)
        if previous and previous.state is ReplicaState.RUNNING:
            assignment.log.write_message("the replica or its host was stopped", "WARNING")
        supervisor = Supervisor(assignment, record, self._spawn, self._clock, self._now)
        self._reporter = Reporter(
            supervisor, self._incarnation, self._ledger, self._clock, self._now, version, self._host, self._job_files.notify
        )
        self.supervisor, self._failing = supervisor, False  # this job's log has no failure yet
        self._end_seen = (job.endTime or "") if job.final else ""
        if self._terminated:  # checked last: terminate() may be called at any time
            supervisor.terminate()

    def _report(self, reporter: Reporter) -> None:
        assert self.supervisor is not None
        # Only the chief's host knows these parts of manifest.json: versions, and the hash of the data.
        if (facts := self._job_files.facts()) is not None:
            self.supervisor.set_facts(facts)
        if self._terminated:
            self._check_preemption()
            reporter.publish()
            if self.supervisor.idle and not reporter.unpublished:
                self.finished = self._job_files.finish()
            return
        try:
            reporter.run_cycle()
        except RecordError:
            # A job whose record stays unreadable ends here: it must not keep its host for ever.
            if self._change_timer.observe("unreadable", True) >= 2 * self._lease_seconds:
                self.supervisor.set_target_state(attempt=0, ending="the job's record cannot be read")
                if self.supervisor.idle and self._job_files.finish():
                    self._release()
            raise
        self._change_timer.reset("unreadable")
        self._diagnose(reporter.job, self.supervisor)
        if not self._record_unsaved(reporter.job, self.supervisor) or reporter.unpublished:
            return
        if reporter.finished and self._job_files.finish():
            self._release()

    def _diagnose(self, job: JobRecord | None, supervisor: Supervisor) -> None:
        """Write the diagnosis of a job that FAILED once its trainer has stopped, before files are removed."""
        if job is None or job.state is not JobState.FAILED:
            return
        self._end_seen = self._end_seen or self._now()
        if supervisor.idle:
            self._job_files.diagnose(job, supervisor.record, self._end_seen)

    def _record_unsaved(self, job: JobRecord | None, supervisor: Supervisor) -> bool:
        """Record the files that an ended job wrote outside JOB_DIR; return True once done: then its folders may be removed."""
        if job is None or not job.final or not supervisor.idle:
            return False
        record = supervisor.record
        if record.unsaved is None and (files := self._job_files.unsaved(record)) is not None:
            supervisor.set_unsaved(files)
            self._due_at_once = True
        return record.unsaved is not None

    def _check_preemption(self) -> None:
        """Check once whether the unit is being stopped because its host is preempted."""
        if self._preemption_checked or self.supervisor is None:
            return
        self._preemption_checked = True
        if self._host.preempted():
            self.supervisor.assignment.log.write_message("this host is preempted", "WARNING")
            self.supervisor.set_preempted()

    def _release(self) -> None:
        """Forget the job."""
        if self.supervisor:
            self._job_files.forget(self.supervisor.assignment.plan.jobId)
        self._reporter = self.supervisor = None
        self._end_seen = ""
        self._idle_until = self._clock() + self._idle_seconds
        self._due_at_once = True

    def _note_failure(self, error: Exception) -> None:
        self._failure = with_remedy(str(error))
        if not self._failing and self.supervisor:
            line = f"a cycle of the agent failed, trying again: {self._failure}"
            self.supervisor.assignment.log.write_message(line, "WARNING")
        elif not self._failing:
            sys.stderr.write(f"<4>agent: {self._failure}; trying again\n")  # to the journal, as no job's log is open
        self._failing = True
