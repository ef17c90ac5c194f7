"""Check the target of a notification of a job's end: a URL that gets the job's record by POST, or a command that reads it."""

from __future__ import annotations

import ipaddress
import re
import shlex
import socket
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

SCHEMES = {"http": 80, "https": 443}
# Google's metadata server gives a host's token to every program.
_METADATA_NAMES = frozenset({"metadata", "metadata.google.internal", "metadata.goog"})
_METADATA = ipaddress.ip_network("fd20:ce::254/128")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_ADDRESS = re.compile(r"[\d.]+$|.*:")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:\S")  # also mailto:me@example.com and example.com:80/done, to refuse them
# The part of a target that is no secret: a URL's scheme and host, or a command's first word.
_PUBLIC = re.compile(r"""[\s'"\[{]*[^\s='",:]*(?::(?://[\w.-]*/?)?)?""")
_PUBLIC_BEFORE_AT = re.compile(r"""[\s'"\[{]*[^\s='",:/]*[:/]?""")  # all that follows may be a password


@dataclass(frozen=True)
class Notification:
    """A notification of a job's end: `target` without secrets, `time` when it was sent, None before.

    `error` is empty if it succeeded; `attempts` counts the tries.
    """

    target: str
    time: str | None = None
    attempts: int = 0
    error: str = ""


def is_url(target: str) -> bool:
    """Return True for a URL of any scheme, False for a command."""
    return _URL.match(target) is not None


def check_url(url: str) -> SplitResult:
    """Return the parts of a URL; ValueError, in one line, if it is invalid or may not get a notification."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        quotes = re.search("['\"]", str(error))  # it quotes a part of the URL, perhaps a password
        raise ValueError("its host or port is invalid" if quotes else str(error)) from None
    if parts.scheme not in SCHEMES:
        raise ValueError(f"its scheme is {parts.scheme}")
    if " " in url or not url.isascii():
        raise ValueError("it holds a space or a character that is not ASCII")
    if parts.username is not None:
        raise ValueError("it names a user")
    if not parts.hostname:
        raise ValueError("it has no host")
    if parts.hostname.rstrip(".") in _METADATA_NAMES:
        raise ValueError(f"{parts.hostname} is the metadata server")
    host = parts.hostname
    with suppress(OSError):  # an address in another spelling, such as 2852039166
        host = socket.inet_ntoa(socket.inet_aton(host))
    if _ADDRESS.match(host):
        check_address(host)  # the agent checks a name's addresses before it connects
    return parts


def check_address(text: str) -> None:
    """Raise ValueError for an address that gets no notification: link-local, multicast, unspecified or of a metadata server."""
    address = ipaddress.ip_address(text.partition("%")[0])
    inner: ipaddress.IPv4Address | None = None
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF) if address in _NAT64 else inner
    for each in (address, inner or address):
        if each.is_link_local or each.is_multicast or each.is_unspecified or each in _METADATA:
            raise ValueError(f"{text} is a link-local, multicast, unspecified or metadata address")


def quote_target(target: object) -> str:
    """Return a refused target for a message, without its secrets; it may be neither a URL nor a command."""
    text = target if isinstance(target, str) else repr(target)
    return repr(_public_part(text)) if isinstance(target, str) else _public_part(text)


def _public_part(text: str) -> str:
    match = (_PUBLIC_BEFORE_AT if "@" in text else _PUBLIC).match(text)
    assert match is not None
    return match[0] + ("…" if match.end() < len(text) else "")


def redact_target(target: str) -> str:
    """Return a target without its secrets: scheme, host and port of a URL, or a command's first word."""
    if not is_url(target):
        first, *words = shlex.split(target)
        name, equals, _ = (_public_part(first) if "@" in first else first).partition("=")
        return f"command {name}{equals and '=…'}{' …' if words else ''}"
    parts = urlsplit(target)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    port = f":{parts.port}" if parts.port else ""
    more = "/…" if parts.path.strip("/") or parts.query else "/"
    return f"POST {parts.scheme}://{host}{port}{more}"
