"""Build a runtime for hosts on the operator's machine: a venv as a folder or an archive.

The archive is a tar.gz: Python alone creates one on any system, and Debian's essential packages unpack it, also in a container,
which cannot mount a squashfs.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from infra.runtime import uv
from infra.runtime.atomic_dir import create_atomically, publish, temporary_path
from infra.runtime.recipe import RuntimeSpec
from infra.templates import ROOT
from jobs.paths import VENV

CACHE = ROOT / ".cache" / "hosts"
"""Built runtimes, which stacks share: folders, which local hosts mount, and archives."""
# Scripts contain the path of this machine's Python. TensorFlow's headers are two fifths of all files; no host has a compiler.
_UNUSED = ("bin", "tensorflow/include")
# Level 4 makes 384 MB of 1.4 GB, in half the time that the default level takes to make 370 MB.
_COMPRESSION = 4


class BuildError(RuntimeError):
    """A runtime cannot be built; the message is one line."""


def folder_path(spec: RuntimeSpec) -> Path:
    """Return the path of a runtime's folder, built or not."""
    return CACHE / spec.name


def ensure_folder(spec: RuntimeSpec) -> Path:
    """Return a runtime's folder. If it is missing, build it (takes minutes) and print uv's output; may raise BuildError."""
    target = folder_path(spec)
    if not target.exists():
        with create_atomically(target, BuildError) as part:
            _make(spec, part, print_output=True)
    return target


def ensure_archive(spec: RuntimeSpec) -> Path:
    """Return the archive of a runtime. Build it if it is missing; may raise BuildError."""
    target = CACHE / f"{spec.name}.tar.gz"
    if not target.exists():
        with temporary_path(target) as temporary:
            temporary.mkdir()
            venv = folder_path(spec)
            if not venv.exists():
                venv = temporary / spec.name
                _make(spec, venv, print_output=False)
            part = temporary / target.name
            _pack(venv, part)
            publish(part, target, BuildError)
    return target


def _make(spec: RuntimeSpec, venv: Path, print_output: bool) -> None:
    """Create a venv with links to the Python in the hosts' image."""
    site = uv.make_venv(venv, spec.python)
    _install(spec, site, print_output)
    for unused in _UNUSED:
        shutil.rmtree(site / unused, ignore_errors=True)
    _compile(spec, site)
    uv.open_to_all(venv)


def _install(spec: RuntimeSpec, site: Path, print_output: bool) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        (constraints := Path(temporary, "constraints.txt")).write_text("\n".join(spec.constraints))
        options = ("--only-binary=:all:", f"--constraints={constraints}")
        result = uv.install(site, spec.python, spec.requirements, options, on_line=print if print_output else None)
    if result.returncode:
        raise BuildError(f"uv: {uv.reason(result.stdout)}")


def _compile(spec: RuntimeSpec, site: Path) -> None:
    """Compile byte code for all hosts, if this machine has a Python of their version."""
    same_version = spec.python == f"{sys.version_info.major}.{sys.version_info.minor}"
    if (python := sys.executable if same_version else shutil.which(f"python{spec.python}")) is None:
        return
    site_packages = f"{VENV}/lib/python{spec.python}/site-packages"
    subprocess.run(
        [python, "-m", "compileall", "-qq", "-j0", "-s", site, "-p", site_packages, "--invalidation-mode=unchecked-hash", site],
        check=False,  # some packages contain .py templates that are no Python
    )


def _pack(venv: Path, part: Path) -> None:
    with tarfile.open(part, "w:gz", compresslevel=_COMPRESSION) as tar:
        for file in sorted(venv.rglob("*")):
            if file.is_symlink() or file.is_file():
                tar.add(file, file.relative_to(venv).as_posix(), filter=_owned_by_root)


def _owned_by_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return the member, owned by root and not writable."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    if member.isfile():
        member.mode = 0o555 if member.mode & 0o100 else 0o444
    return member
