"""A Google cluster from its first boot to a model: hosts, start-up script, stack folder; fakes.py has the services."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import requests
from cloud import Cloud, Stack
from waiting import limit, wait_for

REPLICAS = ("master-0", "worker-0", "worker-1", "ps-0")
_FINAL, _RESUMED_FINAL = (re.compile(f"Final metrics after {tens}[0-9] steps") for tens in (3, 5))
"""The end of 30 and of 50 steps, as each of three replicas may take a step too many."""
TINY = ("--package", "tests/trainers/tiny", "--module", "tiny.task")


def test_hosts_install_everything_from_the_bucket(cloud: Cloud, cluster: Stack) -> None:
    assert len(cloud.google.machines) == len(REPLICAS)
    runtimes = {machine.guest["scaletier/runtime"] for machine in cloud.google.machines.values()}
    assert len(runtimes) == 1
    assert cloud.machines.count_refused_packets() == 0, "no host tries to reach a non-Google address"
    for machine in cloud.google.machines.values():
        python = "/opt/scaletier/venv/bin/python"
        output = cloud.machines.run(
            machine.name, python, "-c", "import tensorflow as tf, optuna, uvicorn; print(tf.__version__)"
        )
        assert output.splitlines()[-1] == "2.21.0"
        assert cloud.machines.run(machine.name, "find", "/opt/scaletier/venv/", "-type", "f", "-perm", "/222") == ""


def test_a_job_runs_is_followed_and_described(cloud: Cloud, cluster: Stack) -> None:
    lines = cloud.fab("train", "--job", "tiny1", *TINY, "--", "--seconds", "2")
    for replica in REPLICAS:
        assert f"INFO    {replica}" in lines
    assert "job SUCCEEDED" in lines
    record = json.loads(cloud.fab("describe", "tiny1", "--json"))
    assert record["state"] == "SUCCEEDED"
    cloud.fab("delete", "tiny1", "--yes")
    assert "tiny1" not in cloud.fab("jobs")


def test_tensorflow_trains_over_gs_and_its_output_is_fetched(cloud: Cloud, cluster: Stack, tmp_path: Path) -> None:
    lines = cloud.fab("train", "--job", "mlp1", "--", "--model", "mlp", "--max-steps", "30")
    assert _FINAL.search(lines)
    assert f"Exporting prediction graph to {cluster.inventory['bucket']}/jobs/mlp1/output/export/" in lines
    cloud.fab("get", "mlp1", "--dest", str(tmp_path / "mlp1"))
    fetched = {path.name for path in (tmp_path / "mlp1").rglob("*") if path.is_file()}
    assert {"checkpoint", "saved_model.pb", "evaluation.json"} <= fetched


def test_a_job_resumes_from_another_jobs_checkpoint(cloud: Cloud, cluster: Stack) -> None:
    lines = cloud.fab("train", "--job", "mlp2", "--resume", "mlp1", "--", "--model", "mlp", "--max-steps", "50")
    assert "Resuming from gs://" in lines
    assert _RESUMED_FINAL.search(lines)


def test_logs_and_costs_remain_after_a_job(cloud: Cloud, cluster: Stack) -> None:
    assert _FINAL.search(cloud.fab("logs", "master-0", "--job", "mlp1"))
    costs = json.loads(cloud.fab("cost", "--json"))
    assert {job["jobId"] for job in costs["jobs"]} >= {"mlp1", "mlp2"}
    assert all(job["cost"] > 0 for job in costs["jobs"])


def test_a_trainer_reaches_only_its_output_in_the_bucket(cloud: Cloud, cluster: Stack) -> None:
    bucket = cluster.inventory["bucket"]
    lines = cloud.fab("train", "--job", "nosy1", "--package", "tests/trainers/nosy", "--module", "nosy.task", "--", bucket)
    outcomes = dict(re.findall(r"nosy (\S+) (.+)$", lines, re.MULTILINE))
    assert outcomes == {
        "tf-write-output": "done",
        "tf-list-output": "done",
        "fsspec-write-output": "done",
        "tf-list-jobs": "unseen",
        "tf-read-other": "refused",
        "tf-write-record": "refused",
        "tf-delete-other": "refused",
        "fsspec-read-queue": "refused",
        "fsspec-write-record": "refused",
        "ask-address": "refused",
        "ask-name": "refused",
    }
    assert cloud.objects("jobs/mlp1/output/evaluation.json") == ["jobs/mlp1/output/evaluation.json"]


def test_tensorboard_shows_summaries_from_the_bucket(cloud: Cloud, cluster: Stack) -> None:
    with cloud.running("tensorboard", "--job", "mlp1") as process:
        assert process.stdout is not None
        output = ""
        while not (match := re.search(r"^http://127\.0\.0\.1:\d+/", output, re.MULTILINE)):
            line = process.stdout.readline()
            assert line, output
            output += line
        url = match[0]
        wait_for(lambda: requests.get(f"{url}data/runs", timeout=limit()).json() == ["summaries"], "it shows the run", poll=0.5)
        tags = requests.get(f"{url}data/plugin/scalars/tags", timeout=limit()).json()
    assert "loss" in tags["summaries"]


def test_a_model_is_exported_deployed_and_predicts(cloud: Cloud, cluster: Stack, tmp_path: Path) -> None:
    cloud.fab("export", "mlp1", "--dest", str(tmp_path / "model"))
    assert list((tmp_path / "model").rglob("saved_model.pb"))
    cloud.fab("deploy", "--job", "mlp1", "--model", "digits", "--version", "v1")
    instances = tmp_path / "instances.json"
    instances.write_text(json.dumps({"key": 7, "image": [0.0] * 784}) + "\n")
    output = cloud.fab("predict", "--model", "digits", "--json-instances", str(instances), "--json")
    (answer,) = json.loads(output)["predictions"]
    assert answer["key"] == 7
    cloud.fab("delete-version", "digits", "v1", "--yes")
    assert cloud.objects("models/digits/v1/") == []


def test_one_of_two_jobs_with_the_same_id_is_created(cloud: Cloud, cluster: Stack) -> None:
    """The bucket's precondition detects the second."""
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda _: cloud.run("train", "--job", "twice", "--no-follow", *TINY), range(2)))
    assert sorted(result.returncode for result in results) == [0, 2]
    (refused,) = [result.stderr for result in results if result.returncode]
    assert "job id 'twice' was used before" in refused
    cloud.fab("wait", "twice")


def test_a_cancelled_job_is_exported_from_its_checkpoint(cloud: Cloud, cluster: Stack, tmp_path: Path) -> None:
    """Export by the job's own program, on a host, with the job's permissions."""
    cloud.fab(
        "train", "--job", "long1", "--no-follow", "--", "--model", "mlp", "--max-steps", "10000000", "--checkpoint-steps", "100"
    )
    saved = "jobs/long1/output/checkpoints/model"
    wait_for(lambda: any(name.endswith(".index") for name in cloud.objects(saved)), "there is a checkpoint", 300, poll=0.5)
    cloud.fab("cancel", "long1")
    assert json.loads(cloud.fab("describe", "long1", "--json"))["state"] == "CANCELLED"
    assert cloud.objects("jobs/long1/output/export/") == []
    cloud.fab("export", "long1", "--dest", str(tmp_path / "model"))
    assert (tmp_path / "model" / "saved_model.pb").is_file()


def test_running_hosts_run_a_changed_start_up_script(cloud: Cloud, cluster: Stack) -> None:
    hosts = [machine.name for machine in cloud.google.machines.values()]
    for host in hosts:
        cloud.machines.run(host, "touch", "/run/not-booted-since")
    cluster.up(idleTimeout="30m")
    assert [cloud.machines.run(host, "systemctl", "is-active", "scaletier-idle.timer") for host in hosts] == ["active\n"] * len(
        hosts
    )
    cluster.up(idleTimeout="0")
    assert [cloud.machines.run(host, "systemctl", "is-active", "scaletier-idle.timer") for host in hosts] == [
        "inactive\n"
    ] * len(hosts)
    assert all("not-booted-since" in cloud.machines.run(host, "ls", "/run") for host in hosts)
