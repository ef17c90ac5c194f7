"""The content a host receives for a job: one compressed tar stream and one command to unpack it."""

from __future__ import annotations

import ast
import contextlib
import gzip
import hashlib
import io
import json
import os
import shlex
import tarfile
import tokenize
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from jobs.paths import CODE_DIR, PYTHON
from ops.cluster import root_helper
from ops.cluster.host_files import RemoteFile
from ops.cluster.root_helper import PROGRAM
from ops.package.package import compression, mode

READY, OLD, FAILED = "ready", "older than this scaletier", "failed: "
# Code and a package arrive beside the present ones, in a folder for root alone.
NEW_DIR = f"{CODE_DIR}/.new"
# The packages that run on a host, identified there by their version.
CODE = ("jobs", "hosts", "hosts/agent", "hosts/tuner")
VERSION = "hosts/VERSION"
# A host that sets itself up at each boot reports its progress here; others are ready when they answer.
_STATE = (
    f"state=$(cat /run/scaletier-state 2>/dev/null || {{ [ -x {PYTHON} ] && echo {READY} || echo preparing; }}); "
    f'[ "$state" != {READY} ] || [ -e {PROGRAM} ] || state="{OLD}"; '
    f'echo "$state"; [ "$state" = {READY} ] || exit 0'
)
_MISSING = "import importlib.util as u, sys; print(*[n for n in sys.argv[1:] if u.find_spec(n) is None])"


def install_command(version: str, job_id: str = "") -> str:
    """Unpack the stream from stdin, with that job's package if it has one, and start or wake the unit."""
    return root_helper.command("take-in", version, *([job_id] if job_id else []))


def check_command(directories: Sequence[str], modules: Iterable[str] = (), python: str = PYTHON) -> str:
    """Return the command that prints a host's state and, if it is ready, free bytes and missing modules.

    It prints the free bytes below each directory, a line each, and then the modules that a Python of the host lacks.
    """
    check = f"{_STATE}; df --output=avail -B1 -- {shlex.join(directories)} | tail -n +2"
    names = sorted(modules)
    return f"{check}; {shlex.join([python, '-c', _MISSING, *names])}" if names else check


def read_state(output: str) -> str:
    """Parse the host's state of check_command's output: READY, OLD, `preparing: STEP` or `failed: STEP: WHY`."""
    return output.partition("\n")[0]


def read_check(output: str, directories: Sequence[str]) -> tuple[dict[str, int], list[str]]:
    """Parse the free bytes of each directory, and the missing modules; ValueError for other output."""
    lines = output.splitlines()[1:]
    if len(lines) < len(directories):
        raise ValueError(f"df printed nothing of {', '.join(directories)}")
    free = {directory: int(line) for directory, line in zip(directories, lines, strict=False)}
    return free, " ".join(lines[len(directories) :]).split()


def shared_stream(
    code: Mapping[str, bytes], package: Mapping[str, bytes] | None = None, mark: str = "", executables: Collection[str] = ()
) -> bytes:
    """Return the part for all hosts, compressed once: the agent's code, and a job's package.

    It is a gzip member without tar's end mark; a host's own part follows it. The hosts take a package that does not come this
    way, or whose `mark` is another than the plan's packageSha256, from the bucket.
    """
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path, content in sorted(code.items()):
            _add(tar, f"{NEW_DIR}/{path}", content)
        if package is not None:
            for path, content in sorted(package.items()):
                _add(tar, f"{NEW_DIR}/package/{path}", content, mode(path, executables))
            _add(tar, f"{NEW_DIR}/package.sha256", mark.encode())
        end = tar.offset
    return gzip.compress(packed.getvalue()[:end], compression(end), mtime=0)


def files_stream(files: Iterable[RemoteFile]) -> bytes:
    """Return the part of one host, to be sent after the shared one."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for file in files:
            _add(tar, file.path, file.content.encode())
    return gzip.compress(packed.getvalue(), 1, mtime=0)


def code(root: Path) -> tuple[dict[str, bytes], str]:
    """Return the local code for the hosts, without docstrings and comments, and its version: a hash of all of it.

    What is returned is kept in `.cache/host-code` until the code changes, as its parsing takes longer than other parts of a
    submission.
    """
    files = {
        path.relative_to(root).as_posix(): path.read_bytes() for name in CODE for path in sorted((root / name).glob("*.py"))
    }
    version = hashlib.sha256(b"".join(path.encode() + b"\0" + content for path, content in files.items())).hexdigest()
    key = hashlib.sha256(version.encode() + Path(__file__).read_bytes()).hexdigest()
    kept = root / ".cache" / "host-code" / f"{key}.json"
    try:
        sent: dict[str, str] = json.loads(kept.read_bytes())
    except (OSError, ValueError):
        sent = {path: _only_code(content) for path, content in files.items()}
        with contextlib.suppress(OSError):  # in a checkout of somebody else
            kept.parent.mkdir(parents=True, exist_ok=True)
            for old in kept.parent.iterdir():
                old.unlink()
            new = kept.with_suffix(f".{os.getpid()}")
            new.write_text(json.dumps(sent))
            new.replace(kept)
    return {**{path: text.encode() for path, text in sent.items()}, VERSION: version.encode()}, version


def _only_code(source: bytes) -> str:
    """Empty docstrings and comments, a third of what is sent; all other lines keep their numbers, which a traceback names."""
    lines = source.decode().split("\n")
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            end = node.value.end_lineno or node.lineno
            lines[node.lineno - 1 : end] = [" " * node.col_offset + '""', *[""] * (end - node.lineno)]
    return "\n".join(lines)


def _add(tar: tarfile.TarFile, path: str, content: bytes, mode: int = 0o644) -> None:
    """Add a file; the host sets its owner and its permissions."""
    entry = tarfile.TarInfo(path.lstrip("/"))
    entry.mode, entry.size = mode, len(content)
    tar.addfile(entry, io.BytesIO(content))
