"""Report its arguments and environment, work, and end as requested: `python -m tiny.task --seconds 2 --exit worker-0=3`."""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

from tiny import work


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=1.0, help="how long the master works, unless JOB_DIR/enough is there")
    parser.add_argument("--rate", type=float, default=10.0, help="lines a second")
    parser.add_argument("--burst", type=int, default=0, help="numbered lines beside each of these")
    parser.add_argument("--exit", action="append", default=[], help="worker-0=3: that replica ends so; -9 kills itself")
    parser.add_argument("--raise", dest="raises", default="", help="the replica that raises an exception")
    parser.add_argument("--eat", default="", help="the replica that takes memory until it has none left")
    args, rest = parser.parse_known_args()

    config = json.loads(os.environ["TF_CONFIG"])
    name = f"{os.environ['TYPE']}-{os.environ['INDEX']}"
    print(f"replica {name}, task {config['task']}, cluster {config['cluster']}", flush=True)

    out = Path(os.environ["JOB_DIR"])
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps({"argv": sys.argv[1:], "rest": rest, "environ": dict(os.environ)}))

    if args.raises == name:
        work.fail(name)
    if args.eat == name:
        work.eat()
    for order in args.exit:
        replica, _, code = order.partition("=")
        if replica == name:
            time.sleep(min(args.seconds, 1.0))
            os.kill(os.getpid(), signal.SIGKILL) if int(code) < 0 else sys.exit(int(code))
    seconds = args.seconds if name == "master-0" else float("inf")  # the others work until their job ends
    for step in work.steps(seconds, 1 / args.rate, out / "enough" if name == "master-0" else None):
        print(f"Train [{os.environ['TYPE']}/{os.environ['INDEX']}], step {step}: at {time.time():.3f}", flush=True)
        numbers = range((step - 1) * args.burst, step * args.burst)
        sys.stdout.write("".join(f"number {number} of so many lines as no pipe was made for\n" for number in numbers))
    print(f"Final metrics after {step} steps, loss: 0.1, accuracy: 1.0", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
