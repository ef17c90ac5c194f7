"""Pictures for docs/: the upper part of a page in a desktop browser, in light colours.

`python tests/e2e/picture.py report-job01.html docs/report.png`, and of the page of examples/draw with a digit drawn on it,
`python tests/e2e/picture.py 'http://127.0.0.1:8700/?model=mnist' examples/draw/draw.png`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from browser import Browser

_WIDTH, _HEIGHT = 900, 980
_TRY_HEIGHT = 760
_SHEET = "#drawing"
_DIGIT = [(0.3, 0.26), (0.42, 0.16), (0.58, 0.16), (0.68, 0.27), (0.62, 0.4), (0.46, 0.47), (0.62, 0.52), (0.7, 0.65)]
_REST = [(0.64, 0.79), (0.5, 0.85), (0.36, 0.82), (0.27, 0.73)]
_ANSWERED = "return [...document.querySelectorAll('.answer')].map(each => each.textContent)"


def main(page: str, target: str) -> None:
    """Open the page, a file or an address, and write the picture."""
    with tempfile.TemporaryDirectory() as folder, Browser(Path(folder)) as browser:
        is_drawing_page = page.startswith("http://")
        browser.emulate(_WIDTH, _TRY_HEIGHT if is_drawing_page else _HEIGHT, bars=False)
        browser.open(page if is_drawing_page else Path(page).resolve().as_uri())
        if is_drawing_page:
            browser.await_script(_ANSWERED, bool)
            browser.draw(_SHEET, [*_DIGIT, *_REST])
            browser.await_script(_ANSWERED, lambda answers: all(each.isdecimal() for each in answers))
            browser.await_script("return document.querySelector('[role=status]').textContent", bool)  # all bars have moved
        browser.picture(Path(target), full_page=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
