"""The first error among a trainer's lines and among trainers, and its mark in the logs."""

from __future__ import annotations

import traceback

import pytest

from hosts.agent.lines import Messages
from jobs.firsterror import LONGEST, ErrorFinder, FirstError, earliest, is_continuation
from ops.logs.lines import FIRST_ERROR_MARK, LineFormatter, LogLine
from ops.screen.logs import FirstErrorDetector

TRACE = ["Traceback (most recent call last):", '  File "x.py", line 1, in f', "    f()", "ValueError: bad shape"]
LAYER = [
    "AttributeError: Exception encountered when calling M.call().",
    "",
    "\x1b[1mno attribute 'x'\x1b[0m",
    "",
    "Arguments received by M.call():",
]
KERAS = [*TRACE[:3], *LAYER]
USER_CODE = ['    File "x.py", line 1, in f', "        f(x)", '    File "y.py", line 2, in g', "        raise E", ""]
IN_USER_CODE = [*TRACE[:3], "ValueError: in user code:", "", *USER_CODE]
CHAINED = [*TRACE, "", "The above exception was the direct cause of the following exception:", "", *TRACE[:3], "KeyError: 'x'"]


def lines(*texts: str, replica: str = "ps-0") -> list[LogLine]:
    """Return a replica's lines; each `pause` between them is five seconds."""
    messages, now, log_lines = Messages(), 100.0, []
    for text in texts:
        if text == "pause":
            now += 5
            continue
        entry = messages.add(text, now)
        log_lines.append(LogLine(f"{entry.time:07.1f}", entry.severity, replica, text))
    return log_lines


def first_error_of(*texts: str) -> FirstError | None:
    finder = ErrorFinder()
    for line in lines(*texts):
        finder.add_line(line.time, line.severity, line.message, line.time)
    return finder.error


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["INFO:root:x", "WARNING:root:y"], None),
        (["INFO:root:x", "ERROR:root:y", "ERROR:root:z"], "ERROR:root:y"),
        (["CRITICAL:root:y", "  more of it"], "CRITICAL:root:y"),
        (["INFO:root:x", *TRACE, "pause", "ERROR:root:z"], "ValueError: bad shape"),
        ([*TRACE[:2]], TRACE[0]),
        (CHAINED, "KeyError: 'x'"),
        (["ERROR:root:it failed", *TRACE, "INFO:root:x", *CHAINED], "ValueError: bad shape"),
        (["step 1", *(f"[rank1]: {line}" if line else "" for line in CHAINED)], "[rank1]: KeyError: 'x'"),
        (["ERROR:root:it failed", "pause", *TRACE], "ERROR:root:it failed"),
        (KERAS, "no attribute 'x'"),
        (KERAS[:4], LAYER[0]),
        ([*IN_USER_CODE, "    ValueError: bad shape", ""], "ValueError: bad shape"),
        ([*IN_USER_CODE, *(f"    {line}" for line in LAYER)], "no attribute 'x'"),
        (IN_USER_CODE, "ValueError: in user code:"),
        (["ERROR:root:" + "x" * 900], "ERROR:root:" + "x" * (LONGEST - 11)),
        (["ERROR:root:" + "x" * (LONGEST - 12) + " more"], "ERROR:root:" + "x" * (LONGEST - 12)),
    ],
)
def test_the_first_error(texts: list[str], expected: str | None) -> None:
    error = first_error_of(*texts)
    assert (error and error.message) == expected


@pytest.mark.parametrize("prefix", ["", "[rank1]: "])
def test_an_exception_group_is_named(prefix: str) -> None:
    try:
        try:
            raise ValueError("bad shape")
        except ValueError as error:
            raise ExceptionGroup("two tasks", [error, ExceptionGroup("more", [KeyError("x")])]) from None
    except ExceptionGroup as group:
        texts = [prefix + line for line in "".join(traceback.format_exception(group)).splitlines()]
    assert texts[0].startswith(f"{prefix}  + Exception Group Traceback")
    error = first_error_of(*texts)
    assert (error and error.message) == "ExceptionGroup: two tasks (2 sub-exceptions)"


@pytest.mark.parametrize(
    ("text", "expected"), [("", True), (" ", True), (" x", True), ("\tx", True), ("x", False), ("x y", False), ("x ", False)]
)
def test_a_continuation_is_indented_or_empty(text: str, expected: bool) -> None:
    assert is_continuation(text) is expected


def test_the_lines_that_belong_to_the_first_error() -> None:
    finder, results = ErrorFinder(), list[tuple[bool, str | None]]()
    message = ["it failed", *TRACE, "more", "Traceback (most recent call last):", "KeyError: 'x'"]
    for severity, text in [("INFO", "before"), *(("ERROR", line) for line in message), ("INFO", "after"), ("ERROR", "again")]:
        belongs = finder.add_line(7, severity, text, "shown")
        results.append((belongs, finder.error.message if finder.error else None))
    assert results == [
        (False, None),
        (True, "it failed"),
        *[(False, "it failed")] * 3,
        (True, "ValueError: bad shape"),
        *[(False, "ValueError: bad shape")] * 2,
        *[(True, "KeyError: 'x'"), (False, "KeyError: 'x'"), (False, "KeyError: 'x'")],
    ]
    assert finder.error == FirstError("shown", "KeyError: 'x'")
    assert ErrorFinder().add_line(7, "CRITICAL", TRACE[0], "shown") is False, "its last line is the error"


def test_the_earliest_error_of_several_replicas() -> None:
    late, early = FirstError("2", "late"), FirstError("1", "early")
    assert earliest([("a", late), ("b", None), ("c", early)]) == ("c", early)
    assert earliest([("a", None)]) is None
    assert earliest([("b", early), ("a", early)]) == ("a", early)


def test_the_first_error_s_line_is_marked_once() -> None:
    log_lines = [*lines("INFO:root:x", "job FAILED"), *lines("pause", *TRACE, replica="ps-1"), *lines("pause", "ERROR:root:y")]
    known = FirstErrorDetector(("ps-1", FirstError("00105.0", "ValueError: bad shape")))
    assert [line.message for line in [*log_lines, *log_lines] if known(line)] == ["ValueError: bad shape"]
    following = FirstErrorDetector(None, live=True)
    log_lines[1] = LogLine(log_lines[1].time, "ERROR", "ps-0", "job FAILED")
    assert [line.message for line in [*log_lines, *log_lines] if following(line)] == ["ValueError: bad shape"]
    assert not any(map(FirstErrorDetector(None), log_lines))
    of_the_agent = (LogLine("00100.0", "ERROR", "ps-0", text) for text in ("job FAILED", "trainer exited with status 1"))
    assert not any(map(FirstErrorDetector(None, live=True), of_the_agent))


def test_the_mark_in_text_and_json() -> None:
    line = LogLine("2026-01-31T12:00:01.500Z", "ERROR", "ps-0", "bad")
    assert LineFormatter(["ps-0"], colours=False)(line, first_error=True).endswith(f"bad{FIRST_ERROR_MARK}")
    assert line.to_json(first_error=True).endswith(', "message": "bad", "firstError": true}')
    assert "firstError" not in line.to_json()
