"""A trial's reports, in each way: the public package, metrics.json, summaries for TensorBoard."""

from __future__ import annotations

import json
from pathlib import Path

import hypertune
import pytest

from hosts.tuner.measure import FEWEST_HISTORIES, TrialMetrics, should_stop
from jobs.study import Goal, Measurement, Parameter, ParameterType, Study, Trial, TrialState
from scaletier.summaries import Summaries, tf


@pytest.fixture
def metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrialMetrics:
    file = tmp_path / "scratch" / "output.metrics"
    monkeypatch.setenv("CLOUD_ML_HP_METRIC_FILE", str(file))
    monkeypatch.setenv("CLOUD_ML_TRIAL_ID", "3")
    return TrialMetrics("accuracy", file, str(tmp_path / "output"))


def test_the_public_package_unchanged(metrics: TrialMetrics) -> None:
    assert metrics.reported() == []
    reporter = hypertune.HyperTune()
    for step in range(150):  # it keeps the last hundred, and we looked before they were gone
        reporter.report_hyperparameter_tuning_metric("accuracy", step / 1000, step)
        if step == 90:
            assert len(metrics.reported()) == 91
    assert metrics.reported() == [Measurement(step, step / 1000) for step in range(150)]
    reporter.report_hyperparameter_tuning_metric("loss", 0.2, 150)
    assert metrics.final_measurements()[-1] == Measurement(149, 0.149)
    assert metrics.other_metrics == {"loss"}


def test_reports_are_in_the_order_of_arrival(metrics: TrialMetrics) -> None:
    reporter = hypertune.HyperTune()
    file = Path(reporter.metric_path)
    for at, value in ((1000, 0.1), (400, 0.9)):
        line = {"timestamp": at, "accuracy": str(value), "global_step": "1"}
        file.write_text((file.read_text() if file.exists() else "") + json.dumps(line) + "\n")
    assert metrics.reported()[-1] == Measurement(1, 0.9)


def test_a_damaged_summary_does_not_take_what_metrics_json_says(metrics: TrialMetrics, tmp_path: Path) -> None:
    Summaries(f"{tmp_path}/output").scalars(5, {"accuracy": 0.5})
    (events,) = (tmp_path / "output").rglob("*tfevents*")
    with tf.io.TFRecordWriter(str(events.with_name("events.out.tfevents.99.damaged"))) as writer:
        writer.write(b"\xff\xff\xff no event")
    (tmp_path / "output/metrics.json").write_text('{"steps": 9, "accuracy": 0.75}')
    assert metrics.final_measurements()[-1] == Measurement(9, 0.75)


def test_half_a_line_is_looked_at_again(metrics: TrialMetrics) -> None:
    reporter = hypertune.HyperTune()
    reporter.report_hyperparameter_tuning_metric("accuracy", 0.5, 1)
    file = Path(reporter.metric_path)
    whole = file.read_text()
    for content in (whole[:20], "no JSON\n[1]\n" + whole, '{"accuracy": "x", "global_step": "1", "timestamp": 1}\n' + whole):
        file.write_text(content)
        metrics.reported()
    assert metrics.reported() == [Measurement(1, 0.5)]


def test_what_was_reported_counts_before_files(metrics: TrialMetrics, tmp_path: Path) -> None:
    (tmp_path / "output").mkdir()
    (tmp_path / "output/metrics.json").write_text(json.dumps({"steps": 400, "accuracy": 0.9, "loss": 0.3, "name": "x"}))
    assert metrics.final_measurements() == [Measurement(400, 0.9)]
    assert metrics.other_metrics == {"loss"}
    hypertune.HyperTune().report_hyperparameter_tuning_metric("accuracy", 0.7, 5)
    assert metrics.final_measurements() == [Measurement(5, 0.7)]


@pytest.mark.parametrize("content", ["[]", "{", '{"accuracy": true}', '{"accuracy": "0.9"}', ""])
def test_a_file_that_tells_nothing(metrics: TrialMetrics, tmp_path: Path, content: str) -> None:
    (tmp_path / "output").mkdir()
    (tmp_path / "output/metrics.json").write_text(content)
    assert metrics.from_file() == []


def test_summaries_of_the_evaluation_before_those_of_training(metrics: TrialMetrics, tmp_path: Path) -> None:
    for run, value in (("train", 0.95), ("validation", 0.8)):
        for step in (1, 2):
            Summaries(f"{tmp_path}/output/{run}").scalars(step, {"accuracy": value + step / 100, "loss": 1.0})
    found = metrics.final_measurements()
    assert [each.trainingStep for each in found] == [1, 2]
    assert [each.objectiveValue for each in found] == pytest.approx([0.81, 0.82])
    assert "loss" in metrics.other_metrics
    Summaries(f"{tmp_path}/output/validation").scalars(3, {"accuracy": 0.85})
    assert metrics.evaluated()[-1].trainingStep == 3, "what came since"


def test_a_trial_that_was_not_evaluated_yet_is_not_judged_by_its_training(metrics: TrialMetrics, tmp_path: Path) -> None:
    Summaries(f"{tmp_path}/output").scalars(5, {"master-0/accuracy": 0.99})
    assert metrics.evaluated() == []
    assert metrics.final_measurements()[-1].trainingStep == 5, "at its end that is better than nothing"


def test_metrics_json_is_the_last_point_of_what_summaries_tell(metrics: TrialMetrics, tmp_path: Path) -> None:
    Summaries(f"{tmp_path}/output").scalars(5, {"eval/accuracy": 0.5})
    (tmp_path / "output/metrics.json").write_text('{"steps": 9, "accuracy": 0.75}')
    assert metrics.final_measurements() == [Measurement(5, 0.5), Measurement(9, 0.75)]


def test_a_tag_may_have_slashes_and_be_the_end_of_one(tmp_path: Path) -> None:
    Summaries(str(tmp_path)).scalars(7, {"eval/accuracy": 0.5, "inaccuracy": 0.1})
    for tag in ("accuracy", "eval/accuracy", "summaries/eval/accuracy"):
        assert TrialMetrics(tag, tmp_path / "none", str(tmp_path)).final_measurements() == [Measurement(7, 0.5)]
    assert TrialMetrics("ccuracy", tmp_path / "none", str(tmp_path)).final_measurements() == []


def ended(*values: float, early: bool = False) -> Trial:
    measured = [Measurement(step, value) for step, value in enumerate(values, 1)]
    return Trial(1, {}, "m", state=TrialState.SUCCEEDED, allMetrics=measured, isTrialStoppedEarly=early)


def test_the_median_rule() -> None:
    """Averages up to step 2 of five others: 0.2, 0.4, 0.5, 0.6, 0.8, of which 0.5 is in the middle."""
    up = Study([Parameter("x", ParameterType.INTEGER, 1, 9)])
    down = Study(up.params, goal=Goal.MINIMIZE)
    others = [ended(value - 0.1, value + 0.1, 99.0) for value in (0.2, 0.4, 0.5, 0.6, 0.8)]
    below, above = [Measurement(1, 0.1), Measurement(2, 0.49)], [Measurement(1, 0.51), Measurement(2, 0.52)]
    assert should_stop(up, below, others)
    assert not should_stop(up, above, others)
    assert not should_stop(down, below, others)
    assert should_stop(down, above, others)
    assert not should_stop(up, [], others)
    assert not should_stop(up, below, others[: FEWEST_HISTORIES - 1]), "too few to compare with"
    assert not should_stop(up, below, [*others[:4], ended(0.5, 0.5, early=True)]), "one that was stopped is none of them"
    late = [Trial(1, {}, "m", state=TrialState.SUCCEEDED, allMetrics=[Measurement(50, 0.9)])] * FEWEST_HISTORIES
    assert not should_stop(up, below, late), "nobody told anything up to this step"
