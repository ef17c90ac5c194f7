"""One replica of a job: holds what it knows, asks the pure rules what follows, and does it."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from replica import restart
from replica.bucket import Bucket
from replica.decide import killer
from replica.leader import Leader
from replica.ledger import Ledger
from replica.log import Log
from replica.manifest import Manifest
from replica.record import JobRecord, JobState, Plan, ReplicaRecord, ReplicaState, now
from replica.trainer import Trainer


class Agent:
    """Runs the replica of this plan. It acts in `step` alone, and never waits there except for the bucket."""

    def __init__(self, plan: Plan, env: Mapping[str, str], bucket: Bucket, log: Log) -> None:
        self._plan, self._env, self._bucket, self._log = plan, env, bucket, log
        self._ledger = Ledger(plan, bucket)
        self._leader = Leader(plan, self._ledger)
        self._job: JobRecord | None = None
        self._record: ReplicaRecord | None = None
        self._trainer: Trainer | None = None
        self._manifest = Manifest(plan)
        self._terminated = False
        self._changed = False  # the record in the bucket is behind
        self._unreachable = False
        self._poll_at = self._heartbeat_at = self._start_at = 0.0

    def terminate(self) -> None:
        """The unit is being stopped: so is the trainer. The job goes on when the unit starts again."""
        self._terminated = True

    def step(self) -> float | None:
        """Do what is due; the seconds until something is again, unless a signal comes first, or None at the end."""
        self._reap()
        if self._due() <= 0:
            self._contact()
        self._steer()
        if not self._done():
            return self._due()
        if self._record:
            self._archive(at_once=True)
        self._manifest.close()
        return None

    @property
    def status(self) -> str:
        """One line for `systemctl status`."""
        job = f"job {self._plan.jobId} {self._job.state if self._job else 'not read yet'}"
        return f"{job}, trainer {self._record.state}, restarts {self._record.restarts}" if self._record else job

    def _due(self) -> float:
        if self._changed and not self._unreachable:
            return 0.0
        waits = [self._poll_at - time.monotonic()]
        if self._record and self._record.state == ReplicaState.PREPARING:
            waits.append(self._start_at - time.monotonic())
        if self._trainer:
            waits.append(self._trainer.due())
        return max(min(waits), 0.0)

    def _done(self) -> bool:
        if self._trainer:
            return False
        if self._terminated:
            return not self._changed or self._unreachable
        return self._job is not None and self._job.final and self._leader.settled and not self._changed

    def _change(self, record: ReplicaRecord) -> None:
        self._changed = self._changed or record != self._record
        self._record = record

    def _reap(self) -> None:
        """Take note of a trainer that has ended."""
        if not self._trainer or not self._record or (code := self._trainer.poll()) is None:
            return
        trainer, self._trainer = self._trainer, None
        if self._terminated or trainer.stopping:
            self._change(restart.after_stop(self._record, restart.SIGTERM_CODE if self._terminated else code, now()))
        else:
            self._change(restart.after_exit(self._plan, self._record, code, now(), trainer.tail, trainer.out_of_memory))
            self._after_exit(self._record)

    def _after_exit(self, record: ReplicaRecord) -> None:
        limit, code = self._plan.maxRestarts, record.exitCode or 0
        if record.state == ReplicaState.PREPARING:
            wait = restart.wait_before_start(self._plan, record)
            self._start_at = time.monotonic() + wait
            self._log.say(f"restarting after {killer(record)} ({record.restarts} of {limit}), in {wait:g} s", "WARNING")
        elif code >= 128:
            self._log.say(f"trainer ended by {killer(record)} after {limit} restarts on this host", "ERROR")
        else:
            self._log.say(f"trainer exited with status {code}", "ERROR" if code else "INFO")

    def _steer(self) -> None:
        """Start or stop the trainer, as the job's record has it."""
        job, record = self._job, self._record
        if not job or not record:
            return
        ending = job.final or job.state == JobState.CANCELLING
        outdated = restart.outdated(self._plan, record, job.attempt)
        if self._trainer:
            if (self._terminated or ending or outdated) and not self._trainer.stopping:
                why = f"job {job.state}" if ending else "the whole job starts again"
                self._log.say(f"stopping: {'the unit is stopped' if self._terminated else why}")
                self._trainer.stop(self._plan.stopSeconds)
        elif self._terminated or ending:
            self._change(restart.after_stop(record, restart.SIGTERM_CODE if self._terminated else None, now()))
        elif outdated:
            self._log.say(f"the whole job starts again (retry {job.attempt} of {self._plan.maxRetries})", "WARNING")
            self._start(restart.again(record, job.attempt))
        elif record.state == ReplicaState.PREPARING and time.monotonic() >= self._start_at:
            self._start(record)

    def _start(self, record: ReplicaRecord) -> None:
        plan = self._plan
        argv = [plan.python, "-m", plan.module, *plan.args]
        record = restart.started(record, now())
        try:
            self._trainer = Trainer(argv, Path(plan.packageDir), self._env, self._log)
        except (OSError, ValueError) as error:
            record = restart.after_exit(plan, record, 127, now(), f"the trainer cannot start: {error}")
            self._log.say(record.errorMessage, "ERROR")
        else:
            self._log.say(f"started trainer pid {self._trainer.pid}: {shlex.join(argv)}")
        self._change(record)
        self._manifest.start()

    def _contact(self) -> None:
        """Read and write what is due; a bucket that does not answer leaves all as it is until the next poll."""
        self._poll_at = time.monotonic() + self._plan.pollSeconds
        try:
            if not self._record:
                self._resume()
            if self._record and (facts := self._manifest.told(self._ledger)):
                self._change(replace(self._record, facts=facts))
            self._publish()
            others = self._ledger.others()
            job = self._ledger.job()
            if others is not None and self._record:
                job = self._lead(job, others | {self._plan.replica: self._record})
            self._job = job
        except (OSError, ValueError) as error:
            if not self._unreachable:
                self._log.say(f"bucket {self._plan.bucket} fails, trying again: {error}", "WARNING")
            self._unreachable = True
        else:
            if self._unreachable:
                self._log.say(f"bucket {self._plan.bucket} answers again")
            self._unreachable = False

    def _resume(self) -> None:
        """Go on from the record that a former life of this replica left in the bucket, if the job still goes on."""
        job = self._ledger.job()
        if job.final:
            return
        self._log.adopt(self._bucket, self._ledger.archive_name)
        left = self._ledger.replicas([self._plan.replica]).get(self._plan.replica)
        record = restart.resume(self._plan, job.attempt, left, now())
        if left and left.state == ReplicaState.RUNNING:
            self._log.say("the replica or its host was stopped", "WARNING")
        if left and record.restarts > left.restarts:
            self._after_exit(record)
        self._change(record)
        self._job = job

    def _publish(self) -> None:
        """Write the record where it changed or its heartbeat is due; the log before a record that ends it."""
        record, clock = self._record, time.monotonic()
        if not record:
            return
        self._archive(at_once=self._changed and record.state == ReplicaState.EXITED)
        if self._changed or clock >= self._heartbeat_at:
            self._record = record = replace(record, heartbeatTime=now())
            self._ledger.write_replica(record)
            self._changed = False
            self._heartbeat_at = clock + self._plan.heartbeatSeconds

    def _archive(self, at_once: bool) -> None:
        with suppress(OSError):  # a log that cannot be copied must not cost the heartbeat; it stays on the host
            self._log.archive(self._bucket, self._ledger.archive_name, at_once)

    def _lead(self, job: JobRecord, replicas: Mapping[str, ReplicaRecord]) -> JobRecord:
        new = self._leader.act(job, replicas)
        if (new.state, new.attempt) != (job.state, job.attempt):
            attempt = f", attempt {new.attempt}" if new.attempt else ""
            self._log.say(f"job {new.state}{attempt}", "ERROR" if new.state == JobState.FAILED else "INFO")
            self._poll_at = 0.0  # one step may lead to the next
        return new
