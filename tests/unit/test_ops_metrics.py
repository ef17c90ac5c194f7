"""Check a job's final metrics: from a line, a file, or TensorBoard summaries."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.plugins.scalar.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util.tensor_util import make_tensor_proto

from infra.inventory import Inventory
from jobs.chunks import LogFilter
from jobs.records import JobRecord
from jobs.states import JobState
from ops.cluster.cluster import ClusterClient
from ops.cluster.output import MAX_RESULT_BYTES, JobOutput
from ops.errors import HostError
from ops.submit import metrics

Log = list[str]


class OneHost:
    """Run commands on this machine."""

    def any_connection(self) -> Any:
        return SimpleNamespace(original_host="master-0")

    def check_output(self, name: str, command: str, what: str) -> str:
        assert (name, what) == ("master-0", "could not read summaries, it ended")
        words = shlex.split(command)
        program = [word.replace("$$", "$") for word in words[words.index("--") + 1 :]]  # escaped for systemd-run
        return subprocess.run(program, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def read_metrics(inventory: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Log], dict[str, str]]:
    """Return a function that reads the final metrics of a job with output in tmp_path, by its chief's log."""
    import sys

    (tmp_path / "jobs/job01/output").mkdir(parents=True)
    local_inventory = replace(inventory, bucket=str(tmp_path), operator_bucket=f"file://{tmp_path}")
    record = JobRecord("job01", JobState.SUCCEEDED, candidates=["master-0"], hosts=["master-0"])
    monkeypatch.setattr(metrics, "PYTHON", sys.executable)

    def read(log: Log) -> dict[str, str]:
        lines = [SimpleNamespace(message=line) for line in log]
        monkeypatch.setattr(metrics, "read_logs", lambda *_: {"master-0": lines})
        return metrics.final_metrics(ClusterClient(local_inventory, OneHost()), record)  # type: ignore[arg-type]

    return read


def write_summaries(folder: Path, *values: tuple[str, int, float], old: bool = False) -> None:
    """Write scalars like TensorFlow 2, in tensors, or like TensorFlow 1."""
    writer = EventFileWriter(str(folder))
    for tag, step, value in values:
        kind: dict[str, Any] = {"simple_value": value}
        if not old:
            meta = SummaryMetadata.FromString(create_summary_metadata("", "").SerializeToString())
            kind = {"tensor": make_tensor_proto(value, dtype="float32"), "metadata": meta}
        writer.add_event(Event(wall_time=step, step=step, summary=Summary(value=[Summary.Value(tag=tag, **kind)])))
    writer.close()


def test_a_line_precedes_a_file_and_a_file_summaries(read_metrics: Callable[[Log], dict[str, str]], tmp_path: Path) -> None:
    output = tmp_path / "jobs/job01/output"
    assert read_metrics(["Train"]) == {}
    write_summaries(output / "logs", ("loss", 5, 0.5), ("loss", 20, 0.25), ("accuracy", 20, 0.875))
    assert read_metrics(["Train"]) == {"steps": "20", "logs/loss": "0.25", "logs/accuracy": "0.875"}
    (output / "metrics.json").write_text(json.dumps({"steps": 7, "loss": 0.125, "name": "x", "good": True, "list": [1]}))
    assert read_metrics(["Train"]) == {"steps": "7", "loss": "0.125"}
    assert read_metrics(["Final metrics after 9 steps, loss: 0.100"]) == {"steps": "9", "loss": "0.100"}


def test_several_runs_and_tensorflow_1_scalars_are_read(read_metrics: Callable[[Log], dict[str, str]], tmp_path: Path) -> None:
    output = tmp_path / "jobs/job01/output"
    write_summaries(output, ("loss", 3, 0.75), old=True)
    write_summaries(output / "eval", ("loss", 4, 0.5))
    assert read_metrics([]) == {"steps": "4", "loss": "0.75", "eval/loss": "0.5"}


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '{"a": "b"}'])
def test_a_file_without_metrics_is_ignored(read_metrics: Callable[[Log], dict[str, str]], tmp_path: Path, text: str) -> None:
    (tmp_path / "jobs/job01/output/metrics.json").write_text(text)
    assert read_metrics([]) == {}


def test_a_file_of_any_size_or_depth_is_no_harm(
    read_metrics: Callable[[Log], dict[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "jobs/job01/output/metrics.json"
    file.write_text('{"loss": 1}' + " " * MAX_RESULT_BYTES)
    assert read_metrics([]) == {}
    assert capsys.readouterr().err == "the results of job01 cannot be read: metrics.json has 1.0 MB; 1.0 MB is the most\n"
    file.write_text("[" * (MAX_RESULT_BYTES // 2))
    assert read_metrics([]) == {}


def test_results_that_cannot_be_read_are_noted(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[object] = []

    def read_logs(_: object, record: JobRecord, *what: object) -> Any:
        calls.append(what)
        raise HostError("master-0", "does not answer")

    monkeypatch.setattr(metrics, "read_logs", read_logs)
    cluster = ClusterClient(inventory, OneHost())  # type: ignore[arg-type]
    assert metrics.final_metrics(cluster, JobRecord("job01")) == {}
    assert calls == []
    assert metrics.final_metrics(cluster, JobRecord("job01", hosts=["master-0", "worker-0"])) == {}
    assert calls == [(["master-0"], LogFilter())]
    assert capsys.readouterr().err == "the results of job01 cannot be read: master-0 does not answer\n"


@pytest.mark.parametrize("printed", ["", "no JSON"])
def test_a_host_that_prints_no_scalars_has_none(inventory: Inventory, printed: str) -> None:
    class Silent(OneHost):
        def check_output(self, name: str, command: str, what: str) -> str:
            assert shlex.split(command)[-2:] == ["/bucket/jobs/job01/output", "7"]
            return printed

    output = JobOutput(JobRecord("job01"), "/bucket/jobs/job01/output", {"events.out.tfevents.1": 1}, None, "")  # type: ignore[arg-type]
    cluster = ClusterClient(inventory, Silent())  # type: ignore[arg-type]
    assert metrics.scalars(cluster, output, 7) == {}
    printed = 'a warning\n{"loss": [[1.0, 2.5], [2, 3]], "none": []}\n'
    assert metrics.scalars(cluster, output, 7) == {"loss": [(1, 2.5), (2, 3)]}


def test_damaged_summaries_are_ignored(read_metrics: Callable[[Log], dict[str, str]], tmp_path: Path) -> None:
    (tmp_path / "jobs/job01/output/events.out.tfevents.1.x").write_bytes(b"no records")
    assert read_metrics([]) == {}


def test_points_of_each_scalar_are_sampled(inventory: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setattr(metrics, "PYTHON", sys.executable)
    points = [("loss", step, 1 / step) for step in range(1, 41)]
    write_summaries(tmp_path / "train", *points, ("accuracy", 8, 0.5))
    cluster = ClusterClient(inventory, OneHost())  # type: ignore[arg-type]
    output = JobOutput(JobRecord("job01"), str(tmp_path), {"train/events.out.tfevents.1": 1}, None, "")  # type: ignore[arg-type]
    scalars = metrics.scalars(cluster, output, 10)
    assert scalars["train/accuracy"] == [(8, 0.5)]
    assert len(scalars["train/loss"]) == 10
    assert scalars["train/loss"][-1] == (40, pytest.approx(0.025))
    assert metrics.scalars(cluster, replace(output, files={"checkpoint": 1}), 10) == {}
