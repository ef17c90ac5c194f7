"""The files of each host on which jobs run: they are the same for every job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from infra import templates
from infra.inventory import JOBS_UNIT, Host, Inventory
from jobs.records import HostConfig, Plan

UNITS = "/etc/systemd/system"
UNIT_CONF, TIMER_CONF, TRAINER_CONF = (
    f"{UNITS}/{name}.d/host.conf" for name in (JOBS_UNIT, "scaletier.timer", "scaletier-trainer.service")
)
"""The drop-ins with a host's own settings of its units."""
# The share of a host's memory that a unit may use: sshd and journald must survive a trainer that uses all of it.
MEMORY_SHARE = 0.9
# The limit of a trainer's threads: libraries start a pool of each kind for every processor.
_TASKS, _TASKS_PER_CPU = 512, 256


@dataclass(frozen=True)
class RemoteFile:
    """A file of a host. The host itself sets its owner and mode."""

    path: str
    content: str


def idle_poll_seconds(poll_seconds: float) -> int:
    """Return the seconds between two polls of a host without a job."""
    return round(60 * max(1.0, poll_seconds))


def heartbeat_seconds(poll_seconds: float) -> float:
    """Return the seconds between a replica's heartbeats: more where hosts poll less often, as each request costs money."""
    return max(Plan.heartbeatSeconds, 2.5 * poll_seconds)


def render(inventory: Inventory) -> dict[str, list[RemoteFile]]:
    """Render the files of every host on which jobs run, by its name; they are the same for every job."""
    return {host.name: host_files(inventory, host) for host in inventory.job_hosts}


def host_files(inventory: Inventory, host: Host) -> list[RemoteFile]:
    """Return the files of one host."""
    values: dict[str, Any] = {
        "accelerator": host.accelerator,
        "memory_max": int(host.memory_bytes * MEMORY_SHARE),
        "tasks_max": _TASKS + int(_TASKS_PER_CPU * host.cpus),
        "idle_poll_seconds": idle_poll_seconds(inventory.poll_seconds),
    }
    host_file = HostConfig(host.name, inventory.bucket, inventory.poll_seconds, power=inventory.start_requests())
    return [
        RemoteFile("/etc/scaletier/host.json", host_file.to_json().decode()),
        RemoteFile(UNIT_CONF, templates.render("scaletier.conf.j2", **values)),
        RemoteFile(TRAINER_CONF, templates.render("scaletier-trainer.conf.j2", **values)),
        RemoteFile(TIMER_CONF, templates.render("scaletier-timer.conf.j2", **values)),
    ]
