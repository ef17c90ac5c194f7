"""Find what the tests, also those on hosts, use that does not exist: modules, attributes and arguments, by mypy."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parent
FOLDERS = (".", "unit", "stack", "contract", "simulation", "fuzz", "processes", "e2e", "story", "gcp_emulation")
# Further folders of imports, by pyproject.toml's `pythonpath`.
_IMPORTED = ("../examples/draw",)
_MISSING = re.compile(
    r"error: (?!Module .* does not explicitly export|Item \"None\" of )"
    r".*\[(attr-defined|call-arg|import-not-found|name-defined|syntax|union-attr)\]$"
)


def main(*options: str) -> int:
    """Print mypy's errors of these kinds, and return 1 if there are any, or 2 if mypy cannot check the tests.

    Args:
        options: further ones of mypy. With the settings of `mypy` itself, what that has read is in their cache.
    """
    files = [file for folder in FOLDERS for file in sorted((TESTS / folder).glob("*.py"))]
    stems = Counter(file.stem for file in files)
    # Tests import the modules beside them, by names without a folder; none imports one whose name several folders have.
    os.environ["MYPYPATH"] = os.pathsep.join(str((TESTS / folder).resolve()) for folder in (*FOLDERS, *_IMPORTED))
    modules = [f"-m{file.stem}" if stems[file.stem] == 1 else f"-m{file.parent.name}.{file.stem}" for file in files]
    command = [sys.executable, "-m", "mypy", *modules, "--no-error-summary", *options]
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    missing = [line for line in run.stdout.splitlines() if run.returncode > 1 or _MISSING.search(line)]
    for line in missing:
        print(line)
    return run.returncode if run.returncode > 1 else int(bool(missing))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
