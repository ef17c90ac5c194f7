"""Charts: pure functions build Vega-Lite specifications, and vl_convert renders them as SVG.

The colours are CSS variables, which the page defines for light and dark mode and for print. Rendering needs no network.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import vl_convert

from jobs.study import Goal, TrialState
from ops import terminal
from ops.report.report import (
    CATEGORICAL,
    RESTARTING,
    RUNNING,
    WAITING,
    Chart,
    Curve,
    ReplicaThroughput,
    TimelineEvent,
    TimelineSegment,
    TrialRow,
    TunedParameter,
    Tuning,
)

COLOURS = 8
_VERSION = "6.4"
_WIDTH, _HEIGHT, _AXES_HEIGHT, _ROW_HEIGHT = 420, 250, 90, 18
_LETTER_WIDTH, _MOST_LETTERS = 8, 16
# Numbers of columns of a legend, each with the widest name that fits.
_COLUMNS = ((3, 85), (2, 150), (1, 320))
_MOST_POINTS = 300
_LOG_RATIO = 50
_DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3])
_STATES = {WAITING: "var(--c7)", RUNNING: "var(--c0)", RESTARTING: "var(--c1)"}
_UNITS = ((7200.0, 3600.0, "hours"), (180.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))

Spec = dict[str, Any]
_X: Spec = {"field": "x", "type": "quantitative"}
_CURVE: Spec = {"field": "curve", "type": "nominal"}


@dataclass(frozen=True)
class ChartSeries:
    """A line of a chart: indexes of its colour and dash, whether its points are dots, and the x where it is interrupted."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int
    dash: int
    dots: bool = False
    breaks: Sequence[float] = ()


def svg(spec: Spec) -> str:
    """Render a chart as an SVG element of a page; text in it is escaped."""
    return vl_convert.vegalite_to_svg(_sanitize(spec), vl_version=_VERSION, allowed_base_urls=[])


def _sanitize(value: Any) -> Any:
    """Return the specification without characters that XML or UTF-8 forbid: vl_convert would end the process."""
    if isinstance(value, str):
        return terminal.sanitize(value).encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_sanitize(key): _sanitize(item) for key, item in value.items()}
    return [_sanitize(item) for item in value] if isinstance(value, list | tuple) else value


def curve_chart(chart: Chart) -> Spec:
    """Plot the curves of a job under one name, by step."""
    curves = enumerate(chart.curves)
    return step_chart(chart.name, [_series(curve.name, curve, index, index // COLOURS) for index, curve in curves])


def comparison_chart(name: str, jobs: Sequence[tuple[str, Chart | None]]) -> Spec:
    """Plot the curves of several jobs under one name: a colour for each job, dashes for each curve."""
    kinds = list(dict.fromkeys(curve.name for _, chart in jobs if chart for curve in chart.curves))
    # Evaluations, which matter most, are solid lines; training is dashed.
    kinds.sort(key=lambda kind: not kind.startswith("eval"))
    lines = [
        _series(f"{job}: {curve.name}", curve, index, kinds.index(curve.name))
        for index, (job, chart) in enumerate(jobs)
        if chart
        for curve in chart.curves
    ]
    return step_chart(name, lines)


def _series(name: str, curve: Curve, colour: int, dash: int) -> ChartSeries:
    return ChartSeries(name, curve.points, colour, dash, curve.name.startswith("eval") or len(curve.points) < 10)


def step_chart(name: str, series: Sequence[ChartSeries]) -> Spec:
    """Plot lines over the global step, on a logarithmic scale for a loss that spans orders of magnitude."""
    values = [value for each in series for _, value in each.points]
    logarithmic = "loss" in name and min(values) > 0 and max(values) / min(values) > _LOG_RATIO
    if not logarithmic:
        return _lines(series, "step", {"title": None, "scale": {"zero": False}})
    lowest, highest = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    axis = {"values": [10.0**power for power in range(lowest, min(highest, sys.float_info.max_10_exp) + 1)]}
    return _lines(series, "step", {"title": None, "scale": {"type": "log"}, "axis": axis})


def throughput_chart(replicas: Sequence[ReplicaThroughput], events: Sequence[TimelineEvent], seconds: Sequence[float]) -> Spec:
    """Plot each replica's steps/s over time, its restarts as triangles, and the job's events as vertical lines.

    `seconds` are the times of the events, since the job's creation.
    """
    size, unit = _unit([at for each in replicas for at, _ in each.points])
    lines = []
    for index, each in enumerate(replicas):
        points, breaks = [(at / size, rate) for at, rate in each.points], [at / size for at in each.restarts]
        lines.append(ChartSeries(each.replica, points, index, index // COLOURS, breaks=breaks))
    spec = _lines(lines, f"{unit} since the job was created", {"title": "steps/s", "scale": {"zero": True}})
    restarts = [{"x": at / size, "curve": each.replica} for each in replicas for at in each.restarts]
    job_events = [{"x": at / size} for at, each in zip(seconds, events, strict=True) if each.who == "job"]
    if restarts:
        mark = {"type": "point", "shape": "triangle-up", "filled": True, "size": 90, "opacity": 1}
        spec["layer"].append(_layer(restarts, mark, {"x": _X, "y": {"value": "height"}, "color": _CURVE}))
    if job_events:
        spec["layer"].append(_layer(job_events, {"type": "rule", "strokeDash": [3, 3], "color": "var(--bad)"}, {"x": _X}))
    return spec


def _layer(values: Sequence[Spec], mark: Spec, encoding: Spec | None = None) -> Spec:
    """Return a layer with its own data, hidden from screen readers, for which the page has a text."""
    return {"data": {"values": values}, "mark": {**mark, "aria": False}, **({"encoding": encoding} if encoding else {})}


def succeeded_trials(tuning: Tuning) -> list[TrialRow]:
    """Return the trials to compare: not those that still run or were cancelled."""
    return [each for each in tuning.trials if each.state == TrialState.SUCCEEDED and each.value is not None]


def trial_chart(tuning: Tuning) -> Spec:
    """Plot the metric of each trial as a dot, by number, and the best so far as a line."""
    points = sorted((each.trialId, each.value) for each in succeeded_trials(tuning) if each.value is not None)
    bests = accumulate((value for _, value in points), lambda *both: Goal(tuning.goal).best(both))
    so_far = [(number, value) for (number, _), value in zip(points, bests, strict=True)]
    line = {"type": "line", "interpolate": "step-after", "strokeWidth": 1.6, "color": "var(--c1)"}
    dots = {"type": "circle", "size": 60, "opacity": 1, "color": "var(--c0)"}
    x_axis = {**_X, "title": "trial", "axis": {"format": "d", "tickMinStep": 1}, "scale": {"zero": False}}
    layers = [_layer([{"x": x, "y": y} for x, y in pairs], mark) for pairs, mark in ((so_far, line), (points, dots))]
    return {**_frame(_HEIGHT), "encoding": {"x": x_axis, "y": _metric(tuning)}, "layer": layers}


def parameter_chart(tuning: Tuning, parameter: TunedParameter) -> Spec:
    """Plot the trials' metric over a hyperparameter; the best trial is larger and in another colour."""
    trials = succeeded_trials(tuning)
    to_x: Callable[[str], object] = str if parameter.kind == CATEGORICAL else float
    values = [{"x": to_x(each.hyperparameters[parameter.name]), "y": each.value} for each in trials]
    kind: Spec = {"type": "nominal"}
    if parameter.kind != CATEGORICAL:
        kind = {"type": "quantitative", "scale": {"type": parameter.kind, "zero": False, "nice": False, "padding": 10}}
    if parameter.kind == "log":
        kind["axis"] = {"format": "~g", "tickCount": 4, "labelOverlap": "greedy"}
    encoding = {"x": {"field": "x", "title": parameter.name, **kind}, "y": _metric(tuning)}
    dots = {"type": "circle", "size": 60, "opacity": 0.8, "color": "var(--c0)"}
    layers = [_layer(values, dots), _layer(values[:1], {"type": "circle", "size": 160, "opacity": 1, "color": "var(--c1)"})]
    return {**_frame(_HEIGHT), "encoding": encoding, "layer": layers}


def _metric(tuning: Tuning) -> Spec:
    return {"field": "y", "type": "quantitative", "title": tuning.metric, "scale": {"zero": False}}


def timeline_chart(segments: Sequence[TimelineSegment]) -> Spec:
    """Plot the states of the job and of its replicas, a bar for each."""
    size, unit = _unit([segment.end for segment in segments])
    names = list(dict.fromkeys(segment.who for segment in segments))
    states = [state for state in _STATES if any(segment.state == state for segment in segments)]
    values = [{"who": each.who, "state": each.state, "x": each.begin / size, "to": each.end / size} for each in segments]
    legend = {**_legend(states), "symbolType": "square", "symbolStrokeWidth": 0}
    scale = {"domain": states, "range": [_STATES[state] for state in states]}
    # The font of the browser may be wider than the one by which vl_convert measures.
    axis = {"grid": False, "ticks": False, "minExtent": _LETTER_WIDTH * min(max(map(len, names)), _MOST_LETTERS)}
    encoding = {
        "y": {"field": "who", "type": "nominal", "sort": names, "title": None, "axis": axis},
        "x": {**_X, "title": f"{unit} since the job was created", "scale": {"nice": False}},
        "x2": {"field": "to"},
        "color": {"field": "state", "type": "nominal", "title": None, "legend": legend, "scale": scale},
    }
    frame = _frame(_AXES_HEIGHT + _ROW_HEIGHT * len(names))
    return {**frame, **_layer(values, {"type": "bar", "height": {"band": 0.7}}, encoding)}


def _lines(series: Sequence[ChartSeries], x_title: str, y: Spec) -> Spec:
    names = [each.name for each in series]
    rows = [
        {"x": x, "y": y, "curve": each.name, "part": part, "dots": each.dots}
        for each in series
        for part, points in enumerate(split_at_restarts(each.points, each.breaks))
        for x, y in downsample(points)
    ]
    colours = {"domain": names, "range": [f"var(--c{each.colour % COLOURS})" for each in series]}
    legend = _legend(names)
    dashes = {"domain": names, "range": [_DASHES[each.dash % len(_DASHES)] for each in series]}
    shared = {
        "x": {**_X, "title": x_title, "scale": {"zero": False, "nice": False}},
        "y": {"field": "y", "type": "quantitative", **y},
        "color": {**_CURVE, "title": None, "scale": colours, "legend": legend},
    }
    detail, dash = {"field": "part", "type": "nominal"}, {**_CURVE, "title": None, "scale": dashes, "legend": legend}
    line = {
        "mark": {"type": "line", "strokeWidth": 1.6, "aria": False},
        "encoding": {**shared, "detail": detail, "strokeDash": dash},
    }
    dots = {
        "transform": [{"filter": "datum.dots"}],
        "mark": {"type": "circle", "size": 22, "opacity": 1, "aria": False},
        "encoding": shared,
    }
    height = _HEIGHT + _ROW_HEIGHT * (math.ceil(len(names) / legend["columns"]) - 1)
    return {**_frame(height), "data": {"values": rows}, "layer": [line, dots]}


def _legend(names: Sequence[str]) -> Spec:
    """Return a legend with as many columns as fit the longest name, with a margin for wider fonts."""
    longest = _LETTER_WIDTH * max(map(len, names))
    columns, limit = next((each for each in _COLUMNS if longest <= each[1]), _COLUMNS[-1])
    return {"columns": columns, "labelLimit": limit, "columnPadding": 24}


def split_at_restarts(
    points: Sequence[tuple[float, float]], breaks: Sequence[float] = ()
) -> Iterator[list[tuple[float, float]]]:
    """Yield the points in pieces with rising x, also split at breaks: a restart from a checkpoint begins a new line."""
    piece: list[tuple[float, float]] = []
    for point in points:
        if piece and (point[0] < piece[-1][0] or any(piece[-1][0] <= at < point[0] for at in breaks)):
            yield piece
            piece = []
        piece.append(point)
    if piece:
        yield piece


def downsample(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Reduce the points to as many as are visible: the lowest and the highest of each stretch, the first and the last."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    indexes = {0, len(points) - 1}
    stretches = _MOST_POINTS // 2
    for number in range(stretches):
        stretch = range(number * len(points) // stretches, (number + 1) * len(points) // stretches)
        indexes |= {min(stretch, key=lambda index: points[index][1]), max(stretch, key=lambda index: points[index][1])}
    return [points[index] for index in sorted(indexes)]


def _unit(seconds: Sequence[float]) -> tuple[float, str]:
    """Return the seconds in the unit of time that suits the longest duration, and its name."""
    return next((size, name) for least, size, name in _UNITS if max(seconds) >= least)


def _frame(height: int) -> Spec:
    """Return the specification common to all charts; the page stretches them to its width."""
    ink, soft = "var(--ink)", "var(--line)"
    label = {"labelColor": ink, "labelFontSize": 13}
    title = {"titleColor": ink, "titleFontSize": 13, "titleFontWeight": "normal", "titlePadding": 8}
    lines = {"gridColor": soft, "domainColor": soft, "tickColor": soft}
    symbol = {"symbolType": "stroke", "symbolSize": 160, "symbolStrokeWidth": 2.5}
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "width": _WIDTH,
        "height": height,
        "autosize": {"type": "fit", "contains": "padding"},
        "background": None,
        "padding": {"left": 9, "right": 9, "top": 2, "bottom": 2},  # for wider fonts of the browser
        "config": {
            "font": "Arial, Helvetica, sans-serif",
            "view": {"stroke": None},
            "axis": {**label, **title, **lines, "tickCount": 5, "labelLimit": 110},
            "legend": {"orient": "bottom", **label, **symbol},
        },
    }
