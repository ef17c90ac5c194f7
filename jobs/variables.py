"""Replace variables such as `${JOB_DIR}` in a job's arguments and environment, on the host and without a shell."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence

MASTER_ADDR, JAX_COORDINATOR = "MASTER_ADDR", "JAX_COORDINATOR_ADDRESS"
"""Variables with the address of the chief's host; the second one also has a port."""
RANK_NAMES = (
    *(MASTER_ADDR, "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    *(JAX_COORDINATOR, "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
)
"""Variables that only the master and the workers have."""
NAMES = ("JOB_DIR", "JOB_ID", "SCALETIER_DATA", "TYPE", "INDEX", *RANK_NAMES)
"""All variables."""
REFERENCE = re.compile(rf"([$\\]?)\$(?:\{{([^{{}}]*)\}}|({'|'.join(NAMES)})(?!\w))", re.ASCII)
"""`${ANYTHING}`, or `$NAME` with a name of NAMES; after `$` or `\\` it is literal text."""
SHELLS = frozenset({"sh", "bash", "dash", "ash", "ksh", "zsh"})
_SCRIPT_FOLLOWS = re.compile(r"-[a-zA-Z]*c[a-zA-Z]*")
# Options of a shell that have the next word as their value.
_WITH_WORD = re.compile(r"[-+][a-zA-Z]*[oO]|--rcfile|--init-file")


def expand(text: str, values: Mapping[str, str]) -> str:
    """Replace the variables in a text; `$$NAME` and `\\$NAME` give a literal `$NAME`."""

    def value_of(reference: re.Match[str]) -> str:
        escape, braced, plain = reference.groups()
        name = plain or braced
        if escape:
            return reference[0][1:]
        return values[name] if name in NAMES and name in values else reference[0]

    return REFERENCE.sub(value_of, text)


def expand_command(argv: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Replace the variables in a command line, except in the script of `sh -c`: a shell has them in its environment."""
    script_indexes = set(scripts(argv))
    return [word if index in script_indexes else expand(word, values) for index, word in enumerate(argv)]


def expand_environment(environment: Mapping[str, str], values: Mapping[str, str]) -> dict[str, str]:
    """Replace the variables in the values of an environment, except in the value of a variable of NAMES."""
    return {name: value if name in NAMES else expand(value, values) for name, value in environment.items()}


def scripts(argv: Sequence[str]) -> Iterator[int]:
    """Yield the indexes of scripts in a command line: `sh -c SCRIPT`, `timeout 9 bash -o pipefail -ec SCRIPT`."""
    for start, word in enumerate(argv):
        if posixpath.basename(word) not in SHELLS:
            continue
        index, has_script = start + 1, False
        while index < len(argv) and argv[index].startswith(("-", "+")):
            has_script = has_script or bool(_SCRIPT_FOLLOWS.fullmatch(argv[index]))
            index += 2 if _WITH_WORD.fullmatch(argv[index]) else 1
        if has_script and index < len(argv):
            yield index
