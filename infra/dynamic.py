"""Dynamic resources whose code stays out of the state.

Pulumi pickles the provider of a dynamic resource into the resource's state. Our provider pickles only a module's name, so
editing that module changes no resource.
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

# grpc logs the traceback of every error that a provider raises. Silence it: Pulumi itself prints the error.
logging.getLogger("grpc").setLevel(logging.CRITICAL)


_configuration: dict[str, Callable[[str], str | None]] = {}
# The present names of renamed modules: states of older stacks have the old names.
_MOVED = {"infra.lxd.seal": "infra.lxd.bucket_guard"}
# Pulumi calls providers from many threads. Two threads that import pylxd for the first time together can deadlock, as its
# modules import each other.
_importing = threading.Lock()
_updating = threading.Event()


def configuration(key: str) -> str | None:
    """Return a value of the stack's configuration; None if it is unset, or outside the process of the dynamic provider.

    A resource reads secrets, such as credentials, with this function, so that they are not in its state.
    """
    return _configuration["get"](key) if _configuration else None


def is_update() -> bool:
    """Return True in the process of an update or a preview: only these let a provider check inputs."""
    return _updating.is_set()


class ModuleProvider(ResourceProvider):
    """Pass each call to a module, which implements one kind of resource.

    The module has `create(props)`, which returns the id and the outputs. It may also have, if the default does not suffice:

    - `read(id, props)`: returns the resource's properties, or None if it no longer exists. Default: the state's properties.
    - `update(id, old, new)`: changes the resource in place. Default: calls `create`.
    - `delete(id, props)`: deletes the resource. Default: does nothing.
    - `REPLACE_ON_CHANGES`: the inputs whose change needs a new resource. Any other change is an update in place. Default: none.
    - `replacing(old, new)`: returns the changed inputs that need a new resource. Default: those in REPLACE_ON_CHANGES.
    - `DELETE_FIRST`: False to create a replacement before the old resource is deleted. Default: True.

    `create` must succeed if an interrupted run left parts, and `delete` if the resource is incomplete or gone. Outputs contain
    the inputs that were applied. States store these names: do not rename this class; add a renamed module to `_MOVED`.
    """

    def __init__(self, module: str) -> None:
        self.module = module

    def _member(self, name: str, default: Any = None) -> Any:
        with _importing:
            module = importlib.import_module(_MOVED.get(self.module, self.module))
        return getattr(module, name, default)

    def configure(self, req: ConfigureRequest) -> None:
        _configuration["get"] = req.config.get

    def check(self, olds: Props, news: Props) -> Any:
        _updating.set()
        return super().check(olds, news)

    def create(self, props: Props) -> CreateResult:
        return CreateResult(*self._member("create")(normalize(props)))

    def read(self, id_: str, props: Props) -> ReadResult:
        state = self._member("read", lambda _, props: props)(id_, normalize(props))
        return ReadResult(id_, state) if state is not None else ReadResult("", {})

    def update(self, id_: str, old: Props, new: Props) -> UpdateResult:
        if update := self._member("update"):
            return UpdateResult(update(id_, normalize(old), normalize(new)))
        return UpdateResult(self._member("create")(normalize(new))[1])

    def diff(self, id_: str, old: Props, new: Props) -> DiffResult:
        old, new = normalize(old), normalize(new)
        changed = changes(old, new)
        replacing = self._member("replacing", lambda *_: changed & self._member("REPLACE_ON_CHANGES", frozenset()))
        return DiffResult(bool(changed), sorted(replacing(old, new)), delete_before_replace=self._member("DELETE_FIRST", True))

    def delete(self, id_: str, props: Props) -> None:
        self._member("delete", lambda *_: None)(id_, normalize(props))


def normalize(props: Mapping[str, Any]) -> Props:
    """Return a resource's properties as its module expects them: whole numbers as int, without Pulumi's own keys."""
    return {key: _whole_as_int(value) for key, value in props.items() if not key.startswith("__")}


def _whole_as_int(value: Any) -> Any:
    """Return a value with whole numbers as int, because Pulumi sends all numbers as floats."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _whole_as_int(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole_as_int(item) for item in value]
    return value


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> set[str]:
    """Return the names of the inputs in `new` that differ from the applied ones in `old`."""
    return {key for key, value in new.items() if old.get(key) != value}


class ModuleResource(Resource):
    """A dynamic resource whose code is the functions of a module.

    A subclass sets `module_name = __name__`: `ModuleProvider` then calls the functions `create`, `update` and so on of its own
    module by name. It lists in `outputs` the properties that are not inputs. The arguments `module` and `name` of the class
    statement are parts of Pulumi's type of the resource: `pulumi-python:dynamic/operator:OperatorKey`.
    """

    module_name: str
    outputs: tuple[str, ...] = ()

    def __init__(self, name: str, props: Mapping[str, Input[Any]], opts: ResourceOptions | None = None) -> None:
        super().__init__(ModuleProvider(self.module_name), name, {**dict.fromkeys(self.outputs), **props}, opts)
