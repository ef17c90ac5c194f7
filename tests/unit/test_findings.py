"""The doctor's checks: run in parallel, within the time limit, despite failures."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.findings import Finding, Severity, fail, ok, one_line, run_checks, warning

TEXT = st.text(max_size=20)


@given(st.builds(Finding, st.sampled_from(Severity), TEXT, TEXT, check=TEXT, fixed=st.booleans(), fix_error=TEXT))
def test_a_finding_survives_json(finding: Finding) -> None:
    assert Finding.from_dict(json.loads(json.dumps(finding.to_dict()))) == finding


@pytest.mark.parametrize("data", [{}, {"check": "a", "severity": "worse", "what": "b", "remedy": None, "fixed": False}])
def test_invalid_findings_are_refused(data: dict[str, object]) -> None:
    with pytest.raises((KeyError, ValueError)):
        Finding.from_dict(data)


def test_a_failed_check_does_not_affect_the_others() -> None:
    def fails() -> Iterator[Finding]:
        yield ok("before")
        raise RuntimeError("the daemon\nis gone")

    findings = {(each.check, each.severity, each.what) for each in run_checks({"a": lambda: [ok("well")], "b": fails}, 30)}
    assert findings == {("a", Severity.OK, "well"), ("b", Severity.OK, "before"), ("b", Severity.ERROR, "the daemon is gone")}


def test_a_hanging_check_is_named_and_its_findings_are_kept() -> None:
    released = threading.Event()

    def hangs() -> Iterator[Finding]:
        yield warning("half")
        released.wait()

    try:
        findings = [(each.check, each.what) for each in run_checks({"hangs": hangs, "b": lambda: [ok("well")]}, 0.5)]
        (thread,) = [thread for thread in threading.enumerate() if thread.name == "hangs"]
        assert thread.daemon, "the program ends without it"
    finally:
        released.set()
    assert sorted(findings) == [("b", "well"), ("hangs", "half"), ("hangs", "no answer within 0 s")]


def test_errors_are_fixed_only_with_fix() -> None:
    done: list[str] = []

    def fails() -> None:
        raise OSError("not allowed")

    checks = {"a": lambda: [fail("off", "pulumi up", lambda: done.append("on")), fail("gone"), fail("x", fix=fails)]}
    assert [(each.what, each.fixed) for each in run_checks(checks, 30)] == [("off", False), ("gone", False), ("x", False)]
    assert done == []
    assert [(each.what, each.fixed, each.fix_error) for each in run_checks(checks, 30, fix=True)] == [
        ("off", True, ""),
        ("gone", False, ""),
        ("x", False, "not allowed"),
    ]
    assert done == ["on"]


def test_a_finding_keeps_its_own_check_name() -> None:
    finding = Finding(Severity.OK, "well", check="firewall")
    assert list(run_checks({"infra": lambda: [finding]}, 30)) == [finding]


def test_an_error_without_a_message_is_its_name() -> None:
    assert [one_line(error) for error in (ValueError("a\n b"), KeyError())] == ["a b", "KeyError"]
    nothing = {"remedy": None, "fixed": False, "fixError": None}
    assert ok("well").to_dict() == {"check": "", "severity": "ok", "what": "well", **nothing}
