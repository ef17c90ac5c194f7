"""Invalid configuration is refused before anything is declared, in one line with the remedy."""

from __future__ import annotations

import json
import runpy
from collections.abc import Mapping
from typing import Any

import pulumi
import pytest
from stackmocks import PROJECT, STACK, ZONE, record_program
from test_firewall_answers import CUSTOM

from infra.templates import ROOT

GOOD = {"project": PROJECT, "zone": ZONE}


def get_error(monkeypatch: pytest.MonkeyPatch, provider: Mapping[str, str], target: str = "gcp", **raw: str) -> str:
    """Return the program's error, and check that it declared nothing before."""
    errors: list[str] = []
    config = {f"scaletier:{key}": value for key, value in {"target": target, **raw}.items()}
    monkeypatch.setenv("PULUMI_CONFIG", json.dumps(config | {f"gcp:{key}": value for key, value in provider.items()}))
    monkeypatch.setattr(pulumi.log, "error", lambda message, *_: errors.append(message))

    def program() -> None:
        with pytest.raises(SystemExit):
            runpy.run_path(str(ROOT / "infra" / "__main__.py"), run_name="infra.__main__")

    stack = record_program(program)
    assert [item.type for item in stack.resources if not item.type.startswith("pulumi:")] == []
    (message,) = errors
    assert "\n" not in message
    return message


PLACES = {
    "no Google Cloud project": {"zone": ZONE},
    "not its name or number": {"project": "My Project", "zone": ZONE},
    "no zone: `pulumi config set gcp:zone us-central1-a`": {"project": PROJECT},
    "a zone is a region and a letter": {"project": PROJECT, "zone": "us-central1"},
    "is not in gcp:region europe-west1": {**GOOD, "region": "europe-west1"},
    "is not a region, such as us-central1": {**GOOD, "region": "Iowa"},
}


@pytest.mark.parametrize("words", PLACES)
def test_an_invalid_project_zone_or_region_is_refused(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    assert words in get_error(monkeypatch, PLACES[words])


CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("machine type 'n1-standard-3' is unknown; valid are n1-standard-1, ", {**CUSTOM, "workerType": "n1-standard-3"}),
    ("valid are n1-…, n2-…, e2-…, g2-…, a2-…", {**CUSTOM, "workerType": "large_model"}),
    ("acceleratorType 'k80' is unknown; valid are nvidia-tesla-t4", {"acceleratorType": '{"worker": "k80"}'}),
    ("goes with 12 vCPUs at most, n1-highcpu-16 has 16; n1-highcpu-16 takes 2, 4, 8 of them",
     {"scaleTier": "PREMIUM_1", "acceleratorType": '{"worker": "nvidia-tesla-v100"}'}),
    ("this cluster has no worker; it has master", {"scaleTier": "BASIC", "provisioningModel": '{"worker": "SPOT"}'}),
    ("scaletier:acceleratorCount.worker must be at least 1, not 0",
     {"acceleratorType": '{"worker": "nvidia-tesla-t4"}', "acceleratorCount": '{"worker": 0}'}),
    ("acceleratorCount.worker needs the type too", {"acceleratorCount": '{"worker": 1}'}),
    ("label Team=x is not valid", {"labels": '{"Team": "x"}'}),
    ("label goog-x is Google's own", {"labels": '{"goog-x": "y"}'}),
    ("label scaletier-role is set by the stack itself", {"labels": '{"scaletier-role": "y"}'}),
    ("a bucket's name has 3 to 63 lowercase letters", {"bucket": "My Bucket"}),
    ("ssh from a range larger than /8 is refused", {"operatorCidr": "0.0.0.0/0"}),
    ("write a private /20 range", {"network": "10.0.0.0/24"}),
    ("write a private /20 range", {"network": "127.0.0.0/20"}),
    ("scaletier:egress 'none' is unknown; valid are closed, open", {"egress": "none"}),
    ("write a whole version of TensorFlow 2", {"runtimeVersion": "1.15"}),
    ("write a time of 5 minutes or more", {"idleTimeout": "10s"}),
    ("scaletier:machineType is unknown; valid are ", {"machineType": "n1-standard-1"}),
    ("more than maxHourlyCost 1:", {"maxHourlyCost": "1"}),
    ("worker count 2001 is too high; valid are 0 to 2000", {**CUSTOM, "workerCount": "2001"}),
    ("serving count 41 is too high; valid are 0 to 40", {"servingCount": "41"}),
    ("scaletier:servingCount must be at least 0, not '-1'", {"servingCount": "-1"}),
    ("scaletier:servingCount must be a whole number, not 'two'", {"servingCount": "two"}),
    ("serving: machine type 'n1-standard-3' is unknown; valid are n1-standard-1, ",
     {"servingCount": "1", "servingType": "n1-standard-3"}),
    ("scaletier:servingType is n1-standard-4, and scaletier:servingCount is 0: `pulumi config set servingCount 1`, or",
     {"servingType": "n1-standard-4"}),
    ("g2-standard-4 does not boot from pd-standard: `pulumi config set bootDiskType pd-balanced`",
     {**CUSTOM, "workerType": "g2-standard-4", "bootDiskType": "pd-standard"}),
    ("this cluster has no serving; it has master", {"scaleTier": "BASIC", "acceleratorType": '{"serving": "nvidia-l4"}'}),
]  # fmt: skip


@pytest.mark.parametrize(("words", "config"), CONFIGS, ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_an_invalid_configuration_is_refused(monkeypatch: pytest.MonkeyPatch, words: str, config: dict[str, str]) -> None:
    assert words in get_error(monkeypatch, GOOD, **config)


def test_a_zone_without_the_gpu_is_refused_with_other_zones(monkeypatch: pytest.MonkeyPatch) -> None:
    message = get_error(monkeypatch, {**GOOD, "zone": "us-east1-b"}, scaleTier="BASIC_GPU")
    assert message == "zone us-east1-b has no nvidia-tesla-t4; in its region it is in us-east1-c, us-east1-d"
    assert "europe-west4-a" in get_error(monkeypatch, {**GOOD, "zone": "africa-south1-a"}, scaleTier="BASIC_GPU")


def test_an_unreadable_state_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_to_read(_: str) -> Any:
        raise Exception(f"invoke of x failed: invocation of x returned an error: unknown stack\n{STACK}")

    monkeypatch.setattr("infra.state._read", fail_to_read)
    assert get_error(monkeypatch, GOOD) == f"the stack's state cannot be read: unknown stack {STACK}"


def test_the_local_target_limits_hosts_by_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**CUSTOM, "workerCount": "61"}
    assert "worker count 61 is too high; valid are 0 to 60" in get_error(monkeypatch, {}, target="lxd", **config)
    assert "serving count 61 is too high; valid are 0 to 60" in get_error(monkeypatch, {}, target="lxd", servingCount="61")


CPUS = "write a whole number of cpus, 1 or more, or a share of one, 0.05 to 0.99"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"disk": '{"worker": "512MiB"}'}, "write a size of 1GiB or more, such as 8GiB"),
        ({"disk": '{"chief": "8GiB"}'}, "scaletier:disk.chief"),
        ({"disk": "8GiB"}, "scaletier:disk must be a map: set one with `pulumi config set --path disk.name value`"),
        ({"bucketSize": "100"}, "write a size of 1GiB or more, such as 16GiB"),
        *(({"cpus": f'{{"worker": {cpus}}}'}, CPUS) for cpus in ("0", "-1", "0.04", "0.255", "1.5", "Infinity", "NaN")),
        ({"network": "10.0.0.0/20"}, "write a private /24 range, such as 10.77.0.0/24"),
        ({"memory": '{"worker": "2GB"}'}, "write a size of 256MiB or more, such as 512MiB or 2GiB"),
        ({**CUSTOM, "masterType": "foo"},
         "scaletier:masterType 'foo' is invalid: write a machine type of Compute Engine, such as n1-standard-4, or of Cloud "),
        ({"servingCount": "1", "servingType": "n1-"}, "scaletier:servingType 'n1-' is invalid: write a machine type of"),
    ],
)  # fmt: skip
def test_an_invalid_size_of_a_local_host_is_refused(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, str], words: str
) -> None:
    assert words in get_error(monkeypatch, {}, target="lxd", **config)
