"""Fetch a file and check it against its published list of sha256 sums: `fetch.py URL LIST-URL FILE`.

The exit code is 0 if the file was fetched and has its sum in the list, else 1 and one line. It needs nothing but Python.
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
    """A failed fetch; one line."""


def sums(text: str) -> dict[str, str]:
    """Return the sum of each name, of lines as sha256sum writes them."""
    pairs = [line.split() for line in text.splitlines()]
    return {pair[1].removeprefix("*"): pair[0].lower() for pair in pairs if len(pair) == 2}


def fetch(url: str, listed_at: str, file: Path) -> None:
    """Write the file atomically; FetchError if it cannot be fetched, or differs from the published one."""
    name = url.rpartition("/")[2]
    part = file.with_name(f".{file.name}.part")
    digest = hashlib.sha256()
    try:
        with urllib.request.urlopen(listed_at, timeout=_SECONDS) as listed:
            expected = sums(listed.read().decode("utf-8", "replace")).get(name)
        if expected is None:
            raise FetchError(f"{listed_at} does not list {name}")
        with urllib.request.urlopen(url, timeout=_SECONDS) as answer, part.open("wb") as target:
            while content := answer.read(_PART):
                digest.update(content)
                target.write(content)
        if digest.hexdigest() != expected:
            raise FetchError(f"{url} is not what was published: its sha256 is {digest.hexdigest()}, and not {expected}")
        part.replace(file)
    except (OSError, http.client.HTTPException) as error:
        raise FetchError(f"{url} cannot be fetched: {getattr(error, 'reason', error)}") from None
    finally:
        part.unlink(missing_ok=True)


def main() -> int:
    """Run the command."""
    url, listed_at, file = sys.argv[1:]
    try:
        fetch(url, listed_at, Path(file))
    except FetchError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
