"""Names, addresses and sizes of a local stack."""

from __future__ import annotations

import ipaddress

import pytest

from infra.lxd import layout
from infra.lxd.layout import LxdNames, Size
from infra.scale_tiers import (
    ClusterSpec,
    HostId,
    Role,
    RoleSpec,
    ScaleTier,
    SpecError,
    custom,
    network_gbits,
    parse_replica,
    preset,
    vcpus,
)

NETWORK = ipaddress.IPv4Network("10.77.0.0/24")
GIB = 2**30


def test_the_names_of_a_stack_go_by_its_key() -> None:
    names = layout.names("-My.Stack_of a very lengthy name-", "abcdef")
    assert names == LxdNames("scaletier-my-stack-of-a-very-lengt-abcdef")
    assert (names.stack_id, names.bridge, names.table, names.bucket) == ("abcdef", "stabcdef", "scaletier_abcdef", "bucket")


def test_the_networks_to_try_are_always_the_same() -> None:
    tried = [str(layout.candidate_network("scaletier-local-abcdef", attempt)) for attempt in range(3)]
    assert tried == ["10.159.38.0/24", "10.122.218.0/24", "10.118.85.0/24"]


def test_each_role_has_its_block_of_addresses() -> None:
    blocks = {role: tuple(map(str, layout.block(NETWORK, role))) for role in Role}
    assert blocks == {
        Role.PS: ("10.77.0.64", "10.77.0.127"),
        Role.MASTER: ("10.77.0.2", "10.77.0.3"),
        Role.WORKER: ("10.77.0.128", "10.77.0.191"),
        Role.EVALUATOR: ("10.77.0.4", "10.77.0.63"),
        Role.SERVING: ("10.77.0.192", "10.77.0.254"),
    }
    worker = HostId(Role.WORKER, 3)
    assert (str(layout.address(NETWORK, worker)), layout.interface_name("stabcdef", worker)) == ("10.77.0.131", "stabcdefw3")


@pytest.mark.parametrize(
    ("machine_type", "shape"),
    [
        ("n1-standard-4", (4, 15.0)),
        ("n1-highmem-8", (8, 52.0)),
        ("n1-highcpu-16", (16, 14.4)),
        ("g2-standard-8", (8, 30.0)),
        ("a2-highgpu-1g", (4, 16.0)),
        ("standard", (4, 16.0)),
    ],
)
def test_a_machine_type_has_a_shape(machine_type: str, shape: tuple[int, float]) -> None:
    assert layout.machine_spec(machine_type) == pytest.approx(shape)


def sizes(machine_cpus: int, spec: ClusterSpec, **overrides: dict[Role, int]) -> dict[Role, Size]:
    return layout.sizes(spec, machine_cpus, overrides.get("cpus", {}), overrides.get("memory", {}))


def test_limits_are_the_tiers_shapes_scaled_to_this_machine() -> None:
    standard = preset(ScaleTier.STANDARD_1)
    assert sizes(64, standard) == {
        Role.PS: Size(4, 15 * GIB),
        Role.MASTER: Size(8, round(7.2 * GIB)),
        Role.WORKER: Size(8, round(7.2 * GIB)),
    }
    assert sizes(4, standard) == {
        Role.PS: Size(2, round(7.5 * GIB)),
        Role.MASTER: Size(4, round(3.6 * GIB)),
        Role.WORKER: Size(4, round(3.6 * GIB)),
    }
    assert sizes(1, standard, cpus={Role.PS: 3}, memory={Role.WORKER: 5}) == {
        Role.PS: Size(3, round(1.875 * GIB)),
        Role.MASTER: Size(1, GIB),
        Role.WORKER: Size(1, 5),
    }


def test_a_host_that_never_trains_does_not_scale_the_others() -> None:
    roles = {Role.MASTER: RoleSpec(1, "n1-standard-4"), Role.SERVING: RoleSpec(1, "n1-standard-16")}
    assert sizes(8, custom(roles)) == {Role.MASTER: Size(4, 15 * GIB), Role.SERVING: Size(8, 60 * GIB)}


def test_the_speed_of_a_network_goes_by_the_processors() -> None:
    types = ("n1-standard-1", "n1-standard-2", "n1-standard-4", "n1-highcpu-8", "n1-highcpu-16", "n1-highcpu-64")
    assert [network_gbits(name) for name in types] == [2.0, 10.0, 10.0, 16.0, 32.0, 32.0]
    assert vcpus("n1-highcpu-8") == 8
    with pytest.raises(SpecError, match=r"^machine type 'f1-micro' does not tell its vCPUs; n1-highcpu-8 does$"):
        vcpus("f1-micro")


def test_a_custom_cluster_has_one_master_and_no_empty_role() -> None:
    one = RoleSpec(1, "n1-standard-4")
    cluster = custom({Role.WORKER: RoleSpec(2, "n1-standard-4"), Role.PS: RoleSpec(0, ""), Role.MASTER: one})
    assert cluster.scale_tier is ScaleTier.CUSTOM
    assert [host_id.name for host_id in cluster.hosts] == ["master-0", "worker-0", "worker-1"]
    for roles in ({Role.WORKER: one}, {Role.MASTER: RoleSpec(2, "x")}):
        with pytest.raises(SpecError, match="needs exactly one master"):
            custom(roles)


def test_a_tier_and_a_replica_are_read_in_both_spellings() -> None:
    assert [ScaleTier.parse(text) for text in ("STANDARD_1", " standard-1 ")] == [ScaleTier.STANDARD_1] * 2
    with pytest.raises(SpecError, match="'big' is unknown; valid are BASIC, STANDARD_1, PREMIUM_1, BASIC_GPU, CUSTOM"):
        ScaleTier.parse("big")
    assert [parse_replica(text, ["ps-0"]) for text in ("ps-0", " ps-replica-0 ")] == ["ps-0"] * 2
    with pytest.raises(SpecError, match="replica 'ps-1' is unknown; valid are ps-0, master-0"):
        parse_replica("ps-1", ["ps-0", "master-0"])
