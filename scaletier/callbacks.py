"""Call the hooks of Keras's callbacks on the chief: those of training, epochs and evaluations."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from scaletier.flags import Flags
from scaletier.job import JobError, kind_of
from scaletier.tensorflow_setup import ASSERT_CARDINALITY, import_tensorflow, say

if TYPE_CHECKING:  # the rest of the library imports TensorFlow
    from scaletier.checkpoint import CheckpointReader
    from scaletier.evaluation import EvaluationResult
    from scaletier.functional_model import FunctionalModel
    from scaletier.loop import Round

# The number of epochs if the number of batches is unknown.
_EPOCHS = 10
# The attributes of Keras's callbacks that a checkpoint keeps.
_STATE = ("best", "best_epoch", "wait", "cooldown_counter", "epoch", "history")
HOOKS = ("on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_test_begin", "on_test_end")
# Keras's `fit` does not call these either.
_PREDICT_HOOKS = ("on_predict_begin", "on_predict_end", "on_predict_batch_begin", "on_predict_batch_end")


class Callbacks:
    """The callbacks of one call of `fit`, or a function that makes them, and the epochs of the call.

    Attributes:
        history: the `keras.callbacks.History`, on the chief, once training begins.
        learning_rates: those that callbacks may have set, by their indices in the network's `local`.
        pauses_training: True if no replica trains during an evaluation.
        stride: each `stride`-th pass over the data is read, as in `data.BatchSource`.
    """

    history: Any = None
    learning_rates: Mapping[int, Any] = {}
    pauses_training = False

    def __init__(
        self,
        callbacks: Any = (),
        epochs: int | None = None,
        steps_per_epoch: int | None = None,
        data: Sequence[Any] = (None, None),
    ) -> None:
        self._callbacks, self._epochs, self._steps, self._data = callbacks, epochs, steps_per_epoch, data
        self.stride = 1 if steps_per_epoch else 2  # then an epoch is a pass
        self._rounds, self._metrics, self._carried = list[tuple[int, Mapping[str, Any]]](), list[Any](), list[Any]()

    def check(self) -> None:
        """Raise JobError for a callback with a hook that this library does not call."""
        import keras

        own, plain, callbacks = keras.callbacks, keras.callbacks.Callback, self._callbacks
        automatic = {
            own.BackupAndRestore: "checkpoints and resuming are automatic. Valid: fit without it; --checkpoint-steps "
            "sets how often",
            own.TensorBoard: "summaries are automatic, in JOB_DIR/summaries. Valid: fit without it. Run: fab tensorboard",
        }
        if callable(callbacks) and not isinstance(callbacks, plain):
            callbacks = callbacks()
        if isinstance(callbacks, Iterable) and not isinstance(callbacks, Sequence | Mapping):
            callbacks = list(callbacks)
        self._callbacks = [one for one in keras.tree.flatten(callbacks) if one is not None]
        for callback in self._callbacks:
            if not isinstance(callback, plain):
                raise JobError(f"the callback is invalid: it is {kind_of(callback)}. Valid: a keras.callbacks.Callback")
            name = f"the callback {type(callback).__name__} is invalid:"
            if line := next((line for kind, line in automatic.items() if isinstance(callback, kind)), None):
                raise JobError(f"{name} {line}")
            if isinstance(callback, own.ModelCheckpoint) and callback.save_freq != "epoch":
                raise JobError(f"{name} save_freq={callback.save_freq} counts batches. Valid: save_freq='epoch'")
            for hook in (one for one in dir(plain) if one.startswith("on_") and one not in (*HOOKS, *_PREDICT_HOOKS)):
                function = getattr(getattr(callback, hook), "__func__", None)
                # `run_rounds` ends training at a loss that is not finite, whether there is a TerminateOnNaN or not.
                if function not in (getattr(one, hook) for one in (plain, own.ModelCheckpoint, own.TerminateOnNaN)):
                    raise JobError(f"{name} it has {hook}, which is not called. Valid: {', '.join(HOOKS)}")

    def plan(self, flags: Flags, length: int | None, count: Callable[[], int] | None = None) -> Flags:
        """Return the flags with the steps of the job and of each epoch.

        `length` is the number of batches, None if it is unknown, and `count` a function that counts them.
        """
        self.pauses_training = flags.eval_steps is not None
        steps_per_epoch = flags.eval_steps or self._steps or length
        if not flags.max_steps and not steps_per_epoch and count:
            steps_per_epoch = count()
        if not flags.max_steps and not steps_per_epoch:
            line = f"epochs={self._epochs} is invalid: train_data does not say how many batches it has. Valid: steps, or"
            raise JobError(f"{line} steps_per_epoch beside it, or data with {ASSERT_CARDINALITY}")
        steps = flags.max_steps or (self._epochs or 1) * (steps_per_epoch or 1)
        steps_per_epoch = min(steps, steps_per_epoch or max(1, steps // _EPOCHS))
        if length and steps > length and length % steps_per_epoch:  # where `fit` of Keras ends the epoch
            say(f"An epoch has {steps_per_epoch} steps, and train_data {length} batches: it is repeated within an epoch")
        return replace(flags, max_steps=steps, eval_steps=steps_per_epoch)

    @functools.cached_property
    def state(self) -> Any:
        """The tf.Variable for checkpoints: the callbacks' state at the end of the last epoch, and this epoch's metrics."""
        tf = import_tensorflow()
        with tf.device("/device:CPU:0"):
            return tf.Variable("")

    def begin(self, network: FunctionalModel, local: Sequence[Any], flags: Flags, reader: CheckpointReader | None) -> int:
        """Start training, or resume from a checkpoint.

        Args:
            local: the network's `local` variables, as tf.Variables.

        Returns:
            The global step at which the present epoch ends.
        """
        import keras

        step = reader.step if reader else 0
        setters = keras.callbacks.ReduceLROnPlateau, keras.callbacks.LearningRateScheduler
        if not network.learning_rates and (refused := [one for one in self._callbacks if isinstance(one, setters)]):
            line = f"the callback {type(refused[0]).__name__} is invalid: the optimizer's learning rate is a schedule."
            raise JobError(f"{line} Valid: a learning rate that is a number")
        if network.replicas > 1 and any(isinstance(one, keras.callbacks.SwapEMAWeights) for one in self._callbacks):
            line = "the callback SwapEMAWeights is invalid: several replicas train, and average what they share. Valid:"
            raise JobError(f"{line} use_ema=True alone, whose average is exported, or one process")
        self._network, self._local, self._flags = network, local, flags
        steps_per_epoch = flags.eval_steps or 1
        epochs, network.model.stop_training = -(-flags.max_steps // steps_per_epoch), False
        self.history = keras.callbacks.History()
        callbacks = [*self._callbacks, self.history]
        trainable, numbers = _trainable_of(network.model), _settings_of(network.model)
        self._list = keras.callbacks.CallbackList(
            callbacks, model=network.model, epochs=epochs, steps=flags.eval_steps, verbose=0
        )
        for callback in callbacks if step else ():
            if isinstance(callback, keras.callbacks.CSVLogger):
                callback.append = True
        train_data, _ = self._data
        _call_hook(train_data, "on_epoch_end")  # as `fit` of Keras does before the first epoch, and before each evaluation
        self._list.on_train_begin()
        self._rate_indices = [at for at, spec in enumerate(network.local) if spec in network.learning_rates]
        stored = json.loads(reader.callbacks) if reader and reader.callbacks else {}
        if stored:
            self._restore(stored)
        self._ended = self._callbacks_state()
        self._logs: Mapping[str, Any] = dict.fromkeys(("loss", *network.metric_shapes), math.nan)
        at, begin = step // steps_per_epoch, step
        self._epoch = stored.get("epoch", self.history.epoch[-1] + 1 if self.history.epoch else at)
        if abs(self._epoch - at) <= 1:  # else the length of epochs has changed
            # The checkpoint may be of a job that ended within an epoch, or before the callbacks of a completed epoch.
            at = self._epoch
            begin = min(step, at * steps_per_epoch)
        self._begin_epoch(begin < flags.max_steps)
        if "metrics" in stored:
            self._restore_metrics(**stored["metrics"])
        changed = _trainable_of(network.model) != trainable or any(vars(one).get(name) != value for one, name, value in numbers)
        if not step and changed:  # what is set later has no effect in Keras either
            line = "a callback has changed what is trainable, or a setting of the optimizer, when training began. Valid:"
            raise JobError(f"{line} set them in the function that makes the model")
        return (at + 1) * steps_per_epoch

    def _given_rates(self) -> list[float]:
        return [float(self._network.initial(self._network.local[at])) for at in self._rate_indices]

    def _stateful(self) -> list[Any]:
        """Return the callbacks whose state a checkpoint keeps."""
        import keras.callbacks as own

        kinds = own.ModelCheckpoint, own.EarlyStopping, own.ReduceLROnPlateau, own.History
        return [one for one in (*self._callbacks, self.history) if isinstance(one, kinds)]

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Restore the callbacks' state from a checkpoint, and its learning rates unless the job's own have changed."""
        stored = list(state["callbacks"])
        for callback in self._stateful():
            name = type(callback).__name__
            if getattr(callback, "restore_best_weights", False):
                say(f"The callback {name} starts again: its best weights are in no checkpoint")
            elif match := next((one for one in stored if one[0] == name), None):
                stored.remove(match)
                vars(callback).update(match[1])
        for values in self.history.history.values():
            values[:] = [_as_logged(one) for one in values]
        if state["given_rates"] == self._given_rates():
            for at, rate in zip(self._rate_indices, state["rates"], strict=True):
                self._local[at].assign(rate)

    def _restore_metrics(self, steps: int, logs: Mapping[str, Any], carried: Sequence[Any]) -> None:
        """Continue the metrics of the epoch in which the checkpoint was written, if the model has the same metrics.

        `carried` are the values of the metrics' variables.
        """
        import numpy as np

        initial = self._network.initial_metrics()
        if set(logs) == set(self._logs):
            self._rounds.append((steps, {name: _as_logged(value) for name, value in logs.items()}))
            self._carried = list(carried) if [*map(np.shape, carried)] == [*map(np.shape, initial)] else []

    def store(self) -> None:
        """Update `state` for a checkpoint."""
        state = {**self._ended, "epoch": self._epoch}
        if self._rounds:
            steps, logs = self._total()
            carried = [one.numpy() for one in self._metrics]
            state["metrics"] = {"steps": steps, "logs": logs, "carried": carried}
        self.state.assign(json.dumps(state, default=_plain))

    def _total(self) -> tuple[int, Mapping[str, Any]]:
        """Return the number of steps of this epoch's rounds, and the metrics over them."""
        total = sum(steps for steps, _ in self._rounds)
        if self._metrics:
            return total, self._rounds[-1][1]
        return total, {name: sum(steps * each[name] for steps, each in self._rounds) / total for name in self._logs}

    def _callbacks_state(self) -> dict[str, Any]:
        """Return the state of the callbacks in a form that JSON can store."""
        callbacks = [
            (type(one).__name__, {key: value for key, value in vars(one).items() if key in _STATE}) for one in self._stateful()
        ]
        rates = [float(self._local[at]) for at in self._rate_indices]
        state = {"callbacks": callbacks, "given_rates": self._given_rates(), "rates": rates}
        copy: dict[str, Any] = json.loads(json.dumps(state, default=_plain))
        return copy

    def restore_metrics(self) -> list[Any]:
        """Restore, for a process that trains alone, the tf.Variables that keep metrics between rounds; return them."""
        tf = import_tensorflow()
        self._metrics = self._network.metrics
        for variable, value in zip(self._metrics, self._carried, strict=False):
            variable.assign(tf.cast(value, variable.dtype))
        return self._metrics

    @property
    def stopping(self) -> bool:
        """True if a callback has ended training."""
        return bool(self._network.model.stop_training)

    @property
    def stopped(self) -> bool:
        """True if a callback has ended training, and the present epoch has a round, as each epoch of Keras has a batch."""
        return self.stopping and (bool(self._rounds) or not self.in_epoch)

    @property
    def in_epoch(self) -> bool:
        """True if an epoch has begun and not ended."""
        return self._in_epoch

    def add(self, result: Round) -> None:
        """Add a round to the present epoch."""
        self._rounds.append((result.steps, {"loss": result.mean_loss, **result.metrics}))

    def end_epoch(self, step: int, evaluate: Callable[[], EvaluationResult | None] | None) -> None:
        """Evaluate at the end of an epoch, at a global step, and call the hooks; return if the evaluation was stopped.

        An epoch without a round, as with `sync` if a round has more steps than an epoch, has the metrics of the epoch before.
        """
        if self._rounds:
            _, self._logs = self._total()
        logs, (train_data, validation_data) = dict(self._logs), self._data
        _call_hook(train_data, "on_epoch_end")
        if evaluate:
            _call_hook(validation_data, "on_epoch_end")
            self._list.on_test_begin()
            _call_hook(validation_data, "on_epoch_begin")
            if (result := evaluate()) is None:
                return
            _call_hook(validation_data, "on_epoch_end")
            metrics = {"loss": result.loss, **result.metrics}
            self._list.on_test_end(metrics)
            logs |= {f"val_{name}": value for name, value in metrics.items()}
        self._list.on_epoch_end(self._epoch, logs)
        self._ended = self._callbacks_state()
        self._epoch += 1
        self._begin_epoch(step < self._flags.max_steps and not self.stopping)

    def _begin_epoch(self, begins: bool) -> None:
        self._rounds.clear()
        self._in_epoch = begins
        if begins:
            self._network.model.reset_metrics()
            self._list.on_epoch_begin(self._epoch)
            _call_hook(self._data[0], "on_epoch_begin")
        if self._network.model.train_function is not None:
            line = "a callback is invalid: it has called make_train_function, or fit, which change no step of a job."
            raise JobError(f"{line} Valid: one that sets the learning rate, or variables that the model reads")
        self.learning_rates = {at: self._local[at].numpy() for at in self._rate_indices}

    def end(self) -> None:
        """End training; a callback may then set other weights of the model."""
        self._list.on_train_end()


def _plain(value: Any) -> Any:
    """Convert a value that JSON cannot store to a number, a list of numbers or a text."""
    import numpy as np

    try:
        return np.asarray(value, float).tolist()
    except (TypeError, ValueError):
        return str(value)


def _as_logged(value: Any) -> Any:
    """Return a value of a checkpoint as it was logged: a list of numbers, which a metric has given, as an array."""
    import numpy as np

    numbers = isinstance(value, list) and all(isinstance(one, int | float) for one in np.asarray(value, object).flat)
    return np.asarray(value, np.float32) if numbers else value


def _trainable_of(model: Any) -> list[int]:
    """Return what identifies the variables that a model trains, and the learning rates of its optimizers."""
    from scaletier import private

    rates = map(private.rate_of, private.inner_optimizers(model.optimizer))
    return [id(one) for one in (*model.trainable_variables, *rates)]


def _settings_of(model: Any) -> list[tuple[Any, str, Any]]:
    """Return the optimizer, inner ones and schedules, with the name and value of each setting that is a number or None."""
    import keras

    from scaletier import private

    optimizers = private.inner_optimizers(model.optimizer)
    kind, rates = keras.optimizers.schedules.LearningRateSchedule, map(private.rate_of, optimizers)
    parts = [model.optimizer, *optimizers, *(one for one in rates if isinstance(one, kind))]
    settings = [(one, name, value) for one in parts for name, value in vars(one).items() if not name.startswith("_")]
    return [setting for setting in settings if isinstance(setting[2], int | float | None)]


def _call_hook(data: Any, name: str) -> None:
    """Call a hook of a PyDataset."""
    import keras

    if isinstance(data, keras.utils.PyDataset):
        getattr(data, name)()
