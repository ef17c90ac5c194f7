"""docs/json.md is complete, and the comparison finds differences. It covers the JSON of all other tests."""

from __future__ import annotations

import ast
import json
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
from invoke import Collection
from opsdata import put_job
from shapes import DOCS, PRINTED, check, documented, wrong

import fabfile
from infra.inventory import Inventory
from jobs.firsterror import FirstError
from jobs.ledger import Ledger
from jobs.notification import Notification
from jobs.progress import JobProgress
from jobs.records import Event, JobRecord, ReplicaRecord, UnsavedFiles, Usage
from jobs.states import JobState, ReplicaState
from jobs.study import Measurement, Trial, TrialState
from ops.cluster.cluster import ClusterClient
from ops.logs.lines import LogLine
from ops.report.report import TrialRow, TunedParameter, Tuning
from ops.submit import runner, tuning
from ops.submit.config import JobFlags
from ops.submit.trials import TuningResult

ROOT = DOCS.parents[1]


def find_json_printers() -> set[str]:
    """Return the functions of ops that call terminal.print_json."""
    names = set()
    for path in (ROOT / "ops").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                calls = (ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call))
                names |= {f"{module}.{function.name}" for name in calls if name == "terminal.print_json"}
    return names


def test_all_functions_that_print_json_are_listed() -> None:
    assert find_json_printers() == PRINTED.keys()


def test_every_command_with_json_is_documented() -> None:
    documented_commands = {word for heading in documented() for word in heading.split(", ")}
    tasks = Collection.from_module(fabfile)
    commands = {name for name in tasks.task_names if any(flag.name == "json" for flag in tasks[name].get_arguments())}
    assert commands
    assert {f"fab {name}" for name in commands} <= documented_commands


def test_every_row_of_the_page_is_parsed() -> None:
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    assert sum(len(row.split(" | ")[0].split("`")) // 2 for row in rows) == sum(map(len, documented().values()))


def test_a_log_line_is_documented() -> None:
    line = LogLine("2026-01-31T12:00:00.000Z", "INFO", "ps-0", "text")
    for is_first in (False, True):
        assert list(wrong(json.loads(line.to_json(is_first)), documented()["fab logs"])) == []


def test_a_record_with_all_optional_keys_is_documented() -> None:
    events = [Event("2026-01-31T12:00:00.000Z", "killed", 1.5)]
    replica = ReplicaRecord("ps-0", ReplicaState.EXITED, 137, 9, True, True, 2, usage=Usage(1.5, 0.5, 7), events=events)
    notification = Notification("POST https://example.com/…", "2026-01-31T12:00:00.000Z", 1)
    progress = JobProgress(5, 10, 1.5, 3.3, 0.5, {"accuracy": 0.5}, "2026-01-31T12:00:00.000Z")
    error = FirstError("2026-01-31T12:00:00.000Z", "ValueError: x")
    unsaved = UnsavedFiles(True, ["model"], 1, 7, ["big (2.1 GB)"], 1, "it took too long")
    replica = replace(replica, firstError=error, progress=progress, connections=["listening on 2222"], unsaved=unsaved)
    job = JobRecord(
        "job01", JobState.FAILED, hosts=["ps-0"], candidates={"ps-0": ["ps-0"]}, lostReplicas=["ps-0"], events=events
    )
    full = replace(
        job,
        labels={"a": "b"},
        hourlyCost=1.0,
        steps=5,
        progress=progress,
        notification=notification,
        replicas=[replica.to_dict()],
    )
    value = {**full.to_dict(), "firstError": {"replica": "ps-0", **asdict(error)}}
    assert list(wrong(json.loads(json.dumps(value)), documented()["A job"])) == []


def test_a_tuning_job_is_documented() -> None:
    measurement = Measurement(5, 0.5)
    trial = Trial(1, {"rate": "0.1"}, "master-0", state=TrialState.SUCCEEDED, allMetrics=[measurement], finalMetric=measurement)
    parameter = {"parameterName": "rate", "type": "DOUBLE", "minValue": 0.1, "maxValue": 1}
    job = JobRecord("job01", JobState.RUNNING, trainingInput={"hyperparameters": {"goal": "MAXIMIZE", "params": [parameter]}})
    study = tuning.build_study(job.trainingInput["hyperparameters"], (), "", None)
    tuned = TuningResult(job, study, [trial, replace(trial, trialId=2, finalMetric=None)])
    value = {**job.to_dict(), "trainingOutput": tuned.output()}
    assert list(wrong(json.loads(json.dumps(value)), documented()["A job"])) == []
    value["trainingOutput"]["trials"][0]["more"] = 1
    assert list(wrong(value, documented()["A job"])) == ["trainingOutput.trials[]: more is not documented"]
    row = TrialRow(1, "SUCCEEDED", 0.5, {"rate": "0.1"}, "master-0", 0, 1.5)
    section = {"tuning": asdict(Tuning("accuracy", "MAXIMIZE", 5, [TunedParameter("rate", "log")], [row]))}
    report = {key: kind for key, kind in documented()["fab report"].items() if key.startswith("tuning")}
    assert list(wrong(section, report)) == []


@pytest.mark.parametrize("as_json", [True, False])
def test_a_followed_job_is_printed_at_its_end(
    as_json: bool, inventory: Inventory, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_job(ledger, JobRecord("job01"))
    submission = SimpleNamespace(job=SimpleNamespace(id="job01"))

    def run(*args: Any) -> int:
        print("as it goes")
        followed.append(args[1:])
        return 7

    followed: list[Any] = []

    monkeypatch.setattr(runner, "run", run)
    cluster = ClusterClient(inventory, ledger=ledger)
    assert runner.run_submission(cluster, lambda: submission, True, True, as_json, False) == 7  # type: ignore[arg-type,return-value]
    assert followed == [(submission, True, True, as_json)], "a screen would not be JSON"
    output = capsys.readouterr()
    if as_json:
        assert (json.loads(output.out)["jobId"], output.err) == ("job01", "as it goes\n")
    else:
        assert output.out == "as it goes\n"


def test_train_runs_the_job_of_its_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_submission(cluster: Any, prepare: Any, *how: bool) -> int:
        calls.append((prepare(), *how))
        return 5

    calls: list[Any] = []
    monkeypatch.setattr(runner, "prepare_job", lambda *args: args)
    monkeypatch.setattr(runner, "run_submission", run_submission)
    cluster: Any = object()
    assert runner.train(cluster, JobFlags("j"), "mine", True, False, False) == 5
    assert runner.train(cluster, JobFlags("j"), "mine", False, True, True, False) == 5
    job = (cluster, JobFlags("j"), "mine")
    assert calls == [(job, True, False, False, True), (job, False, True, True, False)]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"folder": "/bucket/data", "files": [{"name": "a", "bytes": 1}]}, ""),
        ({"folder": "/bucket/data", "files": []}, ""),
        ({"folder": "/bucket/data", "files": [], "more": 1}, "more is not documented"),
        ({"folder": "/bucket/data"}, "files is missing"),
        ({"folder": 7, "files": []}, "folder is 7, and not string"),
        ({"folder": "x", "files": [{"name": "a", "bytes": True}]}, "files[].bytes is True, and not integer"),
        ({"folder": "x", "files": [{"name": "a", "bytes": 1, "x": 1}]}, "files[].x is not documented"),
        ({"folder": ["x"], "files": []}, "folder is ['x'], and not string; folder is an array, which is not documented"),
        ({"folder": "x", "files": "y"}, "files is 'y', which is not documented"),
        ([], ". is an array, which is not documented"),
    ],
)
def test_differences_from_the_documentation_are_listed(value: Any, expected: str) -> None:
    assert "; ".join(wrong(value, documented()["fab data"])) == expected


def test_links_and_user_defined_keys() -> None:
    versions = documented()["fab versions"]
    (missing, *_) = wrong([{"model": "m"}], versions)
    assert missing.startswith("[]: ")
    assert missing.endswith(" is missing")
    value = [{"name": "x", "requirements": [], "versions": {"tensorflow": 2}, "bytes": 1}]
    assert list(wrong(value, documented()["fab runtimes"])) == ["[].versions{} is 2, and not string"]
    with pytest.raises(AssertionError, match=r"fab data, in docs/json.md: x is not documented"):
        check("ops.submit.data.data", {"folder": "/bucket/data", "files": [], "x": 1})
    with pytest.raises(AssertionError, match=r"ops.other prints JSON that docs/json.md does not document"):
        check("ops.other", {})
