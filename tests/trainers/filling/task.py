"""`python -m filling.task --on worker-0`: that replica fills its disk, the others work until their job ends."""

import argparse
import itertools
import os
import tempfile
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--on", required=True, help="the replica")
parser.add_argument("--into", type=Path, help="the folder, else a temporary one")
args = parser.parse_known_args()[0]

if f"{os.environ['TYPE']}-{os.environ['INDEX']}" != args.on:
    while True:
        time.sleep(1)
folder = args.into or Path(tempfile.mkdtemp())
folder.mkdir(parents=True, exist_ok=True)
for number in itertools.count():
    with (folder / f"{number:05}").open("wb") as file:
        file.write(os.urandom(2**24))
        os.fsync(file.fileno())
    print(f"Train [{args.on}], step {number}: {(number + 1) * 16} MiB are written", flush=True)
