"""`fab data`: the files below data/ in the bucket, which trainers read."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from infra.scale_tiers import suggest
from jobs.paths import DATA
from ops import terminal
from ops.cluster.bucket import upload_changed
from ops.cluster.cluster import ClusterClient
from ops.errors import DONE, UsageError
from ops.package.package import absolute
from ops.package.tree import GIT_IGNORE_FILE, IGNORE_FILE, show_notes, walk

_ACTIONS = ("ls", "put", "rm")


def data(cluster: ClusterClient, action: str | None, what: str | None, name: str | None, sure: bool, as_json: bool) -> int:
    """Run `ls [NAME]`, `put PATH [NAME]` or `rm NAME`; UsageError for any other action."""
    action = action or "ls"
    if action not in _ACTIONS:
        raise UsageError(f"fab data {action} is unknown{suggest(action, _ACTIONS)}; valid are {', '.join(_ACTIONS)}")
    if what is None and action != "ls":
        raise UsageError(f"fab data {action} needs {'the PATH of a file or folder' if action == 'put' else 'a NAME'}")
    if name is not None and action != "put":
        raise UsageError(f"fab data {action} takes one NAME, and {name!r} is a second one")
    if action == "put":
        result = _put(cluster, Path(what or ""), name, as_json)
    elif action == "rm":
        result = _remove(cluster, what or "", sure)
    else:
        result = _list(cluster, what, as_json)
    if as_json:
        terminal.print_json(result)
    return DONE


def _list(cluster: ClusterClient, name: str | None, as_json: bool) -> dict[str, object]:
    folder = _data_path(name) if name else DATA
    with terminal.ProgressLine(f"looking through {folder}"):
        files = cluster.bucket.walk(folder)
    files = {path or posixpath.basename(folder): size for path, size in sorted(files.items())}
    host_path = _host_path(cluster, folder)
    if not as_json and not files:
        terminal.note(f"nothing is in {host_path}: fab data put PATH puts a file or a folder there")
    elif not as_json:
        terminal.note(f"{terminal.plural(len(files), 'file')}, {terminal.size(sum(files.values()))}, in {host_path}")
        terminal.table(("FILE", "SIZE"), [(path, terminal.size(size)) for path, size in files.items()])
    return {"folder": host_path, "files": [{"name": path, "bytes": size} for path, size in files.items()]}


def _put(cluster: ClusterClient, source: Path, name: str | None, as_json: bool) -> dict[str, object]:
    if not source.exists():
        raise UsageError(f"{source} is not there: give the path of a file or a folder")
    # A repository's own .gitignore is about its code, and often leaves out just the data.
    tree = walk(source, (IGNORE_FILE, GIT_IGNORE_FILE), outer_rules=False)
    show_notes(tree, str(source))
    if not (files := tree.files):
        raise UsageError(f"{source} holds no file: give the path of a file or a folder")
    target = _data_path(name or absolute(source).name)
    existing = cluster.bucket.walk(target)
    if files.keys() == {""} and existing and "" not in existing:  # a file into a folder
        target = f"{target}/{source.name}"
        existing = cluster.bucket.walk(target)
    _check_kinds(cluster, source, target, files, existing)
    uploaded = upload_changed(cluster.bucket, target, files, existing, str(source))
    if not as_json:
        unchanged = f", {len(files) - len(uploaded)} unchanged" if len(uploaded) < len(files) else ""
        ignored = f", {len(tree.ignored_paths)} ignored" if tree.ignored_paths else ""
        terminal.out(f"{terminal.plural(len(files), 'file')}{unchanged}{ignored}: {_host_path(cluster, target)}")
        if source.is_dir() and (others := sorted(existing.keys() - files.keys())):
            terminal.note(f"not in {source}, but still there: {terminal.list_some(others)}; fab data rm removes all")
    return {"folder": _host_path(cluster, target), "uploaded": uploaded}


def _check_kinds(
    cluster: ClusterClient, source: Path, target: str, files: Mapping[str, Path], existing: Mapping[str, int]
) -> None:
    """Check that no file would replace a folder, and no folder a file; UsageError names the first."""
    for folder in sorted(_folders([target])):
        if folder.startswith(f"{DATA}/") and posixpath.basename(folder) in cluster.bucket.sizes(posixpath.dirname(folder)):
            raise UsageError(f"{_host_path(cluster, folder)} is a file: give a NAME that is not below it")
    new, present = ([posixpath.normpath(f"{target}/{name}") for name in names] for names in (files, existing))
    for there, here, paths in (("file", "folder", _folders(new) & {*present}), ("folder", "file", _folders(present) & {*new})):
        if path := min(paths, default=None):
            local = source / posixpath.relpath(path, target)
            raise UsageError(f"{_host_path(cluster, path)} is a {there}, and {local} a {here}: give it another NAME")


def _folders(paths: Iterable[str]) -> set[str]:
    """Return all folders above some paths."""
    folders = {PurePosixPath(path).parent for path in paths}
    return {str(parent) for folder in folders for parent in (folder, *folder.parents)}


def _remove(cluster: ClusterClient, name: str, sure: bool) -> dict[str, object]:
    target = _data_path(name)
    files = cluster.bucket.walk(target)
    if not files:
        tops = sorted({path.partition("/")[0] for path in cluster.bucket.walk(DATA)})
        raise UsageError(f"there is no {name} in the bucket's data{suggest(name, tops)}; there are {', '.join(tops) or 'none'}")
    what = f"{terminal.plural(len(files), 'file')}, {terminal.size(sum(files.values()))}"
    if not sure:
        terminal.confirm(f"remove {_host_path(cluster, target)}, {what}")
    with terminal.ProgressLine(f"removing {name}"):
        cluster.bucket.remove(target)
    terminal.note(f"{what} removed: {_host_path(cluster, target)}")
    return {"folder": _host_path(cluster, target), "removed": len(files)}


def _data_path(name: str) -> str:
    """Return the path of a name below data/; UsageError if it leads out of data/."""
    path = posixpath.normpath(name)
    if posixpath.isabs(path) or path.split("/")[0] in ("..", ".") or not name.isprintable():
        raise UsageError(f"{name!r} is no name below {DATA}/: take one such as pictures or pictures/train")
    return f"{DATA}/{path}"


def _host_path(cluster: ClusterClient, path: str) -> str:
    """Return the path as the hosts see it, for the arguments of a trainer."""
    return f"{cluster.inventory.bucket}/{path}"
