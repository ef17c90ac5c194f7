"""Check `fab reproduce`: a job from the bucket alone, and the comparison of both runs."""

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
from infra.scale_tiers import Role
from jobs.bucket import Bucket
from jobs.chunks import LogFilter
from jobs.folder_bucket import open_bucket
from jobs.ledger import Ledger
from jobs.queue import Queue, QueueEntry
from jobs.records import JobRecord
from jobs.states import JobState
from jobs.study import EarlierTrial
from ops.cluster.cluster import ClusterClient
from ops.cluster.ledger import existing_job
from ops.errors import DETACHED, DONE, FAILED, OpsError, UsageError
from ops.package import package
from ops.package.runtimes import RuntimeRequest
from ops.submit import compare, manifest, metrics, reproduce, runner
from ops.submit.claim import DuplicateIdError
from ops.submit.config import JobFlags, build_job
from ops.submit.submit import Submission

TINY = Path(__file__).resolve().parents[1] / "trainers" / "tiny"
POLICY = {"restartPolicy": "replica", "optionalRoles": ["evaluator"], "restartCodes": [42], "gracePeriod": 30.0}
FINAL = "Final metrics after {} steps, loss: {}, accuracy: {}"


class FakeRuns:
    """Fake the hosts: record the submissions, and set their end."""

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


def make_cluster(inventory: Inventory) -> ClusterClient:
    """Return a cluster with a bucket that needs no host."""
    return ClusterClient(inventory, object())  # type: ignore[arg-type]


@pytest.fixture
def local_inventory(inventory: Inventory, tmp_path: Path) -> Inventory:
    (tmp_path / "bucket").mkdir()
    return replace(inventory, operator_bucket=str(tmp_path / "bucket"))


def bucket_of(inventory: Inventory) -> Bucket:
    return open_bucket(inventory.operator_bucket)


@pytest.fixture
def ledger(local_inventory: Inventory) -> Ledger:
    return Ledger(open_bucket(local_inventory.operator_bucket))


@pytest.fixture
def runs(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> FakeRuns:
    fake_runs = FakeRuns(ledger)
    monkeypatch.setattr(runner, "run", fake_runs.run)
    monkeypatch.setattr(runner, "watch", fake_runs.watch)
    accuracies = {"job01": "0.9", "job01_2": "0.91"}

    def read_logs(cluster: Any, record: JobRecord, replicas: list[str], log_filter: LogFilter) -> dict[str, list[Any]]:
        assert (replicas, log_filter) == (["master-0"], LogFilter())
        if record.jobId not in accuracies:
            raise OpsError("it has no log")
        message = FINAL.format(500, "0.2", accuracies[record.jobId])
        return {"master-0": [type("Line", (), {"message": message})]}

    monkeypatch.setattr(metrics, "read_logs", read_logs)
    return fake_runs


def write_job(
    ledger: Ledger, inventory: Inventory, *args: str, job_id: str = "job01", folder: Path = TINY, **flags: Any
) -> package.Package:
    """Write a job that has run, as fab train does."""
    built = package.build(folder, "tiny.task")
    job = build_job(JobFlags(job_id, more_args=args, **flags), inventory, "tiny", built.files)
    submission = Submission(inventory, job, built, {})
    put_job(ledger, submission.record().to(JobState.PREPARING).to(JobState.RUNNING).to(JobState.SUCCEEDED))
    bucket_of(inventory).upload(f"jobs/{job_id}/package.tar.gz", built.archive)
    bucket_of(inventory).upload(f"jobs/{job_id}/manifest.json", manifest.to_json(submission.manifest()))
    return built


def test_a_job_is_reproduced_under_the_next_free_id(
    local_inventory: Inventory, ledger: Ledger, runs: FakeRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    built = write_job(ledger, local_inventory, "--a", "\udcff", "two words", labels=["owner=ann"])
    assert reproduce.reproduce(make_cluster(local_inventory), "job01", None, True, False) == DONE
    (submission,) = runs.submissions
    assert submission.job.id == "job01_2"
    assert submission.job.args == ("--a", "\udcff", "two words")
    assert (submission.job.labels, submission.job.priority) == ({"owner": "ann"}, 0)
    assert submission.package.archive == built.archive
    assert submission.package.files == built.files
    assert submission.data == {}
    assert submission.record().manifest["reproduces"] == "job01"
    assert (submission.job.use_chief, submission.job.start_hosts, submission.job.notify) == (True, False, "")
    out, err = capsys.readouterr()
    assert "a line of the log" in out, "and nothing else goes to stderr"
    assert err == ""
    lines = [line.split() for line in out.splitlines() if line]
    package_line = ["tiny", f"sha256:{built.sha256[:16]}"]
    assert lines[1:3] == [["job01", "job01_2"], ["package", *package_line, *package_line, "same"]]
    assert lines[-4:-2] == [["loss", "0.2", "0.2", "same"], ["accuracy", "0.9", "0.91", "+0.01"]]
    assert out.endswith("\n\njob01_2 differs from job01 in accuracy\n")
    put_job(ledger, JobRecord("job01_3"))
    assert reproduce.reproduce(make_cluster(local_inventory), "job01", None, True, False) == DONE
    assert runs.submissions[-1].job.id == "job01_4"


def test_of_two_reproductions_at_once_each_gets_an_id(
    local_inventory: Inventory,
    ledger: Ledger,
    runs: FakeRuns,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(cluster: Any, submission: Submission, may_wait: bool, follow: bool) -> int:
        if not ledger.queue().entries:
            ledger.change_queue(lambda queue: queue.added(QueueEntry(submission.job.id, ["master-0"])))
            put_job(ledger, JobRecord("job01_3", manifest={"reproduces": "job01"}))
            raise DuplicateIdError(submission.job.id)
        return runs.run(cluster, submission, may_wait, follow)

    write_job(ledger, local_inventory)
    monkeypatch.setattr(runner, "run", run)
    assert reproduce.reproduce(make_cluster(local_inventory), "job01", None, True, True) == DONE
    assert [submission.job.id for submission in runs.submissions] == ["job01_4"]
    assert json.loads(capsys.readouterr().out)["job"] == "job01_4"
    ledger.change_queue(lambda _: Queue([]))
    with pytest.raises(DuplicateIdError, match="job id 'again' was used before"):
        reproduce.reproduce(make_cluster(local_inventory), "job01", "again", True, True)


def test_the_packages_declaration_is_used_again(
    local_inventory: Inventory, ledger: Ledger, runs: FakeRuns, tmp_path: Path
) -> None:
    shutil.copytree(TINY, tmp_path / "tiny")
    text = "strategies: {together: {restartPolicy: all, optionalRoles: [ps]}}"
    (tmp_path / "tiny" / "scaletier.yaml").write_text(text)
    write_job(ledger, local_inventory, "--strategy", "together", folder=tmp_path / "tiny")
    reproduce.reproduce(make_cluster(local_inventory), "job01", "again", True, False)
    job = runs.submissions[0].job
    assert (job.policy["restartPolicy"], job.policy["optionalRoles"]) == ("all", ["ps"])


def test_config_is_kept_and_the_output_folder_is_new(
    local_inventory: Inventory, ledger: Ledger, runs: FakeRuns, tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("trainingInput: {useChiefInTfConfig: false, scheduling: {maxRestarts: 1}, jobDir: /bucket/shared}")
    write_job(ledger, local_inventory, "--output_path=/bucket/shared", config=str(config))
    reproduce.reproduce(make_cluster(local_inventory), "job01", "again", True, False)
    job = runs.submissions[0].job
    assert (job.id, job.use_chief, job.policy) == ("again", False, {**POLICY, "gracePeriod": 0, "maxRestarts": 1})
    output_folder = "/bucket/jobs/again/output"
    assert job.job_dir == output_folder
    assert job.args == (f"--output_path={output_folder}", "--job-dir", output_folder)
    assert job.training_input["jobDir"] == output_folder


def test_stdout_has_only_the_json(
    local_inventory: Inventory, ledger: Ledger, runs: FakeRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    write_job(ledger, local_inventory)
    assert reproduce.reproduce(make_cluster(local_inventory), "job01", None, True, True) == DONE
    out, err = capsys.readouterr()
    output = json.loads(out)
    assert (output["original"], output["job"], output["differs"]) == ("job01", "job01_2", ["accuracy"])
    rows = {row.pop("what"): row for row in output["compared"]}
    assert rows["accuracy"] == {"original": "0.9", "again": "0.91", "same": False}
    assert rows["loss"] == {"original": "0.2", "again": "0.2", "same": True}
    assert "a line of the log" in err


def test_a_value_that_one_run_lacks_is_null(capsys: pytest.CaptureFixture[str]) -> None:
    reproduce._show("a", "b", [compare.ComparedValue("auc", ["0.5", None])], True, True)
    output = json.loads(capsys.readouterr().out)
    assert output["compared"] == [{"what": "auc", "original": "0.5", "again": None, "same": False}]
    assert output["differs"] == ["auc"]


def test_equal_runs_and_runs_without_metrics_have_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [compare.ComparedValue("loss", ["0.2", "0.2"]), compare.ComparedValue(compare.SECONDS, ["1.0", "2.0"])]
    reproduce._show("a", "b", rows, True, False)
    table = "\n           a    b\nloss     0.2  0.2  same\nseconds  1.0  2.0  +1.0\n\n"
    assert capsys.readouterr().out == f"{table}b has the inputs and the results of a\n"
    reproduce._show("a", "b", rows[1:], False, False)
    verdict = "b has the inputs of a; the results were not compared, as they report no final metrics\n"
    assert capsys.readouterr().out.endswith(f"+1.0\n\n{verdict}")


def test_secrets_are_taken_from_the_environment_again(
    local_inventory: Inventory, ledger: Ledger, runs: FakeRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "hunter2")
    monkeypatch.setenv("OTHER", "x")
    write_job(ledger, local_inventory, secret=["TOKEN", "OTHER"])
    monkeypatch.setenv("TOKEN", "hunter3")
    assert reproduce.reproduce(make_cluster(local_inventory), "job01", None, True, False) == DONE
    assert runs.submissions[0].job.secrets == {"TOKEN": "hunter3", "OTHER": "x"}
    monkeypatch.delenv("TOKEN")
    message = r"^job job01 had the secret TOKEN, which nothing has kept: export TOKEN=… first$"
    with pytest.raises(UsageError, match=message):
        reproduce.reproduce(make_cluster(local_inventory), "job01", None, True, False)


def test_settings_of_the_original_are_kept(
    local_inventory: Inventory,
    ledger: Ledger,
    runs: FakeRuns,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (config := tmp_path / "config.yaml").write_text("trainingInput: {scheduling: {priority: 4}, environment: {A: b}}")
    write_job(ledger, local_inventory, config=str(config), replicas="worker=1")
    bucket, name = bucket_of(local_inventory), "jobs/job01/manifest.json"
    document = reproduce.read_manifest(bucket, "job01")
    document["config"]["scheduling"] |= {"expendable": ["worker"]}
    document["runtime"] = {"name": "mine"}
    bucket.upload(name, json.dumps(document).encode())
    runtime = RuntimeRequest("mine", ("far==1.0",), "key")
    monkeypatch.setattr(reproduce.runtimes, "from_manifest", lambda _, request: {"mine": runtime}[request["name"]])
    monkeypatch.setattr(reproduce.runtimes, "build", lambda _, runtime: {"far": "1.0"})
    monkeypatch.setattr(manifest, "_runtime", lambda *_: {"name": "mine", "key": "key", "sha256": "ab" * 32})
    capsys.readouterr()
    assert reproduce.reproduce(make_cluster(local_inventory), "job01", None, True, False) == DONE
    assert "is called" not in capsys.readouterr().err, "a manifest is not a user's to change"
    job = runs.submissions[0].job
    assert (job.priority, job.environment, job.runtime) == (4, {"A": "b"}, runtime)
    assert job.counts == {Role.MASTER: 1, Role.WORKER: 1}
    assert job.policy == {**POLICY, "gracePeriod": 0, "optionalRoles": ["worker"]}
    added = {key: job.training_input[key] for key in ("runtime", "environment", "pythonModule", "workerCount", "args")}
    assert added == {"runtime": "mine", "environment": {"A": "b"}, "pythonModule": "tiny.task", "workerCount": 1, "args": []}


def test_a_study_is_repeated_with_its_seed(local_inventory: Inventory, tmp_path: Path) -> None:
    parameter = {"parameterName": "x", "type": "INTEGER", "minValue": 1, "maxValue": 9}
    (config := tmp_path / "config.yaml").write_text(json.dumps({"trainingInput": {"hyperparameters": {"params": [parameter]}}}))
    built = package.build(TINY, "tiny.task")
    job = build_job(JobFlags("job01", config=str(config)), local_inventory, "tiny", built.files)
    assert job.study
    original = replace(job.study, earlier=[EarlierTrial({"x": "1"}, 0.5)])
    content = manifest.manifest(local_inventory, job, built)
    again = reproduce.build_job(local_inventory, content, "again", built, None, original)
    assert again.study == replace(original, jobDir="/bucket/jobs/again/output")
    assert again.job_dir_flag is None
    other = reproduce.build_job(local_inventory, content, "again", built)
    assert other.study
    assert (other.study.earlier, other.study.seed == original.seed) == ([], False)


def test_a_job_that_never_started_is_not_reproduced(local_inventory: Inventory, ledger: Ledger, runs: FakeRuns) -> None:
    put_job(ledger, JobRecord("job01").ended("", cancelled=True))
    with pytest.raises(UsageError, match=r"^job job01 is CANCELLED and never started: there is nothing to run again$"):
        reproduce.reproduce(make_cluster(local_inventory), "job01", None, True, False)
    write_job(ledger, local_inventory, job_id="job02")
    with pytest.raises(UsageError, match="job id 'job01' was used before"):
        reproduce.reproduce(make_cluster(local_inventory), "job02", "job01", True, False)


WHOLE = {
    "args": ["--a"],
    "module": "tiny.task",
    "package": {"name": "tiny", "sha256": "ab", "files": {}},
    "cluster": {"replicas": {"master": 1}},
}


@pytest.mark.parametrize(
    ("content", "complete"),
    [
        (WHOLE, True),
        ({**WHOLE, "cluster": {}}, True),
        ([], False),
        ({**WHOLE, "args": "--a"}, False),
        ({**WHOLE, "args": ["--a", 1]}, False),
        ({key: value for key, value in WHOLE.items() if key != "module"}, False),
        ({**WHOLE, "package": "tiny"}, False),
        ({**WHOLE, "package": {"name": "tiny", "sha256": "ab"}}, False),
        ({**WHOLE, "cluster": [1]}, False),
        ({**WHOLE, "cluster": {"replicas": [1]}}, False),
        ({**WHOLE, "cluster": {"replicas": {"master": "1"}}}, False),
    ],
)
def test_a_manifest_has_all_parts_of_a_job(content: object, complete: bool) -> None:
    assert reproduce._is_complete(content) is complete


def test_the_exit_code_is_that_of_the_new_run(local_inventory: Inventory, ledger: Ledger, runs: FakeRuns) -> None:
    write_job(ledger, local_inventory)
    runs.state = JobState.FAILED
    assert reproduce.reproduce(make_cluster(local_inventory), "job01", None, True, False) == FAILED


def test_a_detached_reproduction_is_continued(
    local_inventory: Inventory, ledger: Ledger, runs: FakeRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    write_job(ledger, local_inventory)
    runs.state = JobState.RUNNING
    assert reproduce.reproduce(make_cluster(local_inventory), "job01", None, True, False) == DETACHED
    assert "fab reproduce job01 --job job01_2 continues with it, and compares" in capsys.readouterr().err
    runs.state = JobState.SUCCEEDED
    assert reproduce.reproduce(make_cluster(local_inventory), "job01", "job01_2", True, False) == DONE
    assert len(runs.submissions) == 1
    assert "job01_2 differs from job01 in accuracy" in capsys.readouterr().out
    assert reproduce.reproduce(make_cluster(local_inventory), "job01", "third", False, False) == DONE
    assert "fab reproduce job01 --job third compares" in capsys.readouterr().err
    assert reproduce.reproduce(make_cluster(local_inventory), "job01", "fourth", False, True) == DONE
    assert json.loads(capsys.readouterr().out) == {"original": "job01", "job": "fourth", "differs": [], "compared": []}
    runs.state = JobState.RUNNING
    assert reproduce.reproduce(make_cluster(local_inventory), "job01", "fifth", True, True) == DETACHED
    assert json.loads(capsys.readouterr().out)["job"] == "fifth"


def test_another_cluster_and_a_running_original_are_noted(
    local_inventory: Inventory, standard: Inventory, ledger: Ledger, runs: FakeRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    write_job(ledger, replace(standard, operator_bucket=local_inventory.operator_bucket))
    put_job(ledger, JobRecord("job01", state=JobState.RUNNING))
    reproduce.reproduce(make_cluster(local_inventory), "job01", None, True, False)
    err = capsys.readouterr().err.splitlines()
    assert "job01 is RUNNING: it has no results yet to compare with" in err
    (line,) = [line for line in err if "another cluster" in line]
    roles = "1 ps (n1-standard-4), 1 master (n1-highcpu-8), 2 worker (n1-highcpu-8), 1 evaluator (n1-highcpu-8)"
    assert line == f"job01 ran on another cluster: STANDARD_1: {roles} - now it is CUSTOM: {roles}"
    assert runs.submissions[0].job.training_input["scaleTier"] == "CUSTOM"


@pytest.mark.parametrize(
    ("damage", "new_id", "message", "kind"),
    [
        (lambda bucket: None, "9lives", "job id '9lives' breaks the rule", UsageError),
        (lambda bucket: None, "", "job id '' breaks the rule", UsageError),
        (lambda bucket: None, "job01", "job id 'job01' was used before", DuplicateIdError),
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
    local_inventory: Inventory,
    ledger: Ledger,
    runs: FakeRuns,
    damage: Callable[[Any], None],
    new_id: str | None,
    message: str,
    kind: type[OpsError],
) -> None:
    write_job(ledger, local_inventory)
    damage(bucket_of(local_inventory))
    with pytest.raises(OpsError, match=message) as error:
        reproduce.reproduce(make_cluster(local_inventory), "job01", new_id, True, False)
    assert type(error.value) is kind
    assert "\n" not in str(error.value)
    assert runs.submissions == []


def test_a_package_is_not_limited_like_a_record(
    local_inventory: Inventory, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, bucket = write_job(ledger, local_inventory), bucket_of(local_inventory)
    refuse_packages_as_records(monkeypatch)
    assert reproduce.read_package(bucket, "job01", reproduce.read_manifest(bucket, "job01")).files == built.files


def test_a_job_without_manifest_or_package_is_refused(
    local_inventory: Inventory, ledger: Ledger, runs: FakeRuns, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="there is no job 'job01'; none was started yet"):
        reproduce.reproduce(make_cluster(local_inventory), "job01", None, True, False)
    put_job(ledger, JobRecord("job01"))
    with pytest.raises(UsageError, match="job job01 has no manifest, so it cannot be run from the bucket alone"):
        reproduce.reproduce(make_cluster(local_inventory), "job01", None, True, False)
    write_job(ledger, local_inventory)
    (tmp_path / "bucket/jobs/job01/package.tar.gz").unlink()
    with pytest.raises(OpsError, match="the package of job01 is no longer in the bucket"):
        reproduce.reproduce(make_cluster(local_inventory), "job01", None, True, False)
