"""The submission of a job to the hosts: complete, or undone."""

from __future__ import annotations

import hashlib
import re
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.inventory import Inventory
from infra.templates import ROOT as CHECKOUT
from jobs import lease as leases
from jobs import paths
from jobs.background import Background
from jobs.bucket import Bucket, BucketError
from jobs.lease import ChangeTimer, Lease
from jobs.notification import Notification, redact_target
from jobs.queue import QueueEntry
from jobs.queue_monitor import QueueMonitor
from jobs.records import JobRecord, Plan
from jobs.serialization import RecordError
from ops import terminal
from ops.cluster import host_files
from ops.cluster.bucket import upload_changed
from ops.cluster.cluster import ClusterClient
from ops.cluster.ledger import current_user, find_job
from ops.cluster.remote import ADVICE, Fleet
from ops.errors import OpsError, SeveralHostsError, UsageError, one_line
from ops.package import host_stream, package
from ops.package.trainer_config import Data
from ops.submit import job_plan, manifest
from ops.submit.arguments import last_step
from ops.submit.claim import BusyError, CancelledError, LeaseLostError, Submitter
from ops.submit.config import JobSpec
from ops.submit.resources import candidate_hosts

_PUSH_SECONDS = 300.0
_LARGE_BYTES = 20_000_000
_RENEW_SECONDS = leases.SECONDS / 5
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}\..+")


@dataclass(frozen=True)
class Submission:
    """A job with all that goes to the hosts, checked as far as it can be without them.

    `data` are the files of its data set to upload, by name. `excluded` are hosts that it must not use.
    """

    inventory: Inventory
    job: JobSpec
    package: package.Package
    data: dict[str, Path]
    excluded: frozenset[str] = frozenset()

    @property
    def subset(self) -> Inventory:
        """The hosts that it asks for, as an inventory."""
        return self.job.subset(self.inventory)

    @property
    def candidates(self) -> dict[str, list[str]]:
        """The candidate hosts of each replica."""
        all_candidates = candidate_hosts(self.job.counts, self.inventory)
        return {replica: [host for host in hosts if host not in self.excluded] for replica, hosts in all_candidates.items()}

    def manifest(self) -> dict[str, Any]:
        return manifest.manifest(self.subset, self.job, self.package)

    def record(self) -> JobRecord:
        """Return the job's first record."""
        training_input = replace_invalid_utf8(dict(self.job.training_input))
        return JobRecord(
            self.job.id,
            candidates=self.candidates,
            priority=self.job.priority,
            hourlyCost=self.subset.hourly_cost,
            submittedBy=current_user(),
            labels=dict(self.job.labels),
            trainingInput=training_input,
            steps=None if self.job.study else last_step(self.job.args, self.job.declared.plan),
            notification=Notification(redact_target(self.job.notify)) if self.job.notify else None,
            manifest=manifest.summarize(self.manifest()),
        )


def replace_invalid_utf8(value: Any) -> Any:
    """Return the value with invalid UTF-8 replaced, for records, which people read; the plan keeps it."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if isinstance(value, list):
        return [replace_invalid_utf8(item) for item in value]
    return {key: replace_invalid_utf8(item) for key, item in value.items()} if isinstance(value, dict) else value


def submit(cluster: ClusterClient, submission: Submission, may_wait: bool) -> list[QueueEntry]:
    """Claim the hosts, upload the job to the bucket, start the hosts, and hand the job over to them.

    A failure or an interrupt ends the job. If the process is killed, its lease expires, and the next process that polls the
    queue ends the job.

    Returns:
        The jobs that it waits for, empty if it has its hosts.
    """
    job_id, inventory = submission.job.id, cluster.inventory
    plan = job_plan.plan(inventory, submission.job, hashlib.sha256(submission.package.archive).hexdigest())
    max_wait = submission.job.policy.get("maxWaitTime")
    submitter = Submitter(cluster.ledger, submission.record(), f"{current_user()}/{uuid.uuid4().hex[:8]}", max_wait)
    renewal = _Renewal(submitter)
    try:
        ahead = _claim(cluster, submitter, may_wait)
        renewal.begin()
        if submission.data and (data := submission.job.declared.data):
            _upload_data(cluster.bucket, submission, data)
        cluster.ledger.create_plan(plan)
        ahead = submitter.ahead()  # it may be first by now
        if not ahead:
            renewal.check()
            submitter.prepare()
        uploads = Background(lambda: _upload_package(cluster, submission))
        what = "informing" if ahead else "starting"
        hosts = _involved_hosts(inventory, submitter)
        with terminal.ProgressLine(f"{job_id}: {what} {terminal.plural(len(hosts), 'host')}", always=True) as step:
            _push(cluster.fleet, submission, plan, hosts, not ahead, step)
            _join_upload(uploads)
        renewal.check()
        submitter.hand_over()
    except BaseException as error:
        _undo(submitter, renewal, job_id, error)
        raise
    finally:
        renewal.end()
    try:
        return submitter.ahead()
    except BucketError:
        return ahead  # the hosts have taken over the job


def _involved_hosts(inventory: Inventory, submitter: Submitter) -> list[str]:
    """Return the hosts that the job has, or else its candidates, in the order of the inventory."""
    mine = submitter.usable_hosts
    return [name for name in inventory.names if name in mine]


def _claim(cluster: ClusterClient, submitter: Submitter, may_wait: bool) -> list[QueueEntry]:
    try:
        try:
            with _defer_signals():
                return submitter.claim(may_wait)
        except BusyError as error:
            if not _clear_abandoned(cluster, error.ahead):
                raise
        with _defer_signals():
            return submitter.claim(may_wait)
    except BusyError as error:
        raise UsageError(f"{_describe_holders(cluster, error.ahead)}; without --no-queue the job waits for its turn") from None


def _clear_abandoned(cluster: ClusterClient, ahead: Sequence[QueueEntry]) -> bool:
    """Wait until the entries ahead are removed as their `fab train` is dead; return False if one of them is alive."""
    ledger = cluster.ledger

    def leases_now() -> list[Lease | None]:
        jobs = [find_job(ledger, entry.jobId) for entry in ahead]
        return [job.lease if job and not job.final else None for job in jobs]

    leases_before, monitor = leases_now(), QueueMonitor(ledger, ChangeTimer(time.monotonic), current_user())
    with terminal.ProgressLine("checking whether the holder of the hosts is alive"):
        while True:
            now = leases_now()
            if any(lease and (not lease.submitter or lease != old) for lease, old in zip(now, leases_before, strict=True)):
                return False
            monitor.run_once()
            if all(ledger.queue().entry(entry.jobId) is None for entry in ahead):
                return True
            time.sleep(1.0)


def _describe_holders(cluster: ClusterClient, ahead: Sequence[QueueEntry]) -> str:
    """Describe the holders of the hosts."""
    first = ahead[0]
    job = find_job(cluster.ledger, first.jobId)
    state = "is being submitted" if job is None else f"is {job.state}"
    verbs = "has or wants" if len(ahead) == 2 else "have or want"
    others = f"; {', '.join(entry.jobId for entry in ahead[1:])} {verbs} some, too" if len(ahead) > 1 else ""
    since = f"started by {first.submittedBy} at {first.createTime}"
    return (
        f"hosts that it needs are job {first.jobId}'s, which {state} ({since}){others}: "
        f"follow it with fab logs all --job {first.jobId} --follow"
    )


def _push(
    fleet: Fleet, submission: Submission, plan: Plan, hosts: Sequence[str], with_package: bool, step: terminal.ProgressLine
) -> None:
    """Send every host its files and the agent's code, and wake the agent; add the package if the job starts now."""
    inventory, job_id = submission.inventory, submission.job.id
    code, version = host_stream.code(CHECKOUT)
    # A package without files (the job runs a command that hosts already have) is not sent: hosts fetch it from the bucket.
    package = (submission.package.host_files if with_package else None) or None
    shared = host_stream.shared_stream(code, package, plan.packageSha256, submission.package.executables)
    files, secrets = host_files.render(inventory), job_plan.secret_files(submission.job)
    command = host_stream.install_command(version, job_id if package else "")
    size = len(shared) * len(hosts)
    # A large package is counted by bytes, as all hosts finish at once.
    sent = terminal.byte_counter(step, size) if size > _LARGE_BYTES else lambda _: None
    advance = terminal.counter(step, len(hosts)) if size <= _LARGE_BYTES else lambda _: None

    def install(name: str) -> None:
        stream = (shared, host_stream.files_stream([*files[name], *secrets]))  # 31 copies of a package do not fit into memory
        fleet.check_output(name, command, "could not start its replica, it ended", stream, sent)

    outcome = fleet.each(hosts, install, _PUSH_SECONDS, advance)
    if outcome.failures:
        raise SeveralHostsError(
            outcome.failures, f"job {job_id} is FAILED, nothing runs; {ADVICE}, and start it under another id"
        )


def _undo(submitter: Submitter, renewal: _Renewal, job_id: str, error: BaseException) -> None:
    """End the job's record, so that hosts that have started stop and become free."""
    stopped = isinstance(error, KeyboardInterrupt)
    why = "fab train was stopped before the job was handed over" if stopped else one_line(error)
    with _handle_signals(signal.SIG_IGN):
        try:
            renewal.end()
            cancelled = stopped or isinstance(error, CancelledError)
            record = submitter.give_up("" if isinstance(error, CancelledError) else why, cancelled)
            if record is not None and (stopped or not record.final):
                how = (
                    "nothing runs; the next job needs another id"
                    if record.final
                    else f"it continues: fab cancel {job_id} ends it"
                )
                terminal.note(f"{job_id} is {record.state}, and {how}")
        except Exception as second:  # noqa: BLE001  the first error is the one to report
            if one_line(second) != one_line(error):
                how = "within two minutes its hosts find out by themselves"
                terminal.note(f"job {job_id} could not be ended ({one_line(second)}): {how}")


@contextmanager
def _defer_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt at the end of the block for the first such signal, and at once for the second.

    The block's writes to the bucket may take effect later if it is interrupted, and nobody would undo them.
    """
    signals = 0

    def handle(*_: object) -> None:
        nonlocal signals
        signals += 1
        if signals > 1:
            raise KeyboardInterrupt

    with _handle_signals(handle):
        yield
    if signals:
        raise KeyboardInterrupt


@contextmanager
def _handle_signals(handler: signal.Handlers | Callable[..., None]) -> Iterator[None]:
    """Handle Ctrl-C, a closed terminal and `timeout` by this handler during the block; they interrupt only the main thread."""
    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if is_main else ()
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


class _Renewal:
    """Renews a submitter's lease in the background, and keeps the error that ends it."""

    def __init__(self, submitter: Submitter) -> None:
        self._submitter = submitter
        self._ended = threading.Event()
        self._problem: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def begin(self) -> None:
        """Start the renewal of the lease."""
        self._thread.start()

    def check(self) -> None:
        """Raise the error of the renewal: CancelledError, LeaseLostError."""
        if self._problem:
            raise self._problem

    def end(self) -> None:
        """Stop the renewal."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_RENEW_SECONDS):
            try:
                self._submitter.renew()
            except (BucketError, RecordError, SeveralHostsError):
                continue  # the next one may succeed; the lease outlives several
            except (CancelledError, LeaseLostError) as error:
                self._problem = error
                return


def _upload_data(bucket: Bucket, submission: Submission, data: Data) -> None:
    folder = f"{paths.DATA}/{data.name}"
    existing = bucket.sizes(folder)
    # An earlier job may have uploaded the same records in another number of files: trainers would read both.
    sharded = {match[1] for name in submission.data if (match := _SHARD.fullmatch(name))}
    for name in existing.keys() - submission.data.keys():
        if (match := _SHARD.fullmatch(name)) and match[1] in sharded:
            bucket.delete(f"{folder}/{name}")
    upload_changed(bucket, folder, submission.data, existing, data.name)


def _upload_package(cluster: ClusterClient, submission: Submission) -> None:
    bucket = cluster.bucket
    bucket.create(paths.manifest(submission.job.id), manifest.to_json(submission.manifest()))
    bucket.upload(paths.package(submission.job.id), submission.package.archive)


def _join_upload(uploads: Background[None]) -> None:
    try:
        uploads.join(_PUSH_SECONDS)
    except Exception as error:
        raise OpsError(f"the package could not be put into the bucket: {error}") from error
