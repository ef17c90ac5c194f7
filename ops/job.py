"""`fab train`: check everything, then claim the cluster, write the record, push to all hosts at once, and follow."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ops import package, push, show
from ops.bucket import Bucket, missing, open_bucket
from ops.config import Flags, Job, build_job
from ops.errors import DETACHED, DONE, FAILED, HostError, HostsError, OpsError, UsageError, one_line
from ops.imports import missing_line
from ops.inventory import ROOT, Inventory
from ops.ledger import Ledger, cancelled, fail, me
from ops.remote import ADVICE, Fleet
from ops.render import DATA, render
from replica.record import JobRecord, JobState, seconds_since

MNIST = ROOT / ".cache" / "mnist"
_CHECK_SECONDS = 30.0
_PUSH_SECONDS = 300.0
_STOP_SECONDS = 60.0
# What a job needs on a host besides its package: logs, and TensorFlow's temporary files.
_FREE_BYTES = 100_000_000


@dataclass(frozen=True)
class Submission:
    """A job with all that goes to the hosts, checked as far as it can be without them."""

    inventory: Inventory
    job: Job
    package: package.Package
    data: dict[str, Path]

    def streams(self) -> Callable[[str], bytes]:
        """What each host receives, by its name."""
        shared = push.shared_stream(self.job.id, self.package.files, push.replica_package(ROOT / "replica"))
        files = render(self.inventory, self.job)
        return lambda name: shared + push.host_stream(files[name])

    def manifest(self) -> bytes:
        args = _plain(list(self.job.args))
        return self.package.manifest(module=self.job.module, args=args, scaleTier=self.inventory.scale_tier)


def prepare(inventory: Inventory, flags: Flags, folder: str | None) -> Submission:
    """Check the job, its package and its data; UsageError for what is wrong. Touches nothing."""
    here = Path("trainer")
    chosen = Path(folder) if folder else here if here.is_dir() else ROOT / "trainer"
    root = package.find(chosen)
    job = build_job(flags, inventory, root.name)
    built = package.build(chosen, job.module)
    return Submission(inventory, job, built, _data(root, job))


def _data(root: Path, job: Job) -> dict[str, Path]:
    """The files that the shipped trainer reads when it is told of no others."""
    if root != ROOT / "trainer" or any(arg.partition("=")[0] in ("--train-data", "--train_data") for arg in job.args):
        return {}
    return {path.name: path for kind in ("train", "test") for path in sorted(MNIST.glob(f"{kind}*.tfrecord*"))}


def train(inventory: Inventory, flags: Flags, folder: str | None, follow: bool) -> int:
    """Run a job; the exit code is 0 where it SUCCEEDED, or was started with `follow` False."""
    submission = prepare(inventory, flags, folder)
    for text in submission.job.notes:
        show.note(text)
    fleet = Fleet(inventory)
    ledger = _check_hosts(fleet, submission)
    _submit(fleet, ledger, submission)
    job_id = submission.job.id
    if not follow:
        show.out(f"{job_id} is started: fab logs all --job {job_id} --follow, fab describe {job_id}")
        return DONE
    return _follow(fleet, job_id)


def _check_hosts(fleet: Fleet, submission: Submission) -> Ledger:
    """Connect to all hosts and see that the job can run there; nothing is changed. The ledger for what follows."""
    inventory = submission.inventory
    size = len(submission.package.archive)
    local_bucket = [inventory.bucket] if inventory.bucket.startswith("/") else []
    with show.Step(f"connecting to {len(inventory.hosts)} hosts") as step:
        fleet.connect_all(inventory.names, show.counter(step, len(inventory.hosts)))
    directories = [push.STATE_DIR, *local_bucket]

    def check(name: str) -> tuple[dict[str, int], list[str]]:
        wanted = submission.package.imports if name == inventory.chief.name else ()
        output = fleet.must(name, push.check_command(directories, wanted), "could not be checked")
        try:
            return push.read_check(output, directories)
        except ValueError as error:
            raise HostError(name, f"could not be checked ({error})", output=output) from None

    with show.Step("checking the hosts"):
        outcome = fleet.each(inventory.names, check, _CHECK_SECONDS)
    if outcome.failures:
        raise HostsError(outcome.failures, ADVICE, UsageError.code)
    for name, (free, lacking) in outcome.results.items():
        for directory, room in free.items():
            if room < (needed := 5 * size + _FREE_BYTES):
                what = f"{show.size(room)} free in {directory}, a job needs {show.size(needed)}"
                raise UsageError(f"{name} has only {what}: fab shell {name} and free some, or give it a larger disk")
        for module in lacking:
            where = submission.package.imports[module]
            raise UsageError(missing_line(module, where, submission.package.name, submission.package.files))
    ledger = Ledger(open_bucket(inventory.operator_bucket, lambda: fleet.connection(inventory.chief.name)))
    if ledger.job(submission.job.id):
        raise used_before(submission.job.id)
    _check_data(ledger.bucket, submission)
    return ledger


def used_before(job_id: str) -> UsageError:
    return UsageError(f"job id {job_id!r} was used before, and an id is used once: take another (fab jobs lists them)")


def _check_data(bucket: Bucket, submission: Submission) -> None:
    shipped = submission.package.name == "trainer" and submission.package.files.get("trainer/records.py") is not None
    given = any(arg.partition("=")[0] in ("--train-data", "--train_data") for arg in submission.job.args)
    if shipped and not given and not submission.data and not bucket.names(DATA):
        raise UsageError(
            "there is no MNIST to train on: run make data, or name other data with --args '--train-data … --eval-data …'"
        )


def _submit(fleet: Fleet, ledger: Ledger, submission: Submission) -> None:
    """Claim the cluster, write the record, and start every host; undone where that fails or is interrupted."""
    job = submission.job
    record = JobRecord(job.id, submittedBy=me(), labels=dict(job.labels), trainingInput=_plain(dict(job.training_input)))
    streams = submission.streams()
    ledger.acquire(job.id)
    try:
        if not ledger.create(record):
            raise used_before(job.id)
        _upload_data(ledger.bucket, submission)
        record = ledger.write(record.to(JobState.PREPARING))
        uploads = _Background(lambda: _upload_package(fleet, submission))
        with show.Step(f"{job.id}: starting {len(fleet.inventory.hosts)} hosts", always=True) as step:
            _push(fleet, job.id, streams, show.counter(step, len(fleet.inventory.hosts)))
            uploads.join()
    except BaseException as error:
        _undo(fleet, ledger, job.id, error)
        raise


def _push(fleet: Fleet, job_id: str, streams: Callable[[str], bytes], done: Callable[[str], None]) -> None:
    command = push.take_in_command(job_id)

    def take_in(name: str) -> None:
        fleet.must(name, command, "could not start its replica, it ended", streams(name))

    outcome = fleet.each(fleet.inventory.names, take_in, _PUSH_SECONDS, done)
    if outcome.failures:
        raise HostsError(outcome.failures, f"job {job_id} is FAILED, nothing runs; {ADVICE}, and start it under another id")


def _undo(fleet: Fleet, ledger: Ledger, job_id: str, error: BaseException) -> None:
    """Stop what was started, and end the record, so that the cluster is free again."""
    try:
        record = ledger.job(job_id)
        if record is None or record.final:
            return
        fleet.each(fleet.inventory.names, lambda name: fleet.run(name, push.stop_command()), _STOP_SECONDS)
        record = ledger.job(job_id) or record  # a replica may have led for a moment
        if record.final:
            return
        if isinstance(error, KeyboardInterrupt):
            cancelled(ledger, record, "fab train was stopped before the replicas had started")
            show.note(f"{job_id} is CANCELLED, and nothing runs; the next job needs another id")
        else:
            fail(ledger, record, one_line(error))
    except Exception as second:  # noqa: BLE001  the first error is the one to report
        show.note(f"job {job_id} could not be ended ({one_line(second)}): run fab cancel {job_id}")


def _upload_data(bucket: Bucket, submission: Submission) -> None:
    sizes = {name: path.stat().st_size for name, path in submission.data.items()}
    wanted = missing(sizes, bucket.names(DATA)) if sizes else []
    if not wanted:
        return
    with show.Step("uploading MNIST", always=True) as step:
        progress = show.sizer(step, sum(sizes[name] for name in wanted))
        for name in wanted:
            bucket.upload(f"{DATA}/{name}", submission.data[name], progress)


def _upload_package(fleet: Fleet, submission: Submission) -> None:
    # A channel of its own: an SFTP client is not for two threads.
    bucket = open_bucket(fleet.inventory.operator_bucket, fleet.any_connection)
    bucket.upload(f"jobs/{submission.job.id}/package.tar.gz", submission.package.archive)
    bucket.upload(f"jobs/{submission.job.id}/manifest.json", submission.manifest())


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


def _follow(fleet: Fleet, job_id: str) -> int:
    from ops.reading import follow

    try:
        record = follow(fleet, job_id, list(fleet.inventory.names), None, False)
    except KeyboardInterrupt:
        how = f"fab logs all --job {job_id} --follow comes back to it, fab cancel {job_id} stops it"
        show.note(f"\n{job_id} goes on: {how}")
        return DETACHED
    if record is None:
        raise OpsError(f"nothing is known of job {job_id} any more: fab describe {job_id}")
    return _sum_up(record)


def _sum_up(record: JobRecord) -> int:
    took = (
        f" after {show.duration(seconds_since(record.startTime, record.endTime))}"
        if record.startTime and record.endTime
        else ""
    )
    if record.state == JobState.SUCCEEDED:
        show.note(f"{record.jobId} {record.state}{took}: fab get {record.jobId} DEST fetches its output")
        return DONE
    why = record.errorMessage.partition("\n")[0].rstrip(".")
    reason = f": {why}" if why else ""
    show.error(f"{record.jobId} {record.state}{took}{reason} (fab describe {record.jobId})")
    return FAILED


def _plain(value: Any) -> Any:
    """The value with all that is no UTF-8 replaced, for records, which people read; the plan has it as it was given."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value
