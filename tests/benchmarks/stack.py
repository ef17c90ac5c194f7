"""The stack `bench`, brought up when a figure needs it, used by a user's commands, always destroyed."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from run import MARKS

from benchmarks.measure import MeasureError, Ran, must, run
from infra.inventory import Inventory
from infra.lxd.api import client
from infra.lxd.host import ALLOWANCE
from infra.lxd.orphans import claimed_projects, existing_names
from infra.scale_tiers import ScaleTier
from ops.cluster.inventory import parse
from ops.cluster.shell import USER

ROOT = Path(__file__).resolve().parents[2]
BIN = ROOT / ".venv" / "bin"
MNIST = ROOT / ".cache" / "mnist"
DATA = "data/mnist"
"""The folder of MNIST in the bucket."""
NAME = "bench"
TINY = "tests/trainers/tiny"
_LOGIN_SECONDS = 60.0
_PAUSE = 0.05
CONFIG: Mapping[ScaleTier, Mapping[str, str]] = {
    **{tier: {"scaleTier": str(tier)} for tier in (ScaleTier.STANDARD_1, ScaleTier.PREMIUM_1)},
    # STANDARD_1 with nine workers: ten replicas.
    ScaleTier.CUSTOM: {
        "scaleTier": str(ScaleTier.CUSTOM),
        "masterType": "n1-highcpu-8",
        "workerType": "n1-highcpu-8",
        "workerCount": "9",
        "parameterServerType": "n1-standard-4",
        "parameterServerCount": "3",
    },
}


class BenchStack:
    """One stack of this checkout; leaving the context destroys and removes it, if it was created."""

    def __init__(self) -> None:
        self.env = {**os.environ, "PULUMI_STACK": NAME, "PATH": f"{BIN}:{os.environ['PATH']}", "COLUMNS": "200"}
        self.folder = ROOT / ".scaletier" / NAME
        self.tier: ScaleTier | None = None
        self.seconds: dict[ScaleTier, list[float]] = {}
        self._created = False
        self._config: Mapping[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._created:
            say("destroying what is left")
            self._remove()
            self._created = False

    def run(self, *command: str, stdin: bytes | None = None) -> Ran:
        """Run a command like a user of this stack, outside a terminal."""
        return run(command, self.env, ROOT, stdin)

    def fab(self, *arguments: str) -> Ran:
        """Run a `fab` command that must succeed."""
        return must(self.run("fab", *arguments), f"fab {' '.join(arguments)}")

    def pulumi(self, *arguments: str) -> Ran:
        """Run a Pulumi command that must succeed."""
        return must(self.run("pulumi", *arguments, "--non-interactive"), f"pulumi {' '.join(arguments)}")

    def ssh(self, host: str, command: str) -> list[str]:
        """Return a command line on a host as a list for run and Popen; its user is that of `fab shell`."""
        return ["ssh", "-F", str(self.folder / "ssh_config"), "-l", USER, host, command]

    def on(self, host: str, command: str, stdin: bytes | None = None) -> str:
        """Run a command on a host that must succeed, and return its stdout."""
        return must(self.run(*self.ssh(host, command), stdin=stdin), f"{host}: {command[:200]}").out

    @property
    def inventory(self) -> Inventory:
        return parse((self.folder / "inventory.json").read_bytes(), self.folder)

    def require(self, tier: ScaleTier) -> Inventory:
        """Return the cluster of this tier; bring it up from nothing unless it exists."""
        if self.tier is not tier:
            self.up(tier)
        return self.inventory

    def up(self, tier: ScaleTier) -> float:
        """Return seconds of `pulumi up` from nothing to an ssh login on every host.

        An earlier cluster is destroyed first.
        """
        self.down()
        if not self._created:
            self._create()
        for arguments in changes(self._config, CONFIG[tier]):
            self.pulumi("config", *arguments)
        self._config = CONFIG[tier]
        say(f"pulumi up, {tier}")
        self.tier = tier
        began = time.monotonic()
        self.pulumi("up", "--yes", "--skip-preview")
        login([self.ssh(name, "true") for name in self.inventory.names], self.env)
        seconds = time.monotonic() - began
        self.seconds.setdefault(tier, []).append(seconds)
        return seconds

    @contextmanager
    def own_cores(self, share: float) -> Iterator[None]:
        """Give every host exactly this part of a core during the context."""
        with self.limited("cpus", str(share)):
            yield

    @contextmanager
    def limited(self, key: str, value: str) -> Iterator[None]:
        """Set this limit, `cpus` or `memory`, on every host during the context."""
        self._limit(key, value)
        try:
            yield
        finally:
            self._limit(key, None)

    def _limit(self, key: str, value: str | None) -> None:
        for role in ("master", "worker", "ps"):
            path = ("--path", f"{key}.{role}")
            self.pulumi("config", *(("rm", *path) if value is None else ("set", *path, value)))
        say(f"pulumi up, {key} of each host {'as the tier has it' if value is None else value}")
        self.pulumi("up", "--yes", "--skip-preview")

    @contextmanager
    def slowed(self, host: str, part: float) -> Iterator[None]:
        """Give a host this part of its share of a core, unknown to Pulumi, during the context."""
        project = existing_names(NAME)[0].project
        before: str = client(project).instances.get(host).config[ALLOWANCE]

        def allow(allowance: str) -> None:
            say(f"{host} has {allowance} of a core")
            instance = client(project).instances.get(host)
            instance.config = {**instance.config, ALLOWANCE: allowance}
            instance.save(wait=True)

        allow(part_of(before, part))
        try:
            yield
        finally:
            allow(before)

    def down(self) -> None:
        """Destroy the cluster; the stack stays."""
        if self.tier is not None:
            say("pulumi destroy")
            self.pulumi("destroy", "--yes", "--skip-preview")
            self.tier = None

    def _create(self) -> None:
        mark = MARKS / NAME
        if NAME in [each["name"] for each in json.loads(self.pulumi("stack", "ls", "--json").out)]:
            if not mark.exists():
                raise MeasureError(
                    f"stack {NAME} exists, and no measurement created it: `pulumi stack rename --stack {NAME} OTHER` keeps "
                    f"yours; `pulumi destroy --stack {NAME}` and `pulumi stack rm {NAME}` remove it"
                )
            say(f"destroying the stack {NAME} that an earlier run left")
            self._remove()
        if remaining := claimed_projects(NAME):
            raise MeasureError(f"stack {NAME} has something on this machine already ({'; '.join(remaining)}): see `fab doctor`")
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
        self._created = True
        self.pulumi("stack", "init", NAME, "--no-select")
        self._config = {}
        for key in ("forceDestroy", "disruptJobs"):
            self.pulumi("config", "set", key, "true")

    def _remove(self) -> None:
        self.run("pulumi", "cancel", "--yes", "--non-interactive")
        self.pulumi("config", "set", "forceDestroy", "true")
        self.pulumi("destroy", "--yes", "--skip-preview")
        self.pulumi("stack", "rm", NAME, "--yes")
        (MARKS / NAME).unlink(missing_ok=True)

    @contextmanager
    def tiny_job(self, label: str, arguments: str) -> Iterator[str]:
        """Run the tests' tiny trainer, which prints without TensorFlow, during the context."""
        job = job_id(label)
        self.fab("train", "--job", job, "--package", TINY, "--args", arguments, "--no-follow")
        try:
            yield job
        finally:
            self.run("fab", "cancel", job)


def changes(old: Mapping[str, str], new: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Return the `pulumi config` commands from one configuration to another, which may lack keys."""
    return [*(("rm", key) for key in old if key not in new), *(("set", key, value) for key, value in new.items())]


def part_of(allowance: str, part: float) -> str:
    """Return a part of a share of a core, as LXD writes them: a quarter of 20ms/100ms is 5ms/100ms.

    MeasureError below 1 ms.
    """
    time, period = (int(each.removesuffix("ms")) for each in allowance.split("/"))
    if (milliseconds := round(time * part)) < 1:
        raise MeasureError(f"{part:g} of {allowance} is less than a millisecond")
    return f"{milliseconds}ms/{period}ms"


def job_id(label: str) -> str:
    """Return an unused id."""
    return f"bench_{re.sub(r'[^a-z0-9]', '_', label)}_{time.time_ns() // 1_000_000}"


def unpacked(job: str) -> str:
    """Return a shell line that enters a job's package on a host, which removes it after the job."""
    folder = f"/tmp/package-{job}"
    return f"mkdir -p {folder} && tar -xzf /bucket/jobs/{job}/package.tar.gz -C {folder} && cd {folder}"


def login(commands: Sequence[Sequence[str]], env: Mapping[str, str]) -> None:
    """Run these ssh commands in parallel, one a host, each again until it succeeds.

    Raises:
        MeasureError: one fails for a minute.
    """
    deadline = time.monotonic() + _LOGIN_SECONDS

    def until_it_works(command: Sequence[str]) -> None:
        while (ran := run(command, env, ROOT)).code:
            if time.monotonic() > deadline:
                must(ran, " ".join(command))
            time.sleep(_PAUSE)

    with ThreadPoolExecutor(max(1, len(commands))) as pool:
        list(pool.map(until_it_works, commands))


def say(text: str) -> None:
    """Print a line of progress on stderr, or nothing more once that is closed: the hosts must still be destroyed."""
    try:
        print(f"bench: {text}", file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
