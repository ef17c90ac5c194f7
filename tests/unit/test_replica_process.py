"""The real process, `python -m replica`, with small trainers and a bucket that is a directory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from replica.record import JobRecord, JobState, Plan, ReplicaRecord

ROOT = Path(__file__).parents[2]
PATIENCE = 30.0
SLEEPS = "import time\nprint('up')\ntime.sleep(600)\n"


class Cluster:
    """A bucket, and hosts that are directories with a replica process each."""

    def __init__(self, root: Path, trainer: str, replicas: list[str], args: list[str], **plan: Any) -> None:
        self.root = root
        self.bucket = root / "bucket"
        self.job_folder = self.bucket / "jobs" / "job01"
        self.job_folder.mkdir(parents=True)
        self.package = root / "package"
        self.package.mkdir()
        (self.package / "task.py").write_text(trainer)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.write_job(JobState.PREPARING)
        url = plan.pop("bucket", str(self.bucket))
        quick: dict[str, Any] = {
            "pollSeconds": 0.05,
            "heartbeatSeconds": 0.1,
            "stopSeconds": 5.0,
            "python": sys.executable,
        } | plan
        for name in replicas:
            etc = self.host(name) / "etc"
            etc.mkdir(parents=True)
            role, index = name.split("-")
            written = Plan("job01", name, replicas, "task", args, url, str(self.package), **quick)
            (etc / "replica.json").write_text(written.to_json())
            (etc / "tf_config.json").write_text(json.dumps({"task": {"type": role, "index": int(index)}}))

    def host(self, name: str) -> Path:
        return self.root / "hosts" / name

    def start(self, *names: str) -> None:
        for name in names or sorted(path.name for path in (self.root / "hosts").iterdir()):
            host = self.host(name)
            env = os.environ | {
                "SCALETIER_ETC": str(host / "etc"),
                "SCALETIER_STATE": str(host / "state"),
                "PYTHONPATH": str(ROOT),
                "HOST": str(host),
            }
            with (host / "journal").open("ab") as journal:
                argv = [sys.executable, "-m", "replica"]
                self.processes[name] = subprocess.Popen(argv, env=env, stdout=journal, stderr=journal)

    def wait(self, *names: str) -> list[int]:
        return [self.processes[name].wait(PATIENCE) for name in names or self.processes]

    def kill(self, name: str) -> None:
        """What systemd does when a unit's main process is killed: nothing of its control group is left."""
        trainer = self.trainer(name)
        self.processes[name].kill()
        self.processes[name].wait(PATIENCE)
        end(trainer)

    def trainer(self, name: str) -> int:
        """The pid of the last trainer that the replica started; each leads a process group."""
        started = [line for line in self.log(name) if line.startswith("started trainer pid ")]
        return int(started[-1].split()[3].rstrip(":")) if started else 0

    def write_job(self, state: JobState) -> None:
        (self.job_folder / "job.json").write_text(JobRecord("job01", state=state).to_json())

    @property
    def job(self) -> JobRecord:
        return JobRecord.from_json((self.job_folder / "job.json").read_bytes())

    def record(self, name: str) -> ReplicaRecord:
        return ReplicaRecord.from_json((self.job_folder / "replicas" / f"{name}.json").read_bytes())

    def log(self, name: str, severity: str | None = None) -> list[str]:
        path = self.host(name) / "state" / "logs" / "newest"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [line["message"] for line in lines if severity in (None, line["severity"])]

    def archive(self, name: str) -> bytes:
        return (self.job_folder / "logs" / f"{name}.jsonl").read_bytes()

    def runs(self, *names: str) -> bool:
        """True when the trainers of these replicas have said `up`."""
        return all("up" in self.log(name) for name in names)

    def close(self) -> None:
        for name, process in self.processes.items():
            if process.poll() is None:
                self.kill(name)


def end(group: int) -> None:
    if group:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return True
    return False


Make = Callable[..., Cluster]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Cluster] = []

    def cluster(trainer: str, *replicas: str, args: list[str] | None = None, **plan: Any) -> Cluster:
        made.append(Cluster(tmp_path, trainer, list(replicas) or ["master-0"], args or [], **plan))
        return made[-1]

    yield cluster
    for each in made:
        each.close()


def test_success(make: Make) -> None:
    cluster = make("import os, logging\nlogging.warning('careful')\nprint(os.environ['TF_CONFIG'], end='')")
    cluster.start()
    assert cluster.wait() == [0]
    job = cluster.job
    assert (job.state, job.errorMessage, job.attempt) == ("SUCCEEDED", "", 0)
    assert job.createTime <= (job.startTime or "") <= (job.endTime or "")
    assert [(r["name"], r["state"], r["exitCode"], r["restarts"]) for r in job.replicas] == [("master-0", "EXITED", 0, 0)]
    log = cluster.log("master-0")
    assert '{"task": {"type": "master", "index": 0}}' in log
    assert log[-2:] == ["trainer exited with status 0", "job SUCCEEDED"]
    assert cluster.log("master-0", "WARNING") == ["WARNING:root:careful"]
    local = cluster.host("master-0") / "state" / "logs"
    assert (local / "newest").readlink() == Path("job01.jsonl")
    assert cluster.archive("master-0") == (local / "job01.jsonl").read_bytes()
    assert b"<4>WARNING:root:careful\n" in (cluster.host("master-0") / "journal").read_bytes()
    assert not [path.name for path in cluster.job_folder.rglob(".*")]


def test_arguments_and_environment_arrive_byte_for_byte(make: Make) -> None:
    args = [
        "--a b",
        "",
        "'\"$HOME`id`\\",
        "two\nlines\t",
        "é日本\U0001f600",
        b"\xff".decode("utf-8", "surrogateescape"),
        "--",
        "*",
    ]
    cluster = make(
        "import os, sys, json\n"
        "seen = [os.fsencode(a).hex() for a in sys.argv[1:]]\n"
        "json.dump([seen, os.getcwd(), os.environ.get('NOTIFY_SOCKET'), os.environ['HOST']], open('seen', 'w'))",
        args=args,
    )
    cluster.start()
    assert cluster.wait() == [0]
    seen, directory, socket, host = json.loads((cluster.package / "seen").read_text())
    assert [bytes.fromhex(text).decode("utf-8", "surrogateescape") for text in seen] == args
    assert (directory, socket, host) == (str(cluster.package), None, str(cluster.host("master-0")))


def test_an_exit_fails_the_job_with_the_end_of_the_log(make: Make) -> None:
    cluster = make("print('\\n'.join(f'line {n}' for n in range(30)))\nraise SystemExit(3)")
    cluster.start()
    assert cluster.wait() == [0]
    assert cluster.job.state == "FAILED"
    lines = cluster.job.errorMessage.splitlines()
    assert lines == ["The replica master 0 exited with a non-zero status of 3.", *(f"line {n}" for n in range(10, 30))]
    assert cluster.record("master-0").restarts == 0


def test_a_traceback_is_in_the_error(make: Make) -> None:
    cluster = make("def step():\n    raise ValueError('bad shape')\nstep()")
    cluster.start()
    assert cluster.wait() == [0]
    lines = cluster.job.errorMessage.splitlines()
    assert lines[:2] == ["The replica master 0 exited with a non-zero status of 1.", "Traceback (most recent call last):"]
    assert lines[-1] == "ValueError: bad shape"
    assert {"Traceback (most recent call last):", "ValueError: bad shape"} <= set(cluster.log("master-0", "ERROR"))


def test_a_trainer_that_cannot_start_fails_the_job(make: Make) -> None:
    cluster = make("", python="/nonexistent/python")
    cluster.start()
    assert cluster.wait() == [0]
    assert cluster.job.errorMessage.startswith("The replica master 0 exited with a non-zero status of 127.\nthe trainer cannot")


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


def test_a_flood_of_output_arrives_whole(make: Make) -> None:
    cluster = make("import sys\nfor n in range(50_000):\n    sys.stdout.write(f'{n}\\n')\nsys.stdout.write('no newline')")
    cluster.start()
    assert cluster.wait() == [0]
    lines = cluster.log("master-0")
    assert [line for line in lines if line.isdigit()] == [str(n) for n in range(50_000)]
    assert "no newline" in lines


def test_a_process_that_left_the_session_does_not_hold_up_the_end(make: Make) -> None:
    cluster = make(
        "import subprocess\n"
        "left = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "open('left', 'w').write(str(left.pid))\n"
        "print('done', end='')\n"
    )
    cluster.start()
    try:
        assert cluster.wait() == [0]
        assert "done" in cluster.log("master-0")
    finally:
        end(int((cluster.package / "left").read_text()))


def test_a_bucket_behind_fsspec(make: Make, tmp_path: Path) -> None:
    cluster = make("print('up')", "master-0", "worker-0", bucket=f"local://{tmp_path}/bucket")
    for folder in ("replicas", "logs"):
        (cluster.job_folder / folder).mkdir()  # an object store has no folders to make
    cluster.start()
    assert cluster.wait() == [0, 0]
    assert cluster.job.state == "SUCCEEDED"
    assert b'"message": "up"' in cluster.archive("master-0")


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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file or directory; fab train writes it"),
        ("{", "Expecting property name"),
        ("{}", "Plan lacks jobId, replica"),
        ('{"jobId": "1"}', "Plan lacks replica"),
    ],
)
def test_a_bad_plan_is_one_line_and_exit_2(make: Make, text: str | None, said: str) -> None:
    cluster = make("")
    plan = cluster.host("master-0") / "etc" / "replica.json"
    plan.unlink()
    if text is not None:
        plan.write_text(text)
    cluster.start()
    assert cluster.wait() == [2]
    (line,) = (cluster.host("master-0") / "journal").read_text().splitlines()
    assert line.startswith(f"<3>replica: {plan}: ")
    assert said in line
