"""Write test images as a request for `fab predict --json-instances`: `python -m trainer.request`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path

from scaletier.flags import Parser, at_least
from trainer import tfrecord
from trainer.records import DEFAULT_DEST


def images(folder: Path, files: str = "test*.tfrecord*") -> Iterator[tuple[bytes, int]]:
    """Read the images and labels of a folder of records.

    Args:
        files: a glob of file names in the folder.

    Returns: 784 bytes and a label for each image, in the order of the files.
    """
    return chain.from_iterable(map(tfrecord.read, sorted(folder.glob(files))))


def write(folder: Path, output: Path, count: int) -> str:
    """Write a JSON object with `image`, 784 numbers from 0 to 1, and `key` on each line of a new file; return a line about it.

    OSError or ValueError if the images cannot be read, or the file cannot be written.
    """
    lines = [
        json.dumps({"image": [round(byte / 255, 4) for byte in image], "key": key})
        for key, (image, _) in enumerate(islice(images(folder), count))
    ]
    if not lines:
        raise ValueError(f"no test image is in {folder}: run make data, or pass --data")
    with output.open("x") as file:
        file.write("\n".join(lines) + "\n")
    return f"{output} has {len(lines)} image{'' if len(lines) == 1 else 's'}: fab predict --json-instances {output}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns: exit code 0, or 2 for an invalid flag.
    """
    parser = Parser(prog="python -m trainer.request", description=__doc__, allow_abbrev=False)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the file to write")
    parser.add_argument("--count", type=at_least(1), default=10, metavar="N", help="how many images (default: 10)")
    parser.add_argument("--data", type=Path, default=Path(DEFAULT_DEST), metavar="DIR", help="folder of test*.tfrecord*")
    flags = parser.parse_args(arguments)
    try:
        print(write(flags.data, flags.output, flags.count))
    except FileExistsError:
        parser.error(f"{flags.output} exists, and is left as it is: give another --output")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
