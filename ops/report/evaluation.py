"""JOB_DIR/evaluation.json: a trainer's final evaluation, validated before use."""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any

from ops.report.report import Evaluation, Mistake

MOST_CLASSES = 50
MOST_MISTAKES = 20
LARGEST_FILE = 1 << 20
_LARGEST_IMAGE = 32 << 10
_PNG = b"\x89PNG\r\n\x1a\n"


class EvaluationError(ValueError):
    """One line: what is wrong with a trainer's evaluation.json, with the path of the key."""


def parse(content: bytes) -> Evaluation:
    """Parse an evaluation (docs/trainers.md); of the mistakes the first 20 count."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        raise EvaluationError("it is no JSON") from None
    if not isinstance(document, dict):
        raise EvaluationError("it is no JSON object")
    confusion = _confusion(document.get("confusion"))
    classes = _classes(document.get("classes"), len(confusion))
    mistakes = document.get("mistakes", [])
    if not isinstance(mistakes, list):
        raise EvaluationError("mistakes must be a list")
    errors = [_mistake(item, f"mistakes[{place}]", len(classes)) for place, item in enumerate(mistakes[:MOST_MISTAKES])]
    step = document.get("step")
    return Evaluation(step if _is_count(step) else None, classes, confusion, errors)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53


def _confusion(value: Any) -> list[list[int]]:
    size = len(value) if isinstance(value, list) else 0
    if not 2 <= size <= MOST_CLASSES:
        raise EvaluationError(f"confusion must be a list of 2 to {MOST_CLASSES} rows")
    for place, row in enumerate(value):
        if not isinstance(row, list) or len(row) != size or not all(map(_is_count, row)):
            raise EvaluationError(f"confusion[{place}] must be a list of {size} counts, one for each class")
    return [list(row) for row in value]


def _classes(value: Any, size: int) -> list[str]:
    if value is None:
        return [str(number) for number in range(size)]
    if not isinstance(value, list) or len(value) != size or not all(isinstance(name, str) for name in value):
        raise EvaluationError(f"classes must be a list of {size} names, one for each row of confusion")
    return list(value)


def _mistake(value: Any, path: str, size: int) -> Mistake:
    if not isinstance(value, dict):
        raise EvaluationError(f"{path} must be an object of label, predicted and image")
    for key in ("label", "predicted"):
        if not _is_count(value.get(key)) or value[key] >= size:
            raise EvaluationError(f"{path}.{key} must be a class, 0 to {size - 1}")
    image = value.get("image")
    if not isinstance(image, str) or not _is_png(image):
        raise EvaluationError(f"{path}.image must be a PNG of {_LARGEST_IMAGE >> 10} kB at most, in base64")
    return Mistake(value["label"], value["predicted"], image)


def _is_png(text: str) -> bool:
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return False
    return content.startswith(_PNG) and len(content) <= _LARGEST_IMAGE
