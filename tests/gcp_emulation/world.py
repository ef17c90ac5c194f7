"""The state behind Google's APIs: resources with their names and references, and instances with their status."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import requests
from fakes import Google, Machine, metadata_tree
from waiting import limit

Props = dict[str, Any]
_COMPUTE = "https://www.googleapis.com/compute/v1/"
_REGIONAL = {"Subnetwork": "subnetworks", "Router": "routers"}
# The property and the kinds of the resources that prevent a deletion.
_USERS = {"Network": ("network", ("Subnetwork", "Router", "Firewall")), "Subnetwork": ("subnetwork", ("Instance",))}


class ApiError(Exception):
    """An error of Google's API, as the provider prints it."""

    def __init__(self, status: int, message: str, reason: str) -> None:
        super().__init__(f"googleapi: Error {status}: {message}, {reason}")


class Hosts(Protocol):
    """The hosts behind the instances."""

    def start(self, name: str, address: str) -> None: ...
    def restart(self, name: str) -> None: ...
    def metadata_changed(self, name: str) -> None: ...
    def stop(self, name: str) -> None: ...


@dataclass
class World:
    """All resources by kind and id, in the provider's output spelling; `history` lists the changes."""

    project: str
    google: Google
    hosts: Hosts
    resources: dict[tuple[str, str], Props] = field(default_factory=dict)
    history: list[str] = field(default_factory=list)
    deleted_objects: list[str] = field(default_factory=list)
    """The objects that were deleted with a bucket."""
    alter_inputs: Callable[[Props], None] = lambda _: None
    """Changes the inputs that an instance receives, if set."""
    on_created: Callable[[str, str], None] = lambda _kind, _name: None
    """Called after a creation and before the answer: it may raise an error or never return."""
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _created: int = 0

    def resources_of(self, kind: str) -> list[Props]:
        with self._lock:
            return [resource for (key, _), resource in self.resources.items() if key == kind]

    def find(self, kind: str, id_: str) -> Props | None:
        return self.resources.get((kind, id_))

    def kind_of(self, id_: str) -> str | None:
        with self._lock:
            return next((kind for kind, name in self.resources if name == id_), None)

    def id_of(self, kind: str, inputs: Mapping[str, Any]) -> str:
        """Return the provider's id of a resource, from all properties that identify it."""
        project, name = f"projects/{self.project}", inputs.get("name")
        if kind == "Instance":
            return f"{project}/zones/{inputs['zone']}/instances/{name}"
        if kind in _REGIONAL:
            return f"{project}/regions/{inputs['region']}/{_REGIONAL[kind]}/{name}"
        if kind == "RouterNat":
            return f"{self.project}/{inputs['region']}/{inputs['router']}/{name}"
        if kind == "Account":
            return f"{project}/serviceAccounts/{inputs['accountId']}@{self.project}.iam.gserviceaccount.com"
        if kind == "BucketIAMMember":
            return f"b/{inputs['bucket']}/{inputs['role']}/{inputs['member']}"
        if kind == "IAMCustomRole":
            return f"{project}/roles/{inputs.get('roleId') or zlib.crc32(inputs['title'].encode())}"
        if kind == "InstanceIAMBinding":
            return f"{project}/zones/{inputs['zone']}/instances/{inputs['instanceName']}/{inputs['role']}"
        return str(name) if kind == "Bucket" else f"{project}/global/{kind.lower()}s/{name}"

    def create(self, kind: str, inputs: Props) -> tuple[str, Props]:
        id_ = self.id_of(kind, inputs)
        with self._lock:
            if (kind, id_) in self.resources and kind != "BucketIAMMember":
                raise ApiError(409, f"The resource '{id_}' already exists", "alreadyExists")
            self._check_references(kind, inputs)
            self._created += 1
            resource = {**inputs, **self._computed(kind, id_, inputs)}
            self.resources[kind, id_] = resource
            self.history.append(f"create {kind} {id_.rpartition('/')[2]}")
        if kind == "Bucket":
            url = f"http://127.0.0.1:{self.google.storage}/storage/v1/b"
            requests.post(
                url, json={"name": inputs["name"]}, params={"project": self.project}, timeout=limit()
            ).raise_for_status()
        if kind == "BucketIAMMember":
            self.google.grants.add((inputs["member"], inputs["bucket"], inputs["role"]))
        if kind in ("IAMCustomRole", "InstanceIAMBinding"):
            self._update_grants()
        if kind == "Instance":
            self._boot(inputs, resource["instanceId"])
        self.on_created(kind, id_.rpartition("/")[2])
        return id_, resource

    def update(self, kind: str, id_: str, inputs: Props, restart: bool) -> Props:
        with self._lock:
            before = self.resources[kind, id_]
            computed = {key: value for key, value in before.items() if key in self._computed(kind, id_, inputs)}
            self.resources[kind, id_] = resource = {**self._computed(kind, id_, inputs), **computed, **inputs}
            self.history.append(f"update {kind} {id_.rpartition('/')[2]}")
        if kind == "Instance":
            self._machine(resource).set_attributes(resource["metadata"])
            self.hosts.metadata_changed(resource["name"])
            if restart or before["currentStatus"] != "RUNNING":
                self.hosts.restart(resource["name"])
            resource["currentStatus"] = "RUNNING"
        return resource

    def delete(self, kind: str, id_: str) -> None:
        """Delete a resource; a missing one is no error, as for the provider."""
        with self._lock:
            resource = self.resources.get((kind, id_))
            if resource is None:
                return
            self._check_unused(kind, id_)
            if kind == "Bucket":
                self._delete_bucket(resource)
            del self.resources[kind, id_]
            self.history.append(f"delete {kind} {id_.rpartition('/')[2]}")
        if kind == "BucketIAMMember":
            self.google.grants.discard((resource["member"], resource["bucket"], resource["role"]))
        if kind in ("IAMCustomRole", "InstanceIAMBinding"):
            self._update_grants()
        if kind == "Instance":
            self.google.machines.pop(resource["networkInterfaces"][0]["networkIp"])
            self.hosts.stop(resource["name"])

    def _update_grants(self) -> None:
        """Update which members may start which instance."""
        self.google.roles = {role["name"]: role["permissions"] for role in self.resources_of("IAMCustomRole")}
        self.google.starters = {
            (member, each["instanceName"], each["role"])
            for each in self.resources_of("InstanceIAMBinding")
            for member in each["members"]
        }

    def preempt(self, name: str) -> None:
        """Stop an instance from outside."""
        (resource,) = [each for each in self.resources_of("Instance") if each["name"] == name]
        resource["currentStatus"] = "TERMINATED"

    def _check_references(self, kind: str, inputs: Props) -> None:
        """Refuse references to missing resources, and an address in use."""
        links = {resource.get("selfLink") for resource in self.resources.values()}
        required = [inputs["network"]] if kind in ("Subnetwork", "Router", "Firewall") else []
        if kind == "Instance":
            (interface,) = inputs["networkInterfaces"]
            required = [interface["subnetwork"]]
            if interface["networkIp"] in self.google.machines:
                address = interface["networkIp"]
                raise ApiError(400, f"IP '{address}' is already being used by another resource", "ipInUseByAnotherResource")
        for link in required:
            if link not in links:
                raise ApiError(404, f"The resource '{link.removeprefix(_COMPUTE)}' was not found", "notFound")
        if kind == "BucketIAMMember" and ("Bucket", inputs["bucket"]) not in self.resources:
            raise ApiError(404, "The specified bucket does not exist.", "notFound")

    def _check_unused(self, kind: str, id_: str) -> None:
        """Refuse to delete a resource that another one uses."""
        key, kinds = _USERS.get(kind, ("", ()))
        link = self.resources[kind, id_].get("selfLink")
        for (user_kind, other), user in self.resources.items():
            uses_interface = user_kind == "Instance" and user_kind in kinds
            used_link = user["networkInterfaces"][0].get(key) if uses_interface else user.get(key)
            if user_kind in kinds and used_link == link:
                message = f"The {kind.lower()} resource '{id_}' is already being used by '{other}'"
                raise ApiError(400, message, "resourceInUseByAnotherResource")

    def objects(self, bucket: str) -> list[tuple[str, str]]:
        """Return names and generations in a bucket, with older versions."""
        url = f"http://127.0.0.1:{self.google.storage}/storage/v1/b/{bucket}/o"
        listing = requests.get(url, params={"versions": "true"}, timeout=limit()).json()
        return [(item["name"], item["generation"]) for item in listing.get("items", [])]

    def _delete_bucket(self, resource: Props) -> None:
        base = f"http://127.0.0.1:{self.google.storage}/storage/v1/b/{resource['name']}"
        objects = self.objects(resource["name"])
        if objects and not resource.get("forceDestroy"):
            raise ApiError(
                409, f"Error trying to delete bucket {resource['name']} containing objects without `force_destroy`", "conflict"
            )
        for name, generation in objects:
            quoted = requests.utils.quote(name, safe="")
            requests.delete(f"{base}/o/{quoted}", params={"generation": generation}, timeout=limit())
        self.deleted_objects += [name for name, _ in objects]
        requests.delete(base, timeout=limit())

    def _computed(self, kind: str, id_: str, inputs: Props) -> Props:
        """Return the properties that the API adds to the inputs of a resource."""
        values: Props = {"project": self.project}
        if kind in ("Network", "Subnetwork", "Router", "Firewall", "Instance"):
            values["selfLink"] = f"{_COMPUTE}{id_}"
        if kind == "Account":
            email = f"{inputs['accountId']}@{self.project}.iam.gserviceaccount.com"
            values |= {"email": email, "name": id_, "uniqueId": str(self._created)}
        if kind == "IAMCustomRole":
            values |= {"name": id_, "roleId": id_.rpartition("/")[2]}
        if kind == "Bucket":
            values |= {"url": f"gs://{inputs['name']}", "selfLink": f"https://www.googleapis.com/storage/v1/b/{inputs['name']}"}
        if kind == "Instance":
            values |= {
                "instanceId": str(zlib.crc32(id_.encode()) + self._created),
                "creationTimestamp": "2026-01-31T12:00:00.000-08:00",
                "currentStatus": "RUNNING",
                "networkInterfaces": [_interface(each) for each in inputs["networkInterfaces"]],
            }
        return values

    def _boot(self, inputs: Props, instance_id: str) -> None:
        received = {**inputs}
        self.alter_inputs(received)
        name, account = received["name"], received["serviceAccount"]
        (interface,) = received["networkInterfaces"]
        metadata = metadata_tree(
            self.project, received["zone"], name, int(instance_id), received["metadata"], account["email"], account["scopes"]
        )
        address = interface["networkIp"]
        self.google.machines[address] = Machine(name, address, account["email"], metadata)
        self.hosts.start(name, address)

    def _machine(self, instance: Props) -> Machine:
        return self.google.machines[instance["networkInterfaces"][0]["networkIp"]]


def _interface(declared: Props) -> Props:
    public = [{**config, "natIp": "203.0.113.9"} for config in declared.get("accessConfigs") or []]
    return {**declared, **({"accessConfigs": public} if public else {})}
