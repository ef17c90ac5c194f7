"""What a host runs: its image, and the start-up script that makes it the host of the Ansible role."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from infra.spec import Accelerator
from infra.templates import ROOT, render

DEBIAN = "projects/debian-cloud/global/images/family/debian-12"
# Secure Boot takes signed kernel modules alone, and Debian has no NVIDIA driver that is signed; Canonical signs Ubuntu's.
# Source: Compute Engine documentation, "Install GPU drivers", on VMs that use Secure Boot.
UBUNTU = "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-amd64"
_DRIVERS = ("580-server", "570-server", "550-server")

_ROLE = ROOT / "ansible" / "roles" / "host"
# A Google host has its network from its image, and its host key and authorized key from Google's guest agent.
_NOT_HERE = frozenset(
    {
        "etc/systemd/network/50-scaletier.network",
        "etc/systemd/system/scaletier-firstboot.service",
        "usr/lib/scaletier/firstboot",
    }
)


@dataclass(frozen=True)
class _File:
    path: str
    mode: str
    content: str


def image(chosen: str | None, accelerator: Accelerator | None) -> str:
    """The image of a host: the one in the configuration, else Debian 12, or Ubuntu where there are GPUs."""
    return chosen or (UBUNTU if accelerator else DEBIAN)


def startup_script(runtime_version: str, accelerator: Accelerator | None, idle_seconds: int) -> str:
    """The start-up script of a host: the same text for the same role, version and kind of machine."""
    defaults: Mapping[str, Any] = yaml.safe_load((_ROLE / "defaults" / "main.yml").read_text())
    package = "tensorflow[and-cuda]" if accelerator else "tensorflow-cpu"
    tensorflow = f"{package}=={runtime_version}"
    requirements = requirement_lines(tensorflow)
    constraints = constraint_lines(runtime_version)
    digest = hashlib.sha256("\n".join((*requirements, "", *constraints)).encode()).hexdigest()[:12]
    return render(
        "startup.sh.j2",
        packages=defaults["host_packages"],
        users=defaults["host_users"],
        files=_files(),
        accelerator=accelerator,
        drivers=_DRIVERS,
        idle_seconds=idle_seconds,
        runtime=digest,
        tensorflow=tensorflow,
        requirements=requirements,
        constraints=constraints,
    )


def requirement_lines(tensorflow: str) -> list[str]:
    """What the trainer needs, with this TensorFlow, the model server and the tuner, and gcsfs for the bucket.

    Other versions are the constraints' affair.
    """
    names = [line.partition("==")[0] for line in _lines("trainer/requirements.txt")]
    mine = [name for name in names if not name.startswith("tensorflow")]
    return [*mine, "gcsfs", *_lines("serving/requirements.txt"), *_lines("tuner/requirements.txt"), tensorflow]


def constraint_lines(runtime_version: str) -> list[str]:
    """The versions that the project was tried with; none of them for another TensorFlow, which needs others."""
    pinned = next(line for line in _lines("trainer/requirements.txt") if line.startswith("tensorflow")).partition("==")[2]
    if runtime_version != pinned:
        return []
    return [line for line in _lines("constraints.txt") if not re.match(r"(?i)tensorflow", line)]


def _lines(path: str) -> list[str]:
    return [line.strip() for line in (ROOT / path).read_text().splitlines() if line.strip() and not line.startswith("#")]


def _files() -> list[_File]:
    top = _ROLE / "files" / "root"
    found = []
    for path in sorted(top.rglob("*")):
        name = path.relative_to(top).as_posix()
        if path.is_file() and name not in _NOT_HERE:
            mode = "0755" if path.stat().st_mode & 0o100 else "0440" if name.startswith("etc/sudoers.d/") else "0644"
            found.append(_File(f"/{name}", mode, path.read_text()))
    return found
