"""Tuning on real hosts: the public package `cloudml-hypertune` unchanged, a killed trial, a lost host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from stacks import Stack
from waiting import limit

TUNED = ("--package", "tests/trainers/tuned", "--module", "tuned.task")
PARAMS = [
    {"parameterName": "learning-rate", "type": "DOUBLE", "minValue": 1e-4, "maxValue": 10, "scaleType": "UNIT_LOG_SCALE"},
    {"parameterName": "units", "type": "DISCRETE", "discreteValues": [16, 32, 64]},
]


def config(folder: Path, args: list[str], scheduling: dict[str, Any] | None = None, **keys: object) -> str:
    study = {"hyperparameterMetricTag": "accuracy", "params": PARAMS, **keys}
    training_input = {"scaleTier": "BASIC", "args": args, "hyperparameters": study, "scheduling": scheduling or {}}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({"trainingInput": training_input}))
    return str(path)


def trials(cluster: Stack, job_id: str) -> dict[int, dict[str, Any]]:
    return {trial["trialId"]: trial for trial in cluster.describe(job_id)["trainingOutput"]["trials"]}


def test_every_trial_ends_after_a_kill_and_a_lost_host(cluster: Stack, tmp_path: Path) -> None:
    scheduling = {"lostAfterSeconds": int(limit(10)), "heartbeatSeconds": 2}
    path = config(tmp_path, ["--steps", "8", "--hold", "3"], scheduling, maxTrials=7, maxParallelTrials=3)
    cluster.must("train", "tuned", *TUNED, "--config", path, "--no-follow")
    output = "/bucket/jobs/tuned/output"
    cluster.wait_on("master-0", f"[ $(ls {output}/*/holds 2>/dev/null | wc -l) = 3 ]", timeout=600)
    running = trials(cluster, "tuned")
    assert {trial["replica"] for trial in running.values()} == {"master-0", "worker-0", "worker-1"}
    (lost,) = (number for number, trial in running.items() if trial["replica"] == "worker-1")
    try:
        cluster.stop("worker-1")
        cluster.must_ssh("worker-0", "sudo pkill -KILL -f [t]uned.task")
        cluster.must_ssh("master-0", f"sudo touch {output}/1/go {output}/2/go {output}/3/go")
        record = cluster.wait("tuned", "SUCCEEDED", "FAILED")
    finally:
        cluster.start_host("worker-1")
    assert record["state"] == "SUCCEEDED", record["errorMessage"]
    ended_trials = trials(cluster, "tuned")
    assert sorted(ended_trials) == [1, 2, 3, 4, 5, 6, 7]
    assert {trial["state"] for trial in ended_trials.values()} == {"SUCCEEDED"}
    assert ended_trials[lost]["replica"] != "worker-1", "another host has run it"
    assert sum(trial["restarts"] for trial in ended_trials.values()) == 2
    for number, trial in ended_trials.items():
        report = json.loads(cluster.ssh("master-0", f"cat /bucket/jobs/tuned/output/{number}/done.json").out)
        assert report == {"trial": str(number), "units": int(trial["hyperparameters"]["units"])}
        assert [each["trainingStep"] for each in trial["allMetrics"]] == [*range(1, 9)]
        assert trial["finalMetric"] == trial["allMetrics"][-1]
    values = [trial["finalMetric"]["objectiveValue"] for trial in ended_trials.values()]
    assert values == sorted(values, reverse=True), "the best is first"
    description = cluster.fab("describe", "tuned").out
    best = next(iter(ended_trials.values()))
    assert f"7 of 7 done; best is trial {best['trialId']}, accuracy {best['finalMetric']['objectiveValue']:.6g}" in description


def test_a_missing_metric_fails_the_job_and_names_the_reported_one(cluster: Stack, tmp_path: Path) -> None:
    path = config(tmp_path, ["--steps", "1", "--tag", "score"], maxTrials=30, maxParallelTrials=3, maxFailedTrials=3)
    result = cluster.fab("train", "no_metric", *TUNED, "--config", path)
    assert result.code == 1, result.text
    message = cluster.describe("no_metric")["errorMessage"]
    assert " trials FAILED, and maxFailedTrials is 3" in message
    assert "it reported no accuracy (hyperparameterMetricTag); it reported score" in message
    assert len(trials(cluster, "no_metric")) < 10, "it is not tried thirty times"


def test_a_job_exports_the_model_of_its_best_trial(cluster: Stack, tmp_path: Path) -> None:
    params = [{"parameterName": "learning-rate", "type": "DISCRETE", "discreteValues": [0.0001, 0.1]}]
    grid: dict[str, Any] = {"params": params, "algorithm": "GRID_SEARCH", "maxTrials": 9, "maxParallelTrials": 2}
    path = config(tmp_path, ["--model", "mlp", "--max-steps", "200"], **grid)
    cluster.must("train", "grid", "--config", path)
    ended_trials = trials(cluster, "grid")
    assert [(number, trial["hyperparameters"]["learning-rate"]) for number, trial in ended_trials.items()] == [
        (2, "0.1"),
        (1, "0.0001"),
    ]
    exported = cluster.json("export", "grid", "--dest", str(tmp_path / "model"))
    assert exported["source"].startswith("/bucket/jobs/grid/output/2/")
    resumed = config(tmp_path, ["--model", "mlp", "--max-steps", "200"], **grid, resumePreviousJobId="grid")
    refused = cluster.fab("train", "more", "--config", resumed)
    assert (refused.code, "every point of the grid was tried by grid" in refused.err) == (2, True)
