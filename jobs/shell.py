"""Find what only a shell understands in a command line that runs without one."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence

_SHELLS = frozenset({"sh", "bash", "dash", "ash", "ksh", "zsh"})
_SCRIPT_FOLLOWS = re.compile(r"-[a-zA-Z]*c[a-zA-Z]*")
# Of a shell's options, those with a word of their own.
_WITH_WORD = re.compile(r"[-+][a-zA-Z]*[oO]")
# Outside of quotes and behind no backslash, an operator; the text in double quotes is the second group.
_OPERATOR = re.compile(r"""\\.|'[^']*'|([|&;<>]+|`|\$\()|"((?:\\.|[^"\\])*)\"""", re.DOTALL)
# A shell substitutes these within double quotes too.
_SUBSTITUTION = re.compile(r"\\.|(`|\$\()", re.DOTALL)


def operator(text: str, argv: Sequence[str]) -> str | None:
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
