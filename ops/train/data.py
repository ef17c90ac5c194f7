"""`fab data`: what is below data/ in the bucket, for trainers to read."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from pathlib import Path

from ops import terminal
from ops.cluster.cluster import Cluster
from ops.errors import DONE, UsageError, meant

FOLDER = "data"
_ACTIONS = ("ls", "put", "rm")


def data(cluster: Cluster, action: str | None, what: str | None, name: str | None, as_json: bool) -> int:
    """`ls [NAME]`, `put PATH [NAME]`, `rm NAME`."""
    if action is None or action == "ls":
        return _list(cluster, what or "", as_json)
    if action not in _ACTIONS:
        raise UsageError(f"fab data {action} is unknown{meant(action, _ACTIONS)}; valid are {', '.join(_ACTIONS)}")
    if what is None:
        raise UsageError(f"fab data {action} needs {'the PATH of a file or folder' if action == 'put' else 'a NAME'}")
    return _put(cluster, Path(what), name) if action == "put" else _remove(cluster, what)


def _list(cluster: Cluster, name: str, as_json: bool) -> int:
    folder = _below(name) if name else FOLDER
    with terminal.Step(f"looking through {folder}"):
        files = cluster.bucket.walk(folder)
    if as_json:
        terminal.as_json(
            {"folder": _seen(cluster, folder), "files": [{"name": n, "bytes": s} for n, s in sorted(files.items())]}
        )
        return DONE
    if not files:
        terminal.note(f"nothing is in {_seen(cluster, folder)}: fab data put PATH puts a file or a folder there")
        return DONE
    terminal.note(f"{len(files)} files, {terminal.size(sum(files.values()))}, in {_seen(cluster, folder)}")
    terminal.table(("FILE", "SIZE"), [(path, terminal.size(size)) for path, size in sorted(files.items())])
    return DONE


def _put(cluster: Cluster, source: Path, name: str | None) -> int:
    files = dict(_files(source))
    if not files:
        raise UsageError(
            f"{source} {'holds no file' if source.is_dir() else 'is not there'}: give the path of a file or a folder"
        )
    target = _below(name or source.resolve().name)
    there = cluster.bucket.walk(target)
    sizes = {path: file.stat().st_size for path, file in files.items()}
    missing = [path for path in files if there.get(path) != sizes[path]]
    with terminal.Step(f"uploading {source}", always=True) as step:
        progress = terminal.sizer(step, sum(sizes[path] for path in missing))
        for path in missing:
            cluster.bucket.upload(f"{target}/{path}" if path else target, files[path], progress)
    same = f", {len(files) - len(missing)} were there in their size" if len(missing) < len(files) else ""
    terminal.out(f"{len(files)} files{same}: {_seen(cluster, target)}")
    return DONE


def _files(source: Path) -> Iterator[tuple[str, Path]]:
    """Every file by its path below the source, which is empty for a source that is a file itself."""
    if source.is_file():
        yield "", source
    for path in sorted(source.rglob("*")):
        if path.is_file():
            yield path.relative_to(source).as_posix(), path


def _remove(cluster: Cluster, name: str) -> int:
    target = _below(name)
    files = cluster.bucket.walk(target)
    if not files:
        tops = sorted({path.partition("/")[0] for path in cluster.bucket.walk(FOLDER)})
        raise UsageError(f"there is no {name} in the bucket's data{meant(name, tops)}; there are {', '.join(tops) or 'none'}")
    with terminal.Step(f"removing {name}"):
        cluster.bucket.remove(target)
    terminal.out(f"{len(files)} files removed: {_seen(cluster, target)}")
    return DONE


def _below(name: str) -> str:
    """The place of a name below data/; UsageError for one that leads out of it."""
    path = posixpath.normpath(name)
    if posixpath.isabs(path) or path.split("/")[0] in ("..", ".") or not name.isprintable():
        raise UsageError(f"{name!r} is no name below {FOLDER}/: take one such as pictures or pictures/train")
    return f"{FOLDER}/{path}"


def _seen(cluster: Cluster, path: str) -> str:
    """The path as the hosts see it, for the arguments of a trainer."""
    return f"{cluster.inventory.bucket}/{path}"
