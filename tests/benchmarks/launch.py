"""The peer of `pulumi up`: the same hosts by parallel `lxc launch`, on an existing bridge."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.measure import MeasureError, must, run
from benchmarks.stack import NAME, ROOT, login, say
from infra.dynamic import Props
from infra.lxd import bucket, image, network, project
from infra.lxd.api import LxdError, socket_path
from infra.lxd.config import LxdConfig
from infra.lxd.host import definition
from infra.lxd.layout import names
from infra.lxd.network import choose_range
from infra.lxd.preflight import PreflightResult
from infra.lxd.target import host_props
from infra.scale_tiers import ScaleTier

NAMES = names(f"{NAME}-peer", hashlib.sha256(str(ROOT).encode()).hexdigest()[:6])


def launched(tier: ScaleTier) -> float:
    """Return seconds from the first `lxc launch` to an ssh login on every host; then remove them."""
    base = {"project": NAMES.project, "pool": LxdConfig().storage_pool, "name": NAMES.bucket, "size": 0}
    _remove(base)
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder) / "key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        try:
            subnet = choose_range(NAMES.project, NAMES.bridge, None)
            project.create({"name": NAMES.project, "stack": f"{NAME}-peer", "checkout": str(ROOT)})
            network.create({"name": NAMES.bridge, "range": str(subnet)})
            bucket.create(base)
            public = " ".join(key.with_suffix(".pub").read_text().split()[:2])
            hosts = hosts_of(tier, str(subnet), public)
            began = time.monotonic()
            with ThreadPoolExecutor(len(hosts)) as pool:
                list(pool.map(lambda host: _launch(host, key), hosts))
            return time.monotonic() - began
        except LxdError as error:
            raise MeasureError(str(error)) from None
        finally:
            say("deleting the hosts of lxc launch")
            _remove(base)


def _remove(base: Props) -> None:
    """Delete all that exists, dependents first."""
    with suppress(LxdError):  # without the project there is no bucket
        bucket.delete(NAMES.bucket, base)
    project.delete(NAMES.project, {"name": NAMES.project})


def hosts_of(tier: ScaleTier, addresses: str, public_key: str) -> list[Props]:
    """Return the hosts that `pulumi up` would declare, in the peer's own project and bridge."""
    config = LxdConfig(scaleTier=tier)
    facts = PreflightResult(NAMES, image.require(), image.require_runtime(), ipaddress.IPv4Network(addresses), 0)
    return list(host_props(config.spec(), config, facts, public_key).values())


def launch_command(host: Props, client: str) -> tuple[list[str], bytes]:
    """Return `lxc launch` of a host and its stdin, which as JSON is YAML too; pure."""
    whole: dict[str, Any] = definition(host)
    stdin = json.dumps({"config": whole["config"], "devices": whole["devices"]}).encode()
    return [client, "launch", host["image"], host["name"], "--project", host["project"], "--no-profiles", "--quiet"], stdin


def login_command(host: Props, key: Path) -> Sequence[str]:
    """Return an ssh login that takes any host key, which `lxc launch` does not return."""
    options = ("IdentitiesOnly=yes", "StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "ConnectTimeout=1")
    return ["ssh", "-F", "none", "-i", str(key), *(f"-o{option}" for option in options), f"scaletier@{host['address']}", "true"]


def _launch(host: Props, key: Path) -> None:
    path = socket_path()
    client = shutil.which("incus" if "incus" in path else "lxc")
    if client is None:
        raise MeasureError("neither lxc nor incus is there to launch the peer's hosts")
    env = {**os.environ, "LXD_SOCKET": path, "INCUS_SOCKET": path}
    command, stdin = launch_command(host, client)
    must(run(command, env, ROOT, stdin), " ".join(command))
    login([login_command(host, key)], env)
