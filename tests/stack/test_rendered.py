"""One spec, two targets: every file of every host is the same but for addresses and the bucket."""

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
from ops.submit.render import plan

# A local host has its share of the machine; here both have what the machine type has, 15 GiB.
MEMORY = '{"ps": "15GiB", "master": "15GiB", "worker": "15GiB", "evaluator": "15GiB"}'
LIMITS = "/etc/systemd/system/scaletier-trainer.service.d/host.conf"
GPUS = {**CUSTOM, "acceleratorType": '{"worker": "nvidia-tesla-t4"}', "provisioningModel": '{"worker": "SPOT"}'}


def files(stack: Stack, folder: Path) -> tuple[Inventory, dict[str, dict[str, tuple[object, ...]]]]:
    """Return each host's files, and as one more its trainer's environment."""
    inventory = parse(json.dumps(stack.inventory), folder)
    job = build_job(JobFlags("job01", args="--batch-size 100"), inventory)
    tasks = plan(inventory, job, "").tasks
    return inventory, {
        host: {
            "plan.json": (tasks[host].tfConfig, *(f"{key}={value}" for key, value in tasks[host].environment.items())),
            **{file.path: (file.content, file.mode, file.group) for file in found},
        }
        for host, found in render(inventory).items()
    }


def neutral(inventory: Inventory, file: tuple[object, ...]) -> tuple[object, ...]:
    """Return a file without the stack's addresses, bucket, poll interval and start API."""
    return tuple(_neutral(inventory, part) if isinstance(part, str) else part for part in file)


def _neutral(inventory: Inventory, text: str) -> str:
    for host in inventory.hosts:
        text = text.replace(f'"{host.address}:', f'"ADDRESS-OF-{host.name}:')
        text = re.sub(rf"^(MASTER_ADDR|JAX_COORDINATOR_ADDRESS)={re.escape(host.address)}(?![0-9])", rf"\1={host.name}", text)
    text = re.sub(r'"pollSeconds":[0-9.]+', "POLL", re.sub(r"OnUnitInactiveSec=[0-9]+", "IDLE", text))
    text = re.sub(r"TasksMax=[0-9]+", "TASKS", text)  # by processors, of which a local host has its share, too
    text = re.sub(r'"power":(null|\{.*\}(?=\}))', "POWER", text)
    return text.replace(f' "{inventory.bucket}"\n', "\n").replace(inventory.bucket, "BUCKET")


@pytest.mark.parametrize("config", [CUSTOM, GPUS], ids=["plain", "gpus"])
def test_only_addresses_the_bucket_and_who_is_asked_differ(program: Program, tmp_path: Path, config: dict[str, str]) -> None:
    lxd, local = files(program("lxd", **config, memory=MEMORY), tmp_path)
    gcp, cloud = files(program("gcp", **config), tmp_path)
    assert local.keys() == cloud.keys() == {host.name for host in gcp.hosts}
    assert local != cloud
    for host in local:
        assert local[host].keys() == cloud[host].keys()
        for path, found in local[host].items():
            assert neutral(lxd, found) == neutral(gcp, cloud[host][path]), f"{host} {path}"


def test_the_accelerator_is_all_that_a_gpu_changes(program: Program, tmp_path: Path) -> None:
    plain, without = files(program("gcp", **CUSTOM), tmp_path)
    fast, with_gpus = files(program("gcp", **GPUS), tmp_path)
    changed = {
        (host, path)
        for host in without
        for path, found in without[host].items()
        if neutral(plain, found) != neutral(fast, with_gpus[host][path])
    }
    assert changed == {(f"worker-{index}", path) for index in range(3) for path in (LIMITS, "plan.json")}
    told = [part for part in with_gpus["worker-0"]["plan.json"][1:] if "ACCELERATOR" in str(part)]
    assert told == ["SCALETIER_ACCELERATOR=1 nvidia-tesla-t4"]
    assert len(with_gpus["worker-0"]["plan.json"]) == len(without["worker-0"]["plan.json"]) + 1
    assert "PrivateDevices=no" in str(with_gpus["worker-0"][LIMITS][0])
