"""The real process, `python -m replica`, and its trainer: what goes in, what comes out, how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from replicahosts import Make, end, until


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


def test_the_chief_s_facts_are_in_the_manifest_and_in_both_records(make: Make) -> None:
    cluster = make("import pathlib, time\nprint('up')\nwhile not pathlib.Path('go').exists():\n    time.sleep(0.02)")
    manifest = cluster.job_folder / "manifest.json"
    manifest.write_text('{"versions": {"scaletier": "9"}}')
    cluster.start()
    until(lambda: "data" in cluster.job.manifest)
    written = json.loads(manifest.read_text())
    assert written["versions"]["scaletier"] == "9"
    assert written["data"] == cluster.job.manifest["data"] == cluster.record("master-0").facts["data"]
    (cluster.package / "go").touch()
    assert cluster.wait() == [0]
    assert (cluster.job.state, cluster.job.manifest["data"]) == ("SUCCEEDED", written["data"])


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
