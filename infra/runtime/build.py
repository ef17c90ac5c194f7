"""A runtime, built on the operator's machine for the hosts' system: a venv as a folder or an archive.

The archive is a tar.gz: Python alone creates one on any system, and Debian's essential packages unpack it, in a container too,
where a squashfs cannot be mounted.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from infra.runtime import uv
from infra.runtime.atomic_dir import beside, making, settle
from infra.runtime.recipe import Recipe
from infra.templates import ROOT
from jobs.paths import VENV

KEPT = ROOT / ".cache" / "hosts"
"""Built runtimes, which stacks share: folders, which local hosts mount, and archives."""
# Scripts name the Python of this machine and are not used; headers are two files of five, and no host has a compiler.
_NEEDLESS = ("bin", "tensorflow/include")
# Of 1.4 GB it leaves 384 MB in half the time that the default takes to leave 370.
_COMPRESSION = 4


class BuildError(RuntimeError):
    """A runtime that cannot be built; the message is one line."""


def folder_of(recipe: Recipe) -> Path:
    """Return the path of a recipe's folder, built or not."""
    return KEPT / recipe.name


def folder(recipe: Recipe) -> Path:
    """Return the folder of a recipe; if it is missing, build it for minutes, with uv's output. BuildError if that fails."""
    target = folder_of(recipe)
    if not target.exists():
        with making(target, BuildError) as part:
            _make(recipe, part, print_output=True)
    return target


def archive(recipe: Recipe) -> Path:
    """Return the archive of a recipe; build it if it is missing. Raises BuildError if that fails."""
    target = KEPT / f"{recipe.name}.tar.gz"
    if not target.exists():
        with beside(target) as temporary:
            temporary.mkdir()
            venv = folder_of(recipe)
            if not venv.exists():
                venv = temporary / recipe.name
                _make(recipe, venv, print_output=False)
            part = temporary / target.name
            _pack(venv, part)
            settle(part, target, BuildError)
    return target


def _make(recipe: Recipe, venv: Path, print_output: bool) -> None:
    """Write all of a venv except the Python, which is the image's."""
    site = uv.make_venv(venv, recipe.python)
    _install(recipe, site, print_output)
    for needless in _NEEDLESS:
        shutil.rmtree(site / needless, ignore_errors=True)
    _compile(recipe, site)
    uv.open_to_all(venv)


def _install(recipe: Recipe, site: Path, print_output: bool) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        (constraints := Path(temporary, "constraints.txt")).write_text("\n".join(recipe.constraints))
        options = ("--only-binary=:all:", f"--constraints={constraints}")
        result = uv.install(site, recipe.python, recipe.requirements, options, on_line=print if print_output else None)
    if result.returncode:
        raise BuildError(f"uv: {uv.reason(result.stdout)}")


def _compile(recipe: Recipe, site: Path) -> None:
    """Compile byte code for all hosts, if this machine has a Python of their version."""
    ours = recipe.python == f"{sys.version_info.major}.{sys.version_info.minor}"
    if (python := sys.executable if ours else shutil.which(f"python{recipe.python}")) is None:
        return
    site_packages = f"{VENV}/lib/python{recipe.python}/site-packages"
    subprocess.run(
        [python, "-m", "compileall", "-qq", "-j0", "-s", site, "-p", site_packages, "--invalidation-mode=unchecked-hash", site],
        check=False,  # packages bring templates that are no Python
    )


def _pack(venv: Path, part: Path) -> None:
    with tarfile.open(part, "w:gz", compresslevel=_COMPRESSION) as tar:
        for file in sorted(venv.rglob("*")):
            if file.is_symlink() or file.is_file():
                tar.add(file, file.relative_to(venv).as_posix(), filter=_roots)


def _roots(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return the member owned by root, and writable by root alone."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    if member.isfile():
        member.mode = 0o555 if member.mode & 0o100 else 0o444
    return member
