"""Fakes under Google's names: the metadata server, Cloud Storage behind TLS, parts of the Compute API.

Behind Cloud Storage is fake-gcs-server. They do not cover: differences of Google's own image from image.py, and its newer guest
agent; DHCP, DNS, routes and the hostname, which the container provides; the firewall's rules, which
are not enforced here; the delay of new bucket permissions; Private Google Access and IAP; Cloud Storage by gRPC,
quotas and throttling; disks, drivers and Secure Boot; and whether the provider creates its resources as declared.
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
    "roles": "IAMCustomRole",
}
ZONES = ("us-central1-a", "us-central1-b", "europe-west4-a")
"""The existing zones."""
UNANSWERED = "/mute/"
"""A path whose requests get no answer."""
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

    def set_attributes(self, attributes: Mapping[str, str]) -> None:
        """Replace the metadata, and notify the clients that wait for a change."""
        self.tree["instance"]["attributes"] = dict(attributes)
        self.changes += 1

    def set_preempted(self, preempted: bool) -> None:
        """Set whether the host is being preempted."""
        self.tree["instance"]["preempted"] = str(preempted).upper()


@dataclass
class Google:
    """The state that all fakes share."""

    storage: int  # the port of fake-gcs-server
    machines: dict[str, Machine] = field(default_factory=dict)  # by address
    grants: set[tuple[str, str, str]] = field(default_factory=set)  # member, bucket, role
    roles: dict[str, list[str]] = field(default_factory=dict)  # custom roles: their permissions by name
    starters: set[tuple[str, str, str]] = field(default_factory=set)  # member, instance, role
    power: Callable[[str], str] = lambda _: "RUNNING"  # an instance's state
    boot: Callable[[str], None] = lambda _: None  # starts a TERMINATED instance, which is RUNNING from then on
    # The account and the boundary of each narrow token.
    narrow_tokens: dict[str, tuple[str, list[dict[str, Any]]]] = field(default_factory=dict)
    serial: Callable[[str], str] = lambda _: ""  # an instance's serial output
    # The resources of a kind, the kind of an id, and the deletion of a resource, by world.py.
    list_resources: Callable[[str], list[dict[str, Any]]] = lambda _: []
    kind_of: Callable[[str], str | None] = lambda _: None
    delete: Callable[[str, str], None] = lambda _kind, _id: None
    # Subnets of other projects, by their links.
    subnets: dict[str, dict[str, Any]] = field(default_factory=dict)
    stopped: threading.Event = field(default_factory=threading.Event)

    def machine(self, name: str) -> Machine:
        return next(machine for machine in self.machines.values() if machine.name == name)

    def may_use(self, token: str | None, bucket: str, name: str | None, reads: bool) -> int:
        """Return HTTP's status for a token: 200, 401 if it is unknown, 403 without permission for the bucket.

        `name` is an object's name or a list's prefix; None for the bucket itself.
        """
        token_id = (token or "").removeprefix("Bearer ")
        account, boundary = self.narrow_tokens.get(token_id, (token_id.removeprefix("token-of-"), None))
        if account not in {machine.account for machine in self.machines.values()}:
            return 401
        if (f"serviceAccount:{account}", bucket, _OBJECT_USER) not in self.grants:
            return 403
        return 200 if boundary is None or any(_within(rule, bucket, name, reads) for rule in boundary) else 403

    def make_narrow_token(self, token: str, boundary: list[dict[str, Any]]) -> str:
        """Return a token with this one's permissions within a boundary."""
        narrow_token = f"{_NARROW}{len(self.narrow_tokens)}"
        self.narrow_tokens[narrow_token] = (token.removeprefix("token-of-"), boundary)
        return narrow_token

    def may_start(self, token: str | None, name: str) -> int:
        """Return the status for a client that starts an instance; the operator may always."""
        account = (token or "").removeprefix("Bearer token-of-")
        if account == OPERATOR:
            return 200
        if account not in {machine.account for machine in self.machines.values()}:
            return 401
        starting_roles = {role for role, permissions in self.roles.items() if "compute.instances.start" in permissions}
        granted = {
            role for member, instance, role in self.starters if (member, instance) == (f"serviceAccount:{account}", name)
        }
        return 200 if starting_roles & granted else 403


def _within(rule: Mapping[str, Any], bucket: str, name: str | None, reads: bool) -> bool:
    """Source: Cloud Storage documentation, "Credential Access Boundaries"."""
    (permission,) = rule["availablePermissions"]
    role = permission.removeprefix("inRole:")
    if not rule["availableResource"].endswith(f"/buckets/{bucket}"):
        return False
    if name is None:
        return bool(role == "roles/storage.bucketViewer")
    condition = rule.get("availabilityCondition", {}).get("expression", "")
    matches = name.startswith(tuple(_PREFIX.findall(condition))) or name in _NAME.findall(condition) or not condition
    return matches and (role in _READS if reads else role == _OBJECT_USER)


class _Handler(BaseHTTPRequestHandler):
    google: Google
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise each answer waits 40 ms for a delayed acknowledgement, unlike Google's

    def reply(self, status: int, content: str | bytes = b"", kind: str = "application/text", **headers: str) -> None:
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
        with suppress(ConnectionError, ssl.SSLError):  # the client has disconnected
            super().handle()

    def log_message(self, *_: Any) -> None:
        """Print nothing: pytest handles a test's output."""


class Metadata(_Handler):
    """Source: Compute Engine documentation, "About VM metadata", "Query VM metadata", "Guest attributes"."""

    def do_GET(self) -> None:
        machine = self.google.machines.get(self.client_address[0])
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        if machine is None or self.headers["Metadata-Flavor"] != "Google":
            return self.reply(403)
        path = [unquote(part) for part in url.path.split("/") if part][2:]
        if query.get("wait_for_change") == ["true"]:
            etag = query.get("last_etag", [str(machine.changes)])[0]  # the agent starts with NONE
            deadline = time.monotonic() + min(_WAIT, float(query.get("timeout_sec", [_WAIT])[0]))
            while str(machine.changes) == etag and time.monotonic() < deadline and not self.google.stopped.wait(0.2):
                pass
        headers = {"Metadata-Flavor": "Google", "ETag": str(machine.changes)}
        if path[:2] == ["instance", "guest-attributes"]:
            resource: Any = machine.guest.get("/".join(path[2:]))
        else:
            resource = machine.tree
            for part in path:
                resource = (
                    resource.get(part if "attributes" in path[:-1] else _camel(part)) if isinstance(resource, dict) else None
                )
        if resource is None:
            return self.reply(404, **headers)
        if isinstance(resource, (dict, list)) and query.get("recursive") != ["true"] and path[-1:] != ["token"]:
            return self.reply(200, "".join(f"{key}{'/' * isinstance(resource[key], dict)}\n" for key in resource), **headers)
        if isinstance(resource, (dict, list)):
            return self.reply(200, json.dumps(resource), "application/json", **headers)
        return self.reply(200, json.dumps(resource) if query.get("alt") == ["json"] else str(resource), **headers)

    def do_PUT(self) -> None:
        machine, value = self.google.machines.get(self.client_address[0]), self.body().decode()
        prefix, _, key = self.path.partition("/guest-attributes/")
        if machine is None or self.headers["Metadata-Flavor"] != "Google" or not prefix.endswith("/instance") or "/" not in key:
            return self.reply(403)
        machine.guest[key] = value
        return self.reply(200)


def _camel(part: str) -> str:
    first, *rest = part.split("-")
    return first + "".join(word.capitalize() for word in rest)


def metadata_tree(
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


class _StartHandler(_Handler):
    """Starts a stopped instance for permitted clients.

    Source: Compute Engine's reference, `instances.start`; "Troubleshooting VM start" has the refusals.
    """

    def start_instance(self) -> None:
        self.body()
        match = _START.match(self.path)
        if not match:
            return self.reply_error(404, "Not Found")
        name = match[2]
        status = self.google.may_start(self.headers["Authorization"], name)
        if status != 200:
            return self.reply_error(status, f"Required 'compute.instances.start' permission for '{match[1]}'")
        state = self.google.power(name)
        if state == "STOPPING":
            return self.reply_error(400, f"The resource '{match[1]}' is not ready")
        if state == "TERMINATED":
            self.google.machine(name).set_preempted(False)
            # Like Google: answer at once, while the instance boots.
            threading.Thread(target=self.google.boot, args=(name,), name=f"boot {name}").start()
        return self.reply(200, json.dumps({"kind": "compute#operation", "status": "RUNNING"}), _JSON)

    def reply_error(self, status: int, message: str) -> None:
        self.reply(status, json.dumps({"error": {"code": status, "message": message}}), _JSON)


class Storage(_Handler):
    """TLS in front of fake-gcs-server, with permissions for each bucket and two fixes for TensorFlow."""

    origin = "https://storage.googleapis.com"

    def do_GET(self) -> None:
        content = self.body()
        url = urlsplit(self.path)
        match, query = _BUCKET_OF.match(url.path), parse_qs(url.query)
        bucket = (match[1] or match[2]) if match else ""
        # The URL of an upload in progress is a secret in itself, like Google's.
        needs_no_token = not bucket or "upload_id" in query
        reads = self.command in ("GET", "HEAD")
        status = (
            200
            if needs_no_token
            else self.google.may_use(self.headers["Authorization"], bucket, self.requested_name(url.path, content), reads)
        )
        if self.path.startswith(UNANSWERED):
            self.close_connection = True
            self.google.stopped.wait()
        elif status != 200:
            self.reply(status)
        else:
            self.forward(content)

    do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = do_GET

    def requested_name(self, path: str, content: bytes) -> str | None:
        """Return the requested object, or the prefix of a list; None for the bucket."""
        query = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
        if match := _OBJECT_OF.match(path):
            return unquote(match[1] or match[2])
        if not path.endswith("/o"):
            return None
        if self.command == "POST":  # an upload, whose name is in its URL or in its first part
            part = re.search(rb'"name"\s*:\s*"([^"]+)"', content)
            return query["name"][0] if "name" in query else part[1].decode() if part else ""
        return query.get("prefix", [""])[0]

    def forward(self, content: bytes) -> None:
        backend = http.client.HTTPConnection("127.0.0.1", self.google.storage, timeout=_WAIT)
        try:
            # Go's server refuses `Transfer-Encoding: identity`, and `Expect` is useless after the body was read.
            dropped = ("connection", "transfer-encoding", "expect", "content-length")
            headers = {name: value for name, value in self.headers.items() if name.lower() not in dropped}
            backend.request(self.command, self.path, content, headers)
            answer = backend.getresponse()
            length = answer.getheader("Content-Length")
            payload = None if length is not None or self.command == "HEAD" else answer.read()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() == "location":
                    self.send_header(name, re.sub(r"^http://[^/]+", self.origin, value))
                elif name.lower() not in ("connection", "transfer-encoding", "content-length"):
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(payload)) if payload is not None else length or "0")
            self.end_headers()
            if payload is not None:
                self.wfile.write(payload)
            elif self.command != "HEAD":
                shutil.copyfileobj(answer, self.wfile, 1 << 20)
        finally:
            backend.close()


class Front(_StartHandler, Storage):
    """TLS in front of all services that hosts reach by Google's names."""

    def do_GET(self) -> None:
        if self.path.startswith("/compute/"):
            self.start_instance()
        elif self.path == "/v1/token":
            self.exchange_token()
        else:
            super().do_GET()

    do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = do_GET

    def exchange_token(self) -> None:
        """Source: Security Token Service's reference, `token`."""
        form = {key: value for key, (value,) in parse_qs(self.body().decode()).items()}
        boundary = json.loads(unquote(form["options"]))["accessBoundary"]["accessBoundaryRules"]
        token = self.google.make_narrow_token(form["subject_token"], boundary)
        self.reply(200, json.dumps({"access_token": token, "expires_in": 3599, "token_type": "Bearer"}), _JSON)


class Buckets(Storage):
    """Cloud Storage for the operator's machine, without TLS; buckets also have labels and a location."""

    def do_GET(self) -> None:
        self.origin = f"http://127.0.0.1:{self.server.server_port}"  # type: ignore[attr-defined]
        url = urlsplit(self.path)
        if self.command == "GET" and url.path == "/storage/v1/b":
            projects = parse_qs(url.query)["project"]
            buckets = [{"name": each["name"]} for each in self.google.list_resources("Bucket") if each["project"] in projects]
            return self.reply(200, json.dumps({"items": buckets}), _JSON)
        name = self.path.removeprefix("/storage/v1/b/")
        resource = next((each for each in self.google.list_resources("Bucket") if each["name"] == name), None)
        if self.command == "GET" and resource:
            return self.reply(200, json.dumps({key: resource.get(key) for key in ("name", "labels", "location")}), _JSON)
        return self.forward(self.body())

    do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = do_GET


class Compute(_StartHandler):
    """The program's queries before creation, `pulumi up`'s queries of its hosts, and existing resources.

    Source: Compute Engine's reference, `projects.get`, `regions.get`, `instances.getGuestAttributes`,
    `instances.aggregatedList` and the like; IAM's, `projects.serviceAccounts` and `projects.roles`.
    """

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        id_ = url.path.partition("/v1/")[2]
        *_, name, what = url.path.split("/")
        if what in _KINDS:
            resources = [
                {key: each[key] for key in ("name", "selfLink", "title") if key in each}
                for each in self.google.list_resources(_KINDS[what])
            ]
            items = {"zones/any": {what: resources}} if name == "aggregated" else resources
            self.reply_json({{"serviceAccounts": "accounts", "roles": "roles"}.get(what, "items"): items})
        elif id_ in self.google.subnets:
            self.reply_json(self.google.subnets[id_])
        elif name == "regions":
            zones = [zone for zone in ZONES if zone.startswith(f"{what}-")]
            self.reply_json({"zones": zones}) if zones else self.reply_not_found(what)
        elif name == "projects":
            self.reply_json({"quotas": []})
        elif what == "serialPort":
            self.reply_json({"contents": self.google.serial(name)})
        elif what == "getGuestAttributes":
            space = parse_qs(url.query)["queryPath"][0].rstrip("/")
            attributes = {key: value for key, value in self.google.machine(name).guest.items() if key.startswith(f"{space}/")}
            items = [{"namespace": space, "key": key.partition("/")[2], "value": value} for key, value in attributes.items()]
            self.reply_json({"queryValue": {"items": items}}) if items else self.reply_not_found(space)
        else:
            self.reply_json({}) if self.google.kind_of(id_) else self.reply_not_found(what)

    def do_POST(self) -> None:
        self.start_instance()

    def do_DELETE(self) -> None:
        id_ = urlsplit(self.path).path.partition("/v1/")[2]
        kind = self.google.kind_of(id_)
        if kind is None:
            return self.reply_not_found(id_)
        try:
            self.google.delete(kind, id_)
        except Exception as error:  # noqa: BLE001  any refusal of the world
            return self.reply(400, str(error))
        return self.reply_json({})

    def reply_json(self, answer: Mapping[str, Any]) -> None:
        self.reply(200, json.dumps(answer), _JSON)

    def reply_not_found(self, what: str) -> None:
        message = f"The resource '{what}' was not found"
        self.reply(404, json.dumps({"error": {"code": 404, "message": message, "errors": [{"reason": "notFound"}]}}), _JSON)


@contextmanager
def fake_gcs() -> Iterator[int]:
    """Run fake-gcs-server on a loopback port; return the port."""
    assert _SERVER.exists(), "fake-gcs-server is missing: run make gcs"
    with socket.socket() as reserved:  # bound but not listening: it reserves the port, which the server can still bind
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port = int(reserved.getsockname()[1])
        command = [str(_SERVER), "-backend", "memory", "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        def accepts_connections() -> bool:
            assert process.poll() is None, "fake-gcs-server does not start"
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), limit()):
                return True
            return False

        try:
            wait_for(accepts_connections, "fake-gcs-server listens")
            yield port
        finally:
            process.kill()
            process.wait()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512  # for eight hosts that start at once; a refused connection is retried only a minute later


@contextmanager
def serve_fake(
    google: Google, kind: type[_Handler], address: str, port: int = 0, certificate: Path | None = None
) -> Iterator[int]:
    """Serve one of the fakes at an address; yield its port."""
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
        google.stopped.set()
        server.shutdown()
        thread.join()
        server.server_close()
