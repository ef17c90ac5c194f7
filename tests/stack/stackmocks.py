"""Run a Pulumi program under mocks and record every resource that it declares."""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from unittest import mock

import pulumi
from pulumi import Output
from pulumi.runtime.mocks import MockCallArgs, MockMonitor, MockResourceArgs, Mocks, set_mocks
from pulumi.runtime.rpc import deserialize_properties
from pulumi.runtime.settings import get_root_resource, set_root_resource

from infra.connection import files
from infra.gcp.discovery import Discovery, local_catalogue
from infra.gcp.zones import Place
from infra.scale_tiers import ClusterSpec
from infra.state import READ_FUNCTION
from infra.templates import ROOT

PROJECT, ZONE, STACK = "my-project-1", "us-central1-a", "dev"
KEY = "ssh-ed25519 AAAAC3Nza scaletier-dev"
SHA256 = "5a" * 32


@dataclass(frozen=True)
class Recorded:
    """One resource as declared: inputs in the provider's spelling, the URNs it depends on."""

    type: str
    name: str
    inputs: Mapping[str, Any]
    urn: str
    parent: str
    depends: frozenset[str]
    options: Any


@dataclass
class Stack:
    """All resources that a program declared."""

    resources: list[Recorded]
    exports: Mapping[str, Any]
    completed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The outputs of components that declared all that is in them, by URN."""
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def inventory(self) -> dict[str, Any]:
        """inventory.json, as `fab` reads it."""
        record: dict[str, Any] = json.loads(self.files["inventory.json"])
        return record

    def of(self, kind: str) -> list[Recorded]:
        """Return the resources whose type ends with `kind`, such as `Instance`."""
        return [item for item in self.resources if item.type.rpartition(":")[2] == kind]

    def one(self, kind: str, name: str | None = None) -> Recorded:
        (resource,) = [item for item in self.of(kind) if name in (None, item.name)]
        return resource

    @property
    def chain_length(self) -> int:
        """The length of the longest chain of dependencies, without components."""
        by_urn = {item.urn: item for item in self.resources}
        children: dict[str, list[Recorded]] = {}
        for item in self.resources:
            children.setdefault(item.parent, []).append(item)
        lengths: dict[str, int] = {}

        def real_urns(urn: str) -> list[str]:
            item = by_urn.get(urn)
            if item is None:
                return []
            if not item.type.startswith("scaletier:"):
                return [urn]
            return [descendant for child in children.get(urn, []) for descendant in real_urns(child.urn)]

        def length(urn: str) -> int:
            if urn not in lengths:
                dependencies = {dependency for other in by_urn[urn].depends for dependency in real_urns(other)}
                lengths[urn] = 1 + max((length(other) for other in dependencies), default=0)
            return lengths[urn]

        return max(length(item.urn) for item in self.resources if not item.type.startswith("scaletier:"))


class Recorder(Mocks):
    """Respond as the providers do: values that the API adds are made from the resource's name.

    `state` is the state of an earlier update, as the engine returns it.
    """

    state: Mapping[str, Any] = MappingProxyType({})

    def new_resource(self, args: MockResourceArgs) -> tuple[str | None, dict[Any, Any]]:
        outputs = dict(args.inputs)
        kind = args.typ.rpartition(":")[2]
        if args.typ.startswith("gcp:"):
            outputs.setdefault("selfLink", f"https://www.googleapis.com/compute/v1/{kind}/{args.inputs.get('name')}")
        if kind == "Account":
            outputs["email"] = f"{args.inputs['accountId']}@{PROJECT}.iam.gserviceaccount.com"
        if kind == "IAMCustomRole":
            outputs["name"] = f"projects/{PROJECT}/roles/{args.name}1a2b3c4"
        if kind == "Instance":
            outputs |= {"instanceId": f"id-{args.name}", "creationTimestamp": f"created-{args.name}"}
            for interface in outputs["networkInterfaces"]:
                for config in interface.get("accessConfigs") or []:
                    config["natIp"] = "203.0.113.9"
        if kind == "Runtime":
            outputs |= {"path": f"runtimes/{args.name}.tar.gz", "sha256": SHA256}
        if kind == "HostKeys":
            outputs |= {"hostKeys": {name: f"ssh-ed25519 {name}" for name in args.inputs["hosts"]}, "late": []}
        if kind == "OperatorKey":
            outputs |= {"publicKey": KEY, "privateKey": "PRIVATE"}
        if kind == "Ready":
            outputs["hostKeys"] = dict.fromkeys(args.inputs["hosts"].values(), "ssh-ed25519 AAAA")
        if kind == "Host" and args.typ.startswith("pulumi-python:"):
            outputs["created"] = f"created-{args.name}"
        return f"{args.name}-id", outputs

    def call(self, args: MockCallArgs) -> tuple[dict[Any, Any], list[tuple[str, str]]]:
        if args.token == READ_FUNCTION:
            assert args.args["stackName"].startswith("organization/scaletier/"), "a short name may be another organization's"
            return {"outputs": dict(self.state)}, []
        raise AssertionError(f"the program calls {args.token}: the next `pulumi up` may then get another result")


class Monitor(MockMonitor):
    """Keep the requests too: they have dependencies and options, which Mocks do not get."""

    def __init__(self, mocks: Mocks) -> None:
        super().__init__(mocks)
        self.requests: list[tuple[str, Any]] = []
        self.completed: dict[str, Mapping[str, Any]] = {}

    def RegisterResource(self, request: Any) -> Any:  # noqa: N802  MockMonitor has this name
        answer = super().RegisterResource(request)
        self.requests.append((answer.urn, request))
        return answer

    def RegisterResourceOutputs(self, request: Any) -> Any:  # noqa: N802  MockMonitor has this name
        self.completed[request.urn] = deserialize_properties(request.outputs)
        return super().RegisterResourceOutputs(request)


_GPU_ZONES = {
    "nvidia-tesla-t4": ("europe-west4-a", ZONE, "us-central1-b", "us-east1-c", "us-east1-d"),
    **dict.fromkeys(("nvidia-tesla-v100", "nvidia-tesla-p100", "nvidia-l4", "nvidia-tesla-a100"), (ZONE,)),
}


def discover_offline(spec: ClusterSpec, choice: Sequence[Place], *_: Any) -> Discovery:
    """Return the discovery of a zone that cannot be queried, with some zones of GPUs."""
    catalogue = dataclasses.replace(local_catalogue(choice[0].zone), gpu_zones=_GPU_ZONES)
    return Discovery(choice[0], catalogue.resolve(spec), catalogue)


Program = Callable[..., Stack]


def operator_files(stack: Stack) -> dict[str, str]:
    """Return the files that `pulumi up` writes for `fab` and ssh, by name."""
    inputs = stack.one("OperatorFiles").inputs
    return files(ROOT / inputs["folder"], inputs["inventory"], inputs["privateKey"])


def record_program(declare: Callable[[], object], mocks: Mocks | None = None, stack: str = STACK) -> Stack:
    """Record the resources that a function declares; `exports` are the stack's outputs."""
    monitor = Monitor(mocks or Recorder())
    set_root_resource(None)  # type: ignore[arg-type]
    set_mocks(Recorder(), project="scaletier", stack=stack, monitor=monitor, organization="organization")
    exports: dict[str, Any] = {}

    async def run_program() -> None:
        declare()
        outputs = dict(get_root_resource().outputs)  # type: ignore[union-attr]
        exports.update({name: await Output.from_input(value).future() for name, value in outputs.items()})

    # Pulumi wraps this method again for each dynamic resource: many programs in one process reach the recursion limit.
    with mock.patch.object(pickle._Pickler, "_batch_setitems", pickle._Pickler._batch_setitems):  # type: ignore[attr-defined]
        pulumi.runtime.test(run_program)()
    return Stack([_record(urn, request) for urn, request in monitor.requests], exports, monitor.completed)


def _record(urn: str, request: Any) -> Recorded:
    depends = set(request.dependencies)
    for dependency in request.propertyDependencies.values():
        depends |= set(dependency.urns)
    inputs = deserialize_properties(request.object)
    inputs.pop("__provider", None)
    return Recorded(request.type, request.name, inputs, urn, request.parent, frozenset(depends), request)
