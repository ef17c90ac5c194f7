"""The comparison of two runs of a job: pure functions of their records and final metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jobs.records import JobRecord
from jobs.times import seconds_between
from ops.train import manifest

SECONDS = "seconds"


@dataclass(frozen=True)
class Row:
    """One thing that was compared; None where a run does not tell."""

    what: str
    original: str | None
    again: str | None

    @property
    def same(self) -> bool:
        return self.original == self.again

    @property
    def change(self) -> str:
        """`same`, `+0.012` between numbers, else `differs`; `not known` where either does not tell."""
        if self.original is None or self.again is None:
            return "not known"
        if self.same:
            return "same"
        try:
            digits = max(len(text.partition(".")[2]) for text in (self.original, self.again))
            return f"{float(self.again) - float(self.original):+.{digits}f}"
        except ValueError:
            return "differs"


def rows(original: JobRecord, again: JobRecord, finals: tuple[Mapping[str, str], Mapping[str, str]]) -> list[Row]:
    """Return all rows in display order: inputs, then results; `finals` as of ops.train.metrics."""
    sides = (inputs(original.manifest), inputs(again.manifest))
    results = ({**finals[0], **_outcome(original)}, {**finals[1], **_outcome(again)})
    return [*_rows(sides), *_rows(results)]


def _rows(sides: Sequence[Mapping[str, str]]) -> Iterator[Row]:
    first, second = sides
    yield from (Row(what, first.get(what), second.get(what)) for what in {**first, **second})


def inputs(short: Mapping[str, Any]) -> dict[str, str]:
    """Return a job's inputs by its record's short manifest: package, runtime, data, versions, hosts."""
    then_cluster: Mapping[str, Any] = short.get("cluster", {})
    replicas = {
        role: f"{count} x {then_cluster['machineTypes'][role]}" for role, count in then_cluster.get("replicas", {}).items()
    }
    values = {
        "package": manifest.package_line(short),
        "runtime": manifest.runtime_line(short),
        "data": manifest.data_line(short),
        **short.get("versions", {}),
        "scaleTier": then_cluster.get("scaleTier"),
        **replicas,
    }
    return {what: str(value) for what, value in values.items() if value}


def _outcome(record: JobRecord) -> dict[str, str]:
    outcome = {"state": str(record.state)}
    if record.startTime and record.endTime:
        outcome[SECONDS] = f"{seconds_between(record.startTime, record.endTime):.1f}"
    return outcome
