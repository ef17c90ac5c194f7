"""A job's data, as each replica takes it: batches without end."""

from __future__ import annotations

import hashlib
from typing import Any

from scaletier.job import JobError, kind_of, wants_argument
from scaletier.network import Batch
from scaletier.runtime import here, import_tensorflow, one_line

tf = import_tensorflow()

_REPLICAS = 1000
_FIRST_BATCHES = 16


class DataError(RuntimeError):
    """There is no data, or it cannot be read: the message is one line. A job's own functions may raise it."""


def batch_errors() -> tuple[type[Exception], ...]:
    """What TensorFlow raises for a batch that it cannot make, or that a model cannot take: a label that is no class, a word
    that an embedding does not have, a file that is gone, a program's own error in making it.
    """
    errors = tf.errors
    return (
        errors.InvalidArgumentError,
        errors.NotFoundError,
        errors.OutOfRangeError,
        errors.PermissionDeniedError,
        errors.UnimplementedError,
        errors.UnknownError,
    )


def replica_seed(seed: int, replica: int) -> int:
    """The seed of one replica's order of the data: of one job no two are the same, up to 1,000 replicas."""
    return seed * _REPLICAS + replica


class Source:
    """A job's data, for as often as it is asked for; JobError for what is no data.

    With `portable` it can still be asked for once this process has joined a cluster, when TensorFlow knows nothing of what it
    had before: what is not made by a function is then kept as the graph that makes it.
    """

    def __init__(self, data: Any, name: str = "data", portable: bool = False) -> None:
        if data is None:
            raise JobError("the job has no data: pass Job(data=…), a tf.data.Dataset of batches or a function that makes one")
        self.name, self._data = name, data
        self._by_replica = callable(data) and wants_argument(data)
        self._graph: Any = None
        first = self._made(tf.distribute.InputContext())
        self.element_spec, self.endless = first.element_spec, bool(first.cardinality() == tf.data.INFINITE_CARDINALITY)
        if any(
            getattr(one, "shape", None) is not None and one.shape.rank is None for one in tf.nest.flatten(first.element_spec)
        ):
            raise JobError(f"the job's {name} does not say how many dimensions it has; give from_generator an output_signature")
        check(first, name)
        if portable and not callable(data):
            self._graph = graph(data).numpy()

    def _made(self, context: Any) -> Any:
        if self._graph is not None:
            with here():
                packed = tf.constant(self._graph)
            return made(packed, self.element_spec)
        try:
            found = (self._data(context) if self._by_replica else self._data()) if callable(self._data) else self._data
        except (tf.errors.OpError, OSError) as error:
            raise DataError(f"the job's {self.name} cannot be made: {one_line(error)}") from error
        if not isinstance(found, tf.data.Dataset):
            valid = "a tf.data.Dataset of batches, or a function that makes one"
            raise JobError(f"the job's {self.name} is {kind_of(found)}; valid is {valid}")
        return found

    def training(self, replica: int = 0, replicas: int = 1) -> Any:
        """Batches without end for one of so many replicas.

        Of a dataset that all have in common each takes every n-th batch. Where the batches are no multiple of n it takes others
        each time that the data begins again, so that all replicas see all data.
        """
        found = self._made(tf.distribute.InputContext(replicas, replica, replicas))
        found = found if self.endless else found.repeat()
        return found if self._by_replica or replicas == 1 else found.shard(replicas, replica)

    def once(self) -> Any:
        """The batches, each once."""
        return self._made(tf.distribute.InputContext())

    @property
    def batch_size(self) -> int | None:
        """How many samples each batch has, where the data says so before it is read."""
        size: int | None = tf.nest.flatten(self.element_spec)[0].shape[0]
        return size

    def largest(self) -> int:
        """How many samples the largest of the first batches has: it may be another than the first one."""
        sizes = self.once().take(_FIRST_BATCHES).map(lambda *parts: tf.shape(tf.nest.flatten(parts)[0])[0])
        return max(int(size) for size in sizes)

    def elsewhere(self, replica: int, replicas: int) -> Any:
        """As `training`, on the current device, which may be another host's. A job's function runs on this one."""
        if self._graph is not None:
            return self.training(replica, replicas)
        with here():
            packed = graph(self.training(replica, replicas))
        return made(packed, self.element_spec)


def evaluation(data: Any, portable: bool = False) -> Source:
    """What to evaluate on; JobError for what is no data, or has no end."""
    found = Source(data, "eval_data", portable)
    if found.endless:
        raise JobError("the job's eval_data has no end; pass a dataset without .repeat()")
    return found


def graph(dataset: Any) -> Any:
    """What makes this dataset again on another host, a string tensor, by `made`."""
    return tf.raw_ops.DatasetToGraphV2(input_dataset=tf.data.experimental.to_variant(dataset), external_state_policy=1)


def fingerprint(dataset: Any) -> str:
    """Of two datasets it is the same where they are made by the same operations of the same numbers, such as sizes and seeds.

    Names are left out, which count what a process has made before.
    """
    told = tf.compat.v1.GraphDef.FromString(graph(dataset).numpy())
    nodes = [*told.node, *(node for function in told.library.function for node in function.node_def)]
    parts = [
        node.op.encode() + (node.attr["value"].tensor.SerializeToString() if node.op == "Const" else b"") for node in nodes
    ]
    return hashlib.sha256(b"\0".join(sorted(parts))).hexdigest()


def made(graph: Any, spec: Any) -> Any:
    """The dataset of a graph, on the current device; `spec` is its element_spec."""
    return tf.data.experimental.from_variant(tf.raw_ops.DatasetFromGraph(graph_def=graph), spec)


def check(dataset: Any, name: str) -> None:
    """Reads a first batch. DataError where there is none or it cannot be read; JobError where its parts are of other sizes.

    tf.errors.DataLossError where it is damaged, which the job may have something to say about.
    """
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
        raise JobError(f"the job's {name} has a single number where there is to be one for each sample: add .batch(…)")
    sizes = {int(part.shape[0]) for part in parts}
    if len(sizes) > 1 or 0 in sizes:
        counts = ", ".join(map(str, sorted(sizes)))
        raise JobError(
            f"a batch of the job's {name} has parts of {counts} samples; all inputs, targets and weights have as many"
        )
