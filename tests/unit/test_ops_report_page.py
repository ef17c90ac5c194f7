"""The page of a report: nothing that anybody wrote becomes markup, and what is drawn is what was told."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from ops.report import charts
from ops.report.page import MARK, as_json, page, sample
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

EVIL = "<script>alert('x')</script>&\"<img src=//x>\x1b[2J"
SEEN = "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;&amp;&#34;&lt;img src=//x&gt;␛[2J"
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
    """Every element of a page, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def evil(value: Any) -> Any:
    """Return the value with malicious text wherever a trainer, a label or an error could put one."""
    if isinstance(value, str):
        return EVIL
    if isinstance(value, list | tuple):
        return type(value)(map(evil, value))
    if isinstance(value, dict):
        return {EVIL: EVIL}
    if hasattr(value, "__dataclass_fields__"):
        kept = {"image", "time", "state", "createTime", "kind", "goal"}
        names = value.__dataclass_fields__
        return replace(value, **{name: evil(getattr(value, name)) for name in names if name not in kept})
    return value


WICKED = replace(
    REPORT,
    labels=evil(REPORT.labels),
    submittedBy=EVIL,
    metrics=evil(REPORT.metrics),
    charts=evil(REPORT.charts),
    throughput=evil(REPORT.throughput),
    timeline=evil(REPORT.timeline),
    replicas=evil(REPORT.replicas),
    events=evil(REPORT.events),
    arguments=[EVIL],
    inputs=evil(REPORT.inputs),
    errors=[EVIL],
    errorLines=[EVIL, EVIL],
    evaluation=evil(REPORT.evaluation),
    planned=evil(REPORT.planned),
    tuning=evil(TUNED.tuning),
    notes=[EVIL],
)


@pytest.mark.parametrize("reports", [[WICKED], [WICKED, replace(WICKED, job="job02", arguments=[f"--x={EVIL}"])]])
def test_nothing_that_was_told_becomes_markup(reports: list[Report]) -> None:
    html = page(reports)
    seen = Tags(html)
    kinds = {tag for tag, _ in seen.tags}
    assert not kinds & {"script", "iframe", "object", "embed", "link", "base", "form", "a", "foreignobject"}
    assert "alert(" in "".join(seen.text)
    assert {attrs["src"][:22] for tag, attrs in seen.tags if tag == "img"} <= {"data:image/png;base64,"}  # type: ignore[index]
    assert not [name for _, attrs in seen.tags for name in attrs if name.startswith("on") or name in ("href", "xlink:href")]


def test_each_place_shows_what_was_told_as_it_was_told() -> None:
    html = page([WICKED])
    assert html.count("<script") == 0
    assert f"<dt>{SEEN}</dt><dd>{SEEN}</dd>" in html, "a metric"
    assert f'<th scope="row">label {SEEN}</th><td>{SEEN}</td>' in html, "a label"
    assert f"<pre>{SEEN}</pre>" in html, "an error"
    assert f"<pre>{SEEN}\n{SEEN}</pre>" in html, "lines of the log"
    assert f"<h3>{SEEN}</h3>" in html, "a curve"


def test_the_page_says_what_the_report_says() -> None:
    html = page([REPORT])
    text = " ".join(" ".join(Tags(re.sub(r"(?s)<style>.*</style>|<svg.*?</svg>", "", html)).text).split())
    for said in (
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
        "replica state exit code restarts master-0 EXITED 0 1 What it was",
        "cat predicted as dog",
        "--max-steps 40",
    ):
        assert re.sub(" ([,.])", r"\1", said) in re.sub(" ([,.])", r"\1", text), said
    assert (
        'aria-label="loss by step: train from 2 at step 10 to 1 at step 30; eval from 1.5 at step 15 to 0.5 at step 40"' in html
    )
    assert '<html lang="en">' in html
    assert "<title>Job job01</title>" in html
    assert '<td class="right" style="--n:38">3</td><td class="wrong" style="--n:50">1</td>' in html
    assert MARK in html[:512]


def test_trials_are_drawn_and_listed_the_best_first() -> None:
    html = page([TUNED])
    assert "3 of 3 have ended, to MINIMIZE loss; the best is first." in html
    assert html.index('<tr><th scope="row">2</th><td>SUCCEEDED</td><td>0.25</td><td>0.5</td>') < html.index(
        '<tr><th scope="row">1</th><td>SUCCEEDED</td><td>0.75</td><td>0.1</td>'
    )
    assert '<tr><th scope="row">3</th><td>FAILED</td><td>\u2013</td><td>0.9</td>' in html
    assert "loss of 2 trials; the best is trial 2 with 0.25" in html
    assert "loss by rate; the best has 0.5" in html
    assert "of trial 2, the best" in html, "the evaluation is that of one trial"
    none = replace(TUNED, charts=[], tuning=Tuning("loss", "MINIMIZE", 3, [TunedParameter("rate", "log")], []))
    assert "0 of 3 have ended, to MINIMIZE loss.</p>" in page([none])
    assert "<h2>Curves</h2>" not in page([none])


def test_of_the_trials_the_best_so_far_is_a_line() -> None:
    assert TUNED.tuning
    spec = charts.trial_chart(TUNED.tuning)
    line, dots = (layer["data"]["values"] for layer in spec["layer"])
    assert dots == [{"x": 1, "y": 0.75}, {"x": 2, "y": 0.25}]
    assert line == [{"x": 1, "y": 0.75}, {"x": 2, "y": 0.25}]
    assert spec["encoding"]["y"]["scale"] == {"zero": False}
    up = charts.trial_chart(replace(TUNED.tuning, goal="MAXIMIZE"))
    assert up["layer"][0]["data"]["values"] == [{"x": 1, "y": 0.75}, {"x": 2, "y": 0.75}]
    numbers = charts.parameter_chart(TUNED.tuning, TunedParameter("rate", "log"))
    assert numbers["encoding"]["x"]["scale"]["type"] == "log"
    assert numbers["layer"][1]["data"]["values"] == [{"x": 0.5, "y": 0.25}], "the best in another colour"
    assert charts.svg(numbers).startswith("<svg")


def test_what_is_not_known_is_left_out() -> None:
    bare = replace(
        REPORT, startTime=None, endTime=None, seconds=None, cost=None, metrics={}, charts=[], throughput=[], replicas=[]
    )
    bare = replace(bare, events=[], arguments=[], inputs={}, labels={}, evaluation=None, planned=None)
    html = page([replace(bare, state="RUNNING", running=True, notes=["no log was read: x"])])
    for left_out in ("US dollars", "Throughput as a table", "Confusion", "fab plan", "What happened", "took"):
        assert left_out not in html
    assert "There are none: neither the log nor summaries for TensorBoard tell of several steps." in html
    assert "job01 runs: this is what there was at 2026-01-31 12:01:00 UTC." in html
    assert "no log was read: x" in html


def test_a_page_needs_nothing_else() -> None:
    for html in (page([REPORT]), page([REPORT, replace(REPORT, job="job02")])):
        assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'" in html
        addresses = set(re.findall(r"(?:https?:)?//[\w.]+[^\"' >]*", html))
        assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}, "but the names of SVG itself"
        assert not re.search(r"url\(|@import", html)


def test_several_are_over_each_other_and_what_differs_comes_first() -> None:
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


def test_what_is_no_utf_8_is_shown_all_the_same() -> None:
    charts = [Chart("l\ud800", [Curve("c\udcff", [(1, 1.0), (2, 2.0)])])]
    html = page([replace(REPORT, arguments=["a\udcff"], charts=charts, labels={"\udcff": "b"})])
    assert "<h3>l?</h3>" in html
    assert ">c?</text>" in html
    assert "a?" in html
    html.encode()


def test_the_json_has_the_names_of_the_report() -> None:
    one = as_json([REPORT])
    assert one["charts"][0] == {
        "name": "loss",
        "curves": [{"name": "train", "points": [(10, 2.0), (30, 1.0)]}, {"name": "eval", "points": [(15, 1.5), (40, 0.5)]}],
    }
    assert one["cost"] == {"hourly": 0.5, "total": 0.0125}
    several = as_json([REPORT, replace(REPORT, job="job02", arguments=["--max-steps", "80"])])
    assert [each["job"] for each in several["reports"]] == ["job01", "job02"]
    row = {"what": "--max-steps", "kind": "input", "values": ["40", "80"], "same": False}
    assert row in several["compared"]


def test_a_curve_is_one_line_and_a_restart_begins_another() -> None:
    assert list(charts.split_at_restarts([(1, 5.0), (3, 4.0), (2, 4.5), (4, 3.0)])) == [
        [(1, 5.0), (3, 4.0)],
        [(2, 4.5), (4, 3.0)],
    ]
    assert list(charts.split_at_restarts([])) == []
    assert list(charts.split_at_restarts([(1, 5.0), (2, 5.0), (9, 5.0)], [2.5])) == [[(1, 5.0), (2, 5.0)], [(9, 5.0)]]


def test_many_points_are_thinned_and_no_spike_is_lost() -> None:
    points = [(step, 1.0) for step in range(10_000)]
    points[4321] = (4321, 9.0)
    kept = charts.downsample(points)
    assert len(kept) <= 302
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert (4321, 9.0) in kept
    assert charts.downsample(points[:300]) == points[:300]


def test_a_table_has_a_few_points_the_first_and_the_last_among_them() -> None:
    points = [(step, 0.5) for step in range(100)]
    assert [step for step, _ in sample(points)] == [0, 9, 18, 27, 36, 45, 54, 63, 72, 81, 90, 99]
    assert sample(points[:3]) == points[:3]


def test_a_loss_that_falls_by_far_is_drawn_by_its_logarithm() -> None:
    def scale(name: str, *values: float) -> dict[str, Any]:
        spec = charts.curve_chart(Chart(name, [Curve("train", list(enumerate(values)))]))
        found: dict[str, Any] = spec["layer"][0]["encoding"]["y"]
        return found

    assert scale("loss", 2.0, 0.02)["scale"] == {"type": "log"}
    assert scale("loss", 2.0, 0.02)["axis"]["values"] == [0.01, 0.1, 1.0, 10.0]
    assert scale("loss", 2.0, 0.05)["scale"] == {"zero": False}
    assert scale("loss", 2.0, 0.0)["scale"] == {"zero": False}
    assert scale("accuracy", 1.0, 0.001)["scale"] == {"zero": False}


def test_colours_are_of_jobs_and_dashes_of_curves_where_jobs_are_compared() -> None:
    spec = charts.comparison_chart("loss", [("a", REPORT.charts[0]), ("b", None), ("c", REPORT.charts[0])])
    encoding = spec["layer"][0]["encoding"]
    assert encoding["color"]["scale"] == {
        "domain": ["a: train", "a: eval", "c: train", "c: eval"],
        "range": ["var(--c0)", "var(--c0)", "var(--c2)", "var(--c2)"],
    }
    assert encoding["strokeDash"]["scale"]["range"] == [[6, 3], [1, 0], [6, 3], [1, 0]]


def test_time_is_in_the_unit_that_suits() -> None:
    def title(end: float) -> str:
        encoding = charts.timeline_chart([TimelineSegment("job", "RUNNING", 0.0, end)])["encoding"]
        found: str = encoding["x"]["title"]
        return found

    assert title(179) == "seconds since the job was created"
    assert title(180) == "minutes since the job was created"
    assert title(7200) == "hours since the job was created"


def test_restarts_and_what_happened_to_the_job_are_marked() -> None:
    told = [TimelineEvent("", "job", "goes on without worker-0"), TimelineEvent("", "worker-0", "killed")]
    spec = charts.throughput_chart(REPORT.throughput, told, [9.0, 4.0])
    assert [layer["data"]["values"] for layer in spec["layer"][2:]] == [[{"x": 4.0, "curve": "master-0"}], [{"x": 9.0}]]
