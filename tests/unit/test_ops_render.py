"""Check the files of a host and the plan of a job: their content, and that no value can break out of them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opsdata import inventory_json

from hosts.agent import __main__ as agent
from hosts.agent import supervisor
from infra.inventory import Inventory
from jobs.queue import place
from jobs.records import HostConfig, Plan
from ops.cluster.cluster import ClusterClient
from ops.cluster.host_files import heartbeat_seconds, idle_poll_seconds, render
from ops.cluster.inventory import parse
from ops.package.package import Package
from ops.submit.config import JobFlags, JobSpec, build_job
from ops.submit.job_plan import plan, secret_files
from ops.submit.manifest import manifest
from ops.submit.resources import candidate_hosts
from ops.submit.runner import dry_run

UNIT, TIMER, LIMITS = (
    f"/etc/systemd/system/{name}.d/host.conf" for name in ("scaletier.service", "scaletier.timer", "scaletier-trainer.service")
)
OWN = " ".join(f"/var/lib/scaletier/{name}" for name in ("fetched", "logs", "secrets", "trials"))
HOSTS = Path(__file__).resolve().parents[2] / "ansible/roles/host/files/root/etc/systemd/system"


def files_of(inventory: Inventory, host: str) -> dict[str, str]:
    return {file.path: file.content for file in render(inventory)[host]}


def placed_plan(inventory: Inventory, job: JobSpec) -> Plan:
    """Return a job's plan with the first candidate hosts."""
    return plan(inventory, job, "").with_hosts(place(candidate_hosts(job.counts, inventory), ()))


def tf_config(inventory: Inventory, job: JobSpec, host: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(placed_plan(inventory, job).tasks[host].tfConfig)
    return config


def test_every_host_has_the_same_files(inventory: Inventory) -> None:
    rendered = render(inventory)
    assert list(rendered) == list(inventory.names)
    for host_files in rendered.values():
        assert [file.path for file in host_files] == ["/etc/scaletier/host.json", UNIT, LIMITS, TIMER]


def test_a_host_file_has_its_name(inventory: Inventory) -> None:
    for name in inventory.names:
        host_file = HostConfig.from_json(files_of(inventory, name)["/etc/scaletier/host.json"])
        assert host_file == HostConfig(name, "/bucket", 0.5, "/opt/scaletier/venv/bin/python")


def test_tf_config(inventory: Inventory) -> None:
    job = build_job(JobFlags("job01", args="--name 'a b'"), inventory)
    cluster = {"ps": ["10.0.0.32:2222"], "chief": ["10.0.0.2:2222"], "worker": ["10.0.0.64:2222", "10.0.0.65:2222"]}
    for host, task in {"master-0": ("chief", 0), "worker-1": ("worker", 1), "evaluator-0": ("evaluator", 0)}.items():
        config = tf_config(inventory, job, host)
        assert config["cluster"] == cluster
        assert config["task"] == {"type": task[0], "index": task[1]}
        assert config["job"]["args"] == ["--name", "a b"]
        assert config["environment"] == "cloud"


def test_the_job_of_tf_config_has_the_keys_of_cloud_ml(inventory: Inventory, tmp_path: Path) -> None:
    (config := tmp_path / "config.yaml").write_text(
        "trainingInput: {environment: {myName: a}, scheduling: {maxRunningTime: 60s}, hyperparameters: "
        "{hyperparameterMetricTag: accuracy, params: [{parameterName: learningRate, type: DISCRETE, discreteValues: [1]}]}}"
    )
    job = build_job(JobFlags("job01", config=str(config)), inventory)
    assert tf_config(inventory, job, "master-0")["job"] == {
        "scale_tier": "BASIC",
        "python_module": "trainer.task",
        "args": [],
        "job_dir": "/bucket/jobs/job01/output",
        "environment": {"myName": "a"},
        "scheduling": {"max_running_time": 60.0},
        "hyperparameters": {
            "hyperparameter_metric_tag": "accuracy",
            "params": [{"parameter_name": "learningRate", "type": "DISCRETE", "discrete_values": [1.0]}],
        },
    }


def test_tf_config_for_code_that_reads_master(inventory: Inventory) -> None:
    job = dataclasses.replace(build_job(JobFlags("job01"), inventory), use_chief=False)
    config = tf_config(inventory, job, "master-0")
    assert "master" in config["cluster"]
    assert "chief" not in config["cluster"]
    assert config["task"]["type"] == "master"


def test_the_environment_of_each_task(inventory: Inventory) -> None:
    tasks = placed_plan(inventory, build_job(JobFlags("job01"), inventory)).tasks
    assert tasks["master-0"].environment == {
        "TYPE": "master",
        "INDEX": "0",
        "JOB_ID": "job01",
        "CLOUD_ML_JOB_ID": "job01",
        "JOB_DIR": "/bucket/jobs/job01/output",
        "SCALETIER_DATA": "/bucket/data",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_ENABLE_ONEDNN_OPTS": "1",
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        "GRPC_VERBOSITY": "ERROR",
        "MASTER_ADDR": "10.0.0.2",
        "MASTER_PORT": "2222",
        "RANK": "0",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "0",
        "JAX_COORDINATOR_ADDRESS": "10.0.0.2:2223",
        "JAX_NUM_PROCESSES": "3",
        "JAX_PROCESS_ID": "0",
    }
    ranks = {name: task.environment.get("RANK") for name, task in tasks.items()}
    assert ranks == {"ps-0": None, "master-0": "0", "worker-0": "1", "worker-1": "2", "evaluator-0": None}
    for name, same in {"GROUP_RANK": "RANK", "JAX_PROCESS_ID": "RANK", "JAX_NUM_PROCESSES": "WORLD_SIZE"}.items():
        assert all(task.environment.get(name) == task.environment.get(same) for task in tasks.values())
    for name in ("ps-0", "evaluator-0"):
        assert not {"MASTER_ADDR", "WORLD_SIZE", "JAX_COORDINATOR_ADDRESS"} & tasks[name].environment.keys()
    assert {name: (task.environment["TYPE"], task.environment["INDEX"]) for name, task in tasks.items()} == {
        name: tuple(name.split("-")) for name in inventory.names
    }


def test_user_variables_override_defaults(inventory: Inventory) -> None:
    job = build_job(JobFlags("job01", env=["TF_CPP_MIN_LOG_LEVEL=0", "A=b=c", "EMPTY="]), inventory)
    for task in plan(inventory, job, "").tasks.values():
        user_values = {name: task.environment[name] for name in ("TF_CPP_MIN_LOG_LEVEL", "A", "EMPTY", "JOB_ID")}
        assert user_values == {"TF_CPP_MIN_LOG_LEVEL": "0", "A": "b=c", "EMPTY": "", "JOB_ID": "job01"}


def test_secrets_are_only_in_the_hosts_secret_files(
    inventory: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOKEN", "s3cr3t-of-ann")
    (tmp_path / "more").write_text("# a comment\n\nOTHER = s3cr3t 'too'\n")
    flags = JobFlags("job01", secret=["TOKEN"], secret_file=str(tmp_path / "more"))
    job = build_job(flags, inventory)
    job_plan = plan(inventory, job, "")
    assert job_plan.secrets == ["OTHER", "TOKEN"]
    (file,) = secret_files(job)
    assert file.path == "/var/lib/scaletier/secrets/job01.json"
    assert json.loads(file.content) == {"TOKEN": "s3cr3t-of-ann", "OTHER": " s3cr3t 'too'"}
    built = Package("trainer", {}, {}, b"")
    dry_run(ClusterClient(inventory), flags, None, as_json=False)
    dry_run(ClusterClient(inventory), flags, None, as_json=True)
    output = capsys.readouterr().out
    assert "TOKEN=(secret)" in output
    for text in (job_plan.to_json().decode(), repr(job), str(manifest(inventory, job, built)), output):
        assert "s3cr3t" not in text
    assert manifest(inventory, job, built)["secrets"] == ["OTHER", "TOKEN"]


def test_the_plan_has_the_jobs_settings(inventory: Inventory, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    scheduling = (
        "{restartPolicy: all, optionalRoles: [worker], maxRestarts: 1, maxWaitTime: 60s, maxRunningTime: 7200, priority: 3}"
    )
    config.write_text(f"trainingInput: {{scheduling: {scheduling}}}")
    job = build_job(JobFlags("job01", config=str(config), args="--train-data=/d1,/d2 --eval-data=/e"), inventory, "mine")
    job_plan = plan(inventory, job, "ab12")
    assert job_plan.replicas == ["master-0", "ps-0", "worker-0", "worker-1", "evaluator-0"]
    assert (job_plan.jobId, job_plan.module, job_plan.packageSha256) == ("job01", "mine.task", "ab12")
    assert job_plan.data == ["/d1", "/d2", "/e"]
    assert (job_plan.restartPolicy, job_plan.optionalRoles, job_plan.maxRestarts) == ("all", ["worker"], 1)
    assert (job_plan.maxWaitTime, job_plan.maxRunningTime) == (60.0, 7200.0)
    assert job_plan.maxRetries == Plan.maxRetries, "the record's default"
    assert list(job_plan.tasks) == job_plan.replicas
    assert Plan.from_json(job_plan.to_json()) == job_plan


@given(st.lists(st.text(), max_size=4))
def test_the_plan_keeps_every_argument_exactly(args: list[str]) -> None:
    inventory = parse(inventory_json(), Path("/nowhere"))
    policy = {"restartPolicy": "replica", "optionalRoles": []}
    job = JobSpec("job01", "trainer.task", tuple(args), "/bucket/jobs/job01/output", policy, training_input={"args": args})
    parsed = Plan.from_json(plan(inventory, job, "").to_json())
    assert parsed.args == args
    assert json.loads(parsed.tasks["worker-0"].tfConfig)["job"]["args"] == args


def test_the_agents_unit(inventory: Inventory) -> None:
    lines = (HOSTS / "scaletier.service").read_text().splitlines()
    (watchdog,) = (line.removeprefix("WatchdogSec=") for line in lines if line.startswith("WatchdogSec="))
    assert int(watchdog) > agent._LONGEST_SLEEP + supervisor._STEP_SECONDS
    for line in (
        "ExecStart=/usr/bin/env --ignore-signal=HUP /opt/scaletier/venv/bin/python -m hosts.agent",
        "SyslogIdentifier=scaletier",
        "User=replica",
        "UMask=0002",
        "Restart=on-failure",
        "RestartPreventExitStatus=2",
        "RestartForceExitStatus=75 SIGHUP",
        "NotifyAccess=main",
        "PrivateDevices=yes",
        "Environment=SCALETIER_LAUNCH=/run/scaletier/launch.sock",
        f"ReadWritePaths={OWN} -/bucket",
        "NoNewPrivileges=yes",
        "ProtectSystem=strict",
        "CapabilityBoundingSet=",
        "SystemCallFilter=@system-service",
        "TimeoutStopSec=600",
        "WantedBy=multi-user.target",
    ):
        assert line in lines
    assert not [line for line in lines if line.startswith("EnvironmentFile")], "a trainer's environment is in the plan"
    drop_ins = {files_of(inventory, name)[UNIT] for name in inventory.names}
    assert drop_ins == {"# Written by fab train.\n[Service]\nMemoryMax=1800000000\n"}


def test_the_agents_timer(inventory: Inventory) -> None:
    timer = (HOSTS / "scaletier.timer").read_text().splitlines()
    assert {"Unit=scaletier.service", "WantedBy=timers.target"} <= set(timer)
    drop_in = files_of(inventory, "ps-0")[TIMER].splitlines()
    assert drop_in[1:] == ["[Timer]", "OnUnitInactiveSec=", "OnUnitInactiveSec=60"], "it replaces the host's value"


def test_the_unit_of_a_gpu_host_and_a_remote_bucket(tmp_path: Path) -> None:
    hosts = json.loads(inventory_json())["hosts"]
    hosts[1]["accelerator"] = {"type": "nvidia-tesla-t4", "count": 1}
    inventory = parse(inventory_json(hosts=hosts, bucket="gs://b", operatorBucket="gs://b"), tmp_path)
    trainers = files_of(inventory, "master-0")[LIMITS], files_of(inventory, "ps-0")[LIMITS]
    assert ["PrivateDevices=no" in content for content in trainers] == [True, False]
    assert ["ProtectClock=yes" in content for content in trainers] == [False, True], "it would deny the unit all devices"
    assert all(
        "MemoryMax=1800000000\nTasksMax=768\n" in content and "/dev/shm:mode=1777,size=900000000\n" in content
        for content in trainers
    )
    job_plan = plan(inventory, build_job(JobFlags("job01"), inventory), "")
    assert job_plan.tasks["master-0"].environment["JOB_DIR"] == "gs://b/jobs/job01/output"
    assert job_plan.tasks["master-0"].environment["SCALETIER_DATA"] == "gs://b/data"


def test_hosts_with_costly_requests_poll_less() -> None:
    assert [idle_poll_seconds(poll) for poll in (0.5, 1.0, 1.01, 10.0)] == [60, 60, 61, 600]
    assert [heartbeat_seconds(poll) for poll in (0.5, 2.0, 2.4, 10.0)] == [5.0, 5.0, 6.0, 25.0]
