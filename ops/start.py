"""The script `fab`: what it imports takes most of a second, and a Ctrl-C in that time is one as well."""

from __future__ import annotations

import os
import sys

from ops.errors import DETACHED


def main() -> None:
    """`fab` itself."""
    try:
        from ops.commandline import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        sys.exit(DETACHED)
    except BrokenPipeError:  # the reader of the help has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
