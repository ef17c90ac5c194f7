"""The epochs of `fit` on the chief: each ends once, in order, however fast the other replicas are."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import keras
import pytest
import tensorflow as tf

from scaletier import training
from scaletier.callbacks import Callbacks
from scaletier.evaluation import EvaluationResult
from scaletier.flags import flags_of
from scaletier.job import JobError
from scaletier.loop import ReplicaLoop, Round, StepBudget, run_rounds
from scaletier.sync_period import SyncPeriod
from scaletier.synchronous import Synchronous
from scaletier.training import ChiefTasks


class Job:
    """A job of which the chief is real, but for its model; `others` play the other replicas, while the chief evaluates.

    Attributes:
        calls: the hooks that were called, with their epochs.
        step: the global step.
        limits: the steps that the others reach during each evaluation.
        ahead: the steps that the others may be ahead of the chief's epoch while it trains.
        multiple: a round has a multiple of these steps, as with `sync`.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        steps: int,
        every: int,
        replicas: int = 1,
        resumed: tuple[int, Sequence[int]] = (0, ()),
        others: Callable[[Job], None] = lambda job: None,
        stop: str = "",
        multiple: int = 1,
    ) -> None:
        self.calls, self.limits, self.ahead, self.multiple = list[str](), list[int](), set[int](), multiple
        self.step, epochs = resumed
        called = self.calls

        class Records(keras.callbacks.Callback):  # type: ignore[misc]
            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                self.record(f"begin {epoch}")

            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                self.record(f"end {epoch}")

            def record(self, call: str) -> None:
                called.append(call)
                self.model.stop_training |= call == stop

        model = keras.Sequential()
        model.compile("sgd")
        network: Any = SimpleNamespace(
            replicas=1, learning_rates=[], local=[], metric_shapes={}, trained=[], model=model, initial_metrics=list
        )
        self.callbacks = Callbacks([Records()], None, every)
        flags = self.callbacks.plan(flags_of([f"--max-steps={steps}"]), None)
        self.budget = StepBudget(self.step, steps, replicas, every)
        chief = self.chief = ChiefTasks.__new__(ChiefTasks)
        chief._callbacks, chief._flags, chief._network, chief._state = self.callbacks, flags, network, MagicMock()
        chief._training = SimpleNamespace(refresh=lambda: self.step, budget=self.budget)  # type: ignore[assignment]
        chief._preempted, chief._saver, chief._serving_module = MagicMock(is_set=lambda: False), MagicMock(), None
        chief._last_summary = chief._last_save = float("inf"), steps

        def measure(*_: object, **__: object) -> EvaluationResult:
            others(self)
            self.limits.append(self.step)
            return EvaluationResult(1.0, {})

        chief._evaluate = chief._evaluate_and_report = measure  # type: ignore[method-assign, assignment]
        for name in ("save_model", "export"):
            monkeypatch.setattr(training, name, MagicMock())
        stored = json.dumps(
            {"callbacks": [["History", {"epoch": list(epochs), "history": {}}]], "rates": [], "given_rates": []}
        )
        reader: Any = SimpleNamespace(step=self.step, callbacks=stored) if self.step else None
        chief.next_eval_step = self.callbacks.begin(network, [], flags, reader)
        self.budget.allow_until(chief.next_eval_step)

    def run_round(self, steps: int, _live_hosts: int = 1) -> Round:
        self.step += steps + -steps % self.multiple
        return Round(steps, self.step, float(self.step), mean_loss=float(self.step))

    def train_others(self, until: int) -> None:
        """Let another replica take all steps until this one."""
        while self.step < until:
            self.run_round(self.budget.reserve("worker/0", 8))
            self.budget.commit("worker/0", self.step)

    def run(self) -> Job:
        for result in run_rounds(
            ReplicaLoop("master/0", self.run_round, SyncPeriod(8, True), 1e9, {"master/0": lambda _: None}), self.budget
        ):
            self.ahead.add(self.budget._until - min(self.chief.next_eval_step, self.chief._flags.max_steps))
            self.chief.run_due(result)
            if self.chief.stopped:
                break
        self.chief.finish(1.0)
        return self

    @property
    def epochs(self) -> list[int]:
        return list(self.callbacks.history.epoch)


def in_order(first: int, end: int) -> list[str]:
    return [f"{kind} {epoch}" for epoch in range(first, end) for kind in ("begin", "end")]


def test_each_epoch_ends_once_while_other_replicas_train_through_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def others(job: Job) -> None:
        job.train_others(min(20 * (len(job.limits) + 2), 99))

    job = Job(monkeypatch, 100, 20, 3, others=others).run()
    assert job.calls == in_order(0, 5)
    assert job.limits[:4] == [40, 60, 80, 99], "an epoch ahead of the chief, to which the last step is left"
    assert job.ahead == {0}
    assert job.step == 100
    assert job.callbacks.history.history["loss"][-1] == 100.0, "the chief has trained in the last epoch"


def test_epochs_that_are_shorter_than_a_round_end_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, 12, 2, multiple=3).run()
    assert job.calls == in_order(0, 6)
    assert job.callbacks.history.history["loss"] == [3.0, 6.0, 6.0, 9.0, 12.0, 12.0]


@pytest.mark.parametrize(
    ("step", "ended", "steps", "every", "epochs"),
    [
        pytest.param(47, [0, 1], 100, 20, [2, 3, 4], id="within an epoch"),
        pytest.param(40, [0, 1], 100, 20, [2, 3, 4], id="between two epochs"),
        pytest.param(40, [0], 100, 20, [1, 2, 3, 4], id="stopped during an evaluation"),
        pytest.param(59, [0], 100, 20, [1, 2, 3, 4], id="stopped during an evaluation, with others ahead"),
        pytest.param(100, [0, 1, 2, 3], 100, 20, [4], id="stopped before the end of the last epoch"),
        pytest.param(50, [0, 1], 50, 20, [2], id="stopped before the end of a short last epoch"),
        pytest.param(9, [0, 1], 24, 6, [2, 3], id="extended within an epoch"),
        pytest.param(9, [0, 1], 11, 6, [2], id="extended within the same epoch"),
        pytest.param(9, [0, 1], 9, 6, [], id="complete"),
        pytest.param(100, [0, 1, 2, 3, 4], 100, 20, [], id="complete, with whole epochs"),
        pytest.param(300, [0, 1, 2], 330, 10, [3, 4, 5], id="with shorter epochs"),
        pytest.param(300, list(range(30)), 500, 100, [30, 31], id="with longer epochs"),
        pytest.param(45, [], 100, 20, [2, 3, 4], id="without a history"),
    ],
)
def test_a_job_that_resumes_ends_each_epoch_that_is_left(
    step: int, ended: list[int], steps: int, every: int, epochs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(monkeypatch, steps, every, resumed=(step, ended)).run()
    assert job.epochs == ended + epochs
    assert job.calls == [call for epoch in epochs for call in in_order(epoch, epoch + 1)]
    assert job.step == steps


@pytest.mark.parametrize(
    ("stop", "epochs", "steps"),
    [("begin 0", 1, 1), ("end 0", 1, 20), ("begin 1", 2, 21), ("end 1", 2, 40), ("begin 4", 5, 81), ("end 4", 5, 100)],
)
def test_a_callback_that_ends_training_as_an_epoch_begins_has_a_step_of_it(
    stop: str, epochs: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(monkeypatch, 100, 20, stop=stop).run()
    assert job.calls == in_order(0, epochs)
    assert job.step == steps


def test_replicas_of_sync_end_after_the_first_round_of_an_epoch() -> None:
    """All of them call the broadcast in the same rounds, as only the chief knows of its callbacks."""
    replica, asked = Synchronous.__new__(Synchronous), list[int]()
    replica.budget, replica.job, replica.chief = StepBudget(0, 100, steps_between_evaluations=20), MagicMock(), None
    replica.epoch, replica.begins_epoch, replica.steps_per_epoch = 0, True, 20
    for step in range(4, 68, 4):
        replica.broadcast_rates = lambda _, step=step: asked.append(step)
        assert not replica.after_round(Round(4, step, 1.0))
    assert asked == [4, 20, 24, 40, 44, 60, 64]
    replica.broadcast_rates = lambda _: tf.constant(1.0)
    assert [replica.after_round(Round(4, step, 1.0)) for step in (68, 80, 84, 88)] == [False, True, True, False]


def test_an_export_that_fails_ends_a_job_but_not_the_program_of_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(monkeypatch, 2, 2)
    monkeypatch.setattr(training, "export", MagicMock(side_effect=JobError("it cannot be exported")))
    assert job.run().epochs == [0]
    assert capsys.readouterr().out.splitlines() == [
        "Eval, step 2: loss: 1.000",
        "There is no SavedModel: it cannot be exported",
        "Final metrics after 2 steps, loss: 1.000",
    ]
    job.chief._callbacks = None
    with pytest.raises(JobError, match=r"^it cannot be exported$"):
        job.chief.finish(1.0)
