"""Spot hosts that Google takes back: told by the metadata server, off within 30 s, and started again by a host of the job."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from cloud import Cloud, Stack

SPOT = {
    "scaleTier": "CUSTOM",
    "masterType": "n1-standard-4",
    "workerType": "n1-standard-4",
    "workerCount": "2",
    "parameterServerType": "n1-standard-4",
    "parameterServerCount": "1",
    "provisioningModel": '{"master": "SPOT", "worker": "SPOT", "ps": "SPOT"}',
}
TINY = ("--package", "tests/trainers/tiny", "--module", "tiny.task")
PATIENCE = 150.0


class Job:
    """A job that runs, of the tiny trainer where nothing else is said: that works until it has done enough."""

    def __init__(
        self,
        cloud: Cloud,
        stack: Stack,
        name: str,
        flags: Sequence[str] = TINY,
        arguments: Sequence[str] = ("--seconds", "600", "--rate", "2"),
    ) -> None:
        self.cloud, self.name = cloud, name
        self.machines = {found["labels"]["scaletier-replica"]: found["name"] for found in cloud.world.of("Instance")}
        cloud.fab("train", "--job", name, "--no-follow", *flags, "--", *arguments)
        self.until(lambda: self.record["state"] == "RUNNING")

    @property
    def record(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.cloud.fab("describe", self.name, "--json"))
        return found

    @property
    def causes(self) -> list[str]:
        return [event["cause"] for event in self.record["events"]]

    def replica(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = next(each for each in self.record["replicas"] if each["name"] == name)
        return found

    def steps(self, replica: str) -> int:
        """How many steps a replica has told of, over all its starts."""
        return self.log(replica).count("], step ")

    def log(self, replica: str) -> str:
        return self.cloud.fab("logs", replica, "--job", self.name, "--lines", "all")

    def preempt(self, *replicas: str) -> float:
        """Take hosts back, all at once; the seconds until they are off."""
        began = time.monotonic()
        threads = []
        for replica in replicas:
            self.cloud.google.machine(self.machines[replica]).preempted(True)
            threads.append(threading.Thread(target=self.cloud.machines.preempt, args=(self.machines[replica],)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.monotonic() - began

    def until(self, condition: Any, seconds: float = PATIENCE) -> float:
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < seconds, json.dumps(self.record, indent=1)
            time.sleep(1)
        return time.monotonic() - began

    def trains_again(self, replica: str, starts: int = 2) -> float:
        """The seconds until a replica has told of a step in its `starts`th start."""
        return self.until(lambda: len(re.findall(r"\], step 1:", self.log(replica))) >= starts)

    def succeeds(self) -> None:
        # Where its package is: as it was pushed, or out of the bucket.
        folders = [f"/var/lib/scaletier/{place}/{self.name}" for place in ("jobs", "fetched")]
        self.cloud.machines.run(
            self.machines["master-0"], "find", *folders, "-type", "d", "-name", "output", "-exec", "touch", "{}/enough", ";"
        )
        self.until(lambda: self.record["state"] == "SUCCEEDED")


@pytest.fixture(scope="module")
def cluster(cloud: Cloud) -> Iterator[Stack]:
    with cloud.up(**SPOT) as stack:
        yield stack


def test_a_preempted_worker_is_started_again_and_goes_on(cloud: Cloud, cluster: Stack) -> None:
    job = Job(cloud, cluster, "one")
    before = job.steps("worker-1")
    off = job.preempt("worker-0")
    again = job.trains_again("worker-0")
    print(f"worker-0: off after {off:.0f} s, trains {again:.0f} s later; worker-1 did {job.steps('worker-1') - before} steps")
    assert job.steps("worker-1") > before + 10, "the others go on meanwhile"
    assert "this host is preempted" in job.log("worker-0")
    assert "worker-0 is being started" in job.causes
    assert any(cause.startswith("worker-0 is preempted: its host is to be started again") for cause in job.causes)
    job.succeeds()
    assert job.replica("worker-0")["restarts"] == 1


def test_three_at_once_the_master_among_them(cloud: Cloud, cluster: Stack) -> None:
    job = Job(cloud, cluster, "three")
    names = ("master-0", "worker-0", "ps-0")
    off = job.preempt(*names)
    took = [job.trains_again(name) for name in names]
    print(f"three at once: off after {off:.0f} s, all train {sum(took):.0f} s later")
    assert {f"{name} is being started" for name in names} <= set(job.causes)
    job.succeeds()


def test_who_has_no_right_to_start_says_so(cloud: Cloud, cluster: Stack) -> None:
    job = Job(cloud, cluster, "refused")
    granted, cloud.google.starters = cloud.google.starters, set()
    try:
        job.preempt("worker-1")
        job.until(lambda: any("HTTP 403, Required 'compute.instances.start'" in cause for cause in job.causes))
        assert "worker-1 is not started: HTTP 403" in job.log("all")
    finally:
        cloud.google.starters = granted
    job.trains_again("worker-1")
    job.succeeds()


def test_a_synchronous_training_goes_on_from_its_checkpoint_with_all_of_them(cloud: Cloud, cluster: Stack) -> None:
    job = Job(cloud, cluster, "sync", ("--strategy", "sync"), ("--model", "mlp", "--max-steps", "12000"))
    job.until(lambda: "], step " in job.log("master-0"))
    job.preempt("worker-0")
    job.until(lambda: job.record["state"] in ("SUCCEEDED", "FAILED"), 2 * PATIENCE)  # it does its steps besides
    record = job.record
    assert (record["state"], record["attempt"], record["spent"]) == ("SUCCEEDED", 1, 0), record["errorMessage"]
    assert "worker 0 was preempted" in job.causes
    assert "Resuming from gs://" in job.log("master-0")


def test_hosts_that_are_stopped_are_started_for_a_job_that_says_so(cloud: Cloud, cluster: Stack) -> None:
    names = [machine.name for machine in cloud.google.machines.values()]
    for name in names:
        cloud.machines.preempt(name)
    said = cloud.fab_fails("train", "--job", "woken", "--no-follow", *TINY)
    wanted = r"error: .*worker-0 \(\S+\) does not answer; .*: fab train --wake .* starts those that are stopped, .*pulumi up"
    assert re.fullmatch(wanted, said.splitlines()[-1])
    lines = cloud.fab("train", "--job", "woken", "--wake", *TINY, "--", "--seconds", "2", seconds=300)
    assert "job SUCCEEDED" in lines
