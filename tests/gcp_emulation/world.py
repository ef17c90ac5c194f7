"""The state behind Google's APIs: used names, resources in use, hosts that run or do not."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import requests
from fakes import Google, Machine, tree
from waiting import limit

Props = dict[str, Any]
_COMPUTE = "https://www.googleapis.com/compute/v1/"
_OF_A_REGION = {"Subnetwork": "subnetworks", "Router": "routers"}
# Who keeps what from being deleted, by the property that names it.
_USES = {"Network": ("network", ("Subnetwork", "Router", "Firewall")), "Subnetwork": ("subnetwork", ("Instance",))}


class Refused(Exception):  # noqa: N818  what Google says, and no fault of the fake
    """An error of Google's API, as the provider prints it."""

    def __init__(self, status: int, message: str, reason: str) -> None:
        super().__init__(f"googleapi: Error {status}: {message}, {reason}")


class Hosts(Protocol):
    """The place where instances run."""

    def start(self, name: str, address: str) -> None: ...
    def restart(self, name: str) -> None: ...
    def changed(self, name: str) -> None: ...
    def stop(self, name: str) -> None: ...


@dataclass
class World:
    """All resources by kind and id, in the provider's output spelling; `history` lists the changes."""

    project: str
    google: Google
    hosts: Hosts
    things: dict[tuple[str, str], Props] = field(default_factory=dict)
    history: list[str] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)
    """The objects that were deleted with a bucket."""
    spoil: Callable[[Props], None] = lambda _: None
    """Changes the inputs that an instance receives, if set."""
    after: Callable[[str, str], None] = lambda _kind, _name: None
    """Called when something was made, before anybody hears of it: it may refuse, or not come back."""
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _made: int = 0

    def of(self, kind: str) -> list[Props]:
        with self._lock:
            return [found for (of, _), found in self.things.items() if of == kind]

    def find(self, kind: str, id_: str) -> Props | None:
        return self.things.get((kind, id_))

    def kind_of(self, id_: str) -> str | None:
        with self._lock:
            return next((kind for kind, name in self.things if name == id_), None)

    def id_of(self, kind: str, inputs: Mapping[str, Any]) -> str:
        """Return the provider's id of a resource, from all properties that identify it."""
        project, name = f"projects/{self.project}", inputs.get("name")
        if kind == "Instance":
            return f"{project}/zones/{inputs['zone']}/instances/{name}"
        if kind in _OF_A_REGION:
            return f"{project}/regions/{inputs['region']}/{_OF_A_REGION[kind]}/{name}"
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
            if (kind, id_) in self.things and kind != "BucketIAMMember":
                raise Refused(409, f"The resource '{id_}' already exists", "alreadyExists")
            self._needs(kind, inputs)
            self._made += 1
            made = {**inputs, **self._computed(kind, id_, inputs)}
            self.things[kind, id_] = made
            self.history.append(f"create {kind} {id_.rpartition('/')[2]}")
        if kind == "Bucket":
            url = f"http://127.0.0.1:{self.google.storage}/storage/v1/b"
            requests.post(
                url, json={"name": inputs["name"]}, params={"project": self.project}, timeout=limit()
            ).raise_for_status()
        if kind == "BucketIAMMember":
            self.google.grants.add((inputs["member"], inputs["bucket"], inputs["role"]))
        if kind in ("IAMCustomRole", "InstanceIAMBinding"):
            self._grant()
        if kind == "Instance":
            self._boot(inputs, made["instanceId"])
        self.after(kind, id_.rpartition("/")[2])
        return id_, made

    def update(self, kind: str, id_: str, inputs: Props, restart: bool) -> Props:
        with self._lock:
            found = self.things[kind, id_]
            kept = {key: value for key, value in found.items() if key in self._computed(kind, id_, inputs)}
            self.things[kind, id_] = made = {**self._computed(kind, id_, inputs), **kept, **inputs}
            self.history.append(f"update {kind} {id_.rpartition('/')[2]}")
        if kind == "Instance":
            self._machine(made).attributes(made["metadata"])
            self.hosts.changed(made["name"])
            if restart or found["currentStatus"] != "RUNNING":
                self.hosts.restart(made["name"])
            made["currentStatus"] = "RUNNING"
        return made

    def delete(self, kind: str, id_: str) -> None:
        """Delete a resource; a missing one is no error, as for the provider."""
        with self._lock:
            found = self.things.get((kind, id_))
            if found is None:
                return
            self._free(kind, id_)
            if kind == "Bucket":
                self._empty(found)
            del self.things[kind, id_]
            self.history.append(f"delete {kind} {id_.rpartition('/')[2]}")
        if kind == "BucketIAMMember":
            self.google.grants.discard((found["member"], found["bucket"], found["role"]))
        if kind in ("IAMCustomRole", "InstanceIAMBinding"):
            self._grant()
        if kind == "Instance":
            self.google.machines.pop(found["networkInterfaces"][0]["networkIp"])
            self.hosts.stop(found["name"])

    def _grant(self) -> None:
        """Set who may start which instance."""
        self.google.roles = {role["name"]: role["permissions"] for role in self.of("IAMCustomRole")}
        self.google.starters = {
            (member, each["instanceName"], each["role"]) for each in self.of("InstanceIAMBinding") for member in each["members"]
        }

    def preempt(self, name: str) -> None:
        """Stop an instance from outside."""
        (found,) = [each for each in self.of("Instance") if each["name"] == name]
        found["currentStatus"] = "TERMINATED"

    def _needs(self, kind: str, inputs: Props) -> None:
        """Refuse references to missing resources, and an address that is taken."""
        links = {found.get("selfLink") for found in self.things.values()}
        wanted = [inputs["network"]] if kind in ("Subnetwork", "Router", "Firewall") else []
        if kind == "Instance":
            (interface,) = inputs["networkInterfaces"]
            wanted = [interface["subnetwork"]]
            if interface["networkIp"] in self.google.machines:
                address = interface["networkIp"]
                raise Refused(400, f"IP '{address}' is already being used by another resource", "ipInUseByAnotherResource")
        for link in wanted:
            if link not in links:
                raise Refused(404, f"The resource '{link.removeprefix(_COMPUTE)}' was not found", "notFound")
        if kind == "BucketIAMMember" and ("Bucket", inputs["bucket"]) not in self.things:
            raise Refused(404, "The specified bucket does not exist.", "notFound")

    def _free(self, kind: str, id_: str) -> None:
        """Refuse to delete a resource that another one uses."""
        key, kinds = _USES.get(kind, ("", ()))
        link = self.things[kind, id_].get("selfLink")
        for (of, other), found in self.things.items():
            named = found["networkInterfaces"][0].get(key) if of == "Instance" and of in kinds else found.get(key)
            if of in kinds and named == link:
                message = f"The {kind.lower()} resource '{id_}' is already being used by '{other}'"
                raise Refused(400, message, "resourceInUseByAnotherResource")

    def objects(self, bucket: str) -> list[tuple[str, str]]:
        """Return names and generations in a bucket, older versions too."""
        url = f"http://127.0.0.1:{self.google.storage}/storage/v1/b/{bucket}/o"
        found = requests.get(url, params={"versions": "true"}, timeout=limit()).json()
        return [(item["name"], item["generation"]) for item in found.get("items", [])]

    def _empty(self, found: Props) -> None:
        base = f"http://127.0.0.1:{self.google.storage}/storage/v1/b/{found['name']}"
        there = self.objects(found["name"])
        if there and not found.get("forceDestroy"):
            raise Refused(
                409, f"Error trying to delete bucket {found['name']} containing objects without `force_destroy`", "conflict"
            )
        for name, generation in there:
            quoted = requests.utils.quote(name, safe="")
            requests.delete(f"{base}/o/{quoted}", params={"generation": generation}, timeout=limit())
        self.taken += [name for name, _ in there]
        requests.delete(base, timeout=limit())

    def _computed(self, kind: str, id_: str, inputs: Props) -> Props:
        """Return the properties that the API adds to the inputs of a resource."""
        own: Props = {"project": self.project}
        if kind in ("Network", "Subnetwork", "Router", "Firewall", "Instance"):
            own["selfLink"] = f"{_COMPUTE}{id_}"
        if kind == "Account":
            email = f"{inputs['accountId']}@{self.project}.iam.gserviceaccount.com"
            own |= {"email": email, "name": id_, "uniqueId": str(self._made)}
        if kind == "IAMCustomRole":
            own |= {"name": id_, "roleId": id_.rpartition("/")[2]}
        if kind == "Bucket":
            own |= {"url": f"gs://{inputs['name']}", "selfLink": f"https://www.googleapis.com/storage/v1/b/{inputs['name']}"}
        if kind == "Instance":
            own |= {
                "instanceId": str(zlib.crc32(id_.encode()) + self._made),
                "creationTimestamp": "2026-01-31T12:00:00.000-08:00",
                "currentStatus": "RUNNING",
                "networkInterfaces": [_interface(each) for each in inputs["networkInterfaces"]],
            }
        return own

    def _boot(self, inputs: Props, instance_id: str) -> None:
        seen = {**inputs}
        self.spoil(seen)
        name, account = seen["name"], seen["serviceAccount"]
        (interface,) = seen["networkInterfaces"]
        known = tree(self.project, seen["zone"], name, int(instance_id), seen["metadata"], account["email"], account["scopes"])
        address = interface["networkIp"]
        self.google.machines[address] = Machine(name, address, account["email"], known)
        self.hosts.start(name, address)

    def _machine(self, instance: Props) -> Machine:
        return self.google.machines[instance["networkInterfaces"][0]["networkIp"]]


def _interface(declared: Props) -> Props:
    public = [{**config, "natIp": "203.0.113.9"} for config in declared.get("accessConfigs") or []]
    return {**declared, **({"accessConfigs": public} if public else {})}
