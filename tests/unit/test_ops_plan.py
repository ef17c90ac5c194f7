"""Check `fab plan`: from a short run of a package to a stored plan, and from a job's log to its error."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
from opsdata import put_job, write_files

from infra.inventory import Inventory
from infra.scale_tiers import ScaleTier, SpecError
from jobs import cgroup
from jobs.progress import MetricPoint
from ops.cluster.cluster import ClusterClient
from ops.errors import DONE, OpsError, UsageError
from ops.package.package import build
from ops.package.trainer_config import ExchangeKind, TrainerConfig, read
from ops.plan import plan, planned, profile, runs, show
from ops.plan.plan import PlanRequest
from ops.plan.scaling import ClusterShape, PlannedMachine, Prediction, Work, asynchronous, synchronous
from ops.plan.time_to_target import Crossing, MetricTarget, TimeToTargetModel
from ops.submit import manifest
from ops.submit.config import JobFlags, build_job
from ops.submit.program import SHIPPED
from ops.submit.submit import Submission

TRAINER = """
import os, sys, pathlib
seen = {key: os.environ.get(key) for key in ("TF_CONFIG", "TYPE", "JOB_DIR")}
assert seen["TF_CONFIG"] is None and seen["TYPE"] == "master", seen
assert os.environ["TF_ENABLE_ONEDNN_OPTS"] == "1", "jobs have this default"
assert sys.argv[sys.argv.index("--job-dir") + 1] == seen["JOB_DIR"]
assert sys.argv[-2:] == ["--stop-at", "1000000000"], sys.argv
assert "together" not in sys.argv, "this strategy needs several processes"
if "--fail" in sys.argv:
    raise SystemExit("the data is gone")
for n in range(8):
    print(f"Train [master/0], step {10 * n}: loss: 1, accuracy: 0 ({n}.000 sec) 10.0 global steps/s, 10.0 local steps/s")
"""
LEARNER = """
import json, os, sys
cluster = json.loads(os.environ.get("TF_CONFIG", "{}")).get("cluster", {})
if os.environ["TYPE"] != "master":
    print(f"Train [{os.environ['TYPE']}/{os.environ['INDEX']}], step 99: loss: 1, accuracy: 0 (1.000 sec) x")
    raise SystemExit
if "1000000000" in sys.argv:
    for n in range(8):
        print(f"Train [master/0], step {10 * n}: loss: 1, accuracy: 0 ({n}.000 sec) 10.0 global steps/s, 10.0 local steps/s")
    raise SystemExit
replicas = 1 + len(cluster.get("worker", []))
assert ("ps" in cluster) == (replicas > 1 and "together" not in sys.argv), cluster
assert replicas > 1 or "together" not in sys.argv, "this strategy needs several processes"
every = int(sys.argv[sys.argv.index("--look-every") + 1])
assert every == (7 if "--look-every=7" in sys.argv else 5 if "2000" in sys.argv else 16), sys.argv
each = 200 + 100 * replicas
for step in range(every, 2000, every):
    print(f"Eval, step {step}: loss: {1 - step / each / 2}, accuracy: {step / each / 2}", flush=True)
"""
DECLARES = """
strategy: apart
strategies:
  apart: {exchange: servers}
  together: {exchange: all-reduce}
  layers: {}
plan: {steps: --stop-at, syncPeriod: --meet-every, evaluate: --look-every,
  defaultSyncPeriod: 5, parameterBits: 16, defaultSteps: 400}
"""
NO_FLEET: Any = object()  # the bucket needs no host
VCPUS_PER_CPU = plan.vcpus_per_cpu
LINE = "Train [master/0], step {}: loss: 1, accuracy: 0 ({}.000 sec) 9.0 global steps/s, 2.0 local steps/s"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "PLANS", tmp_path / "cache" / "plans")
    monkeypatch.setattr(plan, "vcpus_per_cpu", lambda: 2)
    monkeypatch.setattr(cgroup.os, "sched_getaffinity", {0: {0, 1}}.__getitem__)
    monkeypatch.setattr(cgroup, "available_cpus", partial(cgroup.available_cpus, tmp_path / "cgroup"))
    monkeypatch.setenv("TF_CONFIG", "{}")
    monkeypatch.delenv("TF_ENABLE_ONEDNN_OPTS", raising=False)


@pytest.fixture
def package_folder(tmp_path: Path) -> Path:
    return write_files(tmp_path / "mine", {"__init__.py": "", "task.py": TRAINER, "scaletier.yaml": DECLARES})


def make_request(folder: Path, args: str = "", **changes: Any) -> PlanRequest:
    options = {"module": None, "config": None, "more_args": [], "seconds": 30.0, "parameters_mb": 40.0, **changes}
    return PlanRequest(str(folder), args=args, **options)


def test_a_plan_is_measured_printed_and_stored(package_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.plan(make_request(package_folder, "--meet-every 8 --job-dir /bucket/x"), True) == DONE
    stored_plan = json.loads(capsys.readouterr().out)
    # 10 steps/s on 2 cpus of 2 vCPUs each.
    assert stored_plan["work"] == {"cpu_seconds": pytest.approx(0.4), "parameters": 40e6, "period": 8, "share": 0.5}
    assert set(stored_plan["predictions"]) == {"STANDARD_1", "PREMIUM_1"}
    asynchronous = stored_plan["predictions"]["STANDARD_1"]["apart"]
    assert asynchronous["alone"] == pytest.approx(20)
    assert asynchronous["stepsPerSecond"] == pytest.approx(5 * 8 / (8 * 0.05 + 2 * 20e6 / 2e9), rel=0.01)
    text = next(plan.PLANS.glob("mine.task-*.json")).read_text()
    assert json.loads(text).items() >= stored_plan.items()
    assert text == json.dumps(json.loads(text), indent=1) + "\n"
    assert plan.plan(make_request(package_folder, "--meet-every 8 --strategy together"), False) == DONE
    out = capsys.readouterr().out
    assert "one process here: 10.0 steps/s, 100.0 ms a step on 2 cpus, counted as whole cores\n" in out
    assert "parameters: 40.0 MB as float32; 20.0 MB each way to and from parameter servers, every 8 steps" in out
    rows = [line.split() for line in out.splitlines() if line.startswith(("STANDARD_1", "PREMIUM_1"))]
    assert [row[:4] for row in rows] == [
        ["STANDARD_1", "apart", "5", "3"],
        ["STANDARD_1", "together", "5", "3"],
        ["PREMIUM_1", "apart", "20", "11"],
        ["PREMIUM_1", "together", "20", "11"],
    ]
    assert len(list(plan.PLANS.iterdir())) == 1


def test_cpus_are_those_of_the_quota(package_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cgroup").mkdir()
    (tmp_path / "cgroup/cpu.max").write_text("150000 100000\n")
    plan.plan(make_request(package_folder), False)
    assert "100.0 ms a step on 1.5 cpus, counted as whole cores\n" in capsys.readouterr().out
    stored_plan = json.loads(next(plan.PLANS.iterdir()).read_text())
    assert stored_plan["work"]["cpu_seconds"] == pytest.approx(0.1 * 1.5 * 2)


@pytest.mark.parametrize(
    ("args", "line", "period"),
    [
        (["--meet-every=2", "--meet-every", "8"], "", 8),
        (["--meet-every=2", "--meet-every", "auto"], "", 5),
        (["--meet-every", "9" * 400], "", 5),
        (["--meet-every", "2"], "Exchange every 3 steps", 3),
        (["--meet-every", "0"], "Exchange every 0 steps", 5),
    ],
)
def test_the_sync_period_is_that_of_the_log_or_the_last_flag(args: list[str], line: str, period: int) -> None:
    declared = read({"mine/scaletier.yaml": DECLARES.encode()}, "mine")
    assert plan.sync_period(args, [line], declared.plan) == period


def test_an_undeclared_package_exchanges_all_parameters_every_step(
    package_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (package_folder / "scaletier.yaml").unlink()
    (package_folder / "task.py").write_text(
        re.sub("assert .*stop-at.*", "assert sys.argv[1:] == ['--strategy', 'x', '--job-dir', seen['JOB_DIR']]", TRAINER)
    )
    plan.plan(make_request(package_folder, "--strategy x"), False)
    out = capsys.readouterr().out
    assert "parameters: 40.0 MB as float32; 40.0 MB each way to and from parameter servers, every step" in out
    assert [line.split()[1] for line in out.splitlines() if line.startswith("STANDARD_1")] == ["servers", "all-reduce"]
    assert set(plan.SPEED_MODELS) == set(get_args(ExchangeKind))


def test_a_key_by_an_old_name_is_noted(package_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (package_folder / "scaletier.yaml").write_text(DECLARES.replace("  apart: {", "  apart: {together: [worker], "))
    plan.plan(make_request(package_folder, "--meet-every auto"), True)
    note = "mine/scaletier.yaml: the key together is called allOrNone now: rename it, as the next release reads that alone"
    output = capsys.readouterr()
    assert [line for line in output.err.splitlines() if "is called" in line] == [note]
    assert json.loads(output.out)["work"]["period"] == 5, "the default"


def test_config_sets_module_and_args(package_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("trainingInput: {pythonModule: mine.task, args: [--meet-every, '3']}")
    plan.plan(make_request(package_folder, "", config=str(tmp_path / "config.yaml")), True)
    stored_plan = json.loads(capsys.readouterr().out)
    assert (stored_plan["module"], stored_plan["args"]) == ("mine.task", ["--meet-every", "3"])
    assert stored_plan["work"]["period"] == 3
    plan.plan(make_request(package_folder, "--more", config=str(tmp_path / "config.yaml")), True)
    output = capsys.readouterr()
    assert json.loads(output.out)["args"] == ["--more"]
    assert "ignored" not in output.err
    (tmp_path / "config.yaml").write_text("trainingInput: {pythonModule: mine.task, runtime: requirements.txt}")
    plan.plan(make_request(package_folder, "", config=str(tmp_path / "config.yaml")), True)
    note = f"runtime in {tmp_path}/config.yaml: ignored, a plan is made with the Python that is here"
    assert note in capsys.readouterr().err.splitlines()


def test_variables_in_arguments_are_filled_in(package_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (package_folder / "task.py").write_text(
        f"{TRAINER}\nassert f\"--log={{seen['JOB_DIR']}}/master-0\" in sys.argv, sys.argv\n"
    )
    plan.plan(make_request(package_folder, "'--log=${JOB_DIR}/$TYPE-${INDEX}'"), True)
    assert json.loads(capsys.readouterr().out)["args"] == ["--log=${JOB_DIR}/$TYPE-${INDEX}"], "as in a job's manifest"


@pytest.mark.parametrize("until", [None, plan.parse_target_flags("accuracy=0.5", "1,2", "20")])
def test_config_adds_variables_to_the_environment(
    learning_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: Any
) -> None:
    monkeypatch.setenv("OWN", "${JOB_DIR}")
    monkeypatch.setenv("PYTHONPATH", "/own")
    checks = """
import os, tempfile
env = os.environ
assert (env["OWN"], env["LOG"]) == ("${JOB_DIR}", env["JOB_DIR"] + "/log-" + env["TYPE"]), env
assert env["TF_ENABLE_ONEDNN_OPTS"] == "0", "not the default"
assert os.path.isdir(env["JOB_DIR"]), "as on hosts"
assert tempfile.gettempdir() == os.path.dirname(env["JOB_DIR"]) + "/.tmp", "removed after the plan"
assert env["PYTHONPATH"] == os.path.dirname(env["JOB_DIR"]) + ":" + env["JOB_DIR"] + "/lib", "without that of this process"
"""
    (learning_package / "task.py").write_text(checks + LEARNER)
    config = tmp_path / "config.yaml"
    values = 'LOG: "${JOB_DIR}/log-$TYPE", TF_ENABLE_ONEDNN_OPTS: "0", PYTHONPATH: "${JOB_DIR}/lib"'
    config.write_text(f"trainingInput: {{environment: {{{values}}}}}")
    assert plan.plan(make_request(learning_package, config=str(config), until=until), True) == DONE
    config.write_text("trainingInput: {environment: {JOB_DIR: /x}}")
    with pytest.raises(UsageError, match=r"config.yaml: trainingInput.environment: JOB_DIR is set by the cluster"):
        plan.plan(make_request(learning_package, config=str(config), until=until), True)


UNTIL = plan.parse_target_flags("accuracy=0.5", "1,2,4", "20")


@pytest.fixture
def learning_package(package_folder: Path) -> Path:
    (package_folder / "task.py").write_text(LEARNER)
    return package_folder


def test_time_to_a_target_is_steps_by_rate(learning_package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.plan(make_request(learning_package, until=UNTIL), True) == DONE
    stored_plan = json.loads(capsys.readouterr().out)
    until = stored_plan["until"]
    assert [(run["replicas"], run["steps"]) for run in until["runs"]] == [(1, 300), (2, 400), (4, 600)]
    assert (until["metric"], until["value"], until["strategy"]) == ("accuracy", 0.5, "apart")
    assert (until["leastSteps"], until["noiseSteps"]) == (pytest.approx(100), pytest.approx(200))
    assert until["errorPercent"] == 0
    standard = stored_plan["predictions"]["STANDARD_1"]
    # 5 replicas of the tier take 700 steps; one host alone takes 300.
    seconds = 700 / standard["apart"]["stepsPerSecond"]
    assert standard["apart"]["untilSeconds"] == pytest.approx(seconds, rel=0.01)
    assert standard["apart"]["untilSpeedUp"] == pytest.approx(300 / standard["apart"]["alone"] / seconds, rel=0.01)
    assert standard["together"]["untilSeconds"] is standard["together"]["untilSpeedUp"] is None
    assert json.loads(next(plan.PLANS.glob("mine.task-*.json")).read_text()).items() >= stored_plan.items()


def test_time_to_a_target_is_shown_for_the_measured_strategy(
    learning_package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan.plan(
        make_request(learning_package, "--strategy together", until=plan.parse_target_flags("loss=0.5", "1,2", None)), False
    )
    output = capsys.readouterr()
    assert "steps of all replicas to loss=0.5, by together: 300 with 1, 400 with 2\n" in output.out
    assert "model: 100 steps by each replica, and 200 divided among all; off by 0 % at most\n" in output.out
    assert "STANDARD_1 and PREMIUM_1 have more replicas than the 2 that were tried: extrapolated" in output.err
    assert "TO loss=0.5" in output.out
    assert "SPEED-UP TO IT" in output.out
    rows = [line.split() for line in output.out.splitlines() if line.startswith("STANDARD_1")]
    assert [row[-1] == "-" for row in rows] == [True, False]
    plan.plan(make_request(learning_package, until=plan.parse_target_flags("loss=0.5", "1,5", None)), False)
    output = capsys.readouterr()
    assert "PREMIUM_1 has more replicas than the 5 that were tried: extrapolated" in output.err
    assert "of 5 replicas the last one began" not in output.err
    # 20 replicas take 20 * 100 + 200 steps; 5 of them take 700.
    assert "PREMIUM_1 would take 2200 steps to loss=0.5, and the job has 400\n" in output.err
    assert "STANDARD_1 would take 700 steps to loss=0.5, and the job has 400\n" in output.err
    plan.plan(
        make_request(learning_package, "--stop-at 2000 --look-every 5", until=plan.parse_target_flags("loss=0.5", "1,5", None)),
        False,
    )
    assert re.findall("(\\w+) would take", capsys.readouterr().err) == ["PREMIUM_1"]


def test_the_printed_plan(capsys: pytest.CaptureFixture[str]) -> None:
    fast, slow = Prediction(100.0, 25.0, 5, "compute"), Prediction(60.0, 25.0, 5, "compute")
    predicted = {
        ScaleTier.STANDARD_1: {"apart": fast, "together": slow},
        ScaleTier.BASIC: {"apart": Prediction(5, 5, 1, "compute")},
    }
    until = {
        "metric": "f1",
        "value": 0.5,
        "strategy": "apart",
        "leastSteps": 100.4,
        "noiseSteps": 200.4,
        "errorPercent": 1.6,
        "jobSteps": 703,
        "runs": [{"replicas": 1, "steps": 300.8, "lateSteps": 0}, {"replicas": 4, "steps": 602.0, "lateSteps": 151}],
    }
    show.show(Work(0.1, 40e6, 8, 0.5), 1, predicted, TimeToTargetModel.of(until))
    output = capsys.readouterr()
    assert output.out.splitlines() == [
        "one process here: 20.0 steps/s, 50.0 ms a step on 2 cpus, counted as hyperthreads",
        "parameters: 40.0 MB as float32; 20.0 MB each way to and from parameter servers, every 8 steps",
        "steps of all replicas to f1=0.5, by apart: 301 with 1, 602 with 4",
        "model: 100 steps by each replica, and 200 divided among all; off by 2 % at most",
        "",
        "TIER        STRATEGY  REPLICAS  PS  STEPS/S  MASTER ALONE  SPEED-UP  EFFICIENCY  BOUND BY  TO f1=0.5  SPEED-UP TO IT",
        "STANDARD_1  apart            5   3    100.0          25.0      4.00        0.80  compute   7.0 s                1.71",
        "STANDARD_1  together         5   3     60.0          25.0      2.40        0.48  compute   -                       -",
        "BASIC       apart            1   0      5.0           5.0      1.00        1.00  compute   1 min 0 s            1.00",
    ]
    assert output.err.splitlines() == [
        "of 4 replicas the last one began at step 151: choose a target that takes more steps, to measure it better",
        "STANDARD_1 has more replicas than the 4 that were tried: extrapolated",
        "a model, not a measurement: fab plan --job ID compares it with a job that ran (docs/plan.md)",
    ]
    show.show(
        Work(0.1, 40e6, 1, 1.0), 2, predicted, TimeToTargetModel.of({**until, "runs": until["runs"][:1], "jobSteps": 701})
    )
    assert capsys.readouterr().err.splitlines()[:2] == [
        "STANDARD_1 has more replicas than the 1 that were tried: extrapolated",
        "STANDARD_1 would take 702 steps to f1=0.5, and the job has 701",
    ]
    show.show(Work(0.1, 40e6, 1, 1.0), 2, {ScaleTier.BASIC: predicted[ScaleTier.BASIC]}, None)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "parameters: 40.0 MB as float32; 40.0 MB each way to and from parameter servers, every step",
        "",
        "TIER   STRATEGY  REPLICAS  PS  STEPS/S  MASTER ALONE  SPEED-UP  EFFICIENCY  BOUND BY",
        "BASIC  apart            1   0      5.0           5.0      1.00        1.00  compute",
    ]


def test_rates_below_one_have_three_digits(capsys: pytest.CaptureFixture[str]) -> None:
    slow = Prediction(0.03228, 0.033351, 5, "network")
    assert plan.prediction_to_dict(slow).items() >= {"stepsPerSecond": 0.0323, "alone": 0.0334, "speedUp": 0.968}.items()
    work = Work(62.0, 40e6, 1, 1.0)
    show.show(work, 1, {ScaleTier.STANDARD_1: {"apart": slow}}, None)
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("one process here: 0.0323 steps/s, 31000.0 ms a step")
    assert last.split()[4:7] == ["0.0323", "0.0334", "0.97"]
    check = planned.PlanCheck({"createTime": "", "package": "", "work": vars(work)}, slow, 0.041236, None, 0.0051236)
    planned._show("job01", check, True)
    assert json.loads(capsys.readouterr().out).items() >= {"measured": 0.0412, "untilSeconds": 0.00512}.items()
    planned._show("job01", check, False)
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[1:3]] == ["0.0323", "0.0412"]


@pytest.mark.parametrize(
    ("value", "number"), [(0.0, 0.0), (0.0323456, 0.0323), (0.99951, 1.0), (1.2345, 1.23), (1240.567, 1240.57)]
)
def test_numbers_for_programs_keep_their_digits(value: float, number: float) -> None:
    assert plan.rounded(value) == number


@pytest.mark.parametrize(("steps", "every"), [(None, 25), (8000, 320), (400, 16), (24, 1)])
def test_a_run_has_about_twenty_five_evaluations(
    package_folder: Path, monkeypatch: pytest.MonkeyPatch, steps: int | None, every: int
) -> None:
    (package_folder / "flags.py").write_text('parser.add_argument("--job-dir", required=True)')
    courses: list[tuple[runs.RunSetup, int]] = []

    def run(course: runs.RunSetup, replicas: int, folder: Path) -> runs.MeasuredRun:
        assert (folder / "mine/task.py").exists()
        courses.append((course, replicas))
        points = [MetricPoint(step, {"accuracy": value}) for step, value in ((100, 0.4), (200, 0.6))]
        return runs.MeasuredRun(replicas, Crossing(150.0 * replicas, *points), 7)

    monkeypatch.setattr(runs, "run", run)
    if steps is None:
        (package_folder / "scaletier.yaml").write_text(DECLARES.replace(", defaultSteps: 400", ""))
    built = build(package_folder, "mine.task")
    args = ["--strategy", "together", *(["--stop-at", str(steps)] if steps else [])]
    assert UNTIL
    measured = plan.measure_steps_to_target(built, read(built.files, "mine"), "mine.task", args, {}, UNTIL)
    expected = ["--look-every", str(every)]
    assert [course.argv[-2:] == expected for course, _ in courses] == [True] * 3
    assert [course.argv[-4:-2] for course, _ in courses] == [["--job-dir", course.env["JOB_DIR"]] for course, _ in courses]
    assert [("together" in course.argv, course.servers, replicas) for course, replicas in courses] == [
        (False, False, 1),
        (True, False, 2),
        (True, False, 4),
    ]
    first, second = {"step": 100, "value": 0.4}, {"step": 200, "value": 0.6}
    assert measured == {
        "metric": "accuracy",
        "value": 0.5,
        "strategy": "together",
        "jobSteps": steps,
        "runs": [
            {"replicas": count, "steps": 150.0 * count, "before": first, "after": second, "lateSteps": 7} for count in (1, 2, 4)
        ],
        "leastSteps": pytest.approx(150),
        "noiseSteps": pytest.approx(0, abs=1e-6),
        "errorPercent": 0.0,
    }


@pytest.mark.parametrize(("siblings", "count"), [("0,4\n", 1), ("0-1\n", 1), ("0\n", 2), (None, 1)])
def test_a_processor_is_a_vcpu_if_it_has_siblings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, siblings: str | None, count: int
) -> None:
    monkeypatch.setattr(plan, "_TOPOLOGY", tmp_path / "siblings")
    if siblings is not None:
        (tmp_path / "siblings").write_text(siblings)
    assert VCPUS_PER_CPU() == count


def test_times_below_a_second_have_two_digits() -> None:
    assert [show.format_time_to_target(seconds) for seconds in (0.0341, 0.5, 0.999, 75)] == [
        "0.034 s",
        "0.5 s",
        "1.0 s",
        "1 min 15 s",
    ]


def test_a_run_with_a_late_replica_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    run_record = {"replicas": 2, "lateSteps": 101, "steps": 400.0}
    show._note_late_replicas({"runs": [{**run_record, "lateSteps": 100}, run_record]})
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "of 2 replicas the last one began at step 101: choose a target that takes more steps, to measure it better"
    ]


def test_an_own_evaluation_interval_is_kept(learning_package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = LEARNER.replace('int(sys.argv[sys.argv.index("--look-every") + 1])', "7")
    (learning_package / "task.py").write_text(code.replace("every ==", "'--look-every' not in sys.argv and every =="))
    plan.plan(make_request(learning_package, "--look-every=7", until=UNTIL), True)
    assert json.loads(capsys.readouterr().out)["until"]["runs"][0]["after"]["step"] == 301


def test_an_impossible_target_is_refused_before_any_run(package_folder: Path) -> None:
    (package_folder / "task.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(UsageError, match="fab plan cannot predict --strategy layers; valid are apart, together"):
        plan.plan(make_request(package_folder, "--strategy layers", until=UNTIL), False)
    (package_folder / "scaletier.yaml").write_text(DECLARES.replace(", evaluate: --look-every", ""))
    message = (
        "--until: package mine declares no flag for the steps between two evaluations: say it as plan.evaluate in its scaletier"
    )
    with pytest.raises(UsageError, match=message):
        plan.plan(make_request(package_folder, until=UNTIL), False)


def test_target_flags_are_parsed() -> None:
    assert plan.parse_target_flags(None, None, None) is None
    default_runs = plan.parse_target_flags("accuracy=0.9", None, None)
    assert default_runs == plan.TargetRuns(MetricTarget("accuracy", 0.9), [1, 2, 5], 300)
    with pytest.raises(UsageError, match="--until-seconds 'x' is no number above 0"):
        plan.parse_target_flags("accuracy=0.9", None, "x")
    for flags in (("1,2", None), (None, "5")):
        with pytest.raises(UsageError, match=r"^--(replicas|until-seconds) needs a target: give --until"):
            plan.parse_target_flags(None, *flags)


@pytest.mark.parametrize(
    ("args", "changes", "message", "kind"),
    [
        ("--fail", {}, r"mine.task ended with 1 after .* here: the data is gone", OpsError),
        ("", {"seconds": 1.0}, "--seconds 1 is too short to see a step; valid are 5 and above", UsageError),
        ("'", {}, "--args cannot be split", UsageError),
        ("", {"module": "mine.none"}, "mine.none", UsageError),
        ("", {"parameters_mb": None}, "no checkpoint .*: give --parameters-mb", UsageError),
    ],
)
def test_bad_input_is_one_line_and_stores_nothing(
    package_folder: Path, args: str, changes: dict[str, Any], message: str, kind: type[OpsError]
) -> None:
    with pytest.raises(OpsError, match=message) as error:
        plan.plan(make_request(package_folder, args, **changes), False)
    assert type(error.value) is kind
    assert "\n" not in str(error.value)
    assert not plan.PLANS.exists()


@pytest.mark.parametrize(("steps", "seconds"), [(0, 1.0), (10, 0.01)])
def test_train_lines_that_measure_no_step_are_one_line(
    package_folder: Path, monkeypatch: pytest.MonkeyPatch, steps: int, seconds: float
) -> None:
    lines = [f"Train [master/0], step {steps * n}: loss: 1 ({seconds * n:.3f} sec)" for n in range(8)]
    monkeypatch.setattr(profile, "profile_job", lambda *_: lines)
    message = "the Train lines of mine.task cover no steps, or less than 0.1 s: give it more steps, or --seconds more than 30$"
    with pytest.raises(UsageError, match=rf"^{message}"):
        plan.plan(make_request(package_folder), False)


def test_missing_data_is_refused_before_any_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "ROOT", tmp_path)
    with pytest.raises(UsageError, match="there is no mnist to train on: run make data, or name other data with --train-data"):
        plan.plan(make_request(SHIPPED), False)


@pytest.mark.parametrize("text", ["x", "0", "-1", "inf", "nan"])
def test_numbers_must_be_positive(text: str) -> None:
    assert [plan.number(number, "--seconds") for number in ("1.5", "0.5")] == [1.5, 0.5]
    with pytest.raises(UsageError, match=f"--seconds '{text}' is no number above 0"):
        plan.number(text, "--seconds")


def test_a_plans_path_depends_on_the_work() -> None:
    def path(module: str, *args: str) -> Path:
        return plan.path(module, args, declared)

    declared = read({"mine/scaletier.yaml": DECLARES.encode()}, "mine")
    same = path("m.task", "--model", "cnn", "--stop-at", "5", "--strategy=together")
    assert same == path("m.task", "--job-dir=/x", "--model", "cnn", "--meet-every", "9")
    assert len({same, path("m.task", "--model", "mlp"), path("n.task", "--model", "cnn")}) == 3
    assert same != plan.path("m.task", ["--model", "cnn", "--stop-at", "5"], TrainerConfig())


def test_local_hosts_share_cpus_and_cloud_hosts_do_not(inventory: Inventory) -> None:
    local_shape = planned.cluster_shape(replace(inventory, shared_cpus=2), 2)
    assert local_shape == ClusterShape([PlannedMachine(2)] * 3, [PlannedMachine(2)], 4)
    assert planned.cluster_shape(inventory, 2) == ClusterShape([PlannedMachine(1, 2e9)] * 3, [PlannedMachine(1, 1.25e9)])
    odd = replace(inventory, hosts=tuple(replace(host, machine_type="odd") for host in inventory.hosts))
    assert planned.cluster_shape(replace(odd, shared_cpus=2), 2) == local_shape
    with pytest.raises(SpecError, match="machine type 'odd'"):
        planned.cluster_shape(odd, 2)


@pytest.fixture
def cluster(inventory: Inventory, tmp_path: Path) -> ClusterClient:
    """Return a cluster whose hosts share two processors, and whose bucket is a folder."""
    (tmp_path / "bucket").mkdir()
    return ClusterClient(replace(inventory, shared_cpus=2, operator_bucket=str(tmp_path / "bucket")), NO_FLEET)


def write_job(cluster: ClusterClient, folder: Path, *args: str, env: Sequence[str] = ()) -> None:
    """Write a job that ended to the bucket."""
    job = build_job(JobFlags("job01", more_args=args, env=env), cluster.inventory, "mine")
    submission = Submission(cluster.inventory, job, build(folder, "mine.task"), {})
    put_job(cluster.ledger, submission.record())
    cluster.bucket.upload("jobs/job01/manifest.json", manifest.to_json(submission.manifest()))


def set_log(monkeypatch: pytest.MonkeyPatch, *messages: str) -> None:
    lines = [type("Line", (), {"message": message}) for message in messages]
    monkeypatch.setattr(planned, "read_logs", lambda *_: {"master-0": lines})


def test_a_job_is_compared_with_its_plan(
    cluster: ClusterClient, package_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan.plan(make_request(package_folder, parameters_mb=1e-9), True)
    write_job(cluster, package_folder, "--stop-at", "9")
    set_log(monkeypatch, "Exchange every 2 steps: x", *(LINE.format(9 * n, n) for n in range(9)))
    capsys.readouterr()
    assert planned.compare_with_plan(cluster, "job01", True) == DONE
    output = json.loads(capsys.readouterr().out)
    # One process reached 10 steps/s on the two CPUs, and so do three that share them; the job reached 9.
    stored, predicted = json.loads(next(plan.PLANS.iterdir()).read_text()), output.pop("predicted")
    assert output.pop("plan") == {key: stored[key] for key in ("createTime", "package", "work")}
    assert output == {"job": "job01", "measured": 9.0, "errorPercent": 11.1, "untilSeconds": None}
    speed = {"stepsPerSecond": 10.0, "alone": 5.0, "speedUp": 2.0, "efficiency": 0.667, "replicas": 3, "bound": "shared cpus"}
    assert predicted == {**speed, "untilSeconds": None, "untilSpeedUp": None}
    assert planned.compare_with_plan(cluster, "job01", False) == DONE
    assert capsys.readouterr().out.splitlines() == [
        "           STEPS/S  SPEED-UP  EFFICIENCY",
        "predicted     10.0      2.00        0.67",
        "measured       9.0      1.80        0.60",
        "",
        "job01: the prediction is 11 % too high, bound by shared cpus",
    ]


EVAL = "Eval, step {}: loss: 1, accuracy: {}"


def test_the_time_to_a_target_is_compared_too(
    cluster: ClusterClient, learning_package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan.plan(make_request(learning_package, "--width 3", parameters_mb=1e-9, until=UNTIL), True)
    write_job(cluster, learning_package, "--width", "3", "--look-every", "9")
    messages = [LINE.format(50 * n, 2 * n) for n in range(9)]
    messages[5:5] = [EVAL.format(150, 0.1), EVAL.format(190, 0.7)]
    set_log(monkeypatch, "Exchange every 2 steps: x", *messages)
    capsys.readouterr()
    planned.compare_with_plan(cluster, "job01", True)
    data = json.loads(capsys.readouterr().out)
    # Three replicas take 500 steps, at 10 steps/s; the job reached the target after 150 + 2/3 * 40 steps at 25 steps/s.
    assert data["predicted"]["untilSeconds"] == pytest.approx(50, rel=0.01)
    assert data["untilSeconds"] == 7.07  # (150 + 40 * 2 / 3) / 25
    planned.compare_with_plan(cluster, "job01", False)
    output = capsys.readouterr().out
    assert re.search(r"^ +STEPS/S .* TO accuracy=0.5$", output, re.MULTILINE)
    assert re.search(r"^predicted .* 50\.\d s$", output, re.MULTILINE)
    assert re.search(r"^measured .* 7\.1 s$", output, re.MULTILINE)


def test_a_job_with_other_args_or_without_the_target_is_not_compared() -> None:
    declared = read({"mine/scaletier.yaml": DECLARES.encode()}, "mine")
    until = {"metric": "accuracy", "value": 0.5, "strategy": "apart", "leastSteps": 1, "noiseSteps": 1}
    until |= {"runs": [{"replicas": 2}]}
    stored_plan = {"args": ["--width", "3", "--look-every", "2"], "until": until}
    model = planned.find_time_model(stored_plan, ["--width", "3", "--job-dir", "/x", "--strategy", "apart"], declared)
    assert model
    for args in (["--width", "3", "--stop-at", "9"], ["--width", "3", "--strategy", "together"], ["--width", "4"]):
        assert planned.find_time_model(stored_plan, args, declared) is None
    assert planned.find_time_model({"args": ["--width", "3"]}, ["--width", "3"], declared) is None
    evals = [EVAL.format(10, 0.25), EVAL.format(20, 0.75)]
    assert planned.seconds_to_target(model, [LINE.format(10, 1), LINE.format(20, 2), *evals]) == pytest.approx(1.5)
    assert planned.seconds_to_target(model, [LINE.format(10, 1), LINE.format(20, 2), EVAL.format(10, 0.25)]) is None
    assert planned.seconds_to_target(model, [LINE.format(10, 1), LINE.format(12, 2), *evals]) is None
    assert planned.seconds_to_target(model, [LINE.format(10, 3), LINE.format(11, 1), LINE.format(20, 2), *evals]) is None


def test_an_impossible_comparison_is_one_line(
    cluster: ClusterClient, package_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_log(monkeypatch, LINE.format(1, 1))
    with pytest.raises(UsageError, match="there is no job 'job01'"):
        planned.compare_with_plan(cluster, "job01", False)
    write_job(cluster, package_folder)
    config = tmp_path / "config.yaml"
    config.write_text("trainingInput:\n  environment:\n    OMP_NUM_THREADS: '1'\n")
    plan.plan(make_request(package_folder, config=str(config)), True)
    with pytest.raises(UsageError, match=r"no plan was made of mine.task with these arguments: run fab plan"):
        planned.compare_with_plan(cluster, "job01", False)
    plan.plan(make_request(package_folder), True)
    assert len(list(plan.PLANS.iterdir())) == 2
    write_job(cluster, package_folder, env=["OMP_NUM_THREADS=2"])
    with pytest.raises(UsageError, match=r"with these arguments and this environment: .*, and its environment in --config"):
        planned.compare_with_plan(cluster, "job01", False)
    write_job(cluster, package_folder, env=["OMP_NUM_THREADS=1"])
    with pytest.raises(UsageError, match="job01 logged too few Train lines to measure its speed"):
        planned.compare_with_plan(cluster, "job01", False)
    declared = read({"mine/scaletier.yaml": DECLARES.encode()}, "mine")
    with pytest.raises(UsageError, match="fab plan cannot predict --strategy layers; valid are apart, together"):
        planned.predict(Work(1, 1, 1, 1.0), cluster.inventory, "layers", 1, declared)
    fewer = tuple(host for host in cluster.inventory.hosts if host.name != "worker-1")
    cluster.inventory = replace(cluster.inventory, hosts=fewer)
    with pytest.raises(UsageError, match=r"job01 ran on another cluster: .*2 worker .* - now it is .*1 worker "):
        planned.compare_with_plan(cluster, "job01", False)


def test_a_plan_of_the_same_environment_is_found(
    package_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "variables").write_text("OMP_NUM_THREADS=1\n")
    plan.plan(make_request(package_folder, env=["OMP_NUM_THREADS=2"], env_file=str(tmp_path / "variables")), True)
    (file,) = plan.PLANS.iterdir()
    content = plan.read("mine.task", [], {"OMP_NUM_THREADS": "2"})[0]
    assert content["environment"] == ["OMP_NUM_THREADS"], "a value may be secret"
    file.write_text(json.dumps({**content, "environment": {"OMP_NUM_THREADS": "2"}}))  # as older versions stored it
    assert plan.read("mine.task", [], {"OMP_NUM_THREADS": "2"})[0]["work"] == content["work"]
    with pytest.raises(UsageError, match="its environment in --config or --env"):
        plan.read("mine.task", [], {"OMP_NUM_THREADS": "1"})
    # Older versions stored the plan of a job with variables as that of a job without.
    del content["environment"]
    older = plan.path("mine.task", [], read({"mine/scaletier.yaml": DECLARES.encode()}, "mine"))
    older.write_text(json.dumps({**content, "createTime": "before"}))
    capsys.readouterr()
    for value, create_time in (("1", "before"), ("2", content["createTime"])):
        assert plan.read("mine.task", [], {"OMP_NUM_THREADS": value})[0]["createTime"] == create_time
    assert capsys.readouterr().err.splitlines() == [
        "the plan is of an older version, which did not record the environment: it may be of another one"
    ]
    older.write_text(json.dumps({**content, "environment": {}}))
    with pytest.raises(UsageError, match="no plan was made"):
        plan.read("mine.task", [], {"OMP_NUM_THREADS": "1"})
    assert file.exists()


def test_a_job_is_predicted_by_its_own_strategy(inventory: Inventory) -> None:
    declared, work = read({"mine/scaletier.yaml": DECLARES.encode()}, "mine"), Work(1, 1e9, 1, 1.0)
    apart, together = (model(work, planned.cluster_shape(inventory, 1)) for model in (asynchronous, synchronous))
    assert apart != together
    for strategy, expected in ((None, apart), ("apart", apart), ("together", together)):
        assert planned.predict(work, inventory, strategy, 1, declared) == expected
    assert planned.predict(work, inventory, "any", 1, TrainerConfig()) == apart


@pytest.mark.parametrize(
    "invalid",
    [
        "{",
        "[]",
        '{"work": {}}',
        '{"trainer": {}, "until": {"runs": []}}',
        '{"trainer": {}, "work": {"x": 1}}',
        '{"trainer": {"x": 1}}',
        '{"trainer": {}, "work": {"cpu_seconds": 1, "parameters": 1, "period": 1, "share": 1}, "until": null, "args": []}',
        '{"trainer": {}, "work": {"cpu_seconds": 1, "parameters": 1, "period": 1, "share": 1}, "until": {"runs": []}, '
        '"args": [], "createTime": "", "package": "", "vcpusPerCpu": 1}',
    ],
)
def test_an_invalid_plan_is_one_line(package_folder: Path, invalid: str) -> None:
    plan.plan(make_request(package_folder, parameters_mb=1e-9), True)
    (file,) = plan.PLANS.iterdir()
    args = json.loads(file.read_text())["args"]
    other = plan.PLANS / "mine.task-00000000.json"
    other.write_text(invalid)
    assert plan.read("mine.task", args)[0]["module"] == "mine.task"
    other.unlink()
    file.write_text(invalid)
    with pytest.raises(UsageError, match=rf"^the plan {file} is invalid: .* Run fab plan again$"):
        plan.read("mine.task", args)


@pytest.mark.parametrize(
    "change", [{"args": 7}, {"args": [7]}, {"package": {}}, {"cluster": []}, {"cluster": {"replicas": {"worker": "x"}}}]
)
def test_a_damaged_manifest_is_one_line(cluster: ClusterClient, package_folder: Path, tmp_path: Path, change: Any) -> None:
    write_job(cluster, package_folder)
    file = tmp_path / "bucket/jobs/job01/manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UsageError, match="job job01 has a manifest of an older version"):
        planned.compare_with_plan(cluster, "job01", False)
