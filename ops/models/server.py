"""Start and end the cluster's model servers; their hosts, files and memory."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable
from pathlib import Path

from infra import templates
from infra.inventory import SERVING_UNIT, Host, Inventory
from infra.ports import SERVING_PORT
from infra.scale_tiers import Role
from infra.templates import ROOT as CHECKOUT
from ops.cluster import root_helper
from ops.cluster.cluster import ClusterClient
from ops.cluster.fanout import Outcome
from ops.cluster.forward import LOOPBACK
from ops.cluster.host_files import UNITS, RemoteFile
from ops.errors import OpsError
from ops.package.host_stream import files_stream

START_SECONDS = 120.0
"""The time limit to connect to a host, send it the code and start the server."""
_NEW_CODE = "/opt/scaletier/.server"
_CONF = f"{UNITS}/{SERVING_UNIT}.d/host.conf"
_CODE = ("jobs", "hosts", "hosts/serving")
# The share of a host's memory that the server may use: less on a host that runs jobs, which need most of it.
MEMORY_SHARE_BESIDE_JOBS, MEMORY_SHARE = 0.4, 0.9


def serving_hosts(inventory: Inventory) -> tuple[Host, ...]:
    """Return the hosts that run the model server: the serving hosts, or the master if there are none."""
    return inventory.of_role(Role.SERVING) or (inventory.chief,)


def serving_host_names(inventory: Inventory) -> list[str]:
    """Return the names of `serving_hosts`."""
    return [host.name for host in serving_hosts(inventory)]


def memory_limit(host: Host) -> int:
    """Return the bytes of a host's memory that the server may use."""
    return int(host.memory_bytes * (MEMORY_SHARE_BESIDE_JOBS if host.role.runs_jobs else MEMORY_SHARE))


def conf(inventory: Inventory, host: Host) -> str:
    """Return a host's server configuration: on a host that runs jobs, the server listens on loopback alone."""
    return templates.render(
        "scaletier-serving.conf.j2",
        bucket=inventory.bucket,
        addresses=[LOOPBACK] if host.role.runs_jobs else [LOOPBACK, host.address],
        port=SERVING_PORT,
        poll_seconds=inventory.poll_seconds,
        memory_max=memory_limit(host),
        accelerator=host.accelerator,
    )


def start(cluster: ClusterClient, names: Iterable[str] | None = None) -> Outcome[str]:
    """Install and start the server with the local code on these hosts, by default on all `serving_hosts`."""
    inventory, fleet = cluster.inventory, cluster.fleet

    def start_on(name: str) -> str:
        files = _files(CHECKOUT, conf(inventory, inventory.host(name)))
        version = hashlib.sha256("".join(file.path + "\0" + file.content for file in files).encode()).hexdigest()
        return fleet.check_output(
            name, root_helper.command("serve", version), "could not start its model server, it ended", files_stream(files)
        )

    return fleet.each(serving_host_names(inventory) if names is None else names, start_on, START_SECONDS)


def stop_unused_master_server(cluster: ClusterClient) -> None:
    """End the master's server if the stack has serving hosts; after a failure the next call tries again."""
    chief = cluster.inventory.chief.name
    if chief not in serving_host_names(cluster.inventory):
        with contextlib.suppress(OpsError):
            cluster.fleet.check_output(chief, root_helper.command("end-serving"), "could not end its model server, it ended")


def _files(root: Path, conf: str) -> list[RemoteFile]:
    code = [
        RemoteFile(f"{_NEW_CODE}/{path.relative_to(root).as_posix()}", path.read_text())
        for name in _CODE
        for path in sorted((root / name).glob("*.py"))
    ]
    return [*code, RemoteFile(_CONF, conf)]
