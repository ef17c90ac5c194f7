"""Check a job as real processes on loopback until a target: their output, and their end."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from replicahosts import is_alive
from waiting import limit, wait_for

from jobs import progress
from ops.errors import OpsError, UsageError
from ops.plan import profile, runs
from ops.plan.profile import ProcessStart
from ops.plan.time_to_target import MetricTarget

# It learns a thousandth a step, half as much with several replicas; its children must end with it.
TRAINER = """
import json, os, pathlib, subprocess, sys, time
config = json.loads(os.environ.get("TF_CONFIG", "{}"))
task = config.get("task", {"type": "chief", "index": 0})
child = subprocess.Popen(["sleep", "600"])
seen = {"config": config, "pids": [os.getpid(), child.pid], "argv": sys.argv[1:], "type": os.environ["TYPE"]}
file = pathlib.Path(f"{task['type']}-{task['index']}")
file.with_suffix(".part").write_text(json.dumps(seen))
file.with_suffix(".part").rename(file)
if "--fail" in sys.argv and task["type"] == sys.argv[-1]:
    raise SystemExit("the data is gone")
if task["type"] != "chief":
    time.sleep(600)
each = 1000 * (2 if config else 1)
for step in range(100, 700, 100):
    print(f"Eval, step {step}: loss: {1 - step / each:.3f}, accuracy: {step / each:.3f}", flush=True)
    time.sleep(0.05)
time.sleep(600 if "--endless" in sys.argv else 0)
"""


def make_setup(tmp_path: Path, target: MetricTarget, *args: str, servers: bool = False) -> runs.RunSetup:
    (tmp_path / "mine.py").write_text(TRAINER)
    return runs.RunSetup(target, ["mine", *args], dict(os.environ), servers, limit())


def replica_files(tmp_path: Path) -> dict[str, dict[str, object]]:
    return {path.name: json.loads(path.read_text()) for path in tmp_path.glob("*-[0-9]")}


def await_end(tmp_path: Path) -> None:
    """Wait until all of the trainer's processes and their children have ended."""
    pids = [pid for info in replica_files(tmp_path).values() for pid in info["pids"]]  # type: ignore[attr-defined]
    assert pids
    wait_until(lambda: not any(map(is_alive, pids)), f"one of {pids} is running")


def wait_until(condition: Callable[[], bool], failure: str) -> None:
    wait_for(condition, f"that not: {failure}")


def test_one_replica_has_no_cluster_and_ends_at_the_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_result = runs.run(make_setup(tmp_path, MetricTarget("accuracy", 0.35), "--endless"), 1, tmp_path)
    assert run_result.as_dict("accuracy") == {
        "replicas": 1,
        "steps": pytest.approx(350),
        "before": {"step": 300, "value": 0.3},
        "after": {"step": 400, "value": 0.4},
        "lateSteps": 0,
    }
    assert replica_files(tmp_path)["chief-0"]["config"] == {}
    assert "mine as one process here, to accuracy=0.35: 0.4 at step 400 (" in capsys.readouterr().err
    await_end(tmp_path)


def test_several_replicas_have_a_parameter_server_and_all_end(tmp_path: Path) -> None:
    run_result = runs.run(make_setup(tmp_path, MetricTarget("loss", 0.875), "--endless", servers=True), 3, tmp_path)
    assert run_result.crossing.step == pytest.approx(250)
    wait_until(lambda: len(replica_files(tmp_path)) >= 1, "no replica started")
    infos = replica_files(tmp_path)
    config = infos["chief-0"]["config"]
    assert isinstance(config, dict)
    assert {role: len(addresses) for role, addresses in config["cluster"].items()} == {"chief": 1, "worker": 2, "ps": 1}
    assert infos["chief-0"]["type"] == "master"
    assert infos["chief-0"]["argv"] == ["--endless"]
    await_end(tmp_path)


@pytest.mark.parametrize(
    ("target", "args", "kind", "message"),
    [
        ("acuracy=1", "", UsageError, "--until acuracy=1: the Eval lines of mine have no 'acuracy'; they have loss, accuracy"),
        (
            "accuracy=0.02",
            "",
            UsageError,
            "--until accuracy=0.02 is too easy to measure: the first evaluation, at step 100, has accuracy 0.05; "
            "choose a target that takes more steps, or set the evaluation interval in --args",
        ),
        (
            "accuracy=0.9",
            "",
            UsageError,
            "mine with 2 replicas did not reach accuracy=0.9 by its end at step 600, the best was 0.3 at step 600: "
            "give it more steps, or an easier target",
        ),
        (
            "loss=0.1",
            "--endless",
            UsageError,
            r"mine with 2 replicas did not reach loss=0.1 in 10 h \d+ min, the best was 0.7 at step 600: "
            "give --until-seconds more, or an easier target",
        ),
        ("loss=0.1", "--fail chief", OpsError, r"mine ended with 1 after .* here: the data is gone"),
        ("loss=0.1", "--endless --fail worker", OpsError, r"mine as worker/0 ended with 1 after .* here: the data is gone"),
    ],
)
def test_bad_input_is_one_line_and_leaves_no_process(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    leap: Callable[[], None],
    target: str,
    args: str,
    kind: type[OpsError],
    message: str,
) -> None:
    metric, _, value = target.partition("=")
    original = progress.parse_eval_metrics

    def leap_at_the_end(line: str) -> progress.MetricPoint | None:
        if args == "--endless" and "step 600:" in line:
            leap()
        return original(line)

    monkeypatch.setattr(progress, "parse_eval_metrics", leap_at_the_end)
    with pytest.raises(OpsError, match=f"^{message}$") as error:
        runs.run(make_setup(tmp_path, MetricTarget(metric, float(value)), *args.split()), 2, tmp_path)
    assert type(error.value) is kind
    await_end(tmp_path)


def test_a_trainer_without_eval_lines_is_an_error_with_their_form(tmp_path: Path) -> None:
    setup = make_setup(tmp_path, MetricTarget("loss", 0.5))
    (tmp_path / "mine.py").write_text("print('Epoch 1')")
    with pytest.raises(UsageError, match=r"mine with 1 replica printed no line of the form 'Eval, step 990: .*' in "):
        runs.run(setup, 1, tmp_path)


def test_ctrl_c_ends_all_processes(tmp_path: Path) -> None:
    setup = make_setup(tmp_path, MetricTarget("accuracy", 0.9), "--endless")

    def interrupt() -> None:
        wait_until(lambda: len(replica_files(tmp_path)) == 3, "not all replicas started")
        os.kill(os.getpid(), signal.SIGINT)

    previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore SIGINT
    try:
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            runs.run(setup, 3, tmp_path)
        thread.join()
    finally:
        signal.signal(signal.SIGINT, previous)
    await_end(tmp_path)


def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    (tmp_path / "stubborn.py").write_text(
        "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint(os.getpid())\ntime.sleep(600)\n"
    )
    threads = set(threading.enumerate())
    with profile.start_processes(
        [ProcessStart(name, ["stubborn"], dict(os.environ)) for name in "ab"], tmp_path, 0.2
    ) as running:
        lines = running.lines(lambda: time.monotonic() + limit())
        pids = [int(next(lines)), int(next(lines))]
        assert all(map(is_alive, pids))
        assert all(thread.daemon for thread in set(threading.enumerate()) - threads), "they do not hold up the end of fab"
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "their exit codes are read"


def test_a_process_may_save_when_it_is_ended(tmp_path: Path) -> None:
    (tmp_path / "saving.py").write_text(
        "import pathlib, signal, time\n"
        "def save(*_):\n    pathlib.Path('saved').touch()\n    raise SystemExit\n"
        "signal.signal(signal.SIGTERM, save)\nprint('up')\ntime.sleep(600)\n"
    )
    with profile.start_processes([ProcessStart("a", ["saving"], dict(os.environ))], tmp_path, limit()) as running:
        assert next(running.lines(lambda: time.monotonic() + limit())) == "up"
    assert (tmp_path / "saved").exists()
