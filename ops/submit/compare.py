"""The comparison of two runs of a job: pure functions of their records and final metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jobs.records import JobRecord
from jobs.times import seconds_between
from ops.submit import manifest

SECONDS = "seconds"


@dataclass(frozen=True)
class ComparedValue:
    """A property of several jobs, equal or not: a value for each, None if a job does not report it."""

    what: str
    values: list[str | None]

    @property
    def same(self) -> bool:
        return len(set(self.values)) == 1

    @property
    def change(self) -> str:
        """Describe the change from the first of two jobs: `same`, `+0.012`, `differs`, or `not known` if a job lacks it."""
        original, again = self.values
        if original is None or again is None:
            return "not known"
        if self.same:
            return "same"
        try:
            digits = max(len(text.partition(".")[2]) for text in (original, again))
            form = "+.3g" if "e" in f"{original}{again}".lower() else f"+.{digits}f"
            return f"{float(again) - float(original):{form}}"
        except ValueError:
            return "differs"


def compare_values(jobs: Sequence[Mapping[str, str]]) -> list[ComparedValue]:
    """Compare the jobs' values name by name, in the order of first occurrence."""
    names = dict.fromkeys(name for job in jobs for name in job)
    return [ComparedValue(name, [job.get(name) for job in jobs]) for name in names]


def rows(original: JobRecord, rerun: JobRecord, metrics: tuple[Mapping[str, str], Mapping[str, str]]) -> list[ComparedValue]:
    """Return all properties in display order: inputs, then results with the final `metrics` of both jobs."""
    sides = [inputs(record.manifest) for record in (original, rerun)]
    outcomes = [
        results(
            record.state,
            values,
            seconds_between(record.startTime, record.endTime) if record.startTime and record.endTime else None,
        )
        for record, values in zip((original, rerun), metrics, strict=True)
    ]
    return [*compare_values(sides), *compare_values(outcomes)]


def inputs(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return a job's inputs from the manifest's summary in its record: package, runtime, data, versions, hosts."""
    cluster: Mapping[str, Any] = summary.get("cluster", {})
    replicas = {role: f"{count} x {cluster['machineTypes'][role]}" for role, count in cluster.get("replicas", {}).items()}
    values = {
        "package": manifest.package_line(summary),
        "runtime": manifest.runtime_line(summary),
        "data": manifest.data_line(summary),
        **summary.get("versions", {}),
        "scaleTier": cluster.get("scaleTier"),
        **replicas,
    }
    return {what: str(value) for what, value in values.items() if value}


def results(state: str, metrics: Mapping[str, str], seconds: float | None, dollars: float | None = None) -> dict[str, str]:
    """Return the results of a job to compare; those that are not known are left out."""
    took = {} if seconds is None else {SECONDS: f"{seconds:.1f}"}
    cost = {} if dollars is None else {"US dollars": f"{dollars:.4f}"}
    return {"state": str(state), **metrics, **took, **cost}
