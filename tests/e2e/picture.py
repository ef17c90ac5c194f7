"""`python tests/e2e/picture.py report-job01.html docs/report.png`: the upper part of a page as a browser on a desk shows it."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from browser import Browser

_WIDTH, _HEIGHT = 900, 980


def main(page: str, target: str) -> None:
    """Opens the page, in light colours, and writes the picture."""
    with tempfile.TemporaryDirectory() as folder, Browser(Path(folder)) as browser:
        browser.emulate(_WIDTH, _HEIGHT, bars=False)
        browser.open(Path(page).resolve().as_uri())
        browser.picture(Path(target), whole=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
