"""Jobs on real hosts: our trainer, a foreign one, and every way in which a job ends."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import tarfile
from pathlib import Path

from stacks import ROOT, TINY, Stack
from waiting import limit


def wait_until_gone(cluster: Stack, *hosts: str) -> None:
    """Wait until the agent on each of these hosts has ended, as it does after a job."""
    for host in hosts:
        cluster.wait_on(host, "[ $(systemctl is-active scaletier.service) = inactive ]")


def test_arguments_arrive_byte_for_byte(cluster: Stack, tmp_path: Path) -> None:
    texts = ["two words", "it's", 'a "b" $HOME `c` \\d', "é ☃ 雪", "line\nbreak", "", "--model=x"]
    half = len(texts) // 2
    quoted = " ".join(shlex.quote(text) for text in texts[:half])
    arguments = ("--args", f"--seconds 36000 {quoted}", "--", *texts[half:])
    cluster.must("train", "--job", "args", *TINY, "--no-follow", *arguments)
    cluster.finish_job("args", replicas=6)
    cluster.wait("args", "SUCCEEDED")
    output = cluster.get("args", tmp_path)
    for replica in ("master-0", "ps-1"):
        report = json.loads((output / f"{replica}.json").read_text())
        assert report["argv"] == ["--seconds", "36000", *texts]
        assert json.loads(report["environ"]["TF_CONFIG"])["task"]["index"] == int(replica[-1])


def test_a_job_continues_after_fab_is_killed(cluster: Stack) -> None:
    process = cluster.start("fab", "train", "--job", "laptop_left", *TINY, "--args", "--seconds 36000")
    cluster.wait_for_state("RUNNING", "laptop_left")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=limit())
    cluster.finish_job("laptop_left")
    cluster.wait_succeeded("laptop_left")
    wait_until_gone(cluster, "ps-0")


def test_cancel_stops_all_replicas_and_keeps_the_log(cluster: Stack) -> None:
    cluster.must("train", "--job", "to_cancel", *TINY, "--args", "--seconds 36000", "--no-follow")
    cluster.wait("to_cancel", "RUNNING")
    busy = cluster.fab("train", "--job", "meanwhile", *TINY, "--no-queue")
    assert busy.code == 2
    assert "to_cancel" in busy.err
    assert cluster.must_json("cancel", "to_cancel")["state"] == "CANCELLED"
    assert cluster.describe("to_cancel")["state"] == "CANCELLED"
    assert cluster.fab("cancel", "to_cancel").code == 2
    assert cluster.fab("logs", "all", "--job", "to_cancel").out
    wait_until_gone(cluster, "worker-0")


def test_one_bundle_explains_why_jobs_failed(cluster: Stack, tmp_path: Path) -> None:
    raises = cluster.fab("train", "--job", "raises", *TINY, "--args", "--raise worker-1 --seconds 36000")
    assert raises.code == 1, raises.text
    assert "fab bundle raises collects the evidence in one file" in raises.err
    assert cluster.fab("train", "--job", "eats", *TINY, "--args", "--eat worker-0 --seconds 36000").code == 1
    for host in ("worker-0", "worker-1"):
        cluster.must_ssh(host, "sudo systemctl restart scaletier")
    bundles = {job: _bundle(cluster, job, tmp_path / f"{job}.tar.gz") for job in ("raises", "eats")}
    for job, files in bundles.items():
        for name in ("ps-0", "ps-1", "master-0", "worker-0", "worker-1", "evaluator-0"):
            assert {f"diagnosis/{name}.json", f"logs/{name}.log", f"hosts/{name}.txt"} <= set(files), job
    first = bundles["raises"]["summary.txt"].splitlines()[0]
    assert first.startswith("First error: worker-1, ")
    assert first.endswith(": RuntimeError: worker-1 was told to raise")
    raised, eats = (
        json.loads(bundles[job][f"diagnosis/{name}.json"]) for job, name in (("raises", "worker-1"), ("eats", "worker-0"))
    )
    assert raised["trainer"]["exitCode"] == 1
    assert raised["units"]["scaletier.service"]["ActiveState"] == "active"
    assert raised["tfConfig"]["task"] == {"type": "worker", "index": 1}
    assert "tensorflow" in " ".join(raised["python"]["packages"])
    assert (eats["trainer"]["exitCode"], eats["trainer"]["outOfMemory"]) == (137, True)
    assert eats["trainer"]["memoryLimit"] > 0
    (line,) = [line for line in bundles["eats"]["summary.txt"].splitlines() if line.startswith("worker-0: ")]
    assert line.startswith("worker-0: EXITED with 137, signal 9 (SIGKILL), out of memory of ")


def _bundle(cluster: Stack, job: str, file: Path) -> dict[str, str]:
    result = cluster.fab("bundle", job, str(file))
    assert (result.code, "no diagnosis" in result.err) == (0, False), result.text
    with tarfile.open(file) as tar:
        return {
            member.name.partition("/")[2]: content.read().decode()
            for member in tar.getmembers()
            if (content := tar.extractfile(member))
        }


def test_one_of_two_simultaneous_submissions_waits(cluster: Stack) -> None:
    jobs = ("race0", "race1")
    commands = [["fab", "train", "--job", job, *TINY, "--args", "--seconds 36000"] for job in jobs]
    processes = [
        subprocess.Popen(command, cwd=ROOT, env=cluster.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    runs = cluster.wait_for_state("RUNNING", *jobs)
    waits = cluster.wait_for_state("QUEUED", *jobs)
    assert runs != waits
    cluster.finish_job(runs)
    cluster.finish_job(cluster.wait_for_state("RUNNING", waits))
    ends = [(process.communicate(timeout=limit(600)), process.returncode) for process in processes]
    assert [code for _, code in ends] == [0, 0], ends
    assert sum("is QUEUED behind race" in streams[1] for streams, _ in ends) == 1, ends
    first, second = sorted((cluster.describe(f"race{n}") for n in range(2)), key=lambda record: record["startTime"])
    assert first["endTime"] <= second["startTime"]
