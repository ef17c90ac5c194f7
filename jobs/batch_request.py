"""The request of a batch prediction: a file in the job's package, the same for every replica and every restart."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FILE = "hosts/batch/request.json"
RESTART_EXIT = 143
"""The exit code if the input or the bucket does not answer; the package lists it in `restartCodes`."""


@dataclass(frozen=True)
class Request:
    """The inputs and the model of a batch prediction.

    `inputs` are the paths of the input files on the hosts, in order. `model_digests`, in JSON `files`, maps each path in the
    model's folder to its SHA-256.
    """

    inputs: tuple[str, ...]
    model_digests: Mapping[str, str]

    def to_json(self) -> bytes:
        return json.dumps({"inputs": self.inputs, "files": self.model_digests}, indent=1).encode()

    @classmethod
    def from_json(cls, content: bytes) -> Request:
        data = json.loads(content)
        return cls(tuple(data["inputs"]), data["files"])

    @classmethod
    def from_package(cls) -> Request:
        """Return the request in the package that contains this module."""
        return cls.from_json((Path(__file__).resolve().parents[1] / FILE).read_bytes())
