"""A host's image, and the start-up script that applies the Ansible role to it."""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import yaml

from infra.gcp.firewall import GOOGLE_RANGE
from infra.runtime.recipe import RuntimeSpec
from infra.scale_tiers import PYTHON, PYTHON_WITH_GPUS, Accelerator
from infra.templates import ROOT, render, source_files

DEBIAN = "projects/debian-cloud/global/images/family/debian-12"
# Secure Boot loads only signed kernel modules. Debian has no signed NVIDIA driver; Canonical signs Ubuntu's.
# Source: Compute Engine documentation, "Install GPU drivers", on VMs that use Secure Boot.
UBUNTU = "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-amd64"
# The APIs that hosts call: TensorFlow and fsspec for objects in the bucket, replicas to start a host.
APIS = ("storage.googleapis.com", "www.googleapis.com", "compute.googleapis.com")
_DRIVERS = ("580-server", "570-server", "550-server")

_ROLE = ROOT / "ansible" / "roles" / "host"
# Google's image configures the network; the VPC has the firewall, which no host can flush. Google's guest agent creates the
# host key, installs the authorized key, and writes the names of the host and the metadata server into /etc/hosts.
LOCAL_ONLY_FILES = frozenset(
    {
        "etc/hosts",
        "etc/systemd/network/50-scaletier.network",
        "etc/systemd/system/scaletier-firstboot.service",
        "etc/systemd/system/scaletier-firewall.service",
        "usr/lib/scaletier/firstboot",
        "usr/lib/scaletier/firewall",
    }
)


@dataclass(frozen=True)
class _File:
    path: str
    mode: str
    content: str


@dataclass(frozen=True)
class StoredRuntime:
    """A runtime's archive in a bucket, with its hash, which hosts download."""

    spec: RuntimeSpec
    bucket: str
    sha256: str

    @property
    def url(self) -> str:
        return f"https://storage.googleapis.com/{self.bucket}/{self.spec.path}"


def image(chosen: str | None, gpus: bool) -> str:
    """Return the image of a stack's hosts: the configured one, else Debian 12, or Ubuntu if any host has GPUs.

    All hosts have the same image, since a job's packages are built for one version of Python.
    """
    return chosen or (UBUNTU if gpus else DEBIAN)


def python_version(gpus: bool) -> str:
    return PYTHON_WITH_GPUS if gpus else PYTHON


def startup_script(
    archive: StoredRuntime,
    accelerator: Accelerator | None,
    idle_stop_seconds: int,
    network: ipaddress.IPv4Network,
    egress_closed: bool,
) -> str:
    """Return a host's start-up script: equal for hosts with the same arguments.

    `network` is the range of the cluster's hosts. With `egress_closed`, hosts reach Google's APIs
    by their private address only. A host stops after `idle_stop_seconds` without work; never if 0.
    """
    defaults: Mapping[str, Any] = yaml.safe_load((_ROLE / "defaults" / "main.yml").read_text())
    script = partial(
        render,
        "startup.sh.j2",
        users=defaults["host_users"],
        packages=defaults["program_packages"],
        files=[*_files(), _File("/etc/scaletier/network", "0644", f"{network}\n")],
        masked=defaults["host_masked"],
        accelerator=accelerator,
        drivers=_DRIVERS,
        idle_stop_seconds=idle_stop_seconds,
        apis=APIS,
        google=str(GOOGLE_RANGE[0]) if egress_closed else "",
        archive=archive,
        runtime=archive.spec.name,
        python=f"python{archive.spec.python}",
        tensorflow=archive.spec.requirements[-1],
    )
    return script(version=hashlib.sha256(script(version="").encode()).hexdigest()[:12])


def version(script: str) -> str:
    """Return the version that a host reports after it has run this script: a hash of the rest of the script."""
    return next(line.partition("=")[2] for line in script.splitlines() if line.startswith("script="))


def _files() -> list[_File]:
    top = _ROLE / "files" / "root"
    entries = []
    for path in source_files(top):
        name = path.relative_to(top).as_posix()
        if name not in LOCAL_ONLY_FILES:
            mode = "0755" if path.stat().st_mode & 0o100 else "0440" if name.startswith("etc/sudoers.d/") else "0644"
            entries.append(_File(f"/{name}", mode, path.read_text()))
    return entries
