"""Checks of local hosts: LXD, the kernel, the firewall, stopped hosts, disks, orphaned resources."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from infra import backend
from infra.doctor import free_space
from infra.findings import Finding, fail, ok, warning
from infra.lxd import image, nft, quotas
from infra.lxd.api import client, errors, hosts_of, start
from infra.lxd.bucket import get_volume, pool_of, used_bytes
from infra.lxd.firewall import forward_drops, rules
from infra.lxd.host import unrecorded_hosts
from infra.lxd.layout import LxdNames
from infra.lxd.orphans import existing_names, find_orphans
from infra.lxd.preflight import BRIDGE_NF_CALL
from infra.scale_tiers import ClusterSpec, Role, RoleSpec, ScaleTier
from infra.templates import ROOT

Inventory = Mapping[str, Any] | None

# The kernel limits that 31 hosts need; set-up sets them (setup/common.sh).
LIMITS = {
    "fs/inotify/max_user_instances": 8192,
    "fs/inotify/max_user_watches": 1048576,
    "kernel/keys/maxkeys": 20000,
    "kernel/keys/maxbytes": 2000000,
}
_SYS = Path("/proc/sys")
_FEW_HOSTS = 12
_FULL, _NEARLY_FULL = 0.98, 0.9
_SHOWN = 3


def daemon(_: Inventory) -> Iterator[Finding]:
    """Check LXD or Incus, and the image of its hosts."""
    with errors("LXD"):
        server = client().host_info["environment"]
        yield ok(f"{server.get('server', 'lxd')} {server['server_version']} answers, and there is {nft.version()}")
        if not image.exists():
            yield warning("the image of the hosts, of this version, is missing", "make image")


def kernel(inventory: Inventory) -> Iterator[Finding]:
    """Check the limits of the kernel: too low ones leave about the 13th host without an address, and report no error."""
    low = {name: least for name, least in LIMITS.items() if int((_SYS / name).read_text()) < least}
    many_hosts = len(inventory["hosts"]) > _FEW_HOSTS if inventory else False
    for name, least in low.items():
        problem = f"the kernel's {name.replace('/', '.')} is {(_SYS / name).read_text().strip()}, and 31 hosts need {least}"
        yield (fail if many_hosts else warning)(problem, "sudo setup/lxd.sh system")
    if not low:
        yield ok("the kernel's limits are those for 31 hosts")


def firewall(inventory: Inventory) -> Iterator[Finding]:
    """Check the stack's nft table rule by rule, and whether other programs, such as Docker, drop frames between hosts."""
    yield from (warning(problem) for problem in forward_drops(BRIDGE_NF_CALL, nft.list_chains))
    for names in _stack_names(inventory):
        script = firewall_script(inventory or {}, names)
        lines = nft.differences(names.table, script)
        if lines is None:
            problem = f"nft table {names.table} is gone, and hosts have only their own firewalls"
            yield fail(problem, "pulumi up", partial(nft.load, script))
        elif lines:
            shown_lines = "; ".join(lines[:_SHOWN]) + (f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else "")
            yield fail(f"nft table {names.table} is not as it was made: {shown_lines}", "pulumi up", partial(nft.load, script))
        else:
            yield ok(f"nft table {names.table} is as it was made")


def firewall_script(inventory: Mapping[str, Any], names: LxdNames) -> str:
    """Return the firewall's script for the stack's hosts."""
    counts: dict[Role, RoleSpec] = {}
    for host in inventory["hosts"]:
        role = Role(host["role"])
        counts[role] = RoleSpec(counts[role].count + 1 if role in counts else 1, host["machineType"])
    network = ipaddress.IPv4Network((inventory["hosts"][0]["address"], 24), strict=False)
    return rules(ClusterSpec(ScaleTier(inventory["scaleTier"]), counts), names.table, names.bridge, network)


def hosts(inventory: Inventory) -> Iterator[Finding]:
    """Check that the instances exist and run."""
    for names in _stack_names(inventory):
        with errors("hosts"):
            status = {name: client(names.project).instances.get(name).status for name in hosts_of(names.project)}
        expected = [host["name"] for host in (inventory or {})["hosts"]]
        for name in expected:
            if name not in status:
                yield fail(f"host {name} is gone", "pulumi up")
            elif status[name] != "Running":
                problem = f"host {name} is {status[name].lower()}"
                yield fail(problem, "pulumi up", partial(_start, inventory or {}, names, name))
        running = sum(status.get(name) == "Running" for name in expected)
        if running == len(expected):
            yield ok(f"all {running} hosts run")
        for name in unrecorded_hosts(names.project, expected):
            yield warning(f"host {name} is left by an update that did not end", "pulumi up")


def _start(inventory: Mapping[str, Any], names: LxdNames, name: str) -> None:
    """Start a host; first load the firewall if it differs."""
    if nft.differences(names.table, script := firewall_script(inventory, names)) != []:
        nft.load(script)
    with errors(f"host {name}"):
        start(client(names.project).instances.get(name))


def disks(inventory: Inventory) -> Iterator[Finding]:
    """Check the free space of the storage pool, the bucket and each host's disk."""
    for names in _stack_names(inventory):
        with errors("disks"):
            pool = pool_of(names.project)
            if pool is None:
                yield fail("the bucket is gone", "pulumi up makes another, which is empty")
                continue
            space = client().api.storage_pools[pool].resources.get().json()["metadata"]["space"]
            yield free_space(f"storage pool {pool}", space["total"] - space["used"])
            if not quotas.is_accounting(pool):
                problem = f"storage pool {pool} no longer counts its usage, so disk and bucketSize limit nothing"
                yield fail(problem, quotas.command(pool), partial(quotas.enable_accounting, pool))
            volume = {"project": names.project, "pool": pool, "name": names.bucket}
            config = (get_volume(volume) or {"config": {}})["config"]
            more = "fab prune, or pulumi config set bucketSize"
            yield from _check_usage("the bucket", used_bytes(volume), config.get("size", ""), more)
            for name in hosts_of(names.project):
                instance = client(names.project).instances.get(name)
                usage = ((instance.state().disk or {}).get("root") or {}).get("usage")
                more = f"pulumi config set --path disk.{name.rpartition('-')[0]}"
                yield from _check_usage(f"host {name}'s disk", usage, instance.devices["root"].get("size", ""), more)


def _check_usage(what: str, usage: int | None, size: str, remedy: str) -> Iterator[Finding]:
    share = usage / int(size) if usage and size.isdecimal() and int(size) else 0.0
    if share >= _NEARLY_FULL:
        yield (fail if share >= _FULL else warning)(f"{what} is {share:.0%} full", remedy)


def orphans(_: Inventory) -> Iterator[Finding]:
    """Find LXD and nft objects on this machine that are in the state of no stack."""
    try:
        output: Any = json.loads(backend.run_pulumi(ROOT, "stack", "ls", "--json"))
        stacks = {str(each["name"]).rpartition("/")[2] for each in output}
    except backend.BackendError as error:
        yield warning(str(error))
        stacks = None
    findings = find_orphans(stacks)
    yield from findings
    if not findings and stacks is not None:
        yield ok("nothing is left of other stacks")


def _stack_names(inventory: Inventory) -> Iterator[LxdNames]:
    """Yield the names of the stack's objects; none if its project is gone: the check `project` reports that."""
    if inventory:
        with errors("projects"):
            yield from existing_names(inventory["stack"])


def project(inventory: Inventory) -> Iterator[Finding]:
    """Check that LXD has the stack's project."""
    if inventory and not list(_stack_names(inventory)):
        yield fail(f"LXD has no project of stack {inventory['stack']} of this checkout", "pulumi up")


CHECKS = {
    "daemon": daemon,
    "project": project,
    "kernel": kernel,
    "firewall": firewall,
    "hosts": hosts,
    "disks": disks,
    "orphans": orphans,
}
