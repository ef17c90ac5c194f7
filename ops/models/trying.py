"""`fab try`: a page of this machine on which a digit is drawn, and the deployed versions of a model answer as it grows."""

from __future__ import annotations

import base64
import sys
import threading
import time
from pathlib import Path

from ops import pages, terminal
from ops.cluster.cluster import Cluster
from ops.cluster.forward import first_free, local_ports
from ops.errors import DONE, OpsError, UsageError
from ops.models import drawing, reach
from ops.models.known import catalog_of, served_model
from ops.models.request import images
from ops.models.server import LOOPBACK
from ops.models.site import CSS, HTML, JS, Site, SiteServer
from ops.train.render import TEMPLATES
from serving.records import LoadState, Model

_PORT = 8700
# For a server that starts, and loads the model.
_READY_SECONDS = 180.0
_POLL_SECONDS = 0.5
_FOLDER = TEMPLATES / "try"


def trying(cluster: Cluster, model: str | None, port: str | None, data: Path) -> int:
    """Show the page until Ctrl-C; `data` is where MNIST's test images are, if anywhere."""
    ports = local_ports(port, _PORT)
    record = served_model(catalog_of(cluster), model)
    try:
        with first_free(ports, lambda number: SiteServer(LOOPBACK, number)) as listening:
            servers = reach.Servers(cluster)
            servers.bring()
            site = Site(record.name, servers.ask, files(record.name, data), listening.port)
            with terminal.Step(f"asking what {record.name} takes"):
                _check(site, servers, record)
            listening.site = site
            threading.Thread(target=listening.serve_forever, args=(0.05,), daemon=True).start()
            try:
                terminal.out(f"http://{LOOPBACK}:{listening.port}/")
                sys.stdout.flush()
                terminal.note(f"draw a digit there, and model {record.name} answers; Ctrl-C ends it")
                reach.hold(servers, "fab try")
            finally:
                listening.shutdown()  # before its socket is closed, or its thread looks at that without a pause
    except KeyboardInterrupt:
        return DONE


def _check(site: Site, servers: reach.Servers, record: Model) -> None:
    """Until a version answers; UsageError where none of them takes a drawing."""
    deadline = time.monotonic() + _READY_SECONDS
    while True:
        status, said = servers.ask("GET", f"/v1/models/{record.name}")
        if status == reach.NOBODY:
            raise OpsError(f"{said['error']}: fab deploy starts it")
        found = said["model_version_status"] if status == 200 else []
        names = [each["version"] for each in found if each["state"] == LoadState.AVAILABLE]
        if names:
            break
        if time.monotonic() > deadline:
            raise OpsError(
                f"no version of model {record.name} has answered in {_READY_SECONDS:.0f} s: fab versions {record.name}"
            )
        time.sleep(_POLL_SECONDS)
    if not any(site.question(name) for name in names):
        name = record.default if record.default in names else names[0]
        status, said = site.metadata(name)
        what = f" {drawing.told(said)}" if status == 200 else " does not say what it takes"
        raise UsageError(f"version {name} of model {record.name}{what}; fab try draws for a model that takes {drawing.TAKES}")


def files(model: str, data: Path) -> dict[str, tuple[str, bytes]]:
    """What the page is made of, by path: kind and content."""
    html = pages.environment(_FOLDER).get_template("page.html.j2").render(model=model, images=ten(data))
    return {"/": (HTML, html.encode())} | {
        f"/{name}": (kind, (_FOLDER / name).read_bytes())
        for name, kind in (("page.css", CSS), ("page.js", JS), ("digit.js", JS))
    }


def ten(data: Path) -> list[tuple[int, str]]:
    """The first test image of each digit, with the digit, in base64; nothing where there is no MNIST."""
    found: dict[int, str] = {}
    for image, label in images(data):
        found.setdefault(label, base64.b64encode(image).decode())
        if len(found) == drawing.CLASSES:
            break
    return sorted(found.items())
