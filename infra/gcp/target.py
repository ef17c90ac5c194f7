"""The Google Cloud target: check what Google would refuse, then declare the cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import google.auth.exceptions
import pulumi
import requests
from pulumi import Output
from pulumi.runtime.config import get_config

from infra.cost import Cost, HostSpec, hourly, price_list, round_up
from infra.gcp.api import COMPUTE, STORAGE, TIMEOUT, GcpError, ReadConfig, endpoint, session
from infra.gcp.bucket_guard import contents, read_object
from infra.gcp.cluster import GcpCluster, ProjectState, fingerprints
from infra.gcp.config import GcpConfig
from infra.gcp.discovery import Discovery, discover
from infra.gcp.instances import FINGERPRINT
from infra.gcp.machines import MachineType, check_disk
from infra.gcp.names import names_of
from infra.gcp.preflight import preflight
from infra.gcp.zones import Place, places
from infra.scale_tiers import ClusterSpec, TargetError
from infra.state import StackState
from infra.target import ClusterResources, Target


def provider_config(key: str) -> str | None:
    """Return a value of the provider's configuration, `zone` or `gcp:zone`; it may be a secret."""
    value: str | None = get_config(f"gcp:{key.removeprefix('gcp:')}")
    return value


def cost(spec: ClusterSpec, config: GcpConfig, region: str, machines: Mapping[str, MachineType]) -> Cost | None:
    """Return the cluster's cost by the price list, or None if the list lacks the region."""
    hosts = {}
    for role, role_spec in spec.roles.items():
        kind = machines[role_spec.machine_type]
        host_spec = HostSpec(
            kind.series, kind.cpus, kind.memory, role_spec.accelerator, role_spec.spot,
            config.boot_disk_type, config.boot_disk_size, config.public_address,
        )  # fmt: skip
        hosts[role] = (role_spec.count, host_spec)
    return hourly(price_list(), region, hosts)


def check_cost(price: Cost | None, limit: float | None, region: str) -> None:
    """Raise TargetError if the cluster costs more than `maxHourlyCost`, or this is set and the price is unknown."""
    if limit is None:
        return
    if price is None:
        raise TargetError(
            f"maxHourlyCost is {limit:g} and infra/prices.yaml has no price for this cluster in {region}: add it there, "
            "or `pulumi config rm maxHourlyCost`"
        )
    if price.total > limit:
        raise TargetError(
            f"this cluster costs {price.line(region)}, more than maxHourlyCost {limit:g}: take a smaller tier or spot hosts, "
            f"or `pulumi config set maxHourlyCost {round_up(price.total)}`"
        )


def _log_choice(discovery: Discovery, choice: Sequence[Place]) -> None:
    """Log the chosen zone and the other ones, because Google reports a stock-out only during an update."""
    others = [place.zone for place in choice if place != discovery.place]
    if others:
        after = ",".join(others)
        pulumi.log.info(
            f"zone {discovery.place.zone}; if it has no more hosts available (a stock-out), "
            f"`pulumi config set zones {after}` creates them all in {others[0]}"
        )
    if discovery.subnet and not discovery.subnet.reaches_google:
        pulumi.log.warn(
            f"{discovery.subnet.link} has no Private Google Access: without Cloud NAT its hosts do not reach their bucket"
        )


def _check_own_hosts(has_hosts: bool, has_state: bool, project: str, stack: str) -> None:
    """Raise TargetError if hosts have this stack's names, but its state has no cluster: another state has them."""
    if has_hosts and not has_state:
        raise TargetError(
            f"project {project} has hosts of a stack {stack} that are not in this state. If a colleague's state has them, "
            "choose another stack name, or that state (PULUMI_BACKEND_URL). If their state was lost, remove them: "
            "`python -m infra.gcp.orphans --delete --state-is-lost`"
        )


def _warn_unrecorded(discovery: Discovery, state: StackState) -> None:
    """Warn about hosts that a killed update created but did not record: they cost money."""
    recorded = state.of("compute/instance:Instance")
    if unrecorded := [host.name for host in discovery.hosts or () if host.name not in recorded]:
        pulumi.log.warn(
            f"an update that did not end left hosts at Google that are not in the state, {', '.join(unrecorded)}: "
            "`python -m infra.gcp.orphans --delete` removes them, then `pulumi up`"
        )


def _bucket_of(state: StackState) -> str | None:
    """Return the name of the stack's bucket, or None if it has none yet."""
    return next((str(outputs["name"]) for outputs in state.of("storage/bucket:Bucket").values()), None)


def _check_replaced_bucket(current: str | None, new: str, retain: bool, read_config: ReadConfig) -> None:
    """Raise TargetError if the update would replace a bucket that contains data."""
    if current and current != new and not retain and contents(current, read_config):
        raise TargetError(
            f"this stack's bucket {current} contains data, and {new} would replace it: `pulumi config set bucket {current}` "
            "to go on using it; to retain it unused, then also `pulumi config set retainBucket true && pulumi up` before you "
            f"`pulumi config set bucket {new}`"
        )


class GcpTarget(Target):
    """A cluster of Compute Engine instances."""

    config_type = GcpConfig

    def __init__(self, stack: str, spec: ClusterSpec, config: GcpConfig, state: StackState) -> None:
        """Read the project's state; raise TargetError or SpecError for what Google would refuse."""
        choice = places(provider_config, os.environ, config.zones)
        names = names_of(choice[0].project, stack, state)
        result = discover(spec, choice, names, config.subnetwork, provider_config)
        self.config, self.spec, self.state = config, result.spec, state
        region, machines = result.place.region, result.catalogue.machines
        for role_spec in self.spec.roles.values():
            check_disk(machines[role_spec.machine_type], config.boot_disk_type)
        price = cost(self.spec, config, region, machines)
        check_cost(price, config.max_hourly_cost, region)
        bucket, state_bucket = config.bucket or names.bucket, _bucket_of(state)
        self.bucket = state_bucket or bucket  # jobs are in the present bucket
        has_stack_label = preflight(result, config, bucket, names.stack, provider_config, bucket == state_bucket)
        _check_own_hosts(bool(result.hosts), bool(state_bucket or state.hosts), result.place.project, stack)
        # A failed update may have applied either setting, so both must retain the bucket.
        _check_replaced_bucket(state_bucket, bucket, config.retain_bucket and state.retains_bucket, provider_config)
        _warn_unrecorded(result, state)
        pulumi.log.info(price.line(region) if price else f"infra/prices.yaml has no price for this cluster in {region}")
        _log_choice(result, choice)
        unrecorded_bucket_exists = bool(has_stack_label and bucket != state_bucket)
        endpoints = endpoint(COMPUTE, provider_config), endpoint(STORAGE, provider_config)
        self.project_state = ProjectState(names, bucket, *endpoints, price, unrecorded_bucket_exists, result)

    def replaced_hosts(self) -> list[str]:
        """Return the existing hosts whose fingerprint changes, so that they are replaced; all if the bucket is replaced.

        Their jobs would lose the bucket. The fingerprint of hosts in the state of an older scaletier is unknown.
        """
        instances = self.state.of("compute/instance:Instance")
        old = {name: (outputs.get("metadata") or {}).get(FINGERPRINT) for name, outputs in instances.items()}
        new, same_bucket = fingerprints(self.config, self.project_state), self.bucket == self.project_state.bucket
        names = {host_id.name: new[host_id.role] for host_id in self.spec.hosts if host_id.name in old}
        return [name for name, text in names.items() if old[name] not in (None, text) or not same_bucket]

    def build(self, authorized_key: Output[str]) -> ClusterResources:
        return GcpCluster(self.config, self.project_state, authorized_key).resources()

    def read_object(self, path: str) -> bytes | None:
        return read_object(self.bucket, path, provider_config)

    def create_object(self, path: str, content: bytes) -> None:
        base = endpoint(STORAGE, provider_config).replace("/storage/v1/", "/upload/storage/v1/")
        url, params = f"{base}b/{self.bucket}/o", {"uploadType": "media", "name": path, "ifGenerationMatch": "0"}
        try:
            answer = session(provider_config).post(url, params=params, data=content, timeout=TIMEOUT)
        except (GcpError, requests.RequestException, google.auth.exceptions.GoogleAuthError) as error:
            raise TargetError(f"the bucket does not take {path} ({error}): try again") from None
        if not answer.ok and answer.status_code != requests.codes.precondition_failed:
            raise TargetError(f"the bucket does not take {path} (HTTP {answer.status_code}): try again")


TARGET = GcpTarget
