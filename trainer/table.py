"""Images as CSV: a row is a label, 0 to 9, then 784 pixels, 0 to 255; a header is skipped."""

from __future__ import annotations

import csv
from pathlib import Path

from trainer.mnist import LABELS, PIXELS, Example, InputError
from trainer.progress import counted


def read(path: Path) -> list[Example]:
    """Return the images and labels of a file.

    Raises:
        InputError: a line is invalid; the message has its number.
    """
    examples: list[Example] = []
    try:
        with path.open(newline="", encoding="utf-8-sig") as source:
            rows = csv.reader(source)
            for number, row in enumerate(counted(rows, f"reading {path}, row")):
                if row and not (number == 0 and _number(row[0]) is None):
                    examples.append(_example(row, f"{path}:{rows.line_num}"))
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} is not CSV: {error}") from None
    if not examples:
        raise InputError(f"{path} holds no images")
    return examples


def _example(row: list[str], place: str) -> Example:
    if len(row) != 1 + PIXELS:
        raise InputError(f"{place} has {len(row)} columns; valid are {1 + PIXELS}, a label and {PIXELS} pixels")
    label = _number(row[0])
    if label is None or not 0 <= label < LABELS:
        raise InputError(f"{place} has the label {row[0]!r:.20}; valid are 0 to {LABELS - 1}")
    try:
        return bytes(map(int, row[1:])), label
    except ValueError:
        column = next(index for index, value in enumerate(row) if _number(value) not in range(256))
        raise InputError(
            f"{place} has {row[column]!r:.20} in column {column + 1}; valid are whole numbers of 0 to 255"
        ) from None


def _number(value: str) -> int | None:
    try:
        return int(value)
    except ValueError:
        return None
