"""The HTML page of a report: one file without scripts or network access, made by pure functions."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, TypeVar

import jinja2
from markupsafe import Markup

from infra import templates
from jobs.times import seconds_between
from ops import terminal
from ops.report import charts
from ops.report.make import inputs, results
from ops.report.report import Chart, Curve, Report, Tuning
from ops.submit.compare import differences

T = TypeVar("T")

MARK = '<meta name="generator" content="scaletier report">'
"""A mark among the first bytes of a page by this command, which no other file has."""
_TEMPLATE = "report.html.j2"
_ROWS = 12
_TUNED = "it tuned hyperparameters: its own report has the trials"
# What a page of one job has, or one of several.
_ABSENT = dict.fromkeys(
    ("report", "pace", "time", "tried", "arguments", "elsewhere", "confusion", "inputs", "results"),
)
# The most percent of its colour that a cell has, so that its number is legible.
_STRONGEST = 50


@dataclass(frozen=True)
class Figure:
    """A chart on a page: its picture, what that shows in words, and a table of some of its points."""

    title: str
    picture: Markup
    words: str
    heads: list[str]
    rows: list[list[str]]
    caption: str = ""


@dataclass(frozen=True)
class Cell:
    """A count of a confusion matrix; `strength` of its colour in percent."""

    count: int
    strength: int
    right: bool


def page(reports: Sequence[Report]) -> str:
    """Render the page of a job, or of several to compare; bytes that are not UTF-8 become question marks."""
    content = _one(reports[0]) if len(reports) == 1 else _several(reports)
    html = _template().render(_ABSENT | content)
    return html.encode("utf-8", "replace").decode()


@cache
def _template() -> jinja2.Template:
    environment = templates.environment().overlay(autoescape=True, finalize=_harmless)
    environment.filters = environment.filters | {
        "moment": moment,
        "duration": terminal.duration,
        "dollars": terminal.dollars,
        "number": number,
    }
    template: jinja2.Template = environment.get_template(_TEMPLATE)
    return template


def _harmless(value: Any) -> Any:
    """Return untrusted text in printable form; text that is marked as HTML is ours."""
    return terminal.harmless(value) if type(value) is str else value


def _one(report: Report) -> dict[str, Any]:
    return {
        "title": f"Job {report.job}",
        "report": report,
        "reports": [report],
        "curves": [curve_figure(chart) for chart in report.charts],
        "pace": pace_figure(report),
        "time": time_figure(report),
        "tried": tried_figures(report.tuning) if report.tuning else [],
        "arguments": [shlex.quote(word) for word in report.arguments],
        "elsewhere": any(each.host not in (None, each.name) for each in report.replicas),
        "confusion": confusion(report.evaluation.confusion) if report.evaluation else [],
    }


def _several(reports: Sequence[Report]) -> dict[str, Any]:
    # A tuning job's curves are its trials', which its own page has.
    reports = [replace(report, charts=[], notes=[*report.notes, _TUNED]) if report.tuning else report for report in reports]
    names = list(dict.fromkeys(chart.name for report in reports for chart in report.charts))
    return {
        "title": f"Jobs {', '.join(report.job for report in reports)}",
        "reports": reports,
        "curves": [compared_figure(name, reports) for name in names],
        "inputs": sorted(differences([inputs(each) for each in reports]), key=lambda row: row.same),
        "results": differences([results(each) for each in reports]),
    }


def moment(text: str | None) -> str:
    """Format an RFC 3339 moment in UTC, `2026-01-31 12:00:00 UTC`, as readers are in any time zone."""
    return f"{text[:19].replace('T', ' ')} UTC" if text else ""


def number(value: float) -> str:
    """Format a number with 4 digits: `0.02271`, `1234`."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def curve_figure(chart: Chart) -> Figure:
    """Return the figure of a chart of a job's own curves."""
    return _figure(chart.name, charts.svg(charts.curves(chart)), [(curve.name, curve) for curve in chart.curves])


def compared_figure(name: str, reports: Sequence[Report]) -> Figure:
    """Return the figure that compares several jobs' curves of one name."""
    job_charts = [(report.job, next((chart for chart in report.charts if chart.name == name), None)) for report in reports]
    curves = [(f"{job}: {curve.name}", curve) for job, chart in job_charts if chart for curve in chart.curves]
    return _figure(name, charts.svg(charts.compared(name, job_charts)), curves)


def _figure(name: str, picture: str, curves: Sequence[tuple[str, Curve]]) -> Figure:
    words = "; ".join(
        f"{called} from {_at(curve.points[0])} to {_at(curve.points[-1])}" for called, curve in curves if curve.points
    )
    rows = [[called, str(step), number(value)] for called, curve in curves for step, value in some(curve.points)]
    return Figure(name, Markup(picture), f"{name} by step: {words}", ["curve", "step", name], rows)  # noqa: S704  made by charts


def _at(point: tuple[int, float]) -> str:
    return f"{number(point[1])} at step {point[0]}"


def some(points: Sequence[T]) -> list[T]:
    """Return a few of the points, evenly spaced, with the first and the last."""
    if len(points) <= _ROWS:
        return list(points)
    return [points[round(place * (len(points) - 1) / (_ROWS - 1))] for place in range(_ROWS)]


def pace_figure(report: Report) -> Figure | None:
    """Return the figure of the replicas' throughput, or None if no line reports it."""
    paces = report.throughput
    if not any(len(pace.points) > 1 for pace in paces):
        return None
    seconds = [max(seconds_between(report.createTime, each.time), 0) for each in report.events]
    picture = Markup(charts.svg(charts.throughput(paces, report.events, seconds)))  # noqa: S704  made by charts
    means = {pace.replica: sum(rate for _, rate in pace.points) / len(pace.points) for pace in paces}
    rows = [[pace.replica, number(means[pace.replica]), str(len(pace.restarts))] for pace in paces]
    words = ", ".join(f"{pace.replica} {number(means[pace.replica])}" for pace in paces)
    what = "each replica's own steps" if all(pace.own for pace in paces) else "the global step as each replica saw it rise"
    marks = " Triangles are restarts of a replica." if any(pace.restarts for pace in paces) else ""
    lines = " Dashed lines are what happened to the job." if any(each.who == "job" for each in report.events) else ""
    heads = ["replica", "mean steps/s", "restarts"]
    return Figure(
        "Throughput",
        picture,
        f"steps per second by time, on average: {words}",
        heads,
        rows,
        f"Steps/s: {what}.{marks}{lines}",
    )


def tried_figures(tuning: Tuning) -> list[Figure]:
    """Return the figures of the trials by number and by each hyperparameter; none if no trial reported."""
    trials = charts.ended_well(tuning)
    if not trials:
        return []
    ordered = sorted(trials, key=lambda each: each.trialId)
    first = trials[0]
    words = f"{tuning.metric} of {len(trials)} trials; the best is trial {first.trialId} with {number(first.value or 0.0)}"
    rows = [[str(each.trialId), number(each.value or 0.0)] for each in some(ordered)]
    picture = Markup(charts.svg(charts.tried(tuning)))  # noqa: S704  made by charts
    caption = "A dot is a trial, the line the best so far."
    figures = [Figure("Trials", picture, words, ["trial", tuning.metric], rows, caption)]
    for axis in tuning.parameters:
        picture = Markup(charts.svg(charts.by_parameter(tuning, axis)))  # noqa: S704  made by charts
        values = [[each.hyperparameters[axis.name], number(each.value or 0.0)] for each in some(trials)]
        best = f"{tuning.metric} by {axis.name}; the best has {first.hyperparameters[axis.name]}"
        figures.append(Figure(axis.name, picture, best, [axis.name, tuning.metric], values))
    return figures


def time_figure(report: Report) -> Figure:
    """Return the figure of the states of the job and of its replicas."""
    picture = Markup(charts.svg(charts.time_line(report.timeline)))  # noqa: S704  made by charts
    rows = [[span.who, span.state, number(span.begin), number(span.end)] for span in report.timeline]
    words = ", ".join(
        f"{span.state} from {number(span.begin)} to {number(span.end)} s" for span in report.timeline if span.who == "job"
    )
    return Figure("Time line", picture, f"states over time, the job: {words}", ["who", "state", "from s", "to s"], rows)


def confusion(counts: Sequence[Sequence[int]]) -> list[list[Cell]]:
    """Return the cells of the confusion matrix.

    A correct cell is as strong as its share of its row. A wrong one is as strong as the root of its share of the most frequent
    mistake, so that rare ones show.
    """
    worst = max((count for place, row in enumerate(counts) for column, count in enumerate(row) if column != place), default=0)
    return [list(_cells(place, row, worst)) for place, row in enumerate(counts)]


def _cells(place: int, row: Sequence[int], worst: int) -> Iterator[Cell]:
    total = sum(row)
    for column, count in enumerate(row):
        share = count / total if column == place and total else math.sqrt(count / worst) if worst else 0.0
        yield Cell(count, round(share * _STRONGEST), column == place)


def as_json(reports: Sequence[Report]) -> Mapping[str, Any]:
    """Return the content of a page for programs: a report, or several with their differences."""
    if len(reports) == 1:
        return asdict(reports[0])
    kinds = (("input", inputs), ("result", results))
    rows = [(kind, row) for kind, side in kinds for row in differences([side(report) for report in reports])]
    compared = [{"what": row.what, "kind": kind, "values": row.values, "same": row.same} for kind, row in rows]
    return {"reports": [asdict(report) for report in reports], "compared": compared}
