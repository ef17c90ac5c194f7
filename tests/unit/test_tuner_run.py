"""Trials from the bucket: each runs once to its end on any replica, despite failures of others."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hosts.tuner.run import Tuner, _folder, last_words
from hosts.tuner.suggest import suggest
from jobs.bucket import BucketError, Item
from jobs.chunks import Chunk
from jobs.folder import FolderBucket
from jobs.ledger import Ledger, Trials
from jobs.records import HostFile, JobRecord, Plan
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


class Child:
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

        host = HostFile(name, "", 0.01, "/venv/python")
        return Tuner(ledger or self.ledger, self.plan, self.study, name, host, suggest, spawn, lambda: "oh")

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
        with _folder(above) as folder:
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
    assert lines[-2:] == [
        f"Trials: 4 done, 0 FAILED; best is trial 4: --x={x}",
        "Final metrics after 10 steps, score: 4",
    ]


def test_a_trial_gets_the_arguments_of_cloud_ml(world: TuningWorld, tmp_path: Path) -> None:
    world.tuner("master-0").run()
    _, argv, environment = world.spawned[1]
    x = world.trials()[1].hyperparameters["x"]
    folder = f"{tmp_path}/output/2"
    assert argv == ["/venv/python", "-m", "mine.task", "--steps", "9", "--job-dir", folder, f"--x={x}"]
    assert environment["CLOUD_ML_TRIAL_ID"] == "2"
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
        thread.join(60)
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


def test_a_restarted_replica_continues_its_own_trial(world: TuningWorld) -> None:
    world.ledger.create_trial("job01", Trial(1, {"x": "7"}, "worker-0"))
    world.tuner("worker-0").run()
    assert world.spawned[0][1][-1] == "--x=7"
    assert world.trials()[0].restarts == 1


@pytest.mark.parametrize("reports", [True, False])
def test_a_reassigned_trial_is_dropped_by_its_former_replica(world: TuningWorld, reports: bool) -> None:
    """A host was unreachable: its reports of the trial are ignored, and without reports it checks the record."""
    world.plan = replace(world.plan, heartbeatSeconds=3600.0 if reports else 0.0)
    children: list[Child] = []

    def lose_trial(_: str, environment: Mapping[str, str]) -> Child:
        def take() -> None:
            stored = world.ledger.trial("job01", 1)
            assert stored
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
    assert [trial.state for trial in world.trials()] == [TrialState.FAILED] * 2
    assert all(trial.errorMessage.startswith(reason) for trial in world.trials())
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: 2 of 2 trials FAILED, and maxFailedTrials is 2; trial 2 (--x=")
    assert reason in last


def test_the_last_line_of_a_program_is_the_error(tmp_path: Path) -> None:
    log = tmp_path / "job01"
    assert last_words(log) == ""
    log_lines = [("INFO", "step 1"), ("ERROR", "ValueError: no such thing"), ("INFO", "bye"), ("INFO", "")]
    log.mkdir()
    chunk = log / Chunk(1769860800, 0, 0, 0).name
    chunk.write_text("".join(json.dumps({"severity": severity, "message": text}) + "\n" for severity, text in log_lines))
    assert last_words(log) == "ValueError: no such thing"
    chunk.write_text('{"severity": "INFO", "message": "bye"}\n')
    assert last_words(log) == "bye"


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


def test_a_lagging_trial_is_stopped_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_stop_ends_the_tuner_and_its_trial_runs_again_later(world: TuningWorld) -> None:
    child = Child([lambda: tuner.terminate()], 143)
    world.child = lambda *_: child
    tuner = world.tuner("master-0")
    assert tuner.run() == 143
    assert child.terminated == 1
    assert [trial.state for trial in world.trials()] == [TrialState.RUNNING]


def test_a_failed_folder_creation_is_retried(world: TuningWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = iter([OSError(5, "Input/output error")] * 2)
    mkdir = Path.mkdir

    def fail_sometimes(path: Path, *args: Any, **more: Any) -> None:
        if path.parent.name == "output" and (error := next(failures, None)):
            raise error
        mkdir(path, *args, **more)

    monkeypatch.setattr(Path, "mkdir", fail_sometimes)
    assert world.tuner("master-0").run() == 0
    assert [trial.state for trial in world.trials()] == [TrialState.SUCCEEDED] * 4


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
    assert screen.of("master-0") is None, "it has ended"
    screen.add_line("Trial 5 of 6: --x=1", "master-0", 11.0, 11.0)
    assert screen.of("master-0") == 5
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
