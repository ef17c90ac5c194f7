"""Check the hosts of the Google target: security, addresses, machine types, disks, GPUs, spot, startup script."""

from __future__ import annotations

import ipaddress
import subprocess
from collections.abc import Mapping
from typing import Any

import pytest
from gcpcases import A100, GPUS, HOSTS, L4, account_email, role_of
from stackmocks import KEY, SHA256, STACK, Program, Recorded, Stack
from test_firewall_answers import CUSTOM, TIERS

from infra.gcp.image import UBUNTU
from infra.scale_tiers import ScaleTier


def test_every_host_is_hardened(stack: Stack) -> None:
    for item in stack.of("Instance"):
        inputs = item.inputs
        assert inputs["shieldedInstanceConfig"] == {
            "enableSecureBoot": True,
            "enableVtpm": True,
            "enableIntegrityMonitoring": True,
        }
        assert (inputs["canIpForward"], inputs["deletionProtection"]) == (False, False)
        assert inputs["serviceAccount"]["email"] == account_email(role_of(item), stack)
        metadata = inputs["metadata"]
        assert metadata["block-project-ssh-keys"] == "true"
        assert metadata["enable-oslogin"] == "FALSE"
        assert metadata["enable-guest-attributes"] == "TRUE"
        assert metadata["serial-port-enable"] == "FALSE"
        assert metadata["ssh-keys"] == f"admin:{KEY}"
        assert len(metadata["startup-script"]) < 2**18
        assert inputs["allowStoppingForUpdate"] is True
        assert inputs["desiredStatus"] == "RUNNING"
        assert inputs["labels"] == {"scaletier-stack": STACK, "scaletier-role": role_of(item), "scaletier-replica": item.name}
        assert item.options.deleteBeforeReplace


def test_no_host_has_a_public_address_unless_asked_for(program: Program) -> None:
    for item in program("gcp", scaleTier="STANDARD_1").of("Instance"):
        (interface,) = item.inputs["networkInterfaces"]
        assert set(interface) == {"subnetwork", "networkIp"}
    for item in program("gcp", scaleTier="STANDARD_1", publicAddress="true").of("Instance"):
        assert item.inputs["networkInterfaces"][0]["accessConfigs"] == [{"networkTier": "PREMIUM"}]


def test_addresses_go_by_role_and_stay(program: Program) -> None:
    def addresses_of(**config: str) -> dict[str, str]:
        return {item.name: item.inputs["networkInterfaces"][0]["networkIp"] for item in program("gcp", **config).of("Instance")}

    small, large = addresses_of(scaleTier="STANDARD_1"), addresses_of(scaleTier="PREMIUM_1", servingCount="40")
    assert small.items() <= large.items()
    assert len(set(large.values())) == len(large)
    assert all(ipaddress.ip_address(address) in ipaddress.ip_network("10.64.0.0/20") for address in large.values())


@pytest.mark.parametrize("config", TIERS, ids=lambda config: config["scaleTier"])
def test_machine_types_and_disks_are_those_of_the_tier(program: Program, config: dict[str, str]) -> None:
    stack = program("gcp", **config)
    machine_types = {item.name: item.inputs["machineType"] for item in stack.of("Instance")}
    assert len(machine_types) == HOSTS.get(ScaleTier(config["scaleTier"]), 7)
    assert machine_types == {host["name"]: host["machineType"] for host in stack.inventory["hosts"]}
    for item in stack.of("Instance"):
        disk = item.inputs["bootDisk"]
        assert disk["autoDelete"] is True
        assert disk["initializeParams"]["type"] == "pd-ssd"
        assert disk["initializeParams"]["size"] == 100
        assert disk["autoDelete"]
        assert disk["initializeParams"]["image"].startswith("projects/")


def test_the_boot_disk_is_configurable(program: Program) -> None:
    stack = program("gcp", scaleTier="BASIC", bootDiskType="pd-balanced", bootDiskSize="200", image="my-project/my-family")
    disk = stack.one("Instance").inputs["bootDisk"]["initializeParams"]
    assert (disk["type"], disk["size"], disk["image"]) == ("pd-balanced", 200, "my-project/my-family")


STANDARD = {"provisioningModel": "STANDARD", "preemptible": False, "automaticRestart": True}
SPOT = {
    "provisioningModel": "SPOT",
    "preemptible": True,
    "automaticRestart": False,
    "onHostMaintenance": "TERMINATE",
    "instanceTerminationAction": "STOP",
}


def shape(item: Recorded) -> tuple[Any, Mapping[str, Any], str]:
    image = item.inputs["bootDisk"]["initializeParams"]["image"]
    return item.inputs.get("guestAccelerators"), item.inputs["scheduling"], image.rpartition("/")[2]


def test_gpus_and_spot_are_by_role(program: Program) -> None:
    shapes = {item.name: shape(item) for item in program("gcp", **GPUS).of("Instance")}
    assert shapes["master-0"] == (None, STANDARD | {"onHostMaintenance": "MIGRATE"}, "ubuntu-2404-lts-amd64")
    assert shapes["ps-0"] == (None, SPOT, "ubuntu-2404-lts-amd64")
    assert shapes["worker-2"] == ([{"type": "nvidia-tesla-v100", "count": 2}], SPOT, "ubuntu-2404-lts-amd64")
    assert shapes["evaluator-0"] == (
        [{"type": "nvidia-tesla-t4", "count": 1}],
        STANDARD | {"onHostMaintenance": "TERMINATE"},
        "ubuntu-2404-lts-amd64",
    )


def test_a_host_that_loses_its_gpus_or_its_address_is_replaced(program: Program) -> None:
    def replacement_triggers(**config: str) -> dict[str, str]:
        stack = program("gcp", **config)
        return {item.name: item.options.replacement_trigger.string_value for item in stack.of("Instance")}

    plain, gpus = replacement_triggers(**CUSTOM), replacement_triggers(**GPUS)
    assert {name for name in plain if plain[name] != gpus[name]} == {"worker-0", "worker-1", "worker-2", "evaluator-0"}
    assert gpus["worker-0"] == "private, 2 x nvidia-tesla-v100"
    assert replacement_triggers(scaleTier="BASIC", publicAddress="true") == {"master-0": "public"}


def test_gpus_are_those_of_the_tier_or_of_the_machine_type(program: Program) -> None:
    terminates = STANDARD | {"onHostMaintenance": "TERMINATE"}
    basic = program("gcp", scaleTier="BASIC_GPU")
    assert shape(basic.one("Instance"))[:2] == ([{"type": "nvidia-tesla-t4", "count": 1}], terminates)
    assert shape(program("gcp", **L4).one("Instance"))[:2] == ([{"type": "nvidia-l4", "count": 2}], SPOT)
    a100 = program("gcp", **A100)
    assert shape(a100.one("Instance"))[:2] == ([{"type": "nvidia-tesla-a100", "count": 2}], terminates)
    assert a100.inventory["hosts"][0]["accelerator"] == {"type": "nvidia-tesla-a100", "count": 2}


def test_a_startup_script_is_valid_bash_and_installs_the_runtime(program: Program) -> None:
    stack = program("gcp", **GPUS, idleTimeout="30m")
    scripts = {item.name: item.inputs["metadata"]["startup-script"] for item in stack.of("Instance")}
    assert scripts["worker-0"] == scripts["worker-1"]
    assert "tensorflow-cpu==2.21.0" in scripts["ps-0"]
    assert "nvidia" not in scripts["ps-0"]
    assert "tensorflow[and-cuda]==2.21.0" in scripts["worker-0"]
    assert "linux-modules-nvidia-" in scripts["worker-0"]
    assert "AllowUsers scaletier" in scripts["ps-0"]
    assert "-lt 1800 ]" in scripts["ps-0"]
    assert {python.name: python.inputs["python"] for python in stack.of("Runtime")} == {
        "python-3.12": "3.12",
        "python-3.12-gpu": "3.12",
    }
    images = {item.inputs["bootDisk"]["initializeParams"]["image"] for item in stack.of("Instance")}
    assert images == {UBUNTU}, "packages of a job are built for one Python"
    assert stack.inventory["python"] == "3.12"
    assert program("gcp").inventory["python"] == "3.11"
    for script in scripts.values():
        assert f"sha256={SHA256}\n" in script
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    other = program("gcp", scaleTier="BASIC", runtimeVersion="2.20.0").one("Instance").inputs["metadata"]["startup-script"]
    assert "tensorflow-cpu==2.20.0" in other
    assert "enable --now --quiet scaletier-idle.timer" not in other
