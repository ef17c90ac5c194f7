"""Check `fab report` as a command: its reads of a bucket, its target, and its one-line errors."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from opsdata import make_cluster, put_job, put_log, write_files

from jobs import paths
from jobs.records import JobRecord, ReplicaRecord
from jobs.states import JobState, ReplicaState
from ops.cluster.cluster import ClusterClient
from ops.cluster.fanout import Outcome
from ops.cluster.ledger import existing_job
from ops.errors import OpsError, UsageError
from ops.logs.lines import LogLine
from ops.plan import plan, planned
from ops.plan.scaling import Prediction
from ops.report import evidence
from ops.report.command import check_ids, report
from ops.report.evidence import JobEvidence
from ops.report.page import MARK

MANIFEST = {"module": "mine.task", "package": {"name": "mine", "sha256": "", "files": {}}, "cluster": {}}
NOON = "2026-01-31T12:00:{:02d}.000Z"
LOG = [
    "Train [master/0], step 10: loss: 2.000 (1.000 sec) 9.0 global steps/s, 5.0 local steps/s",
    "Train [master/0], step 20: loss: 1.000 (2.000 sec) 9.0 global steps/s, 6.0 local steps/s",
    "Final metrics after 20 steps, loss: 0.500",
]


class NoHost:
    """A fleet whose hosts have no logs."""

    def each(self, names: list[str], *_: Any) -> Outcome[Any]:
        return Outcome({}, {})


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    return tmp_path / "bucket"


@pytest.fixture
def cluster(tmp_path: Path, bucket: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterClient:
    """Return a cluster with the jobs `job01` and `job02`, which ended, and `waits`, which is QUEUED."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan, "PLANS", tmp_path / "plans")
    cluster = make_cluster(tmp_path, NoHost())
    ledger = cluster.ledger
    times = {"createTime": NOON.format(0), "startTime": NOON.format(1), "endTime": NOON.format(9)}
    job = JobRecord("job01", JobState.SUCCEEDED, hosts=["master-0"], candidates={"master-0": ["master-0"]}, **times)  # type: ignore[arg-type]
    put_job(ledger, job)
    put_job(ledger, replace(job, jobId="job02"))
    put_job(ledger, JobRecord("waits", createTime=NOON.format(2)))
    for job_id in ("job01", "job02"):
        replica = ReplicaRecord("master-0", ReplicaState.EXITED, exitCode=0, startTime=NOON.format(1), endTime=NOON.format(9))
        ledger.write_replica(job_id, replica, None)
        lines = [LogLine(NOON.format(n + 2), "INFO", "master-0", message) for n, message in enumerate(LOG)]
        put_log(bucket / paths.log(job_id, "master-0"), lines)
        write_files(bucket, {paths.manifest(job_id): json.dumps({**MANIFEST, "args": ["--x", job_id]})})
    return cluster


def test_a_page_is_written_and_replaced(cluster: ClusterClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(cluster, ["job01"], None, json=False) == 0
    page = tmp_path / "report-job01.html"
    assert MARK in page.read_text()
    assert "Final metrics" not in page.read_text()
    assert capsys.readouterr().out == f"report-job01.html: {page.stat().st_size / 1000:.1f} kB\n"
    assert report(cluster, ["job01"], str(page), json=False) == 0, "a page of fab report is replaced"
    assert report(cluster, ["job01", "job02"], None, json=False) == 0
    assert sorted(path.name for path in tmp_path.glob("*.html")) == ["report-job01-job02.html", "report-job01.html"]


def test_the_json_output(cluster: ClusterClient, bucket: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_files(bucket, {f"{paths.output('job01')}/evaluation.json": '{"confusion": [[9, 1], [0, 10]]}'})
    assert report(cluster, ["job01"], None, json=True) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["charts"] == [
        {
            "name": "loss",
            "curves": [{"name": "train", "points": [[10, 2.0], [20, 1.0]]}, {"name": "eval", "points": [[20, 0.5]]}],
        }
    ]
    assert output["evaluation"] == {"step": None, "classes": ["0", "1"], "confusion": [[9, 1], [0, 10]], "mistakes": []}
    assert (output["metrics"], output["arguments"], output["notes"]) == ({"steps": "20", "loss": "0.500"}, ["--x", "job01"], [])
    assert report(cluster, ["job01", "job02"], None, json=True) == 0
    output = json.loads(capsys.readouterr().out)
    assert [row["what"] for row in output["compared"] if not row["same"]] == ["--x"]


def test_the_report_has_the_plans_prediction(
    cluster: ClusterClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def planned_of_report() -> Any:
        assert report(cluster, ["job01"], None, json=True) == 0
        return json.loads(capsys.readouterr().out)["planned"]

    check = planned.PlanCheck({"createTime": NOON.format(0)}, Prediction(30.123, 9.876, 5, "processors"), 24.321)
    monkeypatch.setattr(planned, "compare", lambda *_: check)
    assert planned_of_report() is None, "there is no plan"
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "trainer.task-0.json").touch()
    expected = {"stepsPerSecond": 30.12, "measured": 24.32, "errorPercent": 23.9, "speedUp": 3.05, "bound": "processors"}
    assert planned_of_report() == {"createTime": NOON.format(0), **expected}
    slow = planned.PlanCheck({"createTime": NOON.format(0)}, Prediction(0.03228, 0.01, 5, "processors"), 0.041236)
    monkeypatch.setattr(planned, "compare", lambda *_: slow)
    assert planned_of_report().items() >= {"stepsPerSecond": 0.0323, "measured": 0.0412}.items()
    monkeypatch.setattr(planned, "compare", lambda *_: check)

    record = existing_job(cluster.ledger, "job01")
    put_job(cluster.ledger, replace(record, state=JobState.FAILED))
    assert planned_of_report() is None, "it did not train to its end"
    put_job(cluster.ledger, record)

    def raise_no_plan(*_: Any) -> None:
        raise UsageError("no plan was made of trainer.task")

    monkeypatch.setattr(planned, "compare", raise_no_plan)
    assert planned_of_report() is None

    def raise_fault(*_: Any) -> None:
        raise KeyError("a fault of the program")

    monkeypatch.setattr(planned, "compare", raise_fault)
    with pytest.raises(KeyError, match="a fault of the program"):
        planned_of_report()


def test_unreadable_inputs_are_notes(cluster: ClusterClient, bucket: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluation = f"{paths.output('job01')}/evaluation.json"
    write_files(bucket, {evaluation: "{}", paths.manifest("job01"): "{"})
    shutil.rmtree(bucket / paths.log("job01", "master-0"))
    assert report(cluster, ["job01"], None, json=True) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == [
        "no log was read: job job01 is SUCCEEDED, and left no log of master-0: fab describe job01 shows more",
        "evaluation.json was not used: confusion must be a list of 2 to 50 rows",
        "the manifest was not read: it is no JSON object",
    ]
    write_files(bucket, {evaluation: " " * (1 << 20) + "{}"})
    assert report(cluster, ["job01"], None, json=True) == 0
    note = "evaluation.json was not used: evaluation.json has 1.0 MB; 1.0 MB is the most"
    assert note in json.loads(capsys.readouterr().out)["notes"]


def test_summaries_and_final_metrics_are_read_if_the_log_has_none(
    cluster: ClusterClient, bucket: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = bucket / paths.log("job01", "master-0")
    shutil.rmtree(log)
    put_log(log, [LogLine(NOON.format(2), "INFO", "master-0", "hello"), LogLine(NOON.format(3), "ERROR", "master-0", "odd")])
    monkeypatch.setattr(evidence, "scalars", lambda _, output, points: {f"{output.job_dir}/loss": [(1, 2.0), (points, 1.0)]})
    monkeypatch.setattr(evidence, "final_metrics", lambda _, record: {"loss": record.jobId})
    assert report(cluster, ["job01"], None, json=True) == 0
    output = json.loads(capsys.readouterr().out)
    job_dir = f"{bucket}/{paths.output('job01')}"
    assert output["charts"] == [{"name": "loss", "curves": [{"name": job_dir, "points": [[1, 2.0], [1000, 1.0]]}]}]
    assert (output["chartsFrom"], output["metrics"], output["errorLines"]) == (
        "summaries",
        {"loss": "job01"},
        ["12:00:03.000 master-0 odd"],
    )
    record = existing_job(cluster.ledger, "job01")
    put_job(cluster.ledger, replace(record, state=JobState.RUNNING, endTime=None))
    assert report(cluster, ["job01"], None, json=True) == 0
    assert json.loads(capsys.readouterr().out)["metrics"] == {}, "it has no final ones yet"
    put_log(log, [LogLine(NOON.format(4), "INFO", "master-0", "Eval, step 15: loss: 1.500")])
    assert JobEvidence(cluster, "job01").scalars == {}, "the log is enough"


def test_an_invalid_call_is_one_line_and_writes_nothing(cluster: ClusterClient, tmp_path: Path) -> None:
    own_file = tmp_path / "mine.html"
    own_file.write_text("<p>mine</p>")
    (tmp_path / "report-job02.html").write_text("mine, too")
    for ids, output, as_json, kind, message in [
        (["nobody"], None, False, UsageError, "there is no job 'nobody'; fab jobs lists "),
        (["nobody"], "no/x.html", False, UsageError, "no/x.html cannot be written: there is no folder no"),
        (["job02"], None, False, UsageError, "report-job02.html is there already, and was not made by fab report: remove it"),
        (["waits"], None, False, OpsError, "job waits is QUEUED: there is nothing to report yet"),
        (["job01", "job01"], None, False, UsageError, "job01 is named twice: a job is compared with others"),
        (list("abcdefg"), None, False, UsageError, "fab report compares 6 jobs at most, not 7"),
        (["job01"], "x.html", True, UsageError, "--json prints, and --output writes a page: use only one of them"),
        (["job01"], "mine.html", False, UsageError, "mine.html is there already, and was not made by fab report: remove it,"),
        (["job01"], str(tmp_path), False, UsageError, f"{tmp_path} is there already, and no file: give another --output"),
        (["job01"], "no/x.html", False, UsageError, "no/x.html cannot be written: there is no folder no"),
        (["job01"], "mine.html/x", False, UsageError, "mine.html/x cannot be written: "),
        (["job01"], "x" * 300, False, UsageError, f"{'x' * 300} cannot be written: File name too long"),
    ]:
        with pytest.raises(kind) as caught:
            report(cluster, ids, output, as_json)
        assert str(caught.value).startswith(message)
        assert "\n" not in str(caught.value)
    assert own_file.read_text() == "<p>mine</p>"
    assert (tmp_path / "report-job02.html").read_text() == "mine, too"
    assert sorted(path.name for path in tmp_path.glob("*html*")) == ["mine.html", "report-job02.html"]


def test_six_jobs_can_be_compared() -> None:
    check_ids(list("abcdef"))
    check_ids([])


@pytest.mark.parametrize(("method", "why"), [("open", "No space left on device"), ("replace", "not permitted")])
def test_a_failed_write_is_one_line_and_leaves_nothing(
    cluster: ClusterClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, why: str
) -> None:
    opened = Path.open

    def fail(path: Path, *arguments: Any, **settings: Any) -> Any:
        if method == "open" and arguments != ("wb",):
            return opened(path, *arguments, **settings)
        raise OSError(1, why)

    before = set(tmp_path.iterdir())
    monkeypatch.setattr(Path, method, fail)
    with pytest.raises(UsageError, match=rf"^x.html cannot be written: {why}$"):
        report(cluster, ["job01"], "x.html", json=False)
    assert set(tmp_path.iterdir()) == before
