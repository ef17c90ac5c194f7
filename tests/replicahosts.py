"""Hosts that are directories with the real agent, `python -m hosts.agent`, small trainers, and a bucket that is a directory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from waiting import limit, scale, until

from jobs import paths
from jobs.chunks import ChunkFolder, ChunkReader
from jobs.lease import Lease
from jobs.queue import Queue, QueueEntry
from jobs.records import HostConfig, JobRecord, Plan, ReplicaRecord, Task
from jobs.states import JobState

ROOT = Path(__file__).parents[1]
PATIENCE = limit()
PACKAGE = "0" * 64
SLEEPS = "import time\nprint('up')\ntime.sleep(600)\n"
GOES = "import pathlib, time\nprint('up')\nwhile not pathlib.Path('go').exists():\n    time.sleep(0.02)\n"


class Cluster:
    """A bucket with a submitted job, and its hosts: directories with an agent process each."""

    def __init__(self, root: Path, trainer: str, replicas: list[str], args: list[str], **plan: Any) -> None:
        self.root, self.replicas = root, replicas
        self.bucket = root / "bucket"
        self.job_folder = self.bucket / "jobs" / "job01"
        self.job_folder.mkdir(parents=True)
        (self.bucket / "cluster").mkdir()
        self.package = root / "package"
        self.package.mkdir()
        (self.package / "task.py").write_text(trainer)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        quick: dict[str, Any] = {"heartbeatSeconds": 0.1, "leaseSeconds": 0.5 * scale(), "stopSeconds": PATIENCE}
        url, python = plan.pop("bucket", str(self.bucket)), plan.pop("python", sys.executable)
        settings = quick | {"packageSha256": PACKAGE} | plan
        self.plan = Plan("job01", replicas, "task", args, {name: task(name) for name in replicas}, **settings)
        (self.job_folder / "plan.json").write_bytes(self.plan.to_json())
        self.write_job(JobState.PREPARING)
        self.write_queue(QueueEntry("job01", replicas, has_hosts=True))
        for name in replicas:
            etc, home = self.host(name) / "etc", self.host(name) / "state" / "jobs" / "job01"
            etc.mkdir(parents=True)
            (etc / "host.json").write_bytes(HostConfig(name, url, 0.05, python).to_json())
            home.mkdir(parents=True)  # all hosts share one package, where a test reads the files of a trainer
            (home / "package").symlink_to(self.package)
            (home / "package.sha256").write_text(PACKAGE)

    def host(self, name: str) -> Path:
        return self.root / "hosts" / name

    def start(self, *names: str, program: Path = ROOT) -> None:
        for name in names or sorted(path.name for path in (self.root / "hosts").iterdir()):
            host = self.host(name)
            env = os.environ | {
                "SCALETIER_ETC": str(host / "etc"),
                "SCALETIER_STATE": str(host / "state"),
                "PYTHONPATH": str(program),
                "HOST": str(host),
                "TRIGGER_TIMER_MONOTONIC_USEC": "inf",  # an agent that the timer starts does not wait for a job
            }
            with (host / "journal").open("ab") as journal:
                argv = [sys.executable, "-m", "hosts.agent"]
                self.processes[name] = subprocess.Popen(argv, cwd=host, env=env, stdout=journal, stderr=journal)

    def wait(self, *names: str) -> list[int]:
        return [self.processes[name].wait(PATIENCE) for name in names or self.processes]

    def run(self) -> None:
        """Start all hosts, and wait until each has finished."""
        self.start()
        assert set(self.wait()) == {0}

    def start_running(self) -> None:
        """Start all hosts, and wait until the job runs and each trainer has printed `up`."""
        self.start()
        until(lambda: self.runs(*self.replicas) and self.job.state == "RUNNING")

    def finish(self) -> None:
        """Let trainers end that wait for the file `go`, and wait until each host has finished."""
        (self.package / "go").touch()
        assert self.wait() == [0] * len(self.replicas)

    def kill(self, name: str) -> None:
        """Kill the agent and its trainer, as systemd does with a unit's control group."""
        trainer = self.trainer(name)
        self.processes[name].kill()
        self.processes[name].wait(PATIENCE)
        end(trainer)

    def trainer(self, name: str) -> int:
        """Return the pid of the last trainer that the replica started; each leads a process group."""
        started = [line for line in self.log(name) if line.startswith("started trainer pid ")]
        return int(started[-1].split()[3].rstrip(":")) if started else 0

    def write_job(self, state: JobState) -> None:
        job = JobRecord("job01", state=state, lease=Lease(epoch=2), hosts=self.replicas)
        (self.bucket / paths.job("job01")).write_bytes(job.to_json())

    def write_queue(self, *entries: QueueEntry) -> None:
        (self.bucket / paths.QUEUE).write_bytes(Queue(list(entries)).to_json())

    @property
    def queue(self) -> Queue:
        return Queue.from_json((self.bucket / paths.QUEUE).read_bytes())

    def cancel(self) -> None:
        (self.bucket / paths.cancel("job01")).write_text("{}")

    @property
    def job(self) -> JobRecord:
        return JobRecord.from_json((self.job_folder / "job.json").read_bytes())

    def record(self, name: str) -> ReplicaRecord:
        return ReplicaRecord.from_json((self.job_folder / "replicas" / f"{name}.json").read_bytes())

    def log(self, name: str, severity: str | None = None) -> list[str]:
        log = ChunkReader(ChunkFolder(self.host(name) / "state" / "logs" / "newest"))
        lines = [json.loads(entry.line) for entry in log.entries()]
        return [line["message"] for line in lines if severity in (None, line["severity"])]

    def archive(self, name: str) -> bytes:
        return b"".join(entry.line + b"\n" for entry in ChunkReader(ChunkFolder(self.job_folder / "logs" / name)).entries())

    def runs(self, *names: str) -> bool:
        """Return True once the trainers of these replicas have printed `up`."""
        return all("up" in self.log(name) for name in names)

    def journal(self, name: str) -> str:
        return (self.host(name) / "journal").read_text()

    def close(self) -> None:
        for name, process in self.processes.items():
            if process.poll() is None:
                self.kill(name)


def task(name: str) -> Task:
    role, index = name.split("-")
    return Task(json.dumps({"task": {"type": role, "index": int(index)}}))


def end(group: int) -> None:
    if group:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    """Return True if a process has not ended, whether or not its end was waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


def gone(group: int) -> bool:
    """Return True if no process of a group runs; one that has ended and that nobody waits for does not."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            state, _, group_of = path.read_text().rpartition(") ")[2].split()[:3]
            if int(group_of) == group and state not in "ZX":
                return False
    return True


Make = Callable[..., Cluster]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Return a function that creates a cluster of agent processes, which end with the test."""
    clusters: list[Cluster] = []

    def cluster(trainer: str, *replicas: str, args: list[str] | None = None, **plan: Any) -> Cluster:
        clusters.append(Cluster(tmp_path, trainer, list(replicas) or ["master-0"], args or [], **plan))
        return clusters[-1]

    yield cluster
    for each in clusters:
        each.close()
