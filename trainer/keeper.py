"""What a job's chief does besides training, whatever the strategy: it evaluates, saves, shows and exports the model."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from trainer import checkpoint, findings
from trainer.corrupt import Segment, segments
from trainer.data import DataError, check, find_files
from trainer.evaluation import Metrics, make_evaluate
from trainer.export import export
from trainer.flags import Flags
from trainer.lines import EvalInterval, eval_line, final_line
from trainer.model import Model
from trainer.runtime import import_tensorflow, one_line, say
from trainer.summaries import Summaries

tf = import_tensorflow()


class PreemptedError(RuntimeError):
    """The chief was told to end before the job's last step."""


class Figures(Protocol):
    """What a strategy tells of its last step or round: the global step after it, mean loss in nats, mean accuracy."""

    @property
    def global_step(self) -> int: ...
    @property
    def loss(self) -> float: ...
    @property
    def accuracy(self) -> float: ...


class Trained(Protocol):
    """The model as a strategy trains it: `variables` by name are what is saved and exported, `step` is theirs."""

    @property
    def variables(self) -> Mapping[str, Any]: ...
    @property
    def step(self) -> Any: ...

    def logits(self, images: Any) -> Any:
        """Images, float32 [N, 784], to float32 [N, 10], by the variables as they are."""

    def refresh(self) -> int:
        """Brings `variables` and `step` up to date; the global step. DivergedError where they are no longer numbers."""


def training_data(flags: Flags) -> list[Segment]:
    """The training data; DataError where there is none, or less than a batch."""
    files = segments(find_files(flags.train_data, "train"), flags.skip_corrupt_records)
    check(files, flags.batch_size)
    return files


def evaluation_data(flags: Flags) -> list[Segment]:
    """The data to evaluate on; DataError where there is none."""
    files = segments(find_files(flags.eval_data, "test"), flags.skip_corrupt_records)
    check(files, 1)
    return files


class Keeper:
    """Keeps the model of one job. It is made once the process is connected, for it has variables.

    The constructor raises DataError where nothing can be written to the job's directory.
    """

    def __init__(self, flags: Flags, model: Model, trained: Trained, files: list[Segment], step: int) -> None:
        try:
            tf.io.gfile.makedirs(flags.job_dir)
        except tf.errors.OpError as error:
            raise DataError(f"--job-dir {flags.job_dir} cannot be made: {one_line(error)}") from None
        self._flags, self._model, self._trained = flags, model, trained
        self._saver = checkpoint.Saver(trained.variables, trained.step, flags.job_dir, flags.keep_checkpoints)
        self._evaluate = make_evaluate(trained.logits, files)
        self._files = files
        self._interval = EvalInterval(flags.eval_interval)
        self.summaries = Summaries(flags.job_dir)
        self._summarized = (time.monotonic(), step)
        self._saved = (time.monotonic(), step)
        if step >= flags.max_steps:
            say(f"Nothing is left to train: step {step} is not below --max-steps {flags.max_steps}")
        self._preempted = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: self._preempted.set())

    def after(self, taken: Figures, more: Callable[[], Mapping[str, float]] = dict) -> None:
        """What is due after a round of steps; `more` gives further scalars, whenever some are shown.

        Raises PreemptedError, once a checkpoint is saved, where this process was told to end, and DivergedError.
        """
        if self._preempted.is_set():
            self.save()
            raise PreemptedError(f"told to end at step {taken.global_step}; a checkpoint is saved")
        now = time.monotonic()
        since, step = self._summarized
        if now - since >= self._flags.log_interval:
            rate = (taken.global_step - step) / (now - since)
            scalars = {"loss": taken.loss, "accuracy": taken.accuracy, "steps_per_second": rate, **more()}
            self.summaries.scalars(taken.global_step, **scalars)
            self._summarized = (now, taken.global_step)
        if taken.global_step < self._flags.max_steps and self._interval.due(now):
            step = self._trained.refresh()
            metrics = self._measure(step)
            say(eval_line(step, metrics.loss, metrics.accuracy))
            adjusted = self._interval.record(now, time.monotonic())
            if adjusted:
                say(adjusted)
        saved_at, saved_step = self._saved
        seconds = self._flags.checkpoint_seconds
        if taken.global_step - saved_step >= self._flags.checkpoint_steps or (seconds and now - saved_at >= seconds):
            self.save()

    def finish(self) -> None:
        """Saves, exports and evaluates the model that the job came to, and leaves what was found in evaluation.json."""
        step = self.save()
        say(f"Exporting prediction graph to {export(self._model, self._trained.variables, self._flags.job_dir)}")
        metrics = self._measure(step)
        if problem := findings.write(self._flags.job_dir, step, metrics, findings.classes(self._files[0].file)):
            say(problem)
        say(final_line(step, metrics.loss, metrics.accuracy))

    def save(self) -> int:
        """Writes a checkpoint, unless there is one of this step; the step."""
        step = self._trained.refresh()
        if step != self._saved[1]:
            self._saver.save()
        self._saved = (time.monotonic(), step)
        return step

    def _measure(self, step: int) -> Metrics:
        metrics = self._evaluate()
        self.summaries.scalars(step, eval__loss=metrics.loss, eval__accuracy=metrics.accuracy)
        self.summaries.mistakes(step, metrics.mistakes)
        return metrics
