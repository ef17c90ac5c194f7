"""Prepare a job's data: endless batches for each replica, and one pass over the data for an evaluation."""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Mapping
from typing import Any

from scaletier.functional_model import Batch
from scaletier.job import DataError, JobError, kind_of, wants_argument
from scaletier.tensorflow_setup import ASSERT_CARDINALITY, import_tensorflow, on_this_process, one_line, say

tf = import_tensorflow()

# The time between two lines of a long pass over the data.
LOG_SECONDS = 60.0
_FIRST_BATCHES = 16


def batch_errors() -> tuple[type[Exception], ...]:
    """Return TensorFlow's errors for a batch that cannot be made, or that the model refuses, such as for an invalid label."""
    codes = "InvalidArgument", "NotFound", "OutOfRange", "PermissionDenied", "Unimplemented", "Unknown"
    return tuple(getattr(tf.errors, f"{code}Error") for code in codes)


def replica_seed(seed: int, replica: int) -> int:
    """Return the seed of one replica's order of the data; distinct for up to 1,000 replicas of a job."""
    return seed * 1000 + replica


class ReplicaContext(tf.distribute.InputContext):  # type: ignore[name-defined, misc]
    """The replica for which a job's function makes data."""

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the size of a replica's part of a batch; JobError if the replicas cannot share the batch evenly."""
        count = int(self.num_replicas_in_sync)
        if remainder := global_batch_size % count:
            line = f"the job's data is invalid: {count} replicas cannot share a batch of {global_batch_size} evenly."
            raise JobError(f"{line} Valid: a multiple of {count}, such as {global_batch_size + count - remainder}")
        return global_batch_size // count


class BatchSource:
    """Make the datasets of replicas and evaluations from a job's data.

    TensorFlow loses dataset objects when this process joins a cluster. With `serialize` the data is kept as a serialized graph.

    Attributes:
        element_spec: the structure of a batch.
        length: the number of batches, or None if it is unknown or infinite.
        description: the number and structure of the batches. Data with another description is taken as changed.
        stride: 2 to start each second pass over the data and not read it, as `fit` of Keras does at the end of an epoch.

    Raises:
        JobError: the data is invalid.
        DataError: the data is missing or cannot be read.
    """

    stride = 1

    def __init__(self, data: Any, name: str = "data", serialize: bool = False) -> None:
        if data is None:
            raise JobError("the job has no data: pass Job(data=…), a tf.data.Dataset of batches or a function that makes one")
        self.name, self._data = name, data
        self._by_replica = callable(data) and wants_argument(data)
        self._graph: Any = None
        first = self._make(ReplicaContext())
        self.element_spec, count = first.element_spec, int(first.cardinality())
        self.endless = count == tf.data.INFINITE_CARDINALITY
        self.description = f"{count} batches of {self.element_spec}"
        self._batch_size: int | None = None
        self.length = count if count > 0 else None
        shapes = [getattr(one, "shape", None) for one in tf.nest.flatten(first.element_spec)]
        if any(shape is not None and shape.rank is None for shape in shapes):
            raise JobError(f"the job's {name} does not say how many dimensions it has; give from_generator an output_signature")
        _check(first, name)
        if serialize and not callable(data):
            self._graph = _serialize(data).numpy()

    def _make(self, context: Any) -> Any:
        if self._graph is not None:
            with on_this_process():
                graph = tf.constant(self._graph)
            return _deserialize(graph, self.element_spec)
        try:
            dataset = (self._data(context) if self._by_replica else self._data()) if callable(self._data) else self._data
        except (tf.errors.OpError, OSError) as error:
            raise DataError(f"the job's {self.name} cannot be made: {one_line(error)}") from error
        if not isinstance(dataset, tf.data.Dataset):
            valid = "a tf.data.Dataset of batches, or a function that makes one"
            raise JobError(f"the job's {self.name} is {kind_of(dataset)}; valid is {valid}")
        return dataset

    def training_batches(self, replica: int = 0, replicas: int = 1, step: int = 0) -> Any:
        """Return endless batches for a replica, after the batches of `step` steps of all replicas together.

        They are prefetched unless the data's options disable autotuning. If the n replicas share one dataset, each takes every
        n-th batch. If n and the number of batches have no common factor, a replica gets other batches in each pass, and in the
        end all data.
        """
        dataset, batches = self._make(ReplicaContext(replicas, replica, replicas)), step // replicas
        if size := self._batch_size:  # a graph that spans hosts needs static shapes
            dataset = dataset.filter(lambda *parts: tf.equal(tf.shape(tf.nest.flatten(parts)[0])[0], size))
            shaped = functools.partial(
                tf.nest.map_structure,
                lambda one: tf.ensure_shape(one, [size, *one.shape[1:]]) if isinstance(one, tf.Tensor) else one,
            )
            several = isinstance(dataset.element_spec, tuple)
            dataset = dataset.map(lambda *parts: shaped(parts if several else parts[0]))
        if self._by_replica:
            dataset = _endless(dataset, batches, self.stride)
        else:
            dataset = _endless(dataset, batches * replicas, self.stride).shard(replicas, replica)
        return dataset if dataset.options().autotune.enabled is False else dataset.prefetch(tf.data.AUTOTUNE)

    def one_pass(self) -> Any:
        """Return the batches of one pass over the data."""
        return self._make(ReplicaContext())

    def count(self) -> int:
        """Return the number of batches of one pass, which is read for it; JobError if it cannot be read again."""
        say(f"Counts the batches of train_data by a pass over it; {ASSERT_CARDINALITY} on the data avoids this pass")
        count, logged_at = 0, time.monotonic()
        for count, _ in enumerate(self.one_pass(), 1):
            if (now := time.monotonic()) - logged_at >= LOG_SECONDS:
                say(f"Still counts, {count} batches so far; train_data must end. Valid: steps_per_epoch")
                logged_at = now
        if next(iter(self.one_pass()), None) is None:
            line = "the job's data is invalid: it can be read only once, and its batches were counted. Valid: steps_per_epoch,"
            raise JobError(f"{line} or data with {ASSERT_CARDINALITY}")
        return count

    def fix_batch_size(self) -> int:
        """Restrict training to batches of one size, the largest of the first batches; return the size.

        JobError if a batch has a part that cannot be divided into microbatches.
        """
        specs = tf.nest.flatten([part for part in Batch.of(self.element_spec) if part is not None])
        if invalid := [
            type(one).__name__.removesuffix("Spec") for one in specs if not isinstance(one, tf.TensorSpec | tf.RaggedTensorSpec)
        ]:
            line = f"the job's {self.name} is invalid with --strategy model-parallel: a batch has a part of type {invalid[0]}."
            raise JobError(f"{line} Valid: dense or ragged tensors, or --strategy async or sync")
        if (size := specs[0].shape[0]) is None:
            sizes = self.one_pass().take(_FIRST_BATCHES).map(lambda *parts: tf.shape(tf.nest.flatten(parts)[0])[0])
            self._batch_size = size = max(int(size) for size in sizes)
            say(f"Trains on batches of {size}; others are skipped")
        return int(size)

    def training_batches_on_device(self, replica: int, replicas: int, step: int = 0) -> Any:
        """Return `training_batches` on the current device, which may be another host's. A job's function still runs here."""
        if self._graph is not None:
            return self.training_batches(replica, replicas, step)
        with on_this_process():
            dataset = self.training_batches(replica, replicas, step)
            graph = _serialize(dataset)
        return _deserialize(graph, dataset.element_spec)


def make_eval_source(data: Any, serialize: bool = False) -> BatchSource:
    """Return the source of a job's eval_data; JobError if the data is invalid or has no end."""
    source = BatchSource(data, "eval_data", serialize)
    if source.endless:
        raise JobError("the job's eval_data has no end; pass a dataset without .repeat()")
    return source


def with_any_batch_size(spec: Any, name: str | None = None) -> Any:
    """Return the spec of a tensor for batches of any size, with this name unless it is ragged or sparse."""
    shape = [None, *spec.shape[1:]]
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return (
        tf.SparseTensorSpec(shape, spec.dtype)
        if isinstance(spec, tf.SparseTensorSpec)
        else tf.TensorSpec(shape, spec.dtype, name)
    )


def add_class_weights(dataset: Any, class_weight: Mapping[int, float]) -> Any:
    """Return the batches with a weight for each sample by its class, by default 1, as Keras's `fit` of arrays.

    A target is the number of a class, or a vector with its largest number at the index of the class. JobError if class_weight
    or the data is invalid.
    """
    if not isinstance(dataset, tf.data.Dataset):
        return dataset  # `BatchSource` refuses it
    try:
        pairs = sorted((operator.index(number), float(weight)) for number, weight in class_weight.items())
    except (AttributeError, TypeError, ValueError):
        line = f"class_weight={class_weight!r} is invalid. Valid: a number for each class, such as {{0: 0.5, 1: 3.0}}"
        raise JobError(line) from None
    spec = dataset.element_spec
    targets = spec[1] if isinstance(spec, tuple) and len(spec) == 2 else None
    if not isinstance(targets, tf.TensorSpec) or targets.dtype == tf.string:
        has = "has sample weights" if isinstance(spec, tuple) and len(spec) > 2 else "has no targets of one output, as numbers"
        raise JobError(
            f"class_weight is invalid: the data {has}. Valid: elements (inputs, targets) for a model with one output"
        )

    def weigh(inputs: Any, targets: Any) -> tuple[Any, Any, Any]:
        numbers = tf.cast(targets, tf.float64)
        if (targets.shape.rank or 1) > 1:
            numbers = tf.cond(
                tf.shape(numbers)[-1] > 1,
                lambda: tf.cast(tf.argmax(numbers, -1), tf.float64),
                lambda: tf.gather(numbers, 0, axis=-1),
            )
        labels = tf.cast(tf.round(numbers), tf.int64)
        classes, weights = tf.constant([one for one, _ in pairs], tf.int64), tf.constant([one for _, one in pairs], tf.float32)
        indices = tf.reshape(tf.searchsorted(classes, tf.reshape(labels, [-1])), tf.shape(labels))
        indices = tf.minimum(indices, len(pairs) - 1)
        return inputs, targets, tf.where(tf.gather(classes, indices) == labels, tf.gather(weights, indices), 1.0)

    return dataset.map(tf.autograph.experimental.do_not_convert(weigh))


def _serialize(dataset: Any) -> Any:
    """Return a dataset's graph as a string tensor, from which another host can make the dataset."""
    return tf.raw_ops.DatasetToGraphV2(input_dataset=tf.data.experimental.to_variant(dataset), external_state_policy=1)


def _deserialize(graph: Any, element_spec: Any) -> Any:
    """Return the dataset of a serialized graph, on the current device."""
    return tf.data.experimental.from_variant(tf.raw_ops.DatasetFromGraph(graph_def=graph), element_spec)


def _endless(dataset: Any, skipped: int, stride: int) -> Any:
    """Return batches without end, after the first `skipped` ones, of every `stride`-th pass if their number is known.

    Other passes are started but not read, so that the shuffle advances. So is a pass that is skipped as a whole.
    """
    count = int(dataset.cardinality())
    if count == tf.data.INFINITE_CARDINALITY:
        return dataset.skip(skipped)
    passes, remainder = divmod(skipped, count) if count > 0 else (0, skipped)
    if count <= 0 or (not passes and stride == 1):
        return dataset.repeat().skip(remainder)

    def read(number: Any) -> Any:
        is_read = (number >= passes * stride) & (number % stride == 0)
        choices = tf.data.Dataset.from_tensors(tf.constant(0, tf.int64)).repeat(tf.cast(is_read, tf.int64) * tf.int64.max)
        return tf.data.Dataset.choose_from_datasets([dataset], choices, stop_on_empty_dataset=True)

    batches = tf.data.Dataset.range(tf.int64.max).flat_map(read).skip(remainder)
    return batches.with_options(dataset.options())


def _check(dataset: Any, name: str) -> None:
    """Check the first batch. DataError if there is no batch, JobError if its parts have different sizes."""
    try:
        element = next(iter(dataset), None)
    except tf.errors.DataLossError:
        raise
    except tf.errors.OpError as error:
        raise DataError(f"the job's {name} cannot be read: {one_line(error)}") from error
    if element is None:
        raise DataError(f"the job's {name} has no batch: it ends before the first one")
    batch = Batch.of(element)
    parts = [part for part in tf.nest.flatten(tuple(batch)) if part is not None]
    if any(part.shape.rank == 0 for part in parts):
        raise JobError(f"the job's {name} has a single number in place of one for each sample: add .batch(…)")
    sizes = {int(part.shape[0]) for part in parts}
    if len(sizes) > 1 or 0 in sizes:
        what = f"a batch of the job's {name} has parts of {', '.join(map(str, sorted(sizes)))} samples"
        raise JobError(f"{what}. Valid: the same number of inputs, targets and weights")
