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
from ops.report.make import compared_inputs, compared_results
from ops.report.report import Chart, Curve, Report, Tuning
from ops.submit.compare import compare_values

T = TypeVar("T")

MARK = '<meta name="generator" content="scaletier report">'
"""Among the first bytes of each page of this command, and of no other file."""
_TEMPLATE = "report.html.j2"
_ROWS = 12
_TUNING_NOTE = "it tuned hyperparameters: its own report has the trials"
# The variables of the template that not every page has.
_VALUES = ("report", "throughput", "timeline", "trials", "arguments", "show_hosts", "confusion", "inputs", "results")
# The percentage of the strongest colour of a cell, whose number must stay legible.
_STRONGEST = 50


@dataclass(frozen=True)
class Figure:
    """A chart on a page, with a text for screen readers, and a table of some of its points."""

    title: str
    svg: Markup
    alt_text: str
    heads: list[str]
    rows: list[list[str]]
    caption: str = ""


@dataclass(frozen=True)
class Cell:
    """A count of a confusion matrix, the strength of its colour in percent, and whether it counts correct predictions."""

    count: int
    strength: int
    correct: bool


def page(reports: Sequence[Report]) -> str:
    """Render the page of a job, or of several to compare; bytes that are not UTF-8 become question marks."""
    content = _single_page(reports[0]) if len(reports) == 1 else _comparison_page(reports)
    html = _template().render(dict.fromkeys(_VALUES) | content)
    return html.encode("utf-8", "replace").decode()


@cache
def _template() -> jinja2.Template:
    environment = templates.environment().overlay(autoescape=True, finalize=_sanitize)
    filters = {"moment": moment, "duration": terminal.duration, "dollars": terminal.dollars, "number": number}
    environment.filters = environment.filters | filters
    template: jinja2.Template = environment.get_template(_TEMPLATE)
    return template


def _sanitize(value: Any) -> Any:
    """Return untrusted text in printable form; Markup, which is from this module, as it is."""
    return terminal.sanitize(value) if type(value) is str else value


def _single_page(report: Report) -> dict[str, Any]:
    return {
        "title": f"Job {report.job}",
        "report": report,
        "reports": [report],
        "curves": [curve_figure(chart) for chart in report.charts],
        "throughput": throughput_figure(report),
        "timeline": timeline_figure(report),
        "trials": trial_figures(report.tuning) if report.tuning else [],
        "arguments": [shlex.quote(word) for word in report.arguments],
        "show_hosts": any(each.host not in (None, each.name) for each in report.replicas),
        "confusion": confusion(report.evaluation.confusion) if report.evaluation else [],
    }


def _comparison_page(reports: Sequence[Report]) -> dict[str, Any]:
    # The curves of a tuning job are of its trials, which only its own page shows.
    reports = [
        replace(report, charts=[], notes=[*report.notes, _TUNING_NOTE]) if report.tuning else report for report in reports
    ]
    names = list(dict.fromkeys(chart.name for report in reports for chart in report.charts))
    return {
        "title": f"Jobs {', '.join(report.job for report in reports)}",
        "reports": reports,
        "curves": [compared_figure(name, reports) for name in names],
        "inputs": sorted(compare_values([compared_inputs(each) for each in reports]), key=lambda row: row.same),
        "results": compare_values([compared_results(each) for each in reports]),
    }


def moment(text: str | None) -> str:
    """Format an RFC 3339 moment as `2026-01-31 12:00:00 UTC`: readers may be in any time zone."""
    return f"{text[:19].replace('T', ' ')} UTC" if text else ""


def number(value: float) -> str:
    """Format a number with 4 digits: `0.02271`, `1234`."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _draw(spec: charts.Spec) -> Markup:
    return Markup(charts.svg(spec))  # noqa: S704  its text is escaped


def curve_figure(chart: Chart) -> Figure:
    """Return the figure of a chart of a job's own curves."""
    return _figure(chart.name, charts.curve_chart(chart), [(curve.name, curve) for curve in chart.curves])


def compared_figure(name: str, reports: Sequence[Report]) -> Figure:
    """Return the figure that compares several jobs' curves of one name."""
    job_charts = [(report.job, next((chart for chart in report.charts if chart.name == name), None)) for report in reports]
    curves = [(f"{job}: {curve.name}", curve) for job, chart in job_charts if chart for curve in chart.curves]
    return _figure(name, charts.comparison_chart(name, job_charts), curves)


def _figure(name: str, spec: charts.Spec, curves: Sequence[tuple[str, Curve]]) -> Figure:
    words = "; ".join(
        f"{called} from {_format_point(curve.points[0])} to {_format_point(curve.points[-1])}"
        for called, curve in curves
        if curve.points
    )
    rows = [[called, str(step), number(value)] for called, curve in curves for step, value in sample(curve.points)]
    return Figure(name, _draw(spec), f"{name} by step: {words}", ["curve", "step", name], rows)


def _format_point(point: tuple[int, float]) -> str:
    return f"{number(point[1])} at step {point[0]}"


def sample(points: Sequence[T]) -> list[T]:
    """Return a few of the points, evenly spaced, with the first and the last."""
    if len(points) <= _ROWS:
        return list(points)
    return [points[round(index * (len(points) - 1) / (_ROWS - 1))] for index in range(_ROWS)]


def throughput_figure(report: Report) -> Figure | None:
    """Return the figure of the replicas' throughput, or None if no replica's log has two rates."""
    replicas = report.throughput
    if not any(len(replica.points) > 1 for replica in replicas):
        return None
    seconds = [max(seconds_between(report.createTime, each.time), 0) for each in report.events]
    picture = _draw(charts.throughput_chart(replicas, report.events, seconds))
    means = {replica.replica: sum(rate for _, rate in replica.points) / len(replica.points) for replica in replicas}
    rows = [[replica.replica, number(means[replica.replica]), str(len(replica.restarts))] for replica in replicas]
    words = ", ".join(f"{replica.replica} {number(means[replica.replica])}" for replica in replicas)
    own = all(replica.own for replica in replicas)
    what = "each replica's own steps" if own else "the rise of the global step in each replica's log"
    marks = " Triangles are restarts of a replica." if any(replica.restarts for replica in replicas) else ""
    lines = " Dashed lines are events of the job." if any(each.who == "job" for each in report.events) else ""
    heads, words = ["replica", "mean steps/s", "restarts"], f"steps per second by time, on average: {words}"
    return Figure("Throughput", picture, words, heads, rows, f"Steps/s: {what}.{marks}{lines}")


def trial_figures(tuning: Tuning) -> list[Figure]:
    """Return the figures of the trials by number and by each hyperparameter; none if no trial reported."""
    trials = charts.succeeded_trials(tuning)
    if not trials:
        return []
    ordered = sorted(trials, key=lambda each: each.trialId)
    first = trials[0]
    words = f"{tuning.metric} of {len(trials)} trials; the best is trial {first.trialId} with {number(first.value or 0.0)}"
    rows = [[str(each.trialId), number(each.value or 0.0)] for each in sample(ordered)]
    caption = "A dot is a trial, the line the best so far."
    figures = [Figure("Trials", _draw(charts.trial_chart(tuning)), words, ["trial", tuning.metric], rows, caption)]
    for parameter in tuning.parameters:
        picture = _draw(charts.parameter_chart(tuning, parameter))
        values = [[each.hyperparameters[parameter.name], number(each.value or 0.0)] for each in sample(trials)]
        best = f"{tuning.metric} by {parameter.name}; the best has {first.hyperparameters[parameter.name]}"
        figures.append(Figure(parameter.name, picture, best, [parameter.name, tuning.metric], values))
    return figures


def timeline_figure(report: Report) -> Figure:
    """Return the figure of the states of the job and of its replicas."""
    rows = [[segment.who, segment.state, number(segment.begin), number(segment.end)] for segment in report.timeline]
    words = ", ".join(f"{state} from {begin} to {end} s" for who, state, begin, end in rows if who == "job")
    picture, heads = _draw(charts.timeline_chart(report.timeline)), ["who", "state", "from s", "to s"]
    return Figure("Time line", picture, f"states over time, the job: {words}", heads, rows)


def confusion(counts: Sequence[Sequence[int]]) -> list[list[Cell]]:
    """Return the cells of the confusion matrix.

    The colour of a correct prediction is as strong as its share of the row. That of a mistake is as strong as the square root
    of its share of the most frequent mistake, so that rare ones show.
    """
    worst = max(count for index, row in enumerate(counts) for column, count in enumerate(row) if column != index)
    return [list(_cells(index, row, worst)) for index, row in enumerate(counts)]


def _cells(index: int, row: Sequence[int], worst: int) -> Iterator[Cell]:
    total = sum(row)
    for column, count in enumerate(row):
        share = count / total if column == index and total else math.sqrt(count / worst) if worst else 0.0
        yield Cell(count, round(share * _STRONGEST), column == index)


def as_json(reports: Sequence[Report]) -> Mapping[str, Any]:
    """Return the content of a page for programs: a report, or several with their differences."""
    if len(reports) == 1:
        return asdict(reports[0])
    kinds = (("input", compared_inputs), ("result", compared_results))
    rows = [(kind, row) for kind, side in kinds for row in compare_values([side(report) for report in reports])]
    compared = [{"what": row.what, "kind": kind, "values": row.values, "same": row.same} for kind, row in rows]
    return {"reports": [asdict(report) for report in reports], "compared": compared}
