"""A job's files on this host: its package from the bucket, its log, its environment, and what the manifest wants to know."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tarfile
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from jobs import paths
from jobs.ledger import Ledger
from jobs.records import HostFile, Plan, Task
from jobs.store import Files, StoreError
from replica import processors
from replica.archive import Archive, archived
from replica.log import Log
from replica.manifest import Manifest
from replica.supervisor import Assignment

# Said by systemd to the replica alone.
_PRIVATE = ("INVOCATION_ID", "JOURNAL_STREAM", "NOTIFY_SOCKET", "SYSTEMD_EXEC_PID", "WATCHDOG_PID", "WATCHDOG_USEC")


class HostSite:
    """Below `state`: `logs/<job>/`, `secrets/<job>.json`, `jobs/<job>/package` and, once it is whole, `package.sha256`."""

    def __init__(self, host: HostFile, state: Path, ledger: Ledger, files: Files, environ: Mapping[str, str]) -> None:
        """`files` is the bucket for what may take long: packages and logs."""
        self._host, self._state, self._ledger, self._files, self._environ = host, state, ledger, files, environ
        self._secrets = state / "secrets"
        self._archive: Archive | None = None
        self._manifest: Manifest | None = None
        self._log: Log | None = None

    def prepare(self, plan: Plan, replica: str) -> Assignment:
        """The job's package, log and environment; StoreError where they cannot be had now."""
        try:
            return self._prepared(plan, replica)
        except StoreError:
            raise
        except (OSError, ValueError, KeyError, tarfile.TarError) as error:
            raise StoreError(f"the files of {plan.jobId} cannot be laid out here: {error}") from error

    def _prepared(self, plan: Plan, name: str) -> Assignment:
        self.finish()  # of a job, or an attempt, before
        folder = self._package(plan)
        environment = self._environment(plan, plan.tasks[name], folder)
        if environment.get("JOB_DIR", "").startswith("/"):
            Path(environment["JOB_DIR"]).mkdir(parents=True, exist_ok=True)  # as on gs://, where no folder has to be made
        folder_of_log = paths.log(plan.jobId, name)
        there = archived(self._files, folder_of_log)
        if self._log is None or self._log.job_id != plan.jobId:
            if self._log:
                self._log.close()
            self._log = Log(self._state / "logs", plan.jobId, name, plan.logLimit, there)
        self._archive = Archive(self._log, self._files, folder_of_log, there)
        python = self._python(plan)
        self._manifest = Manifest(plan, python, self._ledger) if name == plan.chief else None
        return Assignment(plan, name, folder / plan.folder, environment, python, self._log)

    def facts(self) -> dict[str, Any] | None:
        """What the chief's host found, once it is in the manifest; None until then, and after."""
        return self._manifest.told() if self._manifest else None

    def tidy(self, job_ids: Collection[str]) -> None:
        """Forget the secrets of every job but these, which have this host or may get it."""
        with suppress(OSError):  # there are none
            for file in self._secrets.iterdir():
                if file.stem not in job_ids:
                    file.unlink()

    def finish(self) -> bool:
        """True once the log is in the bucket, or was waited for long enough."""
        if self._manifest:
            self._manifest.close()
        return self._archive is None or self._archive.finish()

    def _package(self, plan: Plan) -> Path:
        """The trainer package, whole: as `fab train` left it here, or else from the bucket."""
        home = self._state / "jobs" / plan.jobId
        # Each in a folder of its own: a push that comes late must not write into what a trainer runs from.
        for name in ("package", "fetched"):
            folder, mark = home / name, home / f"{name}.sha256"
            if mark.exists() and mark.read_text().strip() == plan.packageSha256:
                return folder
        home.mkdir(parents=True, exist_ok=True)
        self._forget_others(home)
        packed, unpacked = home / ".fetched.tar.gz", home / ".fetched"
        if not self._files.download(paths.package(plan.jobId), packed):
            raise StoreError(f"{paths.package(plan.jobId)} is not there yet")
        if (found := hashlib.sha256(packed.read_bytes()).hexdigest()) != plan.packageSha256:
            raise StoreError(f"{paths.package(plan.jobId)} is damaged: sha256 {found[:16]}…, not {plan.packageSha256[:16]}…")
        shutil.rmtree(unpacked, ignore_errors=True)
        unpacked.mkdir()  # a package may be empty, where the program is the host's own
        with tarfile.open(packed) as tar:
            for member in tar.getmembers():
                if not (member.isfile() or member.isdir()) or member.name.startswith("/") or ".." in Path(member.name).parts:
                    raise StoreError(f"{paths.package(plan.jobId)} holds {member.name!r}, which is no file of a package")
            tar.extractall(unpacked)  # noqa: S202  each name was looked at, and it is the trainer's own user who unpacks
        shutil.rmtree(folder, ignore_errors=True)
        unpacked.rename(folder)
        packed.unlink()
        mark.write_text(plan.packageSha256)
        return folder

    def _forget_others(self, home: Path) -> None:
        """The packages of earlier jobs: their hosts have no further use for them."""
        for other in home.parent.iterdir():
            if other != home:
                shutil.rmtree(other, ignore_errors=True)

    def _python(self, plan: Plan) -> str:
        return plan.python or self._host.python

    def _environment(self, plan: Plan, task: Task, folder: Path) -> dict[str, str]:
        """The trainer's: that of this process, its task's, TF_CONFIG, its package on PYTHONPATH, and Python first on PATH."""
        env = {key: value for key, value in self._environ.items() if key not in _PRIVATE} | task.environment
        path = os.pathsep.join(filter(None, (str(folder), env.get("PYTHONPATH"))))
        bins = os.pathsep.join((str(Path(self._python(plan)).parent), env.get("PATH", os.defpath)))
        usual = {"PYTHONUNBUFFERED": "1", **processors.threads(processors.count())}
        return usual | env | {"TF_CONFIG": task.tfConfig, "PYTHONPATH": path, "PATH": bins} | self._told_secrets(plan)

    def _told_secrets(self, plan: Plan) -> dict[str, str]:
        """The variables that `fab train` brought to this host alone."""
        if not plan.secrets:
            return {}
        try:
            found: dict[str, str] = json.loads((self._secrets / f"{plan.jobId}.json").read_bytes())
        except (OSError, ValueError):
            said = f"the secrets of {plan.jobId} are not on this host, which may be newer than the job"
            raise StoreError(f"{said}: start the job again under another id") from None
        return found
