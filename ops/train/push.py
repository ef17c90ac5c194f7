"""What a host receives for a job, as data: one compressed tar stream and the one command that takes it in."""

from __future__ import annotations

import gzip
import io
import shlex
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ops.package.package import compression
from ops.train.render import UNIT, UNIT_FILE, File

STATE_DIR = "/var/lib/scaletier"
PYTHON = "/opt/scaletier/venv/bin/python"
REPLICA_DIR = "/opt/scaletier/replica"
# A reload reads every unit of the host again, and most jobs bring the unit of the job before.
# The package of an id that was used before on a bucket that is gone must not stay below the new one.
_TAKE_IN = f"""set -e
rm -rf {REPLICA_DIR} "{STATE_DIR}/jobs/$1"
unit=$(cat {UNIT_FILE} 2>/dev/null || true)
tar -xzpf - -C /
[ "$unit" = "$(cat {UNIT_FILE})" ] || systemctl daemon-reload
exec systemctl restart {UNIT}"""
_MISSING = "import importlib.util as u, sys; print(*[n for n in sys.argv[1:] if u.find_spec(n) is None])"


def take_in_command(job_id: str) -> str:
    """Unpack the stream from stdin, and start the unit anew. Needs one channel, and no file of its own on the host."""
    return shlex.join(["sudo", "-n", "sh", "-c", _TAKE_IN, "sh", job_id])


def stop_command() -> str:
    """Stop the replica, also one that systemd waits to start again."""
    return shlex.join(["sudo", "-n", "systemctl", "stop", UNIT])


def check_command(directories: Sequence[str], modules: Iterable[str] = ()) -> str:
    """Print the free bytes below each directory, a line each, and then the modules that the host's Python lacks."""
    check = f"df --output=avail -B1 -- {shlex.join(directories)} | tail -n +2"
    wanted = sorted(modules)
    return f"{check}; {shlex.join([PYTHON, '-c', _MISSING, *wanted])}" if wanted else check


def read_check(output: str, directories: Sequence[str]) -> tuple[dict[str, int], list[str]]:
    """The free bytes of each directory, and the missing modules, of check_command's output; ValueError for another."""
    lines = output.splitlines()
    if len(lines) < len(directories):
        raise ValueError(f"df told nothing of {', '.join(directories)}")
    free = {directory: int(line) for directory, line in zip(directories, lines, strict=False)}
    return free, " ".join(lines[len(directories) :]).split()


def shared_stream(job_id: str, package: Mapping[str, bytes], replica: Mapping[str, bytes]) -> bytes:
    """The part that is the same for every host, compressed once: the trainer package and our replica package.

    It is a gzip member without tar's end mark; a host's own part follows it.
    """
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        home = f"{STATE_DIR}/jobs/{job_id}"
        for directory in (home, f"{home}/package"):
            tar.addfile(_entry(directory, 0o2775, "trainer", "trainer", kind=tarfile.DIRTYPE))
        for path, content in sorted(package.items()):
            _add(tar, f"{home}/package/{path}", content, 0o644, "trainer", "trainer")
        for path, content in sorted(replica.items()):
            _add(tar, f"{REPLICA_DIR}/{path}", content, 0o644, "root", "root")
        end = tar.offset
    return gzip.compress(packed.getvalue()[:end], compression(end), mtime=0)


def host_stream(files: Iterable[File]) -> bytes:
    """The part of one host, to be sent after the shared one."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for file in files:
            if file.link is not None:
                entry = _entry(file.path, file.mode, "root", "root", kind=tarfile.SYMTYPE)
                entry.linkname = file.link
                tar.addfile(entry)
            else:
                _add(tar, file.path, file.content.encode(), file.mode, "root", file.group)
    return gzip.compress(packed.getvalue(), 1, mtime=0)


def replica_package(root: Path) -> dict[str, bytes]:
    """Our replica package as it is here: the hosts run the operator's version."""
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.glob("*.py"))}


def _add(tar: tarfile.TarFile, path: str, content: bytes, mode: int, user: str, group: str) -> None:
    entry = _entry(path, mode, user, group)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))


def _entry(path: str, mode: int, user: str, group: str, kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(path.lstrip("/"))
    entry.mode, entry.uname, entry.gname, entry.type = mode, user, group, kind
    return entry
