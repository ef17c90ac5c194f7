"""The git repository of a project, for builds that read the project's version from it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

from infra.runtime.uv import GIT_REPOSITORY


@dataclass(frozen=True)
class Repository:
    """A project's repository: its top folder, and a text that changes with its commit, tags and modified state."""

    top: Path
    state: str


def find(folder: Path) -> Repository | None:
    """Return a folder's repository; None if there is none, it has no commit, or git is not installed."""
    top = _git(folder, "rev-parse", "--show-toplevel")
    head = _git(folder, "rev-parse", "HEAD")
    if not top or not head:
        return None
    tags = _git(folder, "for-each-ref", "--format=%(refname) %(objectname)", "refs/tags")
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return Repository(Path(top.strip()), f"{head}{tags}{bool(changed)}")


def tracked_paths(folder: Path) -> frozenset[str]:
    """Return the relative paths of the files below a folder that its repository tracks, and of their folders."""
    files = (_git(folder, "ls-files", "-z", "--recurse-submodules") or "").split("\0")
    return frozenset(str(path) for file in files if file for path in (PurePath(file), *PurePath(file).parents))


def copy(repository: Repository, into: Path, files: Mapping[Path, bytes]) -> None:
    """Make a repository with the same commit and tags, but only these files, by their paths below its top.

    Files that are missing in the copy do not count as changes, so that no version is marked as dirty.
    """
    _git(repository.top, "clone", "--quiet", "--shared", "--no-checkout", str(repository.top), str(into))
    write(into, files)
    for name, value in (("core.fileMode", "false"), ("core.symlinks", "true")):
        _git(into, "config", name, value)
    _git(into, "reset", "--quiet")
    missing = _git(into, "diff-files", "-z", "--name-only", "--diff-filter=DT") or ""
    _git(into, "update-index", "-z", "--skip-worktree", "--stdin", stdin=missing)


def write(into: Path, files: Mapping[Path, bytes]) -> None:
    """Write files by their paths below a folder."""
    for path, content in files.items():
        (target := into / path).parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)


def _git(folder: Path, *words: str, stdin: str = "") -> str | None:
    """Return git's output about the folder's own repository, or None if it fails."""
    environment = {name: value for name, value in os.environ.items() if name not in GIT_REPOSITORY}
    try:
        process = subprocess.run(
            ["git", *words],
            cwd=folder,
            env=environment,
            input=stdin,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            check=False,
        )
    except OSError:
        return None
    return None if process.returncode else process.stdout
