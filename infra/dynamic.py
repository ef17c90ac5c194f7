"""Dynamic resources whose code stays out of the state.

Pulumi pickles a dynamic provider into the state of every resource. This one is a name only: the module that it names does
the work, so an edit of that module is no change of any resource.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from pulumi import Input, ResourceOptions
from pulumi.dynamic import ConfigureRequest, CreateResult, DiffResult, ReadResult, Resource, ResourceProvider, UpdateResult

Props = dict[str, Any]

# grpc logs the traceback of every error that a provider raises; the error itself reaches the user through the engine.
logging.getLogger("grpc").setLevel(logging.CRITICAL)


_configuration: dict[str, Callable[[str], str | None]] = {}
# Modules by the names that states of older stacks have.
_MOVED = {"infra.lxd.seal": "infra.lxd.bucket_guard"}
# The engine calls from many threads. Two that first import modules which import each other, as pylxd's do, end by a deadlock.
_importing = threading.Lock()


def configuration(key: str) -> str | None:
    """Return a value of the stack's configuration, in the process of the dynamic provider.

    Its secrets must not be in a resource's state.
    """
    return _configuration["get"](key) if _configuration else None


class ModuleProvider(ResourceProvider):
    """Passes each call to the module of that name, which implements a kind of resource.

    The module has `create(props)`, which returns the id and the outputs, and, unless the default does:

    - `read(id, props)`: None for what no longer exists; by default what the state has;
    - `update(id, old, new)`: by default `create`;
    - `delete(id, props)`: by default nothing;
    - `REPLACE`: the inputs whose change needs a new resource; any other change is an update in place;
    - `DELETE_FIRST` False: a replacement is created before the old resource is deleted.

    `create` must succeed if an interrupted run left a part, and `delete` if the resource is incomplete or gone. Outputs hold
    the inputs that were applied. States of stacks have the names of this class and of the modules.
    """

    def __init__(self, module: str) -> None:
        self.module = module

    def _member(self, name: str, default: Any = None) -> Any:
        with _importing:
            module = importlib.import_module(_MOVED.get(self.module, self.module))
        return getattr(module, name, default)

    def configure(self, req: ConfigureRequest) -> None:
        _configuration["get"] = req.config.get

    def create(self, props: Props) -> CreateResult:
        return CreateResult(*self._member("create")(plain(props)))

    def read(self, id_: str, props: Props) -> ReadResult:
        state = self._member("read", lambda _, props: props)(id_, plain(props))
        return ReadResult(id_, state) if state is not None else ReadResult("", {})

    def update(self, id_: str, old: Props, new: Props) -> UpdateResult:
        if update := self._member("update"):
            return UpdateResult(update(id_, plain(old), plain(new)))
        return UpdateResult(self._member("create")(plain(new))[1])

    def diff(self, id_: str, old: Props, new: Props) -> DiffResult:
        changed = changes(plain(old), plain(new))
        replaces = sorted(changed & self._member("REPLACE", frozenset()))
        return DiffResult(bool(changed), replaces, delete_before_replace=self._member("DELETE_FIRST", True))

    def delete(self, id_: str, props: Props) -> None:
        self._member("delete", lambda *_: None)(id_, plain(props))


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
