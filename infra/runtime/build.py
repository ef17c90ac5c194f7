"""A runtime, made on the operator's machine for hosts that may be of another system: a folder, or an archive, that is a venv.

The archive is a tar.gz, because Python alone makes one on any system, and what is essential in Debian unpacks it, in a
container too, where a squashfs cannot be mounted.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from infra.runtime import pip
from infra.runtime.recipe import Recipe
from infra.runtime.whole import beside, making, settle
from infra.templates import ROOT

KEPT = ROOT / ".cache" / "hosts"
"""What was made, for further stacks: folders, which local hosts mount, and archives."""
VENV = "/opt/scaletier/venv"
"""Where every host has it."""
# Scripts name the Python of this machine, and nobody calls them; headers are two files of five, and no host has a compiler.
_NEEDLESS = ("bin", "tensorflow/include")
# Of 1.4 GB it leaves 384 MB in half the time that the default takes to leave 370.
_COMPRESSION = 4


class BuildError(RuntimeError):
    """Why there is no runtime; the message is one line."""


def folder_of(recipe: Recipe) -> Path:
    """Where the folder of a recipe is, once it is made."""
    return KEPT / recipe.name


def folder(recipe: Recipe, *, told: bool = False) -> Path:
    """The folder of a recipe; made where it was not made here before, which takes minutes. BuildError where it cannot be.

    With `told` what pip says goes to stdout.
    """
    kept = folder_of(recipe)
    if not kept.exists():
        with making(kept, BuildError) as made:
            _make(recipe, made, told)
    return kept


def archive(recipe: Recipe) -> Path:
    """The archive of a recipe; made where it was not made here before. BuildError where that cannot be done."""
    kept = KEPT / f"{recipe.name}.tar.gz"
    if not kept.exists():
        with beside(kept) as made:
            made.mkdir()
            there = folder_of(recipe)
            if not there.exists():
                there = made / recipe.name
                _make(recipe, there, told=False)
            part = made / kept.name
            _pack(there, part)
            settle(part, kept, BuildError)
    return kept


def command(recipe: Recipe, site: Path, requirements: Path, constraints: Path) -> list[str]:
    """pip's command line: wheels for the hosts, whatever this machine is; pure."""
    lists = ("--constraint", str(constraints), "--requirement", str(requirements))
    return pip.command("install", "--target", str(site), "--no-compile", *pip.for_hosts(recipe.python), *lists)


def _make(recipe: Recipe, made: Path, told: bool) -> None:
    """All that a venv has: the Python is the image's."""
    site = made / "lib" / f"python{recipe.python}" / "site-packages"
    site.mkdir(parents=True)
    _install(recipe, site, told)
    for needless in _NEEDLESS:
        shutil.rmtree(site / needless, ignore_errors=True)
    _compile(recipe, site)
    (made / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    (made / "bin").mkdir()
    for name, target in (
        (f"python{recipe.python}", f"/usr/bin/python{recipe.python}"),
        ("python3", "python"),
        ("python", f"python{recipe.python}"),
    ):
        (made / "bin" / name).symlink_to(target)
    for path in (made, *site.relative_to(made).parents, site, made / "bin", made / "pyvenv.cfg"):
        (made / path).chmod(0o644 if path.suffix == ".cfg" else 0o755)  # whatever the umask: its users are others


def _install(recipe: Recipe, site: Path, told: bool) -> None:
    with tempfile.TemporaryDirectory() as asked:
        requirements, constraints = Path(asked, "requirements.txt"), Path(asked, "constraints.txt")
        requirements.write_text("".join(f"{line}\n" for line in recipe.requirements))
        constraints.write_text("".join(f"{line}\n" for line in recipe.constraints))
        done = pip.run(command(recipe, site, requirements, constraints), told=told)
    if done.returncode:
        errors = [line for line in (done.stderr or done.stdout).splitlines() if line.startswith("ERROR: ")]
        raise BuildError(f"pip: {(errors or ['it failed'])[-1].removeprefix('ERROR: ')}")


def _compile(recipe: Recipe, site: Path) -> None:
    """Byte code, so that no host has to make it, where this machine has a Python of the hosts' version."""
    ours = recipe.python == f"{sys.version_info.major}.{sys.version_info.minor}"
    if (python := sys.executable if ours else shutil.which(f"python{recipe.python}")) is None:
        return
    seen = f"{VENV}/lib/python{recipe.python}/site-packages"
    subprocess.run(
        [python, "-m", "compileall", "-qq", "-j0", "-s", site, "-p", seen, "--invalidation-mode=unchecked-hash", site],
        check=False,  # packages bring templates that are no Python
        umask=0o022,
    )


def _pack(made: Path, part: Path) -> None:
    with tarfile.open(part, "w:gz", compresslevel=_COMPRESSION) as tar:
        for file in sorted(made.rglob("*")):
            if file.is_symlink() or file.is_file():
                tar.add(file, file.relative_to(made).as_posix(), recursive=False, filter=_roots)


def _roots(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Owned by root, and writable by nobody."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    if member.isfile():
        member.mode = 0o555 if member.mode & 0o100 else 0o444
    return member
