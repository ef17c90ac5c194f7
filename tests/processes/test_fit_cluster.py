"""`scaletier.fit` on several processes: callbacks set the rate of all replicas and end the job, and the chief continues."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fitted import EPOCH, STOP
from loopback import PEERS, ROLES, Job

LIKE_SYNC = pytest.mark.full("[sync] proves what callbacks change; other tests of make test train with each strategy")
_LOAD = "import sys, keras; print(*[keras.models.load_model(path).optimizer.learning_rate.numpy() for path in sys.argv[1:]])"


def test_a_callback_that_sets_weights_of_one_replica_is_refused(tmp_path: Path) -> None:
    with Job(tmp_path, "fitted", PEERS, "--strategy=sync", SETS_WEIGHTS="1") as job:
        job.start_all()
        assert job.wait("chief-0") == 2, job.log("chief-0")
        job.await_line(
            "chief-0", r"^error: a callback has set in/kernel at the end of an epoch, which the other replicas do not"
        )
        assert "Traceback" not in job.log("chief-0")


def test_an_invalid_model_ends_each_replica_in_one_line(tmp_path: Path) -> None:
    with Job(tmp_path, "fitted", PEERS, "--strategy=sync", OWN_STEP="1") as job:
        job.start_all()
        for name in ("chief-0", "worker-0"):
            assert job.wait(name) == 2, job.log(name)
            *_, last = job.log(name).splitlines()
            assert last.startswith(
                "error: the model own_step is invalid: its class OwnStep overrides train_step, which scaletier"
            )


@pytest.mark.full("test_scaletier_epochs.py, where another replica trains through an epoch while the chief evaluates")
def test_each_epoch_ends_once_although_workers_train_through_the_next_one(tmp_path: Path) -> None:
    roles = [("ps", 0), ("worker", 0), ("worker", 1), ("chief", 0)]
    with Job(tmp_path, "fitted", roles, EPOCHS="9") as job:
        job.start_all()
        assert job.wait("chief-0") == 0, job.log("chief-0")
        assert re.findall(r"^Epoch (\d) has loss, val_loss: ", job.log("chief-0"), re.MULTILINE) == list("012345678")
        assert f"The chief continues: {list(range(9))} " in job.log("chief-0")


@pytest.mark.parametrize(
    "strategy", [pytest.param("async", marks=LIKE_SYNC), "sync", pytest.param("model-parallel", marks=LIKE_SYNC)]
)
def test_callbacks_affect_all_replicas_and_the_chief_continues(tmp_path: Path, strategy: str) -> None:
    with Job(tmp_path, "fitted", ROLES[strategy], f"--strategy={strategy}") as job:
        job.start_all()
        assert job.wait("chief-0") == 0, job.log("chief-0")
        log = job.log("chief-0")
        epochs = re.findall(r"^Epoch (\d) has loss, val_loss: \[(.*)\]$", log, re.MULTILINE)
        assert [int(epoch) for epoch, _ in epochs] == list(range(STOP))
        assert epochs[-1][1] == epochs[-2][1], "with a rate of 0 no replica changes anything"
        assert epochs[0][1] != "0. 0. 0."
        final = re.search(r"^Final metrics after (\d+) steps, loss: (\S+)$", log, re.MULTILINE)
        assert final
        # With async the worker may take the steps of another epoch during the last evaluation.
        assert STOP * EPOCH <= int(final[1]) <= (STOP + 1) * EPOCH
        if strategy == "sync":
            assert int(final[1]) == STOP * EPOCH
            assert job.wait("worker-0") == 0, job.log("worker-0")
        continued = re.search(r"^The chief continues: \[0, 1, 2\] (\S+)$", log, re.MULTILINE)
        assert continued
        assert float(continued[1]) == pytest.approx(float(final[2]), abs=1e-3)
        assert "continues" not in job.log("worker-0")
        models = [tmp_path / "job" / name for name in ("best.keras", "export/model.keras")]
        loaded = subprocess.run([sys.executable, "-c", _LOAD, *models], capture_output=True, check=True)
        assert loaded.stdout == b"0.0 0.0\n"


@pytest.mark.full(
    "test_fit.py::test_a_restart_within_an_epoch_keeps_its_metrics, where one process ends an epoch as it resumes"
)
def test_a_callback_ends_training_as_the_epoch_of_a_restart_ends(tmp_path: Path) -> None:
    flags, terminated = ("--strategy=sync", "--sync-period=4"), str(tmp_path / "terminated")
    with Job(tmp_path, "fitted", PEERS, *flags, TERMINATE_ONCE=terminated) as job:
        job.start_all()
        assert {job.wait("chief-0"), job.wait("worker-0")} == {-signal.SIGTERM}
        assert f"Ends by SIGTERM at step {STOP * EPOCH}; a checkpoint is saved" in job.log("chief-0")
        job.start_all()
        assert (job.wait("chief-0"), job.wait("worker-0")) == (0, 0), job.log("chief-0")
        assert re.findall(r"^Epoch (\d) has", job.log("chief-0"), re.MULTILINE) == ["2"]
        assert "The chief continues: [0, 1, 2] " in job.log("chief-0")
        assert f"Final metrics after {STOP * EPOCH + 2 * 4} steps" in job.log("chief-0"), "both take the same steps in a round"
