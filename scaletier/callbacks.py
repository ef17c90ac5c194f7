"""Call Keras's callbacks on the chief: their hooks of training, epochs and evaluations."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from scaletier.flags import Flags
from scaletier.job import JobError, kind_of
from scaletier.tensorflow_setup import import_tensorflow, say

if TYPE_CHECKING:  # the rest of the library imports TensorFlow
    from scaletier.checkpoint import CheckpointReader
    from scaletier.evaluation import EvaluationResult
    from scaletier.functional_model import FunctionalModel
    from scaletier.loop import Round

# Epochs if the number of batches is unknown.
_EPOCHS = 10
# Numbers that Keras's callbacks keep.
_STATE = ("best", "best_epoch", "wait", "cooldown_counter", "epoch", "history")
HOOKS = ("on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_test_begin", "on_test_end")
# Keras's `fit` does not call them either.
_PREDICT_HOOKS = ("on_predict_begin", "on_predict_end", "on_predict_batch_begin", "on_predict_batch_end")


class Callbacks:
    """The callbacks of one call of `fit`, or a function that makes them, and its epochs.

    `history` is the `keras.callbacks.History`, on the chief, once training begins; `rates` are learning rates that callbacks
    may have set, by their places in the network's `local`. With `pauses` all replicas pause during an evaluation.
    """

    history: Any = None
    rates: Mapping[int, Any] = {}
    pauses = False

    def __init__(
        self,
        callbacks: Any = (),
        epochs: int | None = None,
        steps_per_epoch: int | None = None,
        data: Sequence[Any] = (None, None),
    ) -> None:
        self._callbacks, self._epochs, self._steps, self._data = callbacks, epochs, steps_per_epoch, data
        self._rounds, self._metrics, self._carried = list[tuple[int, Mapping[str, float]]](), list[Any](), list[Any]()

    def check(self) -> None:
        """Raise JobError for a callback with a hook that is not called."""
        import keras

        plain, checkpoint = keras.callbacks.Callback, keras.callbacks.ModelCheckpoint
        callbacks = self._callbacks
        if callable(callbacks) and not isinstance(callbacks, plain):
            callbacks = callbacks()
        if isinstance(callbacks, Iterable) and not isinstance(callbacks, Sequence | Mapping):
            callbacks = list(callbacks)
        self._callbacks = [one for one in keras.tree.flatten(callbacks) if one is not None]
        for callback in self._callbacks:
            if not isinstance(callback, plain):
                raise JobError(f"the callback is invalid: it is {kind_of(callback)}. Valid: a keras.callbacks.Callback")
            name = f"the callback {type(callback).__name__} is invalid:"
            if isinstance(callback, checkpoint) and callback.save_freq != "epoch":
                raise JobError(f"{name} save_freq={callback.save_freq} counts batches. Valid: save_freq='epoch'")
            for hook in (one for one in dir(plain) if one.startswith("on_") and one not in (*HOOKS, *_PREDICT_HOOKS)):
                function = getattr(getattr(callback, hook), "__func__", None)
                if function not in (getattr(plain, hook), getattr(checkpoint, hook)):
                    raise JobError(f"{name} it has {hook}, which is not called. Valid: {', '.join(HOOKS)}")

    def plan(self, flags: Flags, length: int | None) -> Flags:
        """Return the flags with the steps of the job and of each epoch; `length` is the number of batches, None if unknown."""
        self.pauses = flags.eval_steps is not None
        steps_per_epoch = flags.eval_steps or self._steps or length
        if not flags.max_steps and not steps_per_epoch:
            line = f"epochs={self._epochs} is invalid: train_data does not say how many batches it has. Valid: steps, or"
            raise JobError(f"{line} steps_per_epoch beside it")
        steps = flags.max_steps or (self._epochs or 1) * (steps_per_epoch or 1)
        steps_per_epoch = min(steps, steps_per_epoch or max(1, steps // _EPOCHS))
        if length and steps > length and length % steps_per_epoch:  # where `fit` of Keras ends the epoch
            say(f"An epoch has {steps_per_epoch} steps, and train_data {length} batches: it is repeated within an epoch")
        return replace(flags, max_steps=steps, eval_steps=steps_per_epoch)

    @functools.cached_property
    def state(self) -> Any:
        """The tf.Variable for checkpoints: the callbacks as the last epoch ended, and the metrics of this one."""
        tf = import_tensorflow()
        with tf.device("/device:CPU:0"):
            return tf.Variable("")

    def begin(self, network: FunctionalModel, local: Sequence[Any], flags: Flags, reader: CheckpointReader | None) -> int:
        """Start training, or resume from a checkpoint; return the global step at which the epoch ends.

        `local` are tf.Variables in the network's order.
        """
        import keras

        step = reader.step if reader else 0
        setters = keras.callbacks.ReduceLROnPlateau, keras.callbacks.LearningRateScheduler
        if not network.learning_rates and (found := [one for one in self._callbacks if isinstance(one, setters)]):
            line = f"the callback {type(found[0]).__name__} is invalid: the optimizer's learning rate is a schedule."
            raise JobError(f"{line} Valid: a learning rate that is a number")
        if network.replicas > 1 and any(isinstance(one, keras.callbacks.SwapEMAWeights) for one in self._callbacks):
            line = "the callback SwapEMAWeights is invalid: several replicas train, and average what they share. Valid:"
            raise JobError(f"{line} use_ema=True alone, whose average is exported, or one process")
        self._network, self._local, self._flags = network, local, flags
        steps_per_epoch = flags.eval_steps or 1
        epochs, network.model.stop_training = -(-flags.max_steps // steps_per_epoch), False
        self.history = keras.callbacks.History()
        called = [*self._callbacks, self.history]
        self._list = keras.callbacks.CallbackList(called, model=network.model, epochs=epochs, steps=flags.eval_steps, verbose=0)
        for callback in called if step else ():
            if isinstance(callback, keras.callbacks.CSVLogger):
                callback.append = True
        before = _trainable_of(network.model)
        train_data, _ = self._data
        _call_hook(train_data, "on_epoch_end")  # as `fit` of Keras does before the first epoch, and before each evaluation
        self._list.on_train_begin()
        self._rates = [at for at, spec in enumerate(network.local) if spec in network.learning_rates]
        stored = json.loads(reader.callbacks) if reader and reader.callbacks else {}
        if stored:
            self._restore(stored)
        self._ended = self._callbacks_state()
        self._logs: Mapping[str, float] = dict.fromkeys(("loss", *network.metric_names), math.nan)
        at, begin = step // steps_per_epoch, step
        self._epoch = stored.get("epoch", self.history.epoch[-1] + 1 if self.history.epoch else at)
        if abs(self._epoch - at) <= 1:  # else the length of epochs has changed
            at = self._epoch  # the checkpoint may be of a job that had ended within an epoch, or had not ended one that is over
            begin = min(step, at * steps_per_epoch)
        self._begin_epoch(begin < flags.max_steps)
        if "metrics" in stored:
            self._restore_metrics(**stored["metrics"])
        if not step and _trainable_of(network.model) != before:  # what is set later has no effect in Keras either
            line = "a callback has changed what is trainable, or a setting of the optimizer, when training began. Valid:"
            raise JobError(f"{line} set them in the function that makes the model")
        return (at + 1) * steps_per_epoch

    def _given_rates(self) -> list[float]:
        return [float(self._network.initial(self._network.local[at])) for at in self._rates]

    def _stateful(self) -> list[Any]:
        """Return the callbacks whose state is numbers."""
        import keras.callbacks as own

        kinds = own.ModelCheckpoint, own.EarlyStopping, own.ReduceLROnPlateau, own.History
        return [one for one in (*self._callbacks, self.history) if isinstance(one, kinds)]

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Set the state of `_store`; learning rates are the job's if these have changed."""
        stored = list(state["callbacks"])
        for callback in self._stateful():
            name = type(callback).__name__
            if getattr(callback, "restore_best_weights", False):
                say(f"The callback {name} starts again: its best weights are in no checkpoint")
            elif found := next((one for one in stored if one[0] == name), None):
                stored.remove(found)
                vars(callback).update(found[1])
        if state["given_rates"] == self._given_rates():
            for at, rate in zip(self._rates, state["rates"], strict=True):
                self._local[at].assign(rate)

    def _restore_metrics(self, steps: int, logs: Mapping[str, float], carried: Sequence[Any]) -> None:
        """Continue the metrics of the epoch in which the checkpoint was written, if the model has the same ones."""
        import numpy as np

        initial = self._network.initial_metrics()
        if set(logs) == set(self._logs):
            self._rounds.append((steps, logs))
            self._carried = list(carried) if [*map(np.shape, carried)] == [*map(np.shape, initial)] else []

    def store(self) -> None:
        """Set `state` for a checkpoint."""
        state = {**self._ended, "epoch": self._epoch}
        if self._rounds:
            steps, logs = self._total()
            carried = [one.numpy() for one in self._metrics]
            state["metrics"] = {"steps": steps, "logs": logs, "carried": carried}
        self.state.assign(json.dumps(state, default=_plain))

    def _total(self) -> tuple[int, Mapping[str, float]]:
        """Return the steps of this epoch's rounds, and their metrics."""
        total = sum(steps for steps, _ in self._rounds)
        if self._metrics:
            return total, self._rounds[-1][1]
        return total, {name: sum(steps * each[name] for steps, each in self._rounds) / total for name in self._logs}

    def _callbacks_state(self) -> dict[str, Any]:
        """Return the state of callbacks in the form of JSON."""
        callbacks = [
            (type(one).__name__, {key: value for key, value in vars(one).items() if key in _STATE}) for one in self._stateful()
        ]
        rates = [float(self._local[at]) for at in self._rates]
        state = {"callbacks": callbacks, "given_rates": self._given_rates(), "rates": rates}
        copy: dict[str, Any] = json.loads(json.dumps(state, default=_plain))
        return copy

    def restore_metrics(self) -> list[Any]:
        """Restore the tf.Variables that keep metrics between an epoch's rounds, where a process trains alone; return them."""
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
        """True if a callback has ended training, and the epoch that has begun has a round, as each one of Keras has a batch."""
        return self.stopping and (bool(self._rounds) or not self.pending)

    @property
    def pending(self) -> bool:
        """True if an epoch has begun and not ended."""
        return self._begun

    def add(self, result: Round) -> None:
        self._rounds.append((result.steps, {"loss": result.mean_loss, **result.metrics}))

    def end_epoch(self, step: int, evaluate: Callable[[], EvaluationResult | None] | None) -> None:
        """End an epoch at a global step, after its evaluation, if there is one; do nothing if that was stopped.

        Its metrics are those of the epoch before if it had no round, as with `sync` if a round has more steps than an epoch.
        """
        if self._rounds:
            _, self._logs = self._total()
        logs, (train_data, validation_data) = dict(self._logs), self._data
        _call_hook(train_data, "on_epoch_end")
        if evaluate:
            _call_hook(validation_data, "on_epoch_end")
            self._list.on_test_begin()
            _call_hook(validation_data, "on_epoch_begin")
            if (measured := evaluate()) is None:
                return
            _call_hook(validation_data, "on_epoch_end")
            found = {"loss": measured.loss, **measured.metrics}
            self._list.on_test_end(found)
            logs |= {f"val_{name}": value for name, value in found.items()}
        self._list.on_epoch_end(self._epoch, logs)
        self._ended = self._callbacks_state()
        self._epoch += 1
        self._begin_epoch(step < self._flags.max_steps and not self.stopping)

    def _begin_epoch(self, begins: bool) -> None:
        self._rounds.clear()
        self._begun = begins
        if begins:
            self._network.model.reset_metrics()
            self._list.on_epoch_begin(self._epoch)
            _call_hook(self._data[0], "on_epoch_begin")
        if self._network.model.train_function is not None:
            line = "a callback is invalid: it has called make_train_function, or fit, which change no step of a job."
            raise JobError(f"{line} Valid: one that sets the learning rate, or variables that the model reads")
        self.rates = {at: self._local[at].numpy() for at in self._rates}

    def end(self) -> None:
        """End training, after which the model may have other weights."""
        self._list.on_train_end()


def _plain(value: Any) -> Any:
    """Convert a value that JSON has no form for to a number, a list of numbers or a text."""
    import numpy as np

    try:
        return np.asarray(value, float).tolist()
    except (TypeError, ValueError):
        return str(value)


def _trainable_of(model: Any) -> list[Any]:
    """Return what identifies the variables that a model trains, and the settings of its optimizer and inner ones."""
    from scaletier import private

    optimizers = private.inner_optimizers(model.optimizer)
    numbers = [{name: value for name, value in vars(one).items() if isinstance(value, int | float)} for one in optimizers]
    return [*numbers, *(id(one) for one in (*model.trainable_variables, *map(private.rate_of, optimizers)))]


def _call_hook(data: Any, name: str) -> None:
    """Call a hook of a PyDataset."""
    import keras

    if isinstance(data, keras.utils.PyDataset):
        getattr(data, name)()
