"""The first error that a trainer prints: often the cause of all that follows."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

ERROR_SEVERITIES = frozenset({"ERROR", "CRITICAL"})
LONGEST = 500
TRACEBACK = re.compile(r"(?:  \+ Exception Group )?Traceback \(most recent call last\):")
# Exceptions of TensorFlow and Keras that only name a place: the error follows, as an indented exception or as the next text.
_IN_USER_CODE = re.compile(r"\s*(?:[\w.]+: )?in user code:$")
_CALLING = re.compile(r"\s*[\w.]+: Exception encountered when calling .*\.$")
_INDENTED_EXCEPTION = re.compile(r" {4,}[A-Z][\w.]*: ")
_TEXT = re.compile(r"\s*\S")
_IN_GROUP = "  | "  # begins each line of an exception group's traceback
_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")
_RANK = re.compile(r"\[rank\d+\]: ?")


@dataclass(frozen=True)
class FirstError:
    """A line that a replica printed: RFC 3339 time in UTC, and at most LONGEST characters."""

    time: str
    message: str


class ErrorFinder:
    """Finds, among the lines of one trainer, the first message of severity ERROR or above.

    `error` is the first line of that message. If it has a traceback, `error` is the traceback's last line, which names the
    exception; if the exception only names the place where it was raised, `error` is the line that says what is wrong.
    """

    def __init__(self) -> None:
        self.error: FirstError | None = None
        self._message: tuple[object, str] | None = None
        self._ended = self._in_traceback = False
        self._follows: re.Pattern[str] | None = None

    def add_line(self, time: object, severity: str, text: str, log_time: str) -> bool:
        """Read one more line; return True if `error` now has this line, unless the error is a later line, as in a traceback.

        Args:
            time: consecutive lines of the same time and severity are one message.
            log_time: the time as a log shows it.
        """
        if self._ended or (self._message is None and severity not in ERROR_SEVERITIES):
            return False
        if self._message is not None and self._message != (time, severity):
            self._ended = True
            return False
        first, bare = self._message is None, strip_rank(text)
        if self._in_traceback and bare.startswith(_IN_GROUP):
            text = bare = bare.removeprefix(_IN_GROUP)
        self._message = (time, severity)
        traceback = TRACEBACK.match(bare) is not None
        last = self._in_traceback and not traceback and not is_continuation(bare)
        self._in_traceback = traceback or (self._in_traceback and not last)
        if self._follows and self._follows.match(bare):
            last = True
        if not first and not last:
            return False
        self._follows = _INDENTED_EXCEPTION if _IN_USER_CODE.match(bare) else _TEXT if _CALLING.match(bare) else None
        self.error = FirstError(log_time, recorded_text(text))
        return not traceback and self._follows is None


def earliest(first_errors: Iterable[tuple[str, FirstError | None]]) -> tuple[str, FirstError] | None:
    """Return the replica with the earliest first error, and that error, or None if no replica has one."""
    errors = [(error.time, name, error) for name, error in first_errors if error]
    if not errors:
        return None
    _, name, error = min(errors, key=lambda each: each[:2])
    return name, error


def recorded_text(text: str) -> str:
    """Return a line as a record has it: without colours, which Keras prints into files too, and at most LONGEST characters."""
    return _COLOURS.sub("", text).strip()[:LONGEST].strip()


def strip_rank(text: str) -> str:
    """Return a line without the rank that PyTorch puts in front of each line of a traceback: `[rank1]: `."""
    return _RANK.sub("", text, count=1) if text.startswith("[rank") else text


def is_continuation(text: str) -> bool:
    """Return True if a line looks like a continuation of the previous one."""
    return not text or text[0].isspace()
