"""Find unsaved files, which a job wrote outside JOB_DIR, before its folders are removed; keep them if JOB_DIR is empty."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hosts.agent import keep_unsaved
from hosts.agent.keep_unsaved import UNSAVED_FOLDER
from hosts.agent.process import ProgramSpec, RunningProgram, StartProgram, output_pipe
from hosts.agent.supervisor import Assignment
from jobs.background import BackgroundTask
from jobs.bucket import Bucket
from jobs.records import HostConfig, UnsavedFiles

SEARCH_TIMEOUT = 20.0
"""The time limit of searching and copying files."""
_START_SECONDS = 20.0
_BUCKET_SECONDS = 5.0
_MOST = 1 << 18
# The most entries of a package that are checked before a search.
_MOST_ENTRIES = 5000
_SHOWN = 5


@dataclass(frozen=True)
class JobFolders:
    """The folders of a job on this host.

    Attributes:
        package: the folder of the job's package.
        marker: the file that shows that the package is complete; files that are older came with the job.
        writable_folders: further folders that a trainer may write to, by the prefix of their files' names.
        host_paths: the same folders by their paths on the host. The launcher creates them with the modification time 0.
    """

    package: Path
    marker: Path
    writable_folders: Mapping[str, str]
    host_paths: Sequence[Path] = ()

    @property
    def folders(self) -> Sequence[tuple[str, str]]:
        """Each folder that a trainer may write to, with the prefix of its files' names."""
        return [(str(self.package), ""), *((top, prefix) for prefix, top in self.writable_folders.items())]


def start_search(
    assignment: Assignment,
    folders: JobFolders,
    host: HostConfig,
    store: Bucket,
    start: StartProgram,
    on_end: Callable[[], None] = lambda: None,
) -> BackgroundTask[UnsavedFiles]:
    """Begin one search for a job's files; `start` starts a program as the trainer's user. The result is logged."""

    def log_result(unsaved: UnsavedFiles) -> UnsavedFiles:
        if text := describe(unsaved, assignment.name):
            assignment.log.write_message(text, "WARNING")
        return unsaved

    def failed(why: str) -> UnsavedFiles:
        return log_result(UnsavedFiles(error=f"files outside JOB_DIR were not searched for: {why}"))

    seconds = _BUCKET_SECONDS + _START_SECONDS + SEARCH_TIMEOUT
    return BackgroundTask(lambda: log_result(_search(assignment, folders, host, store, start)), seconds, failed, on_end)


def _search(assignment: Assignment, folders: JobFolders, host: HostConfig, store: Bucket, start: StartProgram) -> UnsavedFiles:
    """Run keep_unsaved.py as the trainer's user, and return its report.

    It is not run if the job wrote to none of its folders, and JOB_DIR is a local folder or has objects in the bucket at Google.
    """
    env, deadline = assignment.environment, time.monotonic() + _START_SECONDS + SEARCH_TIMEOUT
    job_dir, since = env["JOB_DIR"], folders.marker.stat().st_ctime_ns
    wrote, is_local = _has_google_output(job_dir, host.bucket, store), "://" not in job_dir
    if (wrote or is_local) and _is_untouched(folders, since):
        target, search = keep_unsaved.LocalFolder(job_dir), keep_unsaved.Search(since, deadline)
        return UnsavedFiles(jobDirEmpty=not wrote and not keep_unsaved.has_job_files(target, search))
    options = {
        "jobDir": job_dir,
        "replica": assignment.name,
        "since": since,
        "wrote": wrote,
        "folders": folders.folders,
        "seconds": SEARCH_TIMEOUT,
    }
    argv = [host.python, "-I", "-S", "-B", keep_unsaved.__file__, json.dumps(options)]
    pipe, output = output_pipe()
    with os.fdopen(pipe, "rb") as answer:
        try:
            process = start(ProgramSpec(assignment.plan.jobId, argv, folders.package, env), output)
        finally:
            os.close(output)
        try:
            return _parse(_read_output(answer.fileno(), process, deadline))
        finally:
            process.signal(signal.SIGKILL)
            _reap(process, deadline)


def _is_untouched(folders: JobFolders, since: int) -> bool:
    """Return True if the job has written no file to its folders; False, too, if there are too many, or one is unreadable."""
    entries, pending = 0, [str(folders.package)]
    try:
        if any(path.stat().st_mtime_ns for path in folders.host_paths):
            return False
        while pending:
            with os.scandir(pending.pop()) as folder:
                for entry in folder:
                    entries += 1
                    if entries > _MOST_ENTRIES:
                        return False
                    if not entry.is_dir(follow_symlinks=False):
                        if entry.stat(follow_symlinks=False).st_ctime_ns > since:
                            return False
                    elif entry.name not in keep_unsaved.CACHES:
                        pending.append(entry.path)
    except OSError:
        return False
    return True


def _has_google_output(job_dir: str, bucket: str, store: Bucket) -> bool:
    """Return True if JOB_DIR is in the bucket at Google and has objects itself, not only in folders below it.

    The program gets the result, because it would need seconds to import a client.
    """
    below = job_dir.removeprefix(f"{bucket.rstrip('/')}/").rstrip("/")
    return "://" in job_dir and below != job_dir.rstrip("/") and bool(store.sizes(below))


def _read_output(pipe: int, process: RunningProgram, deadline: float) -> bytes:
    """Return a program's output until its end; ValueError if it is too long, TimeoutError if it does not end in time."""
    output = b""
    while len(output) < _MOST and (seconds := deadline - time.monotonic()) > 0:
        over = process.ended()
        if select.select([pipe], [], [], 0 if over else min(seconds, 0.1))[0]:
            piece = os.read(pipe, 1 << 16)
            output += piece
            if not piece:
                return output
        elif over:
            return output
    if len(output) >= _MOST:
        raise ValueError("it printed too much")
    raise TimeoutError("it took too long")


def _reap(process: RunningProgram, deadline: float) -> None:
    while not process.ended() and time.monotonic() < deadline + 1.0:
        time.sleep(0.02)
    if process.ended():
        process.reap()


def _parse(printed: bytes) -> UnsavedFiles:
    """Parse the report in the last line; other lines may have been printed before."""
    report: Any = None
    with suppress(ValueError, IndexError, RecursionError):
        report = json.loads(printed.splitlines()[-1])
    if not isinstance(report, dict):
        text = printed.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise ValueError(text[0][: keep_unsaved.LONGEST] if text else "it printed nothing")
    files = UnsavedFiles.from_dict(report)
    return replace(files, kept=_bounded(files.kept), leftOut=_bounded(files.leftOut), error=files.error[: keep_unsaved.LONGEST])


def _bounded(names: Sequence[str]) -> list[str]:
    """Return the first names, shortened: the job may have chosen them, and a record must stay small."""
    return [name[: 2 * keep_unsaved.LONGEST] for name in names[: keep_unsaved.NAMED]]


def describe(unsaved: UnsavedFiles, replica: str) -> str:
    """Return one line for the log; empty if there is nothing to report."""
    parts = []
    if unsaved.keptFiles:
        kept = list_first(unsaved.kept, unsaved.keptFiles)
        parts.append(f"the files that it wrote elsewhere are kept in JOB_DIR/{UNSAVED_FOLDER}/{replica}: {kept}")
    if unsaved.leftOutFiles:
        parts.append(f"not kept: {list_first(unsaved.leftOut, unsaved.leftOutFiles)}")
    if parts:
        parts.insert(0, "the job wrote nothing to JOB_DIR" if unsaved.jobDirEmpty else "the job wrote outside JOB_DIR")
    line = "; ".join([*parts, *([unsaved.error] if unsaved.error else [])])
    return "".join(each if each.isprintable() else "\ufffd" for each in line)  # a job chose the names


def list_first(names: Sequence[str], count: int) -> str:
    """Return the first of these names, and the number of the rest."""
    listed = list(names[:_SHOWN])
    more = count - len(listed)
    return ", ".join(listed) + (f" and {more} more" if more > 0 else "")
