"""Pages as HTML: one environment of Jinja, which escapes whatever it is given, and shows what would steer a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

from ops import terminal


def environment(folder: Path) -> jinja2.Environment:
    """For the templates of a folder; a name that they do not know is an error."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        finalize=_harmless,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _harmless(value: Any) -> Any:
    """A text of whomever as it may be seen; what is marked as HTML is ours."""
    return terminal.harmless(value) if type(value) is str else value
