"""The doctor's checks: run side by side, within the time limit, through any failure."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.findings import Finding, Severity, fail, look, ok, warning

TEXT = st.text(max_size=20)


@given(st.builds(Finding, st.sampled_from(Severity), TEXT, TEXT, check=TEXT, fixed=st.booleans()))
def test_a_finding_comes_back_from_json(finding: Finding) -> None:
    assert Finding.from_dict(json.loads(json.dumps(finding.to_dict()))) == finding


@pytest.mark.parametrize("data", [{}, {"check": "a", "severity": "worse", "what": "b", "remedy": None, "fixed": False}])
def test_what_is_no_finding_is_refused(data: dict[str, object]) -> None:
    with pytest.raises((KeyError, ValueError)):
        Finding.from_dict(data)


def test_every_check_says_what_it_finds_and_one_that_fails_takes_none_down() -> None:
    def dies() -> Iterator[Finding]:
        yield ok("before")
        raise RuntimeError("the daemon\nis gone")

    found = {(each.check, each.severity, each.what) for each in look({"a": lambda: [ok("well")], "b": dies}, 30)}
    assert found == {
        ("a", Severity.OK, "well"),
        ("b", Severity.OK, "before"),
        ("b", Severity.ERROR, "the daemon is gone"),
    }


def test_a_check_that_hangs_is_named_and_what_it_had_found_is_told() -> None:
    free = threading.Event()

    def hangs() -> Iterator[Finding]:
        yield warning("half")
        free.wait()

    try:
        found = [(each.check, each.what) for each in look({"hangs": hangs, "b": lambda: [ok("well")]}, 0.5)]
    finally:
        free.set()
    assert sorted(found) == [("b", "well"), ("hangs", "half"), ("hangs", "no answer within 0 s")]


def test_only_with_fix_is_anything_mended() -> None:
    done: list[str] = []

    def fails() -> None:
        raise OSError("not allowed")

    checks = {"a": lambda: [fail("off", "pulumi up", lambda: done.append("on")), fail("gone"), fail("x", fix=fails)]}
    assert [(each.what, each.fixed) for each in look(checks, 30)] == [("off", False), ("gone", False), ("x", False)]
    assert done == []
    assert [(each.what, each.fixed) for each in look(checks, 30, fix=True)] == [
        ("off", True),
        ("gone", False),
        ("x (and cannot be fixed: not allowed)", False),
    ]
    assert done == ["on"]


def test_who_says_whose_finding_it_is_keeps_that() -> None:
    told = Finding(Severity.OK, "well", check="firewall")
    assert list(look({"infra": lambda: [told]}, 30)) == [told]
