"""Check commands that hosts run without a shell, placeholders such as `${JOB_DIR}` in them, and notification targets."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from glob import glob

from jobs import notification, variables

VALID_TARGET = (
    'an http or https URL, such as https://example.com/hook, or a command, such as "./done.sh --now" or "sh -c \'…\'"'
)
_SHELL_KEYWORDS = ("!", "[[", "{", "case", "for", "if", "until", "while")
_SHELL_BUILTINS = (".", "alias", "cd", "eval", "exec", "exit", "export", "set", "source", "trap", "ulimit", "umask", "unset")
SHELL_WORDS = frozenset((*_SHELL_KEYWORDS, *_SHELL_BUILTINS))
"""Keywords and builtins of shells, which are no programs."""
_MAX_TARGET_CHARACTERS = 2048
# The first group is an operator outside of quotes and not escaped; the second is a text in double quotes. A line that begins
# with a hyphen goes on with the options of the line before.
_OPERATOR = re.compile(r"""\\.|'[^']*'|([|&;<>]+|`|\$\(|\n\s*(?![-\s]))|"((?:\\.|[^"\\])*)\"""", re.DOTALL)
# A text in single quotes, one in double quotes, and an escaped character outside of quotes.
_SHELL_TEXT = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.""", re.DOTALL)
# Characters that a backslash escapes also in double quotes, besides those of shlex.
_ESCAPED = re.compile(r"(\\\$)|\\(`)|\\.", re.DOTALL)
_DOLLAR = "\0"  # stands for an escaped one; no argument may have it
_QUOTED = re.compile(r"""\\.|'[^']*'|"(?:\\.|[^"\\])*\"""", re.DOTALL)
_PATTERN, _PLAIN_VARIABLE = re.compile(r"[*?\[]"), re.compile(r"(?<!\$)\$([A-Za-z_]\w*)", re.ASCII)
# A shell substitutes these within double quotes too.
_SUBSTITUTION = re.compile(r"\\.|(`|\$\()", re.DOTALL)


def split_words(text: str) -> list[str]:
    """Split a command into words as a shell does; ValueError if its quotes do not match.

    An escaped dollar is literal: no host replaces the variable after it, and in the script of `sh -c` that shell reads it.
    """

    def unescape(part: re.Match[str]) -> str:
        if part[0].startswith("'"):
            return part[0]
        return _ESCAPED.sub(lambda each: _DOLLAR if each[1] else each[2] or each[0], part[0])

    words = shlex.split(_SHELL_TEXT.sub(unescape, text) if _DOLLAR not in text else text)
    script_indexes = set(variables.scripts(words))
    return [
        word.replace(_DOLLAR, "$") if index in script_indexes else _literal_dollars(word) for index, word in enumerate(words)
    ]


def _literal_dollars(word: str) -> str:
    before, *parts = word.split(_DOLLAR)
    return before + "".join(f"$${part}" if variables.REFERENCE.match(f"${part}") else f"${part}" for part in parts)


def shell_operator(text: str, argv: Sequence[str]) -> str | None:
    """Return the first operator in a command's text that needs a shell, such as `|`, `>` or `$(`.

    Args:
        text: the command as the user wrote it.
        argv: `text`, split into words.

    Returns:
        The operator; None if there is none. A script in the command, such as that of `sh -c`, is not searched.
    """
    starts_shell = any(True for _ in variables.scripts(argv))
    for part in _OPERATOR.finditer(text):
        outside, quoted = part.groups()
        inside = _SUBSTITUTION.finditer(quoted) if quoted and not starts_shell else ()
        if symbol := outside or next((each[1] for each in inside if each[1]), None):
            return str(symbol)
    return None


def find_shell_expansions(text: str, argv: Sequence[str], folder: str) -> Iterator[str]:
    """Yield the words of a command that only a shell would expand: `~`, `$HOME`, and patterns of files.

    Args:
        text: the command as the user wrote it.
        argv: `text`, split into words.
        folder: where the command runs; a relative pattern counts only if it matches files there.
    """
    for word, part in zip(argv, _QUOTED.sub("q", text).split(), strict=False):
        names = [name for name in _PLAIN_VARIABLE.findall(part) if name not in variables.NAMES]
        patterned = _PATTERN.search(part)
        if part.startswith("~") or names or (patterned and (part.startswith("/") or glob(word, root_dir=folder))):  # noqa: PTH207
            yield word


def unknown_placeholder(words: Sequence[str]) -> str | None:
    """Return the first `${NAME}` in a command line that no host replaces; None if there is none."""
    script_indexes = set(variables.scripts(words))
    texts = (word for index, word in enumerate(words) if index not in script_indexes)
    matches = (placeholder for text in texts for placeholder in variables.REFERENCE.finditer(text))
    return next((each[0] for each in matches if not each[1] and not each[3] and each[2] not in variables.NAMES), None)


def first_placeholder(texts: Iterable[str], names: Collection[str] = variables.NAMES) -> str | None:
    """Return the first placeholder in texts with one of these names, such as `${RANK}` or `$RANK`; None if there is none."""
    placeholders = (match for text in texts for match in variables.REFERENCE.finditer(text))
    return next((each[0] for each in placeholders if not each[1] and (each[2] or each[3]) in names), None)


def check_target(target: str) -> None:
    """Raise ValueError, in one line, if a target is neither a URL that may get a notification nor a command."""
    if len(target) > _MAX_TARGET_CHARACTERS:
        raise ValueError(f"it has {len(target)} characters, and {_MAX_TARGET_CHARACTERS} are allowed")
    if not target.strip():
        raise ValueError("it is empty")
    if not target.isprintable():
        raise ValueError("it holds a control character")
    if notification.is_url(target):
        notification.check_url(target)
        return
    try:
        words = shlex.split(target)
    except ValueError as error:
        raise ValueError(f"it cannot be split into words ({error})") from None
    if notification.is_url(words[0]) or "://" in words[0] or words[0].startswith("//"):
        raise ValueError("a URL must begin with its scheme, without characters before it")
    if operator := shell_operator(target, words):
        raise ValueError(f"it runs without a shell, and has a shell's {operator}")
