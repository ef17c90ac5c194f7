"""Check a stack and this machine: `python -m infra.doctor [STACK] [--fix]`.

It prints each finding as a line of JSON, which `fab doctor` shows. A check is a function that yields findings. Each target has
further checks in `infra/<target>/doctor.py`; to add one, add a name and a function to the dict CHECKS there.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from infra import backend
from infra.config import ClusterConfig
from infra.connection import FOLDER
from infra.findings import Check, Finding, Severity, fail, ok, one_line, run_checks, warning
from infra.templates import ROOT

SECONDS = 120.0
_PINNED = ("pulumi", "pulumi-gcp", "pylxd", "fabric", "paramiko")
_GIB = 2**30
_MIN_FREE, _LOW_FREE = _GIB, 5 * _GIB


def checks(stack: str | None) -> dict[str, Check]:
    """Return all checks of this machine, and of the stack if there is one."""
    inventory = local_inventory(stack) if stack else None
    target = inventory["target"] if inventory else configured_target(stack)
    # Imported here, so the libraries of one target are not needed for the other.
    target_checks: Mapping[str, Any] = importlib.import_module(f"infra.{target}.doctor").CHECKS
    own = {name: partial(check, inventory) for name, check in target_checks.items()}
    if inventory is None:
        own = {name: partial(_as_warnings, check) for name, check in own.items()}
    return {"pulumi": pulumi, "python": python, "machine": machine, "state": partial(state, stack), **own}


def _as_warnings(check: Check) -> Iterator[Finding]:
    """Yield a check's findings, errors as warnings: without a stack nothing needs the target yet."""
    try:
        for finding in check():
            yield replace(finding, severity=Severity.WARNING) if finding.severity is Severity.ERROR else finding
    except Exception as error:  # noqa: BLE001  a check may raise anything
        yield warning(one_line(error))


def configured_target(stack: str | None) -> str:
    """Return the target in a stack's configuration, `lxd` if there is none that can be read."""
    try:
        config = yaml.safe_load((ROOT / f"Pulumi.{stack}.yaml").read_text())["config"]
        return ClusterConfig.target_of({"target": config["scaletier:target"]})
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return "lxd"


def local_inventory(stack: str) -> dict[str, Any] | None:
    """Return the stack's local inventory, or None if there is none."""
    file = ROOT / FOLDER / stack / "inventory.json"
    try:
        inventory = json.loads(file.read_text())
    except FileNotFoundError:
        return None
    return inventory if isinstance(inventory, dict) and inventory.get("hosts") else None


def pulumi() -> Iterator[Finding]:
    """Check that Pulumi's command runs and is new enough."""
    required = str(yaml.safe_load((ROOT / "Pulumi.yaml").read_text())["requiredPulumiVersion"]).removeprefix(">=")
    program = shutil.which("pulumi") or str(Path(sys.prefix, "bin", "pulumi"))
    try:
        result = subprocess.run([program, "version"], capture_output=True, text=True, timeout=60, check=False)
    except OSError as error:
        yield fail(f"pulumi does not run ({error.strerror})", "make pulumi")
        return
    version = result.stdout.strip().removeprefix("v")
    if version_numbers(version) < version_numbers(required):
        yield fail(f"pulumi is {version or 'without a version'}, and {required} is needed", "make pulumi")
    else:
        yield ok(f"pulumi {version}")


def state(stack: str | None) -> Iterator[Finding]:
    """Check that the state in use is not damaged, can be decrypted, and has the hosts of the local inventory."""
    state_note = backend.other_backend_note(ROOT) or f"the state in use is this checkout's, {backend.FOLDER}"
    if unused := backend.unused_passphrase_warning(ROOT):
        yield ok(unused)
    damage = [*backend.damaged_files(backend.url(ROOT))]
    yield from (fail(what, command) for what, command in damage)
    if stack is None:
        yield ok(state_note)
        return
    inventory_file = ROOT / FOLDER / stack / "inventory.json"
    try:
        deployment = json.loads(backend.run_pulumi(ROOT, "stack", "export", "--show-secrets", "--stack", stack))["deployment"]
    except backend.BackendError as error:
        if f"no stack named '{stack}' found" not in str(error):
            mention = re.compile(rf"stack {re.escape(stack)}(?: |$)")
            yield from [] if any(mention.search(what) for what, _ in damage) else [fail(str(error))]
        elif inventory_file.exists():
            yield warning(f"{state_note}; it has no stack {stack}, whose hosts are in the local inventory", _remedy(stack))
        return
    if pending := [str(each["resource"]["urn"]).rpartition("::")[2] for each in deployment.get("pending_operations") or ()]:
        clear = "pulumi up, then pulumi refresh --clear-pending-creates"
        yield warning(f"an update did not end, and the state has {', '.join(pending)} as pending", clear)
    if inventory_file.exists() and inventory_file.read_text() != _inventory_of(deployment):
        yield warning(f"{state_note}; its stack {stack} has other hosts than the local inventory", "fab connect")
        return
    yield ok(state_note)


def _remedy(stack: str) -> str:
    if not backend.is_own(ROOT) and backend.has_stack(backend.own_url(ROOT), stack):
        return f"unset {backend.URL}"
    return f"set {backend.URL} to the state that has it"


def _inventory_of(deployment: Mapping[str, Any]) -> str | None:
    """Return the inventory from the outputs of a stack, or None if it has none."""
    for resource in deployment.get("resources") or ():
        if resource["type"] == "pulumi:pulumi:Stack":
            output = (resource.get("outputs") or {}).get("inventory")
            return str(json.loads(output["plaintext"])) if isinstance(output, dict) else output
    return None


def python() -> Iterator[Finding]:
    """Check this Python, and that its libraries have the tested versions."""
    pins = dict(re.findall(r"^([\w.-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    for name in _PINNED:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield fail(f"{name} is not installed", "make venv")
            continue
        if version != pins.get(name, version):
            yield warning(f"{name} is {version}, and the project was tested with {pins[name]}", "make venv")
    yield ok(f"Python {sys.version.partition(' ')[0]}, pulumi-gcp {importlib.metadata.version('pulumi-gcp')}")


def machine() -> Iterator[Finding]:
    """Check the free space of this machine's disk."""
    yield free_space("this machine", shutil.disk_usage(ROOT).free)


def free_space(where: str, free: int) -> Finding:
    """Return a finding about the free bytes of a disk."""
    text, remedy = f"{free / _GIB:.1f} GiB are free on {where}", "make room, or fab prune"
    if free < _MIN_FREE:
        return fail(text, remedy)
    return warning(text, remedy) if free < _LOW_FREE else ok(text)


def version_numbers(version: str) -> tuple[int, ...]:
    """Return a version such as `3.250.0` as numbers, for comparison."""
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def main(arguments: list[str]) -> None:
    """Print the findings as the checks yield them."""
    stack = next((word for word in arguments if not word.startswith("-")), None)
    try:
        findings = run_checks(checks(stack), SECONDS, "--fix" in arguments)
    except (OSError, ValueError, KeyError, ImportError) as error:
        findings = run_checks({"inventory": partial(_unreadable_inventory, stack, error)}, SECONDS)
    printed: set[str] = set()
    for finding in findings:
        if finding.what in printed:
            continue  # several checks may find the same fault
        printed.add(finding.what)
        sys.stdout.write(json.dumps(finding.to_dict()) + "\n")
        sys.stdout.flush()


def _unreadable_inventory(stack: str | None, error: Exception) -> Iterator[Finding]:
    yield fail(f"the inventory of stack {stack} cannot be read ({error!r})", "pulumi up, or fab connect")


if __name__ == "__main__":
    main(sys.argv[1:])
