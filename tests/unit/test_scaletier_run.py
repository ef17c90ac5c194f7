"""The exit code and the last line of a process, whatever ends its part of a job."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from scaletier.asynchronous import Asynchronous, _shorten_log
from scaletier.checkpoint import CheckpointError
from scaletier.exit import RETRY_EXIT_CODE
from scaletier.flags import flags_of
from scaletier.job import DataError, Job, JobError
from scaletier.loop import DivergedError, PreemptedError
from scaletier.run import _catch_errors, run_to_exit_code, train
from scaletier.tensorflow_setup import import_tensorflow
from scaletier.tf_config import Cluster

errors = import_tensorflow().errors
MODULE = sys.modules["scaletier.run"]  # a function of the library has its name
CLUSTER = Cluster("chief", 0, {"worker": ("a:2222",), "chief": ("b:2222",)})
LOST = errors.UnavailableError(None, None, "failed to connect to all addresses")


def raising(error: BaseException) -> Callable[..., Any]:
    def work(*_: object) -> None:
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "cluster", "code", "line"),
    [
        (JobError("the job has no model"), Cluster(), 2, "the job has no model"),
        (DataError("no batch"), Cluster(), 2, "no batch"),
        (CheckpointError("no checkpoint"), Cluster(), 2, "no checkpoint"),
        (
            DivergedError("the loss is nan"),
            Cluster(),
            1,
            "the loss is nan; try a lower learning rate, or look for nan and labels out of range in the data",
        ),
        (LOST, CLUSTER, 143, "a host of the cluster is lost: failed to connect to all addresses"),
        (LOST, Cluster(), 143, "a service that the job uses does not answer: failed to connect to all addresses"),
        (errors.DataLossError(None, None, "corrupted record"), Cluster(), 2, "the job's data is damaged: corrupted record"),
        (
            errors.InvalidArgumentError(None, None, "shapes differ"),
            Cluster(),
            2,
            "a batch of the job cannot be made, or does not go through its model: shapes differ",
        ),
        (
            errors.OutOfRangeError(None, None, "End of sequence"),
            CLUSTER,
            2,
            "this replica finds no batch in the job's data: End of sequence",
        ),
        (
            errors.InvalidArgumentError(None, None, "unsupported, when trying to compile graph step"),
            Cluster(),
            2,
            "XLA cannot compile a step of the model; valid is model.compile(…, jit_compile=False): unsupported, when trying to "
            "compile graph step",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_an_expected_end_is_a_line_and_a_code(
    error: Exception, cluster: Cluster, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _catch_errors(Job(None, None), cluster, raising(error)) == code
    assert capsys.readouterr().err == f"error: {line}\n"


def test_an_end_by_sigterm_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert _catch_errors(Job(None, None), Cluster(), raising(PreemptedError("Ends by SIGTERM at step 7"))) == 143
    assert capsys.readouterr().err == "Ends by SIGTERM at step 7\n"


def test_work_that_ends_well_has_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert _catch_errors(Job(None, None), Cluster(), lambda: None) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "error", [ValueError("a fault of the program"), errors.ResourceExhaustedError(None, None, "no memory")]
)
def test_other_errors_are_raised(error: Exception) -> None:
    with pytest.raises(type(error)):
        _catch_errors(Job(None, None), Cluster(), raising(error))


def test_a_program_s_own_error_is_shown_and_ctrl_c_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(MODULE, "train", raising(ValueError("a fault of the program")))
    assert run_to_exit_code(Job(None, None), flags_of([])) == 1
    written = capsys.readouterr().err
    assert written.startswith("Traceback")
    assert written.endswith("ValueError: a fault of the program\n")
    monkeypatch.setattr(MODULE, "train", raising(KeyboardInterrupt()))
    assert run_to_exit_code(Job(None, None), flags_of([])) == 130
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(MODULE, "train", lambda *_: 5)
    assert run_to_exit_code(Job(None, None), flags_of([])) == 5


def task(monkeypatch: pytest.MonkeyPatch, task_type: str, **jobs: list[str]) -> None:
    config = {"cluster": {"chief": ["127.0.0.1:1"], **jobs}, "task": {"type": task_type, "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))


def test_a_parameter_server_of_a_sync_job_waits_for_its_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task(monkeypatch, "ps", ps=["127.0.0.1:2"], worker=["127.0.0.1:3"])
    awaited: list[object] = []
    monkeypatch.setattr(signal, "sigwait", awaited.append)
    assert train(Job(None, None), flags_of(["--strategy=sync"])) == 0
    assert awaited == [{signal.SIGTERM, signal.SIGINT}]
    expected = "Idle [ps/0]: strategy sync needs no parameter servers; this one waits for the job's end\n"
    assert capsys.readouterr().out == expected


def test_a_cluster_that_cannot_train_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    task(monkeypatch, "chief", ps=["127.0.0.1:2"])
    assert train(Job(None, None), flags_of(["--strategy=sync"])) == 2
    expected = (
        "error: --strategy sync needs a worker, and this cluster has none: "
        "take --strategy async and no parameter servers, or a cluster with workers\n"
    )
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    "call", ["exit_process({})", "threading.Thread(target=exit_process, args=[{}]).start(); time.sleep(99)"]
)
@pytest.mark.parametrize("code", [0, 3, RETRY_EXIT_CODE])
def test_a_process_leaves_by_its_code_or_by_sigterm(code: int, call: str) -> None:
    program = (
        "import threading, time\n"
        "import atexit, signal; from scaletier.exit import exit_process; atexit.register(print, 'late')\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        f"print('before'); {call.format(code)}"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.stdout == "before\n"
    assert result.returncode == (-signal.SIGTERM if code == RETRY_EXIT_CODE else code)


def train_worker(error: Exception, explain: Callable[[Exception], str] | None = None) -> list[Exception]:
    """Train as a worker whose data raises an error; return what ends the job."""
    ends: list[Exception] = []
    strategy = Asynchronous.__new__(Asynchronous)
    strategy.source = SimpleNamespace(training_batches_on_device=raising(error))
    strategy.job, strategy.host_count, strategy.data_first_step = Job(None, None, on_data_error=explain), 2, 0
    strategy.budget = SimpleNamespace(step=0, stop=ends.append)
    strategy._train_worker()
    return ends


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (errors.OutOfRangeError(None, None, "End of sequence"), "worker/0 finds no batch in the job's data"),
        (errors.PermissionDeniedError(None, None, "/data/a"), "worker/0 cannot read its data: /data/a"),
        (errors.NotFoundError(None, None, "/a; No such file"), "worker/0 cannot read its data: /a; No such file"),
    ],
)
def test_data_that_a_worker_cannot_read_ends_the_job(error: Exception, line: str) -> None:
    (end,) = train_worker(error)
    assert isinstance(end, DataError)
    assert str(end) == line


@pytest.mark.parametrize("error", [errors.DataLossError(None, None, "corrupted record"), ValueError("a fault of the program")])
def test_an_error_of_the_program_on_a_worker_ends_the_job(error: Exception) -> None:
    assert train_worker(error) == [error]


@pytest.mark.parametrize("error", [LOST, errors.NotFoundError(None, None, "Resource localhost/iterator does not exist")])
def test_the_coordinator_handles_a_lost_worker(error: Exception) -> None:
    with pytest.raises(type(error)):
        train_worker(error)


def test_the_job_explains_why_a_worker_finds_no_batch() -> None:
    (end,) = train_worker(errors.OutOfRangeError(None, None, ""), lambda _: "there are fewer files than workers")
    assert str(end) == "worker/0 finds no batch in the job's data: there are fewer files than workers"


def test_the_coordinator_s_pages_of_graph_nodes_become_one_line() -> None:
    pages = "Error when processing closure:\n {{node while}} no answer\nTraceback (most recent call last)\n  a line of code"
    record = logging.LogRecord("tensorflow", logging.ERROR, "", 1, "%s", (pages,), None)
    assert _shorten_log(record)
    assert record.getMessage() == "Error when processing closure: no answer"
    other = logging.LogRecord("tensorflow", logging.INFO, "", 1, "two\n%s", ("lines",), None)
    assert _shorten_log(other)
    assert other.getMessage() == "two\nlines"
