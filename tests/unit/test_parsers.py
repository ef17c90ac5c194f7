"""The seeds of `make fuzz` parse, and text near them raises no error but the declared ones."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[1] / "fuzz"))

from parsers import PARSERS

FOUND = (("config of a local stack", b'labels {"a\xff": "b"}'),)
"""What ended otherwise once."""


@pytest.mark.parametrize("name", PARSERS)
def test_examples_are_taken(name: str) -> None:
    for seed in PARSERS[name].seeds:
        PARSERS[name].of(seed)


@pytest.mark.parametrize(("name", "case"), FOUND, ids=[name for name, _ in FOUND])
def test_what_was_found(name: str, case: bytes) -> None:
    with suppress(*PARSERS[name].refuses):
        PARSERS[name].of(case)


@settings(max_examples=30)
@given(st.data())
@pytest.mark.parametrize("name", PARSERS)
def test_nearly_right_text(name: str, data: st.DataObject) -> None:
    parser = PARSERS[name]
    text = bytearray(data.draw(st.sampled_from(parser.seeds)))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(text)))
        text[place : place + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    with suppress(*parser.refuses):
        parser.of(bytes(text))
