"""`fab shell`: OpenSSH itself, with the stack's ssh_config, as the only user with sudo."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence

from infra.inventory import Inventory
from ops.errors import OpsError

USER = "admin"


def argv(inventory: Inventory, host_name: str, words: Sequence[str] = ()) -> list[str]:
    """Return ssh's command line; words are quoted for the host's shell, but a single one is a whole line."""
    host = inventory.host(host_name)
    line = ["ssh", "-F", str(inventory.folder / "ssh_config"), "-l", USER, host.name]
    return [*line, "--", words[0] if len(words) == 1 else shlex.join(words)] if words else line


def shell(inventory: Inventory, host_name: str | None, words: Sequence[str] = ()) -> int:
    """Replace this process by ssh to a host, by default the chief's; the exit code is the shell's."""
    line = argv(inventory, inventory.chief.name if host_name is None else host_name, words)
    sys.stdout.flush()
    try:
        os.execvp(line[0], line)  # noqa: S606  no shell is wanted here
    except FileNotFoundError:
        raise OpsError("there is no ssh on this machine: install openssh-client") from None
