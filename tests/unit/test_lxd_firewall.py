"""The firewall's table, with a fake nft; tests/e2e/test_firewall.py uses the real one."""

from __future__ import annotations

import ipaddress
import re
from subprocess import CompletedProcess
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.dynamic import ModuleProvider
from infra.lxd import firewall, nft
from infra.lxd.api import LxdError
from infra.scale_tiers import ScaleTier, preset

TABLE = "scaletier_abcdef"
RULES = firewall.rules(preset(ScaleTier.STANDARD_1), TABLE, "stabcdef", ipaddress.IPv4Network("10.77.0.0/24"))


class FakeKernel:
    """Tables of the bridge family as lines, normalized: without comments and empty lines."""

    def __init__(self) -> None:
        self.tables: dict[str, list[str]] = {}

    def nft(self, *arguments: str, script: str | None = None) -> CompletedProcess[str]:
        if arguments[-4:-1] == ("list", "table", "bridge"):
            lines = self.tables.get(arguments[-1])
            text = "\n".join([f"table bridge {arguments[-1]} {{", *(f"\t{line}" for line in lines or []), "}"])
            return CompletedProcess(arguments, 0 if lines is not None else 1, text, "No such file or directory")
        assert arguments == ("-f", "-")
        assert script is not None
        if "oops" in script:
            return CompletedProcess(arguments, 1, "", "stdin:1:1: Error: syntax error\n oops\n ^^^^")
        for name in re.findall(r"^delete table bridge (\w+)$", script, re.MULTILINE):
            self.tables.pop(name, None)
        for name, body in re.findall(r"^table bridge (\w+) \{\n(.*?)^\}", script, re.MULTILINE | re.DOTALL):
            self.tables[name] = [" ".join(line.split()).removesuffix(";") for line in body.splitlines() if line.strip()]
        return CompletedProcess(arguments, 0, "", "")


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    kernel = FakeKernel()
    monkeypatch.setattr(nft, "_nft", kernel.nft)
    return kernel


def test_an_unchanged_table_has_no_drift(kernel: FakeKernel) -> None:
    props = {"table": TABLE, "rules": RULES}
    assert firewall.read(TABLE, props) is None
    firewall.create(props)
    assert firewall.read(TABLE, props) == props
    assert list(kernel.tables) == [TABLE], "the comparison leaves no table"
    firewall.delete(TABLE, props)
    firewall.delete(TABLE, props)
    assert firewall.read(TABLE, props) is None


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda lines: lines.remove("counter drop"), ["- counter drop"]),
        (lambda lines: lines.insert(-1, "ip protocol udp accept"), ["+ ip protocol udp accept"]),
        (lambda lines: lines.insert(0, "flags dormant"), ["+ flags dormant"]),
        (
            lambda lines: lines.__setitem__(lines.index("ether type != ip drop"), "ether type != ip accept"),
            ["- ether type != ip drop", "+ ether type != ip accept"],
        ),
    ],
)
def test_a_changed_table_is_a_drift_that_up_fixes(kernel: FakeKernel, change: object, expected: list[str]) -> None:
    props = {"table": TABLE, "rules": RULES}
    firewall.create(props)
    change(kernel.tables[TABLE])  # type: ignore[operator]
    assert nft.differences(TABLE, RULES) == expected
    drifted = firewall.read(TABLE, props)
    assert drifted["rules"] != RULES
    assert ModuleProvider(firewall.__name__).update(TABLE, drifted, props).outs == props
    assert nft.differences(TABLE, RULES) == []


def test_the_table_of_another_stack_is_ignored(kernel: FakeKernel) -> None:
    firewall.create({"table": TABLE, "rules": RULES})
    kernel.tables["scaletier_123456"] = ["counter accept"]
    assert nft.differences(TABLE, RULES) == []


def test_a_refusal_of_nft_is_one_line(kernel: FakeKernel) -> None:
    with pytest.raises(LxdError, match=r"^nft refused the firewall: stdin:1:1: Error: syntax error oops"):
        nft.load("oops")
    firewall.create({"table": TABLE, "rules": RULES})
    with pytest.raises(LxdError, match="nft refused"):
        firewall.read(TABLE, {"table": TABLE, "rules": f"{RULES}oops"})
    assert list(kernel.tables) == [TABLE]


LINES = st.lists(st.sampled_from(["a", "b", "- a", "? b", "counter drop"]), max_size=8)


@given(LINES, LINES)
def test_the_differences_of_two_tables_are_complete(expected: list[str], actual: list[str]) -> None:
    changes = nft.diff_lines(expected, actual)
    assert (changes == []) is (expected == actual)
    removed, added = ([line[2:] for line in changes if line.startswith(sign)] for sign in ("- ", "+ "))
    assert len(expected) - len(removed) == len(actual) - len(added)
    assert sorted([*expected, *added]) == sorted([*actual, *removed])


class Programs:
    """Replace the programs that nft.py starts: each call is recorded, and gets the next result."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: bool, path: str | None = "/opt/nft") -> None:
        self.commands: list[list[str]] = []
        self.scripts: list[str | None] = []
        self.results: list[tuple[int, str, str]] = []
        monkeypatch.setattr(nft.shutil, "which", lambda _: path)
        monkeypatch.setattr(nft.os, "geteuid", lambda: 0 if root else 1000)
        monkeypatch.setattr(nft.subprocess, "run", self.run)

    def run(self, command: list[str], **options: Any) -> CompletedProcess[str]:
        self.scripts.append(options.pop("input"))
        assert options == {"capture_output": True, "text": True, "check": False}
        self.commands.append(command)
        code, out, err = self.results.pop(0)
        return CompletedProcess(command, code, out, err)


@pytest.mark.parametrize(("path", "root"), [("/opt/bin/nft", True), (None, False)])
def test_nft_of_path_or_usr_sbin_runs_as_root(monkeypatch: pytest.MonkeyPatch, path: str | None, root: bool) -> None:
    programs = Programs(monkeypatch, root, path)
    programs.results = [
        (0, "nftables v1.0.6 (Lester Gooch #5)\n", ""),
        (0, "table bridge scaletier_abcdef\ntable bridge other\n", ""),
        (0, "chains", ""),
        (1, "chains", ""),
        (0, "rules", ""),
        (1, "rules", "Error: No such file or directory\nlist table bridge t\n"),
        (0, "", ""),
        (1, "", "stdin:1:1: Error: syntax error\n^^^\nx"),
        (1, "", "sudo: a password is required\n"),
        (1, "", "sudo: a password is required\n"),
    ]
    assert nft.version() == "nftables v1.0.6"
    assert nft.tables() == ["scaletier_abcdef", "other"]
    assert [nft.list_chains(), nft.list_chains()] == ["chains", ""]
    assert [nft.list_table("t"), nft.list_table("t")] == ["rules", None]
    nft.remove("t")
    reason = "sudo: a password is required (the firewall needs root: run as root, or allow `sudo nft` without a password)"
    for call, message in (
        (nft.load, "nft refused the firewall: stdin:1:1: Error: syntax error"),
        (nft.load, f"nft refused the firewall: {reason}"),
        (nft.list_table, f"the firewall cannot be read: {reason}"),
    ):
        with pytest.raises(LxdError) as refused:
            call("t")
        assert str(refused.value) == message
    words = [
        ["--version"],
        ["list", "tables", "bridge"],
        *[["--json", "list", "chains"]] * 2,
        *[["--stateless", "list", "table", "bridge", "t"]] * 2,
        *[["-f", "-"]] * 3,
        ["--stateless", "list", "table", "bridge", "t"],
    ]
    assert programs.commands == [[*([] if root else ["sudo", "-n"]), path or "/usr/sbin/nft", *each] for each in words]
    assert programs.scripts == [*[None] * 6, "table bridge t\ndelete table bridge t\n", "t", "t", None]


def test_a_missing_program_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nft.os, "geteuid", lambda: 0)
    monkeypatch.setattr(nft.shutil, "which", lambda _: "/no/such/nft")
    with pytest.raises(LxdError, match=r"^/no/such/nft is missing: install it with `make lxd`$"):
        nft.version()


def test_the_rules_of_a_sleeping_copy_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy has another name and sleeps, and is removed whatever happens."""
    programs = Programs(monkeypatch, root=True)
    opening = f"table bridge {TABLE} {{\n"
    loaded = f"{opening}\tcounter drop\n\tip saddr 10.0.0.1 accept\n}}\n"

    def run(command: list[str], **options: Any) -> CompletedProcess[str]:
        if "dormant" in command[-1]:
            copy = loaded.replace(TABLE, command[-1]).replace("{\n", "{\n\tflags dormant\n", 1)
            programs.results.insert(0, (0, copy.replace("\tip saddr 10.0.0.1 accept\n", ""), ""))
        else:
            programs.results.insert(0, (0, loaded, ""))
        return programs.run(command, **options)

    monkeypatch.setattr(nft.subprocess, "run", run)
    script = f"table bridge {TABLE}\ndelete table bridge {TABLE}\n{opening}\tcounter drop\n}}\n"
    assert nft.differences(TABLE, script) == ["+ ip saddr 10.0.0.1 accept"]
    dormant = programs.commands[2][-1]
    assert re.fullmatch(rf"{TABLE}_dormant_\d+_\d+", dormant)
    _, load, _, removal = programs.scripts
    copy = f"table bridge {dormant}\ndelete table bridge {dormant}\n"
    assert load == f"{copy}table bridge {dormant} {{\n\tflags dormant;\n\tcounter drop\n}}\n"
    assert removal == copy
