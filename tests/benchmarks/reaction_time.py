"""The time from an event to its effect on a job: a restart, the next in the queue, a cancel; and violations in simulations.

Local hosts have the clock of this machine.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from benchmarks.job_events import first_after, last_gone, ledger_of, log_of, record_in, runs, seconds_of, starts, trainers
from benchmarks.jobs import upload_data
from benchmarks.measure import MeasureError, must, run
from benchmarks.registry import Figure, benchmark, in_turn
from benchmarks.stack import NAME, ROOT, TINY, BenchStack, job_id, login, say
from infra.lxd.api import client
from infra.lxd.orphans import existing_names
from infra.scale_tiers import ScaleTier
from jobs import paths
from jobs.lease import Lease
from jobs.paths import PYTHON, STATE_DIR
from jobs.queue import Queue, QueueEntry
from jobs.records import HostConfig, JobRecord, Plan, Task
from jobs.states import JobState

SECONDS = float(os.environ.get("SCALETIER_BENCH_SECONDS", "60"))
"""The duration of the simulations."""
JOBS = 500
_SOAK = "tests/simulation/soak.py"
_PLAYED = re.compile(r"^(\d+) schedules from seed \d+, (\d+) with a violation$", re.MULTILINE)
_START_SECONDS = 60.0
_END_SECONDS = 120.0
_STEADY_SECONDS = 2.0
_TRIES = 3
# The first of a queue lasts until the others are in it.
_FIRST_SECONDS = "60"
_WORKERS = ("worker-0", "worker-1", "worker-2")
# The times are those of the log, and polls use the processors that the trainers share.
_POLL_SECONDS = 4.0
# Until the job runs steadily, and a worker that was killed before trains again.
_BEGUN_SECONDS = 10.0
# A worker's import of TensorFlow, in a process of its own.
_IMPORT = (
    "cd {package} && {python} -c 'import time; t = time.monotonic(); from scaletier.private import "
    "server_library; server_library(); print(time.monotonic() - t)'"
)


@benchmark(
    "schedules",
    what=f"violations in the schedules of the simulated world that {SECONDS:g} s allow, on all processors",
    against=None,
    bar=0,
    tier=None,
    unit="violations",
)
def schedules(stack: BenchStack) -> Figure:
    """Run new schedules each time, like `make soak`."""
    first = int(time.time())
    ran = stack.run(sys.executable, _SOAK, "--seconds", f"{SECONDS:g}", "--first", str(first))
    count, broken = played(ran.out)
    say(f"{count} schedules in {ran.seconds:.0f} s, {count / ran.seconds:.0f} a second, {broken} with a violation")
    return Figure(broken)


def played(out: str) -> tuple[int, int]:
    """Return the number of schedules that soak.py played, and of those with a violation.

    Raises:
        MeasureError: it played none.
    """
    counts = _PLAYED.search(out)
    if not counts or counts[1] == "0":
        raise MeasureError(f"no schedule was played: {out[-200:]!r}")
    return int(counts[1]), int(counts[2])


@benchmark(
    "restart-hanging",
    what="seconds from the kill of a trainer to its next one's first line while the bucket hangs, by its clock, median of 5",
    against=None,
    bar=0.5,
    aim=0.1,
    tier=None,
)
def restart_hanging(stack: BenchStack) -> Figure:
    """Run a real `python -m hosts.agent` on this machine; every call of its bucket hangs before the kill."""
    figure = in_turn(5, lambda: _restarted(stack), lambda: _started(stack))
    say(f"{figure.value:.2f} s, of which {figure.peer:.2f} s are the start of the same trainer")
    return Figure(figure.value)


def _started(stack: BenchStack) -> float:
    """Return the seconds from the start of the trainer alone to its first line by its own clock."""
    with tempfile.TemporaryDirectory(prefix="st") as name:
        task = {"TF_CONFIG": '{"cluster": {}, "task": {}}', "TYPE": "master", "INDEX": "0", "JOB_DIR": name}
        env = {**stack.env, **task, "PYTHONPATH": str((ROOT / TINY).parent)}
        began = time.time()
        ran = must(run([sys.executable, "-m", "tiny.task", "--seconds", "0"], env, Path(name)), "the tiny trainer")
    return float(ran.out.partition("step 1: at ")[2].split()[0]) - began


def _restarted(stack: BenchStack) -> float:
    with tempfile.TemporaryDirectory(prefix="st") as name:
        root = Path(name)
        make_host(root)
        env = {
            **stack.env,
            "SCALETIER_ETC": str(root),
            "SCALETIER_STATE": str(root / "state"),
            "PYTHONPATH": f"{ROOT}:{ROOT}/tests",
            "PYTHONUNBUFFERED": "1",
        }
        command = [sys.executable, "-m", "benchmarks.hanging_once", str(root / "bucket.off")]
        process = subprocess.Popen(command, env=env, cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        pids: list[int] = []

        def first_line(count: int) -> float:
            """Return the time of the first line of the trainer with this number."""
            log = root / "state" / "logs" / "newest"
            deadline = time.monotonic() + _START_SECONDS
            while time.monotonic() < deadline:
                text = "".join(chunk.read_text() for chunk in sorted(log.glob("*.jsonl")))
                pids[:] = [int(pid) for pid in re.findall(r"started trainer pid (\d+):", text)]
                times = re.findall(r"step 1: at (\d+\.\d+)", text)
                if len(times) >= count:
                    return float(times[count - 1])
                time.sleep(0.01)
            raise MeasureError(f"trainer {count} printed nothing within {_START_SECONDS:.0f} s")

        try:
            first_line(1)
            (root / "bucket.off").touch()
            _until((root / "bucket.hangs").exists, "no call of the bucket hangs")
            killed = time.time()
            os.killpg(pids[-1], signal.SIGKILL)
            return first_line(2) - killed
        finally:
            process.kill()
            process.wait()
            with suppress(ProcessLookupError, IndexError):
                os.killpg(pids[-1], signal.SIGKILL)


def make_host(root: Path) -> None:
    """Write a host and a bucket as directories, and a job of the tiny trainer that has this host."""
    bucket, home, job = root / "bucket", root / "state" / "jobs" / "bench", "bench"
    config = {"cluster": {}, "task": {"type": "master", "index": 0}}
    task = Task(json.dumps(config), {"TYPE": "master", "INDEX": "0", "JOB_DIR": str(bucket / paths.output(job))})
    arguments = ["--seconds", "60", "--rate", "1"]
    plan = Plan(job, ["master-0"], "tiny.task", arguments, {"master-0": task}, packageSha256="0", heartbeatSeconds=0.1)
    records = {
        paths.plan(job): plan.to_json(),
        paths.job(job): JobRecord(job, state=JobState.PREPARING, lease=Lease(epoch=2), hosts=plan.replicas).to_json(),
        paths.QUEUE: Queue([QueueEntry(job, plan.replicas, has_hosts=True)]).to_json(),
    }
    for path, content in records.items():
        (bucket / path).parent.mkdir(parents=True, exist_ok=True)
        (bucket / path).write_bytes(content)
    (root / "host.json").write_bytes(HostConfig("master-0", str(bucket), 0.05, sys.executable).to_json())
    (home / "package").mkdir(parents=True)
    (home / "package" / "tiny").symlink_to(ROOT / TINY)
    (home / "package.sha256").write_text(plan.packageSha256)


@benchmark(
    "worker-killed",
    what="seconds from the kill of a worker's trainer (mlp, async, after 10 s) to its next Train line, without its import of "
    "TensorFlow on that host, median of 3",
    against=None,
    bar=3.0,
    aim=1.0,
)
def worker_killed(stack: BenchStack) -> Figure:
    """Kill each of three workers once."""
    inventory = stack.require(ScaleTier.STANDARD_1)
    upload_data(inventory)
    job = job_id("worker_killed")
    arguments = ("--model", "mlp", "--max-steps", "10000000", "--log-interval", "100")
    stack.fab("train", "--job", job, "--no-follow", "--", *arguments)
    try:
        with ledger_of(stack) as ledger:
            record_in(ledger, job, runs, _START_SECONDS)
        for worker in _WORKERS:
            _train_line(stack, job, worker, 0.0)
        return Figure(statistics.median(_trains_again(stack, job, worker) for worker in _WORKERS))
    finally:
        stack.run("fab", "cancel", job)


def _trains_again(stack: BenchStack, job: str, worker: str) -> float:
    package = f"{STATE_DIR}/jobs/{job}/package"
    time.sleep(_BEGUN_SECONDS)
    imports = float(stack.on(worker, _IMPORT.format(package=package, python=PYTHON)))
    pid = trainers(log_of(stack, job, worker))[worker]
    killed = float(stack.on(worker, f"date +%s.%N && sudo -n kill -KILL {pid}"))
    trained = _train_line(stack, job, worker, killed)
    say(f"{worker}: {trained - killed:.2f} s, of which {imports:.2f} s are the import of TensorFlow")
    return trained - killed - imports


def _train_line(stack: BenchStack, job: str, worker: str, moment: float) -> float:
    """Return the time of a worker's first step after a moment."""
    deadline = time.monotonic() + _END_SECONDS
    while time.monotonic() < deadline:
        if step := first_after(log_of(stack, job, worker), worker, "Train [", moment):
            return step
        time.sleep(_POLL_SECONDS)
    raise MeasureError(f"{worker} trains no step within {_END_SECONDS:.0f} s")


@benchmark(
    "queue-next",
    what="seconds from the end of a job (its endTime) to the first trainer of the next in the queue, 8 hosts, median of 3",
    against=None,
    bar=5.0,
    aim=2.0,
)
def queue_next(stack: BenchStack) -> Figure:
    """Queue four jobs; only the hosts start them."""
    stack.require(ScaleTier.STANDARD_1)
    jobs = [job_id(f"queue_{number}") for number in range(4)]
    try:
        for job in jobs:
            seconds = _FIRST_SECONDS if job == jobs[0] else "3"
            stack.fab("train", "--job", job, "--package", TINY, "--no-follow", "--", "--seconds", seconds, "--rate", "1")
        submitted = time.time()
        with ledger_of(stack) as ledger:
            records = [record_in(ledger, job, lambda state: state.final, _END_SECONDS) for job in jobs]
        began = [min(at for _, _, at in starts(log_of(stack, job))) for job in jobs[1:]]
    except BaseException:
        for job in reversed(jobs):
            stack.run("fab", "cancel", job)
        raise
    ends = [seconds_of(record.endTime or "") for record in records[:-1]]
    if submitted > ends[0]:
        raise MeasureError("the first job ended before the others were in the queue")
    gaps = [begin - end for begin, end in zip(began, ends, strict=True)]
    say(f"from one job to the next: {', '.join(f'{gap:.2f} s' for gap in gaps)}")
    return Figure(statistics.median(gaps))


@benchmark(
    "cancel-8",
    what="seconds from the start of `fab cancel` until the last trainer on 8 hosts has ended, median of 3",
    against=None,
    bar=6.0,
    aim=3.0,
)
def cancel_8(stack: BenchStack) -> Figure:
    """Cancel the tiny trainer, which SIGTERM ends at once."""
    stack.require(ScaleTier.STANDARD_1)
    return Figure(statistics.median(_cancelled(stack) for _ in range(3)))


@benchmark(
    "cancel-chief-off",
    what="seconds from `fab cancel` until the last trainer on the others has ended, the chief's host off, median of 3",
    against=None,
    bar=60.0,
    aim=25.0,
)
def cancel_chief_off(stack: BenchStack) -> Figure:
    """Stop the chief's host, whose agent leads the job, just before."""
    inventory = stack.require(ScaleTier.STANDARD_1)
    chief = client(existing_names(NAME)[0].project).instances.get(inventory.chief.name)

    def once() -> float:
        try:
            return _cancelled(stack, inventory.chief.name, lambda: chief.stop(force=True, wait=True))
        finally:
            chief.sync()
            if chief.status != "Running":
                chief.start(wait=True)
            login([stack.ssh(inventory.chief.name, "true")], stack.env)

    return Figure(statistics.median(once() for _ in range(3)))


def _cancelled(stack: BenchStack, off: str = "", before: Callable[[], object] = lambda: None) -> float:
    """Return the seconds of a cancel; `off` is the host that `before` stops, whose agent must lead."""
    for _ in range(_TRIES):
        with stack.tiny_job("cancel", "--seconds 600 --rate 1") as job:
            with ledger_of(stack) as ledger:
                leader = record_in(ledger, job, runs, _START_SECONDS).lease.holder
            if not leader.startswith(off):
                say(f"{leader} leads: next job")
                continue
            time.sleep(_STEADY_SECONDS)
            processes = {name: pid for name, pid in trainers(log_of(stack, job)).items() if name != off}
            before()
            seconds = last_gone(stack, processes, lambda: stack.fab("cancel", job), _END_SECONDS)
        say(f"the last of {len(processes)} trainers had ended after {seconds:.2f} s")
        return seconds
    raise MeasureError(f"{off} led none of {_TRIES} jobs")


@benchmark(
    "jobs-500",
    what=f"seconds of `fab jobs` with {JOBS} jobs in the bucket, whole command, median of 5",
    against=None,
    bar=2.0,
    aim=0.7,
)
def jobs_500(stack: BenchStack) -> Figure:
    """Store the record of one job that ran here under 500 ids."""
    chief = stack.require(ScaleTier.STANDARD_1).chief.name
    job = job_id("jobs")
    stack.fab("train", "--job", job, "--package", TINY, "--args", "--seconds 1")
    with ledger_of(stack) as ledger:
        record = record_in(ledger, job, lambda state: state.final, _END_SECONDS)
    bucket = stack.inventory.bucket
    try:
        stack.on(chief, f"sudo -n tar -xf - -C {bucket}", packed(record, JOBS))

        def once() -> float:
            ran = must(stack.run("fab", "jobs"), "fab jobs")
            if ran.out.count("bench_many_") != JOBS:
                raise MeasureError(f"fab jobs shows {ran.out.count('bench_many_')} of {JOBS} jobs")
            return ran.seconds

        once()
        return Figure(statistics.median(once() for _ in range(5)))
    finally:
        stack.on(chief, f"sudo -n sh -c 'rm -rf {bucket}/{paths.JOBS}/bench_many_*'")


def packed(record: JobRecord, count: int) -> bytes:
    """Return a tar archive for the bucket with this record under `count` ids, created a minute apart."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for number in range(count):
            created = (datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=number)).isoformat().replace("+00:00", "Z")
            one = replace(record, jobId=f"bench_many_{number:04}", createTime=created)
            content = one.to_json()
            entry = tarfile.TarInfo(paths.job(one.jobId))
            entry.size, entry.mode = len(content), 0o664
            tar.addfile(entry, io.BytesIO(content))
    return out.getvalue()


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise MeasureError(what)
        time.sleep(0.005)
