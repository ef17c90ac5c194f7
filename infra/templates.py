"""Render the Jinja templates in `templates/`; an undefined name is an error."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2

ROOT = Path(__file__).resolve().parents[1]
"""The checkout, with the hosts' code, the templates and the trainer."""
_STRAY = re.compile(r"(^|/)([.#]|__pycache__/)|(~|\.(bak|orig|rej|swp))$")


def source_files(folder: Path) -> list[Path]:
    """Return the files below a folder in order, without byte code and without hidden and backup files, as editors leave."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return [path for path in files if not _STRAY.search(path.relative_to(folder).as_posix())]


def render(template: str, **values: Any) -> str:
    """Return the text of `templates/<template>`, rendered with these values."""
    return environment().get_template(template).render(**values)


@cache
def environment() -> jinja2.Environment:
    """Return the environment, which caches compiled templates and adds the filter `json`."""
    import jinja2  # slow to import, so only commands that render import it

    jinja = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ROOT / "templates"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters["json"] = json.dumps
    return jinja
