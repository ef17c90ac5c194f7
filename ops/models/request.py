"""`fab make-request`: images to ask a model about, in the form that `fab predict --json-instances` reads."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from ops import terminal
from ops.errors import DONE, UsageError
from ops.models.protobuf import all_of, entry_of

# A record's length and the length's checksum in front of it, and its own checksum behind. Source: TensorFlow, tf_record.
_HEAD, _TAIL = 12, 4


def make_request(data: Path, output: str | None, count: str) -> int:
    """Write test images of MNIST, one JSON object on each line: `key`, and `image` with 784 numbers from 0 to 1."""
    if output is None:
        raise UsageError("--output is missing: fab make-request --output request.json")
    if not count.isdecimal() or int(count) < 1:
        raise UsageError(f"--count {count!r} is no number of images")
    target = Path(output)
    if target.exists():
        raise UsageError(f"{target} is there already, and is left as it is: give another --output")
    lines = []
    for key, (image, _) in enumerate(islice(images(data), int(count))):
        lines.append(json.dumps({"image": [round(byte / 255, 4) for byte in image], "key": key}))
    if not lines:
        raise UsageError(f"there is no MNIST in {data}: run make data")
    try:
        target.write_text("\n".join(lines) + "\n")
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}") from None
    if len(lines) < int(count):
        terminal.note(f"there are no more than {len(lines)} test images")
    terminal.out(f"{target} has {terminal.plural(len(lines), 'image')}: fab predict --json-instances {target}")
    return DONE


def images(data: Path, files: str = "test*.tfrecord") -> Iterator[tuple[bytes, int]]:
    """The test images of MNIST as `make data` keeps them, 784 bytes each, with their labels; nothing where it was not run.

    Those of other `files` where these are named.
    """
    for path in sorted(data.glob(files)):
        for record in _records(path):
            features = dict(entry_of(feature) for whole in all_of(record, 1) for feature in all_of(whole, 1))
            (image,) = all_of(all_of(features["image_raw"], 1)[0], 1)
            (label,) = all_of(all_of(features["label"], 3)[0], 1)
            yield image, label if isinstance(label, int) else label[0]


def _records(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while len(head := file.read(_HEAD)) == _HEAD:
            (size,) = struct.unpack("<Q", head[:8])
            yield file.read(size)
            file.read(_TAIL)
