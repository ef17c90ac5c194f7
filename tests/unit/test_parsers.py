"""The seeds of `make fuzz` parse, and similar text raises only the declared errors."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[1] / "fuzz"))

from parsers import PARSERS

REGRESSIONS = (("config of a local stack", b'labels {"a\xff": "b"}'),)
"""Cases that once raised other errors."""


@pytest.mark.parametrize("name", PARSERS)
def test_seeds_are_parsed(name: str) -> None:
    for seed in PARSERS[name].seeds:
        PARSERS[name].of(seed)


@pytest.mark.parametrize(("name", "case"), REGRESSIONS, ids=[name for name, _ in REGRESSIONS])
def test_former_failures_are_parsed(name: str, case: bytes) -> None:
    with suppress(*PARSERS[name].refuses):
        PARSERS[name].of(case)


@settings(max_examples=30)
@given(st.data())
@pytest.mark.parametrize("name", PARSERS)
def test_nearly_valid_text_raises_only_declared_errors(name: str, data: st.DataObject) -> None:
    parser = PARSERS[name]
    text = bytearray(data.draw(st.sampled_from(parser.seeds)))
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(text)))
        text[position : position + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    with suppress(*parser.refuses):
        parser.of(bytes(text))
