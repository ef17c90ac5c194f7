"""Fit a line and print a table on the master; other replicas do nothing: `python -m packaged.task`."""

import argparse
import os
from importlib.metadata import version

import fsspec  # it also writes to gs://
from tabulate import tabulate

from packaged.model import INTERCEPT, SLOPE, Line, step


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-steps", type=int, default=200)
    args = parser.parse_args()
    if args.max_steps < 1:
        parser.error("--max-steps must be at least 1")
    replica = f"{os.environ.get('TYPE', 'master')}/{os.environ.get('INDEX', '0')}"
    print(f"Started [{replica}], packaged-trainer {version('packaged-trainer')}, tabulate {version('tabulate')}", flush=True)
    if replica != "master/0":
        return
    line, rows, every = Line(), [], max(args.max_steps // 5, 1)
    for number in range(1, args.max_steps + 1):
        loss = float(step(line, 0.1, 100))
        if number % every == 0:
            rows.append((number, loss, float(line.slope), float(line.intercept)))
    table = tabulate(rows, ("step", "loss", f"slope ({SLOPE:g})", f"intercept ({INTERCEPT:g})"), floatfmt=".3f")
    print(table, flush=True)
    with fsspec.open(os.path.join(os.environ.get("JOB_DIR", "output"), "table.txt"), "w") as file:
        file.write(table)
    print(f"Final metrics after {args.max_steps} steps, loss: {loss:.3f}", flush=True)


if __name__ == "__main__":
    main()
