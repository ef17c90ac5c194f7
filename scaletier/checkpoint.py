"""Save and restore checkpoints: all state of a job's training, independent of strategy and cluster."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from scaletier.data import BatchSource
from scaletier.functional_model import Batch, FunctionalModel
from scaletier.job import DataError
from scaletier.private import is_lost_host
from scaletier.tensorflow_setup import import_tensorflow, one_line, say, send
from scaletier.variables import VariableSpec

tf = import_tensorflow()

# TensorFlow's errors for a file that is cut short or of another kind.
_DAMAGE = (tf.errors.OpError, RuntimeError, ValueError, IndexError)
_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
# The global step, the step at which the data began, a description of the data, the state of callbacks, a hash of vocabularies,
# and the number of replicas.
_STEP, _DATA_BEGIN, _DATA = "global_step", "data_begin", "data_of"
CALLBACKS, VOCABULARY_HASH, REPLICAS = "callbacks", "vocabulary_of", "replicas"
# Names that a checkpoint, or tf.train.Checkpoint, uses itself.
_RESERVED = frozenset({_STEP, _DATA_BEGIN, _DATA, CALLBACKS, VOCABULARY_HASH, REPLICAS, "root", "save_counter"})
_NAME, _INDEX = "model", ".index"


class CheckpointError(RuntimeError):
    """A checkpoint that this job cannot resume from; the message is one line."""


class CheckpointReadError(CheckpointError):
    """A checkpoint that is damaged or missing."""


def directory(job_dir: str) -> str:
    return f"{job_dir}/checkpoints"


def list_newest_first(job_dir: str) -> list[str]:
    """Return the paths of the job's checkpoints by TensorFlow's list, or by name if the list is damaged or missing."""
    state = _read_list(job_dir)
    if state and state.all_model_checkpoint_paths:
        return list(reversed(state.all_model_checkpoint_paths))
    paths = [path.removesuffix(_INDEX) for path in tf.io.gfile.glob(f"{directory(job_dir)}/{_NAME}-*{_INDEX}")]
    numbered = [(int(number), path) for path in paths if (number := path.rpartition("-")[2]).isdecimal()]
    return [path for _, path in sorted(numbered, reverse=True)]


def _read_list(job_dir: str) -> Any:
    """Return TensorFlow's list of checkpoints, or None if there is no readable list."""
    try:
        return tf.train.get_checkpoint_state(directory(job_dir))
    except ValueError:
        return None


def _rebuild_list(job_dir: str) -> None:
    """Rebuild TensorFlow's list from the existing checkpoints if it is damaged or missing."""
    if _read_list(job_dir) is not None:
        return
    if paths := list_newest_first(job_dir)[::-1]:
        times = [tf.io.gfile.stat(f"{path}{_INDEX}").mtime_nsec / 1e9 for path in paths]
        tf.compat.v1.train.update_checkpoint_state(
            directory(job_dir), paths[-1], all_model_checkpoint_paths=paths, all_model_checkpoint_timestamps=times
        )
    elif tf.io.gfile.exists(listed := f"{directory(job_dir)}/checkpoint"):
        tf.io.gfile.remove(listed)


def latest_path(job_dir: str) -> str | None:
    return next(iter(list_newest_first(job_dir)), None)


class CheckpointReader:
    """Read a checkpoint one variable at a time: all of it may exceed this host's memory.

    Attributes:
        step: the global step.
        local: the `local` variables to restore: those that the checkpoint has. If one other than a moving average is
            missing, only those of floating point that no step changes.
        data_description: of the data that the checkpoint was trained on; empty if it has none.
        callbacks: the state of callbacks; empty if it has none.
        missing_line: a line about the first missing variable, or None.

    Raises:
        CheckpointError: the checkpoint is of another model; the line names the first variable that differs.
        CheckpointReadError: the checkpoint is damaged or missing. `value`, `read` and `check` raise it too.
    """

    def __init__(self, path: str, network: FunctionalModel) -> None:
        self.path = path
        try:
            self._reader = tf.train.load_checkpoint(path)
            shapes = self._reader.get_variable_to_shape_map().items()
            self._shapes = {key.removesuffix(_SUFFIX): tuple(shape) for key, shape in shapes if key.endswith(_SUFFIX)}
        except _DAMAGE as error:
            raise self._unreadable(error) from None
        self.step = int(self.read(_STEP))
        self.data_description, self.callbacks, vocabulary_hash = (
            bytes(self.read(key)).decode() if key in self._shapes else "" for key in (_DATA, CALLBACKS, VOCABULARY_HASH)
        )
        if vocabulary_hash and vocabulary_hash != network.vocabulary:
            line = f"checkpoint {path} is invalid: the layers of {network.model.name} had another vocabulary."
            raise CheckpointError(f"{line} Valid: the same vocabulary, or another --job-dir")
        # Constants of another kind may be states of random generators that the model does not use.
        constants = [spec for spec in network.constants if tf.as_dtype(spec.dtype).is_floating]
        for spec in (*network.shared, *constants):
            if (shape := self._shapes.get(key_of(spec))) != spec.shape:
                problem = "has none" if shape is None else f"holds it as {shape}"
                line = f"checkpoint {path} is of another model: {network.model.name} has variable {spec.name} {spec.shape},"
                raise CheckpointError(f"{line} it {problem}; pass another --job-dir, or the checkpoint's model")
        self._reset_values = {key_of(spec): network.initial(spec) for spec in network.learning_rates}
        if network.replicas == 1 and self._had_several_replicas(network):
            # The optimizer of one of several replicas has counted only its own steps.
            self._reset_values |= {key_of(spec): network.initial(spec) + self.step for spec in network.iterations}
        # Moving averages may be missing: they begin with the weights.
        absent = [spec for spec in network.local if self._shapes.get(key_of(spec)) != spec.shape]
        missing = [spec.name for spec in absent if spec.name not in network.ema_slots]
        self.local = constants if missing else [spec for spec in network.local if spec not in absent]
        self.missing_line = (
            f"{path} has no {missing[0]}: the optimizer and random numbers start from scratch" if missing else None
        )

    def _had_several_replicas(self, network: FunctionalModel) -> bool:
        """Return True if several replicas trained; if their number is missing, estimate by the optimizer's count of steps."""
        if REPLICAS in self._shapes:
            return bool(self.read(REPLICAS) > 1)
        stored = [spec for spec in network.iterations if key_of(spec) in self._shapes]
        return 2 * max((int(self.read(key_of(spec)) - network.initial(spec)) for spec in stored), default=0) <= self.step

    def value(self, spec: VariableSpec) -> npt.NDArray[Any]:
        """Return a variable's value; for a variable that is reset on each start, the network's initial value."""
        key = key_of(spec)
        value = self._reset_values[key] if key in self._reset_values else self.read(key)
        return value.astype(tf.as_dtype(spec.dtype).as_numpy_dtype, copy=False)

    def source(self, spec: VariableSpec, network: FunctionalModel) -> VariableSpec | None:
        """Return the variable whose value to read for `spec`: itself, or for a missing moving average its weight; else None."""
        if spec in network.shared or spec in self.local:
            return spec
        return network.shared[network.ema_slots[spec.name]] if spec.name in network.ema_slots else None

    def read(self, key: str) -> npt.NDArray[Any]:
        try:
            return self._reader.get_tensor(key + _SUFFIX)  # type: ignore[no-any-return]
        except _DAMAGE as error:
            raise self._unreadable(error) from None

    def check(self) -> None:
        """Read all variables once, one at a time."""
        for key in self._shapes:
            self.read(key)

    def _unreadable(self, error: Exception) -> CheckpointReadError:
        return CheckpointReadError(f"checkpoint {self.path} cannot be read: {one_line(error)}")


def write_failure(path: str, error: Exception) -> Exception:
    """Return the exception to raise for a failed write: the error itself if a host is lost, else DataError."""
    line = f"{path} cannot be written to: {one_line(error)}; make room there, and run the job again"
    return error if is_lost_host(error) else DataError(line)


def key_of(spec: VariableSpec) -> str:
    """Return a variable's name in a checkpoint, which reserves slashes, dots and some words."""
    return f"{spec.name}:" if spec.name in _RESERVED else spec.name.replace("/", ":").replace(".", "%")


def open_to_resume(job_dir: str, network: FunctionalModel) -> CheckpointReader | None:
    """Return the checkpoint of `open_newest`, and log a line about it."""
    if reader := open_newest(job_dir, network):
        say(f"Resuming from {reader.path}, step {reader.step}")
        if reader.missing_line:
            say(reader.missing_line)
    return reader


def open_newest(job_dir: str, network: FunctionalModel) -> CheckpointReader | None:
    """Return the newest readable checkpoint, or None if there is no checkpoint; CheckpointError if none can be read."""
    paths = list_newest_first(job_dir)
    for path in paths:
        try:
            reader = CheckpointReader(path, network)
            reader.check()
        except CheckpointReadError as error:
            if path == paths[-1]:
                raise
            say(f"{error}; continues from an older one")
        else:
            return reader
    return None


class DataPosition:
    """Hold the global step at which the job's data began, `first_step`; `variables` are saved in checkpoints."""

    def __init__(self, source: BatchSource, reader: CheckpointReader | None) -> None:
        with tf.device("/device:CPU:0"):
            self.first_step, description = tf.Variable(np.int64(0)), tf.Variable(source.description)
        self.variables = {_DATA_BEGIN: self.first_step, _DATA: description}
        if reader and reader.data_description == source.description:
            self.first_step.assign(reader.read(_DATA_BEGIN))
        elif reader:
            say("The data starts from its beginning: it differs from the data of the checkpoint")
            self.first_step.assign(reader.step)


class Saver:
    """Write checkpoints of variables, each on the host that holds it, into a shared directory."""

    def __init__(self, variables: Mapping[str, Any], step: Any, job_dir: str, keep: int) -> None:
        self._step, self._job_dir = step, job_dir
        # TensorFlow traces each save over several hosts anew, and warns of it.
        tf.get_logger().addFilter(lambda record: "MultiDeviceSaver.save" not in record.getMessage())
        _rebuild_list(job_dir)
        saved = tf.train.Checkpoint(**variables, **{_STEP: step})
        self._manager = tf.train.CheckpointManager(saved, directory(job_dir), max_to_keep=keep, checkpoint_name=_NAME)

    def save(self) -> None:
        """Write a checkpoint and remove the oldest ones; a partly written checkpoint is never the latest."""
        try:
            self._manager.save(checkpoint_number=int(self._step))
        except tf.errors.OpError as error:
            raise write_failure(directory(self._job_dir), error) from error


class TrainingState:
    """Hold a job's variables and its global step on this host, to evaluate, save and export them.

    The chief trains them in place; with `sync` every replica has a state and trains it. Graphs take their
    handles as `variables.Variables`.

    Attributes:
        evaluates_ema: True if evaluations use the optimizer's moving averages of weights.
    """

    evaluates_ema = False

    def __init__(
        self,
        network: FunctionalModel,
        reader: CheckpointReader | None = None,
        device_of: Callable[[VariableSpec], str] = lambda _: "/device:CPU:0",
    ) -> None:
        """Create the variables, each on its device, with their initial values or those of a checkpoint.

        One value at a time is in the memory of this process.
        """

        def make(spec: VariableSpec) -> Any:
            source = reader.source(spec, network) if reader else None
            value = reader.value(source) if reader and source else network.initial(spec)
            device = device_of(spec)
            with tf.device(device):
                # TensorFlow takes fewer characters in names than Keras
                return tf.Variable(send(value, device), name=re.sub(r"^[\W_]|[^\w.\\/>-]", ".", spec.name, flags=re.ASCII))

        self.network = network
        self.shared, self.local = ([make(spec) for spec in specs] for specs in (network.shared, network.local))
        with tf.device("/device:CPU:0"):
            self.step = tf.Variable(np.int64(reader.step if reader else 0), name=_STEP)
        if reader:
            self.set_constants()

    @property
    def variables(self) -> dict[str, Any]:
        return {key_of(spec): variable for spec, variable in self.pairs()}

    def pairs(self) -> Iterator[tuple[VariableSpec, Any]]:
        """Return the spec of each variable of the network with the tf.Variable that holds its value."""
        return zip((*self.network.shared, *self.network.local), (*self.shared, *self.local), strict=True)

    @property
    def is_complete(self) -> bool:
        """False if a lost host interrupted `shared_parameters.assign_parts`, which frees values before it assigns new ones."""
        return all(variable.read_value().shape == spec.shape for spec, variable in self.pairs())

    @property
    def constants(self) -> list[Any]:
        return [variable for spec, variable in self.pairs() if spec in self.network.constants]

    def initial_test_state(self) -> list[Any]:
        """Return the state of layers, random generators and metrics before an evaluation's first batch."""
        return self.network.initial_test_state(self.shared, self.local)

    def test(self, test_state: Sequence[Any], batch: Batch) -> tuple[Any, Any, list[Any], Any]:
        """Evaluate a batch with the current variables; see `FunctionalModel.test`."""
        return self.network.test(self.ema_shared if self.evaluates_ema else self.shared, self.local, test_state, batch)

    @property
    def ema_shared(self) -> list[Any]:
        """The variables of `shared`, with the moving averages of weights in place of the weights, if there are any."""
        averages = {id(weight): average for average, weight in self.network.ema_pairs(self.shared, self.local)}
        return [averages.get(id(variable), variable) for variable in self.shared]

    def assign_ema(self) -> None:
        """Assign the moving averages to the weights, as `fit` of Keras does at its end; a checkpoint has both."""
        for average, weight in self.network.ema_pairs(self.shared, self.local):
            with tf.device(weight.device):
                weight.assign(average, read_value=False)

    def end_test(self, test_state: Sequence[Any]) -> None:
        """Assign what an evaluation changed, as Keras does: states of layers and of random generators, and metrics."""
        changed = *self.network.changing(self.shared, self.local), *self.network.metrics
        for variable, value in zip(changed, test_state, strict=True):
            variable.assign(value)

    def restore(self, reader: CheckpointReader) -> int:
        """Load a checkpoint, one variable at a time, and `assign_ema`; return the checkpoint's global step."""
        for spec, variable in self.pairs():
            if (source := reader.source(spec, self.network)) is not None:
                variable.assign(reader.value(source))
        self.set_constants()
        self.assign_ema()
        return reader.step

    def set_constants(self) -> None:
        """Give the network the present values of the variables that no step changes, as their initial values."""
        self.network.set_constants([variable.numpy() for variable in self.constants])
