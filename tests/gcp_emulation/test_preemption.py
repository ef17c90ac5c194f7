"""Preempted spot hosts: told by the metadata server, off within 30 s, restarted by a host of the job."""

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
PATIENCE = 600.0


class Job:
    """A running job, by default of the tiny trainer, which works until it has done enough."""

    def __init__(
        self,
        cloud: Cloud,
        stack: Stack,
        name: str,
        flags: Sequence[str] = TINY,
        arguments: Sequence[str] = ("--seconds", "36000", "--rate", "2"),
    ) -> None:
        self.cloud, self.name = cloud, name
        self.machines = {found["labels"]["scaletier-replica"]: found["name"] for found in cloud.world.of("Instance")}
        cloud.fab("train", "--job", name, "--no-follow", *flags, "--", *arguments)
        self.until(lambda: self.record["state"] == "RUNNING", "runs")

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
        """Return how many steps a replica has reported, over all its starts."""
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

    def until(self, condition: Callable[[], bool], what: str) -> float:
        """Wait for a condition; the seconds that it took."""
        began = time.monotonic()
        try:
            wait_for(condition, f"{self.name}: {what}", PATIENCE, poll=0.5)
        except AssertionError as error:
            error.add_note(json.dumps(self.record, indent=1))
            raise
        return time.monotonic() - began

    def trains_again(self, replica: str, starts: int = 2) -> float:
        """Return the seconds until a replica has reported a step in its `starts`th start."""
        return self.until(lambda: len(re.findall(r"\], step 1:", self.log(replica))) >= starts, f"{replica} trains again")

    def succeeds(self) -> None:
        # Where its package is: as it was pushed, or out of the bucket.
        folders = [f"/var/lib/scaletier/{place}/{self.name}" for place in ("jobs", "fetched")]
        self.cloud.machines.run(
            self.machines["master-0"], "find", *folders, "-type", "d", "-name", "output", "-exec", "touch", "{}/enough", ";"
        )
        self.until(lambda: self.record["state"] == "SUCCEEDED", "succeeds")


def test_a_preempted_worker_is_started_again_and_goes_on(cloud: Cloud, cluster: Stack) -> None:
    job = Job(cloud, cluster, "one")
    before = job.steps("worker-1")
    off = job.preempt("worker-0")
    again = job.trains_again("worker-0")
    print(f"worker-0: off after {off:.0f} s, trains {again:.0f} s later; worker-1 did {job.steps('worker-1') - before} steps")
    job.until(lambda: job.steps("worker-1") > before + 10, "the others go on")
    assert job.replica("worker-1")["restarts"] == 0, "they never stopped"
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
    job.until(lambda: {f"{name} is being started" for name in names} <= set(job.causes), "all starts are told")
    job.succeeds()


def test_who_has_no_right_to_start_says_so(cloud: Cloud, cluster: Stack) -> None:
    job = Job(cloud, cluster, "refused")
    granted, cloud.google.starters = cloud.google.starters, set()
    try:
        job.preempt("worker-1")
        refused = "HTTP 403, Required 'compute.instances.start'"
        job.until(lambda: any(refused in cause for cause in job.causes), "it says that it may not")
        assert "worker-1 is not started: HTTP 403" in job.log("all")
    finally:
        cloud.google.starters = granted
    job.trains_again("worker-1")
    job.succeeds()


def test_a_synchronous_training_goes_on_from_its_checkpoint_with_all_of_them(cloud: Cloud, cluster: Stack) -> None:
    """It trains without an end, and is ended once it trains again: how long that takes is the machine's affair."""
    endless = ("--model", "mlp", "--max-steps", "10000000", "--checkpoint-steps", "100")
    job = Job(cloud, cluster, "sync", ("--strategy", "sync"), endless)
    saved = "jobs/sync/output/checkpoints/model"
    job.until(lambda: any(name.endswith(".index") for name in cloud.objects(saved)), "there is a checkpoint")
    job.preempt("worker-0")

    def steps_since() -> list[int]:
        """Return the step from which the master resumed, and those that it has trained since."""
        resumed = re.search(r"Resuming from gs://\S+, step (\d+)(.*)", job.log("master-0"), re.DOTALL)
        return [int(resumed[1]), *map(int, re.findall(r"\], step (\d+):", resumed[2]))] if resumed else []

    job.until(lambda: len(steps_since()) > 1, "it trains again")
    at, *since = steps_since()
    assert at >= 100
    assert since[-1] > at
    record = job.record
    # Once more, if a new replica was quicker than the end of an old one.
    assert (record["state"], record["attempt"] >= 1, record["restartsUsed"]) == ("RUNNING", True, 0), record
    assert "worker 0 was preempted" in job.causes
    cloud.fab("cancel", "sync")


def test_hosts_that_are_stopped_are_started_for_a_job_that_says_so(cloud: Cloud, cluster: Stack) -> None:
    names = [machine.name for machine in cloud.google.machines.values()]
    for name in names:
        cloud.machines.preempt(name)
    said = cloud.fab_fails("train", "--job", "woken", "--no-follow", *TINY)
    wanted = (
        r"error: .*worker-0 \(\S+\) does not answer; .*: fab train --start-hosts .* starts those that are stopped, .*pulumi up"
    )
    assert re.fullmatch(wanted, said.splitlines()[-1])
    lines = cloud.fab("train", "--job", "woken", "--start-hosts", *TINY, "--", "--seconds", "2")
    assert "job SUCCEEDED" in lines
