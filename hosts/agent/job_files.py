"""A job's files on this host: its package, its log, its environment, and facts for the manifest."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
import tarfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hosts.agent import diagnosis, keep_unsaved, launcher_client, network, notifier, unsaved
from hosts.agent.launcher_client import SOCKET_VARIABLE, Launcher, trial_reports_folder
from hosts.agent.log import Log, LogArchive
from hosts.agent.manifest import ManifestCompletion
from hosts.agent.notifier import COMMAND_SECONDS
from hosts.agent.process import Child, ProgramSpec, delete
from hosts.agent.supervisor import Assignment
from hosts.agent.token_broker import Broker, Mint, mint
from hosts.agent.trainer import Trainer
from hosts.agent.unsaved import JobFolders
from jobs import cgroup, paths, variables
from jobs.background import BackgroundTask
from jobs.bucket import Bucket, BucketError, Conflict, replacing
from jobs.chunks import chunks_of
from jobs.ledger import Ledger
from jobs.notification import Notification, is_url
from jobs.queue import Queue, QueueEntry
from jobs.records import STOP_FILE_VARIABLE, HostConfig, JobRecord, Plan, ReplicaRecord, Task, UnsavedFiles
from jobs.serialization import RecordError
from jobs.token_access import access

# Set by systemd for the agent alone.
_PRIVATE = ("INVOCATION_ID", "JOURNAL_STREAM", "NOTIFY_SOCKET", "SYSTEMD_EXEC_PID", "WATCHDOG_PID", "WATCHDOG_USEC")
# Variables of the agent's user, which do not apply to the trainers' user.
_OWN = ("HOME", "LOGNAME", "SHELL", "USER", SOCKET_VARIABLE)
_TRAINER = "trainer"
_UNFINISHED = "unfinished.json"
# Of a command that reports a job's end.
_STOP_SECONDS, _POLL_SECONDS = 5.0, 0.05
# The temporary folders of a trainer's unit, by the prefix of their files' names.
_UNIT_TEMPORARY = {"tmp/": "/tmp", "var/tmp/": "/var/tmp"}  # noqa: S108


def own_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of this process, without systemd's variables for it alone."""
    return {key: value for key, value in environ.items() if key not in _PRIVATE}


@dataclass
class _Job:
    """The job that has this host, and what is under way for its end."""

    assignment: Assignment
    log: Log
    folders: JobFolders
    archive: LogArchive
    manifest: ManifestCompletion | None
    diagnosis: BackgroundTask[bool] | None = None
    unsaved: BackgroundTask[UnsavedFiles] | None = None
    notification: BackgroundTask[Notification] | None = None


class JobFiles:
    """The files of jobs on this host, below `state`, and further services for a job.

    The folder `logs/<job>/` has the log, and `unfinished.json` until all of it is in the bucket. `secrets/<job>.json` has the
    secrets. The package is in `jobs/<job>`, owned by root, if `fab train` pushed it, else in `fetched/<job>`, from the bucket.
    `package.sha256` beside it shows that it is complete.
    """

    def __init__(
        self,
        host: HostConfig,
        state: Path,
        ledger: Ledger,
        files: Bucket,
        environ: Mapping[str, str],
        launcher: Launcher | None = None,
        mint: Mint = mint,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare for any number of jobs, one after another.

        `files` is the bucket for large objects: packages and logs. Without a `launcher` a trainer runs as this user. `mint`
        makes tokens for Google's clients. `wake` is called when the search for unsaved files has ended.
        """
        self._launcher = launcher
        self._host, self._state, self._ledger, self._files, self._environ = host, state, ledger, files, environ
        self._mint, self._wake = mint, wake
        self._broker: Broker | None = None
        self._secrets = state / "secrets"
        self._log: Log | None = None
        self._job: _Job | None = None

    def connect_early(self) -> None:
        """Connect to the launcher before a job is prepared, as it takes time to start."""
        if self._launcher:
            self._launcher.connect_early()

    def prepare(self, plan: Plan, replica: str) -> Assignment:
        """Return the job's files on this host and its log, for that replica; BucketError if they cannot be fetched now."""
        self.finish()  # the job before
        try:
            self._job = self._prepare(plan, replica)
        except BucketError:
            raise
        except (OSError, ValueError, KeyError, tarfile.TarError) as error:
            raise BucketError(f"the files of {plan.jobId} cannot be prepared here: {error}") from error
        return self._job.assignment

    def _prepare(self, plan: Plan, name: str) -> _Job:
        if not plan.study:
            self.connect_early()
        package = self._package(plan)
        writable = {keep_unsaved.HOME: str(self._home(plan)), **_UNIT_TEMPORARY} if self._launcher else {}
        host_paths = [self._home(plan).with_name(name) for name in ("home", "tmp", "var-tmp")] if self._launcher else []
        archive = paths.log(plan.jobId, name)
        chunks = chunks_of(self._files.sizes(archive))
        if self._log is None or self._log.job_id != plan.jobId:
            if self._log:
                self._log.roll()
            self._log = Log(self._state / "logs", plan.jobId, name, plan.logLimit, chunks)
        python = plan.python or self._host.python
        environment = self._environment(
            plan, plan.tasks[name], package, python, network.interface_variables(plan.address(name))
        )
        if environment.get("JOB_DIR", "").startswith("/"):
            Path(environment["JOB_DIR"]).mkdir(parents=True, exist_ok=True)  # as on gs://, which needs no folder
        return _Job(
            Assignment(plan, name, package / plan.folder, environment, python, self._log),
            self._log,
            JobFolders(package, package.parent / "package.sha256", writable, host_paths),
            LogArchive(self._log, self._files, archive, chunks),
            ManifestCompletion(plan, self._host.python, self._ledger) if name == plan.chief else None,
        )

    def remember(self, entry: QueueEntry) -> None:
        """Store on disk, until `forget`, that this host runs a replica of the job, which may end while the host is off."""
        with suppress(OSError), replacing(self._state / "logs" / entry.jobId / _UNFINISHED) as file:
            file.write(Queue([entry]).to_json())

    def unfinished(self) -> QueueEntry | None:
        """Return an entry that is remembered, or None."""
        for path in self._state.glob(f"logs/*/{_UNFINISHED}"):
            with suppress(OSError, RecordError, IndexError):
                return Queue.from_json(path.read_bytes()).entries[0]
        return None

    def forget(self, job_id: str) -> None:
        """Delete what `remember` stored."""
        with suppress(OSError):
            (self._state / "logs" / job_id / _UNFINISHED).unlink()

    def facts(self) -> dict[str, Any] | None:
        """Write the facts into the manifest once they are known; return them when that has succeeded, else None."""
        return self._job.manifest.write_facts() if self._job and self._job.manifest else None

    def diagnose(self, job: JobRecord, record: ReplicaRecord, end_seen: str) -> None:
        """Begin to write the diagnosis of a job that FAILED, once; `end_seen` is when this host read of its end."""
        if (current := self._job) and current.diagnosis is None:
            make = partial(
                diagnosis.build, self._host, self._state, current.assignment, current.log.path, job, record, end_seen
            )
            name = paths.diagnosis(job.jobId, record.name)
            current.diagnosis = diagnosis.start(self._files, name, make, lambda why: current.log.write_message(why, "WARNING"))

    def unsaved(self, record: ReplicaRecord) -> UnsavedFiles | None:
        """Return the files that the job wrote outside JOB_DIR, or None during the search, which the first call begins."""
        current = self._job
        if (
            current is None
            or current.assignment.plan.study
            or not record.startTime
            or not current.assignment.environment.get("JOB_DIR")
        ):
            return UnsavedFiles()
        if current.unsaved is None:
            start = self._launcher or Child
            current.unsaved = unsaved.start_search(
                current.assignment, current.folders, self._host, self._files, start, self._wake
            )
        return current.unsaved.result

    def notify(self, job: JobRecord) -> Notification | None:
        """Begin, once, to report the job's end to the target of `--notify`; return the result, None until it is known."""
        assert self._job is not None
        if self._job.notification is None:
            plan, env = self._job.assignment.plan, self._job.assignment.environment
            target = variables.expand(plan.notify, env) if is_url(plan.notify) else plan.notify
            words = [] if is_url(target) else variables.expand_command(shlex.split(target), env)
            secrets = diagnosis.lines_of(env.get(name, "") for name in plan.secrets)
            record = json.dumps(diagnosis.redact(job.to_dict(), secrets)).encode()
            self._job.notification = notifier.start(target, words, record, partial(self._run_as_trainer, self._job))
        return self._job.notification.result

    def _run_as_trainer(self, current: _Job, argv: list[str], added: Mapping[str, str]) -> int:
        """Run a command as the trainer's user and in its sandbox, with its output in the log."""
        assignment = current.assignment
        run = ProgramSpec(assignment.plan.jobId, argv, assignment.directory, {**assignment.environment, **added})
        command = Trainer(run, current.log, self._launcher or Child)
        deadline = time.monotonic() + COMMAND_SECONDS
        while (end := command.poll()) is None:
            if time.monotonic() > deadline:
                command.stop(_STOP_SECONDS)
            time.sleep(_POLL_SECONDS)
        if command.stopping:
            raise TimeoutError
        return end.status

    def secrets(self) -> list[Path]:
        """Return the files with the secrets of jobs."""
        with suppress(OSError):  # there are none
            return list(self._secrets.iterdir())
        return []

    def tidy(self, job_ids: Collection[str], secrets: Iterable[Path]) -> None:
        """Remove the files of all jobs but these, which hold this host or wait for it; no trainer may run here.

        Of the secrets, remove only those in `secrets`. A package that has just arrived may be removed: the bucket has it.
        """
        with suppress(OSError):  # the next call tries again
            for file in secrets:
                if file.stem not in job_ids:
                    file.unlink(missing_ok=True)
        with suppress(OSError):  # the next call tries again
            if self._launcher and self._job_folders() - set(job_ids):
                self._launcher.tidy(job_ids)

    def _job_folders(self) -> set[str]:
        """Return the jobs and trials whose files the launcher could remove."""
        names: set[str] = set()
        for folder in (self._state / "jobs", self._state / "fetched", trial_reports_folder(self._state)):
            with suppress(OSError):  # it is not there
                names |= {each.name for each in folder.iterdir()}
        return names

    def finish(self) -> bool:
        """Return True once log and diagnosis are in the bucket, or after a time limit."""
        if self._job is None:
            return True
        if self._job.manifest:
            self._job.manifest.close()
        if self._job.diagnosis and self._job.diagnosis.result is None:
            return False
        return self._job.archive.finish()

    def _package(self, plan: Plan) -> Path:
        """Return the whole trainer package: as `fab train` pushed it, or else from the bucket."""
        # Each in a folder of its own: a push that comes late must not write into what a trainer runs from.
        fetched = self._state / "fetched" / plan.jobId
        for place in (self._state / "jobs" / plan.jobId, fetched):
            folder, mark = place / "package", place / "package.sha256"
            if mark.exists() and mark.read_text().strip() == plan.packageSha256:
                return folder
        fetched.mkdir(parents=True, exist_ok=True)
        packed, unpacked = fetched / ".package.tar.gz", fetched / ".package"
        if not self._files.download(paths.package(plan.jobId), packed):
            raise BucketError(f"{paths.package(plan.jobId)} is not there yet")
        if (digest := hashlib.sha256(packed.read_bytes()).hexdigest()) != plan.packageSha256:
            raise BucketError(f"{paths.package(plan.jobId)} is damaged: sha256 {digest[:16]}…, not {plan.packageSha256[:16]}…")
        delete(unpacked)
        unpacked.mkdir()  # a package may be empty, where the program is the host's own
        with tarfile.open(packed) as tar:
            for member in tar.getmembers():
                if not (member.isfile() or member.isdir()) or member.name.startswith("/") or ".." in Path(member.name).parts:
                    raise BucketError(f"{paths.package(plan.jobId)} holds {member.name!r}, which is no file of a package")
            tar.extractall(unpacked)  # noqa: S202  each name was checked, and the user has no privileges
        delete(folder)
        unpacked.rename(folder)
        packed.unlink()
        mark.write_text(plan.packageSha256)
        return folder

    def _environment(self, plan: Plan, task: Task, package: Path, python: str, interface: Mapping[str, str]) -> dict[str, str]:
        """Return the trainer's environment.

        It is that of this process, its task's, TF_CONFIG, its package on PYTHONPATH, and Python first on PATH. `interface` has
        the variables that name the network interface for gloo and NCCL, unless the job sets them.
        """
        # A trial has an output of its own, so its variables are filled in when it starts.
        job_environment = task.environment if plan.study else variables.expand_environment(task.environment, task.environment)
        env = self._inherited(plan) | job_environment
        stop_file = launcher_client.STOP_FILE if self._launcher else str(self._state / "stop")
        return (
            {"PYTHONUNBUFFERED": "1", **threads(cgroup.available_cpus()), **interface}
            | env
            | {
                "TF_CONFIG": task.tfConfig,
                "CLOUD_ML_JOB": json.dumps(json.loads(task.tfConfig).get("job", {})),
                "PYTHONPATH": os.pathsep.join(filter(None, (str(package), env.get("PYTHONPATH")))),
                "PATH": os.pathsep.join((str(Path(python).parent), env.get("PATH", os.defpath))),
                STOP_FILE_VARIABLE: stop_file,
            }
            | self._broker_variables(plan, task)
            | self._read_secrets(plan)
        )

    def _inherited(self, plan: Plan) -> dict[str, str]:
        """Return this process's variables; behind a launcher, with those of the trainers' user and the job's home folder."""
        inherited = own_environment(self._environ)
        if self._launcher is None:
            return inherited
        others = {key: value for key, value in inherited.items() if key not in _OWN}
        return others | {"HOME": str(self._home(plan)), "LOGNAME": _TRAINER, "USER": _TRAINER}

    def _broker_variables(self, plan: Plan, task: Task) -> dict[str, str]:
        """Return the variables that direct Google's clients to the broker; none if the bucket is a folder."""
        if self._broker:
            self._broker.close()
            self._broker = None
        scheme, _, bucket = self._host.bucket.partition("://")
        if scheme != "gs":
            return {}
        rights = access(plan, task, bucket)
        # The output folder must exist: a client that makes a folder in it would look for those above, which it may not read.
        with suppress(Conflict):
            self._ledger.store.create(f"{rights.writes[0]}/", b"")
        log = self._log
        assert log is not None  # `_prepare` has opened it
        self._broker = Broker(rights, self._mint, lambda text: log.write_message(text, "WARNING"))
        return self._broker.environment

    def _home(self, plan: Plan) -> Path:
        return self._state / "jobs" / plan.jobId / "home"

    def _read_secrets(self, plan: Plan) -> dict[str, str]:
        """Return the variables that `fab train` wrote to the job's hosts, and not to the bucket."""
        if not plan.secrets:
            return {}
        try:
            secrets: dict[str, str] = json.loads((self._secrets / f"{plan.jobId}.json").read_bytes())
        except (OSError, ValueError):
            problem = f"the secrets of {plan.jobId} are not on this host, which may be newer than the job"
            raise BucketError(f"{problem}: start the job again under another id") from None
        return secrets


def threads(cpus: float) -> dict[str, str]:
    """Return the variables that limit the thread pools of OpenMP and TensorFlow to this number of CPUs, rounded up.

    Without them, both count the processors of the machine. TensorFlow runs at least two operations at a time, as one may wait
    for another host.
    """
    count = math.ceil(cpus)
    return {
        "OMP_NUM_THREADS": str(count),
        "TF_NUM_INTRAOP_THREADS": str(count),
        "TF_NUM_INTEROP_THREADS": str(max(2, count)),
    }
