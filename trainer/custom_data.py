"""Read the user's own data, a folder of images or CSV files, as splits like MNIST's: 28×28 gray, labels 0 to 9.

A row of the CSV is a label, 0 to 9, then 784 pixels, 0 to 255; a header is skipped.
"""

from __future__ import annotations

import csv
import hashlib
from pathlib import Path

from trainer import images
from trainer.mnist import CLASS_COUNT, PIXELS, Example, InputError, Split
from trainer.progress import with_progress


def paths(source: str) -> list[Path]:
    """Return the path of a folder or of a CSV file, or the two paths of `TRAIN,TEST`; InputError if one is not there."""
    files = [Path(source)] if Path(source).exists() else [Path(part) for part in source.split(",")]
    if not (len(files) == 1 and files[0].is_dir()) and not (len(files) <= 2 and all(path.is_file() for path in files)):
        valid = "auto, npm, keras, a folder of images or of MNIST's idx files, a CSV file, or two as TRAIN.csv,TEST.csv"
        raise InputError(f"source {source!r} is not there; valid are {valid}")
    return files


def digest(sources: list[Path]) -> str:
    """Return one sha256 of the absolute paths and contents of all files; InputError if a folder's layout is invalid."""
    files = images.find(sources[0]).files if sources[0].is_dir() else sources
    total = hashlib.sha256()
    for path in files:
        total.update(f"{path.resolve()}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode("utf-8", "surrogateescape"))
    return total.hexdigest()


def load(sources: list[Path], test_share: float) -> tuple[dict[str, Split], list[str]]:
    """Return both splits, and the names of the classes by label; InputError if the data is invalid.

    Without a test split, move `test_share` of the distinct images to one, always the same images.
    """
    if sources[0].is_dir():
        folder = images.find(sources[0])
        examples, classes = images.read(folder), list(folder.classes)
    else:
        examples = {split: read_csv(path) for split, path in zip(("train", "test"), sources, strict=False)}
        classes = [str(label) for label in range(CLASS_COUNT)]
    if len({label for _, label in examples["train"]}) < 2:
        raise InputError(f"{sources[0]} holds one class only: two or more are needed")
    if "test" not in examples:
        examples = split_off(examples["train"], test_share)
    return {split: _shuffled(part) for split, part in examples.items()}, classes


def split_off(examples: list[Example], test_share: float) -> dict[str, list[Example]]:
    """Return the examples divided into a train and a test split by content, so that no image is in both."""
    distinct = sorted({image for image, _ in examples}, key=_order)
    count = min(max(1, round(len(distinct) * test_share)), len(distinct) - 1)
    if count < 1:
        raise InputError("all images are the same: there is no test split to make of them")
    test = set(distinct[:count])
    return {
        "train": [example for example in examples if example[0] not in test],
        "test": [example for example in examples if example[0] in test],
    }


def _shuffled(examples: list[Example]) -> Split:
    # The files of a folder are sorted by class, and training shuffles only within some thousands of records.
    examples = sorted(examples, key=lambda example: (_order(example[0]), example[1]))
    return Split(b"".join(image for image, _ in examples), bytes(label for _, label in examples))


def _order(image: bytes) -> bytes:
    return hashlib.sha256(image).digest()


def read_csv(path: Path) -> list[Example]:
    """Return the images and labels of a file; InputError, with the line's number, if one is invalid."""
    examples: list[Example] = []
    try:
        with path.open(newline="", encoding="utf-8-sig") as source:
            rows = csv.reader(source)
            for number, row in enumerate(with_progress(rows, f"reading {path}, row")):
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
    if label is None or not 0 <= label < CLASS_COUNT:
        raise InputError(f"{place} has the label {row[0]!r:.20}; valid are 0 to {CLASS_COUNT - 1}")
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
