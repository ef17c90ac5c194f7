"""A Pulumi stack and the commands that a user types at it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from infra.lxd.layout import Names
from infra.lxd.leftovers import own

ROOT = Path(__file__).resolve().parents[2]
BIN = ROOT / ".venv" / "bin"
ORIGINAL = "--model mlp --max-steps 6000 --seed 7 --log-interval 0.1"
"""What the job `original` is given."""
_LIMIT = 600.0
# `connecting to 6 hosts 5 of 6 … 2 s`, and at its end `(5.0 s)`, as ops.terminal has them.
_PROGRESS = re.compile(r"(… |\()([\d.]+ min )?[\d.]+ s\)?$")
_ENDED = frozenset({"SUCCEEDED", "FAILED", "CANCELLED"})


@dataclass(frozen=True)
class Result:
    """How a command ended, and all that it printed."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err

    @property
    def said(self) -> list[str]:
        """The lines on stderr but for those of progress, of which a slow machine has some."""
        return [line for line in self.err.strip().splitlines() if not _PROGRESS.search(line)]


class Stack:
    """One stack of this checkout; leaving the context destroys and removes it. The user's selected stack stays selected."""

    def __init__(self, name: str, config: Mapping[str, str]) -> None:
        self.config = {**config, "forceDestroy": "true"}
        self._call(name)

    def _call(self, name: str) -> None:
        self.name = name
        self.folder = ROOT / ".scaletier" / name
        self.env = {**os.environ, "PULUMI_STACK": name, "PATH": f"{BIN}:{os.environ['PATH']}", "COLUMNS": "200"}

    def rename(self, name: str) -> None:
        """`pulumi stack rename`."""
        self.pulumi("stack", "rename", name)
        self._call(name)

    def __enter__(self) -> Self:
        if (ROOT / f"Pulumi.{self.name}.yaml").exists():
            self._remove()
        self.pulumi("stack", "init", self.name, "--no-select")
        self.configure(**self.config)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._remove()

    @property
    def names(self) -> Names:
        """What its things are called, once it is up."""
        (found,) = own(self.name)
        return found

    def _remove(self) -> None:
        self.run("pulumi", "cancel", "--yes")
        if self.run(
            "pulumi", "destroy", "--yes", "--skip-preview"
        ).code:  # there is something in its bucket, and it was not to go
            self.configure(forceDestroy="true")
            self.up()
            self.pulumi("destroy", "--yes", "--skip-preview")
        self.pulumi("stack", "rm", self.name, "--yes")

    def run(self, *command: str, timeout: float = _LIMIT) -> Result:
        """Runs a command as a user of this stack would, outside a terminal."""
        done = subprocess.run(command, cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=timeout, check=False)
        return Result(done.returncode, done.stdout, done.stderr)

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Starts a command in a process group of its own, where Ctrl-C works: what a shell has in the background ignores it."""
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def pulumi(self, *arguments: str) -> str:
        """A Pulumi command that must succeed; its output."""
        result = self.run("pulumi", *arguments, "--non-interactive")
        assert result.code == 0, f"pulumi {' '.join(arguments)} ended with {result.code}:\n{result.text}"
        return result.text

    def configure(self, **values: str) -> None:
        told = (word for key, value in values.items() for word in ("--plaintext", f"{key}={value}"))
        self.pulumi("config", "set-all", *told)

    def up(self) -> str:
        return self.pulumi("up", "--yes", "--skip-preview")

    def changes(self) -> dict[str, int]:
        """What `pulumi preview` would do to hosts, such as `{"create": 3, "update": 8}`; empty where all stays the same."""
        steps = json.loads(self.run("pulumi", "preview", "--json", "--non-interactive").out)["steps"]
        counts: dict[str, int] = {}
        for step in steps:
            if "Host::" in step["urn"] and step["op"] not in ("same", "refresh"):
                counts[step["op"]] = counts.get(step["op"], 0) + 1
        return counts

    def fab(self, *arguments: str, timeout: float = _LIMIT) -> Result:
        return self.run("fab", *arguments, timeout=timeout)

    def hosts(self) -> list[str]:
        """Names of the hosts that answer ssh, as `fab hosts` sees them."""
        result = self.fab("hosts", "--json")
        assert result.code == 0, result.text
        return [host["name"] for host in json.loads(result.out)["hosts"] if host["answers"]]

    def ssh(self, host: str, command: str, timeout: float = 60, user: str = "admin") -> Result:
        """A command on a host as whom `fab shell` logs in, or as another."""
        return self.run("ssh", "-F", str(self.folder / "ssh_config"), "-l", user, host, command, timeout=timeout)

    def enough(self, job: str, replicas: int = 1) -> None:
        """End a job of the tiny trainer, once so many replicas have begun, as if its time were over."""
        told = f"/bucket/jobs/{job}/output"
        begun = f"until [ $(ls {told} 2>/dev/null | grep -c json) -ge {replicas} ]; do sleep 0.2; done"
        assert self.ssh("master-0", f"{begun}; sudo touch {told}/enough", timeout=120).code == 0

    def describe(self, job: str) -> dict[str, Any]:
        result = self.fab("describe", job, "--json")
        assert result.code == 0, result.text
        record: dict[str, Any] = json.loads(result.out)
        return record

    def wait(self, job: str, *states: str, timeout: float = 600) -> dict[str, Any]:
        """The record of a job once it is in one of the states; AssertionError after the timeout."""
        deadline = time.monotonic() + timeout
        if _ENDED.issuperset(states):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.fab("wait", job, timeout=timeout)
        return self.until(job, lambda record: record["state"] in states, f"in {states}", deadline - time.monotonic())

    def until(self, job: str, seen: Callable[[dict[str, Any]], bool], what: str, timeout: float = 600) -> dict[str, Any]:
        """The record of a job once it is as told; AssertionError that says `what` was waited for after the timeout."""
        deadline = time.monotonic() + timeout
        record = self.describe(job)
        while not seen(record):
            assert time.monotonic() < deadline, f"{job} is {record['state']}, not {what}: {record}"
            time.sleep(1)
            record = self.describe(job)
        return record


def interrupt(process: subprocess.Popen[str], seconds: float) -> int:
    """Ctrl-C for a command's whole process group after some seconds; its exit code."""
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGINT)
    return process.wait(timeout=120)
