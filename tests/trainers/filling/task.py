"""`python -m filling.task --on worker-0`: that replica fills its disk, or the bucket; the others work until their job ends."""

import argparse
import itertools
import os
import tempfile
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--on", required=True, help="the replica")
parser.add_argument("--bucket", action="store_true", help="it fills the bucket")
args = parser.parse_known_args()[0]

if f"{os.environ['TYPE']}-{os.environ['INDEX']}" != args.on:
    while True:
        time.sleep(1)
folder = Path(os.environ["JOB_DIR"], "full") if args.bucket else Path(tempfile.mkdtemp(dir="/var/tmp"))
folder.mkdir(parents=True, exist_ok=True)
for number in itertools.count():
    with (folder / f"{number:05}").open("wb") as file:
        file.write(os.urandom(2**24))
        os.fsync(file.fileno())
    print(f"Train [{args.on}], step {number}: {(number + 1) * 16} MiB are written", flush=True)
