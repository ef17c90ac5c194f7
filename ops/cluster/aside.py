"""A program of fab's on a host: in a unit for as long as it runs, where it can do no harm, and takes what a job leaves."""

from __future__ import annotations

from collections.abc import Sequence

from ops.cluster.inventory import Host

MEMORY_SHARE = 0.4
"""What it may take of a host's memory. A job may take most of it, and comes first."""
OWNER = "trainer"
"""Whose what jobs write is."""
_LIMITS = ("CPUWeight=20", "IOWeight=20", "OOMScoreAdjust=900", "TasksMax=1024", "KillMode=control-group", "TimeoutStopSec=5")
_WALLS = (
    "NoNewPrivileges=yes",
    "CapabilityBoundingSet=",
    "PrivateDevices=yes",
    "PrivateIPC=yes",
    "PrivateMounts=yes",
    "PrivateTmp=yes",
    "ProtectSystem=strict",
    "ProtectHome=yes",
    "ProtectProc=invisible",
    "ProtectClock=yes",
    "ProtectControlGroups=yes",
    "ProtectHostname=yes",
    "ProtectKernelLogs=yes",
    "ProtectKernelModules=yes",
    "ProtectKernelTunables=yes",
    "InaccessiblePaths=-/etc/ssh -/etc/scaletier -/run/scaletier -/var/lib/scaletier -/var/log",
    "LockPersonality=yes",
    "RemoveIPC=yes",
    "RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK",
    "RestrictNamespaces=yes",
    "RestrictRealtime=yes",
    "RestrictSUIDSGID=yes",
    "SystemCallArchitectures=native",
    "SystemCallFilter=@system-service",
    "SystemCallErrorNumber=EPERM",
    "UMask=0002",
    "Environment=HOME=/tmp",
)


def reading(host: Host, argv: Sequence[str]) -> list[str]:
    """Runs a program that reads what jobs have written, and writes nothing."""
    return _unit(host, argv, ("DynamicUser=yes", f"SupplementaryGroups={OWNER}"))


def writing(host: Host, argv: Sequence[str], bucket: str, folder: str) -> list[str]:
    """Runs a program of a job that writes into a folder, and sees but data besides of a bucket that is a folder itself."""
    shown = (f'TemporaryFileSystem="{bucket}":ro', f'BindReadOnlyPaths=-"{bucket}/data"', f'BindPaths="{folder}"')
    return _unit(host, argv, (f"User={OWNER}", *(shown if bucket.startswith("/") else ())))


def _unit(host: Host, argv: Sequence[str], own: Sequence[str]) -> list[str]:
    properties = [f"MemoryMax={int(host.memory_bytes * MEMORY_SHARE)}", *_LIMITS, *own, *_WALLS]
    line = ["sudo", "-n", "systemd-run", "--quiet", "--pipe", "--wait", "--collect"]
    # systemd would put variables of its own in the place of what begins with a dollar sign.
    return [*line, *(word for each in properties for word in ("-p", each)), "--", *(word.replace("$", "$$") for word in argv)]
