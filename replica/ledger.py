"""The records of one job in the bucket, typed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any

from replica.bucket import Bucket
from replica.decide import leader
from replica.record import JobRecord, JobState, Plan, ReplicaRecord, now, with_facts


class Ledger:
    """Reads and writes `jobs/<id>/`. OSError or ValueError: the bucket, or a record in it, cannot be read now."""

    def __init__(self, plan: Plan, bucket: Bucket) -> None:
        self._plan = plan
        self._bucket = bucket
        self._folder = PurePosixPath("jobs") / plan.jobId
        self.archive_name = str(self._folder / "logs" / f"{plan.replica}.jsonl")
        self._job_name = str(self._folder / "job.json")

    def job(self) -> JobRecord:
        """The job's record."""
        content = self._bucket.read(self._job_name)
        if content is None:
            raise FileNotFoundError(f"there is no {self._job_name}")
        job = JobRecord.from_json(content)
        JobState(job.state)
        return job

    def write_job(self, job: JobRecord) -> None:
        """Only the leader does."""
        self._bucket.write(self._job_name, job.to_json().encode())

    def complete_manifest(self, facts: Mapping[str, Any]) -> bool:
        """Only the chief does: False as long as `fab train` has not written its part."""
        name = str(self._folder / "manifest.json")
        content = self._bucket.read(name)
        if content is None:
            return False
        self._bucket.write(name, (json.dumps(with_facts(json.loads(content), facts), indent=1) + "\n").encode())
        return True

    def cancel_requested(self) -> bool:
        """True once `fab cancel` has been here."""
        return self._bucket.read(str(self._folder / "cancel.json")) is not None

    def replicas(self, names: Iterable[str]) -> dict[str, ReplicaRecord]:
        """The records of those replicas that have one; what a power cut left of a file is none."""
        found = {}
        for content in self._bucket.read_all(map(self._replica_name, names)).values():
            try:
                record = ReplicaRecord.from_json(content)
            except ValueError:
                continue
            found[record.name] = record
        return found

    def write_replica(self, record: ReplicaRecord) -> None:
        """Only the replica itself does."""
        self._bucket.write(self._replica_name(record.name), record.to_json().encode())

    def others(self) -> dict[str, ReplicaRecord] | None:
        """The records of the others where this replica leads, else None, after no more reading than it takes to know."""
        names, me = self._plan.replicas, self._plan.replica
        place = names.index(me)
        found: dict[str, ReplicaRecord] = {}
        for name in names[:place]:
            found |= self.replicas([name])
            if leader(self._plan, found, me, now()) != me:
                return None
        return found | self.replicas(names[place + 1 :])

    def _replica_name(self, replica: str) -> str:
        return str(self._folder / "replicas" / f"{replica}.json")
