"""Run this replica's trials of a job: `python -I hosts/tuner/__main__.py JOB REPLICA`.

`-I` is needed because the working directory is the user's package, whose modules could hide those of the standard library. The
trials' environment is read from stdin.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hosts.tuner.run import main

if __name__ == "__main__":
    job, replica = sys.argv[1:]
    sys.exit(main(job, replica, sys.stdin.read()))
