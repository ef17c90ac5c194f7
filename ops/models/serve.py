"""`fab serve`: forward a local port to a model server of the cluster that answers."""

from __future__ import annotations

import sys
import time
from typing import NoReturn

from infra.ports import SERVING_PORT
from ops import terminal
from ops.cluster.cluster import ClusterClient
from ops.cluster.forward import LOOPBACK, Forward, local_ports
from ops.errors import DONE, HostError, OpsError
from ops.models.client import HEALTH, NO_SERVER, ServingClient
from ops.models.lookup import catalog_of, served_model


def serve(cluster: ClusterClient, model: str | None, port: str | None) -> int:
    """Forward a local port to a model server until Ctrl-C."""
    record = served_model(catalog_of(cluster), model)
    ports = local_ports(port, SERVING_PORT)
    servers = ServingClient(cluster)
    try:
        with Forward(servers.connect, ports, servers.fail_over) as forward:
            forward.remote_port = SERVING_PORT
            servers.start()
            status, body = servers.request("GET", f"/v1/models/{record.name}")
            if status == NO_SERVER:
                raise OpsError(f"{body['error']}: fab deploy starts it")
            url = f"http://{LOOPBACK}:{forward.port}/v1/models/{record.name}"
            terminal.out(url)
            sys.stdout.flush()
            terminal.note(f"curl -d '{{\"instances\": […]}}' {url}:predict; Ctrl-C ends it")
            keep_alive(servers)
    except KeyboardInterrupt:
        return DONE


def keep_alive(servers: ServingClient) -> NoReturn:
    """Keep the port connected to a server that answers; OpsError once no server's host can be reached."""
    servers.finish_start()
    while True:
        try:
            servers.request("GET", HEALTH)
        except HostError as error:
            raise OpsError("the connection to the host broke off: run fab serve again") from error
        except OpsError:
            pass  # the server is busy, and may answer the next request
        time.sleep(1.0)
