"""Findings of the doctor's checks. The checks run in parallel, with a time limit; their errors are caught."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    """The severity of a finding; a warning is about a problem that breaks nothing yet."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    `remedy` is the command that fixes a problem. `fix` is a function that does the same; it is None if there is none, or if
    the command could delete something. `fix_error` is the reason why a fix failed.
    """

    severity: Severity
    what: str
    remedy: str = ""
    fix: Callable[[], object] | None = field(default=None, compare=False)
    check: str = ""
    fixed: bool = False
    fix_error: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the finding in the form of its JSON."""
        data = {"check": self.check, "severity": str(self.severity), "what": self.what}
        return {**data, "remedy": self.remedy or None, "fixed": self.fixed, "fixError": self.fix_error or None}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Finding:
        """Return the finding of a `to_dict`; ValueError, KeyError or TypeError if it is not one."""
        remedy, fixed = str(data["remedy"] or ""), bool(data["fixed"])
        check, fix_error = str(data["check"]), str(data["fixError"] or "")
        return cls(Severity(data["severity"]), str(data["what"]), remedy, None, check, fixed, fix_error)


Check = Callable[[], Iterable[Finding]]


def ok(what: str) -> Finding:
    """Return a finding that all is well."""
    return Finding(Severity.OK, what)


def warning(what: str, remedy: str = "", fix: Callable[[], object] | None = None) -> Finding:
    """Return a finding that needs attention."""
    return Finding(Severity.WARNING, what, remedy, fix)


def fail(what: str, remedy: str = "", fix: Callable[[], object] | None = None) -> Finding:
    """Return a finding about an error."""
    return Finding(Severity.ERROR, what, remedy, fix)


def run_checks(checks: Mapping[str, Check], seconds: float, fix: bool = False) -> Iterator[Finding]:
    """Yield findings as they come, each with its check's name; with `fix`, apply safe remedies.

    The error of a check that raises is a finding too. So is each check that exceeds `seconds`; its thread keeps running.
    """
    results: queue.SimpleQueue[tuple[str, Finding | None]] = queue.SimpleQueue()

    def run(name: str, check: Check) -> None:
        try:
            for each in check():
                results.put((name, _apply_fix(each) if fix and each.fix else each))
        except Exception as error:  # noqa: BLE001  an error of a check is a finding
            results.put((name, fail(one_line(error))))
        finally:
            results.put((name, None))

    for name, check in checks.items():
        threading.Thread(target=run, args=(name, check), name=name, daemon=True).start()
    running, deadline = dict.fromkeys(checks), time.monotonic() + seconds
    while running:
        try:
            name, finding = results.get(timeout=max(deadline - time.monotonic(), 0))
        except queue.Empty:
            yield from (replace(fail(f"no answer within {seconds:.0f} s"), check=name) for name in running)
            return
        if finding is None:
            del running[name]
        else:
            yield finding if finding.check else replace(finding, check=name)


def _apply_fix(finding: Finding) -> Finding:
    assert finding.fix
    try:
        finding.fix()
    except Exception as error:  # noqa: BLE001  the problem remains, and the finding says so
        return replace(finding, fix_error=one_line(error))
    return replace(finding, fixed=True)


def one_line(error: BaseException) -> str:
    """Return an error's message on one line."""
    return " ".join(str(error).split()) or type(error).__name__
