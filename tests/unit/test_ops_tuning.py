"""Check `hyperparameters:` of config.yaml: the study, its trials' tasks, and the errors of bad values."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from infra.inventory import Inventory
from infra.scale_tiers import Role
from jobs.ledger import Ledger
from jobs.records import JobRecord, Plan
from jobs.study import (
    METRIC_TAG,
    Algorithm,
    EarlierTrial,
    Goal,
    Measurement,
    Parameter,
    ParameterType,
    ScaleType,
    Study,
    Trial,
    TrialState,
    best,
    format_value,
    thin,
)
from ops.errors import OpsError, UsageError
from ops.submit import trials, tuning
from ops.submit.config import JobFlags, JobSpec, build_job
from ops.submit.job_plan import plan
from ops.submit.schema import Hyperparameters
from ops.submit.trials import TuningResult

PARAMS: list[dict[str, Any]] = [
    {"parameterName": "rate", "type": "DOUBLE", "minValue": 1e-4, "maxValue": "0.1", "scaleType": "UNIT_LOG_SCALE"},
    {"parameterName": "units", "type": "INTEGER", "minValue": 8, "maxValue": 64},
    {"parameterName": "kind", "type": "CATEGORICAL", "categoricalValues": ["adam", "sgd"]},
    {"parameterName": "--batch", "type": "DISCRETE", "discreteValues": [16, 32]},
]
KNOWS_JOB_DIR = {"trainer/task.py": b'parser.add_argument("--job-dir")'}


def write_config(folder: Path, hyperparameters: object, **training_input: object) -> str:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({"trainingInput": {**training_input, "hyperparameters": hyperparameters}}))
    return str(path)


def study_of(folder: Path, inventory: Inventory, **keys: object) -> Study:
    job = build_job(JobFlags("job01", config=write_config(folder, {"params": PARAMS, **keys})), inventory, files=KNOWS_JOB_DIR)
    assert job.study
    return job.study


def test_cloud_mls_keys_and_their_defaults(standard: Inventory, tmp_path: Path) -> None:
    assert replace(study_of(tmp_path, standard), seed=0) == Study(
        [
            Parameter("rate", ParameterType.DOUBLE, 1e-4, 0.1, scaleType=ScaleType.UNIT_LOG_SCALE),
            Parameter("units", ParameterType.INTEGER, 8, 64),
            Parameter("kind", ParameterType.CATEGORICAL, categoricalValues=["adam", "sgd"]),
            Parameter("batch", ParameterType.DISCRETE, discreteValues=[16, 32]),
        ],
        Goal.MAXIMIZE,
        METRIC_TAG,
        maxTrials=1,
        maxParallelTrials=1,
        maxFailedTrials=1,
        algorithm=Algorithm.ALGORITHM_UNSPECIFIED,
        jobDir="/bucket/jobs/job01/output",
        jobDirFlag="--job-dir",
    )
    study = study_of(
        tmp_path,
        standard,
        goal="MINIMIZE",
        hyperparameterMetricTag="loss",
        maxTrials=40,
        maxParallelTrials="3",
        algorithm="RANDOM_SEARCH",
        enableTrialEarlyStopping=True,
    )
    assert (study.goal, study.hyperparameterMetricTag, study.algorithm) == ("MINIMIZE", "loss", "RANDOM_SEARCH")
    assert (study.maxTrials, study.maxParallelTrials, study.maxFailedTrials, study.enableTrialEarlyStopping) == (
        40,
        3,
        10,
        True,
    )
    assert study_of(tmp_path, standard, goal="GOAL_TYPE_UNSPECIFIED", maxTrials=8, maxFailedTrials=0).maxFailedTrials == 3


def test_each_trial_has_its_own_tf_config(standard: Inventory, tmp_path: Path) -> None:
    path = write_config(tmp_path, {"params": PARAMS, "maxTrials": 9, "maxParallelTrials": 3}, args=["--steps", "5"])
    job = build_job(JobFlags("job01", config=path), standard, files=KNOWS_JOB_DIR)
    trial_plan = plan(standard, job, "")
    assert trial_plan.replicas == ["master-0", "worker-0", "worker-1"]
    assert (trial_plan.restartPolicy, trial_plan.optionalRoles) == ("replica", [Role.WORKER])
    assert trial_plan.args == ["--steps", "5"], "the tuner passes a trial's own folder"
    placed = trial_plan.with_hosts({"master-0": "worker-1", "worker-0": "master-0", "worker-1": "worker-0"})
    for name in trial_plan.replicas:
        task = placed.tasks[name]
        tf_config = json.loads(task.tfConfig)
        host = placed.hosts[name]
        assert tf_config["cluster"] == {"chief": [f"{standard.host(host).address}:2222"]}
        assert tf_config["task"] == {"type": "chief", "index": 0}
        assert (task.environment["TYPE"], task.environment["INDEX"], task.environment["RANK"]) == ("master", "0", "0")
        assert task.environment["MASTER_ADDR"] == standard.host(host).address
        assert task.environment["WORLD_SIZE"] == "1"


def test_defaults_and_limits_of_hyperparameters(standard: Inventory, tmp_path: Path) -> None:
    assert Hyperparameters(params=[ONE]).given().keys() == {"params"}  # type: ignore[list-item]
    assert Hyperparameters(params=[ONE], maxTrials=1, maxFailedTrials=1).given()["maxFailedTrials"] == 1  # type: ignore[list-item]
    with pytest.raises(ValidationError, match="2 is more than there are trials, maxTrials 1"):
        Hyperparameters(params=[ONE], maxFailedTrials=2)  # type: ignore[list-item]
    assert study_of(tmp_path, standard, maxTrials=1000, maxFailedTrials=1000).maxFailedTrials == 1000
    assert study_of(tmp_path, standard, maxTrials=16).maxFailedTrials == 4
    odd = [
        {"parameterName": "a", "type": "DISCRETE", "discreteValues": [1, 2], "scaleType": "UNIT_LOG_SCALE"},
        {"parameterName": "b", "type": "DOUBLE", "minValue": -1, "maxValue": 1e300},
        {"parameterName": "c", "type": "INTEGER", "minValue": -(2**53), "maxValue": 2**53, "scaleType": "UNIT_LINEAR_SCALE"},
    ]
    study = study_of(tmp_path, standard, params=odd)
    assert [(each.minValue, each.scaleType) for each in study.params] == [
        (None, ScaleType.UNIT_LOG_SCALE),
        (-1, ScaleType.NONE),
        (-(2**53), ScaleType.UNIT_LINEAR_SCALE),
    ]


def test_each_job_has_its_own_seed(standard: Inventory, tmp_path: Path) -> None:
    assert len({study_of(tmp_path, standard).seed for _ in range(5)}) == 5


def test_a_tuning_job_needs_one_host_per_parallel_trial(standard: Inventory, tmp_path: Path) -> None:
    def job(**keys: object) -> Any:
        return build_job(JobFlags("j", config=write_config(tmp_path, {"params": PARAMS, **keys})), standard)

    for alone in (job(), job(maxTrials=9), job(maxParallelTrials=9)):
        assert (alone.counts, alone.notes) == ({Role.MASTER: 1}, ())
    assert job(maxTrials=9, maxParallelTrials=3).notes == ()
    assert job(maxTrials=2, maxParallelTrials=9).counts == {Role.MASTER: 1, Role.WORKER: 1}
    many = job(maxTrials=50, maxParallelTrials=20)
    assert many.counts == {Role.MASTER: 1, Role.WORKER: 2}
    assert many.notes == ("maxParallelTrials is 20, and stack test has 3 hosts for trials: that many run at once",)


def test_a_scale_tier_of_several_hosts_is_ignored_with_a_note(standard: Inventory, tmp_path: Path) -> None:
    def notes(**training_input: object) -> tuple[str, ...]:
        return build_job(JobFlags("j", config=write_config(tmp_path, {"params": PARAMS}, **training_input)), standard).notes

    assert notes(scaleTier="BASIC") == ()
    (message,) = notes(scaleTier="STANDARD_1")
    assert message.startswith("scaleTier in ")
    (message,) = notes(scaleTier="CUSTOM", masterType="n1-standard-8", workerCount=9, parameterServerCount=0)
    assert message.startswith("masterType, workerCount in ")
    assert message.endswith(": ignored, a trial has one host, and maxParallelTrials sets their number")


def test_discrete_values_are_sorted_and_have_no_scale(standard: Inventory, tmp_path: Path) -> None:
    def build(**keys: object) -> JobSpec:
        batch = {"parameterName": "batch", "type": "DISCRETE", "discreteValues": [100, 12.5, "50"], **keys}
        return build_job(JobFlags("j", config=write_config(tmp_path, {"params": [batch]})), standard)

    for job in (build(), build(scaleType="NONE")):
        assert job.study
        assert (job.study.params[0].discreteValues, job.notes) == ([12.5, 50, 100], ())
    (note,) = build(scaleType="UNIT_LOG_SCALE").notes
    assert note == f"scaleType of batch in {tmp_path}/config.yaml: ignored, discreteValues are sampled by index"


def test_a_jobs_folder_has_a_folder_per_trial(standard: Inventory, tmp_path: Path) -> None:
    path = write_config(tmp_path, {"params": PARAMS}, jobDir="/bucket/mine")
    job = build_job(JobFlags("job01", config=path), standard, files={"trainer/task.py": b""})
    assert job.study
    assert (job.study.folder(3), job.study.jobDirFlag, job.args) == ("/bucket/mine/3", "--job-dir", ())
    job = build_job(
        JobFlags("job01", config=write_config(tmp_path, {"params": PARAMS})), standard, files={"trainer/task.py": b""}
    )
    assert job.study
    assert job.study.jobDirFlag == "", "a trainer without such a flag gets none"


CATEGORICAL = {"parameterName": "x", "type": "CATEGORICAL", "categoricalValues": ["a"]}
ONE = {"parameterName": "x", "type": "INTEGER", "minValue": 1, "maxValue": 9}


@pytest.mark.parametrize(
    ("hyperparameters", "message"),
    [
        ([], "hyperparameters is not a mapping of keys to values; valid keys are goal, params"),
        ({}, "hyperparameters.params is missing"),
        ({"params": []}, "hyperparameters.params must be a list of hyperparameters"),
        ({"params": [ONE], "parms": 1}, "hyperparameters.parms is unknown; did you mean params?; valid are goal, params"),
        ({"params": [ONE], "goal": "MAX"}, "hyperparameters.goal 'MAX' is unknown; valid are MAXIMIZE, MINIMIZE"),
        ({"params": [ONE], "maxTrials": 0}, "hyperparameters.maxTrials must be at least 1, not 0"),
        ({"params": [ONE], "maxTrials": 100000}, "hyperparameters.maxTrials must be at most 1000, not 100000"),
        ({"params": [ONE], "maxFailedTrials": 2}, "maxFailedTrials 2 is more than there are trials, maxTrials 1"),
        ({"params": [ONE], "hyperparameterMetricTag": " "}, "' ' is invalid: it is no name of a metric"),
        ({"params": [{**ONE, "minValue": -(2**53) - 2}]}, "params[0] has a number above 9007199254740992"),
        ({"params": [{**ONE, "minValue": 1.5, "maxValue": 9.5}]}, "of type INTEGER, and 1.5 is no whole number"),
        ({"params": [{**ONE, "minValue": 0, "scaleType": "UNIT_REVERSE_LOG_SCALE"}]}, "minValue 0 has no logarithm"),
        ({"params": [{**ONE, "discreteValues": [1], "categoricalValues": ["a"]}]}, "params[0].categoricalValues goes with"),
        ({"params": [{**ONE, "minValue": -1e301}]}, "params[0].minValue must be a number of at most 1e+300 either way"),
        ({"params": [{"parameterName": "x", "type": "INTEGER"}]}, "params[0].minValue is missing: one of type INTEGER has"),
        (
            {"params": [{**CATEGORICAL, "categoricalValues": ["a", "b", "b", "a"]}]},
            "params[0].categoricalValues has 'b' twice: say it once",
        ),
        ({"params": [ONE], "maxTrials": "x"}, "hyperparameters.maxTrials must be a whole number"),
        (
            {"params": [ONE], "maxTrials": 2, "maxFailedTrials": 3},
            "maxFailedTrials 3 is more than there are trials, maxTrials 2",
        ),
        ({"params": [ONE, ONE]}, "params has the parameterName 'x' twice"),
        ({"params": [{"type": "INTEGER"}]}, "params[0].parameterName is missing"),
        ({"params": [{"parameterName": "x"}]}, "params[0].type is missing"),
        ({"params": [{**ONE, "type": "FLOAT"}]}, "params[0].type 'FLOAT' is unknown; valid are DOUBLE, INTEGER"),
        ({"params": [{**ONE, "parameterName": "a b"}]}, "params[0].parameterName 'a b' is invalid: it is no name of a flag"),
        ({"params": [{**ONE, "maxValue": 10**400}]}, "params[0].maxValue must be a"),
        ({"params": [{**ONE, "maxValue": 2**60}]}, "params[0] has a number above 9007199254740992"),
        ({"params": [{**ONE, "parameterName": "job_dir"}]}, "'job_dir' is invalid: it is a trial's output"),
        ({"params": [{**ONE, "parameterName": "a-b"}, {**ONE, "parameterName": "a_b"}]}, "parameterName 'a-b' twice"),
        ({"params": [{**CATEGORICAL, "categoricalValues": ["a\0"]}]}, "holds a NUL character"),
        ({"params": [ONE], "hyperparameterMetricTag": "a\nb"}, "'a\\nb' is invalid: it is no name of a metric"),
        ({"params": [{**ONE, "minValue": 9}]}, "params[0].minValue 9 is not below maxValue 9"),
        ({"params": [{**ONE, "minValue": 10}]}, "params[0].minValue 10 is not below maxValue 9"),
        ({"params": [{**ONE, "maxValue": 9.5}]}, "params[0] is of type INTEGER, and 9.5 is no whole number"),
        ({"params": [{**ONE, "maxValue": "nan"}]}, "params[0].maxValue must be a number"),
        ({"params": [{**ONE, "maxValue": True}]}, "params[0].maxValue must be a number, not True"),
        ({"params": [{**ONE, "minValue": 0, "scaleType": "UNIT_LOG_SCALE"}]}, "minValue 0 has no logarithm"),
        ({"params": [{**ONE, "scaleType": "LOG"}]}, "params[0].scaleType 'LOG' is unknown; valid are NONE"),
        ({"params": [{**ONE, "categoricalValues": ["a"]}]}, "params[0].categoricalValues goes with another type"),
        ({"params": [{"parameterName": "x", "type": "DOUBLE", "minValue": 1}]}, "params[0].maxValue is missing"),
        ({"params": [{"parameterName": "x", "type": "CATEGORICAL", "categoricalValues": []}]}, "categoricalValues is empty"),
        ({"params": [{"parameterName": "x", "type": "CATEGORICAL", "categoricalValues": ["a", "a"]}]}, "has 'a' twice"),
        ({"params": [{"parameterName": "x", "type": "DISCRETE", "discreteValues": "8"}]}, "must be a list such as [8]"),
        (
            {"params": [{"parameterName": "x", "type": "DISCRETE", "discreteValues": [8, "b"]}]},
            "discreteValues[1] must be a number",
        ),
        (
            {
                "params": [
                    {"parameterName": "x", "type": "CATEGORICAL", "categoricalValues": ["a"], "scaleType": "UNIT_LOG_SCALE"}
                ]
            },
            "words have no scale",
        ),
        (
            {"algorithm": "GRID_SEARCH", "params": [{"parameterName": "x", "type": "DOUBLE", "minValue": 1, "maxValue": 2}]},
            "params[0] x is of type DOUBLE, of which there is no grid",
        ),
    ],
)
def test_invalid_hyperparameters_are_one_line(
    standard: Inventory, tmp_path: Path, hyperparameters: object, message: str
) -> None:
    with pytest.raises(UsageError) as error:
        build_job(JobFlags("job01", config=write_config(tmp_path, hyperparameters)), standard)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert "config.yaml: trainingInput.hyperparameters" in str(error.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (JobFlags("j", replicas="worker=2"), "--replicas: "),
        (JobFlags("j", scale_tier="BASIC"), "--scale-tier: "),
        (JobFlags("j", resume="old"), "use resumePreviousJobId"),
        (JobFlags("j", args="--output_path /bucket/x"), "each trial needs its own"),
    ],
)
def test_conflicting_flags_are_refused(standard: Inventory, tmp_path: Path, flags: JobFlags, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_job(replace(flags, config=write_config(tmp_path, {"params": PARAMS})), standard)


def test_a_misspelled_variable_of_a_categorical_value_is_refused(standard: Inventory, tmp_path: Path) -> None:
    def config(value: str) -> str:
        param = {"parameterName": "init", "type": "CATEGORICAL", "categoricalValues": ["zeros", value]}
        return write_config(tmp_path, {"params": [param]})

    with pytest.raises(UsageError, match=r"^a categorical value has \$\{SCALETIER_DAT\}.*; did you mean SCALETIER_DATA\?: "):
        build_job(JobFlags("job01", config=config("${SCALETIER_DAT}/w.npz")), standard)
    job = build_job(JobFlags("job01", config=config("${SCALETIER_DATA}/w.npz")), standard)
    assert job.study
    assert job.study.params[0].categoricalValues == ["zeros", "${SCALETIER_DATA}/w.npz"]


def trial(number: int, value: float | None, **fields: Any) -> Trial:
    final = Measurement(9, value) if value is not None else None
    state = TrialState.SUCCEEDED if final else TrialState.FAILED
    return Trial(number, {"x": str(number)}, "master-0", **{"state": state, "finalMetric": final, **fields})


def test_a_study_resumes_one_whose_values_a_former_version_did_not_sort() -> None:
    discrete = {"parameterName": "x", "type": "DISCRETE", "discreteValues": [64, 32]}
    study = tuning.build_study({"params": [discrete], "maxTrials": 3, "resumePreviousJobId": "old"}, (), "/o", None)
    previous = replace(study, params=[replace(study.params[0], discreteValues=[64.0, 32.0])])
    study = replace(study, params=[replace(study.params[0], discreteValues=[32.0, 64.0])])
    assert len(tuning.add_earlier_results(study, previous, [trial(1, 0.5)]).earlier) == 1


def test_a_study_resumes_from_previous_results() -> None:
    hyperparameters = {"params": [ONE], "maxTrials": 3, "resumePreviousJobId": "old"}
    study = tuning.build_study(hyperparameters, (), "/o", None)
    previous = tuning.build_study({"params": [ONE]}, (), "", None)
    resumed = tuning.add_earlier_results(study, previous, [trial(1, 0.5), trial(2, None)])
    assert resumed.earlier == [EarlierTrial({"x": "1"}, 0.5)]
    resumed_again = tuning.add_earlier_results(study, resumed, [trial(3, 0.75)])
    assert resumed_again.earlier == [EarlierTrial({"x": "1"}, 0.5), EarlierTrial({"x": "3"}, 0.75)], (
        "and the earlier trials of that one"
    )
    with pytest.raises(UsageError, match="has no trial that SUCCEEDED"):
        tuning.add_earlier_results(study, previous, [trial(2, None)])
    for previous_keys, message in (
        (None, "tuned no hyperparameters"),
        ({"params": [{**ONE, "maxValue": 8}]}, "tuned other hyperparameters: x, whose values were others$"),
        ({"params": [ONE, {**ONE, "parameterName": "y"}]}, "tuned other hyperparameters: y, which this job does not tune$"),
        (
            {"params": [{**ONE, "parameterName": "y"}]},
            "hyperparameters: y, which this job does not tune; x, which it did not tune$",
        ),
        (
            {"params": [{**ONE, "parameterName": "b"}, {**ONE, "parameterName": "a"}, ONE]},
            "hyperparameters: a, b, which this job does not tune",
        ),
        ({"params": [ONE], "goal": "MINIMIZE"}, "had goal MINIMIZE, and this one MAXIMIZE"),
        ({"params": [ONE], "hyperparameterMetricTag": "loss"}, "had hyperparameterMetricTag loss"),
    ):
        with pytest.raises(UsageError, match=message):
            tuning.add_earlier_results(study, tuning.build_study(previous_keys, (), "", None) if previous_keys else None, [])
    two = {**hyperparameters, "params": [ONE, {**ONE, "parameterName": "y"}]}
    turned = tuning.build_study({"params": two["params"][::-1]}, (), "", None)  # type: ignore[index]
    with pytest.raises(UsageError, match=r"^resumePreviousJobId old tuned other hyperparameters: in another order$"):
        tuning.add_earlier_results(tuning.build_study(two, (), "/o", None), turned, [trial(1, 0.5)])
    grid = tuning.build_study({**hyperparameters, "algorithm": "GRID_SEARCH"}, (), "/o", None)
    with pytest.raises(UsageError, match="every point of the grid was tried by old"):
        tuning.add_earlier_results(grid, previous, [trial(number, 0.5) for number in range(1, 10)])


def test_the_best_trial_depends_on_the_goal() -> None:
    maximized = Study([], goal=Goal.MAXIMIZE)
    minimized = Study([], goal=Goal.MINIMIZE)
    trials_done = [trial(1, 0.5), trial(2, None), trial(3, 0.9), trial(4, 0.5), trial(5, 0.9)]
    first, last = best(maximized, trials_done), best(minimized, trials_done)
    assert first
    assert last
    assert (first.trialId, last.trialId) == (3, 1)
    assert best(maximized, [trial(1, None)]) is None


def test_numbers_are_formatted_for_a_command_line() -> None:
    assert [format_value(value) for value in (32.0, 32, 0.5, -3.0, 1e20)] == ["32", "32", "0.5", "-3", "1e+20"]


def test_measurements_are_thinned_and_the_last_is_kept() -> None:
    for count in (0, 1, 200, 201, 400, 401, 100_000):
        many = [Measurement(step, 0.0) for step in range(count)]
        thinned = thin(many)
        assert thinned[-1:] == many[-1:]
        assert min(count, 100) <= len(thinned) <= 200
        assert thinned == sorted(thinned, key=lambda item: item.trainingStep)
    assert thin(many[:200]) == many[:200]


HYPERPARAMETERS = {"params": [ONE], "maxTrials": 3, "hyperparameterMetricTag": "score"}


def test_describe_shows_the_trials(capsys: pytest.CaptureFixture[str]) -> None:
    record = JobRecord("job01", trainingInput={"hyperparameters": HYPERPARAMETERS})
    study = tuning.build_study(HYPERPARAMETERS, (), "", None)
    trials_done = [trial(1, 0.5), trial(2, None, errorMessage="it reported no score: how"), trial(3, 0.75, restarts=2)]
    tuned = TuningResult(record, study, trials_done)
    assert tuned.summary() == "3 of 3 done, 1 FAILED; best is trial 3, score 0.75: --x=3"
    assert TuningResult(record, study, []).summary() == "0 of 3 done"
    tuned.show()
    assert capsys.readouterr().out.splitlines() == [
        "",
        "TRIAL  STATE      SCORE  STEP  x  TIME   RESTARTS  REPLICA   ERROR",
        "    3  SUCCEEDED   0.75     9  3  0.0 s         2  master-0  -",
        "    1  SUCCEEDED    0.5     9  1  0.0 s         -  master-0  -",
        "    2  FAILED         -     -  2  0.0 s         -  master-0  it reported no score: how",
    ]
    output = tuned.output()
    listed = output.pop("trials")
    assert TuningResult(record, study, [trial(1, 0.5, isTrialStoppedEarly=True)]).output()["completedTrialCount"] == 1
    assert output == {"completedTrialCount": 2, "isHyperparameterTuningJob": True, "hyperparameterMetricTag": "score"}
    assert [item["trialId"] for item in listed] == [3, 1, 2]
    assert listed[0] == {key: value for key, value in trials_done[2].to_dict().items() if key != "schema"}


def test_a_long_table_of_trials_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    record = JobRecord("job01", endTime="2026-01-31T12:01:30.000Z")
    study = tuning.build_study(HYPERPARAMETERS, (), "", None)
    TuningResult(record, study, []).show()
    assert capsys.readouterr() == ("", "")
    running = Trial(31, {"x": "5"}, "worker-0", startTime="2026-01-31T12:00:00.000Z", isTrialStoppedEarly=True)
    running = replace(running, allMetrics=[Measurement(3, 2.0), Measurement(4, 1 / 3)], errorMessage="x" * 130)
    many = [trial(number, 1 - number / 100) for number in range(1, 30)]
    TuningResult(record, study, [*many, running]).show()
    out, err = capsys.readouterr()
    last = ["31", "RUNNING", "early", "0.333333", "4", "5", "1", "min", "30", "s", "-", "worker-0", "x" * 120]
    assert (len(out.splitlines()), out.splitlines()[-1].split(), err) == (32, last, "")
    TuningResult(record, study, [*many, running, trial(40, None)]).show()
    out, err = capsys.readouterr()
    assert (len(out.splitlines()), err) == (32, "1 more trial: fab describe job01 --json has all\n")


def test_a_line_describes_the_study() -> None:
    def line(**keys: object) -> str:
        return TuningResult(JobRecord("job01"), tuning.build_study({"params": [ONE], **keys}, (), "", None), []).line()

    assert line() == f"MAXIMIZE {METRIC_TAG} over x from 1 to 9"
    every = {"goal": "MINIMIZE", "hyperparameterMetricTag": "loss", "maxTrials": 9, "maxParallelTrials": 2}
    more = {"algorithm": "RANDOM_SEARCH", "enableTrialEarlyStopping": True, "resumePreviousJobId": "old"}
    assert line(params=[{**PARAMS[0], "maxValue": 0.1}, PARAMS[2], PARAMS[3]], **every, **more) == (
        "MINIMIZE loss over rate from 0.0001 to 0.1 (UNIT_LOG_SCALE), kind of adam, sgd, --batch of 16, 32; "
        "2 at once; RANDOM_SEARCH; early stopping; after old"
    )


def test_a_running_trial_ends_with_its_job() -> None:
    running = Trial(1, {"x": "1"}, "master-0")
    study, record = Study([]), JobRecord("job01")
    assert TuningResult(record, study, [running]).state(running) == "RUNNING"
    assert TuningResult(record.ended("", cancelled=True), study, [running]).state(running) == "CANCELLED"
    assert TuningResult(record.ended("", cancelled=True), study, [trial(1, 0.5)]).state(trial(1, 0.5)) == "SUCCEEDED"


def test_the_study_is_read_from_the_plan(ledger: Ledger) -> None:
    hyperparameters = {**HYPERPARAMETERS, "algorithm": "GRID_SEARCH", "maxTrials": 9}
    record = JobRecord("job01", trainingInput={"hyperparameters": hyperparameters})
    assert trials.read(ledger, JobRecord("job01")) is None
    without_plan = trials.read(ledger, record)
    assert without_plan
    assert without_plan.summary() == "0 of 9 done", "there is no plan yet"
    planned_study = replace(tuning.build_study(hyperparameters, (), "", None), earlier=[EarlierTrial({"x": "1"}, 0.5)])
    ledger.create_plan(Plan("job01", ["master-0"], "m", [], {}, study=planned_study))
    with_plan = trials.read(ledger, record)
    assert with_plan
    assert with_plan.summary() == "0 of 8 done"


def test_the_best_trial_of_a_study_is_found(ledger: Ledger, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = JobRecord("job01", trainingInput={"hyperparameters": HYPERPARAMETERS})
    assert trials.best_trial(ledger, JobRecord("job01")) is None
    with pytest.raises(OpsError, match=r"no trial of job job01 \(QUEUED\) has SUCCEEDED: fab describe job01"):
        trials.best_trial(ledger, record)
    for item in (trial(1, 0.5), trial(2, 0.75)):
        ledger.create_trial("job01", item)
    best_trial = trials.best_trial(ledger, record)
    assert best_trial
    assert best_trial.trialId == 2
    trials.note_best_trial(record, best_trial)
    note = "job01 tuned hyperparameters; trial 2 is the best: --x=2\n"
    assert capsys.readouterr().err == note
    (tmp_path / "jobs/job01/trials/3.json").write_text("{")
    assert trials.best_trial(ledger, record) == best_trial
    assert capsys.readouterr().err.startswith("trial 3 is not shown: ")
    odd = JobRecord("job02", trainingInput={"hyperparameters": {"params": []}})
    with pytest.raises(
        OpsError, match=r"^what job job02 tunes cannot be read: hyperparameters: ?params must be a list"
    ) as error:
        trials.read(ledger, odd)
    assert type(error.value) is OpsError
