"""Translate pip's settings into the environment of uv; set-up runs this before any package is installed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Mapping

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


def of_pip() -> dict[str, str]:
    """Return the settings that pip has from its files and environment; none if this Python has no pip."""
    command = (sys.executable, "-m", "pip", "config", "list")
    return parse(subprocess.run(command, capture_output=True, text=True, check=False).stdout)


def parse(listed: str) -> dict[str, str]:
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


def options(settings: Mapping[str, str]) -> list[str]:
    """Return pip's settings of which uv has an option, and no variable."""
    return ["--no-index"] if settings.get("no-index", "").lower() in ("1", "on", "true", "yes") else []


def lacking(settings: Mapping[str, str]) -> list[str]:
    """Return the settings that change what is installed, and that uv lacks."""
    return [name for name in settings if name not in _VARIABLES and name not in _HARMLESS]


def translate(settings: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with pip's settings as uv's variables; those of uv that are set already stay."""
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # as pip chooses among indexes
    for name, value in settings.items():
        variables |= {each: _SEPARATORS.get(each, " ").join(value.split()) for each in _VARIABLES.get(name, ())}
    options = {name: value for name, value in environment.items() if name.startswith("UV_")}
    return {**environment, **variables, **options}
