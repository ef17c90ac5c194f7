"""The firewall table as nftables rules on the machine: what a VPC's firewall is to Google's hosts."""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from infra.dynamic import ModuleResource, Props
from infra.lxd.api import LxdError
from infra.lxd.layout import address
from infra.spec import ClusterSpec
from infra.templates import render

REPLACE = frozenset({"table"})


class Firewall(ModuleResource, module="lxd", name="Firewall"):
    """Inputs: table, rules (an nftables script that replaces the table as a whole)."""

    lifecycle = __name__


def rules(spec: ClusterSpec, table: str, bridge: str, network: ipaddress.IPv4Network) -> str:
    """The nftables script for a cluster; pure."""
    members: dict[str, list[str]] = {}
    for replica in spec.replicas:
        members.setdefault(replica.role, []).append(str(address(network, replica)))
    return render("firewall.nft.j2", table=table, bridge=bridge, members=members, rows=spec.allows())


def _nft(*arguments: str, script: str | None = None) -> subprocess.CompletedProcess[str]:
    path = shutil.which("nft") or "/usr/sbin/nft"
    command = [path, *arguments] if os.geteuid() == 0 else ["sudo", "-n", path, *arguments]
    try:
        return subprocess.run(command, input=script, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise LxdError(f"{error.filename} is missing: install it with `make lxd`") from None


def _checked(*arguments: str, script: str | None = None) -> None:
    done = _nft(*arguments, script=script)
    if done.returncode:
        reason = " ".join(done.stderr.split("^", 1)[0].split())
        hint = "" if os.geteuid() == 0 else " (the firewall needs root: run as root, or allow `sudo nft` without a password)"
        raise LxdError(f"nft refused the firewall: {reason}{hint}")


def create(props: Props) -> tuple[str, Props]:
    _checked("-f", "-", script=props["rules"])
    return props["table"], props


def read(table: str, props: Props) -> Props | None:
    return props if table_exists(table) else None


def table_exists(table: str) -> bool:
    """True where the machine has that table in the bridge family."""
    return _nft("list", "table", "bridge", table).returncode == 0


def tables() -> list[str]:
    """All tables of the bridge family."""
    return [line.split()[2] for line in _nft("list", "tables", "bridge").stdout.splitlines()]


def list_chains() -> str:
    """nft's chains of all tables, as JSON; empty where it does not say."""
    done = _nft("--json", "list", "chains")
    return done.stdout if done.returncode == 0 else ""


def forward_drops(bridged: Path, chains: Callable[[], str]) -> list[str]:
    """A warning for each table of somebody else, such as Docker's, that drops what the kernel shows it of the bridge's frames.

    `bridged` is the kernel's switch for that: without its module it is not there.
    """
    if not bridged.exists() or bridged.read_text().strip() != "1":
        return []
    listed = [item["chain"] for item in json.loads(chains() or "{}").get("nftables", []) if "chain" in item]
    return [
        f"nft table {chain['family']} {chain['table']} drops what it does not know, as Docker has it, and {bridged} is 1, so "
        "it is asked about frames between hosts too: they cannot reach each other, unless a rule there accepts what comes from "
        "st+, or after `sysctl net.bridge.bridge-nf-call-iptables=0`"
        for chain in listed
        if chain["family"] in ("ip", "inet") and chain.get("hook") == "forward" and chain.get("policy") == "drop"
    ]


def update(table: str, old: Props, new: Props) -> Props:
    return create(new)[1]


def delete(table: str, props: Props) -> None:
    # Declared first, so that a table that is gone already is no error.
    _checked("-f", "-", script=f"table bridge {table}\ndelete table bridge {table}\n")
