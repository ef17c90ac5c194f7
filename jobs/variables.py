"""Variables in a job's arguments and environment, such as `${JOB_DIR}`.

They are filled in on the host, as no shell reads them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from jobs import shell
from jobs.records import JAX_COORDINATOR, MASTER_ADDR

NAMES = (
    *("JOB_DIR", "JOB_ID", "SCALETIER_DATA", "TYPE", "INDEX"),
    *(MASTER_ADDR, "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    *(JAX_COORDINATOR, "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
)
"""Their names; a trainer's environment has the first five, and the master's and workers' has all."""
# `${ANYTHING}`, and `$NAME` of ours alone; with another dollar or a backslash in front it is meant as it is.
_REFERENCE = re.compile(rf"([$\\]?)\$(?:\{{([^{{}}]*)\}}|({'|'.join(NAMES)})(?!\w))", re.ASCII)


def expand(text: str, values: Mapping[str, str]) -> str:
    """Fill in the variables of a text; `$$` and `\\$` in front of one stand for its dollar."""

    def filled(found: re.Match[str]) -> str:
        escape, braced, plain = found.groups()
        name = plain or braced
        if escape:
            return found[0][1:]
        return values[name] if name in NAMES and name in values else found[0]

    return _REFERENCE.sub(filled, text)


def expand_command(argv: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Fill in the variables of a command line, except in text that a shell runs.

    A shell has them in its environment.
    """
    scripts = set(shell.scripts(argv))
    return [word if place in scripts else expand(word, values) for place, word in enumerate(argv)]


def expand_environment(environment: Mapping[str, str], values: Mapping[str, str]) -> dict[str, str]:
    """Fill in the variables of an environment's values, but for those of the variables themselves."""
    return {name: value if name in NAMES else expand(value, values) for name, value in environment.items()}


def unknown(words: Sequence[str]) -> str | None:
    """Find the first `${NAME}` of a command line that nobody fills in; None if there is none."""
    scripts = set(shell.scripts(words))
    texts = (word for place, word in enumerate(words) if place not in scripts)
    matches = (reference for text in texts for reference in _REFERENCE.finditer(text))
    return next((each[0] for each in matches if not each[1] and not each[3] and each[2] not in NAMES), None)
