"""Instances that are only records: each is ready at once, and buckets contain the runtimes."""

from __future__ import annotations

import requests
from fakes import Google
from waiting import limit

from infra.gcp.image import version
from infra.runtime.recipe import RuntimeSpec

HOST_KEY = "AAAAC3NzaC1lZDI1NTE5AAAAIBogus"


class Records:
    """A fake of machines.Machines for tests without hosts."""

    def __init__(self, google: Google) -> None:
        self.google = google

    def start(self, name: str, address: str) -> None:
        self.google.machine(name).guest.update({"hostkeys/ssh-ed25519": HOST_KEY, "scaletier/state": "ready"})
        self.metadata_changed(name)

    def metadata_changed(self, name: str) -> None:
        machine = self.google.machine(name)
        machine.guest["scaletier/script"] = version(machine.tree["instance"]["attributes"]["startup-script"])

    def restart(self, name: str) -> None: ...

    def stop(self, name: str) -> None: ...


def upload(google: Google, bucket: str, spec: RuntimeSpec) -> None:
    """Upload a placeholder for a runtime archive."""
    url = f"http://127.0.0.1:{google.storage}/upload/storage/v1/b/{bucket}/o"
    parts = f'--x\r\nContent-Type: application/json\r\n\r\n{{"name": "{spec.path}", "metadata": {{"sha256": "{"5a" * 32}"}}}}'
    body = f"{parts}\r\n--x\r\nContent-Type: application/gzip\r\n\r\narchive\r\n--x--\r\n"
    headers = {"Content-Type": "multipart/related; boundary=x"}
    requests.post(url, params={"uploadType": "multipart"}, data=body, headers=headers, timeout=limit()).raise_for_status()
