"""`fit`: train a compiled Keras model as `keras.Model.fit` does, on one process or on a cluster."""

from __future__ import annotations

import argparse
import functools
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from scaletier.callbacks import Callbacks
from scaletier.cluster import Cluster, ClusterError, cluster
from scaletier.flags import Flags, flags_of, parser
from scaletier.job import Job, JobError
from scaletier.run import RETRY_EXIT_CODE, code_of, fail, leave, train
from scaletier.runtime import import_tensorflow, one_line


def fit(
    model_fn: Callable[[], Any],
    train_data: Any,
    validation_data: Any = None,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    steps_per_epoch: int | None = None,
    batch_size: int = 32,
    shuffle: bool = True,
    callbacks: Sequence[Any] | Callable[[], Sequence[Any]] = (),
    class_weight: Mapping[int, float] | None = None,
    arguments: argparse.Namespace | Sequence[str] | None = None,
    **fields: Any,
) -> Any:
    """Train a Keras model, evaluate it after each epoch, save and export it.

    Parameter servers, workers and evaluators end within this call: what follows it runs on the chief alone. A job that fails
    ends the process, with one line on stderr and the exit codes of `scaletier.run`.

    Args:
        model_fn: makes the compiled Keras 3 model.
        train_data: a `tf.data.Dataset` of batches, or a function that makes one, as `Job.data`; where one process trains also
            arrays, `inputs`, `(inputs, targets)` or `(inputs, targets, sample_weight)`, or a `keras.utils.PyDataset`.
        validation_data: what to evaluate on after each epoch, in the same forms.
        steps: batches to train on, over all replicas; --max-steps on the command line counts before it.
        epochs: passes over `train_data` in place of `steps`.
        steps_per_epoch: steps of an epoch, if it is no pass over `train_data`; --eval-steps counts before it.
        batch_size: samples in a batch of arrays.
        shuffle: whether arrays, or the batches of a PyDataset, come in another order in each epoch.
        callbacks: Keras's callbacks, or a function that makes them, which is called on the chief alone.
        class_weight: the weight of each class in the loss, as in `keras.Model.fit`.
        arguments: what `scaletier.parser()` parsed, or the words to parse; sys.argv's by default.
        **fields: further fields of `Job`, such as `serving`, or an `optimizer` that depends on the number of replicas.

    Returns:
        The `keras.callbacks.History`, whose `model` has the trained weights.
    """
    flags = _flags(arguments, steps, epochs)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        _check(steps=steps, epochs=epochs, steps_per_epoch=steps_per_epoch, batch_size=batch_size)
        task = cluster()
        data = _batches("train_data", train_data, task, batch_size, flags.seed if shuffle else None)
        validation = _batches("validation_data", validation_data, task, batch_size)
    except (ClusterError, JobError) as error:
        raise SystemExit(fail(str(error), 2)) from None
    if class_weight:
        data = _weighted(data, class_weight)
    called = Callbacks(callbacks, epochs, steps_per_epoch)
    job = Job(model=model_fn, data=data, eval_data=validation, callbacks=called, **fields)
    if task.jobs or task.task_type != "chief":
        code = code_of(job, flags)
        if code or task.task_type != "chief":
            leave(code)
    elif code := train(job, flags):
        if code == RETRY_EXIT_CODE:
            leave(code)
        raise SystemExit(code)
    signal.signal(signal.SIGTERM, handler)
    return called.history


def _flags(arguments: argparse.Namespace | Sequence[str] | None, steps: int | None, epochs: int | None) -> Flags:
    """The flags; `max_steps` is 0 if it follows from the epochs."""
    default = steps or (0 if epochs else None)
    if isinstance(arguments, argparse.Namespace):
        flags = flags_of(arguments)
        return flags if default is None else replace(flags, max_steps=default)
    known = parser()
    if default is not None:
        known.set_defaults(max_steps=default)
    return flags_of(known.parse_args(arguments))


def _check(**counts: Any) -> None:
    """Raise JobError for a count that is none, and for two of the length of the job."""
    for name, count in counts.items():
        if count is not None and (not isinstance(count, int) or count < 1):
            raise JobError(f"{name}={count!r} is invalid. Valid: a whole number of at least 1")
    if counts["steps"] and counts["epochs"]:
        raise JobError("steps and epochs are invalid together. Valid: one of them")


def _batches(name: str, given: Any, task: Cluster, batch_size: int, seed: int | None = None) -> Any:
    """Data as `Job` takes it; for arrays and a PyDataset a function that makes batches of them, in a random order by `seed`.

    Raises:
        JobError: several processes train, which cannot share what one of them has in memory.
    """
    if given is None or callable(given) or hasattr(given, "element_spec"):
        return given
    if task.jobs:
        raise JobError(
            f"{name} is invalid: arrays and PyDatasets are in the memory of one process, and several train. "
            "Valid: a function that makes a tf.data.Dataset"
        )
    return functools.partial(_dataset, given, batch_size, seed)


def _dataset(given: Any, batch_size: int, seed: int | None) -> Any:
    """Make the batches of arrays, or of a PyDataset."""
    tf = import_tensorflow()
    import keras
    import numpy as np

    def plain(parts: Any) -> Any:
        """Lists, which tf.data takes for tensors, as tuples, and numbers as Keras has them."""
        if isinstance(parts, list | tuple):
            return tuple(map(plain, parts))
        if isinstance(parts, dict):
            return {name: plain(part) for name, part in parts.items()}
        if parts is None or isinstance(parts, tf.RaggedTensor):
            return parts
        array = np.asarray(parts)
        return array.astype(keras.config.floatx()) if array.dtype.kind == "f" else array

    if isinstance(given, keras.utils.PyDataset):
        order = np.random.default_rng(seed)

        def batches() -> Iterator[Any]:
            for at in range(len(given)) if seed is None else order.permutation(len(given)):
                yield plain(given[int(at)])
            given.on_epoch_end()

        specs = tf.nest.map_structure(lambda one: tf.TensorSpec([None, *one.shape[1:]], one.dtype), plain(given[0]))
        dataset = tf.data.Dataset.from_generator(batches, output_signature=specs)
        return dataset.apply(tf.data.experimental.assert_cardinality(len(given)))
    arrays = plain(given)
    sizes = {len(one) if one.shape else 0 for one in tf.nest.flatten(arrays) if one is not None}
    if len(sizes) != 1 or 0 in sizes:
        raise JobError(
            f"the arrays are invalid: they have {', '.join(map(str, sorted(sizes)))} samples. Valid: as many in each"
        )
    rows = tf.data.Dataset.range(size := sizes.pop())
    rows = rows if seed is None else rows.shuffle(size, seed, reshuffle_each_iteration=True)
    return rows.batch(batch_size).map(
        lambda at: tf.nest.map_structure(lambda one: tf.gather(one, at), arrays), tf.data.AUTOTUNE
    )


def _weighted(data: Any, class_weight: Mapping[int, float]) -> Any:
    """The data with weights of classes, as a function of what `data` is one of."""

    def weighted(made: Any) -> Any:
        from scaletier.private import weighted as by_class

        try:
            return by_class(made, class_weight)
        except (ValueError, TypeError, AttributeError) as error:
            raise JobError(
                f"class_weight is invalid: {one_line(error)}. Valid: a number for each class, such as {{0: 0.5, 1: 3.0}}"
            ) from None

    if not callable(data):
        return weighted(data)
    return functools.wraps(data)(lambda *context: weighted(data(*context)))
