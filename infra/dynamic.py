"""Dynamic resources whose code stays out of the state.

Pulumi pickles a dynamic provider into the state of every resource. This one is a name only: the module that it names does
the work, so an edit of that module is no change of any resource.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

from pulumi import Input, ResourceOptions
from pulumi.dynamic import ConfigureRequest, CreateResult, DiffResult, ReadResult, Resource, ResourceProvider, UpdateResult

Props = dict[str, Any]

# grpc logs the traceback of every error that a provider raises; the error itself reaches the user through the engine.
logging.getLogger("grpc").setLevel(logging.CRITICAL)


class Lifecycle(Protocol):
    """The protocol of a module that implements a dynamic resource.

    `create` must succeed if an interrupted run left a part, and `delete` if the resource is incomplete or gone. `read` returns
    None for what no longer exists. Outputs hold the inputs that were applied. DELETE_FIRST, True by default, says whether a
    replacement is created after the old resource is deleted.
    """

    REPLACE: frozenset[str]
    """Inputs whose change needs a new resource; any other change is an update in place."""

    create: Callable[[Props], tuple[str, Props]]
    read: Callable[[str, Props], Props | None]
    update: Callable[[str, Props, Props], Props]
    delete: Callable[[str, Props], None]


class ModuleProvider(ResourceProvider):
    """Hands every call to the module of that name."""

    def __init__(self, module: str) -> None:
        super().__init__()
        self.module = module

    def _lifecycle(self) -> Lifecycle:
        return cast(Lifecycle, importlib.import_module(self.module))

    def configure(self, req: ConfigureRequest) -> None:
        """Pass the stack's configuration to a module that needs it.

        Its secrets must not be in a resource's state.
        """
        configure = getattr(self._lifecycle(), "configure", None)
        if configure:
            configure(req.config.get)

    def create(self, props: Props) -> CreateResult:
        return CreateResult(*self._lifecycle().create(plain(props)))

    def read(self, id_: str, props: Props) -> ReadResult:
        state = self._lifecycle().read(id_, plain(props))
        return ReadResult(id_, state) if state is not None else ReadResult("", {})

    def update(self, id_: str, old: Props, new: Props) -> UpdateResult:
        return UpdateResult(self._lifecycle().update(id_, plain(old), plain(new)))

    def diff(self, id_: str, old: Props, new: Props) -> DiffResult:
        changed = changes(plain(old), plain(new))
        replaces = sorted(changed & self._lifecycle().REPLACE)
        first = getattr(self._lifecycle(), "DELETE_FIRST", True)
        return DiffResult(changes=bool(changed), replaces=replaces, delete_before_replace=first)

    def delete(self, id_: str, props: Props) -> None:
        self._lifecycle().delete(id_, plain(props))


def plain(props: Mapping[str, Any]) -> Props:
    """Return a resource's properties in the form that its module expects."""
    return {key: _whole(value) for key, value in props.items() if not key.startswith("__")}


def _whole(value: Any) -> Any:
    """Return a value with whole numbers as int: the engine sends floats."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return value


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> set[str]:
    """Return the names of the inputs in `new` that differ from those that `old` applied."""
    return {key for key, value in new.items() if old.get(key) != value}


class ModuleResource(Resource):
    """A dynamic resource; a subclass names its module in `lifecycle` and its new properties in `outputs`."""

    lifecycle: str
    outputs: tuple[str, ...] = ()

    def __init__(self, name: str, props: Mapping[str, Input[Any]], opts: ResourceOptions | None = None) -> None:
        super().__init__(ModuleProvider(self.lifecycle), name, {**dict.fromkeys(self.outputs), **props}, opts)
