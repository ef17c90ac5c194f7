"""The files of the operator, who runs `fab`, as a resource: `pulumi up` writes them and replaces outdated ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infra.connection import contents_match, files, remove, write
from infra.dynamic import ModuleResource, Props
from infra.templates import ROOT

REPLACE_ON_CHANGES = frozenset({"folder"})


class OperatorFiles(ModuleResource, module="operator", name="OperatorFiles"):
    """Inputs: folder (below the project's root), inventory (JSON), privateKey."""

    module_name = __name__


def _contents(props: Mapping[str, Any]) -> dict[str, str]:
    return files(ROOT / props["folder"], props["inventory"], props["privateKey"])


def create(props: Props) -> tuple[str, Props]:
    write(ROOT / props["folder"], _contents(props))
    return props["folder"], props


def read(name: str, props: Props) -> Props | None:
    """Return an empty inventory if the files are outdated or changed: Pulumi then sees a difference and writes them."""
    if not (ROOT / props["folder"]).is_dir():
        return None
    same = bool(props.get("inventory")) and contents_match(ROOT / props["folder"], _contents(props))
    return props if same else {**props, "inventory": ""}


def delete(name: str, props: Props) -> None:
    remove(ROOT / props["folder"])
