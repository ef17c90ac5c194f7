"""Install packages for hosts by uv, on any system and Python."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from uv import find_uv_bin

from infra.runtime import settings

# Debian 12's C library, which Ubuntu 24.04's can stand in for.
PLATFORM = "x86_64-manylinux_2_36"
# uv wraps lines at the width of a terminal; `reason` needs whole lines.
_COLUMNS = "10000"
GIT_REPOSITORY = frozenset(
    {
        "GIT_DIR",
        "GIT_WORK_TREE",
        "GIT_INDEX_FILE",
        "GIT_PREFIX",
        "GIT_COMMON_DIR",
        "GIT_OBJECT_DIRECTORY",
        "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    }
)
"""Variables that make git use another repository than the current folder's; git sets them for its hooks."""
_UNWANTED = frozenset({"PYTHONPATH", "PYTHONHOME"}) | GIT_REPOSITORY
_ERROR = re.compile(r"^(?:error|\s*cause|hint): ", re.MULTILINE)


def command(target: Path, python: str, *options: str) -> list[str]:
    """Return the command line that installs the requirements in stdin for hosts with this version of Python; pure."""
    return [
        find_uv_bin(),
        "pip",
        "install",
        f"--python={sys.executable}",
        f"--python-version={python}",
        f"--python-platform={PLATFORM}",
        f"--target={target}",
        "--link-mode=copy",
        "--color=never",
        "--requirements=-",
        *options,
    ]


def install(
    target: Path,
    python: str,
    lines: Iterable[str],
    options: Sequence[str] = (),
    start: Path | None = None,
    on_line: Callable[[str], object] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Install the packages of a requirements.txt, with pip's settings.

    Args:
        target: the folder to install into.
        python: the version of the hosts' Python.
        lines: the lines of the requirements.txt.
        options: more options of `uv pip install`.
        start: the folder to which relative paths in `lines` refer.
        on_line: is called with each line that uv prints; if it raises, uv is killed.

    Returns:
        The ended process, with all that it printed in `stdout`.
    """
    environment = {key: value for key, value in os.environ.items() if key not in _UNWANTED}
    pip_settings = settings.read_pip()
    with subprocess.Popen(
        command(target, python, *settings.options(pip_settings), *options),
        cwd=start,
        env={**settings.translate(pip_settings, environment), "COLUMNS": _COLUMNS},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdin
        assert process.stdout
        printed = []
        try:
            process.stdin.write("".join(f"{line}\n" for line in lines))
            process.stdin.close()
            for line in process.stdout:
                printed.append(line)
                if on_line:
                    on_line(line.rstrip())
        except BaseException:
            process.kill()
            raise
    (target / ".lock").unlink(missing_ok=True)
    return subprocess.CompletedProcess(process.args, process.wait(), "".join(printed))


def reason(output: str) -> str:
    """Return uv's reason for a failure in one line: its error, the causes and the hints."""
    start = _ERROR.search(output)
    return " ".join(_ERROR.sub("", output[start.start() if start else 0 :]).split()) or "it printed nothing"


def open_to_all(folder: Path) -> None:
    """Let all users read a folder whatever the umask: hosts have other users."""
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            mode = path.stat().st_mode
            path.chmod(mode | (0o555 if path.is_dir() or mode & 0o100 else 0o444))


def make_venv(folder: Path, python: str) -> Path:
    """Make a virtual environment without packages, of the Python in the hosts' image; return its site-packages."""
    site = folder / "lib" / f"python{python}" / "site-packages"
    site.mkdir(parents=True)
    (folder / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    (folder / "bin").mkdir()
    for name, target in ((f"python{python}", f"/usr/bin/python{python}"), ("python3", "python"), ("python", f"python{python}")):
        (folder / "bin" / name).symlink_to(target)
    return site
