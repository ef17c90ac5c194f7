"""Trials from the bucket: each runs once to its end on any replica, despite failures of others."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import limit

from hosts.agent.launcher_client import SOCKET_VARIABLE, Launcher
from hosts.agent.process import HostBusyError
from hosts.tuner import run
from hosts.tuner.measure import TrialMetrics
from hosts.tuner.process import TrialUnit
from hosts.tuner.run import Tuner, _reports_folder, last_log_line
from hosts.tuner.suggest import suggest
from jobs.bucket import BucketError, Conflict, Item
from jobs.chunks import Chunk
from jobs.folder_bucket import FolderBucket
from jobs.ledger import Ledger, Trials
from jobs.records import HostConfig, JobRecord, Plan, Task
from jobs.states import JobState
from jobs.study import Measurement, Parameter, ParameterType, Study, Trial, TrialState
from ops.screen.trials import TrialScreen

STUDY = Study(
    [Parameter("x", ParameterType.INTEGER, 1, 100)],
    hyperparameterMetricTag="score",
    maxTrials=4,
    maxFailedTrials=2,
    jobDirFlag="--job-dir",
)
TF_CONFIG = '{"cluster": {"chief": ["10.0.0.2:2222"]}, "task": {"type": "chief", "index": 0}}'


class Child(TrialUnit):
    """A trial that reports at each poll, and ends with a code."""

    out_of_memory = False
    terminated = 0

    def __init__(self, looks: Sequence[Callable[[], None]] = (), code: int = 0) -> None:
        self.looks, self.code, self.stopped = list(looks), code, False

    def wait(self, _: float) -> int | None:
        if not self.looks:
            return self.code
        self.looks.pop(0)()
        return None

    def terminate(self, _: float) -> None:
        self.terminated += 1

    def stop(self, _: float) -> None:
        self.stopped, self.looks = True, []


def report(environment: Mapping[str, str], step: int, value: float, tag: str = "score") -> None:
    """Report a metric like cloudml-hypertune."""
    line = {"timestamp": step, "trial": environment["CLOUD_ML_TRIAL_ID"], tag: str(value), "global_step": str(step)}
    with Path(environment["CLOUD_ML_HP_METRIC_FILE"]).open("a") as file:
        file.write(json.dumps({**line, "checkpoint_path": ""}) + "\n")


class TuningWorld:
    """A bucket with a tuning job and its replicas."""

    def __init__(self, folder: Path, study: Study = STUDY) -> None:
        self.ledger = Ledger(FolderBucket(folder))
        self.study = replace(study, jobDir=f"{folder}/output")
        names = ["master-0", "worker-0"]
        self.plan = Plan("job01", names, "mine.task", ["--steps", "9"], {}, study=self.study, maxRestarts=2)
        self.job = self.ledger.create_job(JobRecord("job01", state=JobState.RUNNING))
        self.spawned: list[tuple[str, list[str], Mapping[str, str]]] = []
        self.child: Callable[[str, Mapping[str, str]], Child] = self.report_and_exit

    def report_and_exit(self, _: str, environment: Mapping[str, str]) -> Child:
        return Child([lambda: report(environment, 10, float(environment["CLOUD_ML_TRIAL_ID"]))])

    def tuner(self, name: str, ledger: Ledger | None = None) -> Tuner:
        def spawn(argv: Sequence[str], environment: Mapping[str, str]) -> Child:
            self.spawned.append((name, list(argv), environment))
            return self.child(name, environment)

        host = HostConfig(name, "", 0.01, "/venv/python")
        scratch = Path(tempfile.gettempdir())
        return Tuner(ledger or self.ledger, self.plan, self.study, name, host, suggest, spawn, scratch, lambda: "oh")

    def trials(self) -> list[Trial]:
        return Trials(self.ledger, "job01").read()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TuningWorld:
    monkeypatch.setenv("TF_CONFIG", TF_CONFIG)
    return TuningWorld(tmp_path)


def test_deep_folders_of_a_trial_do_not_end_the_tuner(world: TuningWorld) -> None:
    scratch: list[Path] = []

    def leave_deep_folders(name: str, environment: Mapping[str, str]) -> Child:
        scratch.append(Path(environment["CLOUD_ML_HP_METRIC_FILE"]).parent)
        subprocess.run(["mkdir", "-p", scratch[-1] / "/".join("d" * 1200)], check=True)
        return world.report_and_exit(name, environment)

    world.child = leave_deep_folders
    try:
        assert world.tuner("master-0").run() == 0
        assert len(scratch) == 4
        assert not [each for each in scratch if each.exists()]
    finally:
        subprocess.run(["rm", "-rf", *scratch], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_a_folder_of_the_trial_s_own_does_not_end_the_tuner() -> None:
    above = Path(tempfile.mkdtemp())
    above.chmod(0o777)
    try:
        os.seteuid(65534)
        with _reports_folder(above) as folder:
            assert oct(folder.stat().st_mode & 0o777) == "0o770"
            os.seteuid(0)
            (folder / "own").mkdir(0o700)
            (folder / "own/file").touch()
            (folder / "told").touch()
            os.seteuid(65534)
        os.seteuid(0)
        assert [path.name for path in folder.iterdir()] == ["own"]
    finally:
        os.seteuid(0)
        shutil.rmtree(above)


def test_all_trials_run_and_the_chief_prints_the_best(world: TuningWorld, capsys: pytest.CaptureFixture[str]) -> None:
    assert world.tuner("master-0").run() == 0
    trials = world.trials()
    assert [(trial.trialId, trial.state, trial.replica) for trial in trials] == [
        (number, TrialState.SUCCEEDED, "master-0") for number in (1, 2, 3, 4)
    ]
    assert [trial.finalMetric for trial in trials] == [Measurement(10, float(number)) for number in (1, 2, 3, 4)]
    lines = capsys.readouterr().out.splitlines()
    x = trials[3].hyperparameters["x"]
    assert lines[-2:] == [f"Trials: 4 done, 0 FAILED; best is trial 4: --x={x}", "Final metrics after 10 steps, score: 4"]


def test_a_trial_gets_the_arguments_of_cloud_ml(world: TuningWorld, tmp_path: Path) -> None:
    world.tuner("master-0").run()
    _, argv, environment = world.spawned[1]
    x = world.trials()[1].hyperparameters["x"]
    folder = f"{tmp_path}/output/2"
    assert argv == ["/venv/python", "-m", "mine.task", "--steps", "9", "--job-dir", folder, f"--x={x}"]
    assert environment["CLOUD_ML_TRIAL_ID"] == "2"
    assert environment["CLOUD_ML_HP_METRIC_TAG"] == "score"
    assert environment["JOB_DIR"] == folder
    assert Path(folder).is_dir()
    assert json.loads(environment["TF_CONFIG"]) == {
        "cluster": {"chief": ["10.0.0.2:2222"]},
        "task": {"type": "chief", "index": 0, "trial": "2"},
    }


def test_a_program_may_decline_the_job_dir_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    world = TuningWorld(tmp_path, replace(STUDY, jobDirFlag="", maxTrials=1))
    world.plan = replace(world.plan, command=["./run.sh"], python="/own/python")
    world.tuner("master-0").run()
    assert world.spawned[0][1] == ["./run.sh", "--steps", "9", f"--x={world.trials()[0].hyperparameters['x']}"]


def test_several_replicas_run_each_trial_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", TF_CONFIG)
    world = TuningWorld(tmp_path, replace(STUDY, maxTrials=24))
    codes: dict[str, int] = {}
    names = ["master-0", *(f"worker-{number}" for number in range(5))]
    world.plan = replace(world.plan, replicas=names)
    threads = [threading.Thread(target=lambda n=name: codes.update({n: world.tuner(n).run()})) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit())
    assert codes == dict.fromkeys(names, 0)
    assert sorted(environment["CLOUD_ML_TRIAL_ID"] for _, _, environment in world.spawned) == sorted(map(str, range(1, 25)))
    assert [trial.state for trial in world.trials()] == [TrialState.SUCCEEDED] * 24


def test_a_trial_of_a_lost_replica_is_run_again(world: TuningWorld) -> None:
    abandoned = world.ledger.create_trial("job01", Trial(1, {"x": "7"}, "worker-0"))
    tuner = world.tuner("master-0")
    assert abandoned.record.trialId == 1
    assert tuner._claim(tuner._trials.read()) is not None, "worker-0 is alive: run the next trial"
    assert [trial.replica for trial in world.trials()] == ["worker-0", "master-0"]
    record = replace(world.job.record, lostReplicas=["worker-0"])
    world.ledger.change_job(world.job, record)
    assert world.tuner("master-0").run() == 0
    first = world.trials()[0]
    assert (first.replica, first.restarts, first.state) == ("master-0", 1, TrialState.SUCCEEDED)
    assert len(world.trials()) == 4


def test_a_restarted_replica_continues_its_own_trial(
    world: TuningWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "output/1"
    world.ledger.create_trial("job01", Trial(1, {"x": "7"}, "worker-0"))
    for restarts in (1, 2):  # the second time the folder exists
        tuner = world.tuner("worker-0")
        claimed = tuner._claim(tuner._trials.read())
        assert (claimed.record.restarts, claimed.record.host, folder.is_dir()) == (restarts, "worker-0", True)
        assert tuner._claim([claimed.record]) == claimed, "it has that trial"
    tuner._run(claimed)
    assert world.spawned[0][1][-1] == "--x=7"
    assert world.trials()[0].restarts == 2
    assert capsys.readouterr().out == "Trial 1 of 4, again (2 of 2): --x=7\nTrial 1 SUCCEEDED: score 1 at step 10\n"


@pytest.mark.parametrize("reports", [True, False])
def test_a_reassigned_trial_is_dropped_by_its_former_replica(
    world: TuningWorld, reports: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A host was unreachable: its reports of the trial are ignored, and without reports it checks the record."""
    world.plan = replace(world.plan, heartbeatSeconds=3600.0 if reports else 0.0)
    children: list[Child] = []

    def lose_trial(_: str, environment: Mapping[str, str]) -> Child:
        def take() -> None:
            stored = world.ledger.trial("job01", 1)
            world.ledger.change_trial("job01", stored, replace(stored.record, replica="master-0", restarts=1))
            if reports:
                report(environment, 1, 0.5)

        children.append(Child([take, lambda: None, lambda: None]))
        return children[-1]

    world.child = lose_trial
    tuner = world.tuner("worker-0")
    claimed = tuner._claim([])
    assert claimed
    tuner._run(claimed)
    assert children[0].stopped
    assert capsys.readouterr().out.splitlines()[1:] == ["Trial 1 is run by another replica or restart now"]
    first = world.trials()[0]
    assert (first.replica, first.state, first.allMetrics) == ("master-0", TrialState.RUNNING, [])


@pytest.mark.parametrize(
    ("code", "value", "reason"),
    [
        (3, 1.0, "it ended with status 3: oh"),
        (255, 1.0, "it ended with status 255: oh"),
        (0, float("nan"), "its last score was nan"),
        (0, None, "it reported no score (hyperparameterMetricTag)"),
    ],
)
def test_too_many_failed_trials_end_the_job(
    world: TuningWorld, code: int, value: float | None, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_badly(_: str, environment: Mapping[str, str]) -> Child:
        return Child([lambda: report(environment, 1, value) if value is not None else None], code)

    world.child = run_badly
    assert world.tuner("master-0").run() == 1
    trials = world.trials()
    assert [trial.state for trial in trials] == [TrialState.FAILED] * 2
    assert all(trial.errorMessage.startswith(reason) for trial in trials)
    x, why = trials[1].hyperparameters["x"], trials[1].errorMessage
    assert capsys.readouterr().err.splitlines() == [
        f"error: trial 1 FAILED: {trials[0].errorMessage}",
        f"error: trial 2 FAILED: {why}",
        f"error: 2 of 2 trials FAILED, and maxFailedTrials is 2; trial 2 (--x={x}): {why}",
    ]


def test_a_study_without_a_result_fails(world: TuningWorld, capsys: pytest.CaptureFixture[str]) -> None:
    world.study = replace(world.study, maxTrials=2, maxFailedTrials=3)
    world.child = lambda *_: Child([], 3)
    assert world.tuner("worker-0").run() == 1
    assert capsys.readouterr().err.splitlines()[-1] == "error: no trial reported a value of score"


@pytest.mark.parametrize(
    "error", [FileNotFoundError(2, "No such file or directory", "python"), ValueError("embedded null byte")]
)
def test_a_program_that_cannot_be_started_fails_its_trial(world: TuningWorld, error: Exception) -> None:
    def fail(*_: object) -> Child:
        raise error

    world.child = fail
    assert world.tuner("master-0").run() == 1
    assert [(trial.state, trial.errorMessage) for trial in world.trials()] == [
        (TrialState.FAILED, f"its program cannot be started: {error}")
    ] * 2


def test_a_trial_gets_the_variables_of_its_task(world: TuningWorld, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Secrets are not expanded, and a variable that the agent withholds is not set."""
    monkeypatch.setenv("MODEL", "${JOB_DIR}/model of ${TYPE}")
    monkeypatch.setenv("SECRET", "${JOB_DIR}")
    monkeypatch.setenv("TYPE", "worker")
    task = Task("{}", {"MODEL": "…", "WITHHELD": "…"})
    world.plan = replace(world.plan, tasks={"master-0": task}, args=["--out=${JOB_DIR}"])
    world.tuner("master-0").run()
    _, argv, environment = world.spawned[0]
    assert "--out=" + environment["JOB_DIR"] in argv
    assert environment["MODEL"] == f"{tmp_path}/output/1/model of worker"
    assert environment["SECRET"] == "${JOB_DIR}"
    assert "WITHHELD" not in environment


def test_the_last_line_of_a_program_is_the_error(tmp_path: Path) -> None:
    log = tmp_path / "job01"
    assert last_log_line(log) == ""
    log_lines = [
        *(("INFO", "step 1"), ("ERROR", "the first"), ("CRITICAL", f"  ValueError: no such thing{'!' * 300}  ")),
        *(("INFO", "bye"), ("INFO", " ")),
    ]
    log.mkdir()
    chunk = log / Chunk(1769860800, 0, 0, 0).name
    chunk.write_text("".join(json.dumps({"severity": severity, "message": text}) + "\n" for severity, text in log_lines))
    assert last_log_line(log) == f"ValueError: no such thing{'!' * 275}"
    chunk.write_text('{"severity": "INFO", "message": "bye"}\n{"severity": "ERROR", "message": ""}\nno JSON\n')
    assert last_log_line(log) == "bye"


def test_the_error_of_a_wrong_tag_names_the_reported_metrics(world: TuningWorld) -> None:
    world.child = lambda _, environment: Child([lambda: report(environment, 1, 0.5, "accuracy")])
    world.tuner("master-0").run()
    assert "it reported no score (hyperparameterMetricTag); it reported accuracy: " in world.trials()[0].errorMessage


def test_a_killed_trial_restarts_a_limited_number_of_times(world: TuningWorld) -> None:
    codes = iter([-9, 42, 0, 0, 0, 0])

    def run_until_killed(_: str, environment: Mapping[str, str]) -> Child:
        code = next(codes)
        return Child([] if code else [lambda: report(environment, 1, 0.5)], code)

    world.child = run_until_killed
    assert world.tuner("master-0").run() == 0
    assert [(trial.state, trial.restarts) for trial in world.trials()][:2] == [
        (TrialState.SUCCEEDED, 2),
        (TrialState.SUCCEEDED, 0),
    ]


@pytest.mark.parametrize("polled", [True, False])
@pytest.mark.parametrize(
    ("reports", "metrics_json", "expected"),
    [
        ({}, None, {1: 0.1, 2: 0.2, 3: 0.3}),
        ({2: 0.7, 4: 0.8}, None, {1: 0.1, 2: 0.7, 4: 0.8}),
        ({}, '{"steps": 9, "score": 0.9}', {1: 0.1, 2: 0.2, 3: 0.3, 9: 0.9}),
    ],
)
def test_a_restarted_trial_keeps_its_measurements(
    world: TuningWorld,
    tmp_path: Path,
    reports: Mapping[int, float],
    metrics_json: str | None,
    expected: Mapping[int, float],
    polled: bool,
) -> None:
    """A run that resumes may have nothing left to report; the reports just before its restart count, too."""
    values = iter([{1: 0.1, 2: 0.2, 3: 0.3}, reports])
    codes = iter([-9, 0])

    def child(_: str, environment: Mapping[str, str]) -> Child:
        def write() -> None:
            for step, value in next(values).items():
                report(environment, step, value)

        code = next(codes)
        if code == 0 and metrics_json:
            (tmp_path / "output/1/metrics.json").write_text(metrics_json)
        if polled:
            return Child([write], code)
        write()
        return Child([], code)

    world.study = replace(world.study, maxTrials=1)
    world.child = child
    assert world.tuner("master-0").run() == 0
    (trial,) = world.trials()
    assert (trial.state, trial.restarts) == (TrialState.SUCCEEDED, 1)
    assert trial.allMetrics == [Measurement(step, value) for step, value in expected.items()]
    assert trial.finalMetric == trial.allMetrics[-1]


@pytest.mark.parametrize(
    ("out_of_memory", "restarts", "reason"), [(False, 2, "signal 9 (SIGKILL)"), (True, 0, "out of memory")]
)
def test_a_repeatedly_killed_or_out_of_memory_trial_fails(
    world: TuningWorld, out_of_memory: bool, restarts: int, reason: str
) -> None:
    child = Child([], -9)
    child.out_of_memory = out_of_memory
    world.child = lambda *_: child
    assert world.tuner("master-0").run() == 1
    assert [(trial.state, trial.restarts) for trial in world.trials()] == [(TrialState.FAILED, restarts)] * 2
    assert reason in world.trials()[0].errorMessage


def test_a_trial_that_kills_its_host_starts_a_limited_number_of_times(world: TuningWorld) -> None:
    world.ledger.create_trial("job01", Trial(1, {"x": "7"}, "master-0", restarts=2))
    world.tuner("master-0").run()
    assert world.trials()[0].state is TrialState.FAILED
    assert "3 times" in world.trials()[0].errorMessage


def test_a_lagging_trial_is_stopped_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TF_CONFIG", TF_CONFIG)
    world = TuningWorld(tmp_path, replace(STUDY, maxTrials=6, enableTrialEarlyStopping=True))
    children: list[Child] = []

    def child(_: str, environment: Mapping[str, str]) -> Child:
        value = 0.1 if environment["CLOUD_ML_TRIAL_ID"] == "6" else 0.9
        looks = [lambda step=step: report(environment, step, value) for step in (1, 2, 3)]
        children.append(Child(looks))
        return children[-1]

    world.child = child
    assert world.tuner("master-0").run() == 0
    assert [trial.isTrialStoppedEarly for trial in world.trials()] == [False] * 5 + [True]
    assert [each.stopped for each in children] == [False] * 5 + [True]
    last = world.trials()[5]
    assert (last.state, last.finalMetric) == (TrialState.SUCCEEDED, Measurement(1, 0.1))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3] == "Trial 6 SUCCEEDED: score 0.1 at step 1, stopped early"
    assert lines[-2].startswith("Trials: 6 done, 0 FAILED, 1 stopped early; best is trial 1: --x=")


def test_no_trial_is_claimed_while_one_that_was_given_up_runs(world: TuningWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's launcher would not start another one."""
    monkeypatch.setattr(world, "study", replace(world.study, enableTrialEarlyStopping=True))
    monkeypatch.setattr(run, "should_stop", lambda *_: True)
    claims: list[int] = []

    class Stuck(Child):
        def stop(self, _: float) -> None:
            self.stopped, self.looks = True, [lambda: claims.append(len(world.trials()))] * 3

    def child(name: str, environment: Mapping[str, str]) -> Child:
        looks = [lambda: report(environment, 1, 0.5)]
        return Child() if len(world.spawned) > 1 else Stuck(looks)

    world.child = child
    assert world.tuner("master-0").run() == 1
    assert claims == [1, 1, 1]
    assert world.trials()[0].state is TrialState.SUCCEEDED


@pytest.mark.parametrize("stopped", [False, True])
def test_a_trial_waits_for_an_earlier_program(world: TuningWorld, capsys: pytest.CaptureFixture[str], stopped: bool) -> None:
    def child(name: str, environment: Mapping[str, str]) -> Child:
        if len(world.spawned) <= 3:
            if stopped and len(world.spawned) == 3:
                tuner.terminate()
            raise HostBusyError("an earlier program has not ended")
        return world.report_and_exit(name, environment)

    world.child = child
    tuner = world.tuner("master-0")
    assert tuner.run() == (143 if stopped else 0)
    states = [TrialState.RUNNING] if stopped else [TrialState.SUCCEEDED] * 4
    assert [(trial.state, trial.restarts) for trial in world.trials()] == [(state, 0) for state in states]
    assert capsys.readouterr().err == "Trial 1 waits to start: an earlier program has not ended\n"


def test_early_stopping_is_checked_again_after_an_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    monkeypatch.setenv("TF_CONFIG", TF_CONFIG)
    monkeypatch.setattr(run, "should_stop", lambda *_: True)
    world = TuningWorld(tmp_path, replace(STUDY, enableTrialEarlyStopping=True))
    reads = iter([BucketError("away"), []])

    def read() -> Any:
        if isinstance(answer := next(reads), BucketError):
            raise answer
        return answer

    def child(_: str, environment: Mapping[str, str]) -> Child:
        children.append(Child([lambda: report(environment, 1, 0.1), lambda: None]))
        return children[-1]

    children: list[Child] = []
    world.child = child
    tuner = world.tuner("master-0")
    claimed = tuner._claim([])
    assert claimed is not None
    monkeypatch.setattr(tuner._trials, "read", read)
    tuner._run(claimed)
    assert children[0].stopped
    assert [trial.isTrialStoppedEarly for trial in world.trials()] == [True]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the tuner's time, which stands still."""
    time_now = [1000.0]
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: time_now[0]))
    return time_now


@pytest.mark.parametrize("early", [False, True])
def test_summaries_are_read_now_and_then_for_early_stopping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: list[float], early: bool
) -> None:
    """TensorBoard's reader takes long. A trial that reports in no other way is stopped by its summaries, too."""
    world = TuningWorld(tmp_path, replace(STUDY, enableTrialEarlyStopping=early))
    looks: list[float] = []

    class Summaries(TrialMetrics):
        def read_evaluations(self) -> list[Measurement]:
            looks.append(clock[0])
            return [Measurement(len(looks), 0.1)]

    def second() -> None:
        clock[0] += 1

    monkeypatch.setattr(run, "TrialMetrics", Summaries)
    monkeypatch.setattr(run, "should_stop", lambda *_: len(looks) == 2)
    child = Child([second] * 12)
    world.child = lambda *_: child
    tuner = world.tuner("master-0")
    claimed = tuner._claim([])
    assert claimed is not None
    tuner._run(claimed)
    (trial,) = world.trials()
    if early:
        assert (looks, child.stopped) == ([1005, 1010], True)
        assert (trial.state, trial.finalMetric) == (TrialState.SUCCEEDED, Measurement(2, 0.1))
    else:
        assert (looks, child.stopped, trial.state) == ([], False, TrialState.FAILED)
    assert trial.isTrialStoppedEarly == early


@pytest.mark.parametrize("terminating", [False, True])
def test_the_record_is_written_with_news_and_read_at_each_heartbeat(
    world: TuningWorld, monkeypatch: pytest.MonkeyPatch, clock: list[float], terminating: bool
) -> None:
    """A trial that is being terminated neither reports nor is checked."""
    environments: list[Mapping[str, str]] = []
    calls: list[tuple[str, float]] = []

    def second(step: int | None = None) -> None:
        clock[0] += 1
        if step:
            report(environments[0], step, step / 10)

    def child(_: str, environment: Mapping[str, str]) -> Child:
        environments.append(environment)
        calls.clear()
        if terminating:
            tuner.terminate()
        return Child([lambda: second(1), *[second] * 5, lambda: second(2), *[second] * 11])

    def record_calls(name: str) -> None:
        original = getattr(Ledger, name)
        monkeypatch.setattr(Ledger, name, lambda *given: calls.append((name, clock[0])) or original(*given))

    record_calls("trial")
    record_calls("change_trial")
    world.child = child
    tuner = world.tuner("master-0")
    claimed = tuner._claim([])
    assert claimed is not None
    tuner._run(claimed)
    news = [(1, "change_trial"), (6, "trial"), (7, "change_trial"), (12, "trial"), (17, "trial"), (18, "change_trial")]
    assert calls == ([] if terminating else [(name, 1000.0 + seconds) for seconds, name in news])
    assert world.trials()[0].allMetrics == ([] if terminating else [Measurement(1, 0.1), Measurement(2, 0.2)])


def test_unreadable_metrics_fail_a_trial_at_its_end_only(
    world: TuningWorld, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Damaged(TrialMetrics):
        def read_reports(self) -> list[Measurement]:
            raise RuntimeError("damaged")

    monkeypatch.setattr(run, "TrialMetrics", Damaged)
    world.child = lambda *_: Child([lambda: None])
    assert world.tuner("master-0").run() == 1
    assert [trial.errorMessage for trial in world.trials()] == ["its metrics cannot be read: damaged"] * 2
    assert capsys.readouterr().out.splitlines()[1::2] == ["the trial's metrics cannot be read now: damaged"] * 2


def test_a_write_of_a_trial_after_a_conflict(world: TuningWorld) -> None:
    """The other write may be one's own whose answer was lost, or another replica's."""
    tuner = world.tuner("worker-0")
    stored = world.ledger.create_trial("job01", Trial(1, {"x": "7"}, "worker-0"))
    news = replace(stored.record, allMetrics=[Measurement(1, 0.5)])
    assert world.ledger.change_trial("job01", stored, news).record == news, "the answer is lost"
    newer = replace(news, allMetrics=[*news.allMetrics, Measurement(2, 0.6)])
    written = tuner._write(stored, newer)
    assert (written.record, world.trials()) == (newer, [newer])
    ended = replace(newer, state=TrialState.SUCCEEDED)
    last = world.ledger.change_trial("job01", written, ended)
    assert tuner._write(written, ended) == last
    assert tuner._write(written, newer) is None, "it has ended otherwise"
    world.ledger.change_trial("job01", last, replace(newer, restarts=1))
    assert tuner._write(written, ended) is None, "it was taken over"


def test_a_second_conflict_counts_as_a_failure_of_the_bucket(world: TuningWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = world.ledger.create_trial("job01", Trial(1, {"x": "7"}, "worker-0"))

    def conflict(*_: object) -> None:
        raise Conflict("1.json")

    monkeypatch.setattr(Ledger, "change_trial", conflict)
    with pytest.raises(BucketError, match=r"1\.json"):
        world.tuner("worker-0")._write(stored, stored.record)


@pytest.mark.parametrize("terminated", [False, True])
def test_the_end_of_a_trial_is_reported_once_the_bucket_answers(
    world: TuningWorld, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminated: bool
) -> None:
    """A tuner that was terminated meanwhile leaves the trial to the next one."""
    tuner, pauses = world.tuner("master-0"), list[float]()
    stored = world.ledger.create_trial("job01", Trial(1, {"x": "7"}, "master-0"))
    write, failures = Tuner._write, iter([BucketError("away"), BucketError("far away")])

    def fail_twice(*given: Any) -> Any:
        if error := next(failures, None):
            raise error
        return write(*given)

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if terminated:
            tuner.terminate()

    monkeypatch.setattr(Tuner, "_write", fail_twice)
    tuner._sleep = pause
    tuner._record_end(stored, replace(stored.record, state=TrialState.FAILED, errorMessage="no"))
    output = capsys.readouterr()
    lines = [f"the end of trial 1 cannot be reported yet: {words}" for words in ("away", "far away")]
    if terminated:
        assert (output.out.splitlines(), output.err, pauses) == (lines[:1], "", [0.01])
        assert [trial.state for trial in world.trials()] == [TrialState.RUNNING]
    else:
        assert (output.out.splitlines(), output.err, pauses) == (lines, "error: trial 1 FAILED: no\n", [0.01, 0.01])
        assert [trial.state for trial in world.trials()] == [TrialState.FAILED]


@pytest.mark.parametrize("starting", [False, True])
def test_a_stop_ends_the_tuner_and_its_trial_runs_again_later(world: TuningWorld, starting: bool) -> None:
    child = Child([] if starting else [lambda: tuner.terminate()], 143)

    def start(*_: object) -> Child:
        if starting:
            tuner.terminate()
        return child

    world.child = start
    tuner = world.tuner("master-0")
    assert tuner.run() == 143
    assert child.terminated == 1
    assert [trial.state for trial in world.trials()] == [TrialState.RUNNING]


class RunMain:
    """The tuner's main, with a fake launcher of trials."""

    def __init__(self, world: TuningWorld, bucket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world, self.bucket, self.etc, self.state = world, bucket, bucket / "etc", bucket / "state"
        self.launchers: list[tuple[Any, ...]] = []
        self.handlers: dict[int, Callable[..., None]] = {}
        self.etc.mkdir()
        (self.state / "trials").mkdir(parents=True)
        monkeypatch.setenv("SCALETIER_ETC", str(self.etc))
        monkeypatch.setenv("SCALETIER_STATE", str(self.state))
        monkeypatch.setenv(SOCKET_VARIABLE, "/run/launch.sock")
        monkeypatch.setattr(run, "trial_launcher", lambda *given: self.launchers.append(given) or self.spawn)
        monkeypatch.setattr(run, "last_log_line", lambda log: f"the last line of {log}")
        monkeypatch.setattr(signal, "signal", self.handlers.__setitem__)

    def write_host(self) -> None:
        (self.etc / "host.json").write_bytes(HostConfig("host-7", str(self.bucket), 0.01).to_json())

    def spawn(self, argv: Sequence[str], environment: Mapping[str, str]) -> Child:
        self.world.spawned.append(("", list(argv), environment))
        return self.world.child("", environment)

    def __call__(self) -> int:
        return run.main("job01", "master-0", json.dumps({"cwd": "/the/package", "env": {"HOME": "/home"}}))


@pytest.fixture
def run_main(world: TuningWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunMain:
    return RunMain(world, tmp_path, monkeypatch)


def test_the_main_function_runs_the_trials_of_the_plan(run_main: RunMain) -> None:
    run_main.write_host()
    world = run_main.world
    world.ledger.create_plan(replace(world.plan, stopSignal="all", stopSeconds=7.0))
    assert run_main() == 0
    assert [(trial.state, trial.replica, trial.host) for trial in world.trials()] == [
        (TrialState.SUCCEEDED, "master-0", "host-7")
    ] * 4
    environment = world.spawned[0][2]
    file = Path(environment["CLOUD_ML_HP_METRIC_FILE"])
    assert environment == {
        "HOME": "/home",
        "CLOUD_ML_TRIAL_ID": "1",
        "CLOUD_ML_HP_METRIC_TAG": "score",
        "CLOUD_ML_HP_METRIC_FILE": str(file),
        "JOB_DIR": f"{run_main.bucket}/output/1",
        "TF_CONFIG": '{"task": {"trial": "1"}}',
    }
    assert file.parents[1] == run_main.state / "trials"
    ((client, *given),) = run_main.launchers
    assert isinstance(client, Launcher)
    assert given == ["job01", Path("/the/package"), "all", 7.0]


def test_the_main_function_ends_at_sigterm(run_main: RunMain) -> None:
    run_main.write_host()
    run_main.world.ledger.create_plan(run_main.world.plan)
    child = Child([lambda: run_main.handlers[signal.SIGTERM](signal.SIGTERM, None)], 143)
    run_main.world.child = lambda *_: child
    assert (run_main(), child.terminated) == (143, 1)


def test_the_main_function_reports_the_last_words_of_a_trial(run_main: RunMain) -> None:
    run_main.write_host()
    run_main.world.ledger.create_plan(run_main.world.plan)
    run_main.world.child = lambda *_: Child([], 3)
    assert run_main() == 1
    assert {trial.errorMessage for trial in run_main.world.trials()} == {
        f"it ended with status 3: the last line of {run_main.state}/logs/job01"
    }


def test_errors_of_the_main_function_are_one_line(
    run_main: RunMain, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main() == 1
    error = f"error: {run_main.etc}/host.json: No such file or directory; fab train and fab export write it\n"
    assert capsys.readouterr().err == error
    run_main.write_host()
    run_main.world.ledger.create_plan(run_main.world.plan)
    monkeypatch.setitem(sys.modules, "hosts.tuner.suggest", None)
    monkeypatch.delattr("hosts.tuner.suggest")
    assert run_main() == 1
    reason = "their image is from before hyperparameter tuning was added; run pulumi up"
    error = f"error: the hosts have no hosts.tuner.suggest: {reason}\n"
    assert capsys.readouterr().err == error


def test_the_plan_is_read_once_it_is_written(
    world: TuningWorld, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replies: list[Any] = [BucketError("away"), None, world.plan]
    pauses: list[float] = []

    def reply(*_: object) -> Any:
        if isinstance(answer := replies.pop(0), Exception):
            raise answer
        return answer

    monkeypatch.setattr(Ledger, "plan", reply)
    monkeypatch.setattr(run, "time", SimpleNamespace(sleep=pauses.append))
    assert run._plan(world.ledger, "job01", 0.5) == world.plan
    assert (capsys.readouterr().out, pauses) == ("the bucket does not answer: away\n", [0.5, 0.5])


def test_a_failed_folder_creation_is_retried(
    world: TuningWorld, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failures = iter([OSError(5, "Input/output error")] * 2)
    mkdir = Path.mkdir

    def fail_sometimes(path: Path, *args: Any, **more: Any) -> None:
        if path.parent.name == "output" and (error := next(failures, None)):
            raise error
        mkdir(path, *args, **more)

    monkeypatch.setattr(Path, "mkdir", fail_sometimes)
    assert world.tuner("master-0").run() == 0
    assert [trial.state for trial in world.trials()] == [TrialState.SUCCEEDED] * 4
    line = "trials cannot be read or written now, trying again: [Errno 5] Input/output error"
    assert capsys.readouterr().out.splitlines()[:2] == [line] * 2


def test_a_disk_that_is_full_for_a_while_costs_no_trial(world: TuningWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    make, failures = tempfile.mkdtemp, [OSError(28, "No space left on device")] * 9

    def full(**arguments: Any) -> str:
        if failures:
            raise failures.pop()
        return make(**arguments)

    monkeypatch.setattr(run.tempfile, "mkdtemp", full)
    assert world.tuner("master-0").run() == 0
    assert [(trial.state, trial.restarts) for trial in world.trials()] == [("SUCCEEDED", 0)] * 4


class Flaky(FolderBucket):
    """A bucket that sometimes fails, before a call or after its effect."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        super().__init__(folder)
        self._chance = chance

    def _fail(self) -> None:
        if self._chance.random() < 0.2:
            raise BucketError("the bucket is away")

    def read_all(self, names: Iterable[str]) -> dict[str, Item]:
        self._fail()
        return super().read_all(names)

    def create(self, name: str, content: bytes) -> str:
        self._fail()
        version = super().create(name, content)
        self._fail()
        return version

    def replace(self, name: str, content: bytes, version: str) -> str:
        self._fail()
        new = super().replace(name, content, version)
        self._fail()
        return new


@pytest.mark.parametrize("seed", range(8))
def test_a_failing_bucket_loses_no_trial(world: TuningWorld, tmp_path: Path, seed: int) -> None:
    flaky = Ledger(Flaky(tmp_path, random.Random(seed)), sleep=lambda _: None)
    assert world.tuner("master-0", flaky).run() == 0
    assert [(trial.trialId, trial.state) for trial in world.trials()] == [(n, TrialState.SUCCEEDED) for n in (1, 2, 3, 4)]
    assert [environment["CLOUD_ML_TRIAL_ID"] for _, _, environment in world.spawned] == ["1", "2", "3", "4"], "none twice"
    assert [trial.restarts for trial in world.trials()] == [0] * 4


class Lossy(FolderBucket):
    """A bucket where every third write takes effect but raises an error."""

    count = 0

    def replace(self, name: str, content: bytes, version: str) -> str:
        new = super().replace(name, content, version)
        self.count += 1
        if self.count % 3 == 0:
            raise BucketError("no answer")
        return new


def test_a_lost_answer_to_a_write_costs_no_trial(world: TuningWorld, tmp_path: Path) -> None:
    def child(_: str, environment: Mapping[str, str]) -> Child:
        return Child([lambda step=step: report(environment, step, step / 10) for step in (1, 2, 3, 4)])

    world.child = child
    assert world.tuner("master-0", Ledger(Lossy(tmp_path))).run() == 0
    assert [environment["CLOUD_ML_TRIAL_ID"] for _, _, environment in world.spawned] == ["1", "2", "3", "4"], "none twice"
    assert [trial.finalMetric for trial in world.trials()] == [Measurement(4, 0.4)] * 4


@pytest.mark.parametrize(
    "content",
    [
        "{",
        '{"schema": 3}',
        '{"trialId": 7, "hyperparameters": {"x": "1"}, "replica": "master-0"}',
        '{"trialId": 1, "hyperparameters": {"x": "1"}, "replica": "nobody-9"}',
        '{"trialId": 1, "hyperparameters": {"x": "far"}, "replica": "worker-0", "state": "SUCCEEDED"}',
        '{"trialId": 1, "hyperparameters": {}, "replica": "worker-0", "state": "FAILED"}',
    ],
)
def test_invalid_records_do_not_end_the_tuner(world: TuningWorld, tmp_path: Path, content: str) -> None:
    folder = tmp_path / "jobs/job01/trials"
    folder.mkdir(parents=True)
    (folder / "1.json").write_text(content)
    (folder / "notes.json").write_text("[]")
    assert world.tuner("master-0").run() == 0
    assert sum(trial.state is TrialState.SUCCEEDED and trial.finalMetric is not None for trial in world.trials()) >= 3


@pytest.mark.parametrize("seen_at", ["report", "heartbeat", "end"])
def test_a_trial_whose_record_is_corrupted_while_it_runs_is_skipped(
    world: TuningWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str], seen_at: str
) -> None:
    world.plan = replace(world.plan, heartbeatSeconds=0.0 if seen_at == "heartbeat" else 3600.0)
    children: list[Child] = []

    def corrupt_first(name: str, environment: Mapping[str, str]) -> Child:
        def corrupt() -> None:
            (tmp_path / "jobs/job01/trials/1.json").write_text("{")
            if seen_at == "report":
                report(environment, 10, 0.5)

        if environment["CLOUD_ML_TRIAL_ID"] != "1":
            return world.report_and_exit(name, environment)
        children.append(Child([corrupt, lambda: None], 3))
        return children[-1]

    world.child = corrupt_first
    tuner = world.tuner("master-0")
    tuner._sleep = lambda _: pytest.fail("it waits for the record")
    assert tuner.run() == 0
    assert [(trial.trialId, trial.state) for trial in world.trials()] == [(n, TrialState.SUCCEEDED) for n in (2, 3, 4, 5)]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Trial 1 is skipped: ")]
    assert [line.partition(" no JSON")[0] for line in lines] == ["Trial 1 is skipped: the record of a trial is"]
    assert children[0].stopped == (seen_at != "end"), "its result could not be recorded"


@pytest.mark.parametrize(
    "content",
    [
        '{"timestamp": 1, "global_step": Infinity, "score": 1}',
        '{"timestamp": 1, "global_step": 1, "score": ' + "9" * 400 + "}",
        "[" * 100_000,
        '{"timestamp": 1, "global_step": 1e30, "score": 1}',
        None,
    ],
)
def test_invalid_reports_do_not_end_the_tuner(world: TuningWorld, content: str | None) -> None:
    def run_badly(_: str, environment: Mapping[str, str]) -> Child:
        file = Path(environment["CLOUD_ML_HP_METRIC_FILE"])
        first = environment["CLOUD_ML_TRIAL_ID"] == "1"

        def write_report() -> None:
            if not first:
                report(environment, 1, 0.5)
            elif content is None:
                file.mkdir()
            else:
                file.write_text(content)

        return Child([write_report])

    world.child = run_badly
    assert world.tuner("master-0").run() == 0
    assert [trial.state for trial in world.trials()] == [TrialState.FAILED, *[TrialState.SUCCEEDED] * 3]


def test_huge_values_without_an_average_are_handled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", TF_CONFIG)
    world = TuningWorld(tmp_path, replace(STUDY, maxTrials=7, enableTrialEarlyStopping=True))
    world.child = lambda _, environment: Child([lambda step=step: report(environment, step, 1.5e308) for step in (1, 2)])
    assert world.tuner("master-0").run() == 0


def test_the_screen_of_fab_parses_the_lines(world: TuningWorld, capsys: pytest.CaptureFixture[str]) -> None:
    """Parse the tuner's real lines by the real ops.screen."""
    values = iter([(0, 0.5), (3, 0.0), (0, 0.75), (0, 0.25)])

    def child(_: str, environment: Mapping[str, str]) -> Child:
        code, value = next(values)
        return Child([lambda: report(environment, 10, value)], code)

    world.child = child
    assert world.tuner("master-0").run() == 0
    output = capsys.readouterr()
    screen = TrialScreen({"goal": "MAXIMIZE"})
    for at, line in enumerate(sorted([*output.out.splitlines(), *output.err.splitlines()], key=_number_in)):
        screen.add_line(line, "master-0", float(at), float(at))
    rows = [row.plain for row in screen.rows(False, 10.0)]
    assert rows[0].startswith("trials   4 of 4  ")
    x = world.trials()[2].hyperparameters["x"]
    assert rows[1].startswith("score ")
    assert rows[2] == f"best     0.75, trial 3: --x={x}"
    assert screen.trial_of("master-0") is None, "it has ended"
    screen.add_line("Trial 5 of 6: --x=1", "master-0", 11.0, 11.0)
    assert screen.trial_of("master-0") == 5
    less = TrialScreen({"goal": "MINIMIZE"})
    for line in output.out.splitlines():
        less.add_line(line, "master-0", 0.0, 0.0)
    assert less.rows(True, 1.0)[-1].plain.startswith("best     0.25, trial 4")


def _number_in(line: str) -> int:
    match = re.search(r"[Tt]rial (\d+)", line)
    return int(match[1]) if match else 99


def test_a_trial_ends_if_its_monitoring_fails(world: TuningWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[Child] = []

    def child(_: str, environment: Mapping[str, str]) -> Child:
        children.append(Child([lambda: report(environment, 1, 0.5)] * 3))
        return children[-1]

    failures = iter([OSError(5, "Input/output error")])
    write_record = Tuner._write

    def fail_once(tuner: Tuner, *given: Any) -> Any:
        if error := next(failures, None):
            raise error
        return write_record(tuner, *given)

    world.child = child
    monkeypatch.setattr(Tuner, "_write", fail_once)
    assert world.tuner("master-0").run() == 0
    assert [each.stopped for each in children] == [True, *[False] * 4], "the first, and it was run again"
