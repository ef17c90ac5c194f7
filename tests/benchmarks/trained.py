"""A training by its log, on the cluster or as one process, and its use of the hosts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from benchmarks.job_events import log_of
from benchmarks.measure import Lines, MeasureError, high_water, must, run, running
from benchmarks.stack import BIN, MNIST, ROOT, BenchStack, job_id, say
from infra.scale_tiers import ScaleTier

BATCH = 100
_ENV = {"PATH": f"{BIN}:{os.defpath}", "PYTHONPATH": str(ROOT / "tests")}
_LIMIT_SECONDS = 580.0
# For a host with a tenth of a core.
_JOB_SECONDS = 3600.0
_END_SECONDS = 30.0
_TRAIN = re.compile(r"Train \[(\w+/\d+)\], step (\d+): ")
_FINAL = re.compile(r"Final metrics after (\d+) steps, loss: [\d.]+, accuracy: ([\d.]+)")
_SENT = "cat /sys/class/net/eth0/statistics/tx_bytes"
_PEAKS = "sudo -n sh -c 'for p in $(pgrep -u trainer); do grep VmHWM /proc/$p/status; done'"


@dataclass(frozen=True)
class Trained:
    """The result of a training. `steps` are (Unix time, replica, global step) of its Train lines, by time.

    `accuracy` is the last line's; `sent` are bytes that all hosts sent, `memory` MB of the largest trainer process by host.
    """

    steps: Sequence[tuple[float, str, int]]
    accuracy: float
    sent: int = 0
    memory: Mapping[str, float] | None = None
    job: str = ""

    @property
    def seconds(self) -> float:
        """From the first Train line to the last."""
        return self.steps[-1][0] - self.steps[0][0]

    @property
    def last_joined(self) -> float:
        """Seconds from the first Train line to the last replica's second, after a whole round of it."""
        lines: dict[str, list[float]] = {}
        for at, replica, _ in self.steps:
            lines.setdefault(replica, []).append(at)
        return max(times[min(1, len(times) - 1)] for times in lines.values()) - self.steps[0][0]

    @property
    def examples_per_second(self) -> float:
        """Once all replicas train: from the last one's first full round to the end."""
        begin = self.steps[0][0] + self.last_joined
        part = [(at, step) for at, _, step in self.steps if at >= begin]
        (start, low), (end, high) = part[0], max(part, key=lambda pair: pair[1])
        if end <= start:
            raise MeasureError("the training was too short for its speed")
        return (high - low) * BATCH / (end - start)

    def time_of(self, step: int) -> float:
        """Return the seconds from the first Train line to this global step, interpolated between lines."""
        start = before = self.steps[0][0]
        last = 0
        for at, _, now in self.steps:
            if now >= step:
                share = (step - last) / (now - last) if now > last else 1.0
                return before + share * (at - before) - start
            if now > last:
                before, last = at, now
        raise MeasureError(f"the training ended before step {step}")

    def sent_until(self, step: int) -> float:
        """Return the bytes that all hosts sent until this global step, as a share of the whole job's."""
        return self.sent * step / max(last for _, _, last in self.steps)


def parse(lines: Sequence[tuple[float, str]]) -> Trained:
    """Return a training from the lines of its log with their Unix times.

    Raises:
        MeasureError: it trained nothing.
    """
    steps = sorted((at, match[1], int(match[2])) for at, line in lines if (match := _TRAIN.search(line)))
    finals = [float(match[2]) for _, line in lines if (match := _FINAL.search(line))]
    if not steps or not finals:
        raise MeasureError(f"the log has no training: {' | '.join(line for _, line in lines[-3:])}")
    return Trained(steps, finals[-1])


def seconds_a_step(lines: Sequence[tuple[float, str]], after: int) -> float:
    """Return the seconds of one replica's step, by the times of its Train lines after a given step.

    Raises:
        MeasureError: there are no two lines.
    """
    steps = [(at, int(match[2])) for at, line in lines if (match := _TRAIN.search(line)) and int(match[2]) > after]
    if len(steps) < 2 or steps[-1][1] == steps[0][1]:
        raise MeasureError(f"there are no two Train lines after step {after}: {' | '.join(line for _, line in lines[-3:])}")
    (began, low), (ended, high) = steps[0], steps[-1]
    return (ended - began) / (high - low)


def alone(arguments: str, job_dir: Path) -> Trained:
    """Run the shipped trainer as one process on all processors of this machine."""
    say(f"one process: {arguments}")
    return parse(process(["trainer.task", *arguments.split()], job_dir))


def process(module: Sequence[str], job_dir: Path) -> list[tuple[float, str]]:
    """Return the output of a module that trains on MNIST, run on all processors of this machine."""
    env = {**_ENV, "HOME": str(job_dir), "SCALETIER_DATA": str(MNIST), "JOB_DIR": str(job_dir), "PYTHONUNBUFFERED": "1"}
    with running([str(BIN / "python"), "-m", *module], env, ROOT, subprocess.DEVNULL) as started:
        return list(Lines(started).until(time.monotonic() + _LIMIT_SECONDS))


def together(
    stack: BenchStack,
    label: str,
    arguments: str,
    *options: str,
    tier: ScaleTier = ScaleTier.STANDARD_1,
    beside: Callable[[threading.Event], None] | None = None,
    watched: Sequence[str] = (),
    every: float = 0.0,
) -> Trained:
    """Run a job on the cluster by `fab train`, which must succeed.

    `beside` runs from the first Train line on; its event is set at the job's end. On the hosts `watched` the trainers' memory
    is read every `every` seconds, which takes some of their processor.
    """
    inventory = stack.require(tier)
    job = job_id(label)
    say(f"fab train --job {job} {' '.join(options)} -- {arguments}")
    before = sum(int(stack.on(name, _SENT)) for name in inventory.names)
    try:
        with _Memory(stack, watched, every) as memory:
            _follow(stack, ["fab", "train", "--job", job, *options, "--", *arguments.split()], beside)
    except BaseException:
        stack.run("fab", "cancel", job)
        raise
    sent_bytes = sum(int(stack.on(name, _SENT)) for name in inventory.names) - before
    result = parse([(line.at, line.message) for line in log_of(stack, job)])
    return Trained(result.steps, result.accuracy, sent_bytes, memory.peaks, job)


def _follow(stack: BenchStack, command: Sequence[str], beside: Callable[[threading.Event], None] | None) -> None:
    last, over = deque[str](maxlen=5), threading.Event()
    thread = threading.Thread(target=beside, args=(over,), daemon=True) if beside else None
    with running(command, stack.env, ROOT, subprocess.STDOUT) as started:
        try:
            for _, line in Lines(started).until(time.monotonic() + _JOB_SECONDS):
                last.append(line)
                if thread and not thread.ident and _TRAIN.search(line):
                    thread.start()
        finally:
            over.set()
            if thread and thread.ident:
                thread.join()
        if started.wait(timeout=_END_SECONDS):
            raise MeasureError(f"{' '.join(command)} ended with {started.returncode}: {' | '.join(last)}")


def curve(folder: Path) -> list[tuple[int, float]]:
    """Return step and test accuracy of each checkpoint below a folder; a process of its own evaluates them."""
    command = [sys.executable, "-m", "benchmarks.accuracy_once", str(folder)]
    points: list[list[Any]] = json.loads(must(run(command, _ENV, ROOT), "evaluating checkpoints").out)
    say(f"test accuracy at steps: {', '.join(f'{step} {value:.4f}' for step, value in points)}")
    return [(step, value) for step, value in points]


def step_with(accuracy: float, curve: Sequence[tuple[int, float]]) -> int:
    """Return the interpolated global step at which a curve of (step, accuracy) reaches this accuracy.

    Raises:
        MeasureError: it never does.
    """
    before, low = 0, 0.0
    for step, value in curve:
        if value >= accuracy:
            return round(before + (accuracy - low) / (value - low) * (step - before))
        before, low = step, value
    raise MeasureError(f"no checkpoint has a test accuracy of {accuracy}: the best is {max((a for _, a in curve), default=0)}")


def fetched(stack: BenchStack, job: str) -> tempfile.TemporaryDirectory[str]:
    """Return a local copy of a job's output."""
    folder = tempfile.TemporaryDirectory()
    stack.fab("get", job, folder.name)
    return folder


class _Memory:
    """Samples the trainers' memory on some hosts."""

    def __init__(self, stack: BenchStack, hosts: Sequence[str], every: float) -> None:
        self.peaks: dict[str, float] = {}
        self._stack, self._hosts, self._every = stack, hosts, every
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        if self._hosts:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._hosts:
            self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(self._every):
            for host in self._hosts:
                peak = high_water(self._stack.run(*self._stack.ssh(host, _PEAKS)).out)
                self.peaks[host] = max(peak, self.peaks.get(host, 0.0))
