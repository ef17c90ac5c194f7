"""Fakes under Google's names: the metadata server, Cloud Storage behind TLS, parts of the Compute API.

Behind Cloud Storage is fake-gcs-server. What they do not cover: what Google's own image has or lacks beyond what image.py
names, and its newer guest agent; DHCP, DNS, routes and the hostname, which come from the container; the firewall's rules, which
are not enforced here; how long a right to a bucket takes to be known; Private Google Access and IAP; Cloud Storage by gRPC,
quotas and throttling; disks, drivers and Secure Boot; and whether the provider's resources are made as they are declared.
"""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from waiting import limit, wait_for

_OBJECT_USER = "roles/storage.objectUser"
_NARROW = "narrow-"
_PREFIX = re.compile(
    r"(?:resource\.name|objectListPrefix', ''\))\.startsWith\('(?:projects/_/buckets/[^/]+/objects/)?([^']*)'\)"
)
_NAME = re.compile(r"resource\.name == 'projects/_/buckets/[^/]+/objects/([^']*)'")
_READS = frozenset({"roles/storage.objectViewer", _OBJECT_USER})
_BUCKET_OF = re.compile(r"^/(?:(?:upload/|download/)?storage/v1/b/([^/?]+)|(?!upload/|storage/|download/)([^/?]+)/)")
_OBJECT_OF = re.compile(r"^/(?:(?:upload/|download/)?storage/v1/b/[^/?]+/o/(.+)|(?!upload/|storage/|download/)[^/?]+/(.+))$")
_WAIT = 60.0
OPERATOR = "the-operator"
_START = re.compile(r"^/compute/v1/(projects/[^/]+/zones/[^/]+/instances/([^/]+))/start$")
_JSON = "application/json"
_KINDS = {
    "instances": "Instance",
    "addresses": "Address",
    "firewalls": "Firewall",
    "routers": "Router",
    "subnetworks": "Subnetwork",
    "networks": "Network",
    "serviceAccounts": "Account",
}
PLACES = ("us-central1-a", "us-central1-b", "europe-west4-a")
"""The zones that there are."""
MUTE = "/mute/"
"""Whatever is asked for below it has no answer."""
_SERVER = Path(__file__).parents[2] / ".cache/fake-gcs/fake-gcs-server"


@dataclass
class Machine:
    """The metadata server's data of an instance, in the JSON spelling; `guest` are its host's attributes."""

    name: str
    address: str
    account: str
    tree: dict[str, Any]
    guest: dict[str, str] = field(default_factory=dict)
    changes: int = 1

    def attributes(self, known: Mapping[str, str]) -> None:
        """Replace the metadata, and notify the clients that wait for a change."""
        self.tree["instance"]["attributes"] = dict(known)
        self.changes += 1

    def preempted(self, yes: bool) -> None:
        """Tell the host that it is being taken back, or that it is not."""
        self.tree["instance"]["preempted"] = str(yes).upper()


@dataclass
class Google:
    """The state that all fakes share."""

    storage: int  # the port of fake-gcs-server
    machines: dict[str, Machine] = field(default_factory=dict)  # by address
    grants: set[tuple[str, str, str]] = field(default_factory=set)  # member, bucket, role
    roles: dict[str, list[str]] = field(default_factory=dict)  # custom ones: their permissions by name
    starters: set[tuple[str, str, str]] = field(default_factory=set)  # member, instance, role
    power: Callable[[str], str] = lambda _: "RUNNING"  # an instance's state
    boot: Callable[[str], None] = lambda _: None  # starts one that is TERMINATED, which it is no more from then on
    narrow: dict[str, tuple[str, list[dict[str, Any]]]] = field(default_factory=dict)  # a token's account and its boundary
    served: int = 0  # bytes that hosts have fetched from the buckets
    serial: Callable[[str], str] = lambda _: ""  # an instance's serial output
    # What exists of a kind, the kind of an id, and an end to it, as world.py has them.
    things: Callable[[str], list[dict[str, Any]]] = lambda _: []
    kind_of: Callable[[str], str | None] = lambda _: None
    delete: Callable[[str, str], None] = lambda _kind, _id: None
    # Subnets that are others', by their links.
    subnets: dict[str, dict[str, Any]] = field(default_factory=dict)
    over: threading.Event = field(default_factory=threading.Event)

    def machine(self, name: str) -> Machine:
        return next(found for found in self.machines.values() if found.name == name)

    def may_use(self, token: str | None, bucket: str, name: str | None, reads: bool) -> int:
        """Return HTTP's status for a token: 200, 401 if unknown, 403 without a right to the bucket.

        `name` is an object's, or a list's prefix, None for the bucket itself.
        """
        shown = (token or "").removeprefix("Bearer ")
        account, boundary = self.narrow.get(shown, (shown.removeprefix("token-of-"), None))
        if account not in {found.account for found in self.machines.values()}:
            return 401
        if (f"serviceAccount:{account}", bucket, _OBJECT_USER) not in self.grants:
            return 403
        return 200 if boundary is None or any(_within(rule, bucket, name, reads) for rule in boundary) else 403

    def narrowed(self, token: str, boundary: list[dict[str, Any]]) -> str:
        """Return a token with this one's rights within a boundary."""
        made = f"{_NARROW}{len(self.narrow)}"
        self.narrow[made] = (token.removeprefix("token-of-"), boundary)
        return made

    def may_start(self, token: str | None, name: str) -> int:
        """Return the status for a client that wants to start an instance; the operator may."""
        account = (token or "").removeprefix("Bearer token-of-")
        if account == OPERATOR:
            return 200
        if account not in {found.account for found in self.machines.values()}:
            return 401
        able = {role for role, permissions in self.roles.items() if "compute.instances.start" in permissions}
        granted = {role for member, where, role in self.starters if (member, where) == (f"serviceAccount:{account}", name)}
        return 200 if able & granted else 403


def _within(rule: Mapping[str, Any], bucket: str, name: str | None, reads: bool) -> bool:
    """Source: Cloud Storage documentation, "Credential Access Boundaries"."""
    (permission,) = rule["availablePermissions"]
    role = permission.removeprefix("inRole:")
    if not rule["availableResource"].endswith(f"/buckets/{bucket}"):
        return False
    if name is None:
        return bool(role == "roles/storage.bucketViewer")
    condition = rule.get("availabilityCondition", {}).get("expression", "")
    inside = name.startswith(tuple(_PREFIX.findall(condition))) or name in _NAME.findall(condition) or not condition
    return inside and (role in _READS if reads else role == _OBJECT_USER)


class _Handler(BaseHTTPRequestHandler):
    google: Google
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer waits 40 ms for a delayed acknowledgement, and Google's do not

    def say(self, status: int, content: str | bytes = b"", kind: str = "application/text", **headers: str) -> None:
        body = content.encode() if isinstance(content, str) else content
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def body(self) -> bytes:
        """Read the body, which TensorFlow sends in chunks with a meaningless Content-Length."""
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def handle(self) -> None:
        with suppress(ConnectionError, ssl.SSLError):  # who asked has gone
            super().handle()

    def log_message(self, *_: Any) -> None:
        """Print nothing: pytest handles a test's output."""


class Metadata(_Handler):
    """Source: Compute Engine documentation, "About VM metadata", "Query VM metadata", "Guest attributes"."""

    def do_GET(self) -> None:
        machine = self.google.machines.get(self.client_address[0])
        url = urlsplit(self.path)
        asked = parse_qs(url.query)
        if machine is None or self.headers["Metadata-Flavor"] != "Google":
            return self.say(403)
        path = [unquote(part) for part in url.path.split("/") if part][2:]
        if asked.get("wait_for_change") == ["true"]:
            known = asked.get("last_etag", [str(machine.changes)])[0]  # the agent's first is NONE
            deadline = time.monotonic() + min(_WAIT, float(asked.get("timeout_sec", [_WAIT])[0]))
            while str(machine.changes) == known and time.monotonic() < deadline and not self.google.over.wait(0.2):
                pass
        own = {"Metadata-Flavor": "Google", "ETag": str(machine.changes)}
        if path[:2] == ["instance", "guest-attributes"]:
            found: Any = machine.guest.get("/".join(path[2:]))
        else:
            found = machine.tree
            for part in path:
                found = found.get(part if "attributes" in path[:-1] else _camel(part)) if isinstance(found, dict) else None
        if found is None:
            return self.say(404, **own)
        if isinstance(found, (dict, list)) and asked.get("recursive") != ["true"] and path[-1:] != ["token"]:
            return self.say(200, "".join(f"{key}{'/' * isinstance(found[key], dict)}\n" for key in found), **own)
        if isinstance(found, (dict, list)):
            return self.say(200, json.dumps(found), "application/json", **own)
        return self.say(200, json.dumps(found) if asked.get("alt") == ["json"] else str(found), **own)

    def do_PUT(self) -> None:
        machine, value = self.google.machines.get(self.client_address[0]), self.body().decode()
        prefix, _, key = self.path.partition("/guest-attributes/")
        if machine is None or self.headers["Metadata-Flavor"] != "Google" or not prefix.endswith("/instance") or "/" not in key:
            return self.say(403)
        machine.guest[key] = value
        return self.say(200)


def _camel(part: str) -> str:
    first, *rest = part.split("-")
    return first + "".join(word.capitalize() for word in rest)


def tree(
    project: str, zone: str, name: str, number: int, attributes: Mapping[str, str], account: str, scopes: list[str]
) -> Any:
    """Return the metadata server's answer on an instance, in the JSON spelling."""
    token = {"access_token": f"token-of-{account}", "expires_in": 3599, "token_type": "Bearer"}
    identity = {"email": account, "aliases": ["default"], "scopes": scopes, "token": token}
    return {
        "instance": {
            "attributes": dict(attributes),
            "hostname": f"{name}.{zone}.c.{project}.internal",
            "id": number,
            "machineType": "",
            "name": name,
            "networkInterfaces": [],
            "preempted": "FALSE",
            "serviceAccounts": {"default": identity, account: identity},
            "virtualClock": {"driftToken": "0"},
            "zone": f"projects/1/zones/{zone}",
        },
        "project": {"attributes": {}, "numericProjectId": 1, "projectId": project},
    }


class _Starts(_Handler):
    """Starts a stopped instance for permitted clients.

    Source: Compute Engine's reference, `instances.start`; "Troubleshooting VM start" has the refusals.
    """

    def begin(self) -> None:
        self.body()
        found = _START.match(self.path)
        if not found:
            return self.refuse(404, "Not Found")
        name = found[2]
        status = self.google.may_start(self.headers["Authorization"], name)
        if status != 200:
            return self.refuse(status, f"Required 'compute.instances.start' permission for '{found[1]}'")
        state = self.google.power(name)
        if state == "STOPPING":
            return self.refuse(400, f"The resource '{found[1]}' is not ready")
        if state == "TERMINATED":
            self.google.machine(name).preempted(False)
            # As Google does it: the answer comes at once, and the instance boots meanwhile.
            threading.Thread(target=self.google.boot, args=(name,), name=f"boot {name}").start()
        return self.say(200, json.dumps({"kind": "compute#operation", "status": "RUNNING"}), _JSON)

    def refuse(self, status: int, why: str) -> None:
        self.say(status, json.dumps({"error": {"code": status, "message": why}}), _JSON)


class Storage(_Handler):
    """TLS in front of fake-gcs-server, with the rights to each bucket and two fixes for TensorFlow."""

    origin = "https://storage.googleapis.com"

    def do_GET(self) -> None:
        content = self.body()
        url = urlsplit(self.path)
        found, asked = _BUCKET_OF.match(url.path), parse_qs(url.query)
        bucket = (found[1] or found[2]) if found else ""
        # The address of an upload that is under way is a secret in itself, as Google's is.
        known = not bucket or "upload_id" in asked
        reads = self.command in ("GET", "HEAD")
        status = (
            200 if known else self.google.may_use(self.headers["Authorization"], bucket, self.named(url.path, content), reads)
        )
        if self.path.startswith(MUTE):
            self.close_connection = True
            self.google.over.wait()
        elif status != 200:
            self.say(status)
        else:
            self.forward(content)

    do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = do_GET

    def named(self, path: str, content: bytes) -> str | None:
        """Return the requested object, or the prefix of a list; None for the bucket."""
        asked = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
        if found := _OBJECT_OF.match(path):
            return unquote(found[1] or found[2])
        if not path.endswith("/o"):
            return None
        if self.command == "POST":  # an upload, whose name is in its address or in its first part
            part = re.search(rb'"name"\s*:\s*"([^"]+)"', content)
            return asked["name"][0] if "name" in asked else part[1].decode() if part else ""
        return asked.get("prefix", [""])[0]

    def forward(self, content: bytes) -> None:
        behind = http.client.HTTPConnection("127.0.0.1", self.google.storage, timeout=_WAIT)
        try:
            # Go's server refuses `Transfer-Encoding: identity`, and has no use for `Expect` once the body is here.
            dropped = ("connection", "transfer-encoding", "expect", "content-length")
            headers = {name: value for name, value in self.headers.items() if name.lower() not in dropped}
            behind.request(self.command, self.path, content, headers)
            answer = behind.getresponse()
            length = answer.getheader("Content-Length")
            whole = None if length is not None or self.command == "HEAD" else answer.read()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() == "location":
                    self.send_header(name, re.sub(r"^http://[^/]+", self.origin, value))
                elif name.lower() not in ("connection", "transfer-encoding", "content-length"):
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(whole)) if whole is not None else length or "0")
            self.end_headers()
            if whole is not None:
                self.wfile.write(whole)
            elif self.command != "HEAD":
                shutil.copyfileobj(answer, self.wfile, 1 << 20)
                self.google.served += int(length or 0)
        finally:
            behind.close()


class Front(_Starts, Storage):
    """TLS in front of all that hosts reach by Google's names."""

    def do_GET(self) -> None:
        if self.path.startswith("/compute/"):
            self.begin()
        elif self.path == "/v1/token":
            self.exchange()
        else:
            super().do_GET()

    do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = do_GET

    def exchange(self) -> None:
        """Source: Security Token Service's reference, `token`."""
        asked = {key: value for key, (value,) in parse_qs(self.body().decode()).items()}
        boundary = json.loads(unquote(asked["options"]))["accessBoundary"]["accessBoundaryRules"]
        narrow = self.google.narrowed(asked["subject_token"], boundary)
        self.say(200, json.dumps({"access_token": narrow, "expires_in": 3599, "token_type": "Bearer"}), _JSON)


class Buckets(Storage):
    """Cloud Storage for the operator's machine, without TLS: a bucket has its labels and location too."""

    def do_GET(self) -> None:
        self.origin = f"http://127.0.0.1:{self.server.server_port}"  # type: ignore[attr-defined]
        url = urlsplit(self.path)
        if self.command == "GET" and url.path == "/storage/v1/b":
            asked = parse_qs(url.query)["project"]
            own = [{"name": each["name"]} for each in self.google.things("Bucket") if each["project"] in asked]
            return self.say(200, json.dumps({"items": own}), _JSON)
        name = self.path.removeprefix("/storage/v1/b/")
        found = next((each for each in self.google.things("Bucket") if each["name"] == name), None)
        if self.command == "GET" and found:
            return self.say(200, json.dumps({key: found.get(key) for key in ("name", "labels", "location")}), _JSON)
        return self.forward(self.body())

    do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = do_GET


class Compute(_Starts):
    """The program's queries before creation, `pulumi up`'s queries of its hosts, and existing resources.

    Source: Compute Engine's reference, `regions.get`, `instances.getGuestAttributes`, `instances.aggregatedList` and the like;
    IAM's, `projects.serviceAccounts`.
    """

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        id_ = url.path.partition("/v1/")[2]
        *_, name, what = url.path.split("/")
        if what in _KINDS:
            found = [{"name": each["name"], "selfLink": each.get("selfLink")} for each in self.google.things(_KINDS[what])]
            items = {"zones/any": {what: found}} if name == "aggregated" else found
            self.tell({"accounts" if what == "serviceAccounts" else "items": items})
        elif id_ in self.google.subnets:
            self.tell(self.google.subnets[id_])
        elif name == "regions":
            zones = [place for place in PLACES if place.startswith(f"{what}-")]
            self.tell({"zones": zones}) if zones else self.lacks(what)
        elif what == "serialPort":
            self.tell({"contents": self.google.serial(name)})
        elif what == "getGuestAttributes":
            space = parse_qs(url.query)["queryPath"][0].rstrip("/")
            known = {key: value for key, value in self.google.machine(name).guest.items() if key.startswith(f"{space}/")}
            items = [{"namespace": space, "key": key.partition("/")[2], "value": value} for key, value in known.items()]
            self.tell({"queryValue": {"items": items}}) if items else self.lacks(space)
        else:
            self.tell({}) if self.google.kind_of(id_) else self.lacks(what)

    def do_POST(self) -> None:
        self.begin()

    def do_DELETE(self) -> None:
        id_ = urlsplit(self.path).path.partition("/v1/")[2]
        kind = self.google.kind_of(id_)
        if kind is None:
            return self.lacks(id_)
        try:
            self.google.delete(kind, id_)
        except Exception as refused:  # noqa: BLE001  what the world refuses
            return self.say(400, str(refused))
        return self.tell({})

    def tell(self, answer: Mapping[str, Any]) -> None:
        self.say(200, json.dumps(answer), _JSON)

    def lacks(self, what: str) -> None:
        message = f"The resource '{what}' was not found"
        self.say(404, json.dumps({"error": {"code": 404, "message": message, "errors": [{"reason": "notFound"}]}}), _JSON)


@contextmanager
def fake_gcs() -> Iterator[int]:
    """Run fake-gcs-server on a loopback port; return the port."""
    assert _SERVER.exists(), "the fake of Google's storage is missing: make gcs"
    with socket.socket() as held:  # bound and not listening: nobody else is given the port, and the server may have it too
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = int(held.getsockname()[1])
        command = [str(_SERVER), "-backend", "memory", "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        def answers() -> bool:
            assert process.poll() is None, "the fake of Google's storage does not start"
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), limit()):
                return True
            return False

        try:
            wait_for(answers, "the fake of Google's storage listens")
            yield port
        finally:
            process.kill()
            process.wait()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512  # of eight hosts that begin at once; one that is not taken is heard of a minute later


@contextmanager
def serving(
    google: Google, kind: type[_Handler], address: str, port: int = 0, certificate: Path | None = None
) -> Iterator[int]:
    """Serve one of the fakes at an address; return its port."""
    server = _Server((address, port), type(kind.__name__, (kind,), {"google": google}))
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        google.over.set()
        server.shutdown()
        thread.join()
        server.server_close()
