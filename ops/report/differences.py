"""What several jobs have in common and what not: pure functions of their reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ops.report.report import Difference, Report

_OTHER = "other arguments"


def inputs(reports: Sequence[Report]) -> list[Difference]:
    """What went in: what the jobs were made of, flag by flag, and their labels. Where the output went is no difference."""
    return _rows([_inputs(report) for report in reports])


def results(reports: Sequence[Report]) -> list[Difference]:
    """What came out: state, final metrics, seconds, US dollars."""
    return _rows([_results(report) for report in reports])


def flags(arguments: Sequence[str]) -> dict[str, str]:
    """Each flag with its value, `--a=b` or `--a b`, several with commas, `yes` for one without; words of no flag together."""
    found: dict[str, list[str]] = {}
    last = None
    for word in arguments:
        if word.startswith("-") and not _is_number(word):
            last, equals, value = word.partition("=")
            found.setdefault(last, []).extend([value] if equals else [])
            last = None if equals else last
        else:
            found.setdefault(last or _OTHER, []).append(word)
            last = None
    return {name: ", ".join(values) or "yes" for name, values in found.items()}


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _inputs(report: Report) -> dict[str, str]:
    made = {name: value for name, value in report.made.items() if name != "output"}
    return {**made, **flags(report.arguments), **{f"label {name}": value for name, value in report.labels.items()}}


def _results(report: Report) -> dict[str, str]:
    told = {"state": report.state, **report.metrics}
    if report.seconds is not None:
        told["seconds"] = f"{report.seconds:.1f}"
    if report.cost:
        told["US dollars"] = f"{report.cost.total:.4f}"
    return told


def _rows(told: Sequence[Mapping[str, str]]) -> list[Difference]:
    names = dict.fromkeys(name for each in told for name in each)
    return list(_differences(names, told))


def _differences(names: Mapping[str, None], told: Sequence[Mapping[str, str]]) -> Iterator[Difference]:
    for name in names:
        yield Difference(name, [each.get(name) for each in told])
