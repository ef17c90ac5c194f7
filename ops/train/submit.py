"""How a job is handed to the hosts: all of it, or undone."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ops.cluster.bucket import Bucket, missing
from ops.cluster.cluster import Cluster
from ops.cluster.inventory import ROOT, Inventory
from ops.cluster.remote import ADVICE, Fleet
from ops.errors import HostsError, OpsError, UsageError, one_line
from ops.ledger import cancelled, fail, me
from ops.package import package
from ops.show import terminal
from ops.train import manifest, push
from ops.train.config import Job
from ops.train.render import DATA, render
from replica.record import JobRecord, JobState

_PUSH_SECONDS = 300.0
_STOP_SECONDS = 60.0
_SHARD = re.compile(r"(train|test)-\d{5}-of-\d{5}\.tfrecord(\.gz)?")


@dataclass(frozen=True)
class Submission:
    """A job with all that goes to the hosts, checked as far as it can be without them.

    `data` are files for the bucket's data directory, by name.
    """

    inventory: Inventory
    job: Job
    package: package.Package
    data: dict[str, Path]

    def streams(self) -> Callable[[str], bytes]:
        """What each host receives, by its name."""
        with terminal.Step(f"{self.job.id}: compressing {self.package.name}"):
            shared = push.shared_stream(self.job.id, self.package.pushed, push.replica_package(ROOT / "replica"))
        files = render(self.inventory, self.job)
        return lambda name: shared + push.host_stream(files[name])

    def manifest(self) -> dict[str, Any]:
        return manifest.manifest(self.inventory, self.job, self.package)

    def record(self) -> JobRecord:
        """The job's first record."""
        shown = plain(dict(self.job.training_input))
        return JobRecord(
            self.job.id,
            hourlyCost=self.inventory.hourly_cost,
            submittedBy=me(),
            labels=dict(self.job.labels),
            trainingInput=shown,
            manifest=manifest.short(self.manifest()),
        )


def plain(value: Any) -> Any:
    """The value with all that is no UTF-8 replaced, for records, which people read; the plan has it as it was given."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if isinstance(value, list):
        return [plain(item) for item in value]
    return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def used_before(job_id: str) -> UsageError:
    return UsageError(f"job id {job_id!r} was used before, and an id is used once: take another (fab jobs lists them)")


def submit(cluster: Cluster, submission: Submission) -> None:
    """Claim the cluster, write the record, and start every host; undone where that fails or is interrupted."""
    fleet, ledger, job_id = cluster.fleet, cluster.ledger, submission.job.id
    record, streams = submission.record(), submission.streams()
    ledger.acquire(job_id)
    try:
        if not ledger.create(record):
            raise used_before(job_id)
        _upload_data(ledger.bucket, submission)
        ledger.write(record.to(JobState.PREPARING))
        uploads = _Background(lambda: _upload_package(cluster, submission))
        with terminal.Step(f"{job_id}: starting {len(fleet.inventory.hosts)} hosts", always=True) as step:
            _push(fleet, job_id, streams, terminal.counter(step, len(fleet.inventory.hosts)))
            uploads.join()
    except BaseException as error:
        _undo(cluster, job_id, error)
        raise


def _push(fleet: Fleet, job_id: str, streams: Callable[[str], bytes], done: Callable[[str], None]) -> None:
    command = push.take_in_command(job_id)

    def take_in(name: str) -> None:
        fleet.must(name, command, "could not start its replica, it ended", streams(name))

    outcome = fleet.each(fleet.inventory.names, take_in, _PUSH_SECONDS, done)
    if outcome.failures:
        raise HostsError(outcome.failures, f"job {job_id} is FAILED, nothing runs; {ADVICE}, and start it under another id")


def _undo(cluster: Cluster, job_id: str, error: BaseException) -> None:
    """Stop what was started, and end the record, so that the cluster is free again."""
    fleet, ledger = cluster.fleet, cluster.ledger
    try:
        record = ledger.job(job_id)
        if record is None or record.final or isinstance(error, UsageError):
            return  # nothing was started, or somebody else's job has this id
        fleet.each(fleet.inventory.names, lambda name: fleet.run(name, push.stop_command()), _STOP_SECONDS)
        record = ledger.job(job_id) or record  # a replica may have led for a moment
        if record.final:
            return
        if isinstance(error, KeyboardInterrupt):
            cancelled(ledger, record, "fab train was stopped before the replicas had started")
            terminal.note(f"{job_id} is CANCELLED, and nothing runs; the next job needs another id")
        else:
            fail(ledger, record, one_line(error))
    except Exception as second:  # noqa: BLE001  the first error is the one to report
        terminal.note(f"job {job_id} could not be ended ({one_line(second)}): run fab cancel {job_id}")


def _upload_data(bucket: Bucket, submission: Submission) -> None:
    if not submission.data:
        return
    sizes = {name: path.stat().st_size for name, path in submission.data.items()}
    there = bucket.names(DATA)
    # The same records in another number of files, of an earlier job, would be read too.
    for name in there.keys() - sizes.keys():
        if _SHARD.fullmatch(name):
            bucket.delete(f"{DATA}/{name}")
    wanted = missing(sizes, there)
    if not wanted:
        return
    with terminal.Step("uploading MNIST", always=True) as step:
        progress = terminal.sizer(step, sum(sizes[name] for name in wanted))
        for name in wanted:
            bucket.upload(f"{DATA}/{name}", submission.data[name], progress)


def _upload_package(cluster: Cluster, submission: Submission) -> None:
    bucket = cluster.another_bucket()
    bucket.upload(f"jobs/{submission.job.id}/package.tar.gz", submission.package.archive)
    bucket.upload(f"jobs/{submission.job.id}/manifest.json", manifest.to_json(submission.manifest()))


class _Background:
    """Work in a thread, its error kept for whoever joins."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._error: Exception | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:  # noqa: BLE001  kept for join
            self._error = error

    def join(self) -> None:
        self._thread.join(_PUSH_SECONDS)
        if self._error or self._thread.is_alive():
            raise OpsError(f"the package could not be put into the bucket: {self._error or 'it takes too long'}")
