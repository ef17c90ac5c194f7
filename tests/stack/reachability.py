"""TCP reachability between hosts, computed from each of its sources.

A result is the set of (source, destination, port) that get through; source None is the operator. Tests on real hosts
(tests/e2e) can compare with the same sets.
"""

from __future__ import annotations

import fnmatch
import ipaddress
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from infra.ports import SERVING_PORT, SSH_PORT, TENSORFLOW_PORT, firewall_rows
from infra.scale_tiers import ClusterSpec, Role

PORTS = (SSH_PORT, TENSORFLOW_PORT, SERVING_PORT, 1, 8080, 65535)
Reach = frozenset[tuple[Role | None, Role, int]]


def compute_by_table(spec: ClusterSpec) -> Reach:
    """Compute the reachability of hosts of one job by the table in infra/ports.py."""
    return frozenset((row.source, row.destination, port) for row in firewall_rows(spec) for port in PORTS if row.has(port))


def compute_by_gcp(rules: Iterable[Mapping[str, Any]], accounts: Mapping[Role, str], operator: str) -> Reach:
    """Compute reachability by VPC firewall rules, of hosts by service account and an operator by address.

    Source: VPC documentation, "VPC firewall rules": the rule of the lowest number decides; of two with the same number one
    that denies does; without any, incoming packets are refused. A rule with service accounts matches hosts of the network by
    theirs; hosts have private addresses, which ranges match too.
    """
    rules = list(rules)
    return frozenset(
        (source, destination, port)
        for source in (None, *accounts)
        for destination in accounts
        for port in PORTS
        if _gcp_verdict(
            rules,
            accounts.get(source) if source else None,
            operator if source is None else "10.64.9.9",
            accounts[destination],
            port,
        )
    )


def _gcp_verdict(rules: Sequence[Mapping[str, Any]], account: str | None, address: str, target: str, port: int) -> bool:
    matching = [
        (rule.get("priority", 1000), 0 if rule.get("denies") else 1, rule)
        for rule in rules
        if rule.get("direction", "INGRESS") == "INGRESS"
        and not rule.get("disabled")
        and _is_target(rule, target)
        and _is_source(rule, account, address)
        and _has_port(rule, port)
    ]
    if not matching:
        return False
    return bool(min(matching, key=lambda match: match[:2])[2].get("allows"))


def _is_target(rule: Mapping[str, Any], account: str) -> bool:
    targets = rule.get("targetServiceAccounts")
    return not rule.get("targetTags") and (not targets or account in targets)


def _is_source(rule: Mapping[str, Any], account: str | None, address: str) -> bool:
    accounts, ranges = rule.get("sourceServiceAccounts") or (), rule.get("sourceRanges") or ()
    if not accounts and not ranges and not rule.get("sourceTags"):
        return True
    in_ranges = any(ipaddress.ip_address(address) in ipaddress.ip_network(item) for item in ranges)
    return in_ranges or (account is not None and account in accounts)


def _has_port(rule: Mapping[str, Any], port: int) -> bool:
    for entry in rule.get("allows") or rule.get("denies") or ():
        if entry["protocol"] in ("tcp", "all", "6"):
            ports = entry.get("ports")
            if not ports or any(in_port_range(text, port) for text in ports):
                return True
    return False


def in_port_range(text: str, port: int) -> bool:
    low, _, high = text.partition("-")
    return int(low) <= port <= int(high or low)


Chains = Mapping[str, tuple[bool, str]]
"""Chains by hook: True if one accepts packets that no rule matches, and its rules."""


def _parse_chains(script: str) -> Chains:
    chains = re.findall(r"chain \w+ \{\s*type filter hook (\w+) [^\n]*policy (\w+);\n(.*?)\n\t\}", script, re.DOTALL)
    return {hook: (policy == "accept", body) for hook, policy, body in chains}


def compute_by_nft(script: str, addresses: Mapping[Role, Sequence[str]], ports: Mapping[str, str]) -> Reach:
    """Compute reachability by an nftables script of the bridge family, for a connection's first packet.

    `addresses` are the hosts' by role, `ports` the names of their ports on the bridge by address. The operator's packets leave
    through the chain of the hook `output`, those between hosts pass that of `forward`. Raises ValueError for a rule that it
    cannot read.
    """
    sets = {
        name: {item.strip() for item in elements.split(",")}
        for name, elements in re.findall(r"set (\w+) \{[^}]*elements = \{([^}]*)\}", script)
    }
    chains = _parse_chains(script)
    reachable = set()
    for source in (None, *addresses):
        for destination in addresses:
            for port in PORTS:
                hook = "forward" if source else "output"
                starts = addresses[source] if source else ("192.0.2.1",)
                ends = [(a, b) for a in starts for b in addresses[destination] if a != b]
                verdicts = {_nft_verdict(chains[hook], sets, a, b, port, ports[a if source else b]) for a, b in ends}
                if len(verdicts) > 1:
                    raise ValueError(f"hosts of {source} and {destination} are not treated alike on port {port}")
                if True in verdicts:
                    reachable.add((source, destination, port))
    return frozenset(reachable)


def compute_by_host_rules(
    scripts: Mapping[Role, str],
    addresses: Mapping[Role, Sequence[str]],
    operator: str,
    source_peers: Collection[str] = (),
    destination_peers: Collection[str] = (),
) -> Reach:
    """Compute reachability by the hosts' own scripts: the source must allow it to leave, the destination to enter.

    The operator may send to all. `source_peers` are the source's peers, and `destination_peers` the destination's.
    """
    outgoing_sets, incoming_sets = {"peers": set(source_peers)}, {"peers": set(destination_peers)}
    chains = {role: _parse_chains(script) for role, script in scripts.items()}
    return frozenset(
        (source, destination, port)
        for source in (None, *addresses)
        for destination in addresses
        for port in PORTS
        if any(
            (source is None or _nft_verdict(chains[source]["output"], outgoing_sets, a, b, port, "eth0"))
            and _nft_verdict(chains[destination]["input"], incoming_sets, a, b, port, "eth0")
            for a in (addresses[source] if source else [operator])
            for b in addresses[destination]
            if a != b
        )
    )


def can_open(script: str, source: str, destination: str, port: int, peers: Collection[str] = ()) -> bool:
    """Return whether a host's own script lets it open a connection to any destination."""
    return _nft_verdict(_parse_chains(script)["output"], {"peers": set(peers)}, source, destination, port, "eth0")


def accepts_itself(script: str, port: int) -> bool:
    """Return whether a host's own script accepts a connection from a program of the same host."""
    return _nft_verdict(_parse_chains(script)["input"], {"peers": set()}, "127.0.0.1", "127.0.0.1", port, "lo")


class _Packet(NamedTuple):
    """A first packet (IPv4, TCP, SYN without ACK), and the sets of the script that it meets."""

    sets: Mapping[str, set[str]]
    source: str
    destination: str
    port: int
    interface: str


def _nft_verdict(
    chain: tuple[bool, str], sets: Mapping[str, set[str]], source: str, destination: str, port: int, interface: str
) -> bool:
    policy, body = chain
    packet = _Packet(sets, source, destination, port, interface)
    for rule, conditions, verdict in _parse_rules(body):
        if all(test(match, packet) for match, test in conditions):
            if verdict not in ("accept", "drop"):
                raise ValueError(f"the verdict of rule {rule!r} is unknown")
            return verdict == "accept"
    return policy


_Test = Callable[[re.Match[str], _Packet], bool]
_CONDITIONS: Sequence[tuple[str, _Test]] = (
    (r"[io]ifname (!=|==)? ?\"([^\"]+)\"", lambda m, packet: fnmatch.fnmatch(packet.interface, m[2]) is (m[1] != "!=")),
    (r"[io]if lo", lambda _, packet: packet.interface == "lo"),
    (r"iifname \. ip saddr != @(\w+)", lambda m, packet: f'"{packet.interface}" . {packet.source}' not in packet.sets[m[1]]),
    (r"iifname \. arp saddr ip != @\w+", lambda *_: False),
    (r"ether type (!=|==)? ?(\w+)", lambda m, _: (m[2] == "ip") is (m[1] != "!=")),
    (r"ip protocol tcp tcp flags & \(syn \| ack\) (!=|==) syn", lambda m, _: m[1] == "=="),
    (r"ip protocol (\w+)", lambda m, _: m[1] == "tcp"),
    (r"ip saddr @(\w+)", lambda m, packet: packet.source in packet.sets[m[1]]),
    (r"ip daddr @(\w+)", lambda m, packet: packet.destination in packet.sets[m[1]]),
    (r"ip saddr ([\d.-]+)", lambda m, packet: in_address_range(packet.source, m[1])),
    (r"ip daddr ([\d.-]+)", lambda m, packet: in_address_range(packet.destination, m[1])),
    (r"tcp dport \{ ([\d, -]+) \}", lambda m, packet: any(in_port_range(text, packet.port) for text in m[1].split(", "))),
    (r"udp [sd]port (\d+)", lambda *_: False),
)


@cache
def _parse_rules(body: str) -> Sequence[tuple[str, Sequence[tuple[re.Match[str], _Test]], str]]:
    """Split a chain into its rules, each with conditions and a verdict; ValueError if one is unknown."""
    rules = [re.sub(r' comment "[^"]*"', "", line).strip() for line in body.splitlines()]
    rules = [rule.replace("reject with tcp reset", "drop") for rule in rules]
    return [
        (rule, _parse_conditions(rule.rpartition(" ")[0].removesuffix("counter").strip()), rule.rpartition(" ")[2])
        for rule in rules
        if rule
    ]


def _parse_conditions(text: str) -> Sequence[tuple[re.Match[str], _Test]]:
    conditions = []
    while text:
        matches = ((re.match(pattern, text), test) for pattern, test in _CONDITIONS)
        match, test = next(((match, test) for match, test in matches if match), (None, None))
        if match is None or test is None:
            raise ValueError(f"the conditions {text!r} are not known")
        conditions.append((match, test))
        text = text[match.end() :].strip()
    return conditions


def in_address_range(address: str, text: str) -> bool:
    low, _, high = text.partition("-")
    return ipaddress.ip_address(low) <= ipaddress.ip_address(address) <= ipaddress.ip_address(high or low)
