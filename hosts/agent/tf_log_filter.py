"""Messages of TensorFlow's libraries while they load, before any level of logging applies; useless."""

from __future__ import annotations

import re
from collections.abc import Mapping

_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
# Of the levels 0 to 3, those by which somebody asks for remarks.
_WANTED = ("0", "1")
_REMARKS = re.compile(
    r"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR$"
    r"|I\d{4} \d\d:\d\d:[\d.]+ +\d+ port\.cc:\d+\] oneDNN custom operations are on\."
    r"|I\d{4} \d\d:\d\d:[\d.]+ +\d+ cpu_feature_guard\.cc:\d+\] This TensorFlow binary is optimized to use "
    r"|E\d{4} \d\d:\d\d:[\d.]+ +\d+ util\.cc:\d+\] oneDNN supports DT_\w+ only on platforms with "
    r"|To enable the following instructions: [A-Z0-9_ ]+, in other operations, rebuild TensorFlow with "
)


def is_quiet(environment: Mapping[str, str]) -> bool:
    """Return True if a trainer's environment disables TensorFlow's remarks."""
    return environment.get(_LEVEL, _WANTED[0]) not in _WANTED


def is_remark(line: str) -> bool:
    """Return True for such a line."""
    return _REMARKS.match(line) is not None
