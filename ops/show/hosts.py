"""The table of `fab hosts`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infra.inventory import Host
from jobs.bucket import BucketError
from jobs.serialization import RecordError, by_key
from ops import terminal
from ops.cluster.cluster import ClusterClient
from ops.cluster.remote import COMMAND_SECONDS
from ops.errors import DONE, FAILED, OpsError


def hosts(cluster: ClusterClient, as_json: bool) -> int:
    """List the hosts and whether each answers; exit code 0 if at least one answers."""
    inventory, fleet = cluster.inventory, cluster.fleet
    with terminal.ProgressLine(f"querying {terminal.plural(len(inventory.hosts), 'host')}"):
        outcome = fleet.each(
            inventory.names, lambda name: fleet.run(name, f"systemctl is-active {inventory.host(name).unit}"), COMMAND_SECONDS
        )
    status = {name: result.output.strip() for name, result in outcome.results.items()}
    jobs = _assignments(cluster) if status or not inventory.bucket_on_hosts else {}
    if as_json:
        listed = [_host_json(host, status, *jobs.get(host.name, (None, None, None))) for host in inventory.hosts]
        stack = {"stack": inventory.stack, "scaleTier": inventory.scale_tier, "bucket": inventory.bucket}
        terminal.print_json({**stack, "hosts": listed})
        return DONE if status else FAILED
    terminal.note(f"stack {inventory.stack}, scaleTier {inventory.scale_tier}, bucket {inventory.bucket}")
    heads = ("HOST", "ADDRESS", "MACHINE TYPE", "CPUS", "MEMORY", "ACCELERATOR", "SSH", "UNIT", "JOB", "REPLICA")
    rows = []
    for host in inventory.hosts:
        gpu = f"{host.accelerator.get('count', 1)} x {host.accelerator.get('type')}" if host.accelerator else None
        ssh, memory = "answers" if host.name in status else "no answer", terminal.size(host.memory_bytes)
        machine = (host.name, host.address, host.machine_type, host.cpus, memory, gpu)
        job, replica, reserved_for = jobs.get(host.name, (None, None, None))
        rows.append((*machine, ssh, status.get(host.name), f"reserved for {reserved_for}" if reserved_for else job, replica))
    terminal.table(heads, rows)
    for error in outcome.failures.values():
        terminal.note(str(error))
    return DONE if status else FAILED


def _host_json(
    host: Host, status: Mapping[str, str], job: str | None, replica: str | None, reserved_for: str | None
) -> dict[str, Any]:
    """Return a host with its status and job, and the keys of inventory.json except those for ssh."""
    plain = {key: value for key, value in by_key(host).items() if key not in ("sshHost", "hostKey")}
    assignment = {"job": job, "replica": replica, "reservedFor": reserved_for}
    return {**plain, "answers": host.name in status, "unit": status.get(host.name), **assignment}


def _assignments(cluster: ClusterClient) -> dict[str, tuple[str | None, str | None, str | None]]:
    """Map each host to its job, its replica and the job it is reserved for; empty if the queue is unknown."""
    try:
        queue = cluster.ledger.queue()
    except (BucketError, RecordError, OpsError) as error:
        terminal.note(f"which job has which host cannot be read: {error}")
        return {}
    reserved = {host: (None, None, job_id) for host, job_id in queue.reserved_hosts().items()}
    entries = (entry for entry in queue.entries if entry.has_hosts)
    return reserved | {host: (entry.jobId, replica, None) for entry in entries for replica, host in entry.placement.items()}
