"""The model server of a cluster, from here: brought to its host, started, and reached through a tunnel."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from ops.cluster.cluster import Cluster
from ops.cluster.forward import Forward
from ops.cluster.inventory import HERE, Host, Inventory
from ops.errors import OpsError
from ops.train.push import host_stream
from ops.train.render import UNITS, File, fill

PORT = 8501
"""TensorFlow Serving's own port for REST; on a host only its loopback listens to it."""
LOOPBACK = "127.0.0.1"
NOBODY = 0
"""The status of an answer that did not come, as nobody listens."""
_UNIT = "scaletier-serving.service"
_HOME = "/opt/scaletier/server"
_NEW = "/opt/scaletier/.server"
_VERSION = "VERSION"
_CODE = ("jobs", "serving")
# What a server may take of its host's memory; a job there may take most of it, and comes first.
MEMORY_SHARE = 0.4
_SECONDS = 60.0
# One at a time. Code arrives beside what is there, and takes its place when all of it is; the version is written last, so that
# what was broken off is done again. A server that runs what it should is left alone.
_TAKE_IN = f"""set -e
exec 9>/run/scaletier-serving.lock
flock 9
rm -rf {_NEW}
tar -xzpf - -C /
if [ "$(cat {_HOME}/{_VERSION} 2>/dev/null)" != "$1" ]; then
  rm -rf {_HOME}
  mv {_NEW} {_HOME}
  cp {_HOME}/{_UNIT} {UNITS}/
  systemctl daemon-reload
  systemctl restart {_UNIT}
  printf %s "$1" >{_HOME}/{_VERSION}
else
  rm -rf {_NEW}
  systemctl start {_UNIT}
fi
systemctl enable --quiet {_UNIT}"""


def server_of(inventory: Inventory) -> Host:
    """The host that answers for the cluster's models."""
    return inventory.chief


def memory_of(inventory: Inventory) -> int:
    """The bytes that the server may have."""
    return int(server_of(inventory).memory_bytes * MEMORY_SHARE)


def unit(inventory: Inventory) -> str:
    """The unit of the server."""
    host = server_of(inventory)
    return fill(
        "scaletier-serving.service.j2",
        {
            "bucket": inventory.bucket,
            "port": PORT,
            "poll_seconds": inventory.poll_seconds,
            "memory_max": memory_of(inventory),
            "accelerator": host.accelerator,
        },
    )


def start(cluster: Cluster) -> None:
    """See that the server runs, with the code that is here; HostError where it cannot be started."""
    files = _files(HERE, unit(cluster.inventory))
    version = hashlib.sha256("".join(file.path + "\0" + file.content for file in files).encode()).hexdigest()
    stream = host_stream(files)
    command = shlex.join(["sudo", "-n", "sh", "-c", _TAKE_IN, "sh", version])
    cluster.fleet.must(server_of(cluster.inventory).name, command, "could not start its model server, it ended", stream)


def _files(root: Path, unit_text: str) -> list[File]:
    code = [
        File(f"{_NEW}/{path.relative_to(root).as_posix()}", path.read_text())
        for name in _CODE
        for path in sorted((root / name).glob("*.py"))
    ]
    return [*code, File(f"{_NEW}/{_UNIT}", unit_text)]


class Client:
    """Speaks to the server through a tunnel. Every method raises OpsError where it does not answer."""

    def __init__(self, port: int, host: str) -> None:
        self._port, self._host = port, host

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
        """The status and the JSON of an answer; NOBODY where nothing listens yet."""
        connection = http.client.HTTPConnection(LOOPBACK, self._port, timeout=_SECONDS)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        except (ConnectionError, http.client.HTTPException):
            return NOBODY, {"error": f"no model server answers on {self._host}"}
        except (OSError, ValueError) as error:
            raise OpsError(f"the model server on {self._host} does not answer: {error}") from error
        finally:
            connection.close()


def hold(cluster: Cluster, what: str) -> NoReturn:
    """For as long as the connection that the tunnel goes through is there; then OpsError, with the command to run again."""
    connection = cluster.fleet.connection(server_of(cluster.inventory).name)  # once: asked again it would be another one
    while connection.is_connected:
        time.sleep(1.0)
    raise OpsError(f"the connection to the host broke off: run {what} again")


@contextlib.contextmanager
def reached(cluster: Cluster, ports: range = range(1)) -> Iterator[tuple[Client, Forward]]:
    """The server through a tunnel that is there as long as the context; by default at any free port of this machine."""
    host = server_of(cluster.inventory).name
    with Forward(cluster.fleet.connection(host).transport, LOOPBACK, ports) as forward:
        forward.port_there = PORT
        yield Client(forward.port, host), forward
