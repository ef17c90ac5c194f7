"""The model server of a cluster, from here: which hosts are to have it, what they receive, and how it is started and ended."""

from __future__ import annotations

import contextlib
import hashlib
import shlex
from collections.abc import Iterable
from pathlib import Path

from infra.spec import SERVING_PORT, Role
from ops.cluster.cluster import Cluster
from ops.cluster.fanout import Outcome
from ops.cluster.inventory import HERE, SERVING_UNIT, Host, Inventory
from ops.errors import OpsError
from ops.train.push import host_stream
from ops.train.render import UNITS, File, fill

LOOPBACK = "127.0.0.1"
START_SECONDS = 60.0
_HOME = "/opt/scaletier/server"
_NEW = "/opt/scaletier/.server"
_VERSION = "VERSION"
_CODE = ("jobs", "serving")
# What a server may take of its host's memory where jobs run, which may take most of it and come first, and where none does.
MEMORY_SHARE_BESIDE_JOBS, MEMORY_SHARE = 0.4, 0.9
_LOCK = "exec 9>/run/scaletier-serving.lock\nflock 9"
# One at a time. Code arrives beside what is there, and takes its place when all of it is; the version is written last, so that
# what was broken off is done again. A server that runs what it should is left alone.
_TAKE_IN = f"""set -e
{_LOCK}
rm -rf {_NEW}
tar -xzpf - -C /
if [ "$(cat {_HOME}/{_VERSION} 2>/dev/null)" != "$1" ]; then
  rm -rf {_HOME}
  mv {_NEW} {_HOME}
  cp {_HOME}/{SERVING_UNIT} {UNITS}/
  systemctl daemon-reload
  systemctl restart {SERVING_UNIT}
  printf %s "$1" >{_HOME}/{_VERSION}
else
  rm -rf {_NEW}
  systemctl start {SERVING_UNIT}
fi
systemctl enable --quiet {SERVING_UNIT}"""
_END = f"{_LOCK}\n[ ! -e {UNITS}/{SERVING_UNIT} ] || systemctl disable --now --quiet {SERVING_UNIT}"


def servers_of(inventory: Inventory) -> tuple[Host, ...]:
    """The hosts that answer for the cluster's models: those that are for nothing else, and the master where there are none."""
    return inventory.of_role(Role.SERVING) or (inventory.chief,)


def names_of(inventory: Inventory) -> list[str]:
    """Their names."""
    return [host.name for host in servers_of(inventory)]


def memory_of(host: Host) -> int:
    """The bytes that the server may have of a host."""
    return int(host.memory_bytes * (MEMORY_SHARE_BESIDE_JOBS if host.role.runs_jobs else MEMORY_SHARE))


def unit(inventory: Inventory, host: Host) -> str:
    """The unit of the server on a host. Only where no job runs others than that host itself may ask it."""
    return fill(
        "scaletier-serving.service.j2",
        {
            "bucket": inventory.bucket,
            "addresses": [LOOPBACK] if host.role.runs_jobs else [LOOPBACK, host.address],
            "port": SERVING_PORT,
            "poll_seconds": inventory.poll_seconds,
            "memory_max": memory_of(host),
            "accelerator": host.accelerator,
        },
    )


def start(cluster: Cluster, names: Iterable[str] | None = None) -> Outcome[str]:
    """See that the server runs, with the code that is here, on these hosts; on all that are to have it where none is named."""
    inventory, fleet = cluster.inventory, cluster.fleet

    def on(name: str) -> str:
        files = _files(HERE, unit(inventory, inventory.host(name)))
        version = hashlib.sha256("".join(file.path + "\0" + file.content for file in files).encode()).hexdigest()
        command = shlex.join(["sudo", "-n", "sh", "-c", _TAKE_IN, "sh", version])
        return fleet.must(name, command, "could not start its model server, it ended", host_stream(files))

    return fleet.each(names_of(inventory) if names is None else names, on, START_SECONDS)


def hand_over(cluster: Cluster) -> None:
    """End the server of the master where others answer now; where that does not succeed, whoever comes next does it again."""
    chief = cluster.inventory.chief.name
    if chief not in names_of(cluster.inventory):
        with contextlib.suppress(OpsError):
            cluster.fleet.must(chief, shlex.join(["sudo", "-n", "sh", "-c", _END]), "could not end its model server, it ended")


def _files(root: Path, unit_text: str) -> list[File]:
    code = [
        File(f"{_NEW}/{path.relative_to(root).as_posix()}", path.read_text())
        for name in _CODE
        for path in sorted((root / name).glob("*.py"))
    ]
    return [*code, File(f"{_NEW}/{SERVING_UNIT}", unit_text)]
