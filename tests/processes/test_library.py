"""The examples that train by the library, in each strategy: every role is killed once, and what is exported answers."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from loopback import Job

ROOT = Path(__file__).resolve().parents[2]
_ASYNC = (("ps", 0), ("ps", 1), ("worker", 0), ("chief", 0))
_PEERS = (("worker", 0), ("chief", 0))
_LIBRARY = {
    "tabular": ["--batch-size=32"],
    "text": ["--batch-size=16", "--vocabulary=5000", "--length=12"],
    "image": ["--batch-size=16", "--filters=8", "--blocks=1"],
}
# Calls the signature in a process of its own: a model answers wherever it is, without the library.
_ASK = """
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
    [
        ("async", "tabular"),
        pytest.param("sync", "image", marks=_FULL),
        pytest.param("model-parallel", "text", marks=_FULL),
    ],
)
def test_what_trains_by_the_library_outlives_a_kill_of_each_role(tmp_path: Path, strategy: str, example: str) -> None:
    path = f"{ROOT}:{ROOT / 'examples'}"
    job = Job(tmp_path, f"{example}.task", _ASYNC if strategy == "async" else _PEERS, PYTHONPATH=path)
    flags = [f"--strategy={strategy}", "--log-interval=0.2", "--checkpoint-steps=40", *_LIBRARY[example]]
    job.flags = (*flags, "--max-steps=1000000")
    try:
        job.start_all()
        job.await_step("worker-0", 2)
        reached = job.await_step("chief-0", 100)
        if strategy == "async":
            job.end("worker-0", signal.SIGKILL)
            job.start("worker", 0)
            job.await_step("worker-0", reached)
        lost = "ps-1" if strategy == "async" else "worker-0"
        job.end(lost, signal.SIGKILL)
        assert job.wait("chief-0") == -signal.SIGTERM
        job.await_line("chief-0", r"^error: a host of the cluster is lost: .+$")
        job.start(*lost.split("-"))
        job.start("chief", 0)
        again = resumes(job)
        assert again >= (40 if strategy == "model-parallel" else reached), "what the chief held is saved"
        job.await_step("chief-0", again + 50)
        job.end("chief-0", signal.SIGKILL)
        if strategy == "sync":
            assert job.wait("worker-0") == -signal.SIGTERM
        else:
            job.end("worker-0", signal.SIGKILL)
        job.flags = (*flags, f"--max-steps={again + 300}")
        job.start("worker", 0)
        job.start("chief", 0)
        assert resumes(job) >= again
        assert job.wait("chief-0") == 0, job.log("chief-0")
        by_chance = 0.5 if example == "tabular" else 0.25
        assert accuracy(job, again + 300) > by_chance + 0.15
        (exported,) = (tmp_path / "job/export/Servo").iterdir()
        asked = subprocess.run([sys.executable, "-c", _ASK, exported], capture_output=True, check=True)
        assert all(len(found) == 3 for found in json.loads(asked.stdout).values())
    finally:
        job.stop()


def resumes(job: Job) -> int:
    """The step that the job goes on from."""
    return int(job.await_line("chief-0", r"^Resuming from .*, step (\d+)$")[1])


def accuracy(job: Job, steps: int) -> float:
    """The last line's, which comes after so many steps or more."""
    final = job.await_line("chief-0", r"^Final metrics after (\d+) steps, .*accuracy: ([\d.]+)")
    assert int(final[1]) >= steps
    return float(final[2])
