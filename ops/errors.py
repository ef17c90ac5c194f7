"""Errors for users: each is one line with the problem and the remedy, and carries its exit code."""

from __future__ import annotations

from collections.abc import Mapping

DONE, FAILED, WRONG_CALL, DETACHED = 0, 1, 2, 130
"""Exit codes; after Ctrl-C `fab` is DETACHED, and the job continues."""


class OpsError(Exception):
    """The job or the operation failed; exit code 1."""

    code = FAILED


class UsageError(OpsError):
    """The arguments or the user's files are invalid, and nothing was changed; exit code 2."""

    code = WRONG_CALL


class HostError(OpsError):
    """One host failed; `exit_code` and `output` are set if a command ran."""

    def __init__(self, host: str, why: str, exit_code: int | None = None, output: str = "") -> None:
        self.host, self.why, self.exit_code, self.output = host, why, exit_code, output

    def __str__(self) -> str:
        last_lines = self.output.strip().splitlines()[-1:]
        return f"{self.host} {self.why}" + "".join(f": {line}" for line in last_lines)


class SeveralHostsError(OpsError):
    """Several hosts failed at once; the message has the failure of each."""

    def __init__(self, failures: Mapping[str, BaseException], advice: str = "", code: int = FAILED) -> None:
        self.failures, self.advice, self.code = dict(failures), advice, code

    def __str__(self) -> str:
        failures = "; ".join(str(e) if isinstance(e, HostError) else f"{name} {e}" for name, e in self.failures.items())
        return f"{failures}: {self.advice}" if self.advice else failures


def one_line(error: BaseException) -> str:
    """Return the message of any error on one line."""
    text = " ".join(str(error).split())
    return text or type(error).__name__


def explain(error: BaseException) -> tuple[str, int]:
    """Return the message, in one line, and the exit code for an error of any library."""
    from infra.scale_tiers import SpecError
    from jobs.bucket import BucketError, Conflict, with_remedy
    from jobs.serialization import RecordError

    if isinstance(error, OpsError):
        return one_line(error), error.code
    if isinstance(error, SpecError):
        return one_line(error), WRONG_CALL
    cause = error.__cause__ if isinstance(error, BucketError) else error
    if type(cause).__module__.startswith("google.auth"):
        return f"no Google credentials ({one_line(cause or error)}): run `gcloud auth application-default login`", FAILED
    module = type(error).__module__.partition(".")[0]
    if module in ("paramiko", "fabric", "invoke") or isinstance(error, (EOFError, ConnectionError, TimeoutError)):
        return f"the connection failed ({one_line(error)}): try again, then pulumi up", FAILED
    if isinstance(error, BucketError):
        return f"the bucket fails: {with_remedy(error.strerror or one_line(error))}", FAILED
    if isinstance(error, RecordError):
        return f"a record in the bucket cannot be read: {one_line(error)}", FAILED
    if isinstance(error, Conflict):
        return f"{one_line(error)} again and again: try again", FAILED
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or one_line(error)}", FAILED
    return f"this is a bug of scaletier, {type(error).__name__}: {one_line(error)} (SCALETIER_DEBUG=1 shows where)", FAILED
