"""Check that one spec gives the same host files on both targets, except addresses and the bucket."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from stackmocks import Program, Stack
from test_firewall_answers import CUSTOM

from infra.inventory import Inventory
from ops.cluster.host_files import render
from ops.cluster.inventory import parse
from ops.submit.config import JobFlags, build_job
from ops.submit.job_plan import plan

# A local host gets a share of the machine. Here both get the memory of the machine type, 15 GiB.
MEMORY = '{"ps": "15GiB", "master": "15GiB", "worker": "15GiB", "evaluator": "15GiB"}'
LIMITS = "/etc/systemd/system/scaletier-trainer.service.d/host.conf"
GPUS = {**CUSTOM, "acceleratorType": '{"worker": "nvidia-tesla-t4"}', "provisioningModel": '{"worker": "SPOT"}'}


def host_files(stack: Stack, folder: Path) -> tuple[Inventory, dict[str, dict[str, tuple[object, ...]]]]:
    """Return each host's files and its trainer's environment, as `plan.json`."""
    inventory = parse(json.dumps(stack.inventory), folder)
    job = build_job(JobFlags("job01", args="--batch-size 100"), inventory)
    tasks = plan(inventory, job, "").tasks
    return inventory, {
        host: {
            "plan.json": (tasks[host].tfConfig, *(f"{key}={value}" for key, value in tasks[host].environment.items())),
            **{file.path: (file.content,) for file in rendered},
        }
        for host, rendered in render(inventory).items()
    }


def neutralize(inventory: Inventory, file: tuple[object, ...]) -> tuple[object, ...]:
    """Return a file without the stack's addresses, bucket, poll interval and start API."""
    return tuple(_neutralize_text(inventory, part) if isinstance(part, str) else part for part in file)


def _neutralize_text(inventory: Inventory, text: str) -> str:
    for host in inventory.hosts:
        text = text.replace(f'"{host.address}:', f'"ADDRESS-OF-{host.name}:')
        text = re.sub(rf"^(MASTER_ADDR|JAX_COORDINATOR_ADDRESS)={re.escape(host.address)}(?![0-9])", rf"\1={host.name}", text)
    text = re.sub(r'"pollSeconds":[0-9.]+', "POLL", re.sub(r"OnUnitInactiveSec=[0-9]+", "IDLE", text))
    text = re.sub(r"TasksMax=[0-9]+", "TASKS", text)  # depends on the CPUs, and a local host has a share of those
    text = re.sub(r'"power":(null|\{.*\}(?=\}))', "POWER", text)
    return text.replace(f' "{inventory.bucket}"\n', "\n").replace(inventory.bucket, "BUCKET")


@pytest.mark.parametrize("config", [CUSTOM, GPUS], ids=["plain", "gpus"])
def test_only_addresses_the_bucket_and_the_start_api_differ(program: Program, tmp_path: Path, config: dict[str, str]) -> None:
    lxd, local = host_files(program("lxd", **config, memory=MEMORY), tmp_path)
    gcp, cloud = host_files(program("gcp", **config), tmp_path)
    assert local.keys() == cloud.keys() == {host.name for host in gcp.hosts}
    assert local != cloud
    for host in local:
        assert local[host].keys() == cloud[host].keys()
        for path, file in local[host].items():
            assert neutralize(lxd, file) == neutralize(gcp, cloud[host][path]), f"{host} {path}"


def test_a_gpu_changes_only_the_accelerator(program: Program, tmp_path: Path) -> None:
    plain, without = host_files(program("gcp", **CUSTOM), tmp_path)
    fast, with_gpus = host_files(program("gcp", **GPUS), tmp_path)
    changed = {
        (host, path)
        for host in without
        for path, file in without[host].items()
        if neutralize(plain, file) != neutralize(fast, with_gpus[host][path])
    }
    assert changed == {(f"worker-{index}", path) for index in range(3) for path in (LIMITS, "plan.json")}
    accelerators = [part for part in with_gpus["worker-0"]["plan.json"][1:] if "ACCELERATOR" in str(part)]
    assert accelerators == ["SCALETIER_ACCELERATOR=1 nvidia-tesla-t4"]
    assert len(with_gpus["worker-0"]["plan.json"]) == len(without["worker-0"]["plan.json"]) + 1
    assert "PrivateDevices=no" in str(with_gpus["worker-0"][LIMITS][0])
