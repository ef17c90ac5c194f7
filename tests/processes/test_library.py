"""The library's examples in each strategy: every role is killed once, and the export predicts."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from loopback import PEERS, Job

ROOT = Path(__file__).resolve().parents[2]
_ASYNC = (("ps", 0), ("ps", 1), ("worker", 0), ("chief", 0))
_LIBRARY = {
    "tabular": ["--batch-size=32"],
    "text": ["--batch-size=16", "--vocabulary=5000", "--length=12"],
    "image": ["--batch-size=16", "--filters=8", "--blocks=1"],
}
# Call the signature in a separate process: a model predicts without the library.
_PREDICT = """
import json, sys
import tensorflow as tf
ask = tf.saved_model.load(sys.argv[1]).signatures["serving_default"]
given = {name: tf.ones([3, *spec.shape[1:]], spec.dtype) for name, spec in ask.structured_input_signature[1].items()}
print(json.dumps({name: answer.numpy().tolist() for name, answer in sorted(ask(**given).items())}))
"""


_FULL = pytest.mark.full("[async-tabular] proves the kills, test_examples_library.py each example on one host")


# Each strategy and each example once: what a kill does depends on the strategy, what is trained on the example.
@pytest.mark.parametrize(
    ("strategy", "example"),
    [("async", "tabular"), pytest.param("sync", "image", marks=_FULL), pytest.param("model-parallel", "text", marks=_FULL)],
)
def test_a_job_survives_a_kill_of_each_role(tmp_path: Path, strategy: str, example: str) -> None:
    path = f"{ROOT}:{ROOT / 'examples'}"
    job = Job(tmp_path, f"{example}.task", _ASYNC if strategy == "async" else PEERS, PYTHONPATH=path)
    flags = [f"--strategy={strategy}", "--log-interval=0.2", "--checkpoint-steps=40", *_LIBRARY[example]]
    job.flags = (*flags, "--max-steps=1000000")
    with job:
        job.start_all()
        job.await_step("worker-0", 2)
        killed_step = job.await_step("chief-0", 100)
        if strategy == "async":
            job.terminate("worker-0", signal.SIGKILL)
            job.start("worker", 0)
            job.await_step("worker-0", killed_step)
        lost = "ps-1" if strategy == "async" else "worker-0"
        job.terminate(lost, signal.SIGKILL)
        assert job.wait("chief-0") == -signal.SIGTERM
        job.await_line("chief-0", r"^error: a host of the cluster is lost: .+$")
        job.start(*lost.split("-"))
        job.start("chief", 0)
        resumed_step = last_resumed_step(job)
        assert resumed_step >= (40 if strategy == "model-parallel" else killed_step), "the chief's state is saved"
        job.await_step("chief-0", resumed_step + 50)
        job.terminate("chief-0", signal.SIGKILL)
        if strategy == "sync":
            assert job.wait("worker-0") == -signal.SIGTERM
        else:
            job.terminate("worker-0", signal.SIGKILL)
        job.flags = (*flags, f"--max-steps={resumed_step + 300}")
        job.start("worker", 0)
        job.start("chief", 0)
        assert last_resumed_step(job) >= resumed_step
        assert job.wait("chief-0") == 0, job.log("chief-0")
        by_chance = 0.5 if example == "tabular" else 0.25
        assert accuracy(job, resumed_step + 300) > by_chance + 0.15
        (exported,) = (tmp_path / "job/export/Servo").iterdir()
        result = subprocess.run([sys.executable, "-c", _PREDICT, exported], capture_output=True, check=True)
        assert all(len(outputs) == 3 for outputs in json.loads(result.stdout).values())


# As TensorFlow at times: a call that a lost parameter server does not answer never returns, in any thread of the master.
_STUCK = """
import runpy, threading
import tensorflow as tf
from scaletier import asynchronous
call, asynchronous._LONG_SECONDS, asynchronous._STUCK_SECONDS = asynchronous.run_round, 1.0, 1.0
def run_round(*args):
    try:
        return call(*args)
    except tf.errors.OpError:
        threading.Event().wait()
asynchronous.run_round = run_round
runpy.run_module("tabular.task", run_name="__main__", alter_sys=True)
"""


@pytest.mark.full("test_scaletier_lost_host.py proves when the master ends, with a stand-in for the parameter servers")
@pytest.mark.parametrize("restarted", [False, True])
def test_a_master_ends_whose_call_of_a_lost_parameter_server_never_returns(tmp_path: Path, restarted: bool) -> None:
    (tmp_path / "stuck.py").write_text(_STUCK)
    job = Job(tmp_path, "stuck", _ASYNC, PYTHONPATH=f"{ROOT}:{ROOT / 'examples'}:{tmp_path}")
    job.flags = ("--strategy=async", "--log-interval=0.2", "--checkpoint-steps=40", "--max-steps=1000000")
    with job:
        job.start_all()
        job.await_step("worker-0", 2)
        job.await_step("chief-0", 100)
        job.terminate("ps-0", signal.SIGKILL)
        if restarted:
            job.start("ps", 0)
        assert job.wait("chief-0") == -signal.SIGTERM
        job.await_line("chief-0", r"^error: a host of the cluster is lost: .+$")
        job.flags = (*job.flags[:-1], "--max-steps=400")
        job.start("chief", 0)
        assert last_resumed_step(job) >= 40


def last_resumed_step(job: Job) -> int:
    """Return the step from which the job resumed."""
    return int(job.await_line("chief-0", r"^Resuming from .*, step (\d+)$")[1])


def accuracy(job: Job, steps: int) -> float:
    """Return the accuracy of the last line, which is after at least `steps` steps."""
    final = job.await_line("chief-0", r"^Final metrics after (\d+) steps, .*accuracy: ([\d.]+)")
    assert int(final[1]) >= steps
    return float(final[2])
