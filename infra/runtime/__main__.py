"""`python -m infra.runtime`: build the runtime that local hosts mount; print its path."""

from __future__ import annotations

import sys

from infra.runtime.build import BuildError, ensure_folder
from infra.runtime.recipe import default_runtime_spec


def main() -> int:
    try:
        print(ensure_folder(default_runtime_spec()))
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
