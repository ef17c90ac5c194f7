"""Download a version's files to a folder, and check that each is as it was deployed."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

MODEL_FILE = "saved_model.pb"
LARGEST_MODEL_FILE = (1 << 31) - 1
"""The size limit of a protocol buffer, in bytes."""
NO_SIGNATURE = "has no signature: export it with one (tf.saved_model.save(…, signatures=…))"
"""The error of a model without a signature, when it is deployed, loaded, or used for a batch."""


def fetch(files: Mapping[str, str], folder: Path, download: Callable[[str, Path], bool]) -> None:
    """Replace a folder by `files`, a mapping from path to SHA-256.

    `download(path, target)` writes one file to `target`; it returns False if the bucket lacks the file. ValueError if a file is
    missing or differs.
    """
    shutil.rmtree(folder, ignore_errors=True)
    for path, digest in files.items():
        target = folder / path
        if not target.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"a file has the name {path!r}, which would leave its folder")
        target.parent.mkdir(parents=True, exist_ok=True)
        if not download(path, target):
            raise ValueError(f"{path} is not in the bucket")
        with target.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise ValueError(f"{path} is damaged: it is not what was deployed")
