"""Fetch a file and hold it to the list of sha256 sums that was published with it: `fetch.py URL LIST-URL FILE`.

Exit code 0 where the file is there and is in the list, else 1 and one line. It needs nothing but Python.
"""

from __future__ import annotations

import hashlib
import http.client
import sys
import urllib.request
from pathlib import Path

_SECONDS = 15.0
_PART = 1 << 20


class FetchError(RuntimeError):
    """Why there is no such file; one line."""


def sums(text: str) -> dict[str, str]:
    """Name to sum, of lines as sha256sum writes them."""
    pairs = [line.split() for line in text.splitlines()]
    return {pair[1].removeprefix("*"): pair[0].lower() for pair in pairs if len(pair) == 2}


def fetch(url: str, listed_at: str, file: Path) -> None:
    """Puts the file in its place as a whole; FetchError where it cannot be had, or is another than was published."""
    name = url.rpartition("/")[2]
    part = file.with_name(f".{file.name}.part")
    digest = hashlib.sha256()
    try:
        with urllib.request.urlopen(listed_at, timeout=_SECONDS) as listed:
            wanted = sums(listed.read().decode("utf-8", "replace")).get(name)
        if wanted is None:
            raise FetchError(f"{listed_at} does not list {name}")
        with urllib.request.urlopen(url, timeout=_SECONDS) as answer, part.open("wb") as kept:
            while content := answer.read(_PART):
                digest.update(content)
                kept.write(content)
        if digest.hexdigest() != wanted:
            raise FetchError(f"{url} is not what was published: its sha256 is {digest.hexdigest()}, and not {wanted}")
        part.replace(file)
    except (OSError, http.client.HTTPException) as error:
        raise FetchError(f"{url} cannot be fetched: {getattr(error, 'reason', error)}") from None
    finally:
        part.unlink(missing_ok=True)


def main() -> int:
    """The command."""
    url, listed_at, file = sys.argv[1:]
    try:
        fetch(url, listed_at, Path(file))
    except FetchError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
