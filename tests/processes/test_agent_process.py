"""The real process, `python -m hosts.agent`, and its trainer: input, output and end."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import shutil
import signal
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from replicahosts import GOES, PATIENCE, ROOT, Make, end, gone
from waiting import until

from jobs.progress import JobProgress
from jobs.queue import Queue, QueueEntry
from jobs.records import JobRecord, Task


def test_a_successful_job(make: Make) -> None:
    cluster = make(f"import os, logging\nlogging.warning('careful')\nprint(os.environ['TF_CONFIG'])\n{GOES}")
    cluster.start()
    until(lambda: "job RUNNING" in cluster.log("master-0"))  # a shorter job could end before a test observes that it runs
    cluster.finish()
    job = cluster.job
    assert (job.state, job.errorMessage, job.attempt) == ("SUCCEEDED", "", 0)
    assert job.createTime <= (job.startTime or "") <= (job.endTime or "")
    assert [(r["name"], r["state"], r["exitCode"], r["restarts"]) for r in job.replicas] == [("master-0", "EXITED", 0, 0)]
    log = cluster.log("master-0")
    assert '{"task": {"type": "master", "index": 0}}' in log
    assert log[-2:] == ["trainer exited with status 0", "job SUCCEEDED"]
    assert cluster.log("master-0", "WARNING") == ["WARNING:root:careful"]
    assert cluster.queue.entries == []
    local = cluster.host("master-0") / "state" / "logs"
    assert (local / "newest").readlink() == Path("job01")
    assert cluster.archive("master-0") == b"".join(path.read_bytes() for path in sorted((local / "job01").iterdir()))
    assert b"<4>WARNING:root:careful\n" in (cluster.host("master-0") / "journal").read_bytes()
    assert not [path.name for path in cluster.job_folder.rglob(".*")]


def test_a_program_reports_its_progress(make: Make) -> None:
    good = {"step": 5, "totalSteps": 9, "loss": 0.5, "metrics": {"accuracy": 0.25}}
    reports = [good, {"step": -1}, {"step": 6, "etaSeconds": -1}]
    code = "import json\n" + "".join(f"print(json.dumps({{'scaletier.progress': {report}}}))\n" for report in reports)
    cluster = make(code + GOES)
    cluster.start()
    until(lambda: cluster.job.progress is not None)
    cluster.finish()
    assert cluster.job.progress is not None
    assert replace(cluster.job.progress, time="") == JobProgress(5, 9, None, None, 0.5, {"accuracy": 0.25})
    warning = "invalid progress reports are ignored: step is -1. Valid: a whole number from 0 to 9007199254740992"
    assert cluster.log("master-0", "WARNING") == [warning]


def test_a_command_is_notified_of_the_end(make: Make) -> None:
    code = "import os, sys; print('it cost', os.environ['TOKEN']); sys.exit(3)"
    target = "sh -c 'cat > $JOB_DIR/$0; echo sent; exit 5' ${JOB_ID}"
    cluster = make(code, notify=target, secrets=["TOKEN"])
    output = cluster.bucket / "output"
    task = Task(cluster.plan.tasks["master-0"].tfConfig, {"JOB_DIR": str(output), "JOB_ID": "job01"})
    (cluster.job_folder / "plan.json").write_bytes(replace(cluster.plan, tasks={"master-0": task}).to_json())
    secrets = cluster.host("master-0") / "state" / "secrets"
    secrets.mkdir(parents=True)
    (secrets / "job01.json").write_text('{"TOKEN": "hunter2hunter2"}')
    cluster.run()
    record = JobRecord.from_json((output / "job01").read_bytes())
    assert (record.state, record.replicas[0]["exitCode"]) == ("FAILED", 3)
    assert "it cost [secret]" in record.errorMessage
    assert cluster.job.notification is not None
    assert (cluster.job.state, cluster.job.notification.error) == ("FAILED", "it exited with status 5")
    assert cluster.log("master-0")[-2:] == ["sent", "notify: command sh … failed: it exited with status 5"]
    assert cluster.queue.entries == []


def test_a_line_without_an_end_is_in_the_log(make: Make) -> None:
    cluster = make("print('loading …', end='', flush=True)\n" + GOES.replace("print('up')", "pass"))
    cluster.start()
    until(lambda: "loading …" in cluster.log("master-0"))
    cluster.finish()
    assert cluster.log("master-0").count("loading …") == 1


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
        "args = [os.fsencode(a).hex() for a in sys.argv[1:]]\n"
        "json.dump([args, os.getcwd(), os.environ.get('NOTIFY_SOCKET'), os.environ['HOST']], open('start.json', 'w'))",
        args=args,
    )
    cluster.run()
    hex_args, directory, socket, host = json.loads((cluster.package / "start.json").read_text())
    assert [bytes.fromhex(text).decode("utf-8", "surrogateescape") for text in hex_args] == args
    assert (directory, socket, host) == (str(cluster.package), None, str(cluster.host("master-0")))


def test_the_chief_s_facts_are_in_the_manifest_and_in_both_records(make: Make) -> None:
    cluster = make(GOES)
    manifest = cluster.job_folder / "manifest.json"
    manifest.write_text('{"versions": {"scaletier": "9"}}')
    cluster.start()
    until(lambda: "data" in cluster.job.manifest)
    written = json.loads(manifest.read_text())
    assert written["versions"]["scaletier"] == "9"
    assert written["data"] == cluster.job.manifest["data"] == cluster.record("master-0").facts["data"]
    cluster.finish()
    assert (cluster.job.state, cluster.job.manifest["data"]) == ("SUCCEEDED", written["data"])


def test_an_exit_fails_the_job_with_the_end_of_the_log(make: Make) -> None:
    cluster = make("print('\\n'.join(f'line {n}' for n in range(30)))\nraise SystemExit(3)")
    cluster.run()
    assert cluster.job.state == "FAILED"
    lines = cluster.job.errorMessage.splitlines()
    sentence = "The replica master 0 exited with a non-zero status of 3. Last line: line 29"
    assert lines == [sentence, *(f"line {n}" for n in range(10, 30))]
    assert cluster.record("master-0").restarts == 0
    # The host was restarted before it had uploaded anything, and its job was no longer in the queue.
    log, uploaded = cluster.log("master-0"), [cluster.job_folder / "logs", cluster.job_folder / "diagnosis"]
    for folder in uploaded:
        shutil.rmtree(folder)
    entry = QueueEntry("job01", ["master-0"], has_hosts=True)
    (cluster.host("master-0") / "state/logs/job01/unfinished.json").write_bytes(Queue([entry]).to_json())
    cluster.run()
    assert [json.loads(line)["message"] for line in cluster.archive("master-0").splitlines()] == log
    assert all(folder.is_dir() for folder in uploaded)


def test_a_traceback_is_in_the_error(make: Make) -> None:
    cluster = make("def step():\n    raise ValueError('bad shape')\nstep()")
    cluster.run()
    lines = cluster.job.errorMessage.splitlines()
    sentence = "The replica master 0 exited with a non-zero status of 1. First error: ValueError: bad shape"
    assert lines[:2] == [sentence, "Traceback (most recent call last):"]
    assert lines[-1] == "ValueError: bad shape"
    first = cluster.record("master-0").firstError
    assert first is not None
    assert first.message == "ValueError: bad shape"
    lines_logged = [json.loads(line) for line in cluster.archive("master-0").splitlines()]
    assert (first.time, first.message) in [(line["time"], line["message"]) for line in lines_logged]
    assert {"Traceback (most recent call last):", "ValueError: bad shape"} <= set(cluster.log("master-0", "ERROR"))


def test_a_flood_of_output_arrives_complete(make: Make) -> None:
    cluster = make("import sys\nfor n in range(50_000):\n    sys.stdout.write(f'{n}\\n')\nsys.stdout.write('no newline')")
    cluster.run()
    lines = cluster.log("master-0")
    assert [line for line in lines if line.isdigit()] == [str(n) for n in range(50_000)]
    assert "no newline" in lines


def test_a_process_outside_the_session_does_not_delay_the_end(make: Make) -> None:
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


def test_the_package_comes_from_the_bucket(make: Make) -> None:
    cluster = make("", packageSha256="")
    archive = cluster.job_folder / "package.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name, text in (("task.py", "import deep.er\n"), ("deep/er.py", "print('from the bucket')\n")):
            file = tarfile.TarInfo(name)
            file.size = len(text)
            tar.addfile(file, io.BytesIO(text.encode()))
    plan = replace(cluster.plan, packageSha256=hashlib.sha256(archive.read_bytes()).hexdigest())
    (cluster.job_folder / "plan.json").write_bytes(plan.to_json())
    jobs = cluster.host("master-0") / "state" / "jobs"
    (jobs / "job01" / "package").unlink()
    fetched = jobs.parent / "fetched"
    complete, damaged = archive.read_bytes(), archive.read_bytes()[:-9]
    archive.write_bytes(damaged)
    cluster.start()
    until(lambda: (fetched / "job01" / ".package.tar.gz").exists())
    archive.write_bytes(complete)
    assert cluster.wait() == [0]
    assert "from the bucket" in cluster.log("master-0")
    assert cluster.job.state == "SUCCEEDED"
    assert sorted(path.name for path in fetched.rglob("*") if path.name != "__pycache__" and path.suffix != ".pyc") == [
        "deep", "er.py", "job01", "package", "package.sha256", "task.py"
    ]  # fmt: skip
    assert (fetched / "job01" / "package.sha256").read_text() == plan.packageSha256


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder against other writers, as a store does."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def test_restarts_and_stops_work_while_the_bucket_hangs(make: Make) -> None:
    """Replace the job's record by a FIFO: a read of it hangs, as on an unreachable file system."""
    cluster = make("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + GOES, stopSeconds=0.3)
    cluster.start_running()
    job = cluster.job_folder / "job.json"
    with lock_folder(cluster.job_folder):  # a write in progress would replace the FIFO
        job.unlink()
        os.mkfifo(job)
    reader = None
    while reader is None:  # until the agent reads it
        with suppress(OSError):
            reader = os.open(job, os.O_WRONLY | os.O_NONBLOCK)
    try:
        first = cluster.trainer("master-0")
        os.killpg(first, signal.SIGKILL)
        until(lambda: cluster.log("master-0").count("up") == 2)
        second = cluster.trainer("master-0")
        cluster.processes["master-0"].terminate()
        until(lambda: gone(second))
        assert cluster.processes["master-0"].wait(PATIENCE) == 0
        assert cluster.record("master-0").restarts == 0  # no record was written since
    finally:
        os.close(reader)


def test_an_agent_whose_code_was_replaced_asks_for_a_restart(make: Make, tmp_path: Path) -> None:
    cluster = make(GOES)
    for name in ("jobs", "hosts"):
        shutil.copytree(ROOT / name, tmp_path / "program" / name)
    version = tmp_path / "program" / "hosts" / "VERSION"
    version.write_text("1")
    cluster.start(program=tmp_path / "program")
    until(lambda: cluster.runs("master-0"))
    version.write_text("2")
    (cluster.package / "go").touch()
    assert cluster.wait() == [75]
    assert cluster.job.state == "SUCCEEDED"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file or directory; fab train and fab export write it"),
        ('{"name": "ps-0", "bucket": "s3://x"}', "'s3://x' is no bucket"),
    ],
)
def test_a_host_without_configuration_prints_one_line_and_exits_with_2(make: Make, text: str | None, message: str) -> None:
    cluster = make("")
    file = cluster.host("master-0") / "etc" / "host.json"
    file.unlink()
    if text is not None:
        file.write_text(text)
    cluster.start()
    assert cluster.wait() == [2]
    (line,) = cluster.journal("master-0").splitlines()
    assert line.startswith("<3>replica: ")
    assert message in line
