"""`python -m benchmarks.memory_once [FLAG …]`: the peak memory of the processes of a large mlp's job, here on loopback.

It prints the MB of each process beyond those with a tiny model, and as a multiple of the model. Flags are the trainer's, as
`--strategy sync`.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.measure import high_water
from trainer import records
from trainer.mnist import PIXELS, Split

_LARGE, _SMALL, _LARGE_MB = "9600,9600", "8,8", 399.2
_FLAGS = ["--model", "mlp", "--batch-size", "10", "--max-steps", "20", "--log-interval", "0.2"]
_POLL_SECONDS = 0.2


def peaks(flags: list[str]) -> Mapping[str, float]:
    """Train, and return the peak of each process in MB."""
    jobs = ["worker", "chief"] if "sync" in flags else ["ps", "worker", "chief"]
    with TemporaryDirectory() as folder:
        for split in ("train", "test"):
            digits = Split(bytes(20 * PIXELS), bytes(20))
            records.write_shard(Path(folder, f"{split}-00000-of-00001.tfrecord"), digits, 0, 1)
        cluster = {job: [f"127.0.0.1:{_free_port()}"] for job in jobs}
        processes = {job: _start(flags, Path(folder), cluster, job) for job in jobs}
        largest = dict.fromkeys(jobs, 0.0)
        try:
            while processes["chief"].poll() is None:
                for job, process in processes.items():
                    status = Path(f"/proc/{process.pid}/status").read_text()
                    largest[job] = max(largest[job], high_water(status))
                time.sleep(_POLL_SECONDS)
        finally:
            for process in processes.values():
                process.kill()
    if processes["chief"].returncode:
        raise SystemExit(processes["chief"].returncode)
    return largest


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def _start(flags: list[str], folder: Path, cluster: Mapping[str, list[str]], job: str) -> subprocess.Popen[bytes]:
    config = json.dumps({"cluster": cluster, "task": {"type": job, "index": 0}})
    environ = {"TF_CONFIG": config, "JOB_DIR": str(folder / "job"), "SCALETIER_DATA": str(folder)}
    command = [sys.executable, "-m", "trainer.task", *_FLAGS, *flags]
    return subprocess.Popen(command, env={**os.environ, **environ}, stdout=subprocess.DEVNULL)


def main() -> None:
    """Print a line for each process."""
    large, small = (peaks([*sys.argv[1:], "--hidden-units", units]) for units in (_LARGE, _SMALL))
    for name, peak in large.items():
        more = peak - small[name]
        print(f"{name}: {more:,.0f} MB more than {small[name]:,.0f}, {more / _LARGE_MB:.1f} times the model")


if __name__ == "__main__":
    main()
