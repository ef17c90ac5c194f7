"""`python -m benchmarks.beats FOLDER`: write the records of 31 hosts into a bucket, until this process is ended.

One job has all hosts of PREMIUM_1. Each replica's record is written every 5 s, at different moments, by the code of the hosts;
the job's record is renewed as often.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

from infra.scale_tiers import ScaleTier, preset
from jobs.folder_bucket import FolderBucket
from jobs.ledger import Ledger
from jobs.queue import Queue, QueueEntry
from jobs.records import JobRecord, Plan, ReplicaRecord, Usage
from jobs.states import JobState, ReplicaState
from jobs.times import now

JOB = "beats"
_EVERY = Plan.heartbeatSeconds


def main() -> None:
    """Write records without end."""
    ledger = Ledger(FolderBucket(Path(sys.argv[1])))
    names = [host_id.name for host_id in preset(ScaleTier.PREMIUM_1).hosts]
    ledger.change_queue(lambda _: Queue([QueueEntry(JOB, names, has_hosts=True)]))
    ledger.create_job(JobRecord(JOB, JobState.RUNNING, createTime=now(), startTime=now(), hosts=names))
    versions: dict[str, str | None] = dict.fromkeys(names)
    began, beat = time.monotonic(), 0
    while True:
        for place, name in enumerate(names):
            time.sleep(max(0.0, began + _EVERY * (beat + place / len(names)) - time.monotonic()))
            used = Usage(1.5 * beat * _EVERY, 1.5 - place / 100, 500_000_000 + 1_000_000 * beat)
            record = ReplicaRecord(
                name, ReplicaState.RUNNING, usage=used, lines=7 * beat, incarnation="beats", heartbeatSeq=beat, startTime=now()
            )
            versions[name] = ledger.write_replica(JOB, record, versions[name])
        stored = ledger.job(JOB)
        assert stored is not None
        ledger.change_job(stored, replace(stored.record, lease=stored.record.lease.renewed()))
        beat += 1


if __name__ == "__main__":
    main()
