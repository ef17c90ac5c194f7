"""The tasks of `fab`: a task's signature is its flags; it calls one function of ops, imported inside.

So nothing that takes time is imported here: `fab --list` is as quick as Fabric itself, and so is the first line of a log.
"""

import sys
from collections.abc import Callable
from typing import Any

import fabric

from ops.cli import command
from ops.commandline import CommandTask

sys.dont_write_bytecode = False  # invoke sets it, and would have ops compiled anew by every command

JOB = "id of the job, one that fab jobs lists (default: the one that has the hosts, or had them last)"
TRAINER = "ARGUMENTS OF THE TRAINER"
NEW_JOB = "id of the job: a letter, then letters, digits and _; used once"
JSON = "print JSON, for programs"


def task(**options: Any) -> Callable[[Callable[..., int]], Any]:
    """Return Fabric's decorator for a body that returns an exit code; errors become a line and a code."""
    return lambda body: fabric.task(klass=CommandTask, **options)(command(body))
