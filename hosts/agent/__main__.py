"""`python -m hosts.agent`: the main process of a host's unit scaletier.service.

Exit code 0: no job needs this host, or the unit was stopped. 2: the host's configuration is missing or invalid. 75: fab has
installed another version of this program or configuration; systemd starts it again. If a job arrives while the process ends, it
replaces itself by a new one (exec).
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from hosts.agent import config, network
from hosts.agent.agent import Agent
from hosts.agent.job_files import JobFiles, own_environment
from hosts.agent.launcher_client import Launcher, launcher
from hosts.agent.process import Child, ProgramSpec
from hosts.agent.reporter import HostFunctions
from hosts.agent.supervisor import Assignment
from hosts.agent.trainer import Trainer
from jobs.bucket import Bucket, BucketError, TimeLimited
from jobs.cgroup import Meter
from jobs.folder_bucket import FolderBucket, open_bucket
from jobs.host_power import HostStarter, StartClient
from jobs.ledger import Ledger
from jobs.serialization import RecordError
from jobs.times import now

BUCKET_SECONDS = 20.0
EXIT_RESTART = 75
# `fab train` starts the unit before it sends a job, and the next job may come soon.
_IDLE_SECONDS = 60.0
# A start within these seconds after the timer elapsed is the timer's.
_TIMER_SECONDS = 30.0
# The time in which a stopped unit reports to the bucket.
_FINAL_REPORT_SECONDS = 5.0
_LONGEST_SLEEP = 5.0
# Seconds between two polls of the watched object's stamp.
_STAMP_SECONDS = 0.25
_VERSION = Path(__file__).parents[1] / "VERSION"


def main() -> int:
    """Run this host's replicas for as long as a job needs them."""
    installed = _installed()
    try:
        host, state = config.load(os.environ)
        bucket = open_bucket(host.bucket)
    except (RecordError, BucketError) as error:
        sys.stderr.write(f"<3>replica: {error}\n")
        return 2
    records = TimeLimited(bucket, BUCKET_SECONDS)
    ledger = Ledger(records)
    launcher_client = launcher(host.bucket, os.environ)
    job_files = JobFiles(host, state, ledger, bucket, os.environ, launcher_client, wake=lambda: loop.report_now())
    client = StartClient(host.power) if host.power else None
    agent = Agent(
        host.name,
        os.urandom(4).hex(),
        ledger,
        job_files,
        partial(spawn, launcher_client),
        time.monotonic,
        now,
        host.pollSeconds,
        host_functions=HostFunctions(
            Meter(time.monotonic).read,
            network.connections,
            client.preempted if client else lambda: False,
            lambda: HostStarter(client.start, client.hosts, time.monotonic) if client else None,
        ),
        is_current_version=lambda: _installed() == installed,
        idle_seconds=0.0 if started_by_timer(os.environ) else _IDLE_SECONDS,
    )
    notify_systemd("READY=1")
    loop: Loop = Loop(agent, partial(read_stamp, bucket, records))
    loop.run()
    if _installed() != installed:
        return EXIT_RESTART
    if loop.woken_late:
        notify_systemd("WATCHDOG=1")
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the new program listens
        os.execv(sys.executable, sys.orig_argv)  # noqa: S606  the command line of this process
    return 0


def started_by_timer(environ: Mapping[str, str]) -> bool:
    """Return True if the unit's timer has just started this process, to see whether a job waits.

    systemd keeps the variable for later starts, so the time in it counts: microseconds of the monotonic clock.
    """
    triggered = float(environ.get("TRIGGER_TIMER_MONOTONIC_USEC", "-inf")) / 1e6
    return time.monotonic() - triggered < _TIMER_SECONDS


def spawn(launcher_client: Launcher | None, assignment: Assignment) -> Trainer:
    """Start the trainer, or the tuner, which runs it as trials.

    The tuner is our own code, not the job's, so it runs as the agent's user, outside the trainer's sandbox.
    """
    job, argv, cwd, env = assignment.plan.jobId, assignment.argv, assignment.directory, assignment.environment
    if assignment.plan.study:
        stdin = json.dumps({"cwd": str(cwd), "env": dict(env)}).encode()
        # SIGTERM goes once to the tuner, which passes it on to its trial.
        tuner = ProgramSpec(job, argv, cwd, own_environment(os.environ), stdin=stdin, stop_signal_to="all")
        return Trainer(tuner, assignment.log, Child)
    plan = assignment.plan
    peers = plan.peers(assignment.name)
    run = ProgramSpec(job, argv, cwd, env, stop_signal_to=plan.stopSignal, stop_seconds=plan.stopSeconds, peers=peers)
    return Trainer(run, assignment.log, launcher_client or Child)


def _installed() -> bytes:
    """Return the version of this program and the configuration of this host; empty while fab replaces them."""
    with suppress(OSError):
        return _VERSION.read_bytes() + config.host_file(os.environ).read_bytes()
    return b""


def read_stamp(bucket: Bucket, records: TimeLimited, name: str) -> object:
    """Return a value that changes with an object of a folder; always None for other buckets, and if the folder hangs."""
    with suppress(BucketError):
        return records.call(lambda: bucket.stamp(name)) if isinstance(bucket, FolderBucket) else None
    return None


class Loop:
    """Run two threads: the main one waits only for the trainer and for signals, the reporter for the bucket.

    The reporter does not wait for its next cycle once `stamp` returns another value for the object that the agent watches.
    """

    def __init__(self, agent: Agent, stamp: Callable[[str], object] = lambda _: None) -> None:
        self._agent, self._stamp = agent, stamp
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._due = threading.Event()
        self._report_requested = False
        self._terminated_at: float | None = None

    def run(self) -> None:
        """Run until no job needs this host, or the unit is stopped.

        A later SIGHUP, as for a new job, ends this process, and systemd starts it again: no handler runs while Python exits.
        """
        try:
            self._run()
        finally:
            for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)

    def _run(self) -> None:
        agent = self._agent
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGHUP, lambda *_: self._request_report())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._terminate())
        threading.Thread(target=self._report, name="reporter", daemon=True).start()
        status, reported = "", None
        while not agent.finished:
            notify_systemd("WATCHDOG=1")
            if self._report_requested:
                self._report_requested = False
                self._due.set()
            if status != (status := agent.status):
                notify_systemd(f"STATUS={status}")
            supervisor = agent.supervisor
            wait = supervisor.step() if supervisor else _LONGEST_SLEEP
            if supervisor and reported != (reported := supervisor.record.state):
                self._due.set()  # report the new state soon
            if self._gives_up():
                return
            if select.select([self._wake_reader], [], [], min(wait, _LONGEST_SLEEP))[0]:
                self._wake_reader.recv(4096)

    def report_now(self) -> None:
        """Begin the next cycle at once, from any thread."""
        self._due.set()

    @property
    def woken_late(self) -> bool:
        """True if a job may have arrived after this process had found none, or while it removed old files."""
        return (self._report_requested or self._due.is_set()) and self._terminated_at is None

    def _terminate(self) -> None:
        self._terminated_at = self._terminated_at or time.monotonic()
        self._agent.terminate()
        self._request_report()

    def _request_report(self) -> None:
        """Let the main loop set the event: in a signal handler the interrupted code may hold the event's lock."""
        self._report_requested = True

    def _gives_up(self) -> bool:
        """Return True if the unit is being stopped, its trainer has ended, and the bucket is unreachable."""
        supervisor = self._agent.supervisor
        if self._terminated_at is None or (supervisor and not supervisor.idle):
            return False
        return time.monotonic() - self._terminated_at > _FINAL_REPORT_SECONDS

    def _report(self) -> None:
        agent = self._agent
        try:
            while not agent.finished:
                self._due.clear()  # what comes from here on is for the next cycle
                name = agent.watched
                before = self._stamp(name)
                wait = agent.run_cycle()
                with suppress(BlockingIOError):
                    self._wake_writer.send(b"\0")  # the supervisor may have a new target state
                until = time.monotonic() + wait
                while (left := until - time.monotonic()) > 0 and not self._due.wait(min(left, _STAMP_SECONDS)):
                    if agent.watched != name or self._stamp(name) != before:
                        break
        except BaseException:  # noqa: BLE001  whatever it is
            traceback.print_exc()
            os._exit(1)  # a restart is better than a host that reports nothing


def notify_systemd(*assignments: str) -> None:
    """Send assignments such as `READY=1` to systemd, if it listens: sd_notify(3)."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        # systemd writes the zero byte of an abstract address as @.
        target = "\0" + address[1:] if address.startswith("@") else address
        with suppress(OSError):
            channel.sendto("\n".join(assignments).encode(), target)


if __name__ == "__main__":
    sys.exit(main())
