"""Errors of a lost host: the job restarts from its checkpoint, whichever of them TensorFlow raises."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from waiting import wait_for

import scaletier
from scaletier import asynchronous, checkpoint, private, savedmodel
from scaletier.asynchronous import Asynchronous
from scaletier.flags import flags_of
from scaletier.pipeline import ModelParallel
from scaletier.synchronous import Synchronous
from scaletier.tensorflow_setup import import_tensorflow
from scaletier.training import Training

tf = import_tensorflow()
REMOTE = "Socket closed\nAdditional GRPC error information from remote target /job:ps/replica:0/task:0 while calling /X/Y:\n:"
ERRORS = {
    "UnavailableError": "Socket closed",
    "AbortedError": "Socket closed",
    "CancelledError": "Socket closed",
    "DeadlineExceededError": "Socket closed",
    "InternalError": "Socket closed",
    "UnknownError": f"{REMOTE}UNKNOWN:Connection reset",
    "InvalidArgumentError": "Unable to find the relevant tensor remote_handle: Op ID: 28",
    "FailedPreconditionError": f"Collective ops is aborted by: Device /job:worker/replica:0/task:0 {private._RESTARTED}.",
    "NotFoundError": "'f_8' is neither a type of a primitive operation nor a name of a function registered in binary",
}
# Errors of the program: the data's Python code, also on another host, and the content of a batch.
FAILURES = {
    "UnknownError": f"{REMOTE}UNKNOWN:Error received from peer ipv4:10.0.0.2:2222 {{grpc_status:2}}",
    "InvalidArgumentError": "Received a label value of 2 which is outside the valid range of [0, 2)",
    "NotFoundError": "/data/train; No such file or directory",
}
CLUSTER = {"cluster": {"chief": ["a:1"], "worker": ["b:1"]}, "task": {"type": "chief", "index": 0}}


@pytest.fixture(params=ERRORS)
def error(request: pytest.FixtureRequest) -> Exception:
    """Return one of the errors."""
    instance: Exception = getattr(tf.errors, request.param)(None, None, ERRORS[request.param])
    return instance


def exit_code_of(error: Exception, strategy: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the exit code of a process whose training ends by this error."""
    monkeypatch.setattr(importlib.import_module("scaletier.run"), "_perform", MagicMock(side_effect=error))
    return scaletier.main(scaletier.Job(None, None), [f"--strategy={strategy}"])


def test_a_lost_host_is_a_restart(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TF_CONFIG", json.dumps(CLUSTER))
    assert exit_code_of(error, "sync", monkeypatch) == 143
    assert capsys.readouterr().err.startswith("error: a host of the cluster is lost: ")


@pytest.mark.parametrize("code", FAILURES)
def test_an_error_of_the_program_is_a_failure(
    code: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TF_CONFIG", json.dumps(CLUSTER))
    assert exit_code_of(getattr(tf.errors, code)(None, None, FAILURES[code]), "sync", monkeypatch) == 2
    assert capsys.readouterr().err.startswith("error: a batch of the job cannot be made")


def test_a_precondition_of_the_program_is_no_lost_host() -> None:
    assert not private.is_lost_host(tf.errors.FailedPreconditionError(None, None, "/data is a directory"))


def test_a_single_host_reports_no_lost_peer(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TF_CONFIG", "")
    if isinstance(error, tf.errors.InternalError):
        with pytest.raises(tf.errors.InternalError):
            exit_code_of(error, "async", monkeypatch)
    else:
        assert exit_code_of(error, "async", monkeypatch) == 143
        assert capsys.readouterr().err.startswith("error: a service that the job uses does not answer: ")


def run_strategy(strategy: Any, **attributes: Any) -> MagicMock:
    """Run a strategy whose training fails, and return its chief."""
    instance = strategy.__new__(strategy)
    instance.chief = instance.state = MagicMock()
    for name, value in attributes.items():
        setattr(instance, name, value)
    with pytest.raises(tf.errors.OpError):
        instance.run()
    chief: MagicMock = instance.chief
    return chief


def test_the_messages_of_a_restarted_peer_exist_in_tensorflow() -> None:
    """The coordinator recognizes lost workers by the same texts."""
    source = inspect.getsource(importlib.import_module("tensorflow.python.distribute.coordinator.cluster_coordinator"))
    source = re.sub(r'"\s*\n\s*"', "", source)
    assert all(text in source for text in (private._REMOTE, *private._FORGOTTEN))
    assert private._RESTARTED.encode() in Path(tf.sysconfig.get_lib(), "libtensorflow_framework.so.2").read_bytes()


def test_the_chief_saves_its_state_without_the_lost_host(error: Exception) -> None:
    """`save_on_error` reads parameters from other hosts; the strategies must not do that here."""
    fails = MagicMock(side_effect=error)
    sync = run_strategy(Synchronous, rounds=fails, all_finite=lambda: True)
    sync.rescue.assert_called_once()
    rescue = MagicMock()
    attributes = {"worker_count": 0, "servers": None, "devices": ("/device:CPU:0",), "graphs": MagicMock()}
    async_chief = run_strategy(Asynchronous, **attributes, rounds=fails, rescue=rescue)
    rescue.assert_called_once()
    pipeline = run_strategy(ModelParallel, rounds=fails)
    pipeline.rescue.assert_not_called()
    for chief in (sync, async_chief, pipeline):
        chief.save_on_error.assert_not_called()


LONG, STUCK = asynchronous._LONG_SECONDS, asynchronous._STUCK_SECONDS
LOST = tf.errors.UnavailableError(None, None, ERRORS["UnavailableError"])
FAILED = tf.errors.ResourceExhaustedError(None, None, "of the program")


def is_ended(looks: Sequence[tuple[float, Exception | None]], monkeypatch: pytest.MonkeyPatch, *, calls: bool = True) -> bool:
    """Return True if the process ends while the master calls the servers, with these errors after so many seconds each."""
    training, clock, remaining = Asynchronous.__new__(Asynchronous), SimpleNamespace(now=100.0), list(looks)
    servers, exits, training._call_start = MagicMock(), list[int](), None

    def wait(_seconds: float) -> bool:
        if exits or not remaining:
            return True
        seconds, servers.find_lost_host.return_value = remaining.pop(0)
        clock.now += seconds
        return False

    monkeypatch.setattr("scaletier.asynchronous.time.monotonic", lambda: clock.now)
    monkeypatch.setattr("scaletier.asynchronous.exit_process", exits.append)
    with training._calls_servers() if calls else contextlib.nullcontext():
        training._end_if_stuck(servers, MagicMock(wait=wait))
    assert exits in ([], [143])
    return bool(exits)


@pytest.mark.parametrize(
    ("looks", "ends"),
    [
        ([(1000, None), (1000, None)], False),  # a long round
        ([(1000, FAILED), (STUCK + 1, FAILED)], False),
        ([(LONG, LOST), (STUCK - LONG, LOST)], False),  # it may end by itself, and the master then saves what it holds
        ([(1000, LOST), (STUCK, LOST)], False),
        ([(1000, LOST), (STUCK + 1, LOST)], True),
        ([(1000, LOST), (STUCK, None), (1, LOST), (STUCK, LOST)], False),  # the server answered again
        ([(1000, LOST), (STUCK, None), (1, LOST), (STUCK + 1, LOST)], True),
    ],
)
def test_a_call_that_a_lost_host_never_answers_ends_the_process(
    looks: list[tuple[float, Exception | None]], ends: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The master's thread is in it, so that it cannot end the job itself."""
    assert is_ended(looks, monkeypatch) == ends
    assert capsys.readouterr().err.startswith("error: a host of the cluster is lost: ") == ends
    assert not is_ended(looks, monkeypatch, calls=False), "the master saves what it holds"


def test_training_with_parameter_servers_runs_beside_what_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    training, begun = Asynchronous.__new__(Asynchronous), threading.Event()
    training.worker_count, training.workers, training.devices, training.graphs = 0, None, ("/device:CPU:0",), MagicMock()
    training.chief, training.job, training.servers = MagicMock(), MagicMock(callbacks=None), MagicMock()

    def end_if_stuck(servers: Any, ended: threading.Event) -> None:
        assert servers is training.servers
        begun.set()
        ended.wait()
        begun.clear()

    monkeypatch.setattr(training, "_end_if_stuck", end_if_stuck)
    monkeypatch.setattr(Training, "run", lambda _self: wait_for(begun.is_set, "the thread runs", poll=0.01))
    training.run()
    wait_for(lambda: not begun.is_set(), "the thread has ended", poll=0.01)


@pytest.mark.parametrize("call", ["run_round", "pull"])
def test_each_call_of_the_parameter_servers_is_noted(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    training, starts = Asynchronous.__new__(Asynchronous), list[float | None]()
    training.name, training._call_start = "master/0", None
    training.job, training.network, training.state, training.graphs = MagicMock(callbacks=None), None, MagicMock(), {(): None}
    training.flags, training.host_count, training.servers = flags_of(["--max-steps=9"]), 2, MagicMock()
    calls = MagicMock(side_effect=lambda *_: starts.append(training._call_start))
    if call == "pull":
        training.pull = calls
        monkeypatch.setattr(Training, "refresh", lambda _self: 1)
        training.refresh()
    else:
        monkeypatch.setattr(asynchronous, "run_round", calls)
        training._replica("worker/0", None, (), print, []).run_round(1, 1)
        training._replica("master/0", None, (), print, []).run_round(1, 1)
        assert starts.pop(0) is None
    assert starts != [None]
    assert training._call_start is None


@pytest.mark.parametrize("step", [0, 8])
def test_every_replica_starts_from_the_chief_s_values(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the optimizer's variables if the job resumes; at its start they are equal everywhere."""
    synchronous, slot, fixed, weight = Synchronous.__new__(Synchronous), tf.Variable(1.0), tf.Variable(2.0), tf.Variable(3.0)
    calls = MagicMock()
    synchronous.job, synchronous.flags, synchronous.data_position = (
        SimpleNamespace(callbacks=None),
        flags_of(["--max-steps=9"]),
        SimpleNamespace(first_step=2),
    )
    local = [SimpleNamespace(name=name, variable=SimpleNamespace(path=name)) for name in ("slot", "fixed")]
    synchronous.network = SimpleNamespace(shared=[], local=local, ema_slots={}, compiles=False)
    synchronous.index, synchronous.host_count, synchronous.devices = 1, 2, ("/device:CPU:0",) * 2
    synchronous.state, synchronous.source, calls.source.training_batches.return_value = calls.state, calls.source, []
    synchronous.state.shared, synchronous.state.local, synchronous.state.constants, synchronous.state.step = (
        [weight],
        [slot, fixed],
        [fixed],
        step,
    )
    synchronous._broadcast = calls.broadcast
    monkeypatch.setattr(tf, "function", lambda function, **_: function)
    monkeypatch.setattr("scaletier.synchronous.AllReduce", MagicMock())
    monkeypatch.setattr("scaletier.synchronous.make_round", MagicMock())
    assert synchronous.begin(0).step == step
    assert [name for name, *_ in calls.mock_calls] == [
        "broadcast",
        "broadcast",
        "state.set_constants",
        "source.training_batches",
    ]
    calls.source.training_batches.assert_called_once_with(1, 2, step - 2)
    assert [call.args[0] for call in calls.broadcast.call_args_list] == [
        [step, 2],
        [weight, slot, fixed] if step else [weight, fixed],
    ]
    assert [float(value) for variables in synchronous.variables for value in variables.local] == [1.0, 2.0] * 2


@pytest.mark.parametrize("chief", [True, False])
def test_only_the_chief_contributes_values(chief: bool) -> None:
    synchronous, summed = Synchronous.__new__(Synchronous), list[Any]()
    synchronous.is_chief, variables = chief, [tf.Variable([1.0, 2.0]), tf.Variable(7, dtype=tf.uint32)]
    synchronous.all_reduce_sum = lambda value: summed.append((value.numpy().tolist(), value.dtype)) or value + 1
    synchronous._broadcast(variables)
    assert summed == [([1.0, 2.0] if chief else [0.0, 0.0], tf.float32), (7 if chief else 0, tf.int64)]
    assert [value.numpy().tolist() for value in variables] == ([[2.0, 3.0], 8] if chief else [[1.0, 1.0], 1])
    synchronous.all_reduce_sum = lambda value: tf.debugging.assert_type(value, tf.float64) or value
    synchronous._broadcast([number := tf.Variable(0.5 + 0.25j)])
    assert number.numpy() == (0.5 + 0.25j if chief else 0)


def test_a_lost_host_is_no_full_disk(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = MagicMock(side_effect=error)
    saver = checkpoint.Saver({}, tf.Variable(1), str(tmp_path), 1)
    monkeypatch.setattr(saver._manager, "save", fails)
    with pytest.raises(type(error)):
        saver.save()
    monkeypatch.setattr(tf.saved_model, "save", fails)
    with pytest.raises(type(error)):
        savedmodel.export(SimpleNamespace(serve=None), str(tmp_path))
