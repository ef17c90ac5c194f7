"""The right to change a job: a lease with an epoch; expiry is judged by the observer's own clock.

The lease is a part of the job's record, so a write of the record also proves the lease: a holder that was overtaken finds the
record changed. Another process takes the lease over only if it has seen no change for a while on its own monotonic clock (Gray
and Cheriton 1989; the epoch is the fencing token of Burrows 2006).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

SECONDS = 15.0
"""The time without a change after which a holder's lease may be taken over."""
SUBMITTER_FACTOR = 2
"""The factor on SECONDS for a submitter (`fab train`): one slow call must not cost it its job."""
# The most that counts of the time between two polls: the observer missed what happened in between.
_LONGEST_GAP = 5.0

Clock = Callable[[], float]


@dataclass(frozen=True)
class Lease:
    """The holder of a job, its epoch and its number of renewals; `holder` is empty while there is none.

    A holder is `worker-0/4f1c` (an incarnation of a replica), a submitter, or the process that ends a job without a leader.
    `epoch` grows with every change of holder: a holder with an older epoch has lost the lease.
    """

    old_names: ClassVar[Mapping[str, str]] = {"heartbeatSeq": "beat"}

    holder: str = ""
    epoch: int = 0
    heartbeatSeq: int = 0
    submitter: bool = False

    @property
    def free(self) -> bool:
        return not self.holder

    def with_holder(self, holder: str, submitter: bool = False) -> Lease:
        """Return the lease with another holder."""
        return Lease(holder, self.epoch + 1, 0, submitter)

    def renewed(self) -> Lease:
        return replace(self, heartbeatSeq=self.heartbeatSeq + 1)

    def is_assigned_to(self, replica: str) -> bool:
        """Return True if an incarnation of this replica holds the lease."""
        return self.holder.startswith(f"{replica}/") and not self.submitter


class ChangeTimer:
    """Timer of how long values have not changed, on the observer's own monotonic clock.

    Time without a poll, because the observer was suspended or the bucket was unreachable, is not counted.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._values: dict[Hashable, tuple[Hashable, float, float]] = {}

    def observe(self, key: Hashable, value: Hashable, now: float | None = None) -> float:
        """Record a value; return the seconds for which it has been the same, 0 for a new one.

        Pass the same `now` for all values of one poll, so that their times can be compared.
        """
        now = self.clock() if now is None else now
        before = self._values.get(key)
        same = before is not None and before[0] == value
        seconds = before[1] + min(now - before[2], _LONGEST_GAP) if before and same else 0.0
        self._values[key] = (value, seconds, now)
        return seconds

    def reset(self, key: Hashable) -> None:
        """Forget the value of a key."""
        self._values.pop(key, None)
