"""The one environment of Jinja, over the templates of the top-level folder.

An undefined name is an error.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2

ROOT = Path(__file__).resolve().parents[1]
"""The checkout, with the hosts' code, the templates and the trainer."""


def render(template: str, **values: Any) -> str:
    """Return the text of `templates/<template>` with these values."""
    return environment().get_template(template).render(**values)


@cache
def environment() -> jinja2.Environment:
    """Return the environment, which keeps each template as it was compiled; `json` is a filter of it."""
    import jinja2  # takes time, which not every command of fab has

    jinja = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ROOT / "templates"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters["json"] = json.dumps
    return jinja
