"""pip's errors as one line."""

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
_TRACEBACK = "Traceback (most recent call last):"
# An exception's line, a compiler's, git's; the name of a file may stand in front.
_ERROR_LINE = re.compile(r"(?:\S+: )?(?:[\w.]*(?:Error|Exception)|(?:fatal )?error|fatal|ERROR)\b ?[^:\w]*:", re.ASCII)
_GENERIC = re.compile(
    r"subprocess-exited-with-error|metadata-generation-failed|CalledProcessError|exit (?:code|status)|"
    r"^(?:error: )?[Cc]ommand .* (?:failed|returned)|Failed building wheel|Backend.*raised"
)
_WRONG_HASH = re.compile(r"DO NOT MATCH THE HASHES.*\n\s+(\S+)(?:.*\n)+?\s+Got\s+(\w+)")
_NO_HASH = re.compile(
    r"(?:pinned with ==\. These do not:\s+|they are missing from some requirements(?:.*\n)+?\s{4})"
    r"(\S+?)(?: --hash=\S+| from .*)?$",
    re.MULTILINE,
)
_UNREACHABLE = ("NewConnectionError", "ConnectTimeoutError", "Temporary failure in name resolution", "ReadTimeoutError")
# Tried versions are listed; the newest are enough.
_SHOWN_VERSIONS = 5


def explain(output: str, python: str) -> str:
    """Explain by pip's output why it failed for hosts with this version of Python, and the remedy."""
    if match := _WRONG_WHEEL.search(output):
        return unfit(match[1].rpartition("/")[2], python)
    if match := _NOT_FOUND.search(output):
        return _not_found(match[1].strip(), output, python)
    if match := _CONFLICT.search(output):
        conflicts = "; ".join(line.strip() for line in match[1].splitlines())
        return f"dependencies contradict one another or what the hosts have: {conflicts}"
    if _CLONE.search(output) and (why := _GIT.search(output)):
        return f"a dependency cannot be fetched by git: {why[1]}"
    if match := _WRONG_HASH.search(output):
        problem = f"what was fetched has sha256 {match[2]}"
        return (
            f"{match[1]} does not match its hash in requirements.txt, {problem}: export the file again, or ask who changed it"
        )
    if match := _NO_HASH.search(output):
        how = "uv export and pip-compile --generate-hashes do"
        return f"{match[1]} has no version and hash in requirements.txt, as all that a file with hashes wants must: {how}"
    if outputs := _BUILD_OUTPUT.findall(output):
        return f"a build by setup.py or pyproject.toml failed: {reason(outputs[-1])}"
    errors = [line.partition("ERROR: ")[2] for line in output.splitlines() if "ERROR: " in line]
    last = output.strip().splitlines()[-1:] or ["it printed nothing"]
    return f"pip failed: {(errors or last)[0]}"


def reason(output: str) -> str:
    """Return the line of a failed build's output that states why: the last exception, else the last error.

    A line that only says that a command failed comes second, and the last line, which may be advice, third.
    """
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    errors: list[str] = []
    depth: int | None = None
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if _TRACEBACK in line:
            depth = indent
        elif depth is not None and indent <= depth:
            errors.append(line.strip())
            depth = None
        elif _ERROR_LINE.match(line.strip()):
            errors.append(line.strip())
    telling = [line for line in errors if not _GENERIC.search(line)]
    last = [line.strip() for line in lines[-1:]]
    return (telling or errors or last or ["it printed nothing"])[-1]


def unfit(wheel: str, python: str) -> str:
    """Return the message for a wheel that hosts with this version of Python cannot use."""
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
