"""Fakes that several folders of tests share: a clock, a failing store, and a job's files on a host."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, cast

from hosts.agent.job_files import JobFiles
from hosts.agent.log import Log
from hosts.agent.supervisor import Assignment
from jobs.bucket import BucketError, RecordStore
from jobs.notification import Notification
from jobs.records import JobRecord, Plan, ReplicaRecord, UnsavedFiles


class Clock:
    """Replace the module `time`, or a monotonic clock: `sleep` returns at once and runs `ticks`, what others do meanwhile."""

    def __init__(self, now: float = 1000.0, *ticks: Callable[[], object]) -> None:
        self.now, self.ticks = now, list(ticks)

    def __call__(self) -> float:
        return self.now

    monotonic = __call__

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for tick in self.ticks:
            tick()


class Flaky:
    """A store that fails as `fail` lists: before or after the effect of a write. `calls` are the names that were written."""

    def __init__(self, store: RecordStore) -> None:
        self._store = store
        self.fail: list[str] = []
        self.calls: list[str] = []
        self.before: Callable[[str, str], None] = lambda method, name: None

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(name: Any, *args: Any) -> Any:
            self.before(method, name)
            writes = method in ("create", "replace")
            failure = self.fail.pop(0) if writes and self.fail else ""
            if failure == "before":
                raise BucketError("the bucket fails")
            result = getattr(self._store, method)(name, *args)
            if writes:
                self.calls.append(name)
            if failure == "after":
                raise BucketError("the answer is lost")
            return result

        return call


class FakeJobFiles(JobFiles):
    """The files of a host without a disk: what an agent's cycles need besides a trainer; each operation ends at once."""

    _state = Path("/nowhere")

    def __init__(self) -> None:
        """Need no host."""

    def prepare(self, plan: Plan, replica: str) -> Assignment:
        return Assignment(plan, replica, Path(), {}, "python", cast(Log, self))

    def write_message(self, message: str, severity: str = "INFO") -> None:
        pass

    def facts(self) -> dict[str, Any] | None:
        return None

    def notify(self, job: JobRecord) -> Notification | None:
        raise AssertionError("no end is to be reported")

    def diagnose(self, job: JobRecord, record: ReplicaRecord, end_seen: str) -> None:
        pass

    def unsaved(self, record: ReplicaRecord) -> UnsavedFiles | None:
        return UnsavedFiles()

    def secrets(self) -> list[Path]:
        return []

    def tidy(self, job_ids: Collection[str], secrets: Iterable[Path]) -> None:
        pass

    def connect_early(self) -> None:
        pass

    def finish(self) -> bool:
        return True
