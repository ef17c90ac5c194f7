"""Check a report's page: no text becomes markup, and drawings show the report's values."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from markupsafe import Markup

from ops.report import charts
from ops.report.page import (
    MARK,
    Cell,
    Figure,
    as_json,
    confusion,
    curve_figure,
    moment,
    number,
    page,
    sample,
    throughput_figure,
    timeline_figure,
    trial_figures,
)
from ops.report.report import (
    Chart,
    Curve,
    Evaluation,
    JobCost,
    Mistake,
    Planned,
    ReplicaThroughput,
    Report,
    ReportedReplica,
    TimelineEvent,
    TimelineSegment,
    TrialRow,
    TunedParameter,
    Tuning,
)

NO_PICTURE = Markup("")
EVIL = "<script>alert('x')</script>&\"<img src=//x>\x1b[2J"
ESCAPED_EVIL = "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;&amp;&#34;&lt;img src=//x&gt;␛[2J"
REPORT = Report(
    job="job01",
    state="SUCCEEDED",
    running=False,
    madeTime="2026-01-31T12:01:00.000Z",
    createTime="2026-01-31T12:00:00.000Z",
    startTime="2026-01-31T12:00:02.000Z",
    endTime="2026-01-31T12:00:38.000Z",
    seconds=36.0,
    submittedBy="ann@laptop",
    labels={"owner": "ann"},
    retries=0,
    cost=JobCost(0.5, 0.0125),
    metrics={"steps": "40", "loss": "0.500"},
    charts=[Chart("loss", [Curve("train", [(10, 2.0), (30, 1.0)]), Curve("eval", [(15, 1.5), (40, 0.5)])])],
    chartsFrom="log",
    throughput=[ReplicaThroughput("master-0", True, [(3.0, 5.0), (5.0, 7.0)], [4.0])],
    timeline=[TimelineSegment("job", "QUEUED, PREPARING", 0.0, 2.0), TimelineSegment("job", "RUNNING", 2.0, 38.0)],
    replicas=[ReportedReplica("master-0", "EXITED", 0, 1, "master-0")],
    events=[TimelineEvent("2026-01-31T12:00:04.000Z", "master-0", "killed by SIGKILL", 2.5)],
    arguments=["--max-steps", "40"],
    inputs={"module": "mine.task"},
    errors=[],
    errorLines=[],
    evaluation=Evaluation(40, ["cat", "dog"], [[3, 1], [0, 4]], [Mistake(0, 1, "iVBORw0KGgo=")]),
    planned=Planned("2026-01-30T12:00:00.000Z", 20.0, 25.0, -20.0, 3.5, "processors"),
)
TUNED = replace(
    REPORT,
    tuning=Tuning(
        "loss",
        "MINIMIZE",
        3,
        [TunedParameter("rate", "words")],
        [
            TrialRow(2, "SUCCEEDED", 0.25, {"rate": "0.5"}, "worker-0", 1, 8.0),
            TrialRow(1, "SUCCEEDED", 0.75, {"rate": "0.1"}, "master-0", 0, 9.0),
            TrialRow(3, "FAILED", None, {"rate": "0.9"}, "master-0", 0, 1.0),
        ],
    ),
)


class Tags(HTMLParser):
    """The elements of a page and their text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def with_evil(value: Any) -> Any:
    """Return the value with malicious text in each field that a trainer, a label or an error can set."""
    if isinstance(value, str):
        return EVIL
    if isinstance(value, list | tuple):
        return type(value)(map(with_evil, value))
    if isinstance(value, dict):
        return {EVIL: EVIL}
    if hasattr(value, "__dataclass_fields__"):
        unchanged = {"image", "time", "state", "createTime", "kind", "goal"}
        names = value.__dataclass_fields__
        return replace(value, **{name: with_evil(getattr(value, name)) for name in names if name not in unchanged})
    return value


EVIL_REPORT = replace(
    with_evil(replace(TUNED, arguments=["x"], errors=["x"], errorLines=["x", "y"], notes=["x"])),
    **{name: getattr(REPORT, name) for name in ("job", "startTime", "endTime", "madeTime", "chartsFrom")},
)


@pytest.mark.parametrize(
    "reports", [[EVIL_REPORT], [EVIL_REPORT, replace(EVIL_REPORT, job="job02", arguments=[f"--x={EVIL}"])]]
)
def test_no_text_becomes_markup(reports: list[Report]) -> None:
    html = page(reports)
    parsed = Tags(html)
    kinds = {tag for tag, _ in parsed.tags}
    assert not kinds & {"script", "iframe", "object", "embed", "link", "base", "form", "a", "foreignobject"}
    assert "alert(" in "".join(parsed.text)
    assert {attrs["src"][:22] for tag, attrs in parsed.tags if tag == "img"} <= {"data:image/png;base64,"}  # type: ignore[index]
    assert not [name for _, attrs in parsed.tags for name in attrs if name.startswith("on") or name in ("href", "xlink:href")]


def test_each_text_is_shown_escaped() -> None:
    html = page([EVIL_REPORT])
    assert html.count("<script") == 0
    assert f"<dt>{ESCAPED_EVIL}</dt><dd>{ESCAPED_EVIL}</dd>" in html, "a metric"
    assert f'<th scope="row">label {ESCAPED_EVIL}</th><td>{ESCAPED_EVIL}</td>' in html, "a label"
    assert f"<pre>{ESCAPED_EVIL}</pre>" in html, "an error"
    assert f"<pre>{ESCAPED_EVIL}\n{ESCAPED_EVIL}</pre>" in html, "lines of the log"
    assert f"<h3>{ESCAPED_EVIL}</h3>" in html, "a curve"


def test_the_page_shows_the_reports_values() -> None:
    html = page([REPORT])
    text = " ".join(" ".join(Tags(re.sub(r"(?s)<style>.*</style>|<svg.*?</svg>", "", html)).text).split())
    for part in (
        "Job job01",
        "SUCCEEDED started 2026-01-31 12:00:02 UTC by ann@laptop , ended 2026-01-31 12:00:38 UTC",
        "steps 40 loss 0.500 took 36.0 s US dollars , 0.5000 an hour 0.0125 replicas 1 restarts 1",
        "curve step loss train 10 2 train 30 1 eval 15 1.5 eval 40 0.5",
        "Steps/s: each replica's own steps. Triangles are restarts of a replica.",
        "predicts 20 steps/s on this cluster, a speed-up of 3.5 bound by processors; it was 25, so the prediction is "
        "20 % too low.",
        "2026-01-31 12:00:04 UTC master-0 killed by SIGKILL 2.5",
        "Evaluation at step 40 Confusion matrix",
        "cat dog cat 3 1 dog 0 4",
        "replica state exit code restarts master-0 EXITED 0 1 Inputs",
        "cat predicted as dog",
        "--max-steps 40",
    ):
        assert re.sub(" ([,.])", r"\1", part) in re.sub(" ([,.])", r"\1", text), part
    assert (
        'aria-label="loss by step: train from 2 at step 10 to 1 at step 30; eval from 1.5 at step 15 to 0.5 at step 40"' in html
    )
    assert '<html lang="en">' in html
    assert "<title>Job job01</title>" in html
    assert '<td class="right" style="--n:38">3</td><td class="wrong" style="--n:50">1</td>' in html
    assert MARK in html[:512]


def test_trials_are_drawn_and_listed_best_first() -> None:
    html = page([TUNED])
    assert "3 of 3 have ended, to MINIMIZE loss; the best is first." in html
    assert html.index('<tr><th scope="row">2</th><td>SUCCEEDED</td><td>0.25</td><td>0.5</td>') < html.index(
        '<tr><th scope="row">1</th><td>SUCCEEDED</td><td>0.75</td><td>0.1</td>'
    )
    assert '<tr><th scope="row">3</th><td>FAILED</td><td>\u2013</td><td>0.9</td>' in html
    assert "loss of 2 trials; the best is trial 2 with 0.25" in html
    assert "loss by rate; the best has 0.5" in html
    assert "of trial 2, the best" in html, "the evaluation is of one trial"
    without_trials = replace(TUNED, charts=[], tuning=Tuning("loss", "MINIMIZE", 3, [TunedParameter("rate", "log")], []))
    assert "0 of 3 have ended, to MINIMIZE loss.</p>" in page([without_trials])
    assert "<h2>Curves</h2>" not in page([without_trials])


def test_unknown_values_are_left_out() -> None:
    minimal = replace(
        REPORT, startTime=None, endTime=None, seconds=None, cost=None, metrics={}, charts=[], throughput=[], replicas=[]
    )
    minimal = replace(minimal, events=[], arguments=[], inputs={}, labels={}, evaluation=None, planned=None)
    html = page([replace(minimal, state="RUNNING", running=True, notes=["no log was read: x"])])
    for left_out in ("US dollars", "Throughput as a table", "Confusion", "fab plan", "Events", "took"):
        assert left_out not in html
    assert "There are none: neither the log nor summaries for TensorBoard have several steps." in html
    assert "job01 runs: this is its state at 2026-01-31 12:01:00 UTC." in html
    assert "no log was read: x" in html


def test_a_page_loads_nothing_from_elsewhere() -> None:
    for html in (page([REPORT]), page([REPORT, replace(REPORT, job="job02")])):
        assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'" in html
        addresses = set(re.findall(r"(?:https?:)?//[\w.]+[^\"' >]*", html))
        assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}, "only SVG's namespaces"
        assert not re.search(r"url\(|@import", html)


def test_jobs_are_compared_in_one_chart_and_differences_come_first() -> None:
    other = replace(REPORT, job="job02", arguments=["--max-steps", "80"], errors=["why"], metrics={"loss": "0.250"})
    html = page([REPORT, other])
    assert "<title>Jobs job01, job02</title>" in html
    for label in ("job01: train", "job01: eval", "job02: train", "job02: eval"):
        assert f">{label}</text>" in html
    assert "<h2>Errors of job02</h2>" in html
    row = '<th scope="row">--max-steps <span class="quiet">differs</span></th><td>40</td><td>80</td>'
    assert row in html
    assert html.index(row) < html.index('<th scope="row">module</th><td>mine.task</td><td>mine.task</td>')
    assert '<th scope="row">steps <span class="quiet">differs</span></th><td>40</td><td>\u2013</td>' in html


def test_invalid_utf_8_is_shown_replaced() -> None:
    charts = [Chart("l\ud800", [Curve("c\udcff", [(1, 1.0), (2, 2.0)])])]
    html = page([replace(REPORT, arguments=["a\udcff"], charts=charts, labels={"\udcff": "b"})])
    assert "<h3>l?</h3>" in html
    assert ">c?</text>" in html
    assert "a?" in html
    html.encode()


def test_the_json_output_has_the_reports_names() -> None:
    data = as_json([REPORT])
    assert data["charts"][0] == {
        "name": "loss",
        "curves": [{"name": "train", "points": [(10, 2.0), (30, 1.0)]}, {"name": "eval", "points": [(15, 1.5), (40, 0.5)]}],
    }
    assert data["cost"] == {"hourly": 0.5, "total": 0.0125}
    comparison = as_json([REPORT, replace(REPORT, job="job02", arguments=["--max-steps", "80"])])
    assert [report["job"] for report in comparison["reports"]] == ["job01", "job02"]
    assert [(row["kind"], row["what"], row["values"], row["same"]) for row in comparison["compared"]] == [
        ("input", "module", ["mine.task", "mine.task"], True),
        ("input", "--max-steps", ["40", "80"], False),
        ("input", "label owner", ["ann", "ann"], True),
        ("result", "state", ["SUCCEEDED", "SUCCEEDED"], True),
        ("result", "steps", ["40", "40"], True),
        ("result", "loss", ["0.500", "0.500"], True),
        ("result", "seconds", ["36.0", "36.0"], True),
        ("result", "US dollars", ["0.0125", "0.0125"], True),
    ]


def test_a_curve_is_split_at_restarts() -> None:
    first, second = [(1, 5.0), (3, 4.0)], [(2, 4.5), (4, 3.0)]
    assert list(charts.split_at_restarts([*first, *second])) == [first, second]
    assert list(charts.split_at_restarts([])) == []
    assert list(charts.split_at_restarts([(1, 5.0), (2, 5.0), (9, 5.0)], [2.5])) == [[(1, 5.0), (2, 5.0)], [(9, 5.0)]]


def test_many_points_are_downsampled_without_losing_spikes() -> None:
    points = [(step, 1.0) for step in range(10_000)]
    points[4321] = (4321, 9.0)
    sampled = charts.downsample(points)
    assert len(sampled) <= 302
    assert (sampled[0], sampled[-1]) == (points[0], points[-1])
    assert (4321, 9.0) in sampled
    assert charts.downsample(points[:300]) == points[:300]
    sawtooth = [(step, float([2, 1, 4, 3][step % 4])) for step in range(600)]
    extremes = [point for point in sawtooth if point[1] in (1.0, 4.0)]
    assert charts.downsample(sawtooth) == [sawtooth[0], *extremes, sawtooth[-1]]


def test_a_table_samples_points_with_the_first_and_last() -> None:
    points = [(step, 0.5) for step in range(100)]
    assert [step for step, _ in sample(points)] == [0, 9, 18, 27, 36, 45, 54, 63, 72, 81, 90, 99]
    assert sample(points[:3]) == points[:3]


def test_a_loss_with_a_wide_range_has_a_log_scale() -> None:
    def y_encoding(name: str, *values: float) -> dict[str, Any]:
        spec = charts.curve_chart(Chart(name, [Curve("train", list(enumerate(values)))]))
        field: dict[str, Any] = spec["layer"][0]["encoding"]["y"]
        return field

    assert y_encoding("loss", 2.0, 0.02)["scale"] == {"type": "log"}
    assert y_encoding("loss", 2.0, 0.02)["axis"]["values"] == [0.01, 0.1, 1.0, 10.0]
    assert y_encoding("loss", 2.0, 0.05)["scale"] == {"zero": False}
    assert y_encoding("loss", 9e307, 1.5e308, 1e306)["axis"]["values"] == [1e306, 1e307, 1e308]
    assert y_encoding("loss", 2.0, 0.0)["scale"] == {"zero": False}
    assert y_encoding("accuracy", 1.0, 0.001)["scale"] == {"zero": False}


def test_a_comparison_has_a_colour_per_job_and_a_dash_per_curve() -> None:
    spec = charts.comparison_chart("loss", [("a", REPORT.charts[0]), ("b", None), ("c", REPORT.charts[0])])
    encoding = spec["layer"][0]["encoding"]
    assert encoding["color"]["scale"] == {
        "domain": ["a: train", "a: eval", "c: train", "c: eval"],
        "range": ["var(--c0)", "var(--c0)", "var(--c2)", "var(--c2)"],
    }
    assert encoding["strokeDash"]["scale"]["range"] == [[6, 3], [1, 0], [6, 3], [1, 0]]


def test_the_time_axis_has_a_suitable_unit() -> None:
    for end, unit in ((0.5, "seconds"), (179, "seconds"), (180, "minutes"), (7200, "hours")):
        encoding = charts.timeline_chart([TimelineSegment("job", "RUNNING", 0.0, end)])["encoding"]
        assert encoding["x"]["title"] == f"{unit} since the job was created"


LEGEND = {"columns": 3, "labelLimit": 85, "columnPadding": 24}


def test_the_specification_of_lines() -> None:
    replica = ReplicaThroughput("master-0", True, [(60.0, 5.0), (120.0, 6.0), (240.0, 7.0)], [90.0])
    events = [TimelineEvent("", "job", "continues without worker-0"), TimelineEvent("", "worker-0", "killed")]
    spec = charts.throughput_chart([replica], events, [180.0, 90.0])
    point, curve = {"curve": "master-0", "dots": False}, {"field": "curve", "type": "nominal"}
    x, colour = {"field": "x", "type": "quantitative"}, {**curve, "title": None, "legend": LEGEND}
    shared = {
        "x": {**x, "title": "minutes since the job was created", "scale": {"zero": False, "nice": False}},
        "y": {"field": "y", "type": "quantitative", "title": "steps/s", "scale": {"zero": True}},
        "color": {**colour, "scale": {"domain": ["master-0"], "range": ["var(--c0)"]}},
    }
    dash = {**colour, "scale": {"domain": ["master-0"], "range": [[1, 0]]}}
    assert spec["height"] == 250
    assert spec["data"]["values"] == [
        {"x": 1.0, "y": 5.0, "part": 0, **point},
        {"x": 2.0, "y": 6.0, "part": 1, **point},
        {"x": 4.0, "y": 7.0, "part": 1, **point},
    ]
    assert spec["layer"] == [
        {
            "mark": {"type": "line", "strokeWidth": 1.6, "aria": False},
            "encoding": {**shared, "detail": {"field": "part", "type": "nominal"}, "strokeDash": dash},
        },
        {
            "transform": [{"filter": "datum.dots"}],
            "mark": {"type": "circle", "size": 22, "opacity": 1, "aria": False},
            "encoding": shared,
        },
        {
            "data": {"values": [{"x": 1.5, "curve": "master-0"}]},
            "mark": {"type": "point", "shape": "triangle-up", "filled": True, "size": 90, "aria": False, "opacity": 1},
            "encoding": {"x": x, "y": {"value": "height"}, "color": curve},
        },
        {
            "data": {"values": [{"x": 3.0}]},
            "mark": {"type": "rule", "strokeDash": [3, 3], "color": "var(--bad)", "aria": False},
            "encoding": {"x": x},
        },
    ]


def test_replicas_beyond_the_colours_have_other_dashes() -> None:
    replicas = [ReplicaThroughput(f"w-{place}", True, [(1.0, 2.0), (2.0, 2.0)], []) for place in range(9)]
    spec = charts.throughput_chart(replicas, [], [])
    assert len(spec["layer"]) == 2, "no restarts, no events"
    encoding = spec["layer"][0]["encoding"]
    assert encoding["color"]["scale"]["range"] == [*(f"var(--c{place})" for place in range(8)), "var(--c0)"]
    assert encoding["strokeDash"]["scale"]["range"] == [*[[1, 0]] * 8, [6, 3]]
    assert spec["height"] == 250 + 2 * 18, "a legend of three rows"
    curves = [Curve(f"trial {place}", [(1, 2.0), (2, 2.0)]) for place in range(17)]
    encoding = charts.curve_chart(Chart("loss", curves))["layer"][0]["encoding"]
    looks = zip(encoding["color"]["scale"]["range"], map(str, encoding["strokeDash"]["scale"]["range"]), strict=True)
    assert len({*looks}) == len(curves), "and so have curves"


@pytest.mark.parametrize(("letters", "columns", "limit"), [(10, 3, 85), (11, 2, 150), (18, 2, 150), (19, 1, 320), (99, 1, 320)])
def test_a_legend_has_as_many_columns_as_fit(letters: int, columns: int, limit: int) -> None:
    points = [(1, 1.0), (2, 2.0)]
    spec = charts.curve_chart(Chart("loss", [Curve("x", points), Curve("y" * letters, points)]))
    assert spec["layer"][0]["encoding"]["color"]["legend"] == {"columns": columns, "labelLimit": limit, "columnPadding": 24}
    assert spec["height"] == (268 if columns == 1 else 250)


def test_evaluations_and_short_curves_have_dots() -> None:
    points = [(step, 1.0) for step in range(10)]
    curves = [Curve("train", points), Curve("eval", points), Curve("short", points[:9])]
    rows = charts.curve_chart(Chart("loss", curves))["data"]["values"]
    assert {row["curve"]: row["dots"] for row in rows} == {"train": False, "eval": True, "short": True}


def test_the_specification_of_trials() -> None:
    assert TUNED.tuning
    y = {"field": "y", "type": "quantitative", "title": "loss", "scale": {"zero": False}}
    dot = {"type": "circle", "size": 60, "aria": False}
    spec = charts.trial_chart(TUNED.tuning)
    x = {"field": "x", "type": "quantitative", "title": "trial"}
    assert spec["encoding"] == {"x": {**x, "axis": {"format": "d", "tickMinStep": 1}, "scale": {"zero": False}}, "y": y}
    assert [layer["mark"] for layer in spec["layer"]] == [
        {"type": "line", "interpolate": "step-after", "strokeWidth": 1.6, "color": "var(--c1)", "aria": False},
        {**dot, "opacity": 1, "color": "var(--c0)"},
    ]
    for goal, second in (("MINIMIZE", 0.25), ("MAXIMIZE", 0.75)):
        line, dots = (layer["data"]["values"] for layer in charts.trial_chart(replace(TUNED.tuning, goal=goal))["layer"])
        assert dots == [{"x": 1, "y": 0.75}, {"x": 2, "y": 0.25}]
        assert line == [{"x": 1, "y": 0.75}, {"x": 2, "y": second}], "the best so far"
    scale = {"zero": False, "nice": False, "padding": 10}
    axis = {"format": "~g", "tickCount": 4, "labelOverlap": "greedy"}
    for kind, expected in {
        "words": {"type": "nominal"},
        "linear": {"type": "quantitative", "scale": {"type": "linear", **scale}},
        "log": {"type": "quantitative", "scale": {"type": "log", **scale}, "axis": axis},
    }.items():
        spec = charts.parameter_chart(TUNED.tuning, TunedParameter("rate", kind))
        assert spec["encoding"] == {"x": {"field": "x", "title": "rate", **expected}, "y": y}
        best, other = ("0.5", "0.1") if kind == "words" else (0.5, 0.1)
        assert spec["layer"] == [
            {
                "data": {"values": [{"x": best, "y": 0.25}, {"x": other, "y": 0.75}]},
                "mark": {**dot, "opacity": 0.8, "color": "var(--c0)"},
            },
            {"data": {"values": [{"x": best, "y": 0.25}]}, "mark": {**dot, "size": 160, "opacity": 1, "color": "var(--c1)"}},
        ]


def test_the_specification_of_a_time_line() -> None:
    segments = [
        TimelineSegment("job", "RUNNING", 0.0, 360.0),
        TimelineSegment("worker-0", "RUNNING", 60.0, 300.0),
        TimelineSegment("worker-0", "restarting", 300.0, 360.0),
    ]
    spec = charts.timeline_chart(segments)
    assert spec["data"]["values"] == [
        {"who": "job", "state": "RUNNING", "x": 0.0, "to": 6.0},
        {"who": "worker-0", "state": "RUNNING", "x": 1.0, "to": 5.0},
        {"who": "worker-0", "state": "restarting", "x": 5.0, "to": 6.0},
    ]
    assert spec["mark"] == {"type": "bar", "aria": False, "height": {"band": 0.7}}
    assert spec["height"] == 90 + 2 * 18
    x = {"field": "x", "type": "quantitative"}
    legend = {**LEGEND, "symbolType": "square", "symbolStrokeWidth": 0}
    scale = {"domain": ["RUNNING", "restarting"], "range": ["var(--c0)", "var(--c1)"]}
    axis = {"grid": False, "ticks": False, "minExtent": 8 * len("worker-0")}
    assert spec["encoding"] == {
        "y": {"field": "who", "type": "nominal", "sort": ["job", "worker-0"], "title": None, "axis": axis},
        "x": {**x, "title": "minutes since the job was created", "scale": {"nice": False}},
        "x2": {"field": "to"},
        "color": {"field": "state", "type": "nominal", "title": None, "legend": legend, "scale": scale},
    }


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.022714, "0.02271"), (0.0, "0"), (-2.5, "-2.5"), (999.44, "999.4"), (12345.6, "12346"), (-12345.6, "-12346")],
)
def test_numbers_have_four_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_the_figure_of_a_time_line() -> None:
    figure = timeline_figure(replace(REPORT, timeline=[*REPORT.timeline, TimelineSegment("master-0", "RUNNING", 2.5, 38.0)]))
    words = "states over time, the job: QUEUED, PREPARING from 0 to 2 s, RUNNING from 2 to 38 s"
    assert (figure.title, figure.alt_text, figure.heads) == ("Time line", words, ["who", "state", "from s", "to s"])
    assert figure.rows == [
        ["job", "QUEUED, PREPARING", "0", "2"],
        ["job", "RUNNING", "2", "38"],
        ["master-0", "RUNNING", "2.5", "38"],
    ]
    assert figure.svg.startswith("<svg")


def test_the_figure_of_the_throughput() -> None:
    replicas = [REPORT.throughput[0], ReplicaThroughput("worker-0", False, [(3.0, 1.0)], [])]
    # The clock of the event's host is behind.
    events = [TimelineEvent("2026-01-31T11:59:59.000Z", "job", "continues without worker-0")]
    figure = throughput_figure(replace(REPORT, throughput=replicas, events=events))
    assert figure
    caption = (
        "the rise of the global step in each replica's log. Triangles are restarts of a replica. Dashed lines are events of"
    )
    assert replace(figure, svg=NO_PICTURE) == Figure(
        "Throughput",
        NO_PICTURE,
        "steps per second by time, on average: master-0 6, worker-0 1",
        ["replica", "mean steps/s", "restarts"],
        [["master-0", "6", "1"], ["worker-0", "1", "0"]],
        f"Steps/s: {caption} the job.",
    )
    axis = charts.throughput_chart(replicas, events, [0])
    assert figure.svg == charts.svg(axis), "the event is at the beginning"
    plain = throughput_figure(replace(REPORT, throughput=[replace(REPORT.throughput[0], restarts=[])], events=REPORT.events))
    assert plain
    assert plain.caption == "Steps/s: each replica's own steps."
    assert throughput_figure(replace(REPORT, throughput=replicas[1:])) is None, "a point is no line"


def test_the_figures_of_trials() -> None:
    assert TUNED.tuning
    first, second, failed = TUNED.tuning.trials
    cancelled = replace(failed, trialId=4, state="CANCELLED", value=0.1)
    trials = trial_figures(replace(TUNED.tuning, trials=[replace(first, value=0.0), second, failed, cancelled]))
    words, caption = "loss of 2 trials; the best is trial 2 with 0", "A dot is a trial, the line the best so far."
    rows, by_rate = [["1", "0.75"], ["2", "0"]], [["0.5", "0"], ["0.1", "0.75"]]
    assert [replace(figure, svg=NO_PICTURE) for figure in trials] == [
        Figure("Trials", NO_PICTURE, words, ["trial", "loss"], rows, caption),
        Figure("rate", NO_PICTURE, "loss by rate; the best has 0.5", ["rate", "loss"], by_rate),
    ]
    assert trial_figures(replace(TUNED.tuning, trials=[failed])) == []


def test_the_cells_of_a_confusion_matrix() -> None:
    assert confusion([[3, 1, 0], [0, 0, 0], [4, 0, 4]]) == [
        [Cell(3, 38, True), Cell(1, 25, False), Cell(0, 0, False)],
        [Cell(0, 0, False), Cell(0, 0, True), Cell(0, 0, False)],
        [Cell(4, 50, False), Cell(0, 0, False), Cell(4, 25, True)],
    ]
    assert confusion([[2, 0], [0, 0]]) == [[Cell(2, 50, True), Cell(0, 0, False)], [Cell(0, 0, False), Cell(0, 0, True)]]


def test_hosts_are_shown_if_their_names_differ_from_the_replicas() -> None:
    assert '<th scope="col">host</th>' not in page([REPORT])
    replicas = [*REPORT.replicas, ReportedReplica("worker-0", "LOST", None, 0, None)]
    assert '<th scope="col">host</th>' not in page([replace(REPORT, replicas=replicas)])
    replicas.append(ReportedReplica("worker-1", "EXITED", 0, 0, "worker-3"))
    html = page([replace(REPORT, replicas=replicas)])
    assert '<th scope="col">host</th>' in html
    assert "<td>worker-3</td>" in html


def test_a_tuning_job_is_compared_without_its_trials_curves() -> None:
    html = page([REPORT, replace(TUNED, job="job02", notes=["no log was read"])])
    assert html.count("it tuned hyperparameters: its own report has the trials") == 1
    assert "no log was read" in html
    assert ">job01: train</text>" in html
    assert "job02: train" not in html


def test_moments_are_in_utc() -> None:
    assert [moment(text) for text in ("2026-01-31T12:00:02.123Z", None, "")] == ["2026-01-31 12:00:02 UTC", "", ""]
    assert curve_figure(REPORT.charts[0]).rows[-1] == ["eval", "40", "0.5"]
