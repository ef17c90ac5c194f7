"""The chief's work besides training, for every strategy: evaluate, save, log and export the model."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from scaletier import checkpoint
from scaletier.data import BatchSource, DataError
from scaletier.evaluation import Measured, make_evaluate
from scaletier.flags import Flags
from scaletier.job import Job
from scaletier.lines import EvalInterval, eval_line, final_line
from scaletier.local_steps import DivergedError, Round
from scaletier.network import Batch, FunctionalModel
from scaletier.runtime import import_tensorflow, one_line, say
from scaletier.savedmodel import export, save_model, served
from scaletier.summaries import Summaries

tf = import_tensorflow()


class PreemptedError(RuntimeError):
    """The chief was told to end before the job's last step."""


class Trained(Protocol):
    """The trained model of a strategy: its variables by their names in checkpoints, and its step."""

    @property
    def variables(self) -> Mapping[str, Any]: ...
    @property
    def shared(self) -> Sequence[Any]: ...
    @property
    def own(self) -> Sequence[Any]: ...
    @property
    def step(self) -> Any: ...

    def initial_test(self) -> Sequence[Any]:
        """Return the state before an evaluation's first batch."""

    def test(self, state: Sequence[Any], batch: Batch) -> tuple[Any, Any, Sequence[Any], Any]:
        """Evaluate a batch by the variables as they are."""

    def refresh(self) -> int:
        """Update the variables and the step; return the global step.

        Raises:
            DivergedError: the variables are no numbers.
        """


class ChiefTasks:
    """Keeps the model of one job. It is made once the process is connected, for it has variables.

    `inputs` is the spec of the model's, `evaluated` what to evaluate on, `position` where the job's data began, and `step`
    what the job goes on from. The constructor raises DataError where nothing can be written to the job's directory, and
    JobError if the export is not possible.
    """

    def __init__(
        self,
        job: Job,
        flags: Flags,
        network: FunctionalModel,
        trained: Trained,
        inputs: Any,
        evaluated: BatchSource | None,
        position: checkpoint.DataPosition,
        step: int,
    ) -> None:
        try:
            tf.io.gfile.makedirs(flags.job_dir)
        except tf.errors.OpError as error:
            raise DataError(f"--job-dir {flags.job_dir} cannot be made: {one_line(error)}") from None
        self._flags, self._network, self._trained = flags, network, trained
        self._served = served(job, network, trained.shared, trained.own, inputs)
        variables = {**trained.variables, **position.variables}
        self._saver = checkpoint.Saver(variables, trained.step, flags.job_dir, flags.keep_checkpoints)
        self._evaluate = None
        if evaluated is not None:
            self._evaluate = make_evaluate(network, trained, evaluated.once(), job.inspector)
        self._interval = EvalInterval(flags.eval_interval)
        self._evaluated_step = step
        self.summaries = Summaries(flags.job_dir)
        self._summarized = (time.monotonic(), step)
        self._saved = (time.monotonic(), step)
        self._callbacks = job.callbacks
        if self._callbacks:
            network.attach(trained.shared, trained.own)
            self._callbacks.begin(network, trained.own, flags, step)
        if step >= flags.max_steps:
            say(f"Nothing is left to train: step {step} is not below --max-steps {flags.max_steps}")
        self._preempted = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: self._preempted.set())

    def after(
        self,
        taken: Round,
        more: Callable[[], Mapping[str, float]] = dict,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """Do what is due after a round of steps.

        `more` gives further scalars, whenever some are written, and `release` resumes the replicas that wait for
        an evaluation by steps.

        Raises:
            PreemptedError: this process is to end; a checkpoint is saved.
            DivergedError: the model is no numbers.
        """
        self._end_if_told()
        if self._callbacks:
            self._callbacks.add(taken)
        now = time.monotonic()
        since, step = self._summarized
        if now - since >= self._flags.log_interval:
            rate = (taken.global_step - step) / (now - since)
            scalars = {"loss": taken.loss, **taken.metrics, "steps_per_second": rate, **more()}
            self.summaries.scalars(taken.global_step, scalars)
            self._summarized = (now, taken.global_step)
        if (self._evaluate or self._callbacks) and taken.global_step < self._flags.max_steps:
            if self._flags.eval_steps is None:
                self._evaluate_by_time(now)
            elif taken.global_step // self._flags.eval_steps > self._evaluated_step // self._flags.eval_steps:
                self._evaluated_step = self._evaluate_now()
                release()
            self._end_if_told()
        saved_at, saved_step = self._saved
        if taken.global_step - saved_step >= self._flags.checkpoint_steps or now - saved_at >= self._flags.checkpoint_seconds:
            self.save()

    def _end_if_told(self) -> None:
        if self._preempted.is_set():
            raise PreemptedError(f"told to end at step {self.save()}; a checkpoint is saved")

    def _evaluate_by_time(self, now: float) -> None:
        if self._interval.due(now):
            self._evaluate_now()
            adjusted = self._interval.record(now, time.monotonic())
            if adjusted:
                say(adjusted)

    def _evaluate_now(self) -> int:
        step = self._trained.refresh()

        def evaluate() -> Measured | None:
            if measured := self._measure(step, self._preempted.is_set):
                say(eval_line(step, measured.loss, measured.metrics))
            return measured

        if self._callbacks:
            self._callbacks.end_epoch(step, evaluate if self._evaluate else None)
        else:
            evaluate()
        return step

    @property
    def stopped(self) -> bool:
        """True once a callback has ended training."""
        return self._callbacks is not None and self._callbacks.stopped

    def finish(self, loss: float | None) -> None:
        """Save, export and evaluate the final model; `loss` is the last of training, if there was any."""
        step = self.save()
        if self._callbacks and self._callbacks.pending:
            self._evaluate_now()
        if self._network.averages:
            self._average()
        if self._callbacks:
            self._callbacks.end()
        try:
            exported = export(self._served, self._flags.job_dir)
            say(f"Exporting prediction graph to {exported}")
            if self._callbacks:
                save_model(self._network.model, self._flags.job_dir)
        finally:  # what it came to is told all the same
            if measured := self._measure(step, last=True):
                say(final_line(step, measured.loss, measured.metrics))
            elif loss is not None:
                say(final_line(step, loss, {}))

    def _average(self) -> None:
        """Give the weights their averages, as `fit` does at its end; the checkpoint has both."""
        trained = self._trained.shared[: len(self._network.trained)]
        slots = self._trained.own[len(self._trained.own) - len(self._network.slots) :]
        for variable, value in zip(trained, self._network.averaged(trained, slots), strict=True):
            with tf.device(variable.device):
                variable.assign(value, read_value=False)

    def save(self) -> int:
        """Write a checkpoint unless this step has one; return the step."""
        step = self._trained.refresh()
        if step != self._saved[1]:
            self._saver.save()
        self._saved = (time.monotonic(), step)
        return step

    def keep(self) -> None:
        """Save the trained model before an error ends the job; suppress a second error.

        The caller raises the first one.
        """
        with contextlib.suppress(DataError, DivergedError, tf.errors.OpError):
            before = self._saved[1]
            if (step := self.save()) > before:
                say(f"A checkpoint of step {step} is saved")

    def rescue(self) -> None:
        """Save the chief's values once others are lost, if they are newer than the last checkpoint."""
        step = int(self._trained.step)
        if step > self._saved[1]:
            self._saver.save()
            say(f"A checkpoint of step {step} is saved, of what this host holds")

    def _measure(self, step: int, stopped: Callable[[], bool] = lambda: False, last: bool = False) -> Measured | None:
        """Return an evaluation's result; None if there is no data for it, or it was stopped."""
        measured = self._evaluate(stopped) if self._evaluate else None
        if measured:
            measured.tell(step, self.summaries, self._flags.job_dir, last)
        return measured
