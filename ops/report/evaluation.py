"""JOB_DIR/evaluation.json: a trainer's final evaluation, validated before use."""

from __future__ import annotations

import base64
import json
from typing import Any

from ops.report.report import Evaluation, Mistake

MOST_CLASSES = 50
MOST_MISTAKES = 20
_LARGEST_IMAGE = 32 << 10
_PNG = b"\x89PNG\r\n\x1a\n"


class EvaluationError(ValueError):
    """One line: what is wrong with a trainer's evaluation.json, with the path of the key."""


def parse(content: bytes) -> Evaluation:
    """Parse an evaluation (docs/trainers.md), of its mistakes only the first 20."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        raise EvaluationError("it is no JSON") from None
    _require(isinstance(document, dict), "it is no JSON object")
    confusion = document.get("confusion")
    size = len(confusion) if isinstance(confusion, list) else 0
    _require(2 <= size <= MOST_CLASSES, f"confusion must be a list of 2 to {MOST_CLASSES} rows")
    for index, row in enumerate(confusion):
        are_counts = isinstance(row, list) and len(row) == size and all(map(_is_count, row))
        _require(are_counts, f"confusion[{index}] must be a list of {size} counts, one for each class")
    if (classes := document.get("classes")) is None:
        classes = [str(number) for number in range(size)]
    are_names = isinstance(classes, list) and len(classes) == size and all(isinstance(name, str) for name in classes)
    _require(are_names, f"classes must be a list of {size} names, one for each row of confusion")
    mistakes = document.get("mistakes", [])
    _require(isinstance(mistakes, list), "mistakes must be a list")
    mistakes = [_mistake(item, f"mistakes[{index}]", size) for index, item in enumerate(mistakes[:MOST_MISTAKES])]
    step = document.get("step")
    return Evaluation(step if _is_count(step) else None, classes, confusion, mistakes)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise EvaluationError(message)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53


def _mistake(value: Any, path: str, size: int) -> Mistake:
    _require(isinstance(value, dict), f"{path} must be an object of label, predicted and image")
    for key in ("label", "predicted"):
        _require(_is_count(value.get(key)) and value[key] < size, f"{path}.{key} must be a class, 0 to {size - 1}")
    image = value.get("image")
    _require(_is_png(image), f"{path}.image must be a PNG of {_LARGEST_IMAGE:,} bytes at most, in base64")
    return Mistake(value["label"], value["predicted"], image)


def _is_png(text: object) -> bool:
    try:
        content = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except ValueError:
        return False
    return content.startswith(_PNG) and len(content) <= _LARGEST_IMAGE
