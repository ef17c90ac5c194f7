"""A trainer's bytes, split into lines with a time and a severity; TensorFlow's start-up messages are left out."""

from __future__ import annotations

import logging
import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replicahosts import Make

from hosts.agent import lines as lines_module
from hosts.agent.lines import LONGEST_LINE, Messages, Splitter, is_quiet, is_startup_message, severity_of


def split(*pieces: bytes, seconds: float = 0.0) -> list[str]:
    """Return the lines of pieces that arrive `seconds` after one another."""
    splitter = Splitter()
    lines = [line for n, piece in enumerate(pieces) for line in splitter.feed(piece, 10.0 + n * seconds)]
    return lines + list(splitter.end())


@given(st.lists(st.text(st.characters(exclude_characters="\b\r\n", exclude_categories=["Cs"]))), st.integers(1, 9))
def test_lines_survive_any_split_into_pieces(lines: list[str], size: int) -> None:
    data = "".join(f"{line}\n" for line in lines).encode()
    assert split(*(data[at : at + size] for at in range(0, len(data), size))) == lines


@given(st.lists(st.binary(max_size=40), max_size=8))
def test_any_bytes_are_lines(pieces: list[bytes]) -> None:
    for line in split(*pieces):
        assert "\n" not in line
        assert "\r" not in line
        assert "\b" not in line
        line.encode()


def test_line_ends() -> None:
    assert split(b"one\r\ntwo\n\nfour") == ["one", "two", "", "four"]
    assert split(b"one\r", b"\ntwo\r\n") == ["one", "two"]
    assert split(b"\xff\xfe is not UTF-8\n") == ["\ufffd\ufffd is not UTF-8"]


def test_a_progress_bar_yields_a_line_every_few_seconds() -> None:
    states = [f"\r{n:3}%".encode() for n in range(12)]
    lines = split(*states, b"\r100%\n", b"done\n", seconds=1.0)
    assert lines[-2:] == ["100%", "done"]
    assert len(lines) == 2 + 2  # two of the bar in ten seconds
    assert "" not in lines


@pytest.mark.parametrize("bar", [b"\r 4/5 loss: 0.5", b"\r 50%|##   | 1/2 [00:01<00:01]", b"half a line"])
def test_a_traceback_behind_an_unfinished_line_is_a_line(bar: bytes) -> None:
    raised = b"Traceback (most recent call last):\n  File\nRuntimeError: bad batch\n"
    lines = ["Traceback (most recent call last):", "  File", "RuntimeError: bad batch"]
    data = bar + raised
    assert (
        split(data) == split(*(data[at : at + 7] for at in range(0, len(data), 7))) == [bar.decode().removeprefix("\r"), *lines]
    )
    for prefix in ("[rank0]: ", "  + Exception Group ", "    "):
        assert split(prefix.encode() + raised)[0] == prefix + lines[0]


def keras_bar(steps: int) -> list[bytes]:
    """Return Keras 3's output of an epoch: backspaces over the last output, and padding if that was longer."""
    width, pieces = 0, []
    for step in range(1, steps + 1):
        text = f"{step}/{steps} ━━ {'' if step == steps else '12s '}3ms/step - loss: {1 / step:.4f}"
        cover = " " * (width - len(text))
        pieces.append("\b" * width + "\r" + f"\x1b[1m{text}\x1b[0m" + cover + ("\n" if step == steps else ""))
        width = len(text)
    return [piece.encode() for piece in pieces]


@given(st.integers(1, 12), st.integers(1, 60))
def test_a_keras_bar_is_one_line_with_its_last_state(steps: int, size: int) -> None:
    data = b"Epoch 1/1\n" + b"".join(keras_bar(steps)) + b"done\n"
    last = f"\x1b[1m{steps}/{steps} ━━ 3ms/step - loss: {1 / steps:.4f}\x1b[0m"
    assert split(*(data[at : at + size] for at in range(0, len(data), size))) == ["Epoch 1/1", last, "done"]


def test_a_long_keras_bar_yields_a_line_every_few_seconds() -> None:
    lines = split(*keras_bar(12), seconds=1.0)
    assert [line.split("/")[0] for line in lines] == ["\x1b[1m5", "\x1b[1m10", "\x1b[1m12"]
    assert not [line for line in lines if "\b" in line]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (b"10%\b\b\b20%\b\b\b30%\n", "30%"),
        (b"wait |\b/\b-\b\\\bdone\n", "wait done"),
        (b"N\bNA\bAM\bM\n", "NAM"),
        ("né\b\b━\n".encode(), "━é"),
        (b"\x1b[31mab\x1b[0m\b\bc\n", "\x1b[0mcb"),
        (b"\b\b\bx\n", "x"),
        (b"\bab\bc\n", "ac"),
        (b"gone\b \b\b \b\b \b\b \b\n", ""),
        (b"100%\b\b\b\b\r\n", "100%"),
    ],
)
def test_backspaces_are_applied_across_pieces(written: bytes, expected: str) -> None:
    for size in range(1, len(written) + 1):
        assert split(*(written[at : at + size] for at in range(0, len(written), size))) == [expected], size


def test_a_line_of_backspaces_needs_little_memory() -> None:
    splitter = Splitter()
    for _ in range(200):
        assert not list(splitter.feed(b"x" * 10 + b"\b" * 1000, 0.0))
    assert len(splitter._rest) <= 20


def nested_bars(outer: int, inner: int, leave: bool, printed: str = "") -> list[bytes]:
    """Return tqdm's output of two bars, one below the other, and of a program between the upper steps."""
    pieces = [f"\router {0:2}"]
    for step in range(1, outer + 1):
        pieces += [f"\n\rinner {number:2}\x1b[A" for number in range(inner + 1)]
        pieces.append(f"\rinner {inner:2}\n" if leave else "\n\r        \x1b[A")
        pieces += [printed] * bool(printed) + [f"\router {step:2}"]
    return [piece.encode() for piece in [*pieces, "\n", "done\n"]]


def test_nested_bars_yield_their_last_states() -> None:
    lines = split(*nested_bars(3, 40, leave=False), seconds=0.125)
    assert lines == ["outer  0", "inner 40", "outer  1", "inner 40", "outer  2", "inner 40", "outer  3", "done"]


@pytest.mark.parametrize("leave", [False, True])
@pytest.mark.parametrize("printed", ["loss 0.5\n", "\router  0loss 0.5\n"])
def test_nested_bars_do_not_hide_other_lines(leave: bool, printed: str) -> None:
    written = b"".join(nested_bars(3, 4, leave, printed))
    for size in (*range(1, 14), 99):
        lines = split(*(written[at : at + size] for at in range(0, len(written), size)))
        inner = ["inner  4"] * 2 * leave
        steps = [[f"outer {step:2}", *inner, printed.strip()] for step in range(3)]
        assert lines == [*(line for step in steps for line in step), "outer  3", "done"], size


def test_a_row_that_is_no_longer_redrawn_becomes_a_line() -> None:
    splitter = Splitter()
    assert list(splitter.feed(b"one\n\rinner 1\x1b[A\n\rinner 2\x1b[A", 10.0)) == ["one"]
    assert splitter.due(11.0) == 4.0
    assert list(splitter.take_partial(15.0)) == ["inner 2"]
    assert splitter.due(15.0) is None
    assert not list(splitter.feed(b"\x1b[99999999999999A\rtop\x1b[A" * 1000, 16.0))
    assert list(splitter.end()) == ["top"]


def test_rows_are_lines_from_the_top_without_padding() -> None:
    assert split(b"\router 1\n\rinner 1\x1b[A\router 2\n\ndone\n") == ["outer 1", "outer 2", "inner 1", "done"]
    assert split(b"one\ninner 1   \x1b[A") == ["one", "inner 1"]
    assert split(b"\rinner 1\x1b[Aplain\nx\n") == ["inner 1", "plain", "x"]
    assert split(b"\rc\x1b[A\rb\x1b[A\ra\n\rB\n") == ["a", "b", "c", "B"], "two rows without a move may be no bars"
    assert split(b"\rinner 1\x1b[A\n   \x1b[A") == [], "the row was erased"
    splitter = Splitter()
    assert list(splitter.feed(b" 1%   \r 2%   \r", 10.0)) == []
    assert list(splitter.feed(b" 3%", 16.0)) == [" 2%"]
    partial = Splitter()
    assert list(partial.feed(b"\rinner 1\x1b[Apartial", 10.0)) == []
    assert [list(partial.take_partial(now)) for now in (11.0, 15.0)] == [["partial"], ["inner 1"]]


def test_control_sequences_of_the_cursor_are_removed() -> None:
    assert split(b"\x1b[?25l\x1b[2Kx \x1b[1my\x1b[0m\x1b[K\x1b[3;4Hz\n") == ["x \x1b[1my\x1b[0mz"]


def test_a_line_without_an_end_is_shown_once_after_a_second() -> None:
    splitter = Splitter()

    def feed(data: bytes, now: float) -> list[str]:
        return list(splitter.feed(data, now))

    assert splitter.due(0.0) is None
    assert feed("loading …".encode(), 10.0) == []
    assert splitter.due(10.25) == 0.75
    assert list(splitter.take_partial(10.5)) == []
    assert list(splitter.take_partial(11.0)) == ["loading …"]
    assert splitter.due(11.0) is None
    assert feed(b" done\nnext\n", 20.0) == [" done", "next"]
    assert feed(b"shown", 30.0) + list(splitter.take_partial(31.0)) == ["shown"]
    assert feed(b"\n\n", 40.0) == [""], "the end of the shown line is no line of its own"
    assert feed(b"a", 50.0) + feed(b"b", 50.9) + feed(b"c", 51.1) == ["abc"], "a line that keeps growing is shown too"
    assert feed(b"\xe2\x80", 60.0) + list(splitter.take_partial(61.0)) == []
    assert feed(b"\xa6\n", 62.0) == ["…"]
    assert feed(b"5%\r", 70.0) + list(splitter.take_partial(71.0)) == ["5%"]
    assert feed(b"6%", 72.0) + list(splitter.take_partial(73.0)) == [], "a bar is shown every few seconds"
    assert splitter.due(73.0) == 3.0
    assert list(splitter.take_partial(76.0)) == ["6%"]
    assert list(splitter.end()) == []


@given(st.lists(st.tuples(st.text(st.characters(exclude_characters="\b\r", exclude_categories=["Cs"])), st.integers(0, 3))))
def test_no_text_is_lost_or_shown_twice(pieces: list[tuple[str, int]]) -> None:
    splitter, now, lines = Splitter(), 10.0, []
    for text, wait in pieces:
        lines += splitter.feed(text.encode(), now)
        now += wait
        if splitter.due(now) == 0.0:
            lines += splitter.take_partial(now)
    lines += splitter.end()
    assert "".join(lines) == "".join(text for text, _ in pieces).replace("\n", "")


def test_long_lines_are_cut_between_characters() -> None:
    text = "é" * LONGEST_LINE
    for pieces in ([text.encode() + b"\n"], [text.encode()], [text.encode()[:70_001], text.encode()[70_001:]]):
        lines = split(*pieces)
        assert "".join(lines) == text
        assert max(len(line.encode()) for line in lines) <= LONGEST_LINE
    splitter = Splitter()
    for _ in range(64):
        list(splitter.feed(b"x" * LONGEST_LINE, 0.0))
    assert len(splitter._rest) <= LONGEST_LINE


@pytest.mark.parametrize(
    ("text", "length"),
    [
        (b"", 0),
        (b"a", 0),
        ("aé".encode(), 0),
        (b"\xc3", 1),
        (b"\xe2\x80", 2),
        (b"a\xf0\x9f\x98", 3),
        ("\U0001f600".encode(), 0),
        (b"\x80", 0),
        (b"\x80\x80\x80\x80\x80", 0),
    ],
)
def test_the_begun_character_at_the_end(text: bytes, length: int) -> None:
    assert lines_module._unfinished(text) == length


@pytest.mark.parametrize(
    ("line", "cut"),
    [(b"a" * 12, 8), ("aaaaaaaé".encode(), 7), ("aaaaaa€".encode(), 6), ("aaaaa\U0001f600".encode(), 5), (b"\x80" * 12, 4)],
)
def test_where_a_long_line_is_cut(line: bytes, cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "LONGEST_LINE", 8)
    assert lines_module._boundary(line) == cut


@pytest.mark.parametrize(
    ("text", "severity"),
    [
        ("INFO:root:Train [worker/0], step 348: loss: 0.729", "INFO"),
        ("INFO:tensorflow:global_step/sec: 0", "INFO"),
        ("WARNING:tensorflow:From x.py:3: f is deprecated", "WARNING"),
        ("CRITICAL:a.b-c:x", "CRITICAL"),
        ("DEBUG:root:", "DEBUG"),
        ("WARNING: All log messages before absl::InitializeLog() is called are written to STDERR", "WARNING"),
        ("I0000 00:00:1700000000.000000    1234 cpu_feature_guard.cc:210] x", "INFO"),
        ("E0000 00:00:1700000000.000000    1234 cuda_dnn.cc:8310] x", "ERROR"),
        ("W0131 12:00:00.000000 1 a.py:1] x", "WARNING"),
        ("F0131 12:00:00.000000 1 a.py:1] x", "CRITICAL"),
        ("2026-01-31 12:00:00.123456: W tensorflow/core/x.cc:12] x", "WARNING"),
        ("2026-01-31 12:00:00.123456: I tensorflow/core/x.cc:12] x", "INFO"),
        ("2026-01-31 12:00:00,123 - trainer - ERROR - x", "ERROR"),
        ("2026-01-31 12:00:00,123 WARNING x", "WARNING"),
        ("2026-01-31 12:00:00,123 [a.b-c:12]   CRITICAL x", "CRITICAL"),
        ("2026-01-31 12:00:00,123 - - ERROR", "ERROR"),
        ("2026-01-31 12:00:00,123 - a b - ERROR - x", None),
        ("2026-01-31 12:00:00,123 - trainer - ERRORS", None),
        ("/venv/lib/x.py:12: UserWarning: x", "WARNING"),
        ("Train [worker/0], step 348: loss: 0.729", None),
        ("INFORMATION: x", None),
        ("error: data /nowhere matches no file", "ERROR"),
        ("task.py: error: the following arguments are required: --data", "ERROR"),
        ("[W1126 12:00:00.123456789 socket.cpp:697] [c10d] x", "WARNING"),
        ("Fatal Python error: Segmentation fault", "CRITICAL"),
        (
            "E0000 00:00:1795714804.137383   14401 base_collective_executor.cc:252] BaseCollectiveExecutor::StartAbort x",
            "WARNING",
        ),
        ("ERROR:tensorflow:Worker /job:worker/replica:0/task:0 failed with UnavailableError():Socket closed", "WARNING"),
        ("zlib.error: x", None),
        ("Error: x", None),
        ("", None),
    ],
)
def test_severity(text: str, severity: str | None) -> None:
    assert severity_of(text) == severity


@pytest.mark.parametrize("unit", ["!", "a!", " a", "a", " ", ":1", "-é "])
def test_a_long_line_takes_linear_time(unit: str) -> None:
    """A pattern whose time rises with the cube of the length would take hours, and stop all threads for as long."""
    for begin in ("2026-01-31 12:00:00,123", "2026-01-31 12:00:00,123 - a", "INFO:", "a:1: ", "[W0131 12:00:00 "):
        text = (begin + unit * LONGEST_LINE)[:LONGEST_LINE]
        assert Messages().add(text, 100.0).message == text


def messages(*lines: str, start: float = 100.0, step: float = 0.001) -> list[tuple[float, str]]:
    grouping = Messages()
    return [grouping.add(line, start + n * step)[:2] for n, line in enumerate(lines)]


def chained_traceback() -> list[str]:
    try:
        try:
            raise KeyError("x")
        except KeyError:
            raise ValueError("two\n  lines") from None
    except ValueError:
        return traceback.format_exc().splitlines()


def test_a_traceback_is_one_message() -> None:
    lines = ["INFO:root:step 1", *chained_traceback(), "INFO:root:step 2"]
    entries = messages(*lines)
    assert [severity for _, severity in entries] == ["INFO", *["ERROR"] * (len(lines) - 2), "INFO"]
    assert len({time for time, _ in entries[1:-1]}) == 1


def test_chained_tracebacks_are_one_message() -> None:
    try:
        try:
            raise KeyError("x")
        except KeyError as error:
            raise ValueError("y") from error
    except ValueError:
        lines = traceback.format_exc().splitlines()
    assert sum(line.startswith("Traceback") for line in lines) == 2
    assert set(messages(*lines)) == {(100.0, "ERROR")}


def test_logging_exception_is_one_message() -> None:
    assert set(messages("ERROR:root:it failed", *chained_traceback())) == {(100.0, "ERROR")}


def test_a_long_exception_text_belongs_to_its_message() -> None:
    text = ["ValueError: Exception encountered.", "", "Input 0 is wrong.", "", "Arguments received:", "  x"]
    lines = ["Traceback (most recent call last):", '  File "x.py", line 1, in f', *text]
    assert set(messages(*lines)) == {(100.0, "ERROR")}
    assert set(messages("Traceback (most recent call last):", "ValueError: x", "more", "and more")) == {(100.0, "ERROR")}
    grouping = Messages()
    severities = [grouping.add(line, 100.0).severity for line in lines]
    severities += [grouping.add("INFO:root:x", 100.0).severity, grouping.add("print", 100.0).severity]
    assert severities == ["ERROR"] * len(lines) + ["INFO", "INFO"]
    later = Messages()
    assert [later.add(line, 100.0).severity for line in lines] == ["ERROR"] * len(lines)
    assert later.add("retrying", 100.2).severity == "INFO"


@pytest.mark.parametrize(
    "line",
    [
        "step 0 loss: 0.1",
        "Train [master/0], step 348: loss: 0.729 (1.037 sec)",
        "Eval, step 990: loss: 0.400",
        "Epoch 2/9",
        "Epoch: 2",
        "[rank0]: step 7",
        "loss: 0.25, accuracy: 0.5",
        "\x1b[1m 1/10\x1b[0m \x1b[32m━━\x1b[0m\x1b[37m━━━━\x1b[0m",
        "10/10 [==============================] - 0s",
        "Train:  50%|█████     | 5/10",
        '{"scaletier.progress": {"step": 5}}',
    ],
)
def test_progress_after_a_caught_exception_is_no_part_of_it(line: str) -> None:
    raised = [
        "Traceback (most recent call last):",
        '  File "x", line 1',
        "ValueError: 2 errors:",
        "expected step 5, got loss: 3",
        "loss: nan",
    ]
    severities = [severity for _, severity in messages(*raised, line, "and then")]
    assert severities == ["ERROR"] * len(raised) + ["INFO"] * 2


def test_indented_lines_continue_a_message_for_a_second() -> None:
    assert messages("WARNING:x:y", "  more", "", "print") == [
        (100.0, "WARNING"),
        (100.0, "WARNING"),
        (100.0, "WARNING"),
        (100.003, "INFO"),
    ]
    assert messages("ERROR:x:y", "  a table of its own", step=2.0) == [(100.0, "ERROR"), (102.0, "INFO")]
    assert messages("  first line of all") == [(100.0, "INFO")]


def test_severities_have_the_names_of_logging() -> None:
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL):
        name = logging.getLevelName(level)
        assert severity_of(f"{name}:root:x") == name


# As TensorFlow 2.21 prints them.
STARTUP_MESSAGES = [
    "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
    "I0000 00:00:1795315086.015852     267 port.cc:153] oneDNN custom operations are on. You may see slightly different "
    "numerical results due to floating-point round-off errors from different computation orders. To turn them off, set the "
    "environment variable `TF_ENABLE_ONEDNN_OPTS=0`.",
    "I0000 00:00:1795315086.082298     267 cpu_feature_guard.cc:227] This TensorFlow binary is optimized to use available CPU "
    "instructions in performance-critical operations.",
    "E0000 00:00:1795413625.010302     346 util.cc:131] oneDNN supports DT_HALF only on platforms with AVX-512. Falling "
    "back to the default Eigen-based implementation if present.",
    "To enable the following instructions: AVX2 AVX512F FMA, in other operations, rebuild TensorFlow with the appropriate "
    "compiler flags.",
]


@pytest.mark.parametrize("line", STARTUP_MESSAGES)
def test_startup_messages_are_recognized(line: str) -> None:
    assert is_startup_message(line)
    assert not is_startup_message(f"trainer: {line}")


@pytest.mark.parametrize(
    "line",
    [
        "",
        "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR, and more",
        "E0000 00:00:1795315086.015852     267 port.cc:153] oneDNN custom operations are on.",
        "W0000 00:00:1795315086.0     267 cpu_feature_guard.cc:227] This TensorFlow binary is optimized to use nothing",
        "To enable the following instructions: read the manual",
    ],
)
def test_other_lines_are_no_startup_messages(line: str) -> None:
    assert not is_startup_message(line)


@pytest.mark.parametrize(("level", "quiet"), [("0", False), ("1", False), ("2", True), ("3", True), (None, False)])
def test_startup_messages_are_hidden_only_at_log_level_2_or_higher(level: str | None, quiet: bool) -> None:
    assert is_quiet({} if level is None else {"TF_CPP_MIN_LOG_LEVEL": level}) is quiet


@pytest.mark.parametrize("level", ["2", "0"])
def test_the_log_omits_startup_messages_at_log_level_2(make: Make, monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", level)
    printed = "".join(f"print({line!r})\n" for line in (STARTUP_MESSAGES[0], "mine", *STARTUP_MESSAGES[1:], "and mine"))
    cluster = make(printed)
    cluster.run()
    lines = [line for line in cluster.log("master-0") if line in (*STARTUP_MESSAGES, "mine", "and mine")]
    assert lines == (["mine", "and mine"] if level == "2" else [STARTUP_MESSAGES[0], "mine", *STARTUP_MESSAGES[1:], "and mine"])
