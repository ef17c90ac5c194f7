"""Remove the stacks that killed test runs of this checkout left: `python tests/leftovers.py NAME …`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).with_name("e2e")))
# This checkout's `infra`, also where .venv is shared: another's would find, and remove, the stacks of that one.
sys.path.insert(0, str(Path(__file__).parents[1]))

from stacks import Stack


def main(*names: str) -> int:
    """Remove stacks that tests have created; return 1 if one cannot be removed, 130 after Ctrl-C."""
    os.environ.pop("PULUMI_BACKEND_URL", None)  # tests create none in a team's state
    try:
        for name in names:
            Stack(name, {}).clear()
    except AssertionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
