"""Errors that mean a lost host: the job starts again from what is saved, whichever of them TensorFlow raises."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

import scaletier
from scaletier import checkpoint, savedmodel
from scaletier.asynchronous import Asynchronous
from scaletier.pipeline import ModelParallel
from scaletier.runtime import import_tensorflow
from scaletier.synchronous import Synchronous

tf = import_tensorflow()
ERRORS = ("UnavailableError", "AbortedError", "CancelledError", "DeadlineExceededError", "InternalError")
CLUSTER = {"cluster": {"chief": ["a:1"], "worker": ["b:1"]}, "task": {"type": "chief", "index": 0}}


@pytest.fixture(params=ERRORS)
def error(request: pytest.FixtureRequest) -> Exception:
    """One of the errors."""
    made: Exception = getattr(tf.errors, request.param)(None, None, "Socket closed")
    return made


def end_by(error: Exception, strategy: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the exit code of a process whose training ends by this error."""
    monkeypatch.setattr(importlib.import_module("scaletier.run"), "_runner", lambda *_: MagicMock(side_effect=error))
    return scaletier.main(scaletier.Job(None, None), [f"--strategy={strategy}"])


def test_a_lost_host_is_a_restart(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TF_CONFIG", json.dumps(CLUSTER))
    assert end_by(error, "sync", monkeypatch) == 143
    assert capsys.readouterr().err == "error: a host of the cluster is lost: Socket closed\n"


def test_a_single_host_loses_no_other(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TF_CONFIG", "")
    if isinstance(error, tf.errors.InternalError):
        with pytest.raises(tf.errors.InternalError):
            end_by(error, "async", monkeypatch)
    else:
        assert end_by(error, "async", monkeypatch) == 143
        assert capsys.readouterr().err == "error: a service that the job uses does not answer: Socket closed\n"


def run_strategy(strategy: Any, **attributes: Any) -> MagicMock:
    """Run a strategy whose training fails, and return its keeper."""
    made = strategy.__new__(strategy)
    made._keeper = MagicMock()
    for name, value in attributes.items():
        setattr(made, name, value)
    with pytest.raises(tf.errors.OpError):
        made.run()
    keeper: MagicMock = made._keeper
    return keeper


def test_what_the_chief_holds_is_saved_without_the_lost_host(error: Exception) -> None:
    """`keep` asks other hosts for the parameters; the strategies must not do that here."""
    fails = MagicMock(side_effect=error)
    sync = run_strategy(Synchronous, _train=fails)
    sync.rescue.assert_called_once()
    rescue = MagicMock()
    attributes = {"_workers": 0, "_devices": ("/device:CPU:0",), "_rounds": MagicMock(), "_iterator": None}
    asynchronous = run_strategy(Asynchronous, **attributes, _replica=MagicMock(), _train=fails, _rescue=rescue)
    rescue.assert_called_once()
    parts = {"_flags": SimpleNamespace(max_steps=8), "step": 0, "_iterator": None, "_network": None}
    pipeline = run_strategy(ModelParallel, **parts, _train=fails)
    for keeper in (sync, asynchronous, pipeline):
        keeper.keep.assert_not_called()


def test_every_replica_begins_with_what_the_chief_has() -> None:
    made = Synchronous.__new__(Synchronous)
    calls = MagicMock()
    made._copy_chief, made._copy, made._leave = calls.take_over, calls.copy, calls.leave
    made._keeper, made._flags = None, SimpleNamespace(max_steps=0)
    made.own = made._owns = [tf.Variable(1)]
    made.step = 0
    made._train()
    assert [name for name, *_ in calls.mock_calls] == ["take_over", "copy.fix", "leave"]


@pytest.mark.parametrize("chief", [True, False])
def test_the_chief_gives_its_values_and_the_others_none(chief: bool) -> None:
    made, sent = Synchronous.__new__(Synchronous), list[Any]()
    made._chief, made.shared, made.step = chief, [tf.Variable([1.0, 2.0])], tf.Variable(7)
    made._copy = SimpleNamespace(fixed=[tf.Variable(3)])
    made._all_reduce = lambda value: sent.append(value.numpy().tolist()) or value + 1
    made._take_over()
    assert sent == ([[1.0, 2.0], 3, 7] if chief else [[0.0, 0.0], 0, 0])
    assert (made.shared[0].numpy().tolist(), int(made.step)) == (([2.0, 3.0], 8) if chief else ([1.0, 1.0], 1))


def test_a_lost_host_is_no_full_disk(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = MagicMock(side_effect=error)
    place = checkpoint.Place(tf.data.Dataset.range(1), None)
    saver = checkpoint.Saver({}, tf.Variable(1), str(tmp_path), 1, place)
    monkeypatch.setattr(saver._manager, "save", fails)
    with pytest.raises(type(error)):
        saver.save()
    monkeypatch.setattr(tf.saved_model, "save", fails)
    with pytest.raises(type(error)):
        savedmodel.export(SimpleNamespace(serve=None), str(tmp_path))
