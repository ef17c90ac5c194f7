"""What a check of the doctor finds, and how checks are run: side by side, within a time limit, and none to its traceback."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    """How bad it is: with a warning all goes on for now."""

    OK = "ok"
    WARNING = "warning"
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """One line: how bad, what it is, and the command that mends it. `fix` does so at once, where that takes nothing away."""

    severity: Severity
    what: str
    mend: str = ""
    fix: Callable[[], object] | None = field(default=None, compare=False, repr=False)
    check: str = ""
    mended: bool = False

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        said = {"check": self.check, "severity": str(self.severity), "what": self.what}
        return {**said, "mend": self.mend or None, "mended": self.mended}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Finding:
        """As `to_dict` made it; ValueError, KeyError or TypeError for anything else."""
        mend, mended = str(data["mend"] or ""), bool(data["mended"])
        return cls(Severity(data["severity"]), str(data["what"]), mend, None, str(data["check"]), mended)


Check = Callable[[], Iterable[Finding]]


def ok(what: str) -> Finding:
    """All is well."""
    return Finding(Severity.OK, what)


def warning(what: str, mend: str = "", fix: Callable[[], object] | None = None) -> Finding:
    """Something to look at."""
    return Finding(Severity.WARNING, what, mend, fix)


def broken(what: str, mend: str = "", fix: Callable[[], object] | None = None) -> Finding:
    """Something that does not work."""
    return Finding(Severity.BROKEN, what, mend, fix)


def look(checks: Mapping[str, Check], seconds: float, fix: bool = False) -> Iterator[Finding]:
    """What the checks find, in the order in which they find it, each with its check's name; with `fix` what is safe is mended.

    A check that fails, or takes longer than `seconds`, is a finding too; its thread is left behind.
    """
    found: queue.SimpleQueue[tuple[str, Finding | None]] = queue.SimpleQueue()

    def run(name: str, check: Check) -> None:
        try:
            for each in check():
                found.put((name, _mended(each) if fix and each.fix else each))
        except Exception as error:  # noqa: BLE001  what a check dies of is what it found
            found.put((name, broken(said(error))))
        finally:
            found.put((name, None))

    for name, check in checks.items():
        threading.Thread(target=run, args=(name, check), name=name, daemon=True).start()
    running, deadline = dict.fromkeys(checks), time.monotonic() + seconds
    while running:
        try:
            name, finding = found.get(timeout=max(deadline - time.monotonic(), 0))
        except queue.Empty:
            yield from (replace(broken(f"no answer within {seconds:.0f} s"), check=name) for name in running)
            return
        if finding is None:
            del running[name]
        else:
            yield finding if finding.check else replace(finding, check=name)


def _mended(finding: Finding) -> Finding:
    assert finding.fix
    try:
        finding.fix()
    except Exception as error:  # noqa: BLE001  it stays as it is, and that is said
        return replace(finding, what=f"{finding.what} (and cannot be mended: {said(error)})")
    return replace(finding, mended=True)


def said(error: BaseException) -> str:
    """An error on one line."""
    return " ".join(str(error).split()) or type(error).__name__
