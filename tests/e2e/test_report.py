"""`fab report` in a real browser, without a cluster: phone, desktop and paper, light and dark."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser import Browser

from jobs.records import Event, JobRecord, ReplicaRecord
from jobs.states import JobState, ReplicaState
from ops.logs.lines import LogLine
from ops.report.evidence import JobEvidence
from ops.report.make import make
from ops.report.page import page
from ops.report.report import Evaluation, Mistake, Planned

WINDOWS = [(360, 740, "light"), (360, 740, "dark"), (1280, 900, "light"), (1280, 900, "dark")]
NAMES = ["master-0", *(f"ps-{n}" for n in range(3)), *(f"worker-{n}" for n in range(4)), "evaluator-0"]
WIDTH = "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
# For each chart: its width, the number of marks, and the labels that are cut off.
PICTURES = """
return [...document.querySelectorAll('[role=img] svg')].map(svg => {
  const box = svg.getBoundingClientRect();
  const words = [...svg.querySelectorAll('text')].filter(text => {
    const at = text.getBoundingClientRect();
    return at.left < box.left - 1 || at.right > box.right + 1 || at.top < box.top - 1 || at.bottom > box.bottom + 1;
  });
  const marks = [...svg.querySelectorAll('.mark-line path, .mark-rect path')];
  const drawn = marks.filter(path => path.getAttribute('d').length > 20);
  const colours = new Set(drawn.map(path => getComputedStyle(path)).map(style => style.stroke + style.fill));
  return {width: box.width, drawn: drawn.length, colours: colours.size, cut: words.map(text => text.textContent)};
});
"""
COLOURS = """
const line = document.querySelector('.mark-line path');
return [getComputedStyle(document.documentElement).backgroundColor, getComputedStyle(line).stroke];
"""
MATRICES = "return [...document.querySelectorAll('.confusion')].map(each => each.scrollWidth <= each.parentElement.clientWidth)"
DIGITS = "return [...document.querySelectorAll('.mistakes img')].map(image => [image.alt, image.naturalWidth])"
# The accessible names of the page, and the elements without one.
NAMED = """
const unnamed = [...document.querySelectorAll('[role=img], [role=region]')].filter(each => !each.getAttribute('aria-label'));
const images = [...document.querySelectorAll('img')].filter(image => !image.alt);
const tables = document.querySelectorAll('figure details table tbody tr').length;
const levels = [...document.querySelectorAll('h1, h2, h3')].map(head => Number(head.tagName[1]));
const skips = levels.some((level, place) => place && level > levels[place - 1] + 1);
const heads = levels.filter(level => level == 1).length;
return {unnamed: unnamed.length, images: images.length, tables: tables, first: levels[0], skips: skips, heads: heads};
"""


def moment(seconds: float) -> str:
    return f"2026-01-31T12:{int(seconds) // 60:02d}:{seconds % 60:06.3f}Z"


def digit_png() -> str:
    """Return a PNG of 28 x 28 shades of gray, in base64."""
    rows = b"".join(b"\0" + bytes((row * column) % 256 for column in range(28)) for row in range(28))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 28, 28, 8, 0, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return base64.b64encode(png).decode()


def make_evidence(record: JobRecord, replicas: list[ReplicaRecord], time: str, **parts: Any) -> JobEvidence:
    """Return evidence of a job as it was read from the bucket."""
    job = object.__new__(JobEvidence)
    none = dict.fromkeys(("tuned", "evaluation", "planned"))
    empty: dict[str, Any] = {"logs": {}, "scalars": {}, "metrics": {}, "manifest": {}, "notes": []}
    vars(job).update({"record": record, "replicas": replicas, "time": time, **none, **empty, **parts})
    return job


def nine_replica_job(job_id: str, rate: float) -> JobEvidence:
    """Return a 15-minute job of nine replicas, one of them killed, with 600 lines per trainer."""
    logs = {}
    for place, name in enumerate(NAMES):
        logs[name] = [LogLine(moment(5), "INFO", name, f"started trainer pid {100 + place}")]
        if name.startswith(("master", "worker")):
            role = name.replace("-", "/")
            for n in range(1, 601):
                if name == "worker-1" and 300 <= n < 320:
                    continue
                loss = 2.3 * math.exp(-n * rate / 100) + 0.006 + 0.003 * math.sin(7 * n + place)
                metrics = f"loss: {loss:.3f}, accuracy: {1 - loss / 2.5:.3f} ({n * 1.4:.3f} sec)"
                local = 20 + place + 3 * math.sin(n / 9 + place)
                speeds = f"{100 + 9 * math.sin(n / 50):.1f} global steps/s, {local:.1f} local steps/s"
                logs[name].append(
                    LogLine(moment(15 + n * 1.4), "INFO", name, f"Train [{role}], step {n * 10}: {metrics} {speeds}")
                )
    for n in range(1, 21):
        loss = 2.3 * math.exp(-n * 30 * rate / 100) + 0.05
        evaluation = f"Eval, step {n * 300}: loss: {loss:.3f}, accuracy: {1 - loss / 2.5:.3f}"
        logs["evaluator-0"].append(LogLine(moment(15 + n * 42), "INFO", "evaluator-0", evaluation))
    logs["worker-1"].append(
        LogLine(moment(440), "ERROR", "worker-1", "a <script>line</script> of an error " + "without_a_gap" * 20)
    )
    record = JobRecord(
        job_id,
        JobState.SUCCEEDED,
        hosts=NAMES,
        candidates={name: [name] for name in NAMES},
        createTime=moment(0),
        startTime=moment(8),
        endTime=moment(880),
        hourlyCost=4.7,
        cost=1.1385,
        submittedBy="ann@laptop",
        labels={"<script>owner</script>": "ann", "team": "x" * 63},
        trainingInput={"jobDir": f"/bucket/jobs/{job_id}/output"},
        manifest={
            "package": {"name": "trainer", "sha256": "0123456789abcdef" * 4},
            "cluster": {"scaleTier": "CUSTOM", "replicas": {"worker": 4}, "machineTypes": {"worker": "n1-highcpu-8"}},
            "versions": {"scaletier": "0.1.0", "tensorflow": "2.21.0"},
        },
        events=[Event(moment(500), "evaluator-0 sends heartbeats again")],
    )
    killed = [Event(moment(434), "killed by SIGKILL", 27.5)]
    replicas = [
        ReplicaRecord(
            name,
            ReplicaState.EXITED,
            exitCode=0 if name == "master-0" else 143,
            startTime=moment(3 + place / 4),
            endTime=moment(880),
            restarts=int(name == "worker-1"),
            events=killed if name == "worker-1" else [],
        )
        for place, name in enumerate(NAMES)
    ]
    confusion = [[1135 if row == column else (row * 7 + column * 3) % 11 for column in range(10)] for row in range(10)]
    mistakes = [Mistake(n % 10, (n + 3) % 10, digit_png()) for n in range(20)]
    return make_evidence(
        record,
        replicas,
        moment(890),
        logs=logs,
        metrics={"steps": "6000", "loss": "0.052", "accuracy": "0.979"},
        manifest={
            "module": "trainer.task",
            "args": ["--model", "cnn", "--tag=" + "without_a_gap" * 20],
            "environment": {"A": "b"},
        },
        evaluation=Evaluation(6000, [str(digit) for digit in range(10)], confusion, mistakes),
        planned=Planned(moment(0), 95.0, 100.0, -5.0, 3.4, "processors"),
        notes=["the summaries were not read: master-0 does not answer"],
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write reports of one job, of three jobs, and of a running job without any log line."""
    folder = tmp_path_factory.mktemp("report")
    one = nine_replica_job("digits_of_ann", 1.0)
    (folder / "one.html").write_text(page([make(one)]))
    others = [
        make(nine_replica_job("wide", 0.7)),
        replace(make(nine_replica_job("narrow", 1.6)), arguments=["--model", "mlp"], labels={}),
    ]
    (folder / "several.html").write_text(page([make(one), *others]))
    early = JobRecord(
        "early",
        JobState.RUNNING,
        hosts=NAMES[:1],
        candidates={"master-0": NAMES[:1]},
        createTime=moment(0),
        startTime=moment(8),
    )
    (folder / "early.html").write_text(
        page([make(make_evidence(early, [ReplicaRecord("master-0", startTime=moment(5))], moment(9)))])
    )
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        browser.open("about:blank")
        browser.read_logs()
        yield browser


@pytest.mark.parametrize(("name", "pictures"), [("one", 4), ("several", 2), ("early", 1)])
@pytest.mark.parametrize(("width", "height", "scheme"), WINDOWS)
def test_a_page_fits_and_sends_no_request(
    browser: Browser, folder: Path, name: str, pictures: int, width: int, height: int, scheme: str
) -> None:
    browser.emulate(width, height, scheme)
    browser.read_logs()
    url = (folder / f"{name}.html").as_uri()
    browser.open(url)
    page_width, window_width = browser.value(WIDTH)
    assert page_width <= window_width <= width
    charts = browser.value(PICTURES)
    assert len(charts) == pictures
    for chart in charts:
        assert 300 <= chart["width"] <= window_width
        assert chart["drawn"] >= 2
        assert chart["colours"] >= 2
        assert chart["cut"] == []
    assert browser.value(MATRICES) == [True] * (name == "one"), "a matrix of ten classes fits without scrolling"
    browser.check_no_messages(url, "data:image/png;base64,")


def test_colours_follow_the_scheme_and_paper_is_white(browser: Browser, folder: Path) -> None:
    colours = []
    for scheme, media in [("light", "screen"), ("dark", "screen"), ("dark", "print")]:
        browser.emulate(760, 1000, scheme, media)
        browser.open((folder / "one.html").as_uri())
        colours.append(browser.value(COLOURS))
        page_width, window_width = browser.value(WIDTH)
        assert page_width <= window_width
    light, dark, paper = colours
    assert light == paper == ["rgb(255, 255, 255)", "rgb(11, 98, 196)"]
    assert dark == ["rgb(20, 24, 29)", "rgb(96, 165, 250)"]


def test_digits_tables_and_accessible_names_are_present(browser: Browser, folder: Path) -> None:
    browser.emulate(1280, 900)
    browser.open((folder / "one.html").as_uri())
    digits = browser.value(DIGITS)
    assert digits[:2] == [["0 predicted as 3", 28], ["1 predicted as 4", 28]]
    assert len(digits) == 20
    named = browser.value(NAMED)
    assert named.pop("tables") > 50
    assert named == {"unnamed": 0, "images": 0, "first": 1, "skips": False, "heads": 1}
    assert browser.value("return document.title + ', ' + document.documentElement.lang") == "Job digits_of_ann, en"
    assert browser.value("return document.querySelectorAll('script').length") == 0
