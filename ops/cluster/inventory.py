"""Find and read the inventory of the stack in use, `.scaletier/<stack>/inventory.json`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from infra.inventory import SCHEMA, Inventory
from infra.templates import ROOT as CHECKOUT
from jobs.serialization import RecordError
from ops import terminal
from ops.cluster import state
from ops.errors import DONE, UsageError

ROOT = Path(os.environ.get("SCALETIER_PROJECT") or CHECKOUT).resolve()
"""The project's folder, with the state of its stacks and the files of `make setup`."""


@dataclass(frozen=True)
class Runtimes:
    """The folder of jobs' Python runtimes: its path on this machine, which builds them, and its path on the hosts."""

    here: Path
    on_hosts: str


def require_runtimes(inventory: Inventory, what: str) -> Runtimes:
    """Return the folder of runtimes; UsageError if the hosts can have none."""
    if inventory.runtimes and inventory.operator_runtimes:
        return Runtimes(Path(inventory.operator_runtimes), inventory.runtimes)
    if inventory.bucket_on_hosts:
        raise UsageError(f"{what}: the hosts of stack {inventory.stack} are too old for runtimes: run pulumi up")
    raise UsageError(
        f"{what}: the hosts of stack {inventory.stack} have the Python of their image only, with TensorFlow "
        f"{inventory.tensorflow or 'of the image'}; list other packages in the requirements.txt of the trainer's package"
    )


def parse(text: str | bytes, folder: Path) -> Inventory:
    """Parse the inventory of a stack from its JSON; UsageError if it is of another version or damaged."""
    try:
        data = json.loads(text)
        if data["schema"] != SCHEMA:
            raise UsageError(f"{folder}/inventory.json has schema {data['schema']}, this version reads {SCHEMA}: run pulumi up")
        inventory = Inventory.from_dict(data)
        inventory.chief  # noqa: B018  a cluster without a master is no cluster
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        why = error if isinstance(error, RecordError) else repr(error)
        raise UsageError(f"{folder}/inventory.json cannot be read ({why}): run pulumi up") from None
    bucket, operator_bucket = inventory.bucket.rstrip("/"), inventory.operator_bucket.rstrip("/")
    return replace(inventory, bucket=bucket, operator_bucket=operator_bucket, folder=folder)


def choose_stack(folders: Sequence[str], named: str, selected: Callable[[], str | None]) -> str | None:
    """Return the named stack, else the selected one, else the only one; None if it is not in `folders`."""
    if stack := named or selected():
        return stack if stack in folders else None
    if len(folders) > 1:
        raise UsageError(f"more than one stack is up: set --stack or PULUMI_STACK to one of {', '.join(folders)}")
    return folders[0] if folders else None


def load(root: Path = ROOT) -> Inventory:
    """Return the inventory of the stack in use, fetched from its state if it is not here yet."""
    folders = sorted(path.parent.name for path in root.glob(".scaletier/*/inventory.json"))
    stack = choose_stack(folders, state.named_stack(), lambda: state.selected_stack(root))
    if stack is None:
        inventory = state.fetch(root, parse)
        terminal.note(
            f"stack {inventory.stack} was made elsewhere: {terminal.plural(len(inventory.hosts), 'host')}, by its state "
            "(fab connect reads it again)"
        )
        return inventory
    folder = root / ".scaletier" / stack
    return parse((folder / "inventory.json").read_bytes(), folder)


def connect(as_json: bool, root: Path = ROOT) -> int:
    """Fetch the inventory of the stack in use from its state, even if this checkout has one."""
    inventory = state.fetch(root, parse)
    stack, tier, folder = inventory.stack, inventory.scale_tier, inventory.folder
    if as_json:
        terminal.print_json({"stack": stack, "scaleTier": tier, "hosts": list(inventory.names), "folder": str(folder)})
        return DONE
    hosts = terminal.plural(len(inventory.hosts), "host")
    terminal.out(f"stack {stack}: {tier}, {hosts}, by its state; ssh -F {folder}/ssh_config")
    return DONE
