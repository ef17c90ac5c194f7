"""Read a stack's hosts from Pulumi's state, on a machine where `pulumi up` has not run since they changed."""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from infra import backend
from ops import terminal
from ops.errors import OpsError, UsageError

_SECONDS = 120
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")
T = TypeVar("T")
_OUTPUTS = ("stack", "output", "--json", "--show-secrets")


def named_stack() -> str:
    """Return the stack of `--stack` or PULUMI_STACK without its organisation; empty if neither is set."""
    return os.environ.get("PULUMI_STACK", "").rpartition("/")[2]


def selected_stack(root: Path) -> str | None:
    """Return Pulumi's selected stack, or None if there is none.

    It is read from Pulumi's workspace file, whose name has a hash of the project's path: starting Pulumi takes longer than most
    commands.
    """
    project = hashlib.sha1(str(_pulumi_path(root) / "Pulumi.yaml").encode(), usedforsecurity=False).hexdigest()
    try:
        home = os.environ.get("PULUMI_HOME") or f"{pwd.getpwuid(os.getuid()).pw_dir}/.pulumi"
        workspace = Path(home, "workspaces", f"scaletier-{project}-workspace.json").read_bytes()
        return str(json.loads(workspace)["stack"]).rpartition("/")[2] or None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _pulumi_path(root: Path) -> Path:
    """Return the project's folder as Pulumi names it, with the symbolic links of the shell's $PWD."""
    here = Path(os.environ.get("PWD") or "/")
    try:
        folders = (here, *here.parents) if here.samefile(".") else ()
        return next((folder for folder in folders if folder.samefile(root)), root)
    except OSError:
        return root


def fetch(root: Path, parse: Callable[[str, Path], T]) -> T:
    """Fetch the inventory of the stack in use, write its connection files, and return what `parse` makes of it.

    If the stack is not up, delete its connection files and raise UsageError.
    """
    from infra.connection import FOLDER, files, remove, write

    for line in filter(None, (backend.other_backend_note(root), backend.unused_passphrase_warning(root))):
        terminal.note(line)
    with terminal.ProgressLine("asking Pulumi for the hosts"):
        output = _pulumi(root, *_OUTPUTS)
    try:
        outputs: Any = json.loads(output)
    except ValueError:
        raise OpsError("Pulumi's list of hosts is no JSON") from None
    if not outputs:
        name = named_stack() or selected_stack(root)
        if name and _only_in_own_state(root, name):
            raise UsageError(f"stack {name} is not up in {backend.url(root)}, and this checkout has one: unset {backend.URL}")
        if name:
            remove(root / FOLDER / name)
        raise UsageError(f"stack {name} is not up: run pulumi up")
    try:
        inventory, key = str(outputs["inventory"]), str(outputs["operatorKey"])
        stack = str(json.loads(inventory)["stack"])
        if not _NAME.fullmatch(stack):
            raise ValueError(f"stack {stack!r}")
        folder = root / FOLDER / stack
        result = parse(inventory, folder)
        contents = files(folder, inventory, key)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"the stack's state was written by another version ({error!r}): run pulumi up") from None
    write(folder, contents)
    return result


def _pulumi(root: Path, *arguments: str) -> str:
    """Return Pulumi's output; UsageError if the stack does not exist, OpsError if Pulumi fails otherwise."""
    own = Path(sys.prefix, "bin", "pulumi")
    argv = [str(own) if own.exists() else "pulumi", *arguments, "--non-interactive"]
    folder = _pulumi_path(root)
    env = {**os.environ, "PWD": str(folder)}
    try:
        process = subprocess.run(
            argv, cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OpsError(f"Pulumi cannot list the hosts ({error})") from None
    if process.returncode:
        why = backend.reason(process.stderr)
        if not re.search(r"no stack (selected|named)|not found", why):
            raise OpsError(backend.explain(root, why))
        name = named_stack()
        if name and _only_in_own_state(root, name):
            raise UsageError(f"stack {name!r} is not in {backend.url(root)}, and this checkout has one: unset {backend.URL}")
        if name:
            from infra.connection import FOLDER

            up = sorted(path.parent.name for path in (root / FOLDER).glob("*/inventory.json"))
            instead = f"; stacks that exist: {', '.join(up)}" if up else ""
            how = f"make stack STACK={name} && pulumi up --stack {name}"
            raise UsageError(f"stack {name!r} (--stack, PULUMI_STACK) does not exist here{instead}. Run: {how}")
        raise UsageError(f"no stack is up here: run pulumi up (Pulumi knows none: {why})")
    return process.stdout


def _only_in_own_state(root: Path, stack: str) -> bool:
    """Return True if the checkout's own state is not in use, and has the stack."""
    return not backend.is_own(root) and backend.has_stack(backend.own_url(root), stack)
