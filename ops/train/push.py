"""What a host receives for a job, as data: one compressed tar stream and the one command that takes it in."""

from __future__ import annotations

import gzip
import hashlib
import io
import shlex
import tarfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

from ops.package.package import compression, mode
from ops.train.render import TIMER, TRAINER, UNIT, UNITS, File

STATE_DIR = "/var/lib/scaletier"
PYTHON = "/opt/scaletier/venv/bin/python"
READY, FAILED = "ready", "failed: "
# What starts trainers on a host. It comes with the host, and not with a job.
LAUNCH = "/usr/lib/scaletier/launch"
CODE_DIR = "/opt/scaletier"
# The replica may not write what it runs, so Python's own copy of it is made here; it is told by content, as all dates are one.
# The timer does not start what is just being replaced, and what it had started just before gets a second chance.
# Code arrives beside what is there, and takes its place when all of it is: a push that breaks off leaves the old one.
NEW_DIR = f"{CODE_DIR}/.new"
# What runs on a host, and what is told apart by its version there, which is the last to be replaced.
CODE = ("jobs", "replica", "tuner")
VERSION = "replica/VERSION"
# A package comes there, too, where nobody but root looks, and root unpacks nothing into a folder that anybody else may write.
# A reload reads every unit of the host again, and most jobs bring the units of the job before. A replica that runs is only
# woken: it may be another job's, and takes this one up, or new code, when its host is free.
_TAKE_IN = f"""set -e
cd {UNITS}
exec 9>/run/scaletier-push.lock
flock 9
trap 'systemctl start --no-block {TIMER}' EXIT
other=$([ "$(cat {CODE_DIR}/{VERSION} 2>/dev/null)" = "$1" ] || echo yes)
[ -z "$other" ] || systemctl stop {TIMER} 2>/dev/null || true
rm -rf {NEW_DIR}
mkdir -m 0700 {NEW_DIR}
units=$(cat {UNIT} {TIMER} {TRAINER} 2>/dev/null || true)
tar -xzpf - -C /
job={STATE_DIR}/jobs/$2
if [ -n "$2" ] && ! cmp -s {NEW_DIR}/package.sha256 $job/package.sha256; then
  rm -rf $job
  mkdir -m 0755 $job
  mv {NEW_DIR}/package {NEW_DIR}/package.sha256 $job/
fi
rm -rf {NEW_DIR}/package
if [ -n "$other" ]; then
  {PYTHON} -m compileall -qq --invalidation-mode checked-hash -s {NEW_DIR} -p {CODE_DIR} {NEW_DIR} || true
  rm -f {CODE_DIR}/{VERSION}
  for name in {" ".join(CODE)}; do rm -rf {CODE_DIR}/$name; mv {NEW_DIR}/$name {CODE_DIR}/; done
fi
rm -rf {NEW_DIR}
[ "$units" = "$(cat {UNIT} {TIMER} {TRAINER})" ] || systemctl daemon-reload
systemctl reload-or-restart {UNIT} || {{ sleep 3; systemctl reload-or-restart {UNIT}; }}"""
# A host that makes itself of an image at each boot says here how far it is; others are ready when they answer.
_STATE = (
    f"state=$(cat /run/scaletier-state 2>/dev/null || {{ [ -x {PYTHON} ] && echo {READY} || echo preparing; }}); "
    f'[ "$state" != {READY} ] || [ -e {LAUNCH} ] || state="{FAILED}it is older than this scaletier: pulumi up"; '
    f'echo "$state"; [ "$state" = {READY} ] || exit 0'
)
_MISSING = "import importlib.util as u, sys; print(*[n for n in sys.argv[1:] if u.find_spec(n) is None])"


def take_in_command(version: str, job_id: str = "") -> str:
    """Unpack the stream from stdin, that job's package where one is in it, and start the unit or wake it.

    Needs one channel, and no file of its own on the host.
    """
    return shlex.join(["sudo", "-n", "sh", "-c", _TAKE_IN, "sh", version, job_id])


def check_command(directories: Sequence[str], modules: Iterable[str] = (), python: str = PYTHON) -> str:
    """Print how far the host is, and where it is ready the free bytes below each directory, a line each, and then the modules
    that a Python of the host lacks.
    """
    check = f"{_STATE}; df --output=avail -B1 -- {shlex.join(directories)} | tail -n +2"
    wanted = sorted(modules)
    return f"{check}; {shlex.join([python, '-c', _MISSING, *wanted])}" if wanted else check


def read_state(output: str) -> str:
    """How far the host is, of check_command's output: `ready`, `preparing: STEP`, or `failed: STEP: WHY`."""
    return output.partition("\n")[0]


def read_check(output: str, directories: Sequence[str]) -> tuple[dict[str, int], list[str]]:
    """The free bytes of each directory, and the missing modules, of check_command's output; ValueError for another."""
    lines = output.splitlines()[1:]
    if len(lines) < len(directories):
        raise ValueError(f"df told nothing of {', '.join(directories)}")
    free = {directory: int(line) for directory, line in zip(directories, lines, strict=False)}
    return free, " ".join(lines[len(directories) :]).split()


def shared_stream(
    code: Mapping[str, bytes],
    package: Mapping[str, bytes] | None = None,
    mark: str = "",
    executables: Collection[str] = (),
) -> bytes:
    """The part that is the same for every host, compressed once: the replica's code, and a job's package.

    It is a gzip member without tar's end mark; a host's own part follows it. The hosts take a package that does not come this
    way, or whose `mark` is another than the plan's packageSha256, from the bucket.
    """
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path, content in sorted(code.items()):
            _add(tar, f"{NEW_DIR}/{path}", content, 0o644, "root", "root")
        if package is not None:
            tar.addfile(_entry(f"{NEW_DIR}/package", 0o2775, "trainer", "trainer", kind=tarfile.DIRTYPE))
            folders = {str(parent) for path in package for parent in PurePosixPath(path).parents} - {"."}
            for folder in sorted(folders):  # a program may write beside itself, as most do
                tar.addfile(_entry(f"{NEW_DIR}/package/{folder}", 0o2775, "trainer", "trainer", kind=tarfile.DIRTYPE))
            for path, content in sorted(package.items()):
                _add(tar, f"{NEW_DIR}/package/{path}", content, mode(path, executables), "trainer", "trainer")
            _add(tar, f"{NEW_DIR}/package.sha256", mark.encode(), 0o644, "root", "root")
        end = tar.offset
    return gzip.compress(packed.getvalue()[:end], compression(end), mtime=0)


def host_stream(files: Iterable[File]) -> bytes:
    """The part of one host, to be sent after the shared one."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for file in files:
            if file.directory:
                tar.addfile(_entry(file.path, file.mode, file.user, file.group, kind=tarfile.DIRTYPE))
            elif file.link is not None:
                entry = _entry(file.path, file.mode, "root", "root", kind=tarfile.SYMTYPE)
                entry.linkname = file.link
                tar.addfile(entry)
            else:
                _add(tar, file.path, file.content.encode(), file.mode, file.user, file.group)
    return gzip.compress(packed.getvalue(), 1, mtime=0)


def code(root: Path) -> tuple[dict[str, bytes], str]:
    """What runs on the hosts, as it is here, and its version: a hash of all of it."""
    files = {
        path.relative_to(root).as_posix(): path.read_bytes() for name in CODE for path in sorted((root / name).glob("*.py"))
    }
    whole = hashlib.sha256(b"".join(path.encode() + b"\0" + content for path, content in files.items())).hexdigest()
    return {**files, VERSION: whole.encode()}, whole


def _add(tar: tarfile.TarFile, path: str, content: bytes, mode: int, user: str, group: str) -> None:
    entry = _entry(path, mode, user, group)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))


def _entry(path: str, mode: int, user: str, group: str, kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(path.lstrip("/"))
    entry.mode, entry.uname, entry.gname, entry.type = mode, user, group, kind
    return entry
