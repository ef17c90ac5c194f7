"""Variables in a job's arguments and environment, such as `${JOB_DIR}`, and what only a shell understands in a command line.

Both run without a shell: the host fills variables in.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence

MASTER_ADDR, JAX_COORDINATOR = "MASTER_ADDR", "JAX_COORDINATOR_ADDRESS"
"""Variables that hold an address of another host, the second with a port."""
NAMES = (
    *("JOB_DIR", "JOB_ID", "SCALETIER_DATA", "TYPE", "INDEX"),
    *(MASTER_ADDR, "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    *(JAX_COORDINATOR, "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
)
"""Their names; a trainer's environment has the first five, and the master's and workers' has all."""
# `${ANYTHING}`, and `$NAME` with only our NAMES; after `$` or `\` it is literal.
_REFERENCE = re.compile(rf"([$\\]?)\$(?:\{{([^{{}}]*)\}}|({'|'.join(NAMES)})(?!\w))", re.ASCII)
_SHELLS = frozenset({"sh", "bash", "dash", "ash", "ksh", "zsh"})
_SCRIPT_FOLLOWS = re.compile(r"-[a-zA-Z]*c[a-zA-Z]*")
# The options of a shell that take a word.
_WITH_WORD = re.compile(r"[-+][a-zA-Z]*[oO]")
# An operator outside of quotes and not escaped; the second group is the text in double quotes.
_OPERATOR = re.compile(r"""\\.|'[^']*'|([|&;<>]+|`|\$\()|"((?:\\.|[^"\\])*)\"""", re.DOTALL)
# A shell substitutes these within double quotes too.
_SUBSTITUTION = re.compile(r"\\.|(`|\$\()", re.DOTALL)


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
    shell_texts = set(scripts(argv))
    return [word if place in shell_texts else expand(word, values) for place, word in enumerate(argv)]


def expand_environment(environment: Mapping[str, str], values: Mapping[str, str]) -> dict[str, str]:
    """Fill in the variables of an environment's values, but for those of the variables themselves."""
    return {name: value if name in NAMES else expand(value, values) for name, value in environment.items()}


def unknown(words: Sequence[str]) -> str | None:
    """Find the first `${NAME}` of a command line that is no variable; None if there is none."""
    shell_texts = set(scripts(words))
    texts = (word for place, word in enumerate(words) if place not in shell_texts)
    matches = (reference for text in texts for reference in _REFERENCE.finditer(text))
    return next((each[0] for each in matches if not each[1] and not each[3] and each[2] not in NAMES), None)


def shell_operator(text: str, argv: Sequence[str]) -> str | None:
    """Find the first operator in a command's text that a shell would read: `|`, `>`, `$(` and the like.

    Args:
        text: the command as it was typed.
        argv: its words.

    Returns:
        The operator; None if there is none. The text of a shell that the command itself starts is not searched.
    """
    starts_shell = any(True for _ in scripts(argv))
    for part in _OPERATOR.finditer(text):
        outside, quoted = part.groups()
        inside = _SUBSTITUTION.finditer(quoted) if quoted and not starts_shell else ()
        if symbol := outside or next((each[1] for each in inside if each[1]), None):
            return str(symbol)
    return None


def scripts(argv: Sequence[str]) -> Iterator[int]:
    """Find the places of texts that a shell runs: `sh -c TEXT`, `timeout 9 bash -o pipefail -ec TEXT`."""
    for start, word in enumerate(argv):
        if posixpath.basename(word) not in _SHELLS:
            continue
        place, follows = start + 1, False
        while place < len(argv) and argv[place].startswith(("-", "+")):
            follows = follows or bool(_SCRIPT_FOLLOWS.fullmatch(argv[place]))
            place += 2 if _WITH_WORD.fullmatch(argv[place]) else 1
        if follows and place < len(argv):
            yield place
