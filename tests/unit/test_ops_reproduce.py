"""`fab reproduce`: a job out of the bucket alone, and what two runs have in common."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from opsdata import put_job, refuse_packages_as_records

from infra.inventory import Inventory
from jobs.bucket import Bucket
from jobs.chunks import LogFilter
from jobs.folder import open_bucket
from jobs.ledger import Ledger
from jobs.records import JobRecord
from jobs.states import JobState
from ops.cluster.cluster import ClusterClient
from ops.cluster.ledger import existing_job
from ops.errors import DETACHED, DONE, FAILED, OpsError, UsageError
from ops.package import package
from ops.submit import manifest, metrics, reproduce, train
from ops.submit.config import JobFlags, build_job
from ops.submit.submit import Submission

TINY = Path(__file__).resolve().parents[1] / "trainers" / "tiny"
POLICY = {"restartPolicy": "replica", "optionalRoles": ["evaluator"], "restartCodes": [42], "gracePeriod": 30.0}
FINAL = "Final metrics after {} steps, loss: {}, accuracy: {}"


class Runs:
    """A fake of the hosts: records the submissions, and sets their end."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.submissions, self.state = ledger, list[Submission](), JobState.SUCCEEDED

    def run(self, cluster: Any, submission: Submission, may_wait: bool, follow: bool) -> int:
        self.submissions.append(submission)
        put_job(self.ledger, submission.record().to(JobState.PREPARING))
        return self.watch(cluster, submission.record()) if follow else DONE

    def watch(self, cluster: Any, job: JobRecord) -> int:
        print("a line of the log")
        record = existing_job(self.ledger, job.jobId)
        if not self.state.final:
            return DETACHED
        put_job(self.ledger, record if record.final else record.to(JobState.RUNNING).to(self.state))
        return DONE if self.state == JobState.SUCCEEDED else FAILED


def on(inventory: Inventory) -> ClusterClient:
    """Return a cluster with a bucket that needs no host to be reached."""
    return ClusterClient(inventory, object())  # type: ignore[arg-type]


@pytest.fixture
def here(inventory: Inventory, tmp_path: Path) -> Inventory:
    (tmp_path / "bucket").mkdir()
    return replace(inventory, operator_bucket=str(tmp_path / "bucket"))


def bucket_of(inventory: Inventory) -> Bucket:
    return open_bucket(inventory.operator_bucket)


@pytest.fixture
def ledger(here: Inventory) -> Ledger:
    return Ledger(open_bucket(here.operator_bucket))


@pytest.fixture
def runs(here: Inventory, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> Runs:
    made = Runs(ledger)
    monkeypatch.setattr(train, "run", made.run)
    monkeypatch.setattr(train, "watch", made.watch)
    accuracies = {"job01": "0.9", "job01_2": "0.91"}

    def read_logs(cluster: Any, record: JobRecord, replicas: list[str], wanted: LogFilter) -> dict[str, list[Any]]:
        assert (replicas, wanted) == (["master-0"], LogFilter())
        if record.jobId not in accuracies:
            raise OpsError("it has no log")
        message = FINAL.format(500, "0.2", accuracies[record.jobId])
        return {"master-0": [type("Line", (), {"message": message})]}

    monkeypatch.setattr(metrics, "read_logs", read_logs)
    return made


def start(
    ledger: Ledger, inventory: Inventory, *args: str, job_id: str = "job01", folder: Path = TINY, **flags: Any
) -> package.Package:
    """Write a job that was run, as fab train leaves it."""
    built = package.build(folder, "tiny.task")
    job = build_job(JobFlags(job_id, more_args=args, **flags), inventory, "tiny", built.files)
    made = Submission(inventory, job, built, {})
    put_job(ledger, made.record().to(JobState.PREPARING).to(JobState.RUNNING).to(JobState.SUCCEEDED))
    bucket_of(inventory).upload(f"jobs/{job_id}/package.tar.gz", built.archive)
    bucket_of(inventory).upload(f"jobs/{job_id}/manifest.json", manifest.to_json(made.manifest()))
    return built


def test_the_same_job_runs_again_under_the_next_free_id(
    here: Inventory, ledger: Ledger, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    built = start(ledger, here, "--a", "\udcff", "two words", labels=["owner=ann"])
    assert reproduce.reproduce(on(here), "job01", None, True, False) == DONE
    (made,) = runs.submissions
    assert made.job.id == "job01_2"
    assert made.job.args == ("--a", "\udcff", "two words")
    assert (made.job.labels, made.job.priority) == ({"owner": "ann"}, 0)
    assert made.package.archive == built.archive
    assert made.package.files == built.files
    assert made.data == {}
    assert made.record().manifest["reproduces"] == "job01"
    out = capsys.readouterr().out
    assert "accuracy" in out
    assert "+0.01" in out
    assert out.endswith("job01_2 differs from job01 in accuracy\n")
    put_job(ledger, JobRecord("job01_3"))
    assert reproduce.reproduce(on(here), "job01", None, True, False) == DONE
    assert runs.submissions[-1].job.id == "job01_4"


def test_what_the_package_declares_counts_again(here: Inventory, ledger: Ledger, runs: Runs, tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "tiny")
    text = "strategies: {together: {restartPolicy: all, optionalRoles: [ps]}}"
    (tmp_path / "tiny" / "scaletier.yaml").write_text(text)
    start(ledger, here, "--strategy", "together", folder=tmp_path / "tiny")
    reproduce.reproduce(on(here), "job01", "again", True, False)
    made = runs.submissions[0].job
    assert (made.policy["restartPolicy"], made.policy["optionalRoles"]) == ("all", ["ps"])


def test_config_and_output_folder(here: Inventory, ledger: Ledger, runs: Runs, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("trainingInput: {useChiefInTfConfig: false, scheduling: {maxRestarts: 1}, jobDir: /bucket/shared}")
    start(ledger, here, "--output_path=/bucket/shared", config=str(config))
    reproduce.reproduce(on(here), "job01", "again", True, False)
    made = runs.submissions[0].job
    assert (made.id, made.use_chief, made.policy) == ("again", False, {**POLICY, "gracePeriod": 0, "maxRestarts": 1})
    own = "/bucket/jobs/again/output"
    assert made.job_dir == own
    assert made.args == (f"--output_path={own}", "--job-dir", own)
    assert made.training_input["jobDir"] == own


def test_json_is_alone_on_stdout(here: Inventory, ledger: Ledger, runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    start(ledger, here)
    assert reproduce.reproduce(on(here), "job01", None, True, True) == DONE
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert (told["original"], told["job"], told["differs"]) == ("job01", "job01_2", ["accuracy"])
    accuracy = next(row for row in told["compared"] if row["what"] == "accuracy")
    assert accuracy == {"what": "accuracy", "original": "0.9", "again": "0.91", "same": False}
    assert "a line of the log" in err


def test_the_exit_code_is_that_of_the_new_run(here: Inventory, ledger: Ledger, runs: Runs) -> None:
    start(ledger, here)
    runs.state = JobState.FAILED
    assert reproduce.reproduce(on(here), "job01", None, True, False) == FAILED


def test_one_that_was_left_is_come_back_to(
    here: Inventory, ledger: Ledger, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    start(ledger, here)
    runs.state = JobState.RUNNING
    assert reproduce.reproduce(on(here), "job01", None, True, False) == DETACHED
    assert "fab reproduce job01 --job job01_2 continues with it, and compares" in capsys.readouterr().err
    runs.state = JobState.SUCCEEDED
    assert reproduce.reproduce(on(here), "job01", "job01_2", True, False) == DONE
    assert len(runs.submissions) == 1
    assert "job01_2 differs from job01 in accuracy" in capsys.readouterr().out
    assert reproduce.reproduce(on(here), "job01", "third", False, False) == DONE
    assert "fab reproduce job01 --job third compares" in capsys.readouterr().err


def test_another_cluster_and_an_original_that_runs_are_said(
    here: Inventory, standard: Inventory, ledger: Ledger, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    start(ledger, replace(standard, operator_bucket=here.operator_bucket))
    put_job(ledger, JobRecord("job01", state=JobState.RUNNING))
    reproduce.reproduce(on(here), "job01", None, True, False)
    err = capsys.readouterr().err.splitlines()
    assert "job01 is RUNNING: it has no results yet to compare with" in err
    (line,) = [line for line in err if "another cluster" in line]
    assert "STANDARD_1: 1 ps" in line
    assert "now it is CUSTOM: 1 ps" in line
    assert runs.submissions[0].job.training_input["scaleTier"] == "CUSTOM"


@pytest.mark.parametrize(
    ("change", "new", "says", "kind"),
    [
        (lambda bucket: None, "9lives", "job id '9lives' breaks the rule", UsageError),
        (lambda bucket: None, "job01", "job id 'job01' was used before", UsageError),
        (lambda bucket: bucket.upload("jobs/job01/package.tar.gz", b"x"), None, "the package of job01 is damaged", OpsError),
        (lambda bucket: bucket.upload("jobs/job01/manifest.json", b"{"), None, "the manifest of job01 is no JSON", OpsError),
        (
            lambda bucket: bucket.upload("jobs/job01/manifest.json", b'{"package": "x"}'),
            None,
            "of an older version",
            UsageError,
        ),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(
    here: Inventory, ledger: Ledger, runs: Runs, change: Callable[[Any], None], new: str | None, says: str, kind: type[OpsError]
) -> None:
    start(ledger, here)
    change(bucket_of(here))
    with pytest.raises(OpsError, match=says) as error:
        reproduce.reproduce(on(here), "job01", new, True, False)
    assert type(error.value) is kind
    assert "\n" not in str(error.value)
    assert runs.submissions == []


def test_a_package_of_any_size_is_fetched(here: Inventory, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    built, bucket = start(ledger, here), bucket_of(here)
    refuse_packages_as_records(monkeypatch)
    assert reproduce.read_package(bucket, "job01", reproduce.read_manifest(bucket, "job01")).files == built.files


def test_jobs_without_manifest_or_package(here: Inventory, ledger: Ledger, runs: Runs, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no job 'job01'; none was started yet"):
        reproduce.reproduce(on(here), "job01", None, True, False)
    put_job(ledger, JobRecord("job01"))
    with pytest.raises(UsageError, match="job job01 has no manifest, so it cannot be run from the bucket alone"):
        reproduce.reproduce(on(here), "job01", None, True, False)
    start(ledger, here)
    (tmp_path / "bucket/jobs/job01/package.tar.gz").unlink()
    with pytest.raises(OpsError, match="the package of job01 is no longer in the bucket"):
        reproduce.reproduce(on(here), "job01", None, True, False)
