"""The real process, `python -m replica`, in a job: kills, restarts, losses, cancelling and the end of the others."""

from __future__ import annotations

import pytest
from replicahosts import SLEEPS, Make, gone, until

from replica.record import JobState


def test_a_killed_trainer_is_restarted(make: Make) -> None:
    cluster = make(
        "import os, pathlib, signal\n"
        "marker = pathlib.Path('marker')\n"
        "if not marker.exists():\n"
        "    marker.touch()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    cluster.start()
    assert cluster.wait() == [0]
    assert cluster.job.state == "SUCCEEDED"
    assert (cluster.job.attempt, cluster.job.replicas[0]["restarts"], cluster.job.replicas[0]["exitCode"]) == (0, 1, 0)
    assert cluster.log("master-0", "WARNING") == ["restarting after signal 9 (SIGKILL) (1 of 5), in 0.05 s"]


def test_too_many_kills_retry_the_whole_job_and_then_fail_it(make: Make) -> None:
    cluster = make(
        "import os, signal, sys, time\n"
        "print('up')\n"
        "if 'worker' in os.environ['TF_CONFIG']:\n"
        "    time.sleep(0.1)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(600)\n",
        "master-0",
        "worker-0",
        maxRestarts=1,
        maxRetries=1,
    )
    cluster.start()
    assert cluster.wait() == [0, 0]
    assert cluster.job.state == "FAILED"
    assert cluster.job.attempt == 1
    said = "The replica worker 0 exited with a non-zero status of 137 (signal 9 (SIGKILL)) after 1 restarts and 1 retries"
    assert cluster.job.errorMessage.startswith(said)
    started = {name: sum(line.startswith("started") for line in cluster.log(name)) for name in ("master-0", "worker-0")}
    assert started == {"master-0": 2, "worker-0": 4}


def test_cancel_stops_the_trainer_and_its_children(make: Make) -> None:
    cluster = make(
        "import signal, subprocess, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen(['sleep', '600'])\n" + SLEEPS,
        stopSeconds=0.2,
    )
    cluster.start()
    until(lambda: cluster.runs("master-0") and cluster.job.state == "RUNNING")
    (cluster.job_folder / "cancel.json").write_text("{}")
    assert cluster.wait() == [0]
    assert (cluster.job.state, cluster.job.errorMessage) == ("CANCELLED", "")
    assert cluster.record("master-0").exitCode == 137
    until(lambda: gone(cluster.trainer("master-0")))
    assert "stopping: job CANCELLING" in cluster.log("master-0")


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
    cluster.start()
    until(lambda: cluster.runs("master-0", "worker-0", "ps-0") and cluster.job.state == "RUNNING")
    (cluster.package / "go").touch()
    assert cluster.wait() == [0, 0, 0]
    assert cluster.job.state == "SUCCEEDED"
    ends = {r["name"]: (r["state"], r["exitCode"]) for r in cluster.job.replicas}
    assert ends == {"master-0": ("EXITED", 0), "worker-0": ("EXITED", 143), "ps-0": ("EXITED", 143)}
    until(lambda: gone(cluster.trainer("ps-0")))
    assert b"stopping: job SUCCEEDED" in cluster.archive("ps-0")


def test_a_replica_that_was_killed_goes_on(make: Make) -> None:
    cluster = make("import pathlib, time\nprint('up')\nwhile not pathlib.Path('go').exists():\n    time.sleep(0.02)")
    cluster.start()
    until(lambda: cluster.runs("master-0") and cluster.record("master-0").state == "RUNNING")
    cluster.kill("master-0")
    before = cluster.log("master-0")
    cluster.start()
    until(lambda: cluster.log("master-0").count("up") == 2)
    (cluster.package / "go").touch()
    assert cluster.wait() == [0]
    assert cluster.job.state == "SUCCEEDED"
    assert cluster.job.replicas[0]["restarts"] == 1
    assert cluster.log("master-0")[: len(before)] == before
    assert "restarting after signal 9 (SIGKILL) (1 of 5), in 0.05 s" in cluster.log("master-0")


def test_a_unit_that_is_stopped_leaves_the_job_as_it_is(make: Make) -> None:
    cluster = make("import pathlib, time\nprint('up')\nwhile not pathlib.Path('go').exists():\n    time.sleep(0.02)")
    cluster.start()
    until(lambda: cluster.runs("master-0") and cluster.job.state == "RUNNING")
    cluster.processes["master-0"].terminate()
    assert cluster.wait() == [0]
    assert cluster.job.state == "RUNNING"
    record = cluster.record("master-0")
    assert (record.state, record.exitCode) == ("EXITED", 143)
    until(lambda: gone(cluster.trainer("master-0")))
    assert b"stopping: the unit is stopped" in cluster.archive("master-0")
    (cluster.package / "go").touch()
    (cluster.host("master-0") / "state" / "logs" / "job01.jsonl").unlink()  # the host was made anew
    cluster.start()
    assert cluster.wait() == [0]
    assert (cluster.job.state, cluster.job.replicas[0]["restarts"]) == ("SUCCEEDED", 1)
    assert cluster.log("master-0").count("stopping: the unit is stopped") == 1


def test_a_lost_host_fails_the_job(make: Make) -> None:
    cluster = make(SLEEPS, "master-0", "worker-0", lostAfterSeconds=0.5, lostForGoodSeconds=1.0)
    cluster.start()
    until(lambda: cluster.runs("master-0", "worker-0") and cluster.job.state == "RUNNING")
    cluster.kill("worker-0")
    assert cluster.wait("master-0") == [0]
    assert cluster.job.errorMessage == "The replica worker 0 is lost: no heartbeat for 1 s."


def test_another_leads_when_the_chief_is_lost(make: Make) -> None:
    cluster = make(SLEEPS, "master-0", "worker-0", lostAfterSeconds=0.5, lostForGoodSeconds=600.0)
    cluster.start()
    until(lambda: cluster.runs("master-0", "worker-0") and cluster.job.state == "RUNNING")
    cluster.kill("master-0")
    (cluster.job_folder / "cancel.json").write_text("{}")
    assert cluster.wait("worker-0") == [0]
    assert cluster.job.state == "CANCELLED"
    assert cluster.log("worker-0")[-1] == "job CANCELLED"


def test_a_replica_that_never_comes_fails_the_job(make: Make) -> None:
    cluster = make(SLEEPS, "master-0", "worker-0", preparingSeconds=0.3)
    cluster.start("master-0")
    assert cluster.wait() == [0]
    assert cluster.job.errorMessage == "The replica worker 0 is not up 0.3 s after the first replica."


def test_the_trainer_goes_on_without_the_bucket(make: Make) -> None:
    cluster = make("import pathlib, time\nprint('up')\nwhile not pathlib.Path('go').exists():\n    time.sleep(0.02)")
    cluster.start()
    until(lambda: cluster.runs("master-0") and cluster.job.state == "RUNNING")
    away = cluster.bucket.rename(cluster.root / "away")
    until(lambda: len(cluster.log("master-0", "WARNING")) > 0)
    (cluster.package / "go").touch()
    until(lambda: "trainer exited with status 0" in cluster.log("master-0"))
    assert not cluster.bucket.exists()
    away.rename(cluster.bucket)
    assert cluster.wait() == [0]
    assert cluster.job.state == "SUCCEEDED"
    assert len(cluster.log("master-0", "WARNING")) == 1
    assert sum("answers again" in line for line in cluster.log("master-0")) == 1


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED])
def test_a_job_that_has_ended_is_left_alone(make: Make, state: JobState) -> None:
    cluster = make(SLEEPS)
    cluster.write_job(state)
    before = cluster.job
    cluster.start()
    assert cluster.wait() == [0]
    assert cluster.job == before
    assert sorted(path.name for path in cluster.job_folder.iterdir()) == ["job.json"]
    assert cluster.log("master-0") == []
