"""Errors for users: each is one line with the problem and the remedy, and carries its exit code."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

DONE, FAILED, WRONG_CALL, DETACHED = 0, 1, 2, 130


class OpsError(Exception):
    """The job or the operation failed; exit code 1."""

    code = FAILED


class UsageError(OpsError):
    """The call was wrong, and nothing was changed; exit code 2."""

    code = WRONG_CALL


class HostError(OpsError):
    """One host did not do what it was asked; `exited` and `output` are there where a command ran."""

    def __init__(self, host: str, why: str, exited: int | None = None, output: str = "") -> None:
        self.host, self.why, self.exited, self.output = host, why, exited, output
        super().__init__(host, why, exited, output)

    def __str__(self) -> str:
        last = self.output.strip().splitlines()[-1:]
        return f"{self.host} {self.why}" + "".join(f": {line}" for line in last)


class HostsError(OpsError):
    """Several hosts failed at once; every one of them is named."""

    def __init__(self, failures: Mapping[str, BaseException], advice: str = "", code: int = FAILED) -> None:
        self.failures, self.advice, self.code = dict(failures), advice, code
        super().__init__(self.failures, advice)

    def __str__(self) -> str:
        failures = "; ".join(str(e) if isinstance(e, HostError) else f"{name} {e}" for name, e in self.failures.items())
        return f"{failures}: {self.advice}" if self.advice else failures


def meant(word: str, valid: Iterable[str], likeness: float = 0.6) -> str:
    """Return `; did you mean worker-0?`, to append to an error; empty if no valid word is similar.

    `likeness` is the least similarity that counts, from 0 to 1 (difflib).
    """
    alike = difflib.get_close_matches(word, list(valid), n=1, cutoff=likeness)
    return f"; did you mean {alike[0]}?" if alike else ""


def one_line(error: BaseException) -> str:
    """Return the message of any error on one line."""
    text = " ".join(str(error).split())
    return text or type(error).__name__
