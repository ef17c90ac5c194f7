"""What pip says when it fails, as one line."""

from __future__ import annotations

import re

_NOT_FOUND = re.compile(r"No matching distribution found for (.+)")
_VERSIONS = re.compile(r"\(from versions: (.+?)\)")
_WRONG_WHEEL = re.compile(r"(\S+\.whl) is not a supported wheel on this platform")
_BUILD_OUTPUT = re.compile(r"\[\d+ lines? of output\]\n(.*?)\n\s*\[end of output\]", re.DOTALL)
_CONFLICT = re.compile(r"The conflict is caused by:\n(.*?)\n\s*\n", re.DOTALL)
_COMPILED = re.compile(r"-(cp\d+|abi3|none)-linux_x86_64\.whl$")
_GIT = re.compile(r"^\s*((?:fatal|error): (?!subprocess-exited).+)$", re.MULTILINE)
_CLONE = re.compile(r"git (?:clone|fetch|checkout|rev-parse|submodule)\b.*did not run successfully")
_UNREACHABLE = ("NewConnectionError", "ConnectTimeoutError", "Temporary failure in name resolution", "ReadTimeoutError")
# Tried versions are listed; the newest say enough.
_SHOWN_VERSIONS = 5


def explain(output: str, python: str) -> str:
    """Why pip failed for hosts with this version of Python, by what it printed, and what to do."""
    if found := _WRONG_WHEEL.search(output):
        return unfit(found[1].rpartition("/")[2], python)
    if found := _NOT_FOUND.search(output):
        return _not_found(found[1].strip(), output, python)
    if found := _CONFLICT.search(output):
        wanted = "; ".join(line.strip() for line in found[1].splitlines())
        return f"dependencies contradict one another or what the hosts have: {wanted}"
    if _CLONE.search(output) and (why := _GIT.search(output)):
        return f"a dependency cannot be fetched by git: {why[1]}"
    if outputs := _BUILD_OUTPUT.findall(output):
        lines = [line.strip() for line in outputs[-1].splitlines() if line.strip()]
        return f"a build by setup.py or pyproject.toml failed: {lines[-1] if lines else 'it printed nothing'}"
    errors = [line.partition("ERROR: ")[2] for line in output.splitlines() if "ERROR: " in line]
    last = output.strip().splitlines()[-1:] or ["it printed nothing"]
    return f"pip failed: {(errors or last)[0]}"


def unfit(wheel: str, python: str) -> str:
    """What to say of a wheel that hosts with this version of Python cannot use."""
    tag = f"cp{python.replace('.', '')}"
    if (compiled := _COMPILED.search(wheel)) and compiled[1] in (tag, "abi3", "none"):
        return f"{wheel} was compiled here, and may not run on the hosts: ask for a version that has a manylinux wheel"
    return f"{wheel} is not a wheel for {_hosts(python)}: take one for {tag}, abi3 or py3, and for any platform or manylinux"


def _not_found(wanted: str, output: str, python: str) -> str:
    if any(word in output for word in _UNREACHABLE):
        return (
            f"dependency {wanted} cannot be fetched, the package index does not answer: check the network, or pip config list"
        )
    listed = _VERSIONS.search(output)
    versions = listed[1].split(", ") if listed and listed[1] != "none" else []
    newest = versions[-_SHOWN_VERSIONS:]
    there = (
        f"{'the newest' if len(newest) < len(versions) else 'there'} are {', '.join(newest)}"
        if versions
        else "no version of it fits"
    )
    return f"dependency {wanted} cannot be found for {_hosts(python)}, {there}: check its name and version"


def _hosts(python: str) -> str:
    return f"the hosts' Python {python} on Linux x86-64"
