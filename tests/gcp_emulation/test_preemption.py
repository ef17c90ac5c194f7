"""Preempted spot hosts: notified by the metadata server, stopped within 30 s, restarted by a host of the job."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from cloud import Cloud, Stack
from waiting import wait_for

TINY = ("--package", "tests/trainers/tiny", "--module", "tiny.task")
WAIT_SECONDS = 600.0


class PreemptedJob:
    """A running job, by default of the tiny trainer, which runs until `wait_succeeded` ends it."""

    def __init__(
        self,
        cloud: Cloud,
        stack: Stack,
        name: str,
        flags: Sequence[str] = TINY,
        arguments: Sequence[str] = ("--seconds", "36000", "--rate", "2"),
    ) -> None:
        self.cloud, self.name = cloud, name
        self.machines = {
            machine["labels"]["scaletier-replica"]: machine["name"] for machine in cloud.world.resources_of("Instance")
        }
        cloud.fab("train", "--job", name, "--no-follow", *flags, "--", *arguments)
        self.wait_until(lambda: self.record["state"] == "RUNNING", "runs")

    @property
    def record(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads(self.cloud.fab("describe", self.name, "--json"))
        return record

    @property
    def causes(self) -> list[str]:
        return [event["cause"] for event in self.record["events"]]

    def replica(self, name: str) -> dict[str, Any]:
        replica: dict[str, Any] = next(each for each in self.record["replicas"] if each["name"] == name)
        return replica

    def steps(self, replica: str) -> int:
        """Return the number of steps that a replica has reported over all its starts."""
        return self.log(replica).count("], step ")

    def log(self, replica: str) -> str:
        return self.cloud.fab("logs", replica, "--job", self.name, "--lines", "all")

    def preempt(self, *replicas: str) -> float:
        """Preempt hosts at once, and return the seconds until they are stopped."""
        start = time.monotonic()
        threads = []
        for replica in replicas:
            self.cloud.google.machine(self.machines[replica]).set_preempted(True)
            threads.append(threading.Thread(target=self.cloud.machines.preempt, args=(self.machines[replica],)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.monotonic() - start

    def wait_until(self, condition: Callable[[], bool], what: str) -> float:
        """Wait for a condition, and return the seconds that it took."""
        start = time.monotonic()
        try:
            wait_for(condition, f"{self.name}: {what}", WAIT_SECONDS, poll=0.5)
        except AssertionError as error:
            error.add_note(json.dumps(self.record, indent=1))
            raise
        return time.monotonic() - start

    def seconds_to_training(self, replica: str, starts: int = 2) -> float:
        """Return the seconds until a replica has reported a step in its `starts`th start."""
        return self.wait_until(lambda: len(re.findall(r"\], step 1:", self.log(replica))) >= starts, f"{replica} trains again")

    def wait_succeeded(self) -> None:
        # The folder of its package: pushed, or fetched from the bucket.
        folders = [f"/var/lib/scaletier/{folder}/{self.name}" for folder in ("jobs", "fetched")]
        self.cloud.machines.run(
            self.machines["master-0"], "find", *folders, "-type", "d", "-name", "output", "-exec", "touch", "{}/enough", ";"
        )
        self.wait_until(lambda: self.record["state"] == "SUCCEEDED", "succeeds")


def test_a_preempted_worker_is_restarted_once_that_is_permitted_and_trains(cloud: Cloud, cluster: Stack) -> None:
    job = PreemptedJob(cloud, cluster, "one")
    before = job.steps("worker-1")
    granted, cloud.google.starters = cloud.google.starters, set()
    try:
        stop_seconds = job.preempt("worker-0")
        refused = "HTTP 403, Required 'compute.instances.start'"
        job.wait_until(lambda: any(refused in cause for cause in job.causes), "the refusal is recorded")
        job.wait_until(lambda: "worker-0 is not started: HTTP 403" in job.log("all"), "the refusal is logged")
    finally:
        cloud.google.starters = granted
    train_seconds = job.seconds_to_training("worker-0")
    print(f"worker-0: stopped after {stop_seconds:.0f} s, trains {train_seconds:.0f} s after the permission")
    print(f"worker-1 did {job.steps('worker-1') - before} steps")
    job.wait_until(lambda: job.steps("worker-1") > before + 10, "the other workers train")
    assert job.replica("worker-1")["restarts"] == 0, "the other worker never stopped"
    assert "this host is preempted" in job.log("worker-0")
    job.wait_until(lambda: "worker-0 is being started" in job.causes, "the start is recorded")
    assert any(cause.startswith("worker-0 is preempted: its host will be started") for cause in job.causes)
    job.wait_succeeded()
    assert job.replica("worker-0")["restarts"] == 1


def test_three_hosts_with_the_master_are_preempted_at_once(cloud: Cloud, cluster: Stack) -> None:
    job = PreemptedJob(cloud, cluster, "three")
    names = ("master-0", "worker-0", "ps-0")
    stop_seconds = job.preempt(*names)
    train_seconds = [job.seconds_to_training(name) for name in names]
    print(f"three at once: stopped after {stop_seconds:.0f} s, all train {sum(train_seconds):.0f} s later")
    job.wait_until(lambda: {f"{name} is being started" for name in names} <= set(job.causes), "all starts are recorded")
    job.wait_succeeded()


def test_stopped_hosts_are_started_for_a_job_with_the_flag(cloud: Cloud, cluster: Stack) -> None:
    names = [machine.name for machine in cloud.google.machines.values()]
    for name in names:
        cloud.machines.preempt(name)
    stderr = cloud.fab_refused("train", "--job", "woken", "--no-follow", *TINY)
    expected = (
        r"error: .*worker-0 \(\S+\) does not answer; .*: fab train --start-hosts .* starts those that are stopped, .*pulumi up"
    )
    assert re.fullmatch(expected, stderr.splitlines()[-1])
    lines = cloud.fab("train", "--job", "woken", "--start-hosts", *TINY, "--", "--seconds", "2")
    assert "job SUCCEEDED" in lines
