"""Common and different inputs and results of several jobs: pure functions of their reports."""

from __future__ import annotations

from collections.abc import Sequence

from ops.report.report import Report
from ops.submit import compare

_OTHER = "other arguments"


def inputs(reports: Sequence[Report]) -> list[compare.Difference]:
    """List the differences of the jobs' inputs, flag by flag, and of their labels, without output paths."""
    return compare.differences([_inputs(report) for report in reports])


def results(reports: Sequence[Report]) -> list[compare.Difference]:
    """List the differences of state, final metrics, seconds and US dollars."""
    return compare.differences([_results(report) for report in reports])


def flags(arguments: Sequence[str]) -> dict[str, str]:
    """Parse each flag with its value.

    Takes `--a=b` and `--a b`. Several values are joined with commas, a flag without one is `yes`, and words of no flag are kept
    together.
    """
    options: dict[str, list[str]] = {}
    last = None
    for word in arguments:
        if word.startswith("-") and not _is_number(word):
            last, equals, value = word.partition("=")
            options.setdefault(last, []).extend([value] if equals else [])
            last = None if equals else last
        else:
            options.setdefault(last or _OTHER, []).append(word)
            last = None
    return {name: ", ".join(values) or "yes" for name, values in options.items()}


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _inputs(report: Report) -> dict[str, str]:
    origin = {name: value for name, value in report.made.items() if name != "output"}
    return {**origin, **flags(report.arguments), **{f"label {name}": value for name, value in report.labels.items()}}


def _results(report: Report) -> dict[str, str]:
    figures = {"state": report.state, **report.metrics}
    if report.seconds is not None:
        figures["seconds"] = f"{report.seconds:.1f}"
    if report.cost:
        figures["US dollars"] = f"{report.cost.total:.4f}"
    return figures
