"""The files of a folder that a package and `fab data put` send: links are followed, ignored files skipped."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ops import terminal
from ops.errors import UsageError
from ops.package import git

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

IGNORE_FILE, GIT_IGNORE_FILE = ".scaletierignore", ".gitignore"
# Folders with the keys of stacks, which are never sent: every trainer can read the bucket and packages.
KEY_FOLDERS = frozenset({".scaletier", ".pulumi-state", ".pulumi"})
_VIRTUAL_ENVIRONMENT = "pyvenv.cfg"
# A repository's history, which is never sent: a folder, or in a worktree or submodule a file that names this folder.
_HISTORY = ".git"
# Pathspec's group for the end of a folder, and its regular expression for `*/`.
_FOLDER_MARK = "ps_d"
_ANY_FOLDER = f"(?P<{_FOLDER_MARK}>/)"
# Git drops these; pathspec takes `a\` and two spaces for an invalid pattern.
_SPACES_AT_END = re.compile(r"(?<!\\) +$")
_NOTES = {
    "keys": "keys of stacks are skipped",
    "outside": "links that leave the folder are followed",
    "cycles": "links to a folder that contains them are skipped",
    "broken": "broken links are skipped",
    "empty": "empty folders are skipped",
    "special": "pipes, sockets and devices are skipped",
}
_SHOWN = 5
# Folders with links to one another may have any number of paths.
_MOST_LINKED_FOLDERS = 10_000


@dataclass(frozen=True)
class Tree:
    """The files of a folder, by their paths below it.

    Attributes:
        files: the local file of each path.
        ignored: by the name of an ignore file, the paths that it excludes; a folder ends in `/`.
        notes: lines about skipped paths and unusual links, one for each kind.
    """

    files: Mapping[str, Path]
    ignored: Mapping[str, Sequence[str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def ignored_paths(self) -> tuple[str, ...]:
        """The paths that ignore files exclude."""
        return tuple(sorted(path for paths in self.ignored.values() for path in paths))

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file."""
        return {path: file.stat().st_size for path, file in self.files.items()}


def walk(
    root: Path,
    ignore_files: Sequence[str] = (),
    skipped: Collection[str] = (),
    suffixes: tuple[str, ...] = (),
    outer_rules: bool = True,
) -> Tree:
    """Find every file below a folder, also through symbolic links.

    Args:
        root: the folder, or a file, which then has the empty path.
        ignore_files: names of files in gitignore's syntax; an earlier one overrides a later one.
        skipped: names of folders to skip; if not empty, virtual environments are skipped, too.
        suffixes: those of the names of files to skip.
        outer_rules: apply the .gitignore files above the folder, up to the repository's, too.
    """
    if keys := KEY_FOLDERS.intersection(Path(os.path.realpath(root)).parts):
        raise UsageError(f"{root} is in {', '.join(keys)}, which holds keys of stacks and is never sent: give another path")
    if root.is_file():
        return Tree({"": root})
    if root.exists() and not root.is_dir():
        kind = "pipe" if root.is_fifo() else "socket" if root.is_socket() else "device"
        raise UsageError(f"{root} is a {kind}: give the path of a file or a folder")
    walker = _Walker(root, [_IgnoreRules(root, name, outer_rules) for name in ignore_files], skipped, suffixes)
    try:
        files = dict(sorted(walker.walk(root, "", (os.path.realpath(root),))))
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be read: {error.strerror}") from None
    # A folder of data often ignores all but its .gitignore, to be in a repository while it is empty.
    if walker.ignored and all(path.startswith(".git") for path in files):
        reasons = " and ".join(f"{name} ({', '.join(paths[:_SHOWN])})" for name, paths in walker.ignored.items())
        raise UsageError(f"{root} has no file left, as its ignore files exclude all: remove lines from {reasons}")
    return Tree(files, walker.ignored, tuple(walker.notes()))


def show_notes(tree: Tree, what: str) -> None:
    """Print the notes of a tree, and the paths that .gitignore excludes."""
    for line in tree.notes:
        terminal.note(f"{what}: {line}")
    if paths := tree.ignored.get(GIT_IGNORE_FILE):
        how = f"a line such as !{paths[0]} in {IGNORE_FILE} includes it"
        terminal.note(f"{what}: {GIT_IGNORE_FILE} excludes {terminal.list_some(sorted(paths))}; {how}")


class _Walker:
    def __init__(self, root: Path, rules: Sequence[_IgnoreRules], skipped: Collection[str], suffixes: tuple[str, ...]) -> None:
        self._root, self._real_root = root, Path(os.path.realpath(root))
        self._skipped, self._suffixes = skipped, suffixes
        self._rules = rules
        self.ignored: dict[str, list[str]] = {}
        self._noted: dict[str, list[str]] = {kind: [] for kind in _NOTES}
        # Folders that .gitignore excludes, except for the tracked files in them.
        self._tracked_folders: list[str] = []
        self._linked_folders = 0

    def notes(self) -> Iterator[str]:
        """Yield the lines of `Tree.notes`."""
        for kind, paths in self._noted.items():
            if paths:
                yield f"{_NOTES[kind]}: {terminal.list_some(paths)}"

    def walk(self, folder: Path, prefix: str, chain: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
        """Yield the files of a folder, by path with `prefix`; `chain` has the real paths of the folder and of its parents."""
        entries = sorted(folder.iterdir())
        if prefix and not entries:
            self._noted["empty"].append(prefix)
        for rules in self._rules:
            rules.read(folder, prefix)
        for entry in entries:
            path = f"{prefix}{entry.name}"
            is_folder = entry.is_dir()
            if is_folder and entry.name in KEY_FOLDERS:
                self._noted["keys"].append(f"{path}/")
                continue
            # `access` raises no error for an unreadable folder, which may be ignored
            if is_folder and self._skipped and os.access(entry / _VIRTUAL_ENVIRONMENT, os.F_OK):
                continue
            if entry.name in self._skipped if is_folder else entry.name.endswith(self._suffixes) and bool(self._suffixes):
                continue
            if entry.name in (IGNORE_FILE, _HISTORY):
                continue
            if ignore_file := self._find_ignore_file(f"{path}/" if is_folder else path):
                self.ignored.setdefault(ignore_file, []).append(f"{path}/" if is_folder else path)
            elif not self._includes(entry, path, chain):
                continue
            elif is_folder:
                yield from self.walk(entry, f"{path}/", (*chain, os.path.realpath(entry)))
            elif entry.is_file():
                yield path, entry
            else:
                self._noted["special"].append(path)

    def _find_ignore_file(self, path: str) -> str:
        """Return the name of the ignore file that excludes a path; empty if none does."""
        verdicts = ((rules.name, rules.ignores(path)) for rules in self._rules)
        inherited = any(map(path.startswith, self._tracked_folders))
        name, ignored = next(
            ((name, verdict) for name, verdict in verdicts if verdict is not None), (GIT_IGNORE_FILE, inherited)
        )
        if ignored and name == GIT_IGNORE_FILE and path.rstrip("/") in self._tracked_paths:
            self._tracked_folders += [path] if path.endswith("/") else []
            return ""
        return name if ignored else ""

    @cached_property
    def _tracked_paths(self) -> frozenset[str]:
        """Git's tracked files, which are included even if a .gitignore excludes them, as in git itself."""
        return git.tracked_paths(self._root)

    def _includes(self, entry: Path, path: str, chain: tuple[str, ...]) -> bool:
        """Return True unless an entry is a link to skip; take note of an unusual link."""
        if not entry.is_symlink():
            return True
        real = Path(os.path.realpath(entry))
        kind = ""
        if not entry.exists():  # a link to itself, too
            kind = "broken"
        elif entry.is_dir() and (str(real) in chain or self._real_root.is_relative_to(real)):
            kind = "cycles"
        elif KEY_FOLDERS.intersection(real.parts):
            kind = "keys"
        elif not real.is_relative_to(self._real_root):
            kind = "outside"
        if kind:
            self._noted[kind].append(f"{path} -> {entry.readlink()}")
        if kind not in ("", "outside"):
            return False
        self._linked_folders += entry.is_dir()
        if self._linked_folders > _MOST_LINKED_FOLDERS:
            raise UsageError(
                f"{self._root} has links that make a folder of more than {_MOST_LINKED_FOLDERS} others: see {path}"
            )
        return True


class _IgnoreRules:
    """The ignore files of one name; as in git, the deepest file with a matching line decides, by its last one."""

    def __init__(self, root: Path, name: str, outer: bool) -> None:
        self.name = name
        # From the outermost folder inwards: the prefix to add to a path below the root, the one to remove, the file's lines.
        self._specs: list[tuple[str, str, GitIgnoreSpec]] = []
        if outer and name == GIT_IGNORE_FILE:
            self._read_above(Path(os.path.realpath(root)))

    def _read_above(self, root: Path) -> None:
        """Read the files of the folders above, up to the repository's; none if they exclude the root or one of these."""
        top = next((folder for folder in (root, *root.parents) if (folder / _HISTORY).exists()), root)
        above = [each for each in root.parents if each.is_relative_to(top)]
        for folder in reversed(above):
            self._read(folder, f"{root.relative_to(folder).as_posix()}/", "")
        for folder in (root, *above[:-1]):
            suffix = f"{root.relative_to(folder).as_posix()}/" if folder != root else ""
            paths = ((spec, added.removesuffix(suffix)) for added, _, spec in reversed(self._specs) if added.endswith(suffix))
            verdicts = (_verdict(spec, path) for spec, path in paths if path)
            if next((verdict for verdict in verdicts if verdict is not None), False):
                self._specs.clear()

    def read(self, folder: Path, prefix: str) -> None:
        """Read the file of a folder, if it has one; `prefix` is its path below the root."""
        self._read(folder, "", prefix)

    def ignores(self, path: str) -> bool | None:
        """Return whether the files exclude a path below the root; None if no line matches it."""
        for added, removed, spec in reversed(self._specs):
            if path.startswith(removed) and (ignored := _verdict(spec, added + path[len(removed) :])) is not None:
                return ignored
        return None

    def _read_lines(self, file: Path) -> list[str]:
        """Return a file's lines; those of a .gitignore may have any bytes, and invalid ones match nothing, as in git."""
        of_git = self.name == GIT_IGNORE_FILE
        text = file.read_text("utf-8-sig", "surrogateescape" if of_git else "strict")
        lines = [_SPACES_AT_END.sub("", line) for line in text.splitlines()]
        return [line for line in lines if not of_git or _is_valid(line)]

    def _read(self, folder: Path, added: str, removed: str) -> None:
        file = folder / self.name
        if not file.is_file():
            return
        from pathspec import GitIgnoreSpec  # takes long to import

        try:
            self._specs.append((added, removed, GitIgnoreSpec.from_lines(self._read_lines(file))))
        except (OSError, ValueError) as error:
            raise UsageError(f"{file} cannot be read: {error}") from None


def _is_valid(line: str) -> bool:
    from pathspec import GitIgnoreSpec

    try:
        GitIgnoreSpec.from_lines([line])
    except ValueError:
        return False
    return True


def _verdict(spec: GitIgnoreSpec, path: str) -> bool | None:
    """Return whether an ignore file excludes a path, which ends in `/` for a folder; None if no line matches it.

    As in git, the last line that matches the path itself decides; pathspec's lines also match the paths in a folder.
    """
    if spec.check_file(path).include is None:  # quickly, for most paths
        return None
    for pattern in reversed(spec.patterns):
        result = pattern.match_file(path)
        if result is None or pattern.regex is None:
            continue
        if pattern.regex.pattern == _ANY_FOLDER:
            itself = path.endswith("/")
        elif result.match.groupdict().get(_FOLDER_MARK):
            itself = result.match.end(_FOLDER_MARK) == len(path)
        else:
            itself = not (pattern.regex.pattern.endswith("/") and result.match.end() == len(path))  # `src/**` is not src itself
        if itself:
            return pattern.include
    return None
