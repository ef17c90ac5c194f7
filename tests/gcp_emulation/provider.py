"""A fake provider: it answers the real engine like pulumi-gcp for the program's resources.

Which changes apply in place, recreate a resource or need a stopped instance is written here by hand, from the provider's
documentation. It cannot know where the real one differs from its documentation: how it compares values that Google normalises
(an image's family, the order of a list), which defaults it adds, and how it waits and retries.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import empty_pb2, json_format, struct_pb2
from pulumi.runtime.proto import plugin_pb2, provider_pb2, provider_pb2_grpc
from world import ApiError, Props, World

_THREADS = 80


@dataclass(frozen=True)
class Kind:
    """List how changes of properties take effect, by dotted path; other properties change in place.

    Attributes:
        recreates: a change replaces the resource.
        stopped: a change needs a stopped instance.
        retained: the property stays if the program no longer sets it.
        named: the old resource is deleted before its replacement is created, as both have the same name.
    """

    recreates: frozenset[str]
    stopped: frozenset[str] = frozenset()
    retained: frozenset[str] = frozenset()
    named: bool = True


def _kind(recreates: str, stopped: str = "", retained: str = "", named: bool = True) -> Kind:
    return Kind(frozenset(recreates.split()), frozenset(stopped.split()), frozenset(retained.split()), named)


# Source: the pages of google_compute_instance and the others in the Terraform provider's registry, "Argument reference".
KINDS: Mapping[str, Kind] = {
    "Network": _kind("name project description autoCreateSubnetworks"),
    # A subnet's range grows in place: see _widened.
    "Subnetwork": _kind("name project region network description ipCidrRange"),
    "Router": _kind("name project region network"),
    "RouterNat": _kind("name project region router"),
    "Firewall": _kind("name project network direction"),
    "Account": _kind("accountId project", named=False),
    "Bucket": _kind("name project location"),
    "BucketIAMMember": _kind("bucket role member condition", named=False),
    "IAMCustomRole": _kind("project roleId", named=False),
    "InstanceIAMBinding": _kind("project zone instanceName role condition", named=False),
    "Address": _kind("name project region subnetwork address addressType"),
    "Instance": _kind(
        "name project zone bootDisk guestAccelerators canIpForward scheduling.provisioningModel scheduling.preemptible "
        "networkInterfaces.networkIp",
        "machineType serviceAccount shieldedInstanceConfig networkInterfaces.subnetwork",
        "guestAccelerators",
    ),
}


class Provider(provider_pb2_grpc.ResourceProviderServicer):
    """Serve the resources of one world."""

    def __init__(self, world: World) -> None:
        self.world = world

    def GetPluginInfo(self, request: Any, context: Any) -> Any:
        return plugin_pb2.PluginInfo(version="10.2.0")

    def CheckConfig(self, request: Any, context: Any) -> Any:
        return provider_pb2.CheckResponse(inputs=request.news)

    def DiffConfig(self, request: Any, context: Any) -> Any:
        return provider_pb2.DiffResponse(changes=provider_pb2.DiffResponse.DIFF_NONE)

    def Configure(self, request: Any, context: Any) -> Any:
        return provider_pb2.ConfigureResponse(acceptSecrets=False, supportsPreview=True)

    def Attach(self, request: Any, context: Any) -> Any:
        return empty_pb2.Empty()

    def Cancel(self, request: Any, context: Any) -> Any:
        return empty_pb2.Empty()

    def Check(self, request: Any, context: Any) -> Any:
        return provider_pb2.CheckResponse(inputs=request.news)

    def Diff(self, request: Any, context: Any) -> Any:
        kind = KINDS[_kind_of(request.urn)]
        old_inputs, old, new = map(_plain, (request.old_inputs, request.olds, request.news))
        changed = set(changed_paths(kind, old_inputs, old, new))
        replaced = {path for path in changed if is_within(path, kind.recreates) and not _widened(path, old, new)}
        diff, property_diff = provider_pb2.DiffResponse, provider_pb2.PropertyDiff
        return diff(
            changes=diff.DIFF_SOME if changed else diff.DIFF_NONE,
            diffs=sorted({_top(path) for path in changed}),
            replaces=sorted({_top(path) for path in replaced}),
            deleteBeforeReplace=bool(replaced) and kind.named and old.get("name") == new.get("name"),
            detailedDiff={
                path: property_diff(kind=property_diff.UPDATE_REPLACE if path in replaced else property_diff.UPDATE)
                for path in changed
            },
            hasDetailedDiff=True,
        )

    def Create(self, request: Any, context: Any) -> Any:
        if request.preview:
            return provider_pb2.CreateResponse(properties=request.properties)
        with _abort_if_refused(context):
            id_, resource = self.world.create(_kind_of(request.urn), _plain(request.properties))
            return provider_pb2.CreateResponse(id=id_, properties=_struct(self._with_status(resource)))

    def Read(self, request: Any, context: Any) -> Any:
        resource = self.world.find(_kind_of(request.urn), request.id)
        if resource is None:
            return provider_pb2.ReadResponse()
        inputs_before = _plain(request.inputs)
        inputs = {key: resource.get(key, value) for key, value in inputs_before.items()} if inputs_before else resource
        return provider_pb2.ReadResponse(id=request.id, properties=_struct(self._with_status(resource)), inputs=_struct(inputs))

    def Update(self, request: Any, context: Any) -> Any:
        old_inputs, old, new = map(_plain, (request.old_inputs, request.olds, request.news))
        if request.preview:
            return provider_pb2.UpdateResponse(properties=_struct({**old, **new}))
        with _abort_if_refused(context):
            name = _kind_of(request.urn)
            stop = any(is_within(path, KINDS[name].stopped) for path in changed_paths(KINDS[name], old_inputs, old, new))
            if stop and not new.get("allowStoppingForUpdate"):
                raise ApiError(400, "Changing this of a started instance requires stopping it", "allow_stopping_for_update")
            resource = self.world.update(name, request.id, new, stop)
            return provider_pb2.UpdateResponse(properties=_struct(self._with_status(resource)))

    def Delete(self, request: Any, context: Any) -> Any:
        with _abort_if_refused(context):
            self.world.delete(_kind_of(request.urn), request.id)
            return empty_pb2.Empty()

    def _with_status(self, resource: Props) -> Props:
        """Return an instance with its actual status as the desired one, so that a stopped one differs."""
        return {**resource, "desiredStatus": resource["currentStatus"]} if "desiredStatus" in resource else resource


def changed_paths(kind: Kind, old_inputs: Props, old: Props, new: Props) -> Iterator[str]:
    """Yield dotted paths of inputs that differ from the state, and of inputs that were removed."""
    yield from _differ(new, old, "")
    yield from (key for key in old_inputs.keys() - new.keys() if key not in kind.retained)


def _differ(new: Any, old: Any, path: str) -> Iterator[str]:
    if isinstance(new, dict) and isinstance(old, dict):
        for key, value in new.items():
            yield from _differ(value, old.get(key), f"{path}.{key}" if path else key)
        if path == "labels" or path == "metadata":
            yield from (f"{path}.{key}" for key in old.keys() - new.keys())
    elif isinstance(new, list) and isinstance(old, list) and len(new) == len(old):
        for each, other in zip(new, old, strict=True):
            yield from _differ(each, other, path)
    elif new != old:
        yield path


def is_within(path: str, names: frozenset[str]) -> bool:
    """Return whether a dotted path is one of these or below one."""
    return any(f"{path}.".startswith(f"{each}.") for each in names)


def _widened(path: str, old: Props, new: Props) -> bool:
    if path != "ipCidrRange":
        return False
    return ipaddress.IPv4Network(old[path]).subnet_of(ipaddress.IPv4Network(new[path]))


def _top(path: str) -> str:
    return path.partition(".")[0]


def _kind_of(urn: str) -> str:
    return urn.split("::")[2].rpartition(":")[2]


def _plain(struct: struct_pb2.Struct) -> Props:
    values: Props = json_format.MessageToDict(struct)
    return {key: value for key, value in values.items() if not key.startswith("__") and value is not None}


def _struct(props: Props) -> struct_pb2.Struct:
    converted = struct_pb2.Struct()
    converted.update(props)
    return converted


@contextmanager
def _abort_if_refused(context: Any) -> Iterator[None]:
    try:
        yield
    except ApiError as refused:
        context.abort(grpc.StatusCode.UNKNOWN, str(refused))


@contextmanager
def serve_provider(world: World) -> Iterator[int]:
    """Serve the fake on a loopback port, and yield the port.

    `PULUMI_DEBUG_PROVIDERS=gcp:PORT` makes the engine use it.
    """
    server = grpc.server(futures.ThreadPoolExecutor(_THREADS), options=[("grpc.max_receive_message_length", 1 << 28)])
    provider_pb2_grpc.add_ResourceProviderServicer_to_server(Provider(world), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait()
