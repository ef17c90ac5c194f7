"""Run the trials of one replica of a job. No replica assigns trials: each replica claims its own.

A trial is one record, which is created, claimed again and ended only by conditional writes. So two replicas never create the
same number, and if two replicas run the same trial, the write of one fails.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from hosts.agent import config
from hosts.agent.launcher_client import launcher, trial_reports_folder
from hosts.agent.process import HostBusyError, delete
from hosts.agent.replica_rules import describe_end, should_restart
from hosts.tuner.measure import TrialMetrics, should_stop
from hosts.tuner.process import METRIC_FILE, TrialUnit, trial_launcher
from jobs import variables
from jobs.bucket import BucketError, Conflict, TimeLimited
from jobs.chunks import ChunkFolder, LogFilter, last_entries
from jobs.folder_bucket import open_bucket
from jobs.ledger import Ledger, Stored, Trials
from jobs.records import HostConfig, Plan
from jobs.serialization import RecordError
from jobs.study import Measurement, Study, Trial, TrialState, best, flags, thin
from jobs.times import now

FAILED, TERMINATED = 1, 128 + signal.SIGTERM
_BUCKET_SECONDS = 20.0
_SUMMARIES_SECONDS = 5.0
_LOG_SECONDS, _LOG_LINES, _LOG_CHARACTERS = 0.3, 20, 300


Spawn = Callable[[Sequence[str], Mapping[str, str]], TrialUnit]


def main(job_id: str, name: str, request: str) -> int:
    """Run trials until none is left; return the exit code.

    `request` is JSON from the agent: `cwd`, the trials' working directory, and `env`, their environment.

    Returns:
        0 if all trials are done; 143 if it was stopped; 1 if too many trials FAILED, none reported the metric, a module is
        missing, or the host's configuration, the bucket's address or the plan is invalid.
    """
    try:
        host, state = config.load(os.environ)
        ledger = Ledger(TimeLimited(open_bucket(host.bucket), _BUCKET_SECONDS))
        plan = _plan(ledger, job_id, host.pollSeconds)
        from hosts.tuner.suggest import suggest
    except ImportError as error:
        return _fail(
            f"the hosts have no {error.name}: their image is from before hyperparameter tuning was added; run pulumi up"
        )
    except (RecordError, BucketError) as error:
        return _fail(str(error))
    client = launcher(host.bucket, os.environ)
    assert plan.study
    assert client  # the agent's unit names its socket
    log = state / "logs" / job_id
    description = json.loads(request)
    spawn = trial_launcher(client, job_id, Path(description["cwd"]), plan.stopSignal, plan.stopSeconds)
    environment, scratch = description["env"], trial_reports_folder(state)
    tuner = Tuner(ledger, plan, plan.study, name, host, suggest, spawn, scratch, lambda: last_log_line(log), environment)
    signal.signal(signal.SIGTERM, lambda *_: tuner.terminate())
    return tuner.run()


def _plan(ledger: Ledger, job_id: str, seconds: float) -> Plan:
    while True:
        try:
            if plan := ledger.plan(job_id):
                return plan
        except BucketError as error:
            _print(f"the bucket does not answer: {error}")
        time.sleep(seconds)


class Tuner:
    """Run one replica's trials of a study."""

    def __init__(
        self,
        ledger: Ledger,
        plan: Plan,
        study: Study,
        name: str,
        host: HostConfig,
        suggest: Callable[[Study, Sequence[Trial], int], dict[str, str]],
        spawn: Spawn,
        scratch: Path,
        last_log_line: Callable[[], str] = str,
        environ: Mapping[str, str] = os.environ,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Prepare to run the trials of replica `name`.

        `scratch` is the parent of the folders for trials' reports. `last_log_line` returns the last line of the trial that has
        just ended, from the replica's log. `environ` is the environment of all trials.
        """
        self._environ, self._scratch = environ, scratch
        self._ledger, self._plan, self._study, self._name, self._host = ledger, plan, study, name, host
        self._suggest, self._spawn, self._last_log_line, self._sleep = suggest, spawn, last_log_line, sleep
        self._trials = Trials(ledger, plan.jobId)
        # The trial of the last claim. If the bucket's answer was lost, the claim may have succeeded: its run is no restart.
        self._claimed: Trial | None = None
        self._child: TrialUnit | None = None
        self._terminated = False

    def terminate(self) -> None:
        """Stop the trial, because the job or this replica is being stopped."""
        self._terminated = True
        if self._child:
            self._child.terminate(self._plan.stopSeconds)

    def run(self) -> int:
        while not self._terminated:
            try:
                trials = self._trials.read()
                if (code := self._exit_code(trials)) is not None:
                    return code
                claimed = self._claim(trials) if self._is_free() else None
                if claimed:
                    self._run(claimed)
                    continue
            except Conflict:
                continue
            except (OSError, RecordError) as error:  # OSError: also if a trial's folder cannot be created now
                _print(f"trials cannot be read or written now, trying again: {error}")
            self._sleep(self._host.pollSeconds)
        return TERMINATED

    def _exit_code(self, trials: Sequence[Trial]) -> int | None:
        """Return the exit code once no trial is left to run or to wait for."""
        study, failed = self._study, [trial for trial in trials if trial.state is TrialState.FAILED]
        if len(failed) >= study.maxFailedTrials:
            last = failed[-1]
            return _fail(
                f"{len(failed)} of {len(trials)} trials FAILED, and maxFailedTrials is {study.maxFailedTrials}; "
                f"trial {last.trialId} ({' '.join(flags(last.hyperparameters))}): {last.errorMessage}"
            )
        if len(trials) < study.trial_count or any(not trial.final for trial in trials):
            return None
        winner = best(study, trials)
        if winner is None or winner.finalMetric is None:
            return _fail(f"no trial reported a value of {study.hyperparameterMetricTag}")
        if self._name == self._plan.chief:
            tag, final = study.hyperparameterMetricTag, winner.finalMetric
            early = sum(trial.isTrialStoppedEarly for trial in trials)
            counts = f"{len(failed)} FAILED{f', {early} stopped early' if early else ''}"
            _print(
                f"Trials: {len(trials)} done, {counts}; best is trial {winner.trialId}: "
                f"{' '.join(flags(winner.hyperparameters))}"
            )
            _print(f"Final metrics after {final.trainingStep} steps, {tag}: {final.objectiveValue:.6g}")
        return 0

    def _is_free(self) -> bool:
        """Return True unless the last trial was given up and has not ended: no other could start on this host."""
        if self._child and self._child.wait(0) is not None:
            self._child = None
        return self._child is None

    def _claim(self, trials: Sequence[Trial]) -> Stored[Trial] | None:
        """Claim a trial of this replica, of one that is lost or not in the plan, or a new trial; None if none is left."""
        job = self._ledger.job(self._plan.jobId)
        # A dropped replica is an optional one without which the job continues.
        missing = {*(job.record.lostReplicas if job else ()), *(job.record.droppedReplicas if job else ())}
        for trial in trials:
            unknown_replica = trial.replica not in self._plan.replicas
            if not trial.final and (trial.replica == self._name or trial.replica in missing or unknown_replica):
                return self._claim_again(trial)
        if len(trials) >= self._study.trial_count:
            return None
        number = self._trials.next_number
        trial = Trial(number, self._suggest(self._study, trials, number), self._name, self._host.name)
        self._make_folder(trial)
        self._claimed = trial
        return self._ledger.create_trial(self._plan.jobId, trial)

    def _claim_again(self, trial: Trial) -> Stored[Trial] | None:
        stored = self._ledger.trial(self._plan.jobId, trial.trialId)
        if stored is None or stored.record != trial:
            return None  # the record has changed meanwhile
        if trial == self._claimed:
            return stored
        if trial.restarts >= self._plan.maxRestarts:
            self._record_end(stored, self._failed(trial, f"it was killed, or its host was, {trial.restarts + 1} times"))
            return None
        self._make_folder(trial)
        self._claimed = replace(trial, replica=self._name, host=self._host.name, restarts=trial.restarts + 1)
        return self._ledger.change_trial(self._plan.jobId, stored, self._claimed)

    def _make_folder(self, trial: Trial) -> None:
        """Create the trial's folder before the claim, unless it is in gs://; OSError if that fails."""
        folder = self._study.folder(trial.trialId)
        if folder.startswith("/"):
            Path(folder).mkdir(parents=True, exist_ok=True)

    def _run(self, stored: Stored[Trial]) -> None:
        """Run a trial to its end, or until another replica has claimed it or this replica is stopped."""
        trial, study = stored.record, self._study
        with _reports_folder(self._scratch) as scratch:
            self._claimed = None
            file = scratch / "output.metrics"
            metrics = TrialMetrics(study.hyperparameterMetricTag, file, study.folder(trial.trialId), trial.allMetrics)
            again = f", again ({trial.restarts} of {self._plan.maxRestarts})" if trial.restarts else ""
            _print(f"Trial {trial.trialId} of {study.trial_count}{again}: {' '.join(flags(trial.hyperparameters))}")
            try:
                child = self._start(trial, self._environment(trial, file))
            except (OSError, ValueError) as error:
                self._record_end(stored, self._failed(trial, f"its program cannot be started: {error}"))
                return
            if child is None:
                return
            self._child = child
            if self._terminated:  # checked last: terminate() may be called at any time
                child.terminate(self._plan.stopSeconds)
            try:
                outcome = self._watch(stored, child, metrics)
            except BaseException:
                child.stop(self._plan.stopSeconds)  # the trial will run again, and two processes must not run it at once
                raise
            if outcome is None or self._terminated:
                return
            status, stored, early = outcome
            self._record_end(stored, self._final_record(stored.record, status, child.out_of_memory, metrics, early))

    def _start(self, trial: Trial, environment: Mapping[str, str]) -> TrialUnit | None:
        """Start a trial, once no earlier program is left on this host; None if the tuner is stopped before."""
        argv, waits = variables.expand_command(self._argv(trial), environment), False
        while True:
            try:
                return self._spawn(argv, environment)
            except HostBusyError as error:
                if self._terminated:
                    return None
                if not waits:
                    _print(f"Trial {trial.trialId} waits to start: {error}", sys.stderr)
                waits = True

    def _watch(self, stored: Stored[Trial], child: TrialUnit, metrics: TrialMetrics) -> tuple[int, Stored[Trial], bool] | None:
        """Return the exit status, the record, and True if stopped early; None if this replica no longer has the trial."""
        summaries_read_at = reported_at = time.monotonic()
        while (status := child.wait(self._host.pollSeconds)) is None:
            time_now = time.monotonic()
            summaries = self._study.enableTrialEarlyStopping and time_now - summaries_read_at >= _SUMMARIES_SECONDS
            measured = _measured(metrics, summaries)
            summaries_read_at = time_now if summaries else summaries_read_at
            changed = measured and measured != stored.record.allMetrics
            if self._terminated or not (changed or time_now - reported_at >= self._plan.heartbeatSeconds):
                continue
            reported_at = time_now
            try:
                stop_early = (
                    changed and self._study.enableTrialEarlyStopping and should_stop(self._study, measured, self._trials.read())
                )
                current = (
                    self._write(stored, replace(stored.record, allMetrics=measured))
                    if changed
                    else self._current(stored.record)
                )
                if current is None:
                    child.stop(self._plan.stopSeconds)
                    return None
                stored = current
                if stop_early:
                    child.stop(self._plan.stopSeconds)
                    return 0, stored, True
            except BucketError:
                continue  # try again at the next poll
        return status, stored, False

    def _current(self, trial: Trial) -> Stored[Trial] | None:
        """Return the current record; None if unreadable, or of another replica or another restart of the trial."""
        try:
            current = self._ledger.trial(self._plan.jobId, trial.trialId)
        except RecordError as error:
            _print(f"Trial {trial.trialId} is skipped: {error}")
            return None
        if current and (current.record.replica, current.record.restarts) == (trial.replica, trial.restarts):
            return current
        _print(f"Trial {trial.trialId} is run by another replica or restart now")
        return None

    def _write(self, stored: Stored[Trial], trial: Trial) -> Stored[Trial] | None:
        """Write the next record of this replica's trial; return None if this replica no longer has the trial.

        A Conflict may also come from an earlier write of this replica whose answer was lost.
        """
        try:
            return self._ledger.change_trial(self._plan.jobId, stored, trial)
        except Conflict:
            current = self._current(trial)
            if current is None or current.record.final:
                return current if current and current.record == trial else None
            try:
                return self._ledger.change_trial(self._plan.jobId, current, trial)
            except Conflict as error:
                raise BucketError(str(error)) from error

    def _final_record(self, trial: Trial, status: int, out_of_memory: bool, metrics: TrialMetrics, early: bool) -> Trial:
        """Return the final record of a trial: FAILED unless it exited with 0 and a finite metric.

        If the trial will run again, return its record with only the metrics changed.
        """
        if status:
            # After a signal or an exit code of restartCodes the trial has not failed: it runs again.
            restarts = should_restart(self._plan, status) and trial.restarts < self._plan.maxRestarts
            if restarts and not out_of_memory:
                return replace(trial, allMetrics=_measured(metrics, summaries=False) or trial.allMetrics)
            words = self._last_log_line()
            return self._failed(trial, f"it ended with {describe_end(status, out_of_memory)}{f': {words}' if words else ''}")
        tag = self._study.hyperparameterMetricTag
        try:
            measured = metrics.read_reports() or trial.allMetrics if early else metrics.final_measurements()
        except Exception as error:  # noqa: BLE001  TensorBoard's reader, of files that a trainer wrote
            return self._failed(trial, f"its metrics cannot be read: {error}")
        if not measured:
            others = f"; it reported {', '.join(sorted(metrics.other_metrics))}" if metrics.other_metrics else ""
            how = "cloudml-hypertune reports it, or metrics.json or a summary below JOB_DIR has it by this name"
            return self._failed(trial, f"it reported no {tag} (hyperparameterMetricTag){others}: {how}")
        if not math.isfinite(measured[-1].objectiveValue):
            return self._failed(trial, f"its last {tag} was {measured[-1].objectiveValue}")
        measurements = thin(_finite(measured))
        return replace(
            trial,
            state=TrialState.SUCCEEDED,
            endTime=now(),
            allMetrics=measurements,
            finalMetric=measurements[-1],
            isTrialStoppedEarly=early,
        )

    def _failed(self, trial: Trial, why: str) -> Trial:
        return replace(trial, state=TrialState.FAILED, endTime=now(), errorMessage=why)

    def _record_end(self, stored: Stored[Trial], trial: Trial) -> None:
        """Write and log a trial's end if this replica still has it; retry until the bucket answers or the tuner is stopped."""
        if trial != stored.record:
            while True:
                try:
                    if self._write(stored, trial) is None:
                        return
                    break
                except BucketError as error:
                    if self._terminated:
                        return
                    _print(f"the end of trial {trial.trialId} cannot be reported yet: {error}")
                    self._sleep(self._host.pollSeconds)
        tag, final = self._study.hyperparameterMetricTag, trial.finalMetric
        if final:
            early = ", stopped early" if trial.isTrialStoppedEarly else ""
            _print(f"Trial {trial.trialId} {trial.state}: {tag} {final.objectiveValue:.6g} at step {final.trainingStep}{early}")
        elif trial.final:
            _print(f"error: trial {trial.trialId} {trial.state}: {trial.errorMessage}", sys.stderr)

    def _argv(self, trial: Trial) -> list[str]:
        flag, folder = self._study.jobDirFlag, self._study.folder(trial.trialId)
        python = self._plan.python or self._host.python
        return [*self._plan.program(python), *((flag, folder) if flag else ()), *flags(trial.hyperparameters)]

    def _environment(self, trial: Trial, file: Path) -> dict[str, str]:
        """Return a trial's environment: the job's, and Cloud ML's variables for its number, folder, metric and reports."""
        folder, number = self._study.folder(trial.trialId), str(trial.trialId)
        config = json.loads(self._environ.get("TF_CONFIG") or "{}")
        config["task"] = {**config.get("task", {}), "trial": number}
        cloud_ml = {"CLOUD_ML_TRIAL_ID": number, "CLOUD_ML_HP_METRIC_TAG": self._study.hyperparameterMetricTag}
        trial_variables = {**cloud_ml, METRIC_FILE: str(file), "JOB_DIR": folder}
        task = self._plan.tasks.get(self._name)
        of_job = {name: self._environ[name] for name in (task.environment if task else ()) if name in self._environ}
        expanded = variables.expand_environment(of_job, {**self._environ, **trial_variables})  # without secrets
        return {**self._environ, **expanded, **trial_variables, "TF_CONFIG": json.dumps(config)}


def last_log_line(log: Path) -> str:
    """Return the last line of a program's log, preferably an error; empty if there is none yet.

    First wait a moment for the agent, which writes the output of this process and its trials to the log.
    """
    time.sleep(_LOG_SECONDS)
    lines: list[dict[str, str]] = []
    with suppress(OSError, ValueError):
        entries, _ = last_entries(ChunkFolder(log), LogFilter(_LOG_LINES))
        lines = [json.loads(entry.line) for entry in entries if entry.line.startswith(b"{")]
    printed = [line for line in lines if line.get("message", "").strip()]
    errors = [line for line in printed if line.get("severity") in ("ERROR", "CRITICAL")]
    return (errors or printed or [{"message": ""}])[-1]["message"].strip()[:_LOG_CHARACTERS]


def _measured(metrics: TrialMetrics, summaries: bool) -> list[Measurement]:
    """Return the measurements so far, from summaries too if requested; an empty list if they cannot be read."""
    try:
        return thin(_finite(metrics.read_reports() or (metrics.read_evaluations() if summaries else [])))
    except Exception as error:  # noqa: BLE001  TensorBoard's reader, of files that a trainer wrote, or half wrote
        _print(f"the trial's metrics cannot be read now: {error}")
        return []


@contextmanager
def _reports_folder(parent: Path) -> Iterator[Path]:
    """Yield a folder for a trial's reports, and remove it afterwards.

    The launcher removes folders that the trial has created in it, because they belong to another user.
    """
    folder = Path(tempfile.mkdtemp(prefix="trial-", dir=parent))
    try:
        folder.chmod(0o770)  # for the trial, to whose group the launcher gives it
        yield folder
    finally:
        delete(folder)


def _finite(measured: Sequence[Measurement]) -> list[Measurement]:
    return [each for each in measured if math.isfinite(each.objectiveValue)]


def _fail(message: str) -> int:
    _print(f"error: {message}", sys.stderr)
    return FAILED


def _print(line: str, stream: object = None) -> None:
    print(line, file=stream or sys.stdout, flush=True)  # type: ignore[arg-type]
