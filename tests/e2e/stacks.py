"""A Pulumi stack and the commands that a user types at it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import hosts_report
from interrupts import HEARS_CTRL_C, postponed
from run import MARKS
from waiting import limit, wait_for

from infra import backend
from infra.lxd import bucket, project
from infra.lxd.api import client
from infra.lxd.bucket_guard import running_host
from infra.lxd.files import read_file
from infra.lxd.layout import LxdNames
from infra.lxd.orphans import claimed_projects, existing_names, stack_objects

ROOT = Path(__file__).resolve().parents[2]
BIN = ROOT / ".venv" / "bin"
ORIGINAL = "--model mlp --max-steps 6000 --seed 7 --log-interval 0.01"
"""The arguments of the job `original`. It logs each round that takes this long, so that no machine is too fast for a curve."""
TINY = ("--package", "tests/trainers/tiny", "--module", "tiny.task")
"""The tiny trainer, which needs no TensorFlow."""
ENDLESS = ("--no-follow", "--", "--seconds", "36000")
"""Run the tiny trainer until `Stack.finish_job` or a cancellation."""
_SECONDS = 600.0
"""The time limit of a command on a typical machine."""
COMMAND_POLL = 2.0
"""Seconds between two `fab` commands that wait for something: each takes a second of a processor."""
_ENDED = frozenset({"SUCCEEDED", "FAILED", "CANCELLED"})


@dataclass(frozen=True)
class Result:
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err

    @property
    def errors(self) -> list[str]:
        """Return stderr from its first line `error: ` on; there may be progress before it."""
        return list(dropwhile(lambda line: not line.startswith("error: "), self.err.strip().splitlines()))


class Stack:
    """One stack of this checkout, destroyed and removed with the context; the user's stack stays selected."""

    def __init__(self, name: str, config: Mapping[str, str]) -> None:
        self.config = {**config, "forceDestroy": "true"}
        self._started: list[subprocess.Popen[str]] = []
        self._strangers: list[str] = []
        self._set_name(name)

    def _set_name(self, name: str) -> None:
        self.name = name
        self.folder = ROOT / ".scaletier" / name
        self.env = {**os.environ, "PULUMI_STACK": name, "PATH": f"{BIN}:{os.environ['PATH']}", "COLUMNS": "200"}

    def rename(self, name: str) -> None:
        """Run `pulumi stack rename`."""
        Stack(name, {}).clear()
        mark = self._mark
        (MARKS / name).touch()
        self.pulumi("stack", "rename", name)
        mark.unlink()
        self._set_name(name)

    def clear(self) -> None:
        """Remove the leftovers of a killed test run; raise AssertionError if the stack may be a user's own."""
        MARKS.mkdir(parents=True, exist_ok=True)
        if self.name in [each["name"] for each in json.loads(self.pulumi("stack", "ls", "--json"))]:
            assert self._mark.exists(), f"stack {self.name} exists, and no test created it"
            self._remove()
        self.file.unlink(missing_ok=True)
        if self._mark.exists():
            self._delete_projects()  # its state is gone, as one in a pytest folder is
        remaining = claimed_projects(self.name)
        assert not remaining, (
            f"stack {self.name} has no state here but these hosts: {remaining}. `fab doctor` shows how to remove them"
        )
        self._mark.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        self.clear()
        self._strangers = stack_objects(self.name)  # of another LXD, such as one in a container
        self._mark.touch()
        self.pulumi("stack", "init", self.name, "--no-select")
        self.configure(**self.config)
        hosts_report.WATCHED.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with postponed():
            if error:
                error.add_note(hosts_report.write(self.name))
            hosts_report.WATCHED.remove(self)
            for process in self._started:
                _end(process)
            self._remove()

    @property
    def names(self) -> LxdNames:
        """The names of its resources, once it is up."""
        (names,) = existing_names(self.name)
        return names

    def _remove(self) -> None:
        for _, command in backend.damaged_files(backend.url(ROOT)):
            if f"/{self.name}.json" in command:  # a killed run's Pulumi was writing its state
                self.run(*shlex.split(command))
        self.run("pulumi", "cancel", "--yes")
        if self.run(
            "pulumi", "destroy", "--yes", "--skip-preview"
        ).code:  # its bucket has content and is retained, or a job runs
            self.configure(forceDestroy="true", disruptJobs="true")
            self.up()
            self.pulumi("destroy", "--yes", "--skip-preview")
        self.pulumi("stack", "rm", self.name, "--yes")
        self._delete_projects()
        self._mark.unlink(missing_ok=True)

    def _delete_projects(self) -> None:
        """Delete what no state knows: hosts of a lost state, and the bucket that a failed test left retained."""
        for names in existing_names(self.name):
            if pool := bucket.pool_of(names.project):
                volume = {"project": names.project, "pool": pool, "name": names.bucket}
                bucket.set_on_destroy(volume, bucket.REMOVE)
            project.delete(names.project, {})

    def run(self, *command: str, timeout: float = _SECONDS) -> Result:
        """Run a command like a user of this stack, outside a terminal; its timeout is that of a typical machine.

        If the wait ends for any reason, the command is interrupted as by Ctrl-C first: a killed Pulumi leaves its providers.
        """
        process = self._popen(command, subprocess.PIPE)
        try:
            out, err = process.communicate(timeout=limit(timeout))
        except BaseException:
            _end(process)
            raise
        return Result(process.returncode, out, err)

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Start a command that ends with the stack at the latest."""
        self._started.append(self._popen(command, subprocess.STDOUT))
        return self._started[-1]

    @contextlib.contextmanager
    def serving(self, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
        """Run a command of fab that prints a URL of this machine; return it with that, and end it afterwards."""
        process = self.start("fab", *arguments)
        assert process.stdout is not None
        try:
            output = ""
            for line in process.stdout:
                output += line
                if line.startswith("http://127.0.0.1:"):
                    yield process, line.strip()
                    return
            raise AssertionError(f"fab {arguments[0]} printed no URL: {output}")
        except Exception as error:
            code = process.poll()
            process.kill()
            more = f"fab {arguments[0]} {'ran on' if code is None else f'had ended with {code}'}:\n{process.stdout.read()}"
            error.add_note(more)
            raise
        finally:
            _end(process)

    def _popen(self, command: Sequence[str], stderr: int) -> subprocess.Popen[str]:
        """Start a command in its own process group, where Ctrl-C works."""
        return subprocess.Popen(
            [*HEARS_CTRL_C, *command],
            cwd=ROOT,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )

    def pulumi(self, *arguments: str) -> str:
        """Run a Pulumi command that must succeed; return its output."""
        result = self.run("pulumi", *arguments, "--non-interactive")
        assert result.code == 0, f"pulumi {' '.join(arguments)} ended with {result.code}:\n{result.text}"
        return result.text

    def configure(self, **values: str) -> None:
        settings = (word for key, value in values.items() for word in ("--plaintext", f"{key}={value}"))
        self.pulumi("config", "set-all", *settings)

    def up(self) -> str:
        return self.pulumi("up", "--yes", "--skip-preview")

    def up_changes(self) -> dict[str, int]:
        """Run `pulumi up`; return what it has done to hosts, such as `{"created": 3, "updated": 8}`."""
        return dict(Counter(re.findall(r":Host \S+ (created|updated|replaced|deleted)\b(?! original)", self.up())))

    def changes(self) -> dict[str, int]:
        """Return `pulumi preview`'s changes to hosts, such as `{"create": 3, "update": 8}`; empty for none."""
        result = self.run("pulumi", "preview", "--json", "--non-interactive")
        assert result.code == 0, result.text
        counts: dict[str, int] = {}
        for step in json.loads(result.out)["steps"]:
            if "Host::" in step["urn"] and step["op"] not in ("same", "refresh"):
                counts[step["op"]] = counts.get(step["op"], 0) + 1
        return counts

    def fab(self, *arguments: str, timeout: float = _SECONDS) -> Result:
        """Run a command of fab."""
        return self.run("fab", *arguments, timeout=timeout)

    def must(self, *arguments: str) -> Result:
        """Run a command of fab that must succeed."""
        result = self.fab(*arguments)
        assert result.code == 0, result.text
        return result

    def json(self, *arguments: str) -> Any:
        """Return what a command of fab prints with --json, whatever its exit code."""
        return _json(self.fab(*arguments, "--json"))

    def must_json(self, *arguments: str) -> Any:
        """Return what a command of fab that must succeed prints with --json."""
        return _json(self.must(*arguments, "--json"))

    def get(self, job: str, folder: Path) -> Path:
        """Fetch a job's output into a folder below this one, and return it."""
        self.must("get", job, "--dest", str(folder / "out"))
        return folder / "out"

    def messages(self, job: str, replica: str = "all") -> dict[str, list[str]]:
        """Return the messages of a job's log by replica, or those of one replica alone; empty if there is no log yet."""
        messages: dict[str, list[str]] = {}
        for text in self.fab("logs", replica, "--job", job, "--lines", "all", "--json").out.splitlines():
            line = json.loads(text)
            messages.setdefault(line["replica"], []).append(line["message"])
        return messages

    def hosts(self) -> list[str]:
        """Return the names of the hosts that answer ssh, by `fab hosts`."""
        return [host["name"] for host in self.must_json("hosts")["hosts"] if host["answers"]]

    def ssh(self, host: str, command: str, timeout: float = 120, user: str = "admin") -> Result:
        """Run a command on a host as the user of `fab shell`, or as another."""
        return self.run("ssh", "-F", str(self.folder / "ssh_config"), "-l", user, host, command, timeout=timeout)

    def must_ssh(self, host: str, command: str, timeout: float = 300, user: str = "admin") -> Result:
        """Run a command on a host that must succeed."""
        result = self.ssh(host, command, timeout, user)
        assert result.code == 0, result.text
        return result

    def wait_on(self, host: str, condition: str, then: str = "true", timeout: float = 300) -> None:
        """Wait on a host until a condition of its shell is true, then run a command that must succeed."""
        self.must_ssh(host, f"until {condition}; do sleep 0.1; done; {then}", timeout)

    def finish_job(self, job: str, replicas: int = 1) -> None:
        """Let a job of the tiny trainer succeed, once `replicas` of it have started."""
        output = f"/bucket/jobs/{job}/output"
        have_started = f"[ $(ls {output} 2>/dev/null | grep -c json) -ge {replicas} ]"
        self.wait_on("master-0", have_started, f"sudo touch {output}/enough")

    def cancel_jobs(self) -> list[str]:
        """Cancel all jobs; return what `fab cancel` printed for those that are still active."""
        printed = {job: self.fab("cancel", job).text for job in self.active_jobs()}
        return [f"{job}: {printed.get(job)}" for job in self.active_jobs()] if printed else []

    def describe(self, job: str) -> dict[str, Any]:
        record: dict[str, Any] = self.must_json("describe", job)
        return record

    def wait_succeeded(self, job: str) -> dict[str, Any]:
        """Wait until a job has ended, check that it SUCCEEDED, and return its record."""
        record = self.wait(job, *_ENDED)
        assert record["state"] == "SUCCEEDED", record
        return record

    def wait(self, job: str, *states: str, timeout: float = _SECONDS) -> dict[str, Any]:
        """Return the record of a job once it is in one of the states."""
        if _ENDED.issuperset(states):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.fab("wait", job, timeout=timeout)
        return self.wait_until(job, lambda record: record["state"] in states, f"in {states}", timeout)

    def wait_until(
        self, job: str, condition: Callable[[dict[str, Any]], bool], what: str, timeout: float = _SECONDS
    ) -> dict[str, Any]:
        """Wait until a job's record meets a condition, which `what` describes in errors; return the record."""
        record: dict[str, Any] = {}

        def is_met() -> bool:
            record.update(self.describe(job))
            return condition(record)

        try:
            wait_for(is_met, f"{job} {what}", timeout, poll=COMMAND_POLL)
        except AssertionError as error:
            error.add_note(f"its record: {record}")
            raise
        return record

    def wait_for_state(self, state: str, *jobs: str) -> str:
        """Wait until one of these submitted jobs is in a state, and return it."""

        def find_job() -> str | None:
            for job in jobs:
                result = self.fab("describe", job, "--json")
                if result.code == 0 and json.loads(result.out)["state"] == state:
                    return job
            return None

        return wait_for(find_job, f"one of {jobs} is {state}", poll=COMMAND_POLL)

    def wait_for_leftovers(self, *expected: str) -> None:
        """Wait until a destroyed stack has left exactly this on this machine, beside what was there before it."""

        def is_expected() -> bool:
            remaining[:] = [each for each in stack_objects(self.name) if each not in self._strangers]
            return remaining == [*expected]

        remaining: list[str] = []
        try:
            wait_for(is_expected, f"{expected or 'nothing'} remains on this machine")
        except AssertionError as error:
            error.add_note(f"remaining: {remaining}")
            raise

    def stop(self, host: str) -> None:
        """Power off a host."""
        client(self.names.project).instances.get(host).stop(force=True, wait=True)

    def start_host(self, host: str) -> None:
        """Start a host that was stopped, and wait until it answers ssh."""
        instance = client(self.names.project).instances.get(host)
        if instance.status != "Running":
            instance.start(wait=True)
        wait_for(lambda: self.ssh(host, "hostname").out.strip() == host, f"{host} answers")

    def instances(self) -> list[str]:
        """Return the names of the hosts in LXD, in any state."""
        return [instance.name for names in existing_names(self.name) for instance in client(names.project).instances.all()]

    # The interface for hosts_report, which reports a failed test's hosts and restores the stack.

    @property
    def settings(self) -> str:
        """Return the text of the configuration file."""
        return self.file.read_text()

    def restore(self, settings: str) -> None:
        """Restore a stack's configuration, hosts and firewall after any test."""
        self.file.write_text(settings)
        self.up()

    @property
    def host_names(self) -> list[str]:
        """Return the names of all hosts in the inventory."""
        return [*self.addresses]

    @property
    def addresses(self) -> dict[str, str]:
        """Return the address of each host in the inventory."""
        hosts = json.loads((self.folder / "inventory.json").read_text())["hosts"]
        return {host["name"]: host["address"] for host in hosts}

    def active_jobs(self) -> list[str]:
        """Return the running and queued jobs from the bucket, read on a running host; none if no host runs."""
        for names in existing_names(self.name):
            if host := running_host(names.project):
                queue = _read(host, "cluster/queue.json") or {"entries": []}
                jobs = [entry["jobId"] for entry in queue["entries"]]
                return [job for job in jobs if (_read(host, f"jobs/{job}/job.json") or {}).get("state") not in _ENDED]
        return []

    @property
    def file(self) -> Path:
        """Its configuration."""
        return ROOT / f"Pulumi.{self.name}.yaml"

    @property
    def _mark(self) -> Path:
        return MARKS / self.name


def _json(result: Result) -> Any:
    try:
        return json.loads(result.out)
    except ValueError:
        raise AssertionError(f"invalid JSON: {result.text}") from None


def _read(host: Any, name: str) -> dict[str, Any] | None:
    """Read a record from the bucket through LXD, much faster than by a command; None if it is missing."""
    with contextlib.suppress(ValueError):
        record: dict[str, Any] = json.loads(read_file(host, f"/bucket/{name}") or "null")
        return record
    return None


def _end(process: subprocess.Popen[str]) -> None:
    """Interrupt a command, wait for it, and kill the rest of its process group."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=limit(60))
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def interrupt(process: subprocess.Popen[str]) -> int:
    """Send Ctrl-C to a command's whole process group, and return its exit code."""
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=limit(600))
    return process.returncode
