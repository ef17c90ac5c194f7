"""Install Python packages into the environment that runs this: `packages.py EXTRA`.

uv installs them, with the settings that pip has from its files and environment. pip does if it has a setting that uv lacks, and
if uv cannot be fetched or fails. What is imported often is compiled to bytecode at once, so that no program compiles it at its
start.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

_QUIET = "--disable-pip-version-check"
_CONSTRAINTS = ("--constraint", "constraints.txt", "--constraint", "setup/constraints-dev.txt")
# Of pip's settings, the variables of uv for the same.
_VARIABLES: Mapping[str, tuple[str, ...]] = {
    "cert": ("SSL_CERT_FILE",),
    "client-cert": ("SSL_CLIENT_CERT",),
    "default-timeout": ("UV_HTTP_TIMEOUT",),
    "extra-index-url": ("UV_INDEX",),
    "find-links": ("UV_FIND_LINKS",),
    "index-url": ("UV_DEFAULT_INDEX",),
    "proxy": ("HTTP_PROXY", "HTTPS_PROXY"),
    "timeout": ("UV_HTTP_TIMEOUT",),
    "trusted-host": ("UV_INSECURE_HOST",),
}
_SEPARATORS = {"UV_FIND_LINKS": ","}
# pip's settings that change nothing of what is installed.
_HARMLESS = frozenset(
    {"break-system-packages", "cache-dir", "disable-pip-version-check", "no-cache-dir", "no-color", "no-compile", "no-input"}
    | {"no-python-version-warning", "no-warn-script-location", "progress-bar", "quiet", "require-virtualenv", "retries"}
    | {"root-user-action", "user", "verbose"}
)
# The provider's package is a fifth of a gigabyte when compiled, and few of its modules are imported; nobody imports tests.
_UNCOMPILED = r"/tests?/|/pulumi_gcp/(?!(?:compute|config|projects|serviceaccount|storage)/)[^/]+/"


def parse_settings(listed: str) -> dict[str, str]:
    """Parse what `pip config list` prints.

    Args:
        listed: Lines such as `global.index-url='https://…'`; `:env:` is the section of PIP_ variables.

    Returns:
        The settings that `pip install` has, by name: the environment's first, then the section `install`, then `global`.
    """
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in sections:
            sections[section][name] = str(ast.literal_eval(value))
    return {**sections["global"], **sections["install"], **sections[":env:"]}


def translate(settings: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str] | None:
    """Translate pip's settings into the environment of uv.

    Returns:
        The environment, in which variables of uv that are set already stay, or None if pip has a setting that uv lacks.
    """
    variables: dict[str, str] = {}
    for name, value in settings.items():
        if name in _VARIABLES:
            variables |= {each: _SEPARATORS.get(each, " ").join(value.split()) for each in _VARIABLES[name]}
        elif name not in _HARMLESS:
            return None
    if "UV_INDEX" in variables:
        variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # as pip chooses among indexes
    options = {name: value for name, value in environment.items() if name.startswith("UV_")}
    return {**environment, **variables, **options}


def run(*command: str, environment: Mapping[str, str] | None = None) -> int:
    """Run a command; return its exit code."""
    return subprocess.run(command, env=environment, check=False).returncode


def install(extra: str) -> int:
    """Install the project and what the extra needs; return an exit code."""
    pip = (sys.executable, "-m", "pip")
    listed = subprocess.run([*pip, "config", "list"], stdout=subprocess.PIPE, text=True, check=False).stdout
    environment = translate(parse_settings(listed), os.environ)
    uv = str(Path(sys.executable).with_name("uv"))
    arguments = (*_CONSTRAINTS, "--editable", f".[{extra}]")
    if environment is not None and not run(
        *pip, "install", "-q", _QUIET, "--only-binary=:all:", "-r", "setup/requirements-uv.txt"
    ):
        if not run(uv, "pip", "install", "--python", sys.executable, *arguments, environment=environment):
            return 0
        print("uv failed: pip is tried", flush=True)  # noqa: T201  it goes to the log
    return run(*pip, "install", "--no-compile", "--progress-bar=off", _QUIET, *arguments)


def main() -> int:
    """Install, put this project's `fab` into place, and compile."""
    code = install(sys.argv[1])
    fab = Path(sys.executable).with_name("fab")
    if not code and "ops.cli.start" not in fab.read_text():  # Fabric has a script of that name too
        code = run(sys.executable, "-m", "pip", "install", "-q", _QUIET, "--force-reinstall", "--no-deps", "--editable", ".")
    if not code:
        run(sys.executable, "-m", "compileall", "-qq", "-j0", "-x", _UNCOMPILED, sysconfig.get_path("purelib"))
    return code


if __name__ == "__main__":
    sys.exit(main())
