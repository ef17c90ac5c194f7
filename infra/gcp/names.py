"""Names and addresses of a stack on Google Cloud: pure functions, so they are equal on every machine."""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass

from infra.scale_tiers import HostId, Role
from infra.state import StackState

# Where each role's block begins in the stack's /20 (4,096 addresses); Google keeps the first two and the last two of a subnet.
_BLOCK: Mapping[Role, int] = {Role.MASTER: 2, Role.EVALUATOR: 16, Role.PS: 1024, Role.WORKER: 2048, Role.SERVING: 4048}
MAX_HOSTS: Mapping[Role, int] = {Role.MASTER: 1, Role.EVALUATOR: 1000, Role.PS: 1000, Role.WORKER: 2000, Role.SERVING: 40}

# Source: Cloud Storage documentation, "Bucket names".
BUCKET = (
    r"(?!goog)(?!.*g[o0]{2}g[l1]e)(?!.*\.\.)(?!\d+(\.\d+){3}$)"
    r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]"
)


@dataclass(frozen=True)
class GoogleNames:
    """Names of a stack; `prefix` has at most 20 characters.

    A service account's id has at most 30 characters, and `-evaluator` is the longest ending.
    """

    prefix: str
    bucket: str
    stack: str

    @property
    def role_title(self) -> str:
        """The title of the custom IAM role that lets hosts start the stack's instances. Pulumi adds random digits to its id."""
        return self.resource_name("start")

    def resource_name(self, *parts: str) -> str:
        """Return a resource's name, of RFC 1035, at most 63 characters."""
        return "-".join((self.prefix, *parts))


def names(project: str, stack: str) -> GoogleNames:
    """Return the names of one stack in one project. 6 hexadecimal digits of a hash keep stacks with similar names apart."""
    key = _hash(project, stack)[:6]
    plain = re.sub(r"[^a-z0-9]+", "-", stack.lower()).strip("-") or "stack"
    prefix = f"st-{plain[:10].strip('-')}-{key}"
    return GoogleNames(prefix, _bucket(project, prefix), plain[:63].strip("-"))


def _bucket(project: str, prefix: str) -> str:
    """Return the default name of a stack's bucket: by project and prefix, or a hash if Cloud Storage refuses that name."""
    owner = re.sub(r"[^a-z0-9]+", "-", project.lower()).strip("-")[:30]
    name = f"{owner}-{prefix}"
    return name if re.fullmatch(BUCKET, name) else f"st-{_hash(project, prefix)[:20]}"


def _hash(project: str, name: str) -> str:
    return hashlib.sha256(f"{project}\0{name}".encode()).hexdigest()


def names_of(project: str, stack: str, state: StackState) -> GoogleNames:
    """Return the names in the stack's state, which a renamed stack keeps; new names if there are none.

    If all hosts were deleted in the console, they come from the bucket's label and the title of the role that starts hosts.
    """
    hosts, buckets = state.of("compute/instance:Instance"), state.of("storage/bucket:Bucket")
    named = [(host, outputs, outputs.get("name")) for host, outputs in hosts.items()]
    named += [("start", outputs, outputs.get("title")) for outputs in state.of("IAMCustomRole").values()]
    prefixes = [str(name).removesuffix(f"-{end}") for end, outputs, name in named if outputs.get("project") == project]
    labels = [(outputs.get("labels") or {}).get("scaletier-stack") for outputs in (*hosts.values(), *buckets.values())]
    if prefixes and (label := next(filter(None, labels), None)):
        return GoogleNames(prefixes[0], _bucket(project, prefixes[0]), str(label))
    return names(project, stack)


def address(network: ipaddress.IPv4Network, host_id: HostId) -> str:
    """Return the internal address of a host, which stays the same if the host is recreated."""
    return str(network[_BLOCK[host_id.role] + host_id.index])
