"""Jinja templates of the top-level folder, strict: an undefined name is an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

ROOT = Path(__file__).resolve().parents[1]
# Made once: it keeps each template as it was compiled.
_ENVIRONMENT = Environment(
    loader=FileSystemLoader(ROOT / "templates"), undefined=StrictUndefined, keep_trailing_newline=True, trim_blocks=True
)


def render(template: str, **values: Any) -> str:
    """The text of `templates/<template>` with these values."""
    return _ENVIRONMENT.get_template(template).render(**values)
