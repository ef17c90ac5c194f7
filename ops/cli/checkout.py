"""Find the checkout of scaletier that a command is for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

FLAG = "--project"


def find(argv: Sequence[str], here: Path, environment: Mapping[str, str]) -> Path | None:
    """Return the folder of the flag, else of SCALETIER_PROJECT, else the checkout that `here` is in."""
    own_words = argv[: argv.index("--")] if "--" in argv else argv
    for word, value in zip(own_words, (*own_words[1:], ""), strict=True):
        if word == FLAG and value:
            return Path(here, value)
        if word.startswith(f"{FLAG}="):
            return Path(here, word.partition("=")[2])
    if project := environment.get("SCALETIER_PROJECT"):
        return Path(here, project)
    return next((folder for folder in (here, *here.parents) if is_checkout(folder)), None)


def is_checkout(folder: Path) -> bool:
    """Return whether a folder is a checkout of this project, by its Pulumi.yaml."""
    try:
        return "name: scaletier" in map(str.strip, (folder / "Pulumi.yaml").read_text().splitlines())
    except (OSError, UnicodeDecodeError):
        return False
