"""Translate pip's settings into the environment of uv; set-up runs this before any package is installed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Mapping

# uv's environment variables for the settings of pip.
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
# Settings of pip that do not change what is installed.
_HARMLESS = frozenset(
    {"break-system-packages", "cache-dir", "disable-pip-version-check", "no-cache-dir", "no-color", "no-compile", "no-input"}
    | {"no-python-version-warning", "no-warn-script-location", "progress-bar", "quiet", "require-virtualenv", "retries"}
    | {"root-user-action", "user", "verbose"}
)


def read_pip() -> dict[str, str]:
    """Return pip's settings, from its files and environment; empty if this Python has no pip."""
    command = (sys.executable, "-m", "pip", "config", "list")
    return parse(subprocess.run(command, capture_output=True, text=True, check=False).stdout)


def parse(output: str) -> dict[str, str]:
    """Parse what `pip config list` prints.

    Args:
        output: Lines such as `global.index-url='https://…'`; `:env:` is the section of PIP_ variables.

    Returns:
        The settings of `pip install` by name: PIP_ variables override the section `install`, which overrides `global`.
    """
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in output.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in sections:
            sections[section][name] = str(ast.literal_eval(value))
    return {**sections["global"], **sections["install"], **sections[":env:"]}


def options(settings: Mapping[str, str]) -> list[str]:
    """Return uv's options for those settings of pip that have no variable in uv."""
    return ["--no-index"] if settings.get("no-index", "").lower() in ("1", "on", "true", "yes") else []


def unsupported(settings: Mapping[str, str]) -> list[str]:
    """Return the settings of pip that change what is installed, and that have no counterpart in uv."""
    return [name for name in settings if name not in _VARIABLES and name not in _HARMLESS]


def translate(settings: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with pip's settings as variables of uv; a UV_ variable that is already set wins."""
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # pip also takes the best version of all indexes
    for name, value in settings.items():
        variables |= {each: _SEPARATORS.get(each, " ").join(value.split()) for each in _VARIABLES.get(name, ())}
    options = {name: value for name, value in environment.items() if name.startswith("UV_")}
    return {**environment, **variables, **options}
