"""Name unsaved files, which a job wrote outside JOB_DIR; keep them if JOB_DIR is empty: `keep_unsaved.py REQUEST`.

The copies are in JOB_DIR/left/<replica>/. This program runs as the trainer's user in a unit that sees the same
folders, so it reads and writes only what the trainer can. It imports nothing of this project, and prints one JSON object:
`jobDirEmpty`, `kept`, `keptFiles`, `keptBytes`, `leftOut`, `leftOutFiles`, and `error` if it could not do all.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

UNSAVED_FOLDER = "left"
"""The folder in JOB_DIR for files that were left behind elsewhere."""
MOST_BYTES = 100_000_000
MOST_FILES = 1000
"""The most that is kept of a replica: the smallest files, as many as fit."""
NAMED = 50
"""The most names of each kind in the report."""
LONGEST = 200
_ENTRIES, _DEPTH = 50_000, 32
_CHUNK = 1 << 20
_NICE = 10
HOME = "home/"
"""The prefix of the names of files in HOME."""
# Caches, which programs can make again, by their usual names, and by the mark of bford.info/cachedir.
CACHES, _MARK = frozenset({"__pycache__", ".cache", ".nv"}), "CACHEDIR.TAG"
# Caches of TensorFlow's AutoGraph and PyTorch's compiler in a folder for temporary files.
_TEMPORARY = ("__autograph_generated_file", "torchinductor_")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class LimitError(Exception):
    """One line: why not all files could be searched or copied."""


class UnsavedFile(NamedTuple):
    """A file that the job wrote: its top folder, its path below that, its name among the copies, its size."""

    top: str
    path: tuple[str, ...]
    name: str
    size: int


class Search:
    """Looks through folders without following links, as far as time and number allow."""

    def __init__(self, since: int, deadline: float) -> None:
        """Prepare a search; `since` is in nanoseconds of the epoch: older files came with the job."""
        self._since, self._deadline, self._entries = since, deadline, 0

    def files(self, top: str, prefix: str = "") -> Iterator[UnsavedFile]:
        """Find the regular files below a folder that changed since; LimitError if there is too much."""
        with suppress(OSError):  # no such folder
            folder = os.open(top, _FOLDER)
            try:
                yield from self._below(folder, top, (), prefix)
            finally:
                os.close(folder)

    def _below(self, folder: int, top: str, path: tuple[str, ...], prefix: str) -> Iterator[UnsavedFile]:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in self._counted(entries)]
        if path and _MARK in names:
            return
        # Libraries keep their settings in hidden folders of HOME: Keras writes one as it is imported.
        settings = prefix == HOME and not path
        for name in sorted(names):
            if name in CACHES or name.startswith(_TEMPORARY):
                continue
            with suppress(OSError):  # it may be gone, or unreadable even for its owner
                info = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if stat.S_ISREG(info.st_mode) and info.st_ctime_ns > self._since:
                    yield UnsavedFile(top, (*path, name), prefix + "/".join((*path, name)), info.st_size)
                elif stat.S_ISDIR(info.st_mode) and not (settings and name.startswith(".")):
                    if len(path) >= _DEPTH:
                        raise LimitError(f"folders are nested deeper than {_DEPTH}")
                    below = os.open(name, _FOLDER, dir_fd=folder)
                    try:
                        yield from self._below(below, top, (*path, name), prefix)
                    finally:
                        os.close(below)

    def _counted(self, entries: Iterator[os.DirEntry[str]]) -> Iterator[os.DirEntry[str]]:
        for entry in entries:
            self._entries += 1
            if self._entries > _ENTRIES:
                raise LimitError(f"there are more than {_ENTRIES} files and folders")
            check_time(self._deadline)
            yield entry


def check_time(deadline: float) -> None:
    """Raise LimitError after a deadline on the monotonic clock."""
    if time.monotonic() > deadline:
        raise LimitError("it took too long")


def open_file(unsaved: UnsavedFile) -> IO[bytes]:
    """Open a file that was found, following no link; OSError if it is no regular file by now."""
    folder = os.open(unsaved.top, _FOLDER)
    try:
        for part in unsaved.path[:-1]:
            below = os.open(part, _FOLDER, dir_fd=folder)
            os.close(folder)
            folder = below
        file = os.fdopen(os.open(unsaved.path[-1], _FILE, dir_fd=folder), "rb")
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError("it is no file")
    return file


class LocalFolder:
    """JOB_DIR as a folder of the host."""

    def __init__(self, job_dir: str) -> None:
        self._top = Path(job_dir)

    def wrote(self, search: Search) -> bool:
        """Return True if the job wrote a file here."""
        return any(file.path[0] != UNSAVED_FOLDER for file in search.files(str(self._top)))

    def create(self, name: str) -> IO[bytes]:
        """Open a file below it for writing."""
        target = self._top / name
        target.parent.mkdir(parents=True, exist_ok=True)
        # A pipe of the job without a reader is an error at once, and not a wait until the time limit.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
        return os.fdopen(os.open(target, flags, 0o666), "wb")

    def remove(self, name: str) -> None:
        """Remove an incomplete file."""
        (self._top / name).unlink()


class Url:
    """JOB_DIR by its URL, through fsspec."""

    def __init__(self, job_dir: str) -> None:
        installed = Path(sys.executable).parents[1] / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
        sys.path.append(str(installed))  # and no code of its .pth files
        from fsspec.core import url_to_fs

        self._fs, self._top = url_to_fs(job_dir.rstrip("/"))

    def wrote(self, _: Search) -> bool:
        """Return True if there is an object."""
        names = (name[len(self._top) :].lstrip("/") for name in self._fs.find(self._top))
        return any(name and not name.endswith("/") and not name.startswith(f"{UNSAVED_FOLDER}/") for name in names)

    def create(self, name: str) -> IO[bytes]:
        """Open an object below it for writing."""
        file: IO[bytes] = self._fs.open(f"{self._top}/{name}", "wb")
        return file

    def remove(self, name: str) -> None:
        """Do nothing: an object appears only once it is complete."""


def keep(
    job_dir: str, replica: str, since: int, folders: Sequence[tuple[str, str]], seconds: float, wrote: bool = False
) -> dict[str, Any]:
    """Copy the files that the job wrote below these folders, each given with the prefix of its files' names.

    Nothing is copied if JOB_DIR has a file of the job; `wrote` is True if the caller knows that.
    """
    deadline = time.monotonic() + seconds
    target = None if wrote else Url(job_dir) if "://" in job_dir else LocalFolder(job_dir)
    if target and has_job_files(target, Search(since, deadline)):
        target = None
    files: list[UnsavedFile] = []
    report: dict[str, Any] = {"jobDirEmpty": target is not None}
    search = Search(since, deadline)
    try:
        for top, prefix in folders:
            files.extend(search.files(top, prefix))
    except LimitError as error:
        report["error"] = str(error)
    copies: list[tuple[str, int]] = []
    if target:
        copies, left_out, stopped = _copy(files, f"{UNSAVED_FOLDER}/{replica}", target, deadline)
        if stopped:
            report["error"] = stopped
    else:
        largest = sorted(files, key=lambda each: (-each.size, each.name))
        left_out = [(each.name, size(each.size)) for each in largest]
    return report | {
        "kept": [printable(name) for name, _ in copies[:NAMED]],
        "keptFiles": len(copies),
        "keptBytes": sum(size for _, size in copies),
        "leftOut": [f"{printable(name)} ({why})" for name, why in left_out[:NAMED]],
        "leftOutFiles": len(left_out),
    }


def has_job_files(target: LocalFolder | Url, search: Search) -> bool:
    """Return True if the job wrote a file to JOB_DIR."""
    try:
        return target.wrote(search)
    except LimitError:
        return True  # a folder that large is not empty


def _copy(
    unsaved: Sequence[UnsavedFile], folder: str, target: LocalFolder | Url, deadline: float
) -> tuple[list[tuple[str, int]], list[tuple[str, str]], str]:
    """Copy files into a folder of JOB_DIR; return those copied with size, those left out with reason, and why it stopped."""
    copies: list[tuple[str, int]] = []
    left_out: list[tuple[str, str]] = []
    free_bytes, stopped = MOST_BYTES, ""
    for each in sorted(unsaved, key=lambda each: (each.size, each.name)):
        if each.size > free_bytes or len(copies) == MOST_FILES:
            left_out.append((each.name, size(each.size)))
            continue
        try:
            each.name.encode()  # names in a bucket are UTF-8
            check_time(deadline)
            with open_file(each) as source:
                _write(source, each.size, target, f"{folder}/{each.name}", deadline)
        except LimitError as error:
            stopped = str(error)
            left_out.append((each.name, stopped))
        except Exception as error:  # noqa: BLE001  clients raise errors of their own
            left_out.append((each.name, (error.strerror if isinstance(error, OSError) else None) or type(error).__name__))
        else:
            free_bytes -= each.size
            copies.append((each.name, each.size))
    left_out.reverse()  # the largest first
    return copies, left_out, stopped


def _write(source: IO[bytes], most: int, target: LocalFolder | Url, name: str, deadline: float) -> None:
    complete = False
    try:
        with target.create(name) as out:
            while most > 0 and (piece := source.read(min(_CHUNK, most))):
                check_time(deadline)
                out.write(piece)
                most -= len(piece)
        complete = True
    finally:
        if not complete:
            with suppress(OSError):
                target.remove(name)


def printable(name: str) -> str:
    """Return a printable name: of a bounded length, and of characters that any record can hold."""
    text = name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def size(count: float) -> str:
    """Return the bytes in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def main() -> None:
    """Keep the files by the options on the command line, and print the report."""
    with suppress(OSError):
        os.nice(_NICE)
    options = json.loads(sys.argv[1])
    folders = [(str(top), str(prefix)) for top, prefix in options["folders"]]
    report = keep(options["jobDir"], options["replica"], options["since"], folders, options["seconds"], options["wrote"])
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
