"""The three strategies on real hosts: training, checkpoints shared between them, a kill, and their errors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from stacks import COMMAND_POLL, Stack
from waiting import limit, wait_for

TRAINERS = ("master-0", "worker-0", "worker-1")
LINE = (
    r"^Train \[{}\], step \d+: loss: (?:\d+\.\d{{3}}|0\.000\d+|\d\S*e-\d\d), accuracy: \d\.\d{{3}} \(\d+\.\d{{3}} sec\) "
    r"\d+\.\d global steps/s, \d+\.\d local steps/s$"
)
ONCE = "trainingInput:\n  scheduling: {maxRestarts: 0, maxRetries: 0}\n"
# 82 million parameters, 331 MB: the master of `async` holds several copies, and has 1.9 GB of memory.
LARGE = (
    "--hidden-units 5120,5120,5120,5120 --batch-size 10 --max-steps 4 --learning-rate 0.01 --eval-interval 600 "
    "--train-data /bucket/data/mnist --eval-data /bucket/data/mnist/train-00000-of-00020.tfrecord"
)


def training_flags(strategy: str) -> tuple[str, str]:
    """Return the flags that exclude replicas that do not train."""
    return "--replicas", "ps,worker" if strategy == "async" else "worker"


def train(cluster: Stack, job: str, strategy: str, args: str, *more: str) -> tuple[int, dict[str, Any]]:
    """Run a job to its end; return the exit code of `fab train`, and the job's record."""
    result = cluster.fab("train", "--job", job, "--strategy", strategy, *more, "--args", f"--model mlp {args}")
    assert result.code != 2, result.text
    return result.code, cluster.describe(job)


def messages(cluster: Stack, job: str, replica: str) -> list[str]:
    return cluster.messages(job, replica).get(replica, [])


def find_match(lines: Sequence[str], pattern: str) -> re.Match[str]:
    match = next((match for line in lines if (match := re.search(pattern, line))), None)
    assert match, f"no line matches {pattern}:\n" + "\n".join(lines)
    return match


def has_lines(cluster: Stack, job: str, pattern: str, *replicas: str) -> bool:
    """Return True once each of these replicas has logged a line of this pattern, in which {} is its name."""
    lines = cluster.messages(job)
    return all(
        any(re.search(pattern.format(name.replace("-", "/")), line) for line in lines.get(name, [])) for name in replicas
    )


def saved_step(cluster: Stack, job_dir: str) -> int:
    """Return the step of the newest checkpoint, 0 if there is none."""
    newest = re.search(r'^model_checkpoint_path: "\S*model-(\d+)"', "\n".join(checkpoints(cluster, job_dir)), re.MULTILINE)
    return int(newest[1]) if newest else 0


def checkpoints(cluster: Stack, job_dir: str) -> list[str]:
    return cluster.ssh("master-0", f"ls {job_dir}/checkpoints/*.index && cat {job_dir}/checkpoints/checkpoint").out.splitlines()


@pytest.mark.timeout(limit(3600))
def test_each_strategy_resumes_from_the_checkpoint_of_another(cluster: Stack) -> None:
    job_dir = "/bucket/jobs/by_turns/output"
    # Endless, as async does not wait for a late worker, and here all must take part.
    endless = "--model mlp --max-steps 10000000 --log-interval 0.2 --checkpoint-steps 200"
    cluster.must("train", "--job", "turn1", "--strategy", "async", "--job-dir", job_dir, "--no-follow", "--args", endless)
    wait_for(lambda: has_lines(cluster, "turn1", LINE, *TRAINERS), "each replica trains", 300, poll=COMMAND_POLL)
    wait_for(
        lambda: has_lines(cluster, "turn1", r"\[{}\].* serves variables", "ps-0", "ps-1"),
        "the servers are logged",
        poll=COMMAND_POLL,
    )
    wait_for(lambda: saved_step(cluster, job_dir) >= 1000, "1000 steps are saved", 300, poll=1)
    cluster.must("cancel", "turn1")

    for number, strategy in enumerate(("sync", "model-parallel", "async"), 2):
        job, saved = f"turn{number}", saved_step(cluster, job_dir)
        args = f"--max-steps {saved + 400} --log-interval 0.2 --checkpoint-steps 200"
        code, record = train(cluster, job, strategy, args, "--job-dir", job_dir)
        assert (code, record["state"]) == (0, "SUCCEEDED"), record["errorMessage"]
        assert record["trainingInput"]["args"][:2] == ["--strategy", strategy]
        for replica in TRAINERS if strategy != "async" else TRAINERS[:1]:
            find_match(messages(cluster, job, replica), LINE.format(replica.replace("-", "/")))
        servers = [name for name in record["candidates"] if name.startswith("ps-")]
        assert servers == (["ps-0", "ps-1"] if strategy == "async" else []), "a strategy without parameter servers uses none"
        for name in servers:
            find_match(messages(cluster, job, name), rf"\[{name.replace('-', '/')}\].* serves variables")
        lines = messages(cluster, job, "master-0")
        assert int(find_match(lines, rf"^Resuming from {job_dir}/checkpoints/\S+, step (\d+)$")[1]) == saved
        final = find_match(lines, r"^Final metrics after (\d+) steps, loss: \S+, accuracy: (\S+)$")
        assert int(final[1]) == saved_step(cluster, job_dir) >= saved + 400
        assert float(final[2]) > 0.8
        export = find_match(lines, r"^Exporting prediction graph to (\S+)$")[1]
        cluster.must_ssh("master-0", f"test -s {export}/saved_model.pb")

    # A model of NaNs ends the job, and the last valid checkpoint stays. test_trainer_cluster.py has another strategy.
    before = checkpoints(cluster, job_dir)
    assert before
    args = "--max-steps 90000000 --learning-rate 1e30 --checkpoint-steps 100"
    code, record = train(cluster, "diverges", "sync", args, "--job-dir", job_dir, *training_flags("sync"))
    assert (code, record["state"]) == (1, "FAILED"), record
    message = r"The replica (master|worker) \d exited with a non-zero status of 1\. First error: the (loss|parameters)\b"
    assert re.match(rf"{message}.* at step \d+; try a lower learning rate", record["errorMessage"])
    assert checkpoints(cluster, job_dir) == before


def test_a_killed_worker_costs_only_steps_after_the_last_checkpoint(cluster: Stack) -> None:
    """Train endlessly until the job trains again, as that time depends on the machine.

    test_library.py kills a worker of each strategy.
    """
    job = "killed"
    args = "--model mlp --max-steps 10000000 --checkpoint-steps 100 --log-interval 0.2"
    cluster.must("train", "--job", job, "--strategy", "sync", "--no-follow", "--args", args)
    saved = f"ls /bucket/jobs/{job}/output/checkpoints/*.index"
    cluster.wait_on("worker-1", saved, "sudo pkill -KILL -f [t]rainer.task", timeout=400)

    def steps_since() -> list[int]:
        """Return the step from which the master resumed, and the steps that it has trained since."""
        log = "\n".join(messages(cluster, job, "master-0"))
        resumed = re.search(r"^Resuming from \S+, step (\d+)$(.*)", log, re.MULTILINE | re.DOTALL)
        return [int(resumed[1]), *map(int, re.findall(r"\], step (\d+):", resumed[2]))] if resumed else []

    wait_for(lambda: len(steps_since()) > 1, "it trains again", 400, poll=COMMAND_POLL)
    resumed_step, *trained_steps = steps_since()
    assert resumed_step >= 100
    assert trained_steps[-1] > resumed_step
    # The strategy cannot continue without a replica: a kill restarts all of them, and once more if
    # a new replica starts before an old one has ended.
    record = cluster.describe(job)
    assert (record["state"], record["attempt"] >= 1) == ("RUNNING", True), record
    assert " was killed" in record["events"][0]["cause"]  # the master ends by SIGTERM when it misses its peer
    find_match(messages(cluster, job, "master-0"), "^the whole job starts again, attempt 1$")
    wait_for(
        lambda: has_lines(cluster, job, r"^Eval, step \d+: loss: \d", "evaluator-0"),
        "the evaluator evaluates",
        300,
        poll=COMMAND_POLL,
    )
    cluster.must("cancel", job)


@pytest.mark.timeout(limit(3600))
def test_a_model_too_large_for_a_host_trains_on_three(cluster: Stack, tmp_path: Path) -> None:
    (tmp_path / "once.yaml").write_text(ONCE)
    once = ("--config", str(tmp_path / "once.yaml"))
    code, record = train(cluster, "too_large", "async", LARGE, *once, *training_flags("async"))
    assert (code, record["state"]) == (1, "FAILED"), record
    killed = r"The replica (master|worker) \d exited with a non-zero status of 137 \(signal 9 \(SIGKILL\), out of memory\)"
    assert re.match(killed, record["errorMessage"]), record["errorMessage"]

    code, record = train(cluster, "large_in_three", "model-parallel", LARGE, *once, *training_flags("model-parallel"))
    assert (code, record["state"]) == (0, "SUCCEEDED"), record["errorMessage"]
    lines = messages(cluster, "large_in_three", "master-0")
    for replica in TRAINERS:
        find_match(lines, rf"^Placed hidden\S.* on {replica.replace('-', '/')}: \d+\.\d MB of parameters$")
    find_match(lines, r"^Final metrics after 4 steps, loss: ")
    export = find_match(lines, r"^Exporting prediction graph to (\S+)$")[1]
    cluster.must_ssh("master-0", f"test -s {export}/saved_model.pb && sudo rm -r {export.partition('/export/')[0]}")


@pytest.mark.parametrize(("strategy", "elsewhere"), [("async", "absent"), ("async", "empty"), ("sync", "absent")])
def test_data_that_only_the_master_has(cluster: Stack, strategy: str, elsewhere: str) -> None:
    folder = f"/srv/{elsewhere}_elsewhere"
    copy_data = f"sudo install -d -m 755 {folder} && sudo cp /bucket/data/mnist/train-0000[0-2]* {folder}"
    cluster.must_ssh("master-0", copy_data)
    if elsewhere == "empty":
        for host in ("worker-0", "worker-1"):
            cluster.must_ssh(host, f"{copy_data} && sudo truncate --size 0 {folder}/*")
    args = f"--train-data {folder} --eval-data /bucket/data/mnist"
    code, record = train(cluster, f"{elsewhere}_{strategy}", strategy, args, *training_flags(strategy))
    assert (code, record["state"]) == (1, "FAILED"), record
    assert re.search(r"worker[ /]\d", record["errorMessage"])
    assert folder in record["errorMessage"]
