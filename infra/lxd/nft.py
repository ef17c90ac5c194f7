"""Call nft on this machine: load and list tables of the bridge family, and compare them with their scripts."""

from __future__ import annotations

import difflib
import os
import shutil
import subprocess
import threading

from infra.lxd.api import LxdError


def _nft(*arguments: str, script: str | None = None) -> subprocess.CompletedProcess[str]:
    path = shutil.which("nft") or "/usr/sbin/nft"
    command = [path, *arguments] if os.geteuid() == 0 else ["sudo", "-n", path, *arguments]
    try:
        return subprocess.run(command, input=script, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise LxdError(f"{error.filename} is missing: install it with `make lxd`") from None


def version() -> str:
    """Return nft's version line."""
    return " ".join(_nft("--version").stdout.split()[:2])


def load(script: str) -> None:
    """Run a script atomically; LxdError with nft's reason if it refuses the script."""
    result = _nft("-f", "-", script=script)
    if result.returncode:
        raise LxdError(f"nft refused the firewall: {_reason(result)}")


def _reason(result: subprocess.CompletedProcess[str]) -> str:
    """Return why nft, or sudo, failed, on one line."""
    hint = " (the firewall needs root: run as root, or allow `sudo nft` without a password)"
    return " ".join(result.stderr.partition("^")[0].split()) + (hint if result.stderr.startswith("sudo:") else "")


def remove(table: str) -> None:
    """Delete a table of the bridge family; do nothing if it does not exist."""
    # The script declares the table first, so that deleting a table that does not exist is no error.
    load(f"table bridge {table}\ndelete table bridge {table}\n")


def list_table(table: str) -> str | None:
    """Return a table as nft prints it, without counters, or None if it does not exist; LxdError if nft cannot read it."""
    result = _nft("--stateless", "list", "table", "bridge", table)
    if result.returncode and "No such file or directory" not in result.stderr:
        raise LxdError(f"the firewall cannot be read: {_reason(result)}")
    return result.stdout if result.returncode == 0 else None


def tables() -> list[str]:
    """Return all tables of the bridge family."""
    return [line.split()[2] for line in _nft("list", "tables", "bridge").stdout.splitlines()]


def list_chains() -> str:
    """Return nft's chains of all tables, as JSON; empty if it fails."""
    result = _nft("--json", "list", "chains")
    return result.stdout if result.returncode == 0 else ""


def differences(table: str, script: str) -> list[str] | None:
    """Return the differences between a script and its table, or None if the table does not exist.

    `- rule`: in the script, not loaded. `+ rule`: loaded, not in the script. nft itself formats the script's rules: they are
    loaded into a dormant table, which filters nothing and is deleted at once.
    """
    loaded = list_table(table)
    if loaded is None:
        return None
    dormant = f"{table}_dormant_{os.getpid()}_{threading.get_ident()}"
    renamed = script.replace(f"table bridge {table}", f"table bridge {dormant}")
    opening = f"table bridge {dormant} {{\n"
    try:
        load(renamed.replace(opening, f"{opening}\tflags dormant;\n"))
        expected = list_table(dormant) or ""
    finally:
        remove(dormant)
    return diff_lines(_rules(expected.replace(dormant, table).replace("\tflags dormant\n", "")), _rules(loaded))


def _rules(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip() not in ("", "}")]


def diff_lines(expected: list[str], loaded: list[str]) -> list[str]:
    """Return lines only in `expected` as `- line`, and lines only in `loaded` as `+ line`; order matters."""
    return [line for line in difflib.ndiff(expected, loaded) if line.startswith(("- ", "+ "))]
