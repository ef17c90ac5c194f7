"""Times for people. No decision about a running job depends on them, so the wall clocks of hosts may differ."""

from __future__ import annotations

from datetime import UTC, datetime


def now() -> str:
    """Return the present time as RFC 3339 in UTC with milliseconds: `2026-01-31T12:00:00.250Z`."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def seconds_between(begin: str, end: str | None = None) -> float:
    """Return the seconds between two RFC 3339 times, by default until now; for display. It is 0 if one of them is missing."""
    try:
        until = datetime.fromisoformat(end) if end else datetime.now(UTC)
        return (until - datetime.fromisoformat(begin)).total_seconds()
    except (ValueError, TypeError):
        return 0.0
