"""Who may move a job on: a lease with an epoch, and silence judged by one's own clock alone.

The lease is a part of the job's record, so a write of the record is also a proof of the lease: whoever was overtaken finds
the record changed. It is taken over only when its value has not changed for a while on the taker's own monotonic clock
(Gray and Cheriton 1989; the epoch is the fencing token of Burrows 2006).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

SECONDS = 15.0
"""So long without a change, and the lease of a holder may be taken over."""
OF_A_SUBMITTER = 2
"""So many times as long for that of a submitter, who does one thing at a time: a single slow call must not cost it its job."""
# A judge that did not look for longer than this did not see what happened in between.
_LOOKED_AWAY = 5.0

Clock = Callable[[], float]


@dataclass(frozen=True)
class Lease:
    """Who holds it, which of its holders that is, and how often it was renewed; nobody where `holder` is empty.

    A holder is `worker-0/4f1c` (a replica, and which life of it), `worker-0` (whichever life), or what a submitter, or who ends
    a job in its place, calls itself. `epoch` grows with every change of hands: what an older epoch says is void.
    """

    holder: str = ""
    epoch: int = 0
    beat: int = 0
    submitter: bool = False

    @property
    def free(self) -> bool:
        return not self.holder

    def passed(self, holder: str, submitter: bool = False) -> Lease:
        """The lease in other hands: taken by them, or handed to them."""
        return Lease(holder, self.epoch + 1, 0, submitter)

    def renewed(self) -> Lease:
        return replace(self, beat=self.beat + 1)

    def meant_for(self, replica: str) -> bool:
        """True where it was handed to a replica, or is held by an earlier life of it."""
        return self.holder.partition("/")[0] == replica and not self.submitter


class Watch:
    """How long values have not changed, as far as this judge has seen by its own monotonic clock.

    Time during which it did not look, because it was suspended or the bucket was away, says nothing of others and is not
    counted.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._seen: dict[Hashable, tuple[Hashable, float, float]] = {}

    def see(self, key: Hashable, value: Hashable) -> float:
        """Take note of a value; the seconds for which it has been the same, 0 for one that is new."""
        now = self.clock()
        before = self._seen.get(key)
        same = before is not None and before[0] == value
        seconds = before[1] + min(now - before[2], _LOOKED_AWAY) if before and same else 0.0
        self._seen[key] = (value, seconds, now)
        return seconds

    def forget(self, key: Hashable) -> None:
        """Begin anew with this key."""
        self._seen.pop(key, None)
