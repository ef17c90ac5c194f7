"""The content a host receives for a job: one compressed tar stream and one command to unpack it."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import io
import json
import os
import shlex
import tokenize
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from jobs.paths import CODE_DIR, PYTHON
from ops.cluster import root_helper
from ops.cluster.host_files import RemoteFile
from ops.cluster.root_helper import PROGRAM
from ops.package.package import compression_level, mode, tar_gz

READY, OLD, FAILED = "ready", "older than this scaletier", "failed: "
# New code and packages are unpacked here, beside the installed ones, in a folder for root alone.
NEW_DIR = f"{CODE_DIR}/.new"
# The packages that hosts need for a job; VERSION is the file there that has their version.
CODE = ("jobs", "hosts", "hosts/agent", "hosts/tuner")
# Modules of jobs/ that only the model server needs begin with this.
_OF_MODELS = "model_"
VERSION = "hosts/VERSION"
# A host that sets itself up at each boot reports its progress here; others are ready when they answer.
_STATE = (
    f"state=$(cat /run/scaletier-state 2>/dev/null || {{ [ -x {PYTHON} ] && echo {READY} || echo preparing; }}); "
    f'[ "$state" != {READY} ] || [ -e {PROGRAM} ] || state="{OLD}"; '
    f'echo "$state"; [ "$state" = {READY} ] || exit 0'
)
_MISSING = "import importlib.util as u, sys; print(*[n for n in sys.argv[1:] if u.find_spec(n) is None])"


def install_command(version: str, job_id: str = "") -> str:
    """Return the command that installs the stream from stdin, with a job's package if one is named, and wakes the agent."""
    return root_helper.command("take-in", version, *([job_id] if job_id else []))


def wake_digest(version: str, files: Iterable[RemoteFile]) -> str:
    """Return the digest of a host's code and files, as the root helper computes it."""
    contents = (file.content for file in sorted(files, key=lambda file: file.path))
    return hashlib.sha256("\0".join([version, *contents]).encode()).hexdigest()


def check_command(directories: Sequence[str], modules: Iterable[str] = (), python: str = PYTHON, digest: str = "") -> str:
    """Return the command that prints a host's state and, if it is ready, free bytes and missing modules.

    It prints the free bytes below each directory, a line each, then the modules that `python` lacks. With a digest it starts
    the agent meanwhile, if the host's code and files have this digest.
    """
    wake = f"{{ {root_helper.command('wake', digest)} >/dev/null 2>&1 & }} </dev/null; " if digest else ""
    check = f"{_STATE}; {wake}df --output=avail -B1 -- {shlex.join(directories)} | tail -n +2"
    names = sorted(modules)
    return f"{check}; {shlex.join([python, '-c', _MISSING, *names])}" if names else check


def read_state(output: str) -> str:
    """Parse the host's state from the output of `check_command`: READY, OLD, `preparing: STEP` or `failed: STEP: WHY`."""
    return output.partition("\n")[0]


def read_check(output: str, directories: Sequence[str]) -> tuple[dict[str, int], list[str]]:
    """Parse the free bytes of each directory, and the missing modules; ValueError for other output."""
    lines = output.splitlines()[1:]
    if len(lines) < len(directories):
        raise ValueError(f"df printed nothing of {', '.join(directories)}")
    free = {directory: int(line) for directory, line in zip(directories, lines, strict=False)}
    return free, " ".join(lines[len(directories) :]).split()


def shared_stream(
    code: Mapping[str, bytes], package: Mapping[str, bytes] | None = None, sha256: str = "", executables: Collection[str] = ()
) -> bytes:
    """Return the part for all hosts, compressed once: the agent's code, and a job's package.

    It is a gzip member without tar's end mark; a host's own part follows it. Hosts fetch the package from the bucket if it is
    not in the stream, or if `sha256` is not the plan's packageSha256.
    """
    entries = [(f"{NEW_DIR}/{path}", content, 0o644) for path, content in sorted(code.items())]
    if package is not None:
        files = sorted(package.items())
        entries += [(f"{NEW_DIR}/package/{path}", content, mode(path, executables)) for path, content in files]
        entries.append((f"{NEW_DIR}/package.sha256", sha256.encode(), 0o644))
    return tar_gz(entries, compression_level(sum(len(content) for _, content, _ in entries)), end_mark=False)


def files_stream(files: Iterable[RemoteFile]) -> bytes:
    """Return the part for one host, which is sent after the shared one; the host sets owners and permissions."""
    return tar_gz(((file.path, file.content.encode(), 0o644) for file in files), 1)


def code(root: Path) -> tuple[dict[str, bytes], str]:
    """Return the local code for the hosts, without docstrings and comments, and its version: a hash of all of it.

    The result is cached in `.cache/host-code`, as parsing the code takes longer than any other part of a submission.
    """
    paths = [path for name in CODE for path in sorted((root / name).glob("*.py")) if not path.name.startswith(_OF_MODELS)]
    files = {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}
    version = hashlib.sha256(b"".join(path.encode() + b"\0" + content for path, content in files.items())).hexdigest()
    key = hashlib.sha256(version.encode() + Path(__file__).read_bytes()).hexdigest()
    cache_file = root / ".cache" / "host-code" / f"{key}.json"
    try:
        stripped: dict[str, str] = json.loads(cache_file.read_bytes())
    except (OSError, ValueError):
        stripped = {path: _strip_comments(content) for path, content in files.items()}
        with contextlib.suppress(OSError):  # this user may not write to the checkout
            cache_file.parent.mkdir(parents=True, exist_ok=True)
            for old in cache_file.parent.iterdir():
                old.unlink()
            new = cache_file.with_suffix(f".{os.getpid()}")
            new.write_text(json.dumps(stripped))
            new.replace(cache_file)
    return {**{path: text.encode() for path, text in stripped.items()}, VERSION: version.encode()}, version


def _strip_comments(source: bytes) -> str:
    """Empty docstrings and comments, a third of the bytes; keep the line numbers, which tracebacks print."""
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
