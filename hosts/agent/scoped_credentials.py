"""`python -m hosts.agent.scoped_credentials OUTPUT -- COMMAND`: run a program of a job for fab on a host of Google's.

The program has the rights that the job had, to write its OUTPUT, from a broker that lives as long as the command. PORT among
the command's words is the broker's port.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from urllib.parse import urlsplit

from hosts.agent.broker import Access, Broker, Mint, mint
from jobs import paths

PORT = "@port@"
"""A word of the command for which the port stands in."""


def main(arguments: Sequence[str], mint: Mint = mint) -> int:
    """Run the command; its exit code."""
    output, _, *command = arguments
    there = urlsplit(output)
    may = Access(there.netloc, (there.path.strip("/"),), (paths.DATA,))
    broker = Broker(may, mint, _say)
    try:
        return subprocess.run([str(broker.port) if word == PORT else word for word in command], check=False).returncode
    finally:
        broker.close()


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
