"""The files of a host and the plan of a job: what is in them, and that no value can break out of them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opsdata import inventory_json

from infra.inventory import Inventory
from jobs.queue import place
from jobs.records import HostFile, Plan
from ops.cluster.cluster import ClusterClient
from ops.cluster.host_files import render
from ops.cluster.inventory import parse
from ops.package.package import Package
from ops.submit.config import JobFlags, JobSpec, build_job
from ops.submit.manifest import manifest
from ops.submit.render import plan, secret_files
from ops.submit.resources import candidate_hosts
from ops.submit.train import dry_run

UNIT, TIMER, LIMITS = (
    f"/etc/systemd/system/{name}.d/host.conf" for name in ("scaletier.service", "scaletier.timer", "scaletier-trainer.service")
)
OWN = " ".join(f"/var/lib/scaletier/{name}" for name in ("fetched", "logs", "secrets", "trials"))
HOSTS = Path(__file__).resolve().parents[2] / "ansible/roles/host/files/root/etc/systemd/system"


def files(inventory: Inventory, host: str) -> dict[str, str]:
    return {file.path: file.content for file in render(inventory)[host]}


def placed(inventory: Inventory, job: JobSpec) -> Plan:
    """Return a job's plan once it has the hosts that come first."""
    return plan(inventory, job, "").with_hosts(place(candidate_hosts(job.counts, inventory), ()))


def tf_config(inventory: Inventory, job: JobSpec, host: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(placed(inventory, job).tasks[host].tfConfig)
    return config


def test_every_host_has_the_same_files(inventory: Inventory) -> None:
    rendered = render(inventory)
    assert list(rendered) == list(inventory.names)
    for host_files in rendered.values():
        assert [(file.path, oct(file.mode), file.user, file.group) for file in host_files] == [
            ("/etc/scaletier/host.json", "0o640", "root", "replica"),
            (UNIT, "0o644", "root", "root"),
            (LIMITS, "0o644", "root", "root"),
            (TIMER, "0o644", "root", "root"),
        ]


def test_a_host_is_told_who_it_is(inventory: Inventory) -> None:
    for name in inventory.names:
        said = HostFile.from_json(files(inventory, name)["/etc/scaletier/host.json"])
        assert said == HostFile(name, "/bucket", 0.5, "/opt/scaletier/venv/bin/python")


def test_tf_config(inventory: Inventory) -> None:
    job = build_job(JobFlags("job01", args="--name 'a b'"), inventory)
    cluster = {"ps": ["10.0.0.32:2222"], "chief": ["10.0.0.2:2222"], "worker": ["10.0.0.64:2222", "10.0.0.65:2222"]}
    for host, task in {"master-0": ("chief", 0), "worker-1": ("worker", 1), "evaluator-0": ("evaluator", 0)}.items():
        config = tf_config(inventory, job, host)
        assert config["cluster"] == cluster
        assert config["task"] == {"type": task[0], "index": task[1]}
        assert config["job"]["args"] == ["--name", "a b"]
        assert config["environment"] == "cloud"


def test_tf_config_as_the_seeds_code_reads_it(inventory: Inventory) -> None:
    job = dataclasses.replace(build_job(JobFlags("job01"), inventory), use_chief=False)
    config = tf_config(inventory, job, "master-0")
    assert "master" in config["cluster"]
    assert "chief" not in config["cluster"]
    assert config["task"]["type"] == "master"


def test_the_environment(inventory: Inventory) -> None:
    tasks = placed(inventory, build_job(JobFlags("job01"), inventory)).tasks
    assert tasks["master-0"].environment == {
        "TYPE": "master",
        "INDEX": "0",
        "JOB_ID": "job01",
        "JOB_DIR": "/bucket/jobs/job01/output",
        "SCALETIER_DATA": "/bucket/data",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
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


def test_what_the_user_adds_wins_over_what_is_usual(inventory: Inventory) -> None:
    job = build_job(JobFlags("job01", env=["TF_CPP_MIN_LOG_LEVEL=0", "A=b=c", "EMPTY="]), inventory)
    for task in plan(inventory, job, "").tasks.values():
        found = {name: task.environment[name] for name in ("TF_CPP_MIN_LOG_LEVEL", "A", "EMPTY", "JOB_ID")}
        assert found == {"TF_CPP_MIN_LOG_LEVEL": "0", "A": "b=c", "EMPTY": "", "JOB_ID": "job01"}


def test_secrets_go_to_the_hosts_and_nowhere_else(
    inventory: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOKEN", "s3cr3t-of-ann")
    (tmp_path / "more").write_text("# a comment\n\nOTHER = s3cr3t 'too'\n")
    flags = JobFlags("job01", secret=["TOKEN"], secret_file=str(tmp_path / "more"))
    job = build_job(flags, inventory)
    made = plan(inventory, job, "")
    assert made.secrets == ["OTHER", "TOKEN"]
    (file,) = secret_files(job)
    assert (file.path, file.mode, file.user) == ("/var/lib/scaletier/secrets/job01.json", 0o600, "replica")
    assert json.loads(file.content) == {"TOKEN": "s3cr3t-of-ann", "OTHER": " s3cr3t 'too'"}
    built = Package("trainer", {}, {}, b"")
    dry_run(ClusterClient(inventory), flags, None, as_json=False)
    dry_run(ClusterClient(inventory), flags, None, as_json=True)
    shown = capsys.readouterr().out
    assert "TOKEN=(secret)" in shown
    for told in (made.to_json().decode(), repr(job), str(manifest(inventory, job, built)), shown):
        assert "s3cr3t" not in told
    assert manifest(inventory, job, built)["secrets"] == ["OTHER", "TOKEN"]


def test_the_plan(inventory: Inventory, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    scheduling = (
        "{restartPolicy: all, optionalRoles: [worker], maxRestarts: 1, maxWaitTime: 60s, maxRunningTime: 7200, priority: 3}"
    )
    config.write_text(f"trainingInput: {{scheduling: {scheduling}}}")
    job = build_job(JobFlags("job01", config=str(config), args="--train-data=/d1,/d2 --eval-data=/e"), inventory, "mine")
    made = plan(inventory, job, "ab12")
    assert made.replicas == ["master-0", "ps-0", "worker-0", "worker-1", "evaluator-0"]
    assert (made.jobId, made.module, made.packageSha256) == ("job01", "mine.task", "ab12")
    assert made.data == ["/d1", "/d2", "/e"]
    assert (made.restartPolicy, made.optionalRoles, made.maxRestarts) == ("all", ["worker"], 1)
    assert (made.maxWaitTime, made.maxRunningTime) == (60.0, 7200.0)
    assert made.maxRetries == Plan.maxRetries, "what nobody chose is as the record has it"
    assert list(made.tasks) == made.replicas
    assert Plan.from_json(made.to_json()) == made


@given(st.lists(st.text(), max_size=4))
def test_the_plan_has_every_argument_byte_for_byte(args: list[str]) -> None:
    inventory = parse(inventory_json(), Path("/nowhere"))
    policy = {"restartPolicy": "replica", "optionalRoles": []}
    job = JobSpec("job01", "trainer.task", tuple(args), "/bucket/jobs/job01/output", policy, training_input={"args": args})
    read = Plan.from_json(plan(inventory, job, "").to_json())
    assert read.args == args
    assert json.loads(read.tasks["worker-0"].tfConfig)["job"]["args"] == args


def test_the_unit(inventory: Inventory) -> None:
    lines = (HOSTS / "scaletier.service").read_text().splitlines()
    for line in (
        "ExecStart=/opt/scaletier/venv/bin/python -m hosts.agent",
        "ExecReload=/bin/kill -HUP $MAINPID",
        "User=replica",
        "UMask=0002",
        "Restart=on-failure",
        "RestartPreventExitStatus=2",
        "RestartForceExitStatus=75 SIGHUP",
        "WatchdogSec=30",
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
    assert not [line for line in lines if line.startswith("EnvironmentFile")], "what a trainer finds is in the plan"
    told = {files(inventory, name)[UNIT] for name in inventory.names}
    assert told == {"# Written by fab train.\n[Service]\nMemoryMax=1800000000\n"}


def test_the_timer(inventory: Inventory) -> None:
    timer = (HOSTS / "scaletier.timer").read_text().splitlines()
    assert {"Unit=scaletier.service", "WantedBy=timers.target"} <= set(timer)
    told = files(inventory, "ps-0")[TIMER].splitlines()
    assert told[1:] == ["[Timer]", "OnUnitInactiveSec=", "OnUnitInactiveSec=60"], "in the place of what the host has"


def test_the_unit_of_a_host_with_a_gpu_and_a_bucket_elsewhere(tmp_path: Path) -> None:
    hosts = json.loads(inventory_json())["hosts"]
    hosts[1]["accelerator"] = {"type": "nvidia-tesla-t4", "count": 1}
    inventory = parse(inventory_json(hosts=hosts, bucket="gs://b", operatorBucket="gs://b"), tmp_path)
    trainers = files(inventory, "master-0")[LIMITS], files(inventory, "ps-0")[LIMITS]
    assert ["PrivateDevices=no" in each for each in trainers] == [True, False]
    assert ["ProtectClock=yes" in each for each in trainers] == [False, True], "it lets a unit have no device but the clock"
    assert all(
        "MemoryMax=1800000000\nTasksMax=768\n" in each and "/dev/shm:mode=1777,size=900000000\n" in each for each in trainers
    )
    made = plan(inventory, build_job(JobFlags("job01"), inventory), "")
    assert made.tasks["master-0"].environment["JOB_DIR"] == "gs://b/jobs/job01/output"
    assert made.tasks["master-0"].environment["SCALETIER_DATA"] == "gs://b/data"
