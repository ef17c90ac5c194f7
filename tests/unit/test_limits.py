"""Check that a wait of a test has no fixed limit, which a slow machine would exceed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
# A shorter limit is one that a test expects to pass, to see that nothing happens.
_FIXED = re.compile(r"\.(?:join|wait|accept)\((?:timeout=)?(?:[5-9]|\d\d+)(?:\.\d*)?\)")


@pytest.mark.parametrize(
    ("line", "is_fixed"),
    [
        ("thread.join" + "(30)", True),
        ("process.wait" + "(timeout=5.0)", True),
        ("thread.join(limit(30))", False),
        ("thread.join(0.3)", False),
        ("process.wait()", False),
    ],
)
def test_a_fixed_limit_is_recognized(line: str, is_fixed: bool) -> None:
    assert bool(_FIXED.search(line)) == is_fixed


def test_limits_scale_with_the_speed_of_the_machine() -> None:
    fixed = [
        f"{file.relative_to(TESTS)}:{number}: {line.strip()}"
        for file in sorted(TESTS.rglob("*.py"))
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if _FIXED.search(line)
    ]
    assert not fixed, "use limit() of tests/waiting.py"
