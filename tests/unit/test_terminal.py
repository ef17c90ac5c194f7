"""Progress of slow operations: a redrawn line on a terminal, permanent lines elsewhere."""

from __future__ import annotations

import contextlib
import io
import re
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import wait_for

from ops import terminal
from ops.errors import UsageError


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
    with terminal.Step("connecting", always=True) as step:
        step.count = "3 of 8"
        wait_for(lambda: stderr.has("connecting 3 of 8 … 0 s\n" * 2), "two lines")
        step.count = "8 of 8"
    assert stderr.has("\nconnecting 8 of 8 (0.0 s)\n")


def test_on_a_terminal_progress_is_one_line_that_is_erased(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(terminal, "supports_colour", lambda _: True)
    stderr = Stderr(capsys)
    with terminal.Step("connecting"):
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


def test_a_quick_operation_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.Step("connecting"):
        pass
    assert capsys.readouterr().err == ""


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
