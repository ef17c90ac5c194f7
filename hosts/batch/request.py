"""The request of a batch prediction: a file of the package.

So every replica, and every start of one, has the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = "hosts/batch/request.json"


@dataclass(frozen=True)
class Request:
    """The inputs and the model.

    `inputs` are files as the hosts see them, in order; `files` are the model's, each path in its folder with its SHA-256.
    """

    inputs: tuple[str, ...]
    files: Mapping[str, str]

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def from_json(cls, content: bytes) -> Request:
        data = json.loads(content)
        return cls(tuple(data["inputs"]), data["files"])

    @classmethod
    def of_package(cls) -> Request:
        """Return the request of the package with this module."""
        return cls.from_json((Path(__file__).resolve().parents[2] / FILE).read_bytes())
