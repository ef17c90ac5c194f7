"""The evidence about a job, in the bucket and on its hosts, for its report and its bundle.

Each property is read once, when it is needed; for one that cannot be read, except `planned` and `metrics`, a note is
added. The method `read_logs` reads each time, and raises errors.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

from jobs import paths, progress
from jobs.bucket import BucketError, Item
from jobs.chunks import LogFilter
from jobs.firsterror import ERROR_SEVERITIES
from jobs.records import JobRecord, ReplicaRecord
from jobs.serialization import RecordError
from jobs.states import JobState
from jobs.times import now
from ops import terminal
from ops.cluster.cluster import ClusterClient
from ops.cluster.ledger import existing_job, replica_names, replicas_of
from ops.cluster.output import EVALUATION, JobOutput, find
from ops.errors import OpsError, one_line
from ops.logs.lines import LogLine
from ops.logs.read import read_logs
from ops.plan import plan, planned
from ops.report.evaluation import EvaluationError, parse
from ops.report.report import Evaluation, Planned
from ops.submit import trials
from ops.submit.metrics import final_metrics, scalars
from ops.submit.reproduce import read_manifest
from ops.submit.trials import TuningResult

T = TypeVar("T")
_POINTS = 1000


class JobEvidence:
    """Everything known about a job at `time`, RFC 3339; `notes` are the parts that could not be read.

    The output of a job that tunes hyperparameters is that of its best trial.
    """

    def __init__(self, cluster: ClusterClient, job_id: str | None) -> None:
        """Find a job, by default the newest."""
        self.record: JobRecord = existing_job(cluster.ledger, job_id)
        self.time = now()
        self.notes: list[str] = []
        self._cluster = cluster

    def read_or_note(self, read: Callable[[], T], default: T, what: str) -> T:
        """Return the result of `read`; if it fails, add a note with the reason and return `default`."""
        try:
            return read()
        except (OpsError, BucketError, RecordError, EvaluationError, OSError) as error:
            self.notes.append(f"{what}: {one_line(error)}")
            return default

    @cached_property
    def replicas(self) -> list[ReplicaRecord]:
        """The records of the replicas, the chief first."""
        return replicas_of(self._cluster.ledger, self.record, self.notes.append)

    @cached_property
    def files(self) -> dict[str, bytes]:
        """The content of the records in the bucket, by path in the job's folder."""
        job_id, folder = self.record.jobId, f"{paths.folder(self.record.jobId)}/"
        names = [paths.job(job_id), paths.plan(job_id), paths.manifest(job_id), paths.cancel(job_id)]
        names += [paths.replica(job_id, name) for name in replica_names(self.record)]
        no_items: dict[str, Item] = {}
        items = self.read_or_note(lambda: self._cluster.ledger.store.read_all(names), no_items, "the records were not read")
        return {path.removeprefix(folder): item.content for path, item in items.items()}

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The manifest, empty if the job has none."""
        try:
            manifest = json.loads(self.files.get("manifest.json", b"{}"))
        except (ValueError, RecursionError):
            manifest = None
        if isinstance(manifest, dict):
            return manifest
        self.notes.append("the manifest was not read: it is no JSON object")
        return {}

    def read_logs(self, names: list[str], log_filter: LogFilter) -> dict[str, list[LogLine]]:
        """Return the lines of replicas that pass a filter."""
        return {name: list(log) for name, log in read_logs(self._cluster, self.record, names, log_filter).items()}

    @cached_property
    def logs(self) -> dict[str, list[LogLine]]:
        """The lines of each replica that a page uses; no others, as a log may be of any size."""

        def read() -> dict[str, list[LogLine]]:
            logs = read_logs(self._cluster, self.record, replica_names(self.record), LogFilter())
            return {name: list(filter(_is_used, log)) for name, log in logs.items()}

        with terminal.ProgressLine(f"reading the logs of {self.record.jobId}"):
            return self.read_or_note(read, {}, "no log was read")

    @cached_property
    def tuned(self) -> TuningResult | None:
        """The study and its trials; None if the job tunes nothing."""
        return self.read_or_note(lambda: trials.read(self._cluster.ledger, self.record), None, "the trials were not read")

    @cached_property
    def _output(self) -> JobOutput | None:
        output = self.read_or_note(lambda: find(self._cluster, self.record), None, "the output was not read")
        return output.of_trial(self.tuned.best) if output and self.tuned else output

    @cached_property
    def scalars(self) -> dict[str, list[tuple[int, float]]]:
        """The scalars of TensorBoard summaries, by `run/tag`; empty if the logs have Train or Eval lines."""
        messages = [line.message for log in self.logs.values() for line in log]
        if (output := self._output) is None or any(map(progress.parse_train_metrics, messages)):
            return {}
        if any(map(progress.parse_eval_metrics, messages)):
            return {}
        return self.read_or_note(lambda: scalars(self._cluster, output, _POINTS), {}, "the summaries were not read")

    @cached_property
    def evaluation(self) -> Evaluation | None:
        """The trainer's final evaluation."""
        output = self._output
        if output is None or EVALUATION not in output.files:
            return None
        return self.read_or_note(lambda: parse(output.read(EVALUATION)), None, f"{EVALUATION} was not used")

    @property
    def _chief_messages(self) -> list[str]:
        return [line.message for line in self.logs.get(next(iter(replica_names(self.record)), ""), [])]

    @cached_property
    def metrics(self) -> dict[str, str]:
        """The final metrics: from the chief's log, which has been read, or else from the output."""
        metrics = progress.parse_final_metrics(iter(self._chief_messages))
        return metrics or (final_metrics(self._cluster, self.record) if self.record.final else {})

    @cached_property
    def planned(self) -> Planned | None:
        """The stored prediction of `fab plan` for this job; None if there is none for the job on the running cluster."""
        if self.record.state is not JobState.SUCCEEDED or not any(plan.PLANS.glob("*.json")):
            return None
        job_id = self.record.jobId
        try:
            manifest = read_manifest(self._cluster.bucket, job_id)
            check = planned.compare(self._cluster.inventory, job_id, manifest, lambda: self._chief_messages)
        except (OpsError, BucketError, OSError):
            return None
        prediction = check.prediction
        rates = plan.rounded(prediction.rate), plan.rounded(check.measured)
        error, speed_up = round(check.error, 1), round(prediction.speed_up, 2)
        return Planned(check.plan["createTime"], *rates, error, speed_up, prediction.bottleneck)


def _is_used(line: LogLine) -> bool:
    return line.severity in ERROR_SEVERITIES or progress.is_progress_line(line.message)
