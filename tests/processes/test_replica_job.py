"""The real process, `python -m hosts.agent`, in a job: kills, restarts, losses, cancelling and the end of the others."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
from replicahosts import GOES, PATIENCE, SLEEPS, Make, gone
from waiting import scale, until

from jobs.queue import QueueEntry

# The worker kills itself after the chief has started often enough: once for every PER runs of the worker.
KILLS_ITSELF = (
    "import os, pathlib, time\n"
    "print('up')\n"
    "def count(name, more):\n"
    "    with open(name, 'a') as file:\n"
    "        file.write(more)\n"
    "    return os.stat(name).st_size\n"
    "if 'worker' in os.environ['TF_CONFIG']:\n"
    "    run = count('runs', 'x') - 1\n"
    "    while count('chiefs', '') <= run // PER:\n"
    "        time.sleep(0.02)\n"
    "    os.kill(os.getpid(), KILLS[run % len(KILLS)])\n"
    "count('chiefs', 'x')\n"
    "while not pathlib.Path('go').exists():\n"
    "    time.sleep(0.02)\n"
)


def test_a_killed_trainer_is_restarted(make: Make) -> None:
    cluster = make(
        "import os, pathlib, signal\n"
        "marker = pathlib.Path('marker')\n"
        "if not marker.exists():\n"
        "    marker.touch()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "print('again')\n"
    )
    cluster.run()
    assert cluster.job.state == "SUCCEEDED"
    assert (cluster.job.attempt, cluster.job.replicas[0]["restarts"], cluster.job.replicas[0]["exitCode"]) == (0, 1, 0)
    assert cluster.log("master-0", "WARNING") == ["restarting after signal 9 (SIGKILL) (1 of 5)"]
    (event,) = cluster.record("master-0").events
    assert event.cause == "signal 9 (SIGKILL)"
    assert event.seconds is not None
    assert cluster.queue.entries == []


def test_too_many_kills_restart_the_job_and_then_fail_it(make: Make) -> None:
    cluster = make("PER, KILLS = 2, [9, 15]\n" + KILLS_ITSELF, "master-0", "worker-0", maxRestarts=1, maxRetries=1)
    cluster.run()
    assert (cluster.job.state, cluster.job.attempt) == ("FAILED", 1)
    message = "a non-zero status of 143 (signal 15 (SIGTERM)), and the job was started again 1 time."
    assert cluster.job.errorMessage.splitlines()[0] == f"The replica worker 0 exited with {message}"
    started = {name: sum(line.startswith("started") for line in cluster.log(name)) for name in ("master-0", "worker-0")}
    assert started == {"master-0": 2, "worker-0": 4}


def test_with_dependent_peers_a_kill_restarts_all(make: Make) -> None:
    cluster = make(
        "import os, pathlib, signal, time\n"
        "print('up')\n"
        "chief, broken = pathlib.Path('chief'), pathlib.Path('broken')\n"
        "if 'master' in os.environ['TF_CONFIG']:\n"
        "    chief.touch()\n"
        "while not pathlib.Path('go').exists():\n"
        "    if chief.exists() and not broken.exists() and 'worker' in os.environ['TF_CONFIG']:\n"
        "        broken.touch()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    time.sleep(0.02)\n",
        "master-0",
        "worker-0",
        restartPolicy="all",
    )
    cluster.start()
    until(lambda: cluster.log("master-0").count("up") == cluster.log("worker-0").count("up") == 2)
    cluster.finish()
    assert (cluster.job.state, cluster.job.attempt) == ("SUCCEEDED", 1)
    assert [event.cause for event in cluster.job.events] == ["worker 0 was killed (signal 9 (SIGKILL))"]


def test_an_exit_caused_by_a_peer_s_kill_restarts_the_job(make: Make) -> None:
    cluster = make(
        "import os, pathlib, signal, sys, time\n"
        "print('up')\n"
        "broken, chief = pathlib.Path('broken'), 'master' in os.environ['TF_CONFIG']\n"
        "if not chief and not broken.exists():\n"
        "    broken.write_text(str(os.getpid()))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "seen = pathlib.Path('seen')\n"
        "while not pathlib.Path('go').exists():\n"
        "    if chief and broken.exists() and not seen.exists():\n"
        # Its agent reaps it; the agent's next heartbeat reports that.
        "        while not (worker := broken.read_text()) or pathlib.Path('/proc', worker).exists():\n"
        "            time.sleep(0.02)\n"
        "        seen.touch()\n"
        "        sys.exit('a peer is gone')\n"
        "    time.sleep(0.02)\n",
        "master-0",
        "worker-0",
        heartbeatSeconds=1.0,
        leaseSeconds=5.0,
    )
    cluster.start()
    until(lambda: cluster.log("master-0").count("up") == 2)
    cluster.finish()
    assert (cluster.job.state, cluster.job.attempt) == ("SUCCEEDED", 1)
    assert [event.cause for event in cluster.job.events] == [
        "worker 0 was killed, and the others could not continue without it"
    ]


def test_the_job_continues_without_an_optional_replica(make: Make) -> None:
    cluster = make("PER, KILLS = 9, [9]\n" + KILLS_ITSELF, "master-0", "worker-0", optionalRoles=["worker"])
    cluster.start()
    until(lambda: cluster.job.droppedReplicas == ["worker-0"])
    cluster.finish()
    assert (cluster.job.state, cluster.job.attempt) == ("SUCCEEDED", 0)
    assert cluster.log("master-0").count("up") == 1


def test_cancel_stops_the_trainer_and_its_children(make: Make) -> None:
    cluster = make(
        "import signal, subprocess, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen(['sleep', '600'])\n" + SLEEPS,
        stopSeconds=0.2,
    )
    cluster.start_running()
    cluster.cancel()
    assert cluster.wait() == [0]
    assert (cluster.job.state, cluster.job.errorMessage) == ("CANCELLED", "")
    assert cluster.record("master-0").exitCode == 137
    until(lambda: gone(cluster.trainer("master-0")))
    assert "stopping: job CANCELLING" in cluster.log("master-0")
    assert cluster.queue.entries == []


def test_a_silent_job_is_restarted(make: Make) -> None:
    cluster = make(SLEEPS, stallTimeout=0.3, maxRetries=1)
    cluster.run()
    assert (cluster.job.state, cluster.job.attempt) == ("FAILED", 1)
    message = "No replica printed a line for 0.3 s (stallTimeout), and the job was started again 1 time."
    assert cluster.job.errorMessage == message


def test_the_chief_ends_the_others(make: Make) -> None:
    cluster = make(
        "import os, time, pathlib\n"
        "print('up')\n"
        "while 'master' not in os.environ['TF_CONFIG'] or not pathlib.Path('go').exists():\n"
        "    time.sleep(0.02)\n",
        "master-0",
        "worker-0",
        "ps-0",
    )
    cluster.start_running()
    cluster.finish()
    assert cluster.job.state == "SUCCEEDED"
    final_states = {r["name"]: (r["state"], r["exitCode"]) for r in cluster.job.replicas}
    assert final_states == {"master-0": ("EXITED", 0), "worker-0": ("EXITED", 143), "ps-0": ("EXITED", 143)}
    until(lambda: gone(cluster.trainer("ps-0")))
    assert b"stopping: job SUCCEEDED" in cluster.archive("ps-0")


def test_a_killed_agent_continues_its_replica(make: Make) -> None:
    cluster = make(GOES)
    cluster.start()
    until(lambda: cluster.runs("master-0") and cluster.record("master-0").state == "RUNNING")
    cluster.kill("master-0")
    before = cluster.log("master-0")
    cluster.start()
    until(lambda: cluster.log("master-0").count("up") == 2)
    cluster.finish()
    assert cluster.job.state == "SUCCEEDED"
    assert cluster.job.replicas[0]["restarts"] == 1
    assert cluster.log("master-0")[: len(before)] == before
    assert [event.cause for event in cluster.record("master-0").events] == ["the replica or its host was stopped"]


def test_stopping_a_unit_keeps_the_job(make: Make) -> None:
    cluster = make(GOES)
    cluster.start_running()
    cluster.processes["master-0"].terminate()
    assert cluster.wait() == [0]
    assert cluster.job.state == "RUNNING"
    record = cluster.record("master-0")
    assert (record.state, record.exitCode) == ("EXITED", 143)
    until(lambda: gone(cluster.trainer("master-0")))
    assert b"stopping: the unit is stopped" in cluster.archive("master-0")
    (cluster.package / "go").touch()
    shutil.rmtree(cluster.host("master-0") / "state" / "logs")  # the host was recreated
    cluster.run()
    assert (cluster.job.state, cluster.job.replicas[0]["restarts"]) == ("SUCCEEDED", 1)
    assert cluster.log("master-0").count("stopping: the unit is stopped") == 1
    assert cluster.archive("master-0").count(b"stopping: the unit is stopped") == 1


def test_other_replicas_continue_while_a_unit_is_stopped(make: Make) -> None:
    cluster = make(GOES, "master-0", "worker-0")
    cluster.start_running()
    cluster.processes["worker-0"].terminate()
    assert cluster.wait("worker-0") == [0]
    heartbeat = cluster.job.lease.heartbeatSeq
    until(lambda: cluster.job.lease.heartbeatSeq > heartbeat + 1)  # the leader has polled
    assert (cluster.job.state, cluster.job.attempt) == ("RUNNING", 0)
    cluster.start("worker-0")
    until(lambda: cluster.log("worker-0").count("up") == 2)
    cluster.finish()
    assert (cluster.job.state, cluster.job.attempt) == ("SUCCEEDED", 0)
    assert cluster.log("master-0").count("up") == 1


def test_a_job_waits_for_a_lost_host_and_continues(make: Make) -> None:
    cluster = make(GOES, "master-0", "worker-0", lostAfterSeconds=0.3)
    cluster.start_running()
    cluster.kill("worker-0")
    heartbeat = cluster.job.lease.heartbeatSeq
    until(lambda: cluster.job.lease.heartbeatSeq > heartbeat + 5)  # 0.8 s: it is lost, and the job is unchanged
    assert (cluster.job.state, cluster.job.attempt) == ("RUNNING", 0)
    cluster.start("worker-0")
    until(lambda: cluster.log("worker-0").count("up") == 2)
    cluster.finish()
    assert (cluster.job.state, cluster.job.attempt) == ("SUCCEEDED", 0)
    assert cluster.log("master-0").count("up") == 1


def test_another_replica_leads_if_the_chief_is_lost(make: Make) -> None:
    cluster = make(SLEEPS, "master-0", "worker-0", lostAfterSeconds=0.5, leaseSeconds=2.0 * scale())
    cluster.start("master-0")  # alone at first, as the first running replica may lead
    until(lambda: cluster.job.lease.holder.startswith("master-0/"))
    cluster.start("worker-0")
    until(lambda: cluster.runs("master-0", "worker-0") and cluster.job.state == "RUNNING")
    epoch = cluster.job.lease.epoch
    cluster.kill("master-0")
    cluster.cancel()
    assert cluster.wait("worker-0") == [0]
    assert cluster.job.state == "CANCELLED"
    assert cluster.job.lease.holder.startswith("worker-0/")
    assert cluster.job.lease.epoch > epoch
    assert cluster.log("worker-0")[-1] == "job CANCELLED"
    assert cluster.queue.entries == []


def test_a_replica_that_never_starts_fails_the_job(make: Make) -> None:
    cluster = make(SLEEPS, "master-0", "worker-0", preparingSeconds=2)
    cluster.start("master-0")
    assert cluster.wait() == [0]
    assert cluster.job.errorMessage == "The replica worker 0 did not start within 2 s after the first one."


def test_the_trainer_continues_without_the_bucket(make: Make) -> None:
    cluster = make(GOES)
    cluster.start_running()
    renamed = cluster.bucket.rename(cluster.root / "away")
    until(lambda: len(cluster.log("master-0", "WARNING")) > 0)
    (cluster.package / "go").touch()
    until(lambda: "trainer exited with status 0" in cluster.log("master-0"))
    assert not cluster.bucket.exists()
    renamed.rename(cluster.bucket)
    assert cluster.wait() == [0]
    assert cluster.job.state == "SUCCEEDED"
    assert len(cluster.log("master-0", "WARNING")) == 1
    assert sum("cycles succeed again" in line for line in cluster.log("master-0")) == 1


def test_a_host_starts_the_next_queued_job_by_itself(make: Make) -> None:
    cluster = make(GOES)
    second = cluster.bucket / "jobs" / "job02"
    second.mkdir()
    job, plan = (cluster.job_folder / name for name in ("job.json", "plan.json"))
    (second / "job.json").write_text(job.read_text().replace("job01", "job02").replace("PREPARING", "QUEUED"))
    (second / "plan.json").write_text(plan.read_text().replace("job01", "job02"))
    home = cluster.host("master-0") / "state" / "jobs"
    (home / "job02").symlink_to(home / "job01")
    cluster.write_queue(QueueEntry("job01", ["master-0"], has_hosts=True), QueueEntry("job02", ["master-0"]))
    cluster.start()
    until(lambda: cluster.runs("master-0"))
    assert '"QUEUED"' in (second / "job.json").read_text()
    cluster.finish()
    assert cluster.job.state == "SUCCEEDED"
    assert '"SUCCEEDED"' in (second / "job.json").read_text()
    assert cluster.queue.entries == []
    assert cluster.log("master-0").count("up") == 1  # newest is the second job's log
    assert b'"up"' in next((second / "logs" / "master-0").iterdir()).read_bytes()


def test_an_exit_code_without_signal_ends_the_job_after_one_start(make: Make) -> None:
    cluster = make("import sys\nprint('giving up')\nsys.exit(-1)\n")
    cluster.run()
    assert (cluster.job.state, cluster.record("master-0").starts) == ("FAILED", 1)
    sentence = "The replica master 0 exited with a non-zero status of 255. Last line: giving up"
    assert cluster.job.errorMessage == f"{sentence}\ngiving up"


def test_a_program_can_request_a_restart(make: Make) -> None:
    cluster = make(
        "import pathlib, sys\n"
        "saved = pathlib.Path('saved')\n"
        "if not saved.exists():\n"
        "    saved.touch()\n"
        "    sys.exit(42)\n"
        "print('again')\n"
    )
    cluster.run()
    assert (cluster.job.state, cluster.record("master-0").starts) == ("SUCCEEDED", 2)
    assert cluster.log("master-0", "WARNING") == ["restarting after status 42 (1 of 5)"]


@pytest.mark.full("imports TensorFlow twice; test_a_program_can_request_a_restart has a small program")
def test_tensorflow_s_preemption_handler_gets_a_restart(make: Make) -> None:
    """Its handler saves after the step, exits with its restart code, and resumes there."""
    cluster = make(
        "import os, signal\n"
        "os.environ['GCE_METADATA_IP'] = '127.0.0.1:9'  # where nobody says that this is Google Cloud\n"
        "import tensorflow as tf\n"
        "weight = tf.Variable(0.0)\n"
        "state = tf.train.Checkpoint(weight=weight)\n"
        "handler = tf.distribute.experimental.PreemptionCheckpointHandler(None, state, 'saved')\n"
        "begun = int(handler.total_run_calls)\n"
        "print('begins at run', begun)\n"
        "for number in range(begun, 6):\n"
        "    if number == 2:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    handler.run(weight.assign_add, 1.0)\n"
        "print('done at', weight.numpy())\n"
    )
    cluster.run()
    assert cluster.job.state == "SUCCEEDED"
    lines = [line for line in cluster.log("master-0") if line.startswith(("begins", "restarting", "done"))]
    assert lines == ["begins at run 0", "restarting after status 42 (1 of 5)", "begins at run 3", "done at 6.0"]


# The worker's part takes longer than the master's, and ends after the test has observed the master's end.
SHARDS = (
    "import os, pathlib, time\n"
    "print('up')\n"
    "rank = 'master' not in os.environ['TF_CONFIG']\n"
    "while rank and not pathlib.Path('go').exists():\n"
    "    time.sleep(0.02)\n"
    "pathlib.Path(f'part-{int(rank)}').touch()\n"
)


@pytest.mark.parametrize("rules", [{"gracePeriod": PATIENCE}, {"successPolicy": "all"}])
def test_replicas_finish_their_work_after_the_chief_ends(make: Make, rules: dict[str, Any]) -> None:
    cluster = make(SHARDS, "master-0", "worker-0", **rules)
    cluster.start()
    until(lambda: cluster.runs("worker-0") and "trainer exited with status 0" in cluster.log("master-0"))
    if "gracePeriod" in rules:
        until(lambda: any("but worker-0 still worked" in event.cause for event in cluster.job.events))
    assert not cluster.job.final
    cluster.finish()
    assert cluster.job.state == "SUCCEEDED"
    assert [(cluster.package / f"part-{rank}").exists() for rank in (0, 1)] == [True, True]


def test_a_replica_that_exceeds_the_grace_period_is_named(make: Make) -> None:
    cluster = make(SHARDS, "master-0", "worker-0", gracePeriod=0.3)
    cluster.run()
    assert (cluster.job.state, cluster.job.events[-1].cause.partition(" when ")[0]) == ("SUCCEEDED", "worker-0 still worked")


@pytest.mark.parametrize(("stop_signal_to", "saves"), [("main", True), ("all", False)])
def test_a_terminated_program_keeps_its_data_loader(make: Make, stop_signal_to: str, saves: bool) -> None:
    """Like PyTorch's DataLoader: a SIGTERM kills the loader, and the loader's death ends its program."""
    cluster = make(
        "import os, pathlib, signal, subprocess, sys, time\n"
        "loader = subprocess.Popen(['sleep', '600'])\n"
        "def told(*_):\n"
        "    try:\n"
        f"        loader.wait({0.5 if saves else PATIENCE})\n"
        "    except subprocess.TimeoutExpired:\n"
        "        pathlib.Path('saved').write_text(pathlib.Path(os.environ['SCALETIER_STOP_FILE']).read_text())\n"
        "        sys.exit(143)\n"
        "    raise RuntimeError('the loader is gone')\n"
        "signal.signal(15, told)\n" + SLEEPS,
        stopSignal=stop_signal_to,
    )
    cluster.start()
    until(lambda: cluster.log("master-0").count("up") == 1 and cluster.job.state == "RUNNING")
    cluster.cancel()
    assert cluster.wait() == [0]
    saved = cluster.package / "saved"
    assert saved.exists() == saves
    assert not saves or float(saved.read_text()) == pytest.approx(cluster.plan.stopSeconds)
