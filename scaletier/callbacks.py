"""Call Keras's callbacks on the chief, at the ends of epochs and of evaluations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from scaletier.flags import Flags
from scaletier.job import JobError, kind_of
from scaletier.runtime import import_tensorflow

if TYPE_CHECKING:  # the rest of the library imports TensorFlow
    from scaletier.evaluation import EvaluationResult
    from scaletier.functional_model import FunctionalModel
    from scaletier.loop import Round

# Epochs if the number of batches is unknown.
_EPOCHS = 10
HOOKS = ("on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_test_begin", "on_test_end")


class Callbacks:
    """The callbacks of one call of `fit`, or a function that makes them, and its epochs.

    `history` is the `keras.callbacks.History`, on the chief, once training begins; `rates` are learning rates that callbacks
    may have set, by their places in the network's `local`. With `pauses` all replicas pause during an evaluation.
    """

    history: Any = None
    rates: Mapping[int, Any] = {}
    pauses = False

    def __init__(self, callbacks: Any = (), epochs: int | None = None, steps_per_epoch: int | None = None) -> None:
        self._callbacks, self._epochs, self._steps = callbacks, epochs, steps_per_epoch
        self._rounds, self._metrics = list[Any](), list[Any]()

    def check(self) -> None:
        """Raise JobError for a callback with a hook that is not called."""
        import keras

        plain, checkpoint = keras.callbacks.Callback, keras.callbacks.ModelCheckpoint
        self._callbacks = list(self._callbacks() if callable(self._callbacks) else self._callbacks)
        for callback in self._callbacks:
            if not isinstance(callback, plain):
                raise JobError(f"the callback is invalid: it is {kind_of(callback)}. Valid: a keras.callbacks.Callback")
            name = f"the callback {type(callback).__name__} is invalid:"
            if isinstance(callback, checkpoint) and callback.save_freq != "epoch":
                raise JobError(f"{name} save_freq={callback.save_freq} counts batches. Valid: save_freq='epoch'")
            for hook in (one for one in dir(plain) if one.startswith("on_") and one not in HOOKS):
                function = getattr(getattr(callback, hook), "__func__", None)
                if function not in (getattr(plain, hook), getattr(checkpoint, hook)):
                    raise JobError(f"{name} it has {hook}, which is not called. Valid: {', '.join(HOOKS)}")

    def plan(self, flags: Flags, length: int | None) -> Flags:
        """Return the flags with the steps of the job and of each epoch; `length` is the number of batches, None if unknown."""
        self.pauses = flags.eval_steps is not None
        every = flags.eval_steps or self._steps or length
        if not flags.max_steps and not every:
            line = f"epochs={self._epochs} is invalid: train_data does not say how many batches it has. Valid: steps, or"
            raise JobError(f"{line} steps_per_epoch beside it")
        steps = flags.max_steps or (self._epochs or 1) * (every or 1)
        return replace(flags, max_steps=steps, eval_steps=min(steps, every or max(1, steps // _EPOCHS)))

    def begin(self, network: FunctionalModel, local: Sequence[Any], flags: Flags, step: int) -> None:
        """Start or resume training at a global step; `local` are tf.Variables in the network's order."""
        import keras

        setters = keras.callbacks.ReduceLROnPlateau, keras.callbacks.LearningRateScheduler
        if not network.reset_on_start and (found := [one for one in self._callbacks if isinstance(one, setters)]):
            line = f"the callback {type(found[0]).__name__} is invalid: the optimizer's learning rate is a schedule."
            raise JobError(f"{line} Valid: a learning rate that is a number")
        self._network, self._local, self._flags = network, local, flags
        epochs, network.model.stop_training = -(-flags.max_steps // (flags.eval_steps or 1)), False
        self.history = keras.callbacks.History()
        self._list = keras.callbacks.CallbackList(
            [*self._callbacks, self.history], model=network.model, epochs=epochs, steps=flags.eval_steps, verbose=0
        )
        self._list.on_train_begin()
        self._begin_epoch(step)

    def carry(self) -> list[Any]:
        """Return the tf.Variables that keep metrics between the rounds of an epoch, for a process that trains alone."""
        tf = import_tensorflow()
        self._metrics = [tf.Variable(value) for value in self._network.initial_metrics()]
        return self._metrics

    @property
    def stopped(self) -> bool:
        return bool(self._network.model.stop_training)

    @property
    def pending(self) -> bool:
        """True if there were rounds since the last epoch ended."""
        return bool(self._rounds)

    def add(self, taken: Round) -> None:
        self._rounds.append((taken.steps, {"loss": taken.mean_loss, **taken.metrics}))

    def end_epoch(self, step: int, evaluate: Callable[[], EvaluationResult | None] | None) -> None:
        """End an epoch at a global step, after its evaluation, if there is one; do nothing if that was stopped."""
        logs = self._rounds[-1][1]
        if not self._metrics:
            total = sum(steps for steps, _ in self._rounds)
            logs = {name: sum(steps * each[name] for steps, each in self._rounds) / total for name in logs}
        if evaluate:
            self._list.on_test_begin()
            if (measured := evaluate()) is None:
                return
            found = {"loss": measured.loss, **measured.metrics}
            self._list.on_test_end(found)
            logs |= {f"val_{name}": value for name, value in found.items()}
        self._list.on_epoch_end(self._epoch, logs)
        self._begin_epoch(step)

    def _begin_epoch(self, step: int) -> None:
        self._rounds.clear()
        for variable, value in zip(self._metrics, self._network.initial_metrics(), strict=False):
            variable.assign(value)
        self._epoch = step // (self._flags.eval_steps or 1)
        if step < self._flags.max_steps and not self.stopped:
            self._list.on_epoch_begin(self._epoch)
        rates = (at for at, spec in enumerate(self._network.local) if spec in self._network.reset_on_start)
        self.rates = {at: self._local[at].numpy() for at in rates}

    def end(self) -> None:
        """End training, after which the model may have other weights."""
        self._list.on_train_end()
