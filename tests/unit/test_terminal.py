"""Progress of slow operations: a redrawn line on a terminal, permanent lines elsewhere."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import wait_for

from ops import terminal
from ops.errors import UsageError

FIRST_SECONDS = terminal._FIRST_SECONDS  # as it is outside of tests


class Stderr:
    """The text written to stderr so far."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys, self.text = capsys, ""

    def has(self, text: str) -> bool:
        self.text += self._capsys.readouterr().err
        return text in self.text


def test_without_a_terminal_progress_is_printed_at_intervals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "_FIRST_SECONDS", 0.05)
    monkeypatch.setattr(terminal, "_AGAIN_SECONDS", 0.1)
    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=lambda: 100.0))
    stderr = Stderr(capsys)
    with terminal.ProgressLine("connecting", always=True) as step:
        step.detail = "3 of 8"
        wait_for(lambda: stderr.has("connecting 3 of 8 … 0 s\n" * 2), "two lines")
        step.detail = "8 of 8"
    assert stderr.has("\nconnecting 8 of 8 (0.0 s)\n")


def test_on_a_terminal_progress_is_one_line_that_is_erased(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(terminal, "supports_colour", lambda _: True)
    stderr = Stderr(capsys)
    with terminal.ProgressLine("connecting"):
        now[0] += 1.5
        wait_for(lambda: stderr.has("\r\033[Kconnecting … 2 s"), "a line that is drawn")
    assert stderr.has("")
    assert stderr.text.endswith("\r\033[K")


@pytest.mark.parametrize(("answer", "sure"), [("y", True), (" YES ", True), ("n", False), ("", False), ("yesterday", False)])
def test_confirmation_is_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: str, sure: bool
) -> None:
    stdin = Stream(True)
    monkeypatch.setattr("sys.stdin", stdin)
    stdin.write(f"{answer}\n")
    stdin.seek(0)
    with contextlib.nullcontext() if sure else pytest.raises(UsageError, match=r"^nothing was changed$"):
        terminal.confirm("delete job01")
    assert capsys.readouterr() == ("", "delete job01? [y/N] ")


def test_without_a_terminal_the_yes_flag_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", Stream(False))
    with pytest.raises(UsageError, match=r"^this would delete job01: say --yes, as there is no terminal to ask on$"):
        terminal.confirm("delete job01")
    assert capsys.readouterr() == ("", "")


class Stream(io.StringIO):
    """A stream that may be a terminal."""

    encoding = "utf-8"

    def __init__(self, terminal_: bool) -> None:
        super().__init__()
        self._terminal = terminal_

    def isatty(self) -> bool:
        return self._terminal


pieces = st.sampled_from(
    ["\x1b", "[", "31", ";", "m", "\x1b[31m", "\x1b[0m", "\x9b", "\r", "\n", "\t", "]0;x\x07", "\x7f", "\u202e"]
)


@given(st.lists(pieces | st.text(max_size=3)).map("".join), st.booleans())
def test_no_control_sequences_reach_a_terminal(text: str, is_terminal: bool) -> None:
    stream = Stream(is_terminal)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TERM", "xterm")
        patched.delenv("NO_COLOR", raising=False)
        terminal.write(stream, text)
    written = stream.getvalue()
    without = re.sub(r"\x1b\[[0-9;:]*m", "", written) if is_terminal else written
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", without)
    for line in written.split("\n"):
        colours = re.findall(r"\x1b\[[0-9;:]*m", line)
        assert not colours or (line.endswith("\x1b[0m") and is_terminal)


@pytest.mark.parametrize(
    ("text", "plain", "coloured"),
    [
        ("plain\té 漢", "plain\té 漢", "plain\té 漢"),
        ("\x1b[31mred", "red", "\x1b[31mred\x1b[0m"),
        ("\x1b[1;38:5:9mred\x1b[0m", "red", "\x1b[1;38:5:9mred\x1b[0m"),
        ("\x1b[31mred\x1b[0m", "red", "\x1b[31mred\x1b[0m"),
        ("\x1b[31mtwo\nlines", "two\nlines", "\x1b[31mtwo\x1b[0m\nlines"),
        ("\x1b[?1049h\x1b]0;X\x07", "␛[?1049h␛]0;X␇", "␛[?1049h␛]0;X␇"),
        ("\x1b]52;c;aGk=\x1b\\", "␛]52;c;aGk=␛\\", "␛]52;c;aGk=␛\\"),
        ("a\rb\x00\x7f\x9b2J\u2066", "a␍b␀␡\\x9b2J\\u2066", "a␍b␀␡\\x9b2J\\u2066"),
        ("half \x1b[3", "half ␛[3", "half ␛[3"),
    ],
)
def test_output_of_a_trainer_is_sanitized(text: str, plain: str, coloured: str) -> None:
    assert terminal.sanitize(text) == plain
    assert terminal.sanitize(text, colours=True) == coloured


@pytest.mark.parametrize(
    ("is_terminal", "environment", "supported"),
    [
        (True, {"TERM": "xterm"}, True),
        (True, {}, True),
        (True, {"TERM": "dumb"}, False),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (False, {"TERM": "xterm"}, False),
    ],
)
def test_colours_are_for_terminals_of_users_who_want_them(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, environment: dict[str, str], supported: bool
) -> None:
    for name in ("TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stream = Stream(is_terminal)
    assert terminal.supports_colour(stream) is supported
    assert terminal.paint("x", "red", stream) == ("\x1b[31mx\x1b[0m" if supported else "x")
    assert terminal.paint("x", None, stream) == "x"
    monkeypatch.setattr("sys.stdout", stream)
    assert terminal.state("RUNNING") == ("\x1b[34mRUNNING\x1b[0m" if supported else "RUNNING")
    assert terminal.state("QUEUED") == "QUEUED"


def test_notes_and_errors_have_colours_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stderr, stdout = Stream(True), Stream(False)
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setattr("sys.stdout", stdout)
    terminal.note("one")
    terminal.error("two")
    terminal.out("three")
    terminal.out()
    assert stderr.getvalue() == "\x1b[2mone\x1b[0m\n\x1b[31merror:\x1b[0m two\x1b[0m\n"
    assert stdout.getvalue() == "three\n\n"


class Flushed(io.TextIOWrapper):
    """A stream that reports what has left it."""

    def __init__(self, encoding: str) -> None:
        self.bytes = io.BytesIO()
        super().__init__(self.bytes, encoding)


def test_a_line_fits_its_stream_s_encoding_and_stderr_is_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr, stdout = Flushed("ascii"), Flushed("ascii")
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setattr("sys.stdout", stdout)
    terminal.out("é …")
    assert stdout.bytes.getvalue() == b"", "a long result is written in blocks"
    stdout.flush()
    assert stdout.bytes.getvalue() == b"? ?\n"
    terminal.note("é …")
    assert stderr.bytes.getvalue() == b"? ?\n"


def test_a_stream_without_an_encoding_gets_utf_8() -> None:
    terminal.write(stream := io.StringIO(), "é\udc80")
    assert stream.getvalue() == "é?\n"


def test_each_row_of_a_table_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.table(("FILE", "SIZE"), [("a\nb\t\r\x1b", "1 B"), ("é", "2 B")])
    assert capsys.readouterr().out == "FILE    SIZE\na␊b␉␍␛  1 B\né       2 B\n"


def test_a_table_has_numbers_to_the_right_and_states_in_colour(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heads, rows = ("NAME", "STATE", "N", "COST", "IP"), [("a", "RUNNING", 12, 0.5, "10.0.0.1"), ("longer", None, "", 10.25, "")]
    terminal.table(heads, rows)
    assert capsys.readouterr().out == (
        "NAME    STATE     N   COST  IP\na       RUNNING  12    0.5  10.0.0.1\nlonger  -         -  10.25  -\n"
    )
    terminal.table(("A", "LONG"), [(0, "x")])
    terminal.table(("A", "LONG"), [])
    assert capsys.readouterr().out == "A  LONG\n0  x\nA  LONG\n"
    monkeypatch.setattr(terminal, "supports_colour", lambda _: True)
    terminal.table(heads[:2], [rows[0][:2]])
    bold = "\x1b[1m{}\x1b[0m".format
    assert capsys.readouterr().out == f"{bold('NAME')}  {bold('STATE  ')}\na     \x1b[34mRUNNING\x1b[0m\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((0, "0.0 s"), (3.21, "3.2 s"), (59.9, "59.9 s"), (60, "1 min 0 s"), (92.4, "1 min 32 s")),
        *((3599, "59 min 59 s"), (3600, "1 h 0 min"), (7530, "2 h 5 min")),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert terminal.duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        *((0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (55_000_000, "55.0 MB"), (2.5e9, "2.5 GB")),
        *((999.9e9, "999.9 GB"), (1e12, "1.0 TB"), (12_345e12, "12345.0 TB")),
    ],
)
def test_sizes(count: float, text: str) -> None:
    assert terminal.size(count) == text


def test_dollars_have_four_places() -> None:
    assert [terminal.dollars(amount) for amount in (None, 0, 0.00361, 12)] == ["", "0.0000", "0.0036", "12.0000"]


def test_lists_and_counts() -> None:
    assert [terminal.plural(count, "host") for count in (0, 1, 2)] == ["0 hosts", "1 host", "2 hosts"]
    assert terminal.list_some([]) == ""
    assert terminal.list_some("abcde") == "a, b, c, d, e"
    assert terminal.list_some("abcdef") == "a, b, c, d, e and 1 more"
    assert terminal.list_some("ab", 7, separator="; ") == "a; b and 5 more"
    assert terminal.list_some("abc", 3, most=2) == "a, b and 1 more"
    assert terminal.list_some(["a\nb", "c\td"]) == "a␊b, c␉d"


def test_a_step_counts_items_and_bytes() -> None:
    step = terminal.ProgressLine("fetching")
    count = terminal.counter(step, 2)
    counts = []
    for _ in range(2):
        count(None)
        counts.append(step.detail)
    assert counts == ["1 of 2", "2 of 2"]
    more = terminal.byte_counter(step, 3_000)
    counts = []
    for _ in range(3):
        more(1_250)
        counts.append(step.detail)
    assert counts == ["1.2 kB of 3.0 kB", "2.5 kB of 3.0 kB", "3.0 kB of 3.0 kB"]


@pytest.mark.parametrize(("took", "always", "line"), [(1.9, False, ""), (2, False, "x (2.0 s)\n"), (0, True, "x (0.0 s)\n")])
def test_a_step_that_took_long_leaves_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], took: float, always: bool, line: str
) -> None:
    now = [100.0]
    monkeypatch.setattr(terminal, "_FIRST_SECONDS", FIRST_SECONDS)
    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with terminal.ProgressLine("x", always) as step:
        assert step._thread.daemon
        now[0] += took
    assert capsys.readouterr().err == line
    with contextlib.suppress(ValueError), terminal.ProgressLine("x", always):
        now[0] += took
        raise ValueError
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("live", "pauses"), [(True, [0.2, 0.2, 0.2]), (False, [2.0, 10.0, 10.0])])
def test_progress_is_drawn_often_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch, live: bool, pauses: list[float]) -> None:
    waits = list[float]()

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        return len(waits) == 3

    monkeypatch.setattr(terminal, "_FIRST_SECONDS", FIRST_SECONDS)
    monkeypatch.setattr(terminal, "supports_colour", lambda _: live)
    step = terminal.ProgressLine("x")
    step._ended = SimpleNamespace(wait=wait, set=lambda: None)  # type: ignore[assignment]
    with step:
        pass
    assert waits == pauses


def test_a_line_replaces_the_status_of_another_thread(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "supports_colour", lambda _: True)
    status = terminal.StatusLine()
    status.show("starting 2 hosts")
    terminal.write(sys.stderr, "worker-0 may not be started")
    status.clear()
    assert capsys.readouterr().err == "starting 2 hosts\r\033[Kworker-0 may not be started\n"


def test_a_moment_is_shown_in_the_time_zone_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "XXX-5:30")
    time.tzset()
    try:
        assert terminal.local_time("2026-01-31T12:00:00.123Z") == "2026-01-31 17:30:00"
    finally:
        monkeypatch.undo()
        time.tzset()
    assert terminal.local_time(None) == terminal.local_time("") == ""


@pytest.mark.parametrize("text", ["yesterday", "2026-13-01T00:00:00Z", "0001-01-01T00:00:00+14:00"])
def test_a_moment_that_is_none_is_shown_as_it_is(text: str) -> None:
    assert terminal.local_time(text) == text


@pytest.mark.parametrize(("rate", "text"), [(200.44, "200.4"), (9.0, "9.0"), (0.032279, "0.0323"), (0.0, "0")])
def test_a_low_rate_keeps_its_digits(rate: float, text: str) -> None:
    assert terminal.rate(rate) == text
