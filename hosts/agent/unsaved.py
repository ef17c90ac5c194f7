"""Find what a job wrote beside JOB_DIR, and keep it if JOB_DIR is empty, when it has ended and before its folders go."""

from __future__ import annotations

import json
import os
import select
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hosts.agent import keep_unsaved
from hosts.agent.keep_unsaved import LEFT, LimitError, LocalFolder, Search
from hosts.agent.process import ProcessRun, TrainerProcess, TrainerStart
from hosts.agent.supervisor import Says
from jobs.records import UnsavedFiles
from jobs.store import Files

SECONDS = 20.0
"""So long files are looked for and copied."""
_START_SECONDS = 20.0
_LOOK_SECONDS = 5.0
_MOST = 1 << 18
_SHOWN = 5
_NOT, _SLOW = "files beside JOB_DIR were not looked for", "it took too long"


@dataclass(frozen=True)
class JobFolders:
    """The folders of a job on this host: its package, its completion mark, and `others` by prefix."""

    package: Path
    mark: Path
    others: Mapping[str, str]

    @property
    def folders(self) -> Sequence[tuple[str, str]]:
        """Each folder that a trainer may write to, with what the names of its files begin with."""
        return [(str(self.package), ""), *((top, prefix) for prefix, top in self.others.items())]


class UnsavedCollector:
    """One look for such files, in a thread of its own. Nobody waits for it longer than it may take."""

    def __init__(
        self,
        job: str,
        replica: str,
        env: Mapping[str, str],
        place: JobFolders,
        python: str,
        bucket: str,
        files: Files,
        start: TrainerStart,
        log: Says,
    ) -> None:
        """Begin. `env` is the trainer's, `start` starts a program as the trainer's user."""
        self._job, self._replica, self._env, self._place, self._python = job, replica, env, place, python
        self._bucket, self._files, self._start, self._log = bucket.rstrip("/"), files, start, log
        self._give_up_at = time.monotonic() + _LOOK_SECONDS + _START_SECONDS + SECONDS
        self._found: UnsavedFiles | None = None
        threading.Thread(target=self._run, name="unsaved", daemon=True).start()

    def result(self) -> UnsavedFiles | None:
        """Return the list of files, or None during the search."""
        if self._found is None and time.monotonic() > self._give_up_at:
            return UnsavedFiles(error=f"{_NOT}: {_SLOW}")
        return self._found

    def _run(self) -> None:
        try:
            files = self._ask()
        except Exception as error:  # noqa: BLE001  whatever it is, the job has ended all the same
            why = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
            files = UnsavedFiles(error=f"{_NOT}: {why}")
        if text := said(files, self._replica):
            self._log.say(text, "WARNING")
        self._found = files

    def _wrote(self) -> bool:
        """Return True if JOB_DIR has a file of the job for sure, which is found without starting a program."""
        job_dir = self._env["JOB_DIR"].rstrip("/")
        if "://" in job_dir:
            below = job_dir.removeprefix(f"{self._bucket}/")
            return below != job_dir and bool(self._files.sizes(below))
        try:
            return LocalFolder(job_dir).wrote(Search(self._since(), time.monotonic() + _LOOK_SECONDS))
        except LimitError:
            return True  # so much of it is no empty folder

    def _since(self) -> int:
        return self._place.mark.stat().st_ctime_ns

    def _ask(self) -> UnsavedFiles:
        """Have it looked for, and kept, as the trainer's user."""
        options = {
            "jobDir": self._env["JOB_DIR"],
            "replica": self._replica,
            "since": self._since(),
            "wrote": self._wrote(),
            "folders": self._place.folders,
            "seconds": SECONDS,
        }
        argv = [self._python, "-I", "-S", "-B", keep_unsaved.__file__, json.dumps(options)]
        pipe, output = os.pipe()
        with os.fdopen(pipe, "rb") as answer:
            try:
                process = self._start(ProcessRun(self._job, argv, self._place.package, self._env), output)
            finally:
                os.close(output)
            try:
                return _read(_heard(answer.fileno(), process, self._give_up_at))
            finally:
                process.signal(signal.SIGKILL)
                _reap(process, self._give_up_at)


def _heard(pipe: int, process: TrainerProcess, deadline: float) -> bytes:
    """Return a program's output until its end.

    Raises:
        TimeoutError: it does not end in time.
    """
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
    raise TimeoutError(_SLOW)


def _reap(process: TrainerProcess, deadline: float) -> None:
    while not process.ended() and time.monotonic() < deadline + 1.0:
        time.sleep(0.02)
    if process.ended():
        process.reap()


def _read(printed: bytes) -> UnsavedFiles:
    """Return the last line; others may have been printed before."""
    report: Any = None
    with suppress(ValueError, IndexError, RecursionError):
        report = json.loads(printed.splitlines()[-1])
    if not isinstance(report, dict):
        text = printed.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise ValueError(text[0][: keep_unsaved.LONGEST] if text else "it printed nothing")
    files = UnsavedFiles.from_dict(report)
    return replace(files, kept=_bounded(files.kept), leftOut=_bounded(files.leftOut), error=files.error[: keep_unsaved.LONGEST])


def _bounded(names: Sequence[str]) -> list[str]:
    """Return a limited number of short names: they may be the job's own words, and a record stays small."""
    return [name[: 2 * keep_unsaved.LONGEST] for name in names[: keep_unsaved.NAMED]]


def said(found: UnsavedFiles, replica: str) -> str:
    """Return one line for the log; empty if there is nothing to report."""
    parts = []
    if found.keptFiles:
        parts.append(
            f"the files that it wrote elsewhere are kept in JOB_DIR/{LEFT}/{replica}: {few(found.kept, found.keptFiles)}"
        )
    if found.leftOutFiles:
        parts.append(f"not kept: {few(found.leftOut, found.leftOutFiles)}")
    if parts:
        parts.insert(0, "the job wrote nothing to JOB_DIR" if found.jobDirEmpty else "it wrote beside JOB_DIR")
    return "; ".join([*parts, *([found.error] if found.error else [])])


def few(names: Sequence[str], count: int) -> str:
    """Return the first of these names, and the number of the rest."""
    listed = list(names[:_SHOWN])
    more = count - len(listed)
    return ", ".join(listed) + (f" and {more} more" if more > 0 else "")
