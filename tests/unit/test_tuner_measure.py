"""A trial's reports, in each way: the public package, metrics.json, summaries for TensorBoard."""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import fsspec
import hypertune
import pytest
from tensorboard.compat import tensorflow_stub

from hosts.tuner import measure
from hosts.tuner.measure import MIN_HISTORIES, TrialMetrics, should_stop
from jobs.study import METRIC_TAG, Goal, Measurement, Parameter, ParameterType, Study, Trial, TrialState
from scaletier.summaries import Summaries, tf


@pytest.fixture
def metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrialMetrics:
    file = tmp_path / "scratch" / "output.metrics"
    monkeypatch.setenv("CLOUD_ML_HP_METRIC_FILE", str(file))
    monkeypatch.setenv("CLOUD_ML_TRIAL_ID", "3")
    return TrialMetrics("accuracy", file, str(tmp_path / "output"))


def test_the_unchanged_public_package_reports(metrics: TrialMetrics) -> None:
    assert metrics.read_reports() == []
    reporter = hypertune.HyperTune()
    for step in range(150):  # it keeps the last hundred, and we read them before they were removed
        reporter.report_hyperparameter_tuning_metric("accuracy", step / 1000, step)
        if step == 90:
            assert len(metrics.read_reports()) == 91
    assert metrics.read_reports() == [Measurement(step, step / 1000) for step in range(150)]
    reporter.report_hyperparameter_tuning_metric("loss", 0.2, 150)
    assert metrics.final_measurements()[-1] == Measurement(149, 0.149)
    assert metrics.other_metrics == {"loss"}


def test_reports_are_in_order_of_arrival(metrics: TrialMetrics) -> None:
    reporter = hypertune.HyperTune()
    file = Path(reporter.metric_path)
    for at, value in ((1000, 0.1), (400, 0.9)):
        line = {"timestamp": at, "accuracy": str(value), "global_step": "1"}
        file.write_text((file.read_text() if file.exists() else "") + json.dumps(line) + "\n")
    assert metrics.read_reports()[-1] == Measurement(1, 0.9)


def test_a_damaged_summary_does_not_hide_metrics_json(metrics: TrialMetrics, tmp_path: Path) -> None:
    Summaries(f"{tmp_path}/output").scalars(5, {"accuracy": 0.5})
    (events,) = (tmp_path / "output").rglob("*tfevents*")
    with tf.io.TFRecordWriter(str(events.with_name("events.out.tfevents.99.damaged"))) as writer:
        writer.write(b"\xff\xff\xff no event")
    (tmp_path / "output/metrics.json").write_text('{"steps": 9, "accuracy": 0.75}')
    assert metrics.final_measurements()[-1] == Measurement(9, 0.75)


def test_an_incomplete_line_is_read_again(metrics: TrialMetrics) -> None:
    reporter = hypertune.HyperTune()
    reporter.report_hyperparameter_tuning_metric("accuracy", 0.5, 1)
    file = Path(reporter.metric_path)
    complete_line = file.read_text()
    for content in (
        complete_line[:20],
        "no JSON\n[1]\n" + complete_line,
        '{"accuracy": "x", "global_step": "1", "timestamp": 1}\n' + complete_line,
    ):
        file.write_text(content)
        metrics.read_reports()
    assert metrics.read_reports() == [Measurement(1, 0.5)]


def test_reports_take_precedence_over_files(metrics: TrialMetrics, tmp_path: Path) -> None:
    (tmp_path / "output").mkdir()
    (tmp_path / "output/metrics.json").write_text(json.dumps({"steps": 400, "accuracy": 0.9, "loss": 0.3, "name": "x"}))
    assert metrics.final_measurements() == [Measurement(400, 0.9)]
    assert metrics.other_metrics == {"loss"}
    (tmp_path / "output/metrics.json").write_text('{"accuracy": 0.9}')
    assert metrics.final_measurements() == [Measurement(0, 0.9)]
    hypertune.HyperTune().report_hyperparameter_tuning_metric("accuracy", 0.7, 5)
    assert metrics.final_measurements() == [Measurement(5, 0.7)]


@pytest.mark.parametrize(
    "content",
    [
        *("[]", "{", '{"accuracy": true}', '{"accuracy": "0.9"}', '{"loss": 0.5}', ""),
        *('{"accuracy": 0.5, "steps": -1}', '{"accuracy": 0.5, "steps": Infinity}', '{"accuracy": 0.5, "steps": NaN}'),
    ],
)
def test_a_file_without_metrics_is_ignored(metrics: TrialMetrics, tmp_path: Path, content: str) -> None:
    (tmp_path / "output").mkdir()
    (tmp_path / "output/metrics.json").write_text(content)
    assert metrics.read_metrics_file() == []


def test_metrics_json_is_read_after_its_folder_was_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files: dict[str, bytes] = {"bucket/1/events": b""}

    class Listing(fsspec.AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
        """A filesystem that looks for files in its listings, as gcsfs does."""

        protocol = "listing"

        def ls(self, path: str, detail: bool = True, **_: Any) -> Any:
            try:
                return self.dircache[path]
            except KeyError:
                self.dircache[path] = entries = [{"name": name} for name in files]
                return entries

        def _open(self, path: str, *_: Any, **__: Any) -> io.BytesIO:
            if path not in [entry["name"] for entry in self.ls(path.rpartition("/")[0])]:
                raise FileNotFoundError(path)
            return io.BytesIO(files[path])

    monkeypatch.setattr("fsspec.config.conf", {})
    fsspec.register_implementation("listing", Listing, clobber=True)
    metrics = TrialMetrics("accuracy", tmp_path / "none", "listing://bucket/1")
    assert metrics.read_metrics_file() == []
    files["bucket/1/metrics.json"] = b'{"steps": 9, "accuracy": 0.75}'
    assert metrics.read_metrics_file() == [Measurement(9, 0.75)]


def test_evaluation_summaries_precede_training_summaries(metrics: TrialMetrics, tmp_path: Path) -> None:
    for run, value in (("train", 0.95), ("validation", 0.8)):
        for step in (1, 2):
            Summaries(f"{tmp_path}/output/{run}").scalars(step, {"accuracy": value + step / 100, "loss": 1.0})
    measurements = metrics.final_measurements()
    assert [each.trainingStep for each in measurements] == [1, 2]
    assert [each.objectiveValue for each in measurements] == pytest.approx([0.81, 0.82])
    assert metrics.other_metrics == {"loss"}
    Summaries(f"{tmp_path}/output/validation").scalars(3, {"accuracy": 0.85})
    assert metrics.read_evaluations()[-1].trainingStep == 3, "the reports since then"


@pytest.mark.parametrize(
    "evaluation",
    [
        "val",
        "valid",
        "eval_1",
        "evaluation",
        "Validation",
        "run-dev",
        "tests",
        "modelEval",
        "testset",
        "train/val",
        "z_eval/trial",
    ],
)
@pytest.mark.parametrize(
    "training", ["train", "contest_train", "latest", "eval_train", "TrainEval", "device", "validity", "eval/training"]
)
def test_whole_words_name_an_evaluation(metrics: TrialMetrics, tmp_path: Path, evaluation: str, training: str) -> None:
    Summaries(f"{tmp_path}/output").scalars(1, {f"{training}/accuracy": 0.75, f"{evaluation}/accuracy": 0.5})
    assert metrics.read_evaluations() == metrics.final_measurements() == [Measurement(1, 0.5)]


@pytest.mark.parametrize("tag", [METRIC_TAG, "train_accuracy", "accuracy", "val/accuracy"])
def test_the_run_names_an_evaluation_whatever_the_tag_has(tmp_path: Path, tag: str) -> None:
    for run, value in (("train", 0.75), ("validation", 0.5)):
        Summaries(f"{tmp_path}/{run}").scalars(1, {tag: value})
    metrics = TrialMetrics(tag, tmp_path / "none", str(tmp_path))
    assert metrics.read_evaluations() == metrics.final_measurements() == [Measurement(1, 0.5)]


def test_a_tag_of_a_validation_is_one_in_any_run(tmp_path: Path) -> None:
    Summaries(f"{tmp_path}/train").scalars(1, {"val_accuracy": 0.5, METRIC_TAG: 0.75})
    assert TrialMetrics("val_accuracy", tmp_path / "none", str(tmp_path)).read_evaluations() == [Measurement(1, 0.5)]
    assert TrialMetrics(METRIC_TAG, tmp_path / "none", str(tmp_path)).read_evaluations() == []


def test_a_validation_is_preferred_to_a_test(metrics: TrialMetrics, tmp_path: Path) -> None:
    Summaries(f"{tmp_path}/output").scalars(1, {"test/accuracy": 0.75, "val/accuracy": 0.5, "a/accuracy": 0.25})
    assert metrics.read_evaluations() == metrics.final_measurements() == [Measurement(1, 0.5)]


def test_a_trial_is_not_stopped_by_training_metrics_alone(
    metrics: TrialMetrics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Summaries(f"{tmp_path}/output").scalars(5, {"master-0/accuracy": 0.99})
    monkeypatch.delitem(sys.modules, "tensorboard.compat.notf", raising=False)
    assert metrics.read_evaluations() == []
    assert "tensorboard.compat.notf" in sys.modules, "TensorBoard does without TensorFlow"
    assert metrics.final_measurements()[-1].trainingStep == 5, "at its end training metrics are used"


def test_metrics_json_is_the_last_point_after_summaries(metrics: TrialMetrics, tmp_path: Path) -> None:
    Summaries(f"{tmp_path}/output").scalars(5, {"eval/accuracy": 0.5})
    (tmp_path / "output/metrics.json").write_text('{"steps": 9, "accuracy": 0.75}')
    assert metrics.final_measurements() == [Measurement(5, 0.5), Measurement(9, 0.75)]
    (tmp_path / "output/metrics.json").write_text('{"accuracy": 0.75}')
    assert metrics.final_measurements() == [Measurement(5, 0.5), Measurement(5, 0.75)], "no step: the last one"


def test_a_tag_may_have_slashes_and_be_a_suffix(tmp_path: Path) -> None:
    Summaries(str(tmp_path)).scalars(7, {"eval/accuracy": 0.5, "inaccuracy": 0.1})
    for tag in ("accuracy", "eval/accuracy", "summaries/eval/accuracy"):
        assert TrialMetrics(tag, tmp_path / "none", str(tmp_path)).final_measurements() == [Measurement(7, 0.5)]
    assert TrialMetrics("ccuracy", tmp_path / "none", str(tmp_path)).final_measurements() == []


@pytest.fixture
def without_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let TensorBoard do without TensorFlow, as in the tuner's process, although another test may have loaded it."""
    for name in ("directory_loader", "directory_watcher", "event_file_loader", "io_wrapper", "plugin_asset_util"):
        monkeypatch.setattr(f"tensorboard.backend.event_processing.{name}.tf", tensorflow_stub)


@pytest.mark.parametrize("kind", ["link", "pipe", "device", "large", "socket"])
@pytest.mark.usefixtures("without_tensorflow")
def test_only_regular_files_of_limited_size_are_read(
    metrics: TrialMetrics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    other, output = tmp_path / "other", tmp_path / "output"
    Summaries(str(other)).scalars(5, {"val/accuracy": 0.5})
    (summary,) = other.rglob("*tfevents*")
    summary.rename(other / "events.out.tfevents.1")
    (other / "metrics.json").write_text('{"accuracy": 0.5}')
    (other / "output.metrics").write_text('{"timestamp": 1, "accuracy": "0.5", "global_step": "1"}\n')
    (tmp_path / "scratch").mkdir()
    output.mkdir()
    if kind == "large":
        monkeypatch.setattr(measure, "LARGEST_FILE", 8)
        monkeypatch.setattr(measure, "LARGEST_RECORD", 8)
    for name, folder in (("output.metrics", tmp_path / "scratch"), ("metrics.json", output), ("events.out.tfevents.1", output)):
        file = folder / name
        if kind == "link":
            file.symlink_to(other / name)
        elif kind == "pipe":
            os.mkfifo(file)
        elif kind == "device":
            file.symlink_to("/dev/zero")
        elif kind == "socket":
            with socket.socket(socket.AF_UNIX) as listener:
                monkeypatch.chdir(folder)
                listener.bind(name)
        else:
            shutil.copy(other / name, file)
    assert (metrics.read_reports(), metrics.read_metrics_file(), metrics.read_evaluations()) == ([], [], [])
    assert metrics.final_measurements() == []


@pytest.mark.usefixtures("without_tensorflow")
def test_no_link_to_a_folder_is_followed_to_summaries(metrics: TrialMetrics, tmp_path: Path) -> None:
    Summaries(str(tmp_path / "other")).scalars(5, {"val/accuracy": 0.5})
    (tmp_path / "output").mkdir()
    (tmp_path / "output/link").symlink_to(tmp_path / "other")
    (summary,) = (tmp_path / "other").rglob("*tfevents*")
    assert metrics.read_evaluations() == []
    with pytest.raises(NotADirectoryError):
        measure.open_file(tmp_path / "output", tmp_path / "output/link" / summary.relative_to(tmp_path / "other"))


def succeeded_trial(*values: float, early: bool = False) -> Trial:
    measured = [Measurement(step, value) for step, value in enumerate(values, 1)]
    return Trial(1, {}, "m", state=TrialState.SUCCEEDED, allMetrics=measured, isTrialStoppedEarly=early)


def test_the_median_rule_stops_a_trial() -> None:
    """Averages up to step 2 of five others: 0.2, 0.4, 0.5, 0.6, 0.8, of which 0.5 is in the middle."""
    up = Study([Parameter("x", ParameterType.INTEGER, 1, 9)])
    down = Study(up.params, goal=Goal.MINIMIZE)
    other_trials = [succeeded_trial(value - 0.1, value + 0.1, 99.0) for value in (0.2, 0.4, 0.5, 0.6, 0.8)]
    below, above = [Measurement(1, 0.1), Measurement(2, 0.49)], [Measurement(1, 0.51), Measurement(2, 0.52)]
    assert should_stop(up, below, other_trials)
    assert not should_stop(up, above, other_trials)
    assert not should_stop(down, below, other_trials)
    assert should_stop(down, above, other_trials)
    assert not should_stop(up, [], other_trials)
    assert not should_stop(up, below, other_trials[: MIN_HISTORIES - 1]), "too few to compare with"
    assert not should_stop(up, below, [*other_trials[:4], succeeded_trial(0.5, 0.5, early=True)]), (
        "early-stopped trials do not count"
    )
    huge_trials = [succeeded_trial(1.5e308, 1.5e308)] * MIN_HISTORIES
    assert not should_stop(up, below, huge_trials), "they have no average"
    late_trials = [Trial(1, {}, "m", state=TrialState.SUCCEEDED, allMetrics=[Measurement(50, 0.9)])] * MIN_HISTORIES
    assert not should_stop(up, below, late_trials), "no trial reported up to this step"
