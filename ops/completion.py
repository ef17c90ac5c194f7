"""What may come next on a command line, for the shell's Tab: tasks, flags, and names that are known without asking anybody.

`fab --print-completion-script SHELL` prints what the shell is to run, and that calls `fab --complete -- fab WORDS…`; the last
of the words is the one that is being typed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

JOB_IDS = "job_ids"
"""The file beside inventory.json with the ids of the jobs that were seen last, one a line."""
KEPT_IDS = 200
# A shell expands what it is given: names of any other kind are not for it.
_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_JOBS = frozenset({"job", "original", "resume"})
# There a job gets an id that was never used.
_NEW_JOB = frozenset({"train"})

SCRIPTS = {
    "bash": """\
_complete_{binary}() {{
    local IFS=$'\\n'
    COMPREPLY=( $({binary} --complete -- "${{COMP_WORDS[@]:0:COMP_CWORD+1}}" 2>/dev/null) )
}}
complete -F _complete_{binary} -o default {names}
""",
    "zsh": """\
(( $+functions[compdef] )) || {{ autoload -Uz compinit && compinit }}
_complete_{binary}() {{
    local -a found
    found=( ${{(f)"$({binary} --complete -- "${{(@)words[1,CURRENT]}}" 2>/dev/null)"}} )
    if (( $#found )); then compadd -a found; else _files; fi
}}
compdef _complete_{binary} {names}
""",
}


@dataclass(frozen=True)
class Shape:
    """What a task takes: its flags, by flag the name of the argument where a value follows, and its bare words in order."""

    flags: Sequence[str] = ()
    valued: Mapping[str, str] = field(default_factory=dict)
    words: Sequence[str] = ()


def script(shell: str, names: Sequence[str]) -> str | None:
    """What a shell is to run for a program of these names; None for a shell that is not known."""
    text = SCRIPTS.get(shell)
    return text.format(binary=names[0], names=" ".join(names)) if text else None


def candidates(
    words: Sequence[str], tasks: Mapping[str, Shape], core: Shape, known: Callable[[str], Iterable[str]]
) -> list[str]:
    """What the last of these words may become, without the program's name; `known` gives the names of a kind, such as `job`.

    Nothing where a file may be meant, or what is the trainer's own.
    """
    *before, typed = _joined(words) or [""]
    flag, equals, begun = typed.partition("=")
    where = _walk(before, tasks, core)
    if where is None:
        return []
    task, used, kind = where
    shape = tasks.get(task, core)
    if equals and flag.startswith("-"):
        apart = "=" in words[-2:]  # bash takes it for a word of its own, and wants what is behind it alone
        found = _of_kind(task, {**core.valued, **shape.valued}.get(flag, ""), known)
        return [name if apart else f"{flag}={name}" for name in _begin(found, begun)]
    if kind:
        return _begin(_of_kind(task, kind, known), typed)
    if typed.startswith("-"):
        return _begin(shape.flags, typed)
    return _begin(_bare(task, shape.words[used:], known) if task else tasks, typed)


def _walk(before: Sequence[str], tasks: Mapping[str, Shape], core: Shape) -> tuple[str, int, str] | None:
    """The task, how many bare words it has been given, and the kind of value that must follow; None where nothing is known."""
    task, used, kind = "", 0, ""
    for word in before:
        if kind:
            kind = ""
        elif word == "--":
            return None
        elif word.startswith("-"):
            kind = {**core.valued, **tasks.get(task, core).valued}.get(word, "")
        elif task:
            used += 1
        elif word in tasks:
            task = word
        else:
            return None
    return task, used, kind


def _bare(task: str, left: Sequence[str], known: Callable[[str], Iterable[str]]) -> Iterable[str]:
    """What may stand behind the task as it is: the next word, and where that is a replica, a job's id as well."""
    kinds = left[:2] if list(left[:2]) == ["replica", "job"] else left[:1]
    return [name for kind in kinds for name in _of_kind(task, kind, known)]


def _of_kind(task: str, kind: str, known: Callable[[str], Iterable[str]]) -> Iterable[str]:
    if kind in _JOBS:
        return () if kind == "job" and task in _NEW_JOB else known("job")
    return known(kind)


def _begin(names: Iterable[str], typed: str) -> list[str]:
    return [name for name in names if name.startswith(typed)]


def _joined(words: Sequence[str]) -> list[str]:
    """The words with `--job`, `=`, `x`, as bash takes `--job=x` apart, in one piece again."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1].startswith("--") and (word == "=" or (joined[-1].endswith("=") and joined[-1] != word)):
            joined[-1] += word
        else:
            joined.append(word)
    return joined


class Known:
    """The names that a project's files tell; nothing for a stack that is not up."""

    def __init__(self, root: Path, stack: str | None) -> None:
        self._root = root / ".scaletier"
        self._stack = stack

    def __call__(self, kind: str) -> list[str]:
        """The names of a kind: `job`, `replica`, `stack`."""
        folder = self._folder()
        if kind == "stack":
            return _safe(path.parent.name for path in sorted(self._root.glob("*/inventory.json")))
        if folder is None or kind not in ("job", "replica"):
            return []
        return job_ids(folder) if kind == "job" else _replicas(folder)

    def _folder(self) -> Path | None:
        there = [path.parent for path in self._root.glob("*/inventory.json")]
        if self._stack:
            there = [path for path in there if path.name == self._stack]
        return there[0] if len(there) == 1 else None


def known(words: Sequence[str], environment: Mapping[str, str], here: Path) -> Known:
    """The names of the stack and the project that the words or the environment mean; `here` is this program's own project."""
    flags = dict(pairwise(words))
    flags |= {flag: value for flag, equals, value in (word.partition("=") for word in words) if equals}
    root = flags.get("--project") or environment.get("SCALETIER_PROJECT")
    return Known(Path(root) if root else here, flags.get("--stack") or environment.get("PULUMI_STACK"))


def job_ids(folder: Path) -> list[str]:
    """The ids that were written down for a stack, the newest first."""
    try:
        return _safe((folder / JOB_IDS).read_text().split())
    except (OSError, ValueError):
        return []


def remember(folder: Path, ids: Iterable[str]) -> None:
    """Write down the ids of a stack's jobs, the newest first; where that cannot be, Tab knows less, and nothing is lost."""
    part = folder / f".{JOB_IDS}.{os.getpid()}"
    try:
        part.write_text("".join(f"{each}\n" for each in list(dict.fromkeys(ids))[:KEPT_IDS]))
        part.replace(folder / JOB_IDS)
    except OSError:
        part.unlink(missing_ok=True)


def _replicas(folder: Path) -> list[str]:
    """The replicas of a stack, its roles, and all."""
    try:
        names = [str(host["name"]) for host in json.loads((folder / "inventory.json").read_bytes())["hosts"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return _safe((*names, *dict.fromkeys(name.rpartition("-")[0] for name in names), "all"))


def _safe(names: Iterable[str]) -> list[str]:
    return [name for name in names if _SAFE.fullmatch(name)]
