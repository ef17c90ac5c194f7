"""Filters of log lines, by the flags of a command."""

from __future__ import annotations

import re
from datetime import UTC, datetime, time, timedelta

from infra.scale_tiers import suggest
from jobs.chunks import SEVERITIES, LogFilter
from ops.errors import UsageError

_DEFAULT_LINES = 100
_AGO = re.compile(r"(\d{1,9})(s|m|h|d)")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_VALID = "how long ago, as 90s, 10m, 2h or 3d, a time of today, as 14:30 or 14:30:05, and 2026-01-31T12:00:00Z"


def parse_filter(
    lines: str | None = None,
    since: str | None = None,
    until: str | None = None,
    grep: str | None = None,
    severity: str | None = None,
    now: datetime | None = None,
) -> LogFilter:
    """Parse the flags of these names; without `lines` select the last 100, or with another flag all that match.

    UsageError has the valid values.
    """
    now = now or datetime.now(UTC)
    begin = _parse_time(since, "--since", now) if since is not None else ""
    end = _parse_time(until, "--until", now) if until is not None else ""
    if begin and end and begin > end:
        raise UsageError(f"--since {since} is later than --until {until}")
    is_narrow = begin or end or grep or severity
    count = parse_lines(lines) if lines is not None else None if is_narrow else _DEFAULT_LINES
    return LogFilter(
        count, begin, end, _parse_severity(severity) if severity is not None else "", _parse_pattern(grep) if grep else ""
    )


def parse_lines(text: str) -> int | None:
    """Parse `--lines`: a number, or `all`, which is None."""
    if text == "all":
        return None
    if not text.isdecimal():
        raise UsageError(f"--lines {text!r} is invalid. Valid: 0 and above, and all")
    return int(text)


def _parse_time(text: str, flag: str, now: datetime) -> str:
    """Parse a time, and format it as logs do: RFC 3339 in UTC with milliseconds."""
    try:
        if ago := _AGO.fullmatch(text.strip()):
            moment = now - timedelta(**{_UNITS[ago[2]]: int(ago[1])})
        elif "T" in text.upper() or "-" in text:
            moment = datetime.fromisoformat(text.strip())
        else:
            moment = datetime.combine(now.astimezone().date(), time.fromisoformat(text.strip()))
        return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (ValueError, OverflowError):
        raise UsageError(f"{flag} {text!r} is invalid. Valid: {_VALID}") from None


def _parse_severity(text: str) -> str:
    name = text.upper()
    if name not in SEVERITIES:
        raise UsageError(f"--severity {text!r} is invalid. Valid: {', '.join(SEVERITIES)}{suggest(name, SEVERITIES)}")
    return name


def _parse_pattern(text: str) -> str:
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(f"--grep {text!r} is invalid: {error}. Valid: a regular expression of Python") from None
    return text
