"""Check a report made of records, logs and a trainer's own files, against literal values."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import pytest

from jobs.records import Event, JobRecord, ReplicaRecord
from jobs.states import JobState, ReplicaState
from jobs.study import Measurement, Trial, TrialState
from ops.errors import OpsError
from ops.logs.lines import LogLine
from ops.report import make
from ops.report.evaluation import EvaluationError, parse
from ops.report.evidence import JobEvidence
from ops.report.report import (
    Chart,
    Curve,
    Evaluation,
    JobCost,
    Mistake,
    ReplicaThroughput,
    Report,
    ReportedReplica,
    TimelineEvent,
    TimelineSegment,
    TrialRow,
    TunedParameter,
    Tuning,
)
from ops.submit.compare import compare_values
from ops.submit.trials import TuningResult
from ops.submit.tuning import build_study, check_hyperparameters

DAY = "2026-01-31T12:00:{:06.3f}Z"
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\nrest").decode()
LARGE_PNG = base64.b64encode(base64.b64decode(PNG) + bytes(40_000)).decode()
BAD_IMAGES = (None, "x", f'{PNG[:8]}"><{PNG[8:]}', '"><script>', "aGk=", LARGE_PNG)
NO_PNG = "mistakes[0].image must be a PNG of 32,768 bytes at most, in base64"


def log_lines(replica: str, *messages: tuple[float, str], severity: str = "INFO") -> list[LogLine]:
    return [LogLine(DAY.format(second), severity, replica, message) for second, message in messages]


def train_line(name: str, step: int, loss: float, seconds: float, local: float | None) -> str:
    rate = "" if local is None else f" 9.0 global steps/s, {local} local steps/s"
    return f"Train [{name}], step {step}: loss: {loss}, accuracy: 0.5 ({seconds:.3f} sec){rate}"


JOB = JobRecord(
    "job01",
    JobState.SUCCEEDED,
    hosts=["master-0", "worker-3"],
    candidates={"master-0": ["master-0"], "worker-0": ["worker-3"]},
    createTime=DAY.format(0),
    startTime=DAY.format(2),
    endTime=DAY.format(38),
    hourlyCost=100.0,
    cost=1.0,
    submittedBy="ann@laptop",
    labels={"owner": "ann"},
    trainingInput={"pythonModule": "mine.task", "args": ["--a", "1"], "jobDir": "/bucket/jobs/job01/output"},
    manifest={
        "package": {"name": "mine", "sha256": "0123456789abcdef0000"},
        "cluster": {
            "scaleTier": "CUSTOM",
            "replicas": {"master": 1, "worker": 1},
            "machineTypes": {"master": "a", "worker": "b"},
        },
        "versions": {"scaletier": "0.1.0"},
    },
    events=[Event(DAY.format(30), "continues without worker-0")],
)
REPLICAS = [
    ReplicaRecord("master-0", ReplicaState.EXITED, exitCode=0, startTime=DAY.format(1), endTime=DAY.format(37)),
    ReplicaRecord(
        "worker-0",
        ReplicaState.EXITED,
        exitCode=143,
        restarts=1,
        startTime=DAY.format(1),
        endTime=DAY.format(38),
        events=[Event(DAY.format(20), "killed by SIGKILL", 2.5)],
    ),
]
LOGS = {
    "master-0": log_lines(
        "master-0",
        (3, train_line("master/0", 10, 2.0, 1.0, 5.0)),
        (4, "Eval, step 15: loss: 1.500, accuracy: 0.700"),
        (5, train_line("master/0", 30, 1.0, 2.0, 6.0)),
        (37, "Final metrics after 40 steps, loss: 0.500, accuracy: 0.900"),
    ),
    "worker-0": [
        *log_lines("worker-0", (3, train_line("worker/0", 11, 2.5, 1.0, 7.0)), (25, train_line("worker/0", 33, 1.5, 2.0, 8.0))),
        *log_lines("worker-0", (26, "out of memory"), severity="ERROR"),
    ],
}
MANIFEST = {"args": ["--a", "1"], "module": "mine.task", "secrets": ["TOKEN"], "environment": {"X": "y"}, "config": {}}


def make_evidence(**parts: Any) -> JobEvidence:
    """Return the evidence of JOB."""
    job_evidence = object.__new__(JobEvidence)
    defaults = {"logs": LOGS, "metrics": {"steps": "40", "loss": "0.500"}, "manifest": MANIFEST, "scalars": {}, "notes": []}
    absent = dict.fromkeys(("tuned", "evaluation", "planned"))
    vars(job_evidence).update({"record": JOB, "replicas": REPLICAS, "time": DAY.format(50), **defaults, **absent, **parts})
    return job_evidence


def test_a_complete_report() -> None:
    assert make.make(make_evidence()) == Report(
        job="job01",
        state="SUCCEEDED",
        running=False,
        madeTime="2026-01-31T12:00:50.000Z",
        createTime="2026-01-31T12:00:00.000Z",
        startTime="2026-01-31T12:00:02.000Z",
        endTime="2026-01-31T12:00:38.000Z",
        seconds=36.0,
        submittedBy="ann@laptop",
        labels={"owner": "ann"},
        retries=0,
        cost=JobCost(100.0, 1.0),
        metrics={"steps": "40", "loss": "0.500"},
        charts=[
            Chart("loss", [Curve("train", [(10, 2.0), (30, 1.0)]), Curve("eval", [(15, 1.5), (40, 0.5)])]),
            Chart("accuracy", [Curve("train", [(10, 0.5), (30, 0.5)]), Curve("eval", [(15, 0.7), (40, 0.9)])]),
        ],
        chartsFrom="log",
        throughput=[
            ReplicaThroughput("master-0", True, [(3.0, 5.0), (5.0, 6.0)], []),
            ReplicaThroughput("worker-0", True, [(3.0, 7.0), (25.0, 8.0)], [20.0]),
        ],
        timeline=[
            TimelineSegment("job", "QUEUED, PREPARING", 0.0, 2.0),
            TimelineSegment("job", "RUNNING", 2.0, 38.0),
            TimelineSegment("master-0", "RUNNING", 1.0, 37.0),
            TimelineSegment("worker-0", "RUNNING", 1.0, 20.0),
            TimelineSegment("worker-0", "restarting", 20.0, 22.5),
            TimelineSegment("worker-0", "RUNNING", 22.5, 38.0),
        ],
        replicas=[
            ReportedReplica("master-0", "EXITED", 0, 0, "master-0"),
            ReportedReplica("worker-0", "EXITED", 143, 1, "worker-3"),
        ],
        events=[
            TimelineEvent("2026-01-31T12:00:20.000Z", "worker-0", "killed by SIGKILL", 2.5),
            TimelineEvent("2026-01-31T12:00:30.000Z", "job", "continues without worker-0"),
        ],
        arguments=["--a", "1"],
        inputs={
            "module": "mine.task",
            "package": "mine sha256:0123456789abcdef",
            "scaletier": "0.1.0",
            "scaleTier": "CUSTOM",
            "master": "1 x a",
            "worker": "1 x b",
            "output": "/bucket/jobs/job01/output",
            "env X": "y",
            "secrets": "TOKEN",
        },
        errors=[],
        errorLines=["12:00:26.000 worker-0 out of memory"],
    )


def test_a_running_job_is_reported_so_far() -> None:
    record = replace(JOB, state=JobState.RUNNING, endTime=None, cost=None)
    replicas = [
        replace(REPLICAS[0], endTime=None),
        replace(REPLICAS[1], endTime=None, events=[Event(DAY.format(20), "killed")]),
    ]
    report = make.make(make_evidence(record=record, replicas=replicas))
    assert (report.running, report.endTime, report.seconds, report.cost) == (True, None, 48.0, JobCost(100.0, 1.3333))
    assert report.timeline[1:] == [
        TimelineSegment("job", "RUNNING", 2.0, 50.0),
        TimelineSegment("master-0", "RUNNING", 1.0, 50.0),
        TimelineSegment("worker-0", "RUNNING", 1.0, 20.0),
        TimelineSegment("worker-0", "restarting", 20.0, 50.0),
    ]


def test_a_job_that_failed_before_its_start_reports_errors() -> None:
    record = replace(
        JOB, state=JobState.FAILED, startTime=None, hourlyCost=None, cost=None, errorMessage="exit code 1\nlast line\n"
    )
    replicas = [replace(REPLICAS[0], errorMessage="exited with 1"), replace(REPLICAS[1], errorMessage="last line\n")]
    report = make.make(make_evidence(record=record, replicas=replicas, logs={}))
    assert (report.seconds, report.cost, report.charts, report.chartsFrom, report.throughput) == (None, None, [], "", [])
    assert report.errors == ["exit code 1\nlast line", "master-0: exited with 1"]
    assert report.timeline[0] == TimelineSegment("job", "QUEUED, PREPARING", 0.0, 38.0)


def test_charts_have_the_first_trainer_and_each_evaluator() -> None:
    messages = ("Eval, step 1: f1: 0.5", "Eval, step 2: f1: 0.6, loss: nan, x: y")
    logs = {"evaluator-0": log_lines("evaluator-0", *enumerate(messages, 1))}
    for name, losses in (("worker-0", (2.0, 1.0)), ("worker-1", (9.0, 9.0))):
        trains = [train_line(name.replace("-", "/"), step, loss, step, 1.0) for step, loss in enumerate(losses, 1)]
        logs[name] = log_lines(name, *enumerate(trains, 1))
    logs["master-0"] = log_lines("master-0", (1, "Final metrics after 9 steps, mean error: 2"))  # a point makes no chart
    assert make.charts_from_logs(logs, ["master-0", "worker-0", "worker-1", "evaluator-0"]) == [
        Chart("loss", [Curve("train, worker-0", [(1, 2.0), (2, 1.0)])]),
        Chart("accuracy", [Curve("train, worker-0", [(1, 0.5), (2, 0.5)])]),
        Chart("f1", [Curve("eval, evaluator-0", [(1, 0.5), (2, 0.6)])]),
    ]


def test_a_tuning_job_is_reported_by_its_trials() -> None:
    hyperparameters = {
        "goal": "MINIMIZE",
        "hyperparameterMetricTag": "loss",
        "maxTrials": 4,
        "params": [
            {"parameterName": "rate", "type": "DOUBLE", "minValue": 0.1, "maxValue": 1, "scaleType": "UNIT_LOG_SCALE"},
            {"parameterName": "kind", "type": "CATEGORICAL", "categoricalValues": ["a", "b"]},
            {"parameterName": "size", "type": "DISCRETE", "discreteValues": [1, 2]},
            *(
                {"parameterName": name, "type": "DISCRETE", "discreteValues": [low, 10], "scaleType": "UNIT_LOG_SCALE"}
                for name, low in (("from1", 1), ("from0", 0))
            ),
        ],
    }
    values = {"rate": "0.5", "kind": "a", "size": "2", "from1": "1", "from0": "0"}
    points = [Measurement(1, 0.9), Measurement(2, 0.4)]
    common = {"startTime": DAY.format(1), "hyperparameters": values}
    trials = [
        Trial(1, replica="master-0", state=TrialState.SUCCEEDED, endTime=DAY.format(11), finalMetric=points[0], **common),
        Trial(2, replica="worker-0", state=TrialState.SUCCEEDED, endTime=DAY.format(9), restarts=1, allMetrics=points,
              finalMetric=points[1], **common),
        Trial(3, replica="master-0", state=TrialState.FAILED, endTime=DAY.format(12), **common),
        Trial(4, {"rate": "far", "kind": "a"}, "not ours"),
    ]  # fmt: skip
    record = replace(JOB, trainingInput={**JOB.trainingInput, "hyperparameters": hyperparameters})
    study = build_study(check_hyperparameters(hyperparameters, "hyperparameters"), (), "", None)
    report = make.make(make_evidence(record=record, tuned=TuningResult(record, study, trials)))
    assert report.charts == [Chart("loss", [Curve("trial 2", [(1, 0.9), (2, 0.4)])])]
    assert (report.chartsFrom, report.throughput) == ("trials", [])
    assert report.tuning == Tuning(
        "loss",
        "MINIMIZE",
        4,
        [
            TunedParameter("rate", "log"),
            TunedParameter("kind", "words"),
            TunedParameter("size", "linear"),
            TunedParameter("from1", "log"),
            TunedParameter("from0", "linear"),
        ],
        [
            TrialRow(2, "SUCCEEDED", 0.4, values, "worker-0", 1, 8.0),
            TrialRow(1, "SUCCEEDED", 0.9, values, "master-0", 0, 10.0),
            TrialRow(3, "FAILED", None, values, "master-0", 0, 11.0),
        ],
    )
    assert make.make(make_evidence()).tuning is None
    unreported = [replace(trial, allMetrics=[]) for trial in trials]
    evidence = make_evidence(
        record=record, tuned=TuningResult(record, study, unreported), scalars={"train/loss": [(1, 2.0), (2, 1.0)]}
    )
    report = make.make(evidence)
    assert (report.charts, report.chartsFrom) == ([], ""), "summaries are not those of one trial"
    assert report.inputs["hyperparameters"].startswith("MINIMIZE loss over rate from 0.1 to 1 (UNIT_LOG_SCALE), kind of a, b")


def test_times_of_a_clock_that_is_behind_are_the_jobs_creation() -> None:
    record = replace(JOB, createTime=DAY.format(40), cost=None)
    replicas = [replace(REPLICAS[1], events=[Event(DAY.format(20), "killed", 0.5)])]
    report = make.make(make_evidence(record=replace(record, startTime=DAY.format(39)), replicas=replicas))
    assert (report.seconds, report.cost) == (0.0, JobCost(100.0, 0.0))
    assert report.timeline == [
        TimelineSegment("job", "QUEUED, PREPARING", 0.0, 0.0),
        TimelineSegment("job", "RUNNING", 0.0, 0.0),
        TimelineSegment("worker-0", "RUNNING", 0.0, 0.0),
        TimelineSegment("worker-0", "restarting", 0.0, 0.0),
    ]
    assert make.cost(replace(record, startTime=None), "2026-01-31T12:01:16.000Z") == JobCost(100.0, 1.0), "from its creation on"


def test_a_replica_that_was_killed_several_times() -> None:
    killed = [Event(DAY.format(5), "killed", 3.0), Event(DAY.format(10), "killed", 30.0), Event(DAY.format(20), "killed")]
    replica = replace(REPLICAS[1], events=killed)
    assert [(each.state, each.begin, each.end) for each in make.timeline(JOB, [replica], DAY.format(38))][2:] == [
        ("RUNNING", 1.0, 5.0),
        ("restarting", 5.0, 8.0),
        ("RUNNING", 8.0, 10.0),
        ("restarting", 10.0, 20.0),
        ("RUNNING", 20.0, 20.0),
        ("restarting", 20.0, 38.0),
    ]
    assert make.timeline_events(JOB, [REPLICAS[0], replica]) == [
        *(TimelineEvent(event.time, "worker-0", "killed", event.seconds) for event in killed),
        TimelineEvent(DAY.format(30), "job", "continues without worker-0"),
    ]


def test_inputs_are_taken_from_the_manifest_or_the_record() -> None:
    record = JobRecord("job01", trainingInput={"pythonModule": "mine.task", "args": [], "jobDir": "gs://b/x"})
    assert make.job_inputs(record, {}) == {"module": "mine.task", "output": "gs://b/x"}
    assert make.job_inputs(record, {"module": "other.task"})["module"] == "other.task"
    manifest = {
        "command": ["sh", "run 1.sh"],
        "module": "x",
        "reproduces": "job00",
        "config": {"steps": 3, "name": "a b", "none": None, "empty": {}},
        "environment": {"A": "1"},
        "secrets": ["B", "C"],
    }
    assert make.job_inputs(record, manifest) == {
        "command": "sh run 1.sh",
        "reproduces": "job00",
        "output": "gs://b/x",
        "steps": "3",
        "name": "a b",
        "env A": "1",
        "secrets": "B C",
    }
    assert make.job_inputs(record, {"config": 7, "environment": ["A"]}) == {"module": "mine.task", "output": "gs://b/x"}


def test_the_last_error_lines_of_all_replicas_by_time() -> None:
    logs = {
        name: log_lines(name, *((second, f"error {second}") for second in seconds), severity="ERROR")
        for name, seconds in (("master-0", range(0, 30, 2)), ("worker-0", range(1, 30, 2)))
    }
    expected = [f"12:00:{second:06.3f} {'worker' if second % 2 else 'master'}-0 error {second}" for second in range(10, 30)]
    assert make.error_lines({**logs, "ps-0": log_lines("ps-0", (29.5, "no error"))}) == expected


def test_summaries_are_used_without_metrics_in_the_log() -> None:
    scalars = {
        "train/loss": [(1, 2.0), (2, 1.0)],
        "validation/loss": [(2, 1.5), (3, float("nan"))],
        "rate": [(1, 5.0), (2, 6.0)],
    }
    report = make.make(make_evidence(logs={}, scalars=scalars))
    assert report.chartsFrom == "summaries"
    assert report.charts == [
        Chart("loss", [Curve("train", [(1, 2.0), (2, 1.0)]), Curve("validation", [(2, 1.5)])]),
        Chart("rate", [Curve("rate", [(1, 5.0), (2, 6.0)])]),
    ]


def test_too_many_curves_are_counted_in_a_note() -> None:
    scalars = {f"tag{number}": [(1, 1.0), (2, 2.0)] for number in range(15)}
    report = make.make(make_evidence(logs={}, scalars=scalars))
    assert len(report.charts) == 12
    assert report.notes == ["3 more charts not shown: fab tensorboard job01 has all"]


def test_rates_are_computed_from_global_steps_if_not_logged() -> None:
    logs = {
        "master-0": log_lines(
            "master-0",
            (10, train_line("master/0", 10, 1.0, 1.0, None)),
            (12, train_line("master/0", 40, 1.0, 3.0, None)),
            (20, train_line("master/0", 30, 1.0, 0.5, None)),  # restarted from a checkpoint
            (21, train_line("master/0", 36, 1.0, 1.5, None)),
            (40, train_line("master/0", 20, 1.0, 9.0, None)),  # restarted again
        )
    }
    assert make.replica_throughput(JOB, REPLICAS, logs) == [
        ReplicaThroughput("master-0", False, [(12.0, 15.0), (21.0, 6.0)], [])
    ]


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        (JobState.QUEUED, "", "job job01 is QUEUED: there is nothing to report yet"),
        (JobState.PREPARING, "", "job job01 is PREPARING: there is nothing to report yet"),
        (JobState.CANCELLED, "", "job job01 is CANCELLED and never started: there is nothing to report"),
        (JobState.FAILED, "no host\nmore", "job job01 is FAILED and never started: there is nothing to report (no host)"),
    ],
)
def test_a_job_that_never_started_has_no_report(state: JobState, error: str, message: str) -> None:
    with pytest.raises(OpsError) as caught:
        make.check_started(JobRecord("job01", state, errorMessage=error), [ReplicaRecord("master-0")])
    assert str(caught.value) == message
    make.check_started(JobRecord("job01", state), [ReplicaRecord("master-0", startTime=DAY.format(1))])
    make.check_started(JobRecord("job01", state, startTime=DAY.format(1)), [])


def test_an_evaluation_is_read() -> None:
    evaluation = {"step": 40, "classes": ["cat", "dog"], "confusion": [[3, 1], [0, 4]], "more": 1}
    evaluation["mistakes"] = [{"label": 0, "predicted": 1, "image": PNG}] * 25
    assert parse(json.dumps(evaluation).encode()) == Evaluation(40, ["cat", "dog"], [[3, 1], [0, 4]], [Mistake(0, 1, PNG)] * 20)
    most = (1 << 53) - 1
    content = json.dumps({"step": most, "confusion": [[1, 0], [0, most]]}).encode()
    assert parse(content) == Evaluation(most, ["0", "1"], [[1, 0], [0, most]], [])
    assert parse(b'{"step": true, "confusion": [[1, 0], [0, 1]]}').step is None
    assert parse(b'{"confusion": [[1, 0], [0, 1]]}') == Evaluation(None, ["0", "1"], [[1, 0], [0, 1]], [])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"confusion": None}, "confusion must be a list of 2 to 50 rows"),
        ({"confusion": [[1]]}, "confusion must be a list of 2 to 50 rows"),
        ({"confusion": [[0] * 51] * 51}, "confusion must be a list of 2 to 50 rows"),
        ({"confusion": [[1, 2], [3]]}, "confusion[1] must be a list of 2 counts, one for each class"),
        ({"confusion": [[1, 2], [3, -1]]}, "confusion[1] must be a list of 2 counts, one for each class"),
        ({"confusion": [[1, 2], [3, 1 << 53]]}, "confusion[1] must be a list of 2 counts, one for each class"),
        ({"confusion": [[True, 2], [3, 1]]}, "confusion[0] must be a list of 2 counts, one for each class"),
        ({"classes": ["a"]}, "classes must be a list of 2 names, one for each row of confusion"),
        ({"classes": ["a", 1]}, "classes must be a list of 2 names, one for each row of confusion"),
        ({"mistakes": {}}, "mistakes must be a list"),
        ({"mistakes": [1]}, "mistakes[0] must be an object of label, predicted and image"),
        ({"mistakes": [{"label": 2, "predicted": 0, "image": PNG}]}, "mistakes[0].label must be a class, 0 to 1"),
        ({"mistakes": [{"label": 0, "image": PNG}]}, "mistakes[0].predicted must be a class, 0 to 1"),
        *(({"mistakes": [{"label": 0, "predicted": 1, "image": image}]}, NO_PNG) for image in BAD_IMAGES),
    ],
)
def test_an_invalid_evaluation_is_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(EvaluationError) as caught:
        parse(json.dumps({"classes": ["a", "b"], "confusion": [[1, 0], [0, 1]], "mistakes": [], **change}).encode())
    assert str(caught.value) == message
    for content, problem in ((b"{", "it is no JSON"), (b"[1]", "it is no JSON object"), (b"\xff", "it is no JSON")):
        with pytest.raises(EvaluationError, match=f"^{problem}$"):
            parse(content)


def test_differences_are_compared_flag_by_flag() -> None:
    first_report = make.make(make_evidence())
    changed = {"job": "job02", "arguments": ["--a=2", "--fast", "x"], "labels": {}, "metrics": {"loss": "0.4"}}
    inputs = {**first_report.inputs, "env X": "z", "output": "elsewhere"}
    reports = [first_report, replace(first_report, **changed, seconds=40.04, inputs=inputs, cost=None)]  # type: ignore[arg-type]
    rows = {row.what: (row.values, row.same) for row in compare_values([make.compared_inputs(each) for each in reports])}
    assert {what: values for what, (values, same) in rows.items() if not same} == {
        "env X": ["y", "z"],
        "--a": ["1", "2"],
        "--fast": [None, "x"],
        "label owner": ["ann", None],
    }
    assert rows["scaleTier"] == (["CUSTOM", "CUSTOM"], True)
    assert "output" not in rows
    assert [(row.what, row.values) for row in compare_values([make.compared_results(each) for each in reports])] == [
        ("state", ["SUCCEEDED", "SUCCEEDED"]),
        ("steps", ["40", None]),
        ("loss", ["0.500", "0.4"]),
        ("seconds", ["36.0", "40.0"]),
        ("US dollars", ["1.0000", None]),
    ]


def test_flags_are_parsed_from_a_command_line() -> None:
    args = ["train.py", "--lr", "-1e-3", "--tag", "b", "--debug", "-n", "3", "--tag=a", "rest"]
    assert make.flags(args) == {
        "other arguments": "train.py, rest",
        "--lr": "-1e-3",
        "--tag": "b, a",
        "--debug": "yes",
        "-n": "3",
    }
