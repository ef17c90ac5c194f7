"""The records in the bucket as `fab` reads and writes them: jobs, their replicas, and who has the cluster."""

from __future__ import annotations

import getpass
import json
import socket
from dataclasses import dataclass

from ops.cluster.bucket import Bucket
from ops.errors import UsageError
from replica.record import JobRecord, JobState, Plan, ReplicaRecord, now, seconds_since

# A job that nothing has been heard of for so long has no replica any more, and its laptop is gone.
STALE_SECONDS = 300.0
LOST_SECONDS: float = Plan.lostAfterSeconds
CURRENT = "cluster/current.json"


@dataclass(frozen=True)
class Holder:
    """Who has the cluster, or had it last."""

    job_id: str
    submitted_by: str
    create_time: str

    @classmethod
    def parse(cls, content: bytes) -> Holder:
        data = json.loads(content)
        return cls(data["jobId"], data.get("submittedBy", "?"), data["createTime"])

    def to_json(self) -> bytes:
        data = {"jobId": self.job_id, "submittedBy": self.submitted_by, "createTime": self.create_time}
        return (json.dumps(data, ensure_ascii=False) + "\n").encode()


def me() -> str:
    """`ann@laptop`, as a record names who did something."""
    return f"{getpass.getuser()}@{socket.gethostname()}"


class Ledger:
    """Typed access to `jobs/` and `cluster/`."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket

    def job(self, job_id: str) -> JobRecord | None:
        """A job's record, None where there is none."""
        content = self.bucket.read(f"jobs/{job_id}/job.json")
        return JobRecord.from_json(content) if content else None

    def existing_job(self, job_id: str) -> JobRecord:
        """A job's record; UsageError that names some of the jobs that are there."""
        if record := self.job(job_id):
            return record
        there = [record.jobId for record in self.jobs()]
        more = f", and {len(there) - 5} more (fab jobs)" if len(there) > 5 else ""
        raise UsageError(
            f"there is no job {job_id!r}; " + (f"there are {', '.join(there[:5])}{more}" if there else "none was started yet")
        )

    def jobs(self) -> list[JobRecord]:
        """Every job, the newest first."""
        records = (self.job(job_id) for job_id in self.bucket.names("jobs"))
        return sorted((record for record in records if record), key=lambda record: record.createTime, reverse=True)

    def newest(self) -> str | None:
        """The id of the job that has the cluster, or had it last."""
        holder = self.holder()
        return holder.job_id if holder else None

    def write(self, record: JobRecord) -> JobRecord:
        """Replace a job's record."""
        self.bucket.write(f"jobs/{record.jobId}/job.json", record.to_json().encode())
        return record

    def create(self, record: JobRecord) -> bool:
        """Write the first record of an id; False where the id was used before."""
        return self.bucket.create(f"jobs/{record.jobId}/job.json", record.to_json().encode())

    def replicas(self, record: JobRecord) -> list[ReplicaRecord]:
        """The replicas' own records, and what the job's record says of those that left none."""
        folder = f"jobs/{record.jobId}/replicas"
        contents = (self.bucket.read(f"{folder}/{name}") for name in sorted(self.bucket.names(folder)))
        found = [ReplicaRecord.from_json(content) for content in contents if content]
        names = {replica.name for replica in found}
        told = [ReplicaRecord.from_json(json.dumps(item)) for item in record.replicas if item.get("name") not in names]
        order = {item.get("name"): place for place, item in enumerate(record.replicas)}
        return sorted([*found, *told], key=lambda replica: order.get(replica.name, len(order)))

    def last_sign(self, record: JobRecord) -> float:
        """Seconds since anything was heard of a job: its creation, or a heartbeat."""
        beats = [replica.heartbeatTime for replica in self.replicas(record)]
        return seconds_since(max([record.createTime, *beats]))

    def request_cancel(self, job_id: str) -> bool:
        """Ask the leader to cancel; False where someone has asked before."""
        request = json.dumps({"requestedBy": me(), "createTime": now()}) + "\n"
        return self.bucket.create(f"jobs/{job_id}/cancel.json", request.encode())

    # The cluster: one job at a time

    def holder(self) -> Holder | None:
        """Who has the cluster, or had it last."""
        content = self.bucket.read(CURRENT)
        if not content:
            return None
        holder = Holder.parse(content)
        # current.json is written after the successor was chosen: one who died in between left only that.
        while content := self.bucket.read(_successor(holder.job_id)):
            holder = Holder.parse(content)
        return holder

    def acquire(self, job_id: str) -> None:
        """Take the cluster for a job; UsageError that names who has it.

        A job's successor can be created once only, so of two that find the same finished job one wins.
        """
        mine = Holder(job_id, me(), now())
        before = self.holder()
        if before is not None:
            self._check_free(before)
        if not self.bucket.create(_successor(before.job_id) if before else CURRENT, mine.to_json()):
            winner = self.holder()
            raise _taken(winner, "is being submitted") if winner else UsageError("another fab train was quicker: try again")
        if before is not None:
            self.bucket.write(CURRENT, mine.to_json())

    def _check_free(self, holder: Holder) -> None:
        record = self.job(holder.job_id)
        if record is None:
            if seconds_since(holder.create_time) < LOST_SECONDS:
                raise _taken(holder, "is being submitted")
            return
        if record.final:
            return
        if (silence := self.last_sign(record)) < STALE_SECONDS:
            raise _taken(holder, f"is {record.state}")
        fail(
            self,
            record,
            f"nothing was heard of its replicas for {silence / 60:.0f} minutes, and the cluster was wanted for another job",
        )


def fail(ledger: Ledger, record: JobRecord, why: str) -> JobRecord:
    """End a job that no replica will end: FAILED, or CANCELLED where that was under way."""
    state = JobState.CANCELLED if record.state == JobState.CANCELLING else JobState.FAILED
    return ledger.write(record.to(state, errorMessage=why))


def cancelled(ledger: Ledger, record: JobRecord, why: str) -> JobRecord:
    """End a job that no replica will end: CANCELLED, by way of CANCELLING."""
    if record.state != JobState.CANCELLING:
        record = record.to(JobState.CANCELLING)
    return ledger.write(record.to(JobState.CANCELLED, errorMessage=why))


def _successor(job_id: str) -> str:
    return f"cluster/after/{job_id}.json"


def _taken(holder: Holder, state: str) -> UsageError:
    since = f"started by {holder.submitted_by} at {holder.create_time}"
    return UsageError(
        f"job {holder.job_id} {state}, {since}: wait for it (fab logs all --follow), or fab cancel {holder.job_id}"
    )
