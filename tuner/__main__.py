"""`python -I tuner/__main__.py JOB REPLICA`: the trials that this replica of a job runs.

In isolation, as the trainer's PYTHONPATH is in the environment, where its trials find it, and a package of a user's may have a
module of any name.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tuner.run import main

if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
