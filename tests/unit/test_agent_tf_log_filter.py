"""TensorFlow's start-up messages are left out of the log, nothing else, and only by default."""

from __future__ import annotations

import pytest
from replicahosts import Make

from hosts.agent.tf_log_filter import is_quiet, is_remark

# As TensorFlow 2.21 prints them.
REMARKS = [
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


@pytest.mark.parametrize("line", REMARKS)
def test_a_remark(line: str) -> None:
    assert is_remark(line)
    assert not is_remark(f"trainer: {line}")


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
def test_what_is_none(line: str) -> None:
    assert not is_remark(line)


@pytest.mark.parametrize(("level", "quiet"), [("0", False), ("1", False), ("2", True), ("3", True), (None, False)])
def test_who_asks_for_remarks_has_them(level: str | None, quiet: bool) -> None:
    assert is_quiet({} if level is None else {"TF_CPP_MIN_LOG_LEVEL": level}) is quiet


@pytest.mark.parametrize("level", ["2", "0"])
def test_the_log_of_a_trainer(make: Make, monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", level)
    printed = "".join(f"print({line!r})\n" for line in (REMARKS[0], "mine", *REMARKS[1:], "and mine"))
    cluster = make(printed)
    cluster.start()
    assert cluster.wait() == [0]
    lines = [line for line in cluster.log("master-0") if line in (*REMARKS, "mine", "and mine")]
    assert lines == (["mine", "and mine"] if level == "2" else [REMARKS[0], "mine", *REMARKS[1:], "and mine"])
