"""Install Python packages into the environment that runs this: `packages.py EXTRA`.

uv installs them, with the settings that pip has from its files and environment. pip does if it has a setting that uv lacks, and
if uv cannot be fetched or fails. What is imported often is compiled to bytecode at once, so that no program compiles it at its
start.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from infra.runtime import settings

_QUIET = "--disable-pip-version-check"
_CONSTRAINTS = ("--constraint", "constraints.txt", "--constraint", "setup/constraints-dev.txt")
# The provider's package is a fifth of a gigabyte when compiled, and few of its modules are imported; tests never are.
_UNCOMPILED = r"/tests?/|/pulumi_gcp/(?!(?:compute|config|projects|serviceaccount|storage)/)[^/]+/"


def run(*command: str, environment: Mapping[str, str] | None = None) -> int:
    """Run a command; return its exit code."""
    return subprocess.run(command, env=environment, check=False).returncode


def drop_unfinished(site: Path) -> None:
    """Forget the packages whose installation was killed, which uv and pip would take for complete: they write RECORD last.

    Those that another tool has installed stay: conda's have no RECORD.
    """
    for info in site.glob("*.dist-info"):
        installer, record = (path.read_text("utf-8") if path.exists() else "" for path in (info / "INSTALLER", info / "RECORD"))
        if installer.strip() in ("", "pip", "uv") and f"{info.name}/INSTALLER" not in record:
            shutil.rmtree(info)


def install(extra: str) -> int:
    """Install the project and what the extra needs; return an exit code."""
    pip = (sys.executable, "-m", "pip")
    options = settings.read_pip()
    uv = str(Path(sys.executable).with_name("uv"))
    arguments = (*_CONSTRAINTS, "--editable", f".[{extra}]")
    if not settings.unsupported(options) and not run(*pip, "install", "-q", _QUIET, "--only-binary=:all:", *_CONSTRAINTS, "uv"):
        if not run(
            uv, "pip", "install", "--python", sys.executable, *arguments, environment=settings.translate(options, os.environ)
        ):
            return 0
        print("uv failed: pip is tried", flush=True)  # noqa: T201  it goes to the log
    return run(*pip, "install", "--no-compile", "--progress-bar=off", _QUIET, *arguments)


def main() -> int:
    """Install, put this project's `fab` into place, and compile."""
    with contextlib.suppress(OSError):  # NFS may have no locks; checkouts may share .venv, and another may be installing
        fcntl.flock(lock := Path(sys.prefix, "pyvenv.cfg").open(), fcntl.LOCK_EX)  # noqa: F841, SIM115  held to the end
    drop_unfinished(site := Path(sysconfig.get_path("purelib")))
    code = install(sys.argv[1])
    fab = Path(sys.executable).with_name("fab")
    if not code and "ops.cli.start" not in fab.read_text():  # Fabric has a script of that name too
        code = run(sys.executable, "-m", "pip", "install", "-q", _QUIET, "--force-reinstall", "--no-deps", "--editable", ".")
    if not code:
        run(sys.executable, "-m", "compileall", "-qq", "-j0", "-x", _UNCOMPILED, str(site))
    return code


if __name__ == "__main__":
    sys.exit(main())
