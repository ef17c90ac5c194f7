"""A fake of a job's files, log and facts on a host: what the agent's rounds need besides a trainer."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

from hosts.agent.job_files import JobFiles
from hosts.agent.log import Log
from hosts.agent.supervisor import Assignment
from jobs.notification import Notification
from jobs.records import JobRecord, Plan, ReplicaRecord, UnsavedFiles


class FakeSite(JobFiles):
    """A site whose operations end at once."""

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

    def tidy(self, job_ids: Collection[str]) -> None:
        pass

    def finish(self) -> bool:
        return True
