"""Check the pure parts of the Google target: machine types, GPUs, zones, names, keys of the configuration, the cost limit."""

from __future__ import annotations

import ipaddress
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pulumi
import pytest
from stackmocks import PROJECT

from infra.cost import Cost, HostSpec, hourly
from infra.gcp import target
from infra.gcp.config import GcpConfig
from infra.gcp.machines import MACHINES, MachineType, check_disk, gpu_name, machine, resolve_accelerator
from infra.gcp.names import MAX_HOSTS, GoogleNames, address, names, names_of
from infra.gcp.zones import Place, check_gpu, place, places
from infra.scale_tiers import Accelerator, HostId, Role, SpecError, TargetError
from infra.state import StackState

T4, L4 = Accelerator("nvidia-tesla-t4", 1), Accelerator("nvidia-l4", 1)


def test_machine_types_have_their_processors_memory_and_gpus() -> None:
    n1, others = (1, 2, 4, 8, 16, 32, 64, 96), (2, 4, 8, 16, 32)
    expected: dict[str, tuple[int, float, Accelerator | None]] = {
        **{f"n1-standard-{cpus}": (cpus, 3.75 * cpus, None) for cpus in n1},
        **{f"n1-highmem-{cpus}": (cpus, 6.5 * cpus, None) for cpus in n1[1:]},
        **{f"n1-highcpu-{cpus}": (cpus, 0.9 * cpus, None) for cpus in n1[1:]},
        **{
            f"{series}-{kind}-{cpus}": (cpus, memory * cpus, None)
            for series, sizes in (("n2", (*others, 48, 64, 80)), ("e2", others))
            for kind, memory in (("standard", 4), ("highmem", 8), ("highcpu", 1))
            for cpus in sizes
        },
        **{
            f"g2-standard-{cpus}": (cpus, 4 * cpus, Accelerator("nvidia-l4", gpus))
            for cpus, gpus in {4: 1, 8: 1, 12: 1, 16: 1, 24: 2, 32: 1, 48: 4, 96: 8}.items()
        },
        **{f"a2-highgpu-{gpus}g": (12 * gpus, 85 * gpus, Accelerator("nvidia-tesla-a100", gpus)) for gpus in (1, 2, 4, 8)},
        "a2-megagpu-16g": (96, 1360, Accelerator("nvidia-tesla-a100", 16)),
        **{f"a2-ultragpu-{gpus}g": (12 * gpus, 170 * gpus, Accelerator("nvidia-a100-80gb", gpus)) for gpus in (1, 2, 4, 8)},
    }
    assert {name: (kind.cpus, kind.memory, kind.accelerator) for name, kind in MACHINES.items()} == expected
    assert {kind.name for kind in MACHINES.values()} == MACHINES.keys()
    assert machine("a2-highgpu-1g").series == "a2"
    assert gpu_name(" NVIDIA_TESLA_T4 ") == "nvidia-tesla-t4"


@pytest.mark.parametrize(
    ("name", "gpu", "result"),
    [
        ("n1-standard-4", None, None),
        ("g2-standard-24", None, Accelerator("nvidia-l4", 2)),
        ("g2-standard-24", Accelerator("nvidia-l4", 2), Accelerator("nvidia-l4", 2)),
        ("g2-standard-24", L4, "g2-standard-24 comes with 2 x nvidia-l4, not 1 x nvidia-l4"),
        (
            "n1-standard-4",
            Accelerator("nvidia-a100-80gb", 1),
            "nvidia-a100-80gb does not go with n1-standard-4; machine types with it (and how many): a2-ultragpu-1g (1), "
            "a2-ultragpu-2g (2), a2-ultragpu-4g (4), a2-ultragpu-8g (8)",
        ),
        ("n2-standard-4", T4, "nvidia-tesla-t4 does not go with n2-standard-4; valid are machine types of the series n1"),
        (
            "n1-standard-64",
            T4,
            "1 x nvidia-tesla-t4 goes with 48 vCPUs at most, n1-standard-64 has 64; n1-standard-64 takes 4 of them",
        ),
        (
            "n1-standard-16",
            Accelerator("nvidia-tesla-v100", 1),
            "1 x nvidia-tesla-v100 goes with 12 vCPUs at most, n1-standard-16 has 16; n1-standard-16 takes 2, 4, 8 of them",
        ),
    ],
)
def test_gpus_are_paired_with_machine_types(name: str, gpu: Accelerator | None, result: Accelerator | str | None) -> None:
    if isinstance(result, str):
        with pytest.raises(SpecError) as caught:
            resolve_accelerator(machine(name), gpu)
        assert str(caught.value) == result
    else:
        assert resolve_accelerator(machine(name), gpu) == result


def test_the_most_processors_of_each_number_of_gpus() -> None:
    limits = {
        "nvidia-tesla-t4": {1: 48, 2: 48, 4: 96},
        "nvidia-tesla-v100": {1: 12, 2: 24, 4: 48, 8: 96},
        "nvidia-tesla-p100": {1: 16, 2: 32, 4: 96},
        "nvidia-tesla-p4": {1: 24, 2: 48, 4: 96},
    }
    for gpu, cpus_by_count in limits.items():
        for count, cpus in cpus_by_count.items():
            accelerator = Accelerator(gpu, count)
            assert resolve_accelerator(MachineType("n1-x", cpus, 1), accelerator) == accelerator
            with pytest.raises(SpecError, match=f"goes with {cpus} vCPUs at most, n1-x has {cpus + 1}"):
                resolve_accelerator(MachineType("n1-x", cpus + 1, 1), accelerator)
        with pytest.raises(SpecError, match=f"valid counts are {', '.join(map(str, cpus_by_count))}$"):
            resolve_accelerator(MachineType("n1-x", 1, 1), Accelerator(gpu, 3))
    with pytest.raises(SpecError, match=r"goes with 96 vCPUs at most, n1-x has 97$"):
        resolve_accelerator(MachineType("n1-x", 97, 1), Accelerator("nvidia-tesla-t4", 4))


def test_a_machine_type_boots_from_disks_of_its_series() -> None:
    for kind in MACHINES.values():
        check_disk(kind, "pd-ssd")
    check_disk(machine("n1-standard-4"), "pd-standard")
    for disk_type in ("pd-ssd", "pd-balanced", "pd-standard"):
        with pytest.raises(SpecError, match=f"^n4-standard-4 boots from Hyperdisk only, and bootDiskType is {disk_type}: take"):
            check_disk(MachineType("n4-standard-4", 4, 16), disk_type)


def test_a_gpu_is_refused_outside_its_zones() -> None:
    zones = ("asia-southeast1-c", "europe-west4-a", "us-central1-a", "us-central1-c", "us-east4-c", "us-east5-b")
    table = {"nvidia-a100-80gb": zones}
    check_gpu("nvidia-a100-80gb", "us-central1-a", table)
    for gpu, zone, error in (
        ("nvidia-a100-80gb", "us-central1-b", "in its region it is in us-central1-a, us-central1-c"),
        ("nvidia-a100-80gb", "us-west1-a", f"it is in {', '.join(zones)}"),
        ("unknown", "us-west1-a", "it is in none"),
    ):
        with pytest.raises(SpecError) as caught:
            check_gpu(gpu, zone, table)
        assert str(caught.value) == f"zone {zone} has no {gpu}; {error}"


def test_the_place_is_configured_or_of_the_environment() -> None:
    environment = {"GOOGLE_PROJECT": "", "GCLOUD_PROJECT": PROJECT, "CLOUDSDK_COMPUTE_ZONE": "us-central1-a"}
    here = Place(PROJECT, "us-central1", "us-central1-a")
    assert places(lambda _: None, environment) == (here,)
    assert place({"zone": "europe-west1-b", "region": "europe-west1"}.get, environment) == Place(
        PROJECT, "europe-west1", "europe-west1-b"
    )
    assert places({"project": "example.com:another-1"}.get, environment, ("us-central1-a",)) == (
        Place("example.com:another-1", "us-central1", "us-central1-a"),
    )
    with pytest.raises(SpecError) as caught:
        place({"region": "us-east1"}.get, environment)
    assert str(caught.value) == (
        "gcp:zone us-central1-a is not in gcp:region us-east1: `pulumi config set gcp:region us-central1`, or another zone"
    )


def test_names_are_legal_and_those_of_one_stack() -> None:
    own = names("Example.com:My-Project", "My.Stack-of a team")
    assert own == GoogleNames("st-my-stack-o-b67dc5", "example-com-my-project-st-my-stack-o-b67dc5", "my-stack-of-a-team")
    assert own.resource_name("ps-0", "x") == "st-my-stack-o-b67dc5-ps-0-x"
    assert (names("p", "...").stack, len(names("p" * 40, "s" * 80).stack)) == ("stack", 63)
    assert len(names("p" * 40, "s" * 80).prefix) == 20


def test_the_default_name_of_a_bucket_is_one_that_google_takes() -> None:
    plain, *others = (
        names(project, stack).bucket
        for project, stack in (
            ("my-project", "goo"),
            ("my-project", "Google"),
            ("goog-x", "dev"),
            ("google.com:x-123456", "dev"),
        )
    )
    assert plain.startswith("my-project-st-goo-")
    for name in (plain, *others):
        assert GcpConfig.parse({"bucket": name}).bucket == name
    assert all(name.startswith("st-") for name in others)
    assert len({*others}) == len(others)
    assert names("my-project", "google").prefix.startswith("st-google-"), "only the bucket's name is restricted"


def test_names_are_those_of_the_stacks_hosts_in_the_project() -> None:
    def named(**outputs: Any) -> GoogleNames:
        resource = {"type": "gcp:compute/instance:Instance", "outputs": {"name": "st-old-0-worker-1", **outputs}}
        return names_of(PROJECT, "new", StackState({"urn:pulumi:new::scaletier::x::worker-1": resource}))

    labels = {"scaletier-stack": "old"}
    assert named(project=PROJECT, labels=labels) == GoogleNames("st-old-0", f"{PROJECT}-st-old-0", "old")
    new = names(PROJECT, "new")
    assert [named(project="another", labels=labels), named(project=PROJECT), named()] == [new] * 3


def test_names_stay_when_all_hosts_were_deleted_in_the_console() -> None:
    def named(**resources: dict[str, Any]) -> GoogleNames:
        state = {f"urn::x::{kind}": {"type": f"gcp:x/x:{kind}", "outputs": each} for kind, each in resources.items()}
        state["urn::x::bucket"] = {"type": "gcp:storage/bucket:Bucket", "outputs": state.pop("urn::x::Bucket")["outputs"]}
        return names_of(PROJECT, "new", StackState(state))

    bucket = {"name": "mine", "project": PROJECT, "labels": {"scaletier-stack": "old"}}
    role = {"project": PROJECT, "title": "st-old-0-start"}
    assert named(Bucket=bucket, IAMCustomRole=role) == GoogleNames("st-old-0", f"{PROJECT}-st-old-0", "old")
    new = names(PROJECT, "new")
    assert named(Bucket=bucket) == named(Bucket=bucket, IAMCustomRole={**role, "project": "another"}) == new
    assert named(Bucket={**bucket, "labels": None}, IAMCustomRole=role) == new


def test_each_role_has_room_for_its_hosts() -> None:
    network = ipaddress.IPv4Network("10.64.0.0/20")
    ends = {role: (0, most - 1) for role, most in MAX_HOSTS.items()}
    blocks = {role: tuple(address(network, HostId(role, index)) for index in each) for role, each in ends.items()}
    assert blocks == {
        Role.PS: ("10.64.4.0", "10.64.7.231"),
        Role.MASTER: ("10.64.0.2", "10.64.0.2"),
        Role.WORKER: ("10.64.8.0", "10.64.15.207"),
        Role.EVALUATOR: ("10.64.0.16", "10.64.3.247"),
        Role.SERVING: ("10.64.15.208", "10.64.15.247"),
    }


@pytest.mark.parametrize(
    ("key", "value", "parsed"),
    [
        *(("idleTimeout", text, seconds) for text, seconds in
          {"0": 0, "300": 300, "300s": 300, "5m": 300, "2h": 7200, "299": None, "4m": None, "x": None, "1d": None}.items()),
        *(("hostKeyTimeout", text, parsed) for text, parsed in {"0": 0, "3600": 3600, "-1": None, "3601": None}.items()),
        *(("readyTimeout", text, parsed) for text, parsed in {"0": 0, "7200": 7200, "-1": None, "7201": None}.items()),
        *(("bootDiskSize", text, parsed) for text, parsed in {"20": 20, "65536": 65536, "19": None, "65537": None}.items()),
        *(("maxHourlyCost", text, parsed) for text, parsed in {"0.5": 0.5, "0": None, "-1": None}.items()),
        *(("operatorCidr", text, text and ipaddress.ip_network(text)) for text in ("10.0.0.0/8", "203.0.113.7/32")),
        ("operatorCidr", "10.0.0.0/7", None),
        *(("zones", text, ("us-central1-a", "us-central1-b")) for text in
          ("us-central1-a, us-central1-b,", '["us-central1-a", "us-central1-b"]')),
        ("serviceAccount", '{"ps": "abcdef@p.iam.gserviceaccount.com"}', {Role.PS: "abcdef@p.iam.gserviceaccount.com"}),
        ("acceleratorType", '{"master": "NVIDIA_L4"}', {Role.MASTER: "nvidia-l4"}),
        ("network", "10.64.0.0/20", ipaddress.IPv4Network("10.64.0.0/20")),
        ("network", "8.8.0.0/20", None),
        *(("bucket", text, text) for text in ("a-1", "my_bucket.example.com", "192.168.1.x", "10.1.1.1.1", "not-goog")),
        *(("bucket", text, None) for text in ("192.168.1.1", "googly", "my-google", "a-g00gle-b", "go0g1e", "a..b")),
    ],
)  # fmt: skip
def test_keys_have_limits(key: str, value: str, parsed: Any) -> None:
    with pytest.raises(SpecError, match=f"^scaletier:{key} ") if parsed is None else nullcontext():
        config = GcpConfig.parse({key: value})
        assert config.model_dump(by_alias=True)[key] == parsed


def test_google_takes_64_labels_of_which_8_are_the_stacks_own() -> None:
    labels = ", ".join(f'"l{number}": "x"' for number in range(56))
    assert len(GcpConfig.parse({"labels": f"{{{labels}}}"}).labels) == 56
    error = r"there are 57 labels; Google takes 64, of which 8 are the stack's own"
    with pytest.raises(SpecError, match=error):
        GcpConfig.parse({"labels": f'{{{labels}, "more": "x"}}'})


def test_the_defaults_are_closed_and_without_costs_of_ones_own() -> None:
    config = GcpConfig.parse({})
    assert (config.firewall, config.egress_closed, config.flow_logs, config.public_address) == (True, True, False, False)
    assert (config.disrupt_jobs, config.retain_bucket, config.force_destroy) == (False, False, False)
    assert (config.idle_timeout, config.host_key_timeout, config.ready_timeout) == (0, 120, 900)
    assert (GcpConfig.parse({"egress": "open"}).egress_closed, GcpConfig.parse({"subnetwork": "s"}).egress_closed) == (
        False,
        False,
    )
    assert GcpConfig.parse({"subnetwork": "s", "firewall": "false"}).spec().hosts


COST = Cost({Role.MASTER: 0.25}, {Role.MASTER: 0.5}, 0.0, "2026-01-01")


@pytest.mark.parametrize(
    ("cost", "most", "error"),
    [
        (COST, None, None),
        (None, None, None),
        (COST, 0.5, None),
        (
            COST,
            0.49,
            "this cluster costs about 0.50 USD an hour in here: master 0.50, network 0.00 (estimated on 2026-01-01, without "
            "traffic and the bucket), more than maxHourlyCost 0.49: take a smaller tier or spot hosts, "
            "or `pulumi config set maxHourlyCost 0.50`",
        ),
        (
            Cost({Role.MASTER: 0.2104}, {Role.MASTER: 0.2104}, 0.0, "2026-01-01"),
            0.2,
            "this cluster costs about 0.21 USD an hour in here: master 0.21, network 0.00 (estimated on 2026-01-01, without "
            "traffic and the bucket), more than maxHourlyCost 0.2: take a smaller tier or spot hosts, "
            "or `pulumi config set maxHourlyCost 0.22`",
        ),
        (
            None,
            1.0,
            "maxHourlyCost is 1 and infra/prices.yaml has no price for this cluster in here: add it there, "
            "or `pulumi config rm maxHourlyCost`",
        ),
    ],
)
def test_a_cluster_above_the_cost_limit_is_refused(cost: Cost | None, most: float | None, error: str | None) -> None:
    with pytest.raises(TargetError) if error else nullcontext() as caught:
        target.check_cost(cost, most, "here")
    assert error is None or (caught and str(caught.value) == error)


PRICES = {
    "date": "2026-01-01",
    "regions": {
        "here": {
            "nat": {"host": 0.5, "most": 1.2},
            "machines": {"n1": {"onDemand": {"vcpu": 1.0, "gib": 0.1}, "spot": {"vcpu": 0.5, "gib": 0.05}}},
            "gpus": {"nvidia-l4": {"onDemand": 10.0, "spot": 5.0}},
            "disks": {"pd-ssd": 73.0},
            "address": {"onDemand": 0.01, "spot": 0.02},
        }
    },
}


def test_a_host_costs_the_sum_of_its_parts() -> None:
    plain = HostSpec("n1", 2, 4, None, False, "pd-ssd", 10)
    spot = HostSpec("n1", 2, 4, Accelerator("nvidia-l4", 2), True, "pd-ssd", 0, True)
    cost = hourly(PRICES, "here", {Role.MASTER: (1, plain), Role.WORKER: (2, spot)})
    assert cost == Cost({Role.MASTER: 3.4, Role.WORKER: 11.22}, {Role.MASTER: 3.4, Role.WORKER: 22.44}, 1.2, "2026-01-01")
    assert cost.total == 27.04
    only_one = hourly(PRICES, "here", {Role.MASTER: (1, plain)})
    assert (only_one.network, only_one.total) == (0.5, 3.9)
    assert hourly(PRICES, "there", {Role.MASTER: (1, plain)}) is None
    assert hourly(PRICES, "here", {Role.MASTER: (1, HostSpec("n2", 2, 4, None, False, "pd-ssd", 10))}) is None


def test_the_choice_of_a_zone_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(pulumi.log, "info", lines.append)
    monkeypatch.setattr(pulumi.log, "warn", lines.append)
    a, b, c = (Place("p", "r", f"r-{letter}") for letter in "abc")
    subnet = SimpleNamespace(link="projects/x/y", reaches_google=True)
    target._log_choice(SimpleNamespace(place=b, subnet=None), [b])  # type: ignore[arg-type]
    target._log_choice(SimpleNamespace(place=b, subnet=subnet), [b])  # type: ignore[arg-type]
    assert lines == []
    subnet.reaches_google = False
    target._log_choice(SimpleNamespace(place=b, subnet=subnet), [a, b, c])  # type: ignore[arg-type]
    assert lines == [
        "zone r-b; if it has no more hosts available (a stock-out), `pulumi config set zones r-a,r-c` creates them all in r-a",
        "projects/x/y has no Private Google Access: without Cloud NAT its hosts do not reach their bucket",
    ]
