"""What a drawing can be asked of: which models take one, how they are asked, and what their answers say. Pure functions."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PIXELS = 784
"""28 rows of 28."""
CLASSES = 10
TAKES = f"one image float [?, {PIXELS}], a key int64 [?] beside it or none, and gives probabilities float [?, {CLASSES}]"
"""What a model must be like, in words."""
_SIGNATURE = "serving_default"
_FLOATS = {"DT_FLOAT", "DT_DOUBLE", "DT_HALF", "DT_BFLOAT16"}
_ANY = "-1"
# Of several outputs with a number for each class.
_PREFERRED = ("probabilities", "scores")


@dataclass(frozen=True)
class Question:
    """How a version is asked about a drawing: its inputs by name, and the output that tells of each class."""

    image: str
    key: str | None
    output: str


def question_of(metadata: Mapping[str, Any]) -> Question | None:
    """How the version is asked that the model server tells of so (GET …/metadata); None for one that takes no drawing."""
    signature = _signature(metadata)
    images, keys = [], []
    for name, tensor in signature.get("inputs", {}).items():
        if tensor["dtype"] in _FLOATS and _sizes(tensor) == [_ANY, str(PIXELS)]:
            images.append(name)
        elif tensor["dtype"] == "DT_INT64" and _sizes(tensor) == [_ANY]:
            keys.append(name)
        else:
            return None
    outputs = [
        name
        for name, tensor in signature.get("outputs", {}).items()
        if tensor["dtype"] in _FLOATS and _sizes(tensor) == [_ANY, str(CLASSES)]
    ]
    if len(images) != 1 or len(keys) > 1 or not outputs:
        return None
    output = next((name for name in _PREFERRED if name in outputs), outputs[0])
    return Question(images[0], keys[0] if keys else None, output)


def told(metadata: Mapping[str, Any]) -> str:
    """`takes x float [?, 3], gives y float [?]`, of a version."""
    signature = _signature(metadata)
    if not signature:
        return f"has no signature {_SIGNATURE}"
    takes, gives = (", ".join(map(_tensor, signature[way].items())) or "nothing" for way in ("inputs", "outputs"))
    return f"takes {takes}, gives {gives}"


def _signature(metadata: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = metadata["metadata"]["signature_def"]["signature_def"].get(_SIGNATURE, {})
    return found


def _sizes(tensor: Mapping[str, Any]) -> list[str]:
    return [] if tensor["tensor_shape"].get("unknown_rank") else [dim["size"] for dim in tensor["tensor_shape"].get("dim", [])]


def _tensor(named: tuple[str, Mapping[str, Any]]) -> str:
    name, tensor = named
    kind = tensor["dtype"].removeprefix("DT_").lower()
    if tensor["tensor_shape"].get("unknown_rank"):
        return f"{name} {kind} of any shape"
    return f"{name} {kind} [{', '.join('?' if size == _ANY else size for size in _sizes(tensor))}]"


def drawn(content: bytes) -> list[float]:
    """The 784 numbers from 0 to 1 that a page sent; ValueError for anything else."""
    found = json.loads(content)
    if not isinstance(found, list) or len(found) != PIXELS:
        raise ValueError(f"a drawing is a list of {PIXELS} numbers")
    if not all(isinstance(each, int | float) and not isinstance(each, bool) and 0 <= each <= 1 for each in found):
        raise ValueError("a drawing's numbers are from 0 to 1")
    return found


def asked(question: Question, image: list[float]) -> bytes:
    """The body of the request to the model server."""
    instance: dict[str, Any] = {question.image: image}
    if question.key is not None:
        instance[question.key] = 0
    return json.dumps({"instances": [instance]}).encode()


def probabilities(question: Question, answer: Mapping[str, Any]) -> list[float]:
    """The ten probabilities in the model server's answer, by softmax where it gives numbers that are none; ValueError."""
    (row,) = answer["predictions"]
    values = row[question.output] if isinstance(row, dict) else row  # a single output goes without its name
    if len(values) != CLASSES or not all(isinstance(each, int | float) and math.isfinite(each) for each in values):
        raise ValueError(f"the answer has not {CLASSES} numbers")
    if all(0 <= each <= 1 for each in values):
        return [float(each) for each in values]
    most = max(values)
    powers = [math.exp(each - most) for each in values]
    return [each / sum(powers) for each in powers]
