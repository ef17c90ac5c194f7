"""The keys of a stack's configuration and their errors, and the record of a cluster that is made of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import Field, ValidationError

from infra.config import ClusterConfig
from infra.gcp.machines import machine
from infra.inventory import Host, Inventory, PowerAccess, sum_if_known
from infra.lxd.config import LxdConfig
from infra.scale_tiers import Accelerator, Role, RoleSpec, SpecError
from infra.validation import Section, one_line, refusal

CUSTOM = {"scaleTier": "CUSTOM", "masterType": "n1-standard-4"}


def error_of(config: dict[str, str], kind: type[ClusterConfig] = ClusterConfig) -> str:
    with pytest.raises(SpecError) as caught:
        kind.parse(config).spec()
    return str(caught.value)


def test_an_unknown_key_names_the_closest_one() -> None:
    assert error_of({"workerCuont": "2"}).startswith("scaletier:workerCuont is unknown; did you mean workerCount?; valid are ")


def test_the_defaults_are_a_local_standard_cluster() -> None:
    config = ClusterConfig.parse({})
    assert ClusterConfig.target_of({}) == config.target == "lxd"
    assert ClusterConfig.target_of({"target": "gcp"}) == "gcp"
    assert [config.worker_count, config.parameter_server_count, config.evaluator_count, config.serving_count] == [0] * 4
    assert [config.disrupt_jobs, config.retain_bucket, config.force_destroy] == [False] * 3
    assert config.spec().roles == {
        Role.PS: RoleSpec(3, "n1-standard-4"),
        Role.MASTER: RoleSpec(1, "n1-highcpu-8"),
        Role.WORKER: RoleSpec(4, "n1-highcpu-8"),
    }
    assert ClusterConfig.parse(CUSTOM).spec().roles == {Role.MASTER: RoleSpec(1, "n1-standard-4")}


@pytest.mark.parametrize(
    ("names", "valid"),
    [
        ("n1-standard-4 e2-micro n2d-highcpu-96 a3-megagpu-8g c3-standard-4-lssd custom-4-8192 n1-custom-6-23040-ext", True),
        ("standard large_model complex_model_m complex_model_l_v100 standard_gpu cloud_tpu", True),
        ("f1-micro g1-small m3-ultramem-128 a4x-highgpu-4g ct5lp-hightpu-4t e2-custom-2-4096 c3-standard-192-metal", True),
        ("foo n1 n1- n1-standard-0 N1-standard-4 n1_standard_4 large_model_s 4", False),
        ("n1-standrad-4 n1-standard e2-mikro n1-large-4 n1-4", False),
    ],
)
def test_a_local_host_has_a_machine_type_of_google(names: str, valid: bool) -> None:
    for name in names.split():
        for key in ("masterType", "workerType", "parameterServerType", "evaluatorType", "servingType"):
            if valid:
                assert name in LxdConfig.parse({key: name}).given().values()
            else:
                start = f"scaletier:{key} '{name}' is invalid: write a machine type of Compute Engine, such as n1-standard-4"
                assert error_of({key: name}, LxdConfig).startswith(start)


def test_a_misspelt_machine_type_is_refused_with_the_one_meant() -> None:
    assert error_of({"workerType": "n1-standrad-4"}, LxdConfig).endswith("; did you mean n1-standard-4?")
    with pytest.raises(SpecError, match=r"^machine type 'n1-standrad-4' is unknown; did you mean n1-standard-4\?; valid are "):
        machine("n1-standrad-4")
    with pytest.raises(SpecError, match=r"^machine type 'n1-standard-3' is unknown; valid are "):
        machine("n1-standard-3")


def test_a_custom_cluster_has_what_its_keys_say() -> None:
    config = {
        **CUSTOM,
        "workerType": "n1-highcpu-8",
        "workerCount": "2",
        "servingCount": "1",
        "acceleratorType": '{"worker": "nvidia-tesla-t4", "master": "nvidia-l4"}',
        "acceleratorCount": '{"worker": 2}',
        "provisioningModel": '{"worker": "SPOT", "master": "STANDARD"}',
    }
    assert ClusterConfig.parse(config).spec().roles == {
        Role.MASTER: RoleSpec(1, "n1-standard-4", Accelerator("nvidia-l4", 1)),
        Role.WORKER: RoleSpec(2, "n1-highcpu-8", Accelerator("nvidia-tesla-t4", 2), spot=True),
        Role.SERVING: RoleSpec(1, "n1-highcpu-8"),
    }
    gpu = ClusterConfig.parse({"scaleTier": "BASIC_GPU", "acceleratorCount": '{"master": 4}'}).spec().roles
    assert gpu == {Role.MASTER: RoleSpec(1, "n1-standard-8", Accelerator("nvidia-tesla-t4", 4))}


def test_a_type_may_stay_while_its_role_has_no_hosts() -> None:
    for key in ("parameterServer", "worker", "evaluator"):
        config = {**CUSTOM, f"{key}Type": "n1-standard-4", f"{key}Count": "0"}
        assert ClusterConfig.parse(config).spec().roles == {Role.MASTER: RoleSpec(1, "n1-standard-4")}


LABEL = "is not valid: keys start with a lowercase letter, and keys and values have up to 63 lowercase letters, digits, _ and -"


@pytest.mark.parametrize(
    ("config", "error"),
    [
        (
            {"workerType": "n1-standard-4"},
            "scaletier:workerType goes with scaleTier CUSTOM only, and it is STANDARD_1: "
            "`pulumi config rm workerType`, or `pulumi config set scaleTier CUSTOM`",
        ),
        (
            {"scaleTier": "BASIC", "evaluatorCount": "1"},
            "scaletier:evaluatorCount goes with scaleTier CUSTOM only, and it is BASIC: "
            "`pulumi config rm evaluatorCount`, or `pulumi config set scaleTier CUSTOM`",
        ),
        (
            {"masterType": "n1-standard-4"},
            "scaletier:masterType goes with scaleTier CUSTOM only, and it is STANDARD_1: "
            "`pulumi config rm masterType`, or `pulumi config set scaleTier CUSTOM`",
        ),
        (
            {**CUSTOM, "workerCount": "1"},
            "scaleTier CUSTOM needs scaletier:workerType: `pulumi config set workerType n1-highcpu-8`",
        ),
        *(
            (
                {**CUSTOM, f"{key}Type": "n1-standard-4"},
                f"scaletier:{key}Type is n1-standard-4, and scaletier:{key}Count is not set: "
                f"`pulumi config set {key}Count 1`, or `pulumi config rm {key}Type`",
            )
            for key in ("parameterServer", "worker", "evaluator")
        ),
        (
            {"scaleTier": "CUSTOM"},
            "scaleTier CUSTOM needs scaletier:masterType: `pulumi config set masterType n1-highcpu-8`",
        ),
        (
            {"scaleTier": "BASIC", "acceleratorCount": '{"master": 1}'},
            "scaletier:acceleratorCount.master needs the type too: "
            "`pulumi config set --path acceleratorType.master nvidia-tesla-t4`",
        ),
        (
            {"scaleTier": "BASIC", "acceleratorCount": '{"ps": 1}'},
            "scaletier:acceleratorCount.ps: this cluster has no ps; it has master",
        ),
        ({"labels": f'{{"{"k" * 64}": ""}}'}, f"scaletier:labels {{'{'k' * 64}': ''}} is invalid: label {'k' * 64}= {LABEL}"),
        ({"labels": '{"a": "B"}'}, f"scaletier:labels {{'a': 'B'}} is invalid: label a=B {LABEL}"),
        ({"labels": "x"}, "scaletier:labels must be a map: set one with `pulumi config set --path labels.name value`"),
        ({"workerCount": "-1", "servingCount": "x"},
         "scaletier:workerCount must be at least 0, not '-1'; scaletier:servingCount must be a whole number, not 'x'"),
        *(({key: "-1"}, f"scaletier:{key} must be at least 0, not '-1'")
          for key in ("workerCount", "parameterServerCount", "evaluatorCount", "servingCount")),
        ({"acceleratorCount": '{"ps": 0}'}, "scaletier:acceleratorCount.ps must be at least 1, not 0"),
        ({"labels": '{"\ud800": ""}'}, f"a value is no UTF-8: 'label \\ud800= {LABEL}'"),
    ],
)  # fmt: skip
def test_an_invalid_key_is_one_line(config: dict[str, str], error: str) -> None:
    assert error_of(config) == error


def test_a_target_is_one_of_two() -> None:
    with pytest.raises(SpecError) as caught:
        ClusterConfig.target_of({"target": "aws"})
    assert str(caught.value) == "scaletier:target is 'aws'; valid are lxd (hosts on this machine) and gcp (Google Cloud)"
    assert ClusterConfig.parse({"labels": f'{{"{"k" * 63}": "{"v" * 63}"}}'}).labels == {"k" * 63: "v" * 63}


def test_sizes_of_local_hosts_are_bytes() -> None:
    config = LxdConfig.parse(
        {
            "cpus": '{"ps": 1, "worker": 0.05, "master": 0.99}',
            "memory": '{"ps": "256MiB", "worker": "2 GiB"}',
            "disk": '{"ps": "1GiB"}',
            "bucketSize": "1GiB",
            "network": "10.77.0.0/24",
        }
    )
    assert repr(list(config.cpus.values())) == "[1, 0.05, 0.99]"
    assert config.memory == {Role.PS: 2**28, Role.WORKER: 2**31}
    assert (config.disk_of(Role.PS), config.disk_of(Role.WORKER), config.bucket_size) == (2**30, 2**32, 2**30)
    for unusable in ("8.8.8.0", "0.7.7.0", "127.0.0.0", "127.9.9.0", "169.254.7.0", "255.255.255.0"):
        error = error_of({"network": f"{unusable}/24"}, LxdConfig)
        assert error.endswith("is invalid: write a private /24 range, such as 10.77.0.0/24")
    for usable in ("10.0.0.0", "172.31.255.0", "192.168.7.0", "198.18.0.0"):
        assert str(LxdConfig.parse({"network": f"{usable}/24"}).network) == f"{usable}/24"
    assert error_of({"memory": '{"ps": "255MiB"}'}, LxdConfig).endswith(
        "write a size of 256MiB or more, such as 512MiB or 2GiB"
    )
    assert error_of({"bucketSize": "1023MiB"}, LxdConfig).endswith("write a size of 1GiB or more, such as 16GiB")
    at_limit = {**CUSTOM, "workerType": "n1-standard-4", "workerCount": "60"}
    assert LxdConfig.parse(at_limit).spec().roles[Role.WORKER].count == 60
    assert error_of(at_limit | {"workerCount": "61"}, LxdConfig) == "worker count 61 is too high; valid are 0 to 60"


class Inner(Section):
    """A section with a required key."""

    size: int = Field(description="how many there are", ge=1)
    name: str | None = None


class Outer(Section):
    """A section with all kinds of keys."""

    old_names: ClassVar[dict[str, str]] = {"names": "labels"}
    unsupported: ClassVar[dict[str, str]] = {"refused": "take it out"}

    names: list[str] = Field(default_factory=list)
    inner: Inner | None = None
    on: bool = False
    share: float = Field(0.5, alias="theShare", le=1)


def check(value: Any, context: dict[str, str] | None = None) -> Any:
    try:
        return Outer.model_validate(value, context=context).given()
    except ValidationError as error:
        return one_line(error, "file", ".")


@pytest.mark.parametrize(
    ("value", "result"),
    [
        (None, {}),
        ({"names": None, "on": True}, {"on": True}),
        ({"names": ["a"], "inner": {"size": 1, "name": 7}}, {"names": ["a"], "inner": {"size": 1, "name": "7"}}),
        ({"labels": ["a"]}, {"names": ["a"]}),
        (3, "file is not a mapping of keys to values; valid keys are names, inner, on, theShare"),
        ({"other": 1, "more": 2}, "file.other is unknown; valid are names, inner, on, theShare"),
        ({"on": True, "refused": {"a": 1}}, "file.refused is not supported: take it out"),
        ({"other": None}, "file.other is unknown; valid are names, inner, on, theShare"),
        ({"labels": [], "names": []}, "file.labels is the old name of names, which is there too: remove it"),
        ({"inner": {}}, "file.inner.size is missing: how many there are"),
        ({"inner": {"size": None}}, "file.inner.size is missing: how many there are"),
        ({"inner": {"size": 0}}, "file.inner.size must be at least 1, not 0"),
        ({"inner": [1]}, "file.inner is not a mapping of keys to values; valid keys are size, name"),
        ({"names": "a"}, "file.names must be a list such as [a], not 'a'"),
        ({"names": {"a": 1}}, "file.names must be a list, not {'a': 1}"),
        ({"names": ["a", True]}, "file.names[1] must be a string, not True: quote it"),
        ({"names": [["b"]]}, "file.names[0] must be a string, not ['b']"),
        ({"names": [{"b": 1}]}, "file.names[0] must be a string, not {'b': 1}"),
        (
            {"on": "perhaps", "theShare": 2},
            "file.on must be true or false, not 'perhaps'; file.theShare must be at most 1, not 2",
        ),
        ({"theShare": "x" * 200}, f"file.theShare must be a number, not {repr('x' * 200)[:100]}"),
        ({"theShare": 10**5000}, "file.theShare must be a number, not a number too large to show"),
        ({"\ud800": 1}, "file.? is unknown; valid are names, inner, on, theShare"),
    ],
)
def test_a_mistake_in_a_section_is_one_line(value: Any, result: Any) -> None:
    assert check(value) == result


def test_a_section_reports_the_old_names_that_it_met() -> None:
    context: dict[str, str] = {}
    assert check({"on": True}, context) == {"on": True}
    assert context == {}
    assert check({"labels": ["a"]}, context) == {"names": ["a"]}
    assert context == {"names": "labels"}
    own = Outer(on=True)
    assert Outer.model_validate(own) is own
    assert str(refusal("is \ud800").message()) == "is ?"


class Derived(Inner):
    """A section with a key of its own."""

    own: int = 0


def test_a_sections_own_keys_come_first() -> None:
    assert Derived.valid_keys() == ["own", "size", "name"]
    with pytest.raises(ValidationError):
        Inner(size=1).size = 2  # type: ignore[misc]


HOST = Host(name="ps-0", role=Role.PS, index=0, address="10.0.0.1", machine_type="n1-standard-4", cpus=2, memory_bytes=5)
POWER = PowerAccess(url="http://h/", operator_url="http://o/", token="t", token_command="c", preempted="p", headers={"a": "b"})
RECORD = Inventory(stack="dev", scale_tier="CUSTOM", hosts=(HOST,), bucket="/b", operator_bucket="sftp:///b", folder=Path("/f"))


def test_a_record_is_stored_with_all_but_its_folder() -> None:
    stored = RECORD.to_dict()
    assert stored == {
        "schema": 1,
        "stack": "dev",
        "target": "",
        "scaleTier": "CUSTOM",
        "hosts": [
            {
                "name": "ps-0",
                "role": "ps",
                "index": 0,
                "address": "10.0.0.1",
                "sshHost": "",
                "hostKey": None,
                "machineType": "n1-standard-4",
                "cpus": 2,
                "memoryBytes": 5,
                "accelerator": None,
                "hourlyCost": None,
                "createTime": None,
                "start": None,
            }
        ],
        "bucket": "/b",
        "operatorBucket": "sftp:///b",
        "proxyCommand": None,
        "pollSeconds": 1.0,
        "sharedCpus": None,
        "runtimes": None,
        "operatorRuntimes": None,
        "tensorflow": None,
        "python": "3.11",
        "power": None,
        "labels": {},
    }
    assert json.loads(json.dumps(stored)) == stored


def test_hosts_are_started_by_requests_below_the_url_of_whoever_asks() -> None:
    hosts = (replace(HOST, start="a/start"), replace(HOST, name="serving-0", role=Role.SERVING))
    record = replace(RECORD, hosts=hosts, power=POWER)
    of_hosts, of_operator = record.start_requests(), record.start_requests(operator=True)
    assert of_operator
    assert (of_hosts.starts, of_hosts.token, of_hosts.preempted) == ({"ps-0": "http://h/a/start"}, "t", "p")
    assert of_hosts.headers == {"a": "b"}
    assert of_operator.starts == {"ps-0": "http://o/a/start"}
    assert RECORD.start_requests() is None
    assert [host.unit for host in hosts] == ["scaletier.service", "scaletier-serving.service"]


def test_hosts_are_interchangeable_if_all_that_matters_is_equal() -> None:
    gpu = {"type": "nvidia-l4", "count": 1}
    assert HOST.hardware == ("n1-standard-4", 2, 5, None, None)
    assert replace(HOST, accelerator=gpu, hourly_cost=0.5).hardware == (
        "n1-standard-4",
        2,
        5,
        (("count", 1), ("type", "nvidia-l4")),
        0.5,
    )
    assert sum_if_known([0.1, 0.2]) == 0.3
    assert sum_if_known([0.1, None]) is None
    assert sum_if_known([]) == sum_if_known([0.0]) == 0


def test_a_part_of_a_cluster_has_its_first_hosts(inventory: Inventory) -> None:
    part = inventory.subset({Role.MASTER: 1, Role.WORKER: 1}, "BASIC")
    assert (part.names, part.scale_tier) == (("master-0", "worker-0"), "BASIC")
    assert inventory.subset({}).names == inventory.names
    assert inventory.subset({}).scale_tier == inventory.scale_tier
    assert [host.name for host in inventory.of_role(Role.WORKER)] == ["worker-0", "worker-1"]
