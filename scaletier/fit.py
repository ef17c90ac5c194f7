"""Train a compiled Keras model by `fit`, as Keras does, or by `train_and_evaluate`, as tf.estimator did."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import inspect
import itertools
import operator
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NoReturn

from scaletier.callbacks import Callbacks
from scaletier.exit import RETRY_EXIT_CODE, exit_process, print_failure
from scaletier.flags import flags_of
from scaletier.job import Job, JobError, kind_of
from scaletier.run import run_to_exit_code, train
from scaletier.tensorflow_setup import StopRequest, import_tensorflow
from scaletier.tf_config import Cluster, ClusterError, cluster

# Keras's own default.
_BATCH_SIZE = 32
# The job directories that this process has trained into.
_trained = set[str]()


def fit(
    model_fn: Callable[[], Any],
    train_data: Any,
    validation_data: Any = None,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    steps_per_epoch: int | None = None,
    batch_size: int | None = None,
    shuffle: bool = True,
    callbacks: Any = (),
    class_weight: Mapping[int, float] | None = None,
    arguments: argparse.Namespace | Sequence[str] | None = None,
    **fields: Any,
) -> Any:
    """Train a compiled Keras model, evaluate it after each epoch, save and export it.

    The processes of parameter servers, workers and evaluators end within this call: only the chief runs the code after it.

    Args:
        model_fn: a function that returns the compiled Keras 3 model.
        train_data: a `tf.data.Dataset` of batches or a function that returns one, as `data` of `Job`. With one process also
            arrays `(inputs, targets, sample_weights)`, each [N, …], or a `keras.utils.PyDataset`.
        validation_data: the data of the evaluations, in the same forms. It must have an end.
        steps: batches to train on, over all replicas. --max-steps overrides it.
        epochs: the number of epochs, each of `steps_per_epoch` batches, instead of `steps`.
        steps_per_epoch: batches in an epoch, over all replicas. Default: the batches of `train_data`, or a tenth of `steps` if
            their number is unknown. --eval-steps overrides it.
        batch_size: samples in a batch of arrays. Default: 32.
        shuffle: True to read arrays, and the batches of a PyDataset of known length, in a new random order in each pass.
        callbacks: a Keras callback or several, or a function that returns them. Only the chief calls them, at the beginning
            and end of training, epochs and evaluations.
        class_weight: the weight of each class, as in Keras.
        arguments: a namespace of `scaletier.parser()`, or a list of command-line arguments. Default: those of the process.
        fields: further fields of `Job`, such as `serving`.

    Returns:
        The `keras.callbacks.History`, whose `model` has the trained weights.

    Raises:
        SystemExit: the call is invalid, or the job runs in one process and failed. One line on stderr has the reason; the exit
            codes are those of `scaletier.run`. If the job runs on a cluster and fails, or should be restarted from its last
            checkpoint, the process ends at once, without this exception.
        Exception: an error of the program itself, on one process.
    """
    handler = signal.getsignal(signal.SIGTERM)
    try:
        _check(fields)
        steps, epochs = _positive_int("steps", steps), _positive_int("epochs", epochs)
        steps_per_epoch = _positive_int("steps_per_epoch", steps_per_epoch)
        batch_size = _positive_int("batch_size", batch_size) or _BATCH_SIZE
        if steps and epochs:
            raise JobError("steps and epochs are invalid together. Valid: one of them")
        flags = flags_of(arguments, max_steps=steps or (0 if epochs else None))  # 0: `Callbacks.plan` sets it from the epochs
        task = cluster()
        if _trained and task.jobs:
            line = "fit is invalid a second time: the other processes of the cluster have ended with the first one."
            raise JobError(f"{line} Valid: one fit in a program that runs on several")
        if flags.job_dir in _trained:
            line = f"the job directory {flags.job_dir} is invalid: a fit of this program has trained into it."
            raise JobError(f"{line} Valid: another --job-dir; to train further, start the program again")
        data = _batches("train_data", train_data, task, batch_size, flags.seed if shuffle else None)
        validation = _batches("validation_data", validation_data, task, batch_size)
        if class_weight:
            data = _add_class_weights(data, class_weight)
    except (ClusterError, JobError) as error:
        raise SystemExit(print_failure(str(error), 2)) from None
    job_callbacks = Callbacks(callbacks, epochs, steps_per_epoch, (train_data, validation_data))
    job = Job(model=model_fn, data=data, eval_data=validation, callbacks=job_callbacks, **fields)
    if task.jobs or task.task_type != "chief":
        code = run_to_exit_code(job, flags)
        if code or task.task_type != "chief":
            exit_process(code)
    elif code := train(job, flags):
        if code == RETRY_EXIT_CODE:
            exit_process(code)
        raise SystemExit(code)
    stop_request = signal.signal(signal.SIGTERM, handler)
    _trained.add(flags.job_dir)
    if isinstance(stop_request, StopRequest) and stop_request.is_set():  # SIGTERM came after the last round
        sys.stdout.flush()
        sys.stderr.flush()
        signal.raise_signal(signal.SIGTERM)
    return job_callbacks.history


def _check(fields: Mapping[str, Any]) -> None:
    valid = [one.name for one in dataclasses.fields(Job) if one.name not in ("model", "data", "eval_data", "callbacks")]
    if unknown := next((name for name in fields if name not in valid), None):
        own = (name for name in inspect.signature(fit).parameters if name != "fields")
        raise JobError(f"fit has no argument {unknown!r}. Valid: {', '.join((*own, *valid))}")


def _positive_int(name: str, value: Any) -> int | None:
    """Return a whole number, which may be NumPy's, as an int, or None; JobError if it is less than 1 or no whole number."""
    if value is None:
        return None
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number >= 1:
        return number
    raise JobError(f"{name}={value!r} is invalid. Valid: a whole number of at least 1")


def _batches(name: str, data: Any, task: Cluster, batch_size: int, seed: int | None = None) -> Any:
    """Return data as `Job` takes it; for arrays or a PyDataset a function that makes batches, shuffled if there is a seed."""
    if data is None or callable(data) or hasattr(data, "element_spec"):
        return data
    if task.jobs:
        line = f"{name} is invalid: arrays and PyDatasets are in the memory of one process, and several train."
        raise JobError(f"{line} Valid: a function that makes a tf.data.Dataset")
    return functools.partial(_dataset, data, batch_size, seed)


def _dataset(data: Any, batch_size: int, seed: int | None) -> Any:
    """Return a dataset of batches from arrays or a PyDataset, shuffled if there is a seed."""
    tf = import_tensorflow()
    import keras
    import numpy as np

    from scaletier.data import with_any_batch_size

    def to_arrays(parts: Any, series_types: tuple[Any, ...] = ()) -> Any:
        """Convert parts to arrays, lists to tuples, as tf.data makes tensors of lists, and floats to Keras's default type.

        Values of `series_types` become columns, as Keras makes of a pandas Series.
        """
        if isinstance(parts, list | tuple):
            return tuple(to_arrays(part, series_types) for part in parts)
        if isinstance(parts, dict):
            return {name: to_arrays(part, series_types) for name, part in parts.items()}
        if parts is None or isinstance(parts, tf.RaggedTensor | tf.SparseTensor):
            return parts
        array = np.asarray(parts)[:, None] if isinstance(parts, series_types) else np.asarray(parts)
        if not array.shape:
            raise JobError(
                f"the data is {kind_of(parts)}. Valid: arrays, a PyDataset, a tf.data.Dataset, a function that makes one"
            )
        if array.dtype == object and not all(isinstance(one, str | bytes) for one in array.flat):
            other = next(one for one in array.flat if not isinstance(one, str | bytes))
            line = f"the arrays are invalid: one is of type object, with elements {kind_of(other)}. Valid: arrays of one type,"
            raise JobError(f"{line} such as array.astype('float32')")
        return array.astype(keras.config.floatx()) if array.dtype.kind == "f" else array

    def strip_none(parts: Any) -> Any:
        """Return the parts without targets and weights that are None."""
        while isinstance(parts, tuple) and parts and parts[-1] is None:
            parts = parts[:-1]
        return parts

    def batch(at: int) -> Any:
        return strip_none(to_arrays(data[at]))

    if isinstance(data, keras.utils.PyDataset):
        count = data.num_batches

        def batches(order: Any = None) -> Iterator[Any]:
            indices = itertools.count() if count is None else range(count) if order is None else order.tolist()
            yield from _map_in_order(batch, indices, data.workers, data.max_queue_size)

        def spec(one: Any, other: Any) -> Any:
            """Return a spec that fits two batches: the dimensions in which they differ are unknown."""
            both = tf.type_spec_from_value(one).most_specific_common_supertype([tf.type_spec_from_value(other)])
            return with_any_batch_size(both or tf.type_spec_from_value(one))

        specs = tf.nest.map_structure(spec, batch(0), batch(0 if count == 1 else 1))
        generate = functools.partial(tf.data.Dataset.from_generator, batches, output_signature=specs)
        if count is None or seed is None:
            dataset = generate()
        else:  # each pass shuffles as it starts, even if its batches are skipped
            orders = tf.data.Dataset.range(count).shuffle(count, seed, reshuffle_each_iteration=True).batch(count)
            dataset = orders.flat_map(lambda order: generate(args=(order,)))
        cardinality = tf.data.INFINITE_CARDINALITY if count is None else count
        options = tf.data.Options()
        options.autotune.enabled = False  # no prefetching: on_epoch_begin comes before the first batch is read
        return dataset.apply(tf.data.experimental.assert_cardinality(cardinality)).with_options(options)
    arrays = strip_none(to_arrays(data, (sys.modules["pandas"].Series,) if "pandas" in sys.modules else ()))
    sizes = {int(one.shape[0]) if one.shape else 0 for one in tf.nest.flatten(arrays) if one is not None}
    if len(sizes) != 1 or 0 in sizes:
        line = f"the arrays are invalid: they have {', '.join(map(str, sorted(sizes)))} samples. Valid: the same number in each"
        raise JobError(line)
    sparse = any(isinstance(one, tf.SparseTensor) for one in tf.nest.flatten(arrays))
    size = sizes.pop()
    rows = tf.data.Dataset.from_tensor_slices(arrays) if sparse else tf.data.Dataset.range(size)
    rows = (rows if seed is None else rows.shuffle(size, seed, reshuffle_each_iteration=True)).batch(batch_size)
    if sparse:
        return rows
    with tf.device("CPU:0"):  # tensors, as the arrays would become part of the graph, which has at most 2 GB
        arrays = tf.nest.map_structure(lambda one: tf.constant(one) if isinstance(one, np.ndarray) else one, arrays)

    def gather(at: Any) -> Any:
        return tf.nest.map_structure(lambda one: None if one is None else tf.gather(one, at), arrays)

    return rows.map(gather, tf.data.AUTOTUNE)


def _map_in_order(function: Callable[[int], Any], indices: Iterable[int], threads: int, ahead: int) -> Iterator[Any]:
    """Yield a function's results in the order of its arguments; several threads compute up to `ahead` of them in advance."""
    if threads <= 1:
        yield from map(function, indices)
        return
    pool, results = ThreadPoolExecutor(threads), collections.deque[Future[Any]]()
    try:
        for at in indices:
            results.append(pool.submit(function, at))
            if len(results) > ahead:
                yield results.popleft().result()
        yield from (result.result() for result in results)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _add_class_weights(data: Any, class_weight: Mapping[int, float]) -> Any:
    """Return the data, or the function that makes it, with sample weights by class."""

    def add(dataset: Any) -> Any:
        from scaletier.data import add_class_weights

        return add_class_weights(dataset, class_weight)

    return functools.wraps(data)(lambda *context: add(data(*context))) if callable(data) else add(data)


@dataclasses.dataclass(frozen=True)
class TrainSpec:
    """The training of a program that was written for Estimators.

    Args:
        input_fn: a function that returns a `tf.data.Dataset` of batches, as `data` of `Job`.
        max_steps: batches to train on, over all replicas. Default: --max-steps.
    """

    input_fn: Callable[..., Any]
    max_steps: int | None = None


@dataclasses.dataclass(frozen=True)
class EvalSpec:
    """The evaluation of a program that was written for Estimators.

    Args:
        input_fn: a function that returns a finite `tf.data.Dataset` of batches.
        throttle_secs: the minimum of seconds between two evaluations. Default: --eval-interval.
    """

    input_fn: Callable[..., Any]
    throttle_secs: float | None = None


def train_and_evaluate(
    model_fn: Callable[[], Any], train_spec: TrainSpec, eval_spec: EvalSpec, arguments: Sequence[str] | None = None
) -> NoReturn:
    """Train, evaluate and export a compiled Keras model, and end the process as `scaletier.run` does.

    Args:
        model_fn: a function that returns the compiled Keras 3 model.
        train_spec: the training.
        eval_spec: the evaluation.
        arguments: a list of command-line arguments, which override the specs. Default: those of the process.

    Raises:
        SystemExit: the arguments are invalid, or TensorFlow is not installed.
    """
    flags = flags_of(arguments, max_steps=train_spec.max_steps, eval_interval=eval_spec.throttle_secs)
    exit_process(run_to_exit_code(Job(model=model_fn, data=train_spec.input_fn, eval_data=eval_spec.input_fn), flags))
