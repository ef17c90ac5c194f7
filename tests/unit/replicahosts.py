"""Hosts that are directories with the real process `python -m replica`, small trainers, and a bucket that is a directory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from replica.record import JobRecord, JobState, Plan, ReplicaRecord

ROOT = Path(__file__).parents[2]
PATIENCE = 30.0
SLEEPS = "import time\nprint('up')\ntime.sleep(600)\n"


class Cluster:
    """A bucket, and hosts that are directories with a replica process each."""

    def __init__(self, root: Path, trainer: str, replicas: list[str], args: list[str], **plan: Any) -> None:
        self.root = root
        self.bucket = root / "bucket"
        self.job_folder = self.bucket / "jobs" / "job01"
        self.job_folder.mkdir(parents=True)
        self.package = root / "package"
        self.package.mkdir()
        (self.package / "task.py").write_text(trainer)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.write_job(JobState.PREPARING)
        url = plan.pop("bucket", str(self.bucket))
        quick: dict[str, Any] = {
            "pollSeconds": 0.05,
            "heartbeatSeconds": 0.1,
            "stopSeconds": 5.0,
            "python": sys.executable,
        } | plan
        for name in replicas:
            etc = self.host(name) / "etc"
            etc.mkdir(parents=True)
            role, index = name.split("-")
            written = Plan("job01", name, replicas, "task", args, url, str(self.package), **quick)
            (etc / "replica.json").write_text(written.to_json())
            (etc / "tf_config.json").write_text(json.dumps({"task": {"type": role, "index": int(index)}}))

    def host(self, name: str) -> Path:
        return self.root / "hosts" / name

    def start(self, *names: str) -> None:
        for name in names or sorted(path.name for path in (self.root / "hosts").iterdir()):
            host = self.host(name)
            env = os.environ | {
                "SCALETIER_ETC": str(host / "etc"),
                "SCALETIER_STATE": str(host / "state"),
                "PYTHONPATH": str(ROOT),
                "HOST": str(host),
            }
            with (host / "journal").open("ab") as journal:
                argv = [sys.executable, "-m", "replica"]
                self.processes[name] = subprocess.Popen(argv, env=env, stdout=journal, stderr=journal)

    def wait(self, *names: str) -> list[int]:
        return [self.processes[name].wait(PATIENCE) for name in names or self.processes]

    def kill(self, name: str) -> None:
        """What systemd does when a unit's main process is killed: nothing of its control group is left."""
        trainer = self.trainer(name)
        self.processes[name].kill()
        self.processes[name].wait(PATIENCE)
        end(trainer)

    def trainer(self, name: str) -> int:
        """The pid of the last trainer that the replica started; each leads a process group."""
        started = [line for line in self.log(name) if line.startswith("started trainer pid ")]
        return int(started[-1].split()[3].rstrip(":")) if started else 0

    def write_job(self, state: JobState) -> None:
        (self.job_folder / "job.json").write_text(JobRecord("job01", state=state).to_json())

    @property
    def job(self) -> JobRecord:
        return JobRecord.from_json((self.job_folder / "job.json").read_bytes())

    def record(self, name: str) -> ReplicaRecord:
        return ReplicaRecord.from_json((self.job_folder / "replicas" / f"{name}.json").read_bytes())

    def log(self, name: str, severity: str | None = None) -> list[str]:
        path = self.host(name) / "state" / "logs" / "newest"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [line["message"] for line in lines if severity in (None, line["severity"])]

    def archive(self, name: str) -> bytes:
        return (self.job_folder / "logs" / f"{name}.jsonl").read_bytes()

    def runs(self, *names: str) -> bool:
        """True when the trainers of these replicas have said `up`."""
        return all("up" in self.log(name) for name in names)

    def close(self) -> None:
        for name, process in self.processes.items():
            if process.poll() is None:
                self.kill(name)


def end(group: int) -> None:
    if group:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return True
    return False


Make = Callable[..., Cluster]
