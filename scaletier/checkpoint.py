"""Checkpoints of a job: all state of its training, independent of strategy and cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from scaletier.data import BatchSource, DataError
from scaletier.functional_model import Batch, FunctionalModel, VariableSpec
from scaletier.private import is_lost_host
from scaletier.tensorflow_setup import import_tensorflow, one_line, say, send

tf = import_tensorflow()

# TensorFlow's errors for a file that is cut short or of another kind.
_DAMAGE = (tf.errors.OpError, RuntimeError, ValueError, IndexError)
_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
# The global step, the step at which the data began, a description of the data, those of callbacks and vocabularies, and the
# number of replicas.
_STEP, _DATA, _DATA_OF, CALLBACKS, VOCABULARY = "global_step", "data_begin", "data_of", "callbacks", "vocabulary_of"
REPLICAS = "replicas"
# Names that a checkpoint, or tf.train.Checkpoint, uses itself.
_RESERVED = frozenset({_STEP, _DATA, _DATA_OF, CALLBACKS, VOCABULARY, REPLICAS, "root", "save_counter"})
_NAME, _INDEX = "model", ".index"


class CheckpointError(RuntimeError):
    """A checkpoint that this job cannot resume from; the message is one line."""


class CheckpointReadError(CheckpointError):
    """A checkpoint that is damaged or missing."""


def directory(job_dir: str) -> str:
    return f"{job_dir}/checkpoints"


def newest_first(job_dir: str) -> list[str]:
    """Return the paths of the job's checkpoints by TensorFlow's list, or by name if that is damaged or missing."""
    state = _read_list(job_dir)
    if state and state.all_model_checkpoint_paths:
        return list(reversed(state.all_model_checkpoint_paths))
    paths = [path.removesuffix(_INDEX) for path in tf.io.gfile.glob(f"{directory(job_dir)}/{_NAME}-*{_INDEX}")]
    numbered = [(int(number), path) for path in paths if (number := path.rpartition("-")[2]).isdecimal()]
    return [path for _, path in sorted(numbered, reverse=True)]


def _read_list(job_dir: str) -> Any:
    """Return TensorFlow's list of checkpoints, or None if there is no readable one."""
    try:
        return tf.train.get_checkpoint_state(directory(job_dir))
    except ValueError:
        return None


def _rebuild_list(job_dir: str) -> None:
    """Rebuild TensorFlow's list from the existing checkpoints if it is damaged or missing."""
    if _read_list(job_dir) is not None:
        return
    if paths := newest_first(job_dir)[::-1]:
        times = [tf.io.gfile.stat(f"{path}{_INDEX}").mtime_nsec / 1e9 for path in paths]
        tf.compat.v1.train.update_checkpoint_state(
            directory(job_dir), paths[-1], all_model_checkpoint_paths=paths, all_model_checkpoint_timestamps=times
        )
    elif tf.io.gfile.exists(listed := f"{directory(job_dir)}/checkpoint"):
        tf.io.gfile.remove(listed)


def latest(job_dir: str) -> str | None:
    return next(iter(newest_first(job_dir)), None)


class CheckpointReader:
    """Read a checkpoint one variable at a time: the whole may be larger than this host's memory.

    Attributes:
        step: the global step.
        local: the `local` variables to restore: those that the checkpoint has, or only `constants` of float32 if any but an
            average is missing.
        data_of: the description of the data that the checkpoint was trained on, empty if it has none.
        callbacks: the state of callbacks, empty if it has none.
        missing_line: a line about the first missing variable, or None.

    Raises:
        CheckpointError: the checkpoint is of another model; the line names the first variable that differs.
        CheckpointReadError: the checkpoint is damaged or missing. `value`, `named` and `check` raise it too.
    """

    def __init__(self, path: str, network: FunctionalModel) -> None:
        self.path = path
        try:
            self._reader = tf.train.load_checkpoint(path)
            shapes = self._reader.get_variable_to_shape_map().items()
            self._shapes = {key.removesuffix(_SUFFIX): tuple(shape) for key, shape in shapes if key.endswith(_SUFFIX)}
        except _DAMAGE as error:
            raise self._unreadable(error) from None
        self.step = int(self.named(_STEP))
        self.data_of, self.callbacks, vocabulary = (
            bytes(self.named(key)).decode() if key in self._shapes else "" for key in (_DATA_OF, CALLBACKS, VOCABULARY)
        )
        if vocabulary and vocabulary != network.vocabulary:
            line = f"checkpoint {path} is invalid: the layers of {network.model.name} had another vocabulary."
            raise CheckpointError(f"{line} Valid: the same vocabulary, or another --job-dir")
        fixed = [spec for spec in network.constants if spec.dtype == "float32"]  # and not a state that nothing draws from
        for spec in (*network.shared, *fixed):
            if (shape := self._shapes.get(key_of(spec))) != spec.shape:
                problem = "has none" if shape is None else f"holds it as {shape}"
                line = f"checkpoint {path} is of another model: {network.model.name} has variable {spec.name} {spec.shape},"
                raise CheckpointError(f"{line} it {problem}; pass another --job-dir, or the model that it is of")
        self._reset_values = {key_of(spec): network.initial(spec) for spec in network.learning_rates}
        if network.replicas == 1 and self._is_of_several(network):
            # The optimizer of one of several replicas has counted its own steps.
            self._reset_values |= {key_of(spec): network.initial(spec) + self.step for spec in network.iterations}
        # Averages may be missing: they begin with the weights.
        lacks = [spec for spec in network.local if self._shapes.get(key_of(spec)) != spec.shape]
        missing = [spec.name for spec in lacks if spec.name not in network.ema_slots]
        self.local = fixed if missing else [spec for spec in network.local if spec not in lacks]
        self.missing_line = (
            f"{path} has no {missing[0]}: the optimizer and random numbers start from scratch" if missing else None
        )

    def _is_of_several(self, network: FunctionalModel) -> bool:
        """Return True if several replicas trained; by the optimizer's count of steps if a former version did not store that."""
        if REPLICAS in self._shapes:
            return bool(self.named(REPLICAS) > 1)
        stored = [spec for spec in network.iterations if key_of(spec) in self._shapes]
        return 2 * max((int(self.named(key_of(spec)) - network.initial(spec)) for spec in stored), default=0) <= self.step

    def value(self, spec: VariableSpec) -> npt.NDArray[Any]:
        """Return a variable's value; for one that is reset on each start, the network's initial value."""
        key = key_of(spec)
        value = self._reset_values[key] if key in self._reset_values else self.named(key)
        return value.astype(tf.as_dtype(spec.dtype).as_numpy_dtype, copy=False)

    def source(self, spec: VariableSpec, network: FunctionalModel) -> VariableSpec | None:
        """Return the variable to read for this one: itself, for an average that is missing the weight, or None for neither."""
        if spec in network.shared or spec in self.local:
            return spec
        return network.shared[network.ema_slots[spec.name]] if spec.name in network.ema_slots else None

    def named(self, key: str) -> npt.NDArray[Any]:
        try:
            return self._reader.get_tensor(key + _SUFFIX)  # type: ignore[no-any-return]
        except _DAMAGE as error:
            raise self._unreadable(error) from None

    def check(self) -> None:
        """Read all of it once, a variable at a time."""
        for key in self._shapes:
            self.named(key)

    def _unreadable(self, error: Exception) -> CheckpointReadError:
        return CheckpointReadError(f"checkpoint {self.path} cannot be read: {one_line(error)}")


def write_error(place: str, error: Exception) -> Exception:
    """Return the error for a failed write below a job's directory: itself if a host is lost, else DataError."""
    line = f"{place} cannot be written to: {one_line(error)}; make room there, and run the job again"
    return error if is_lost_host(error) else DataError(line)


def key_of(spec: VariableSpec) -> str:
    """Return a variable's name in a checkpoint, which reserves slashes, dots and some words."""
    return f"{spec.name}:" if spec.name in _RESERVED else spec.name.replace("/", ":").replace(".", "%")


def find(job_dir: str, network: FunctionalModel) -> CheckpointReader | None:
    """Return the checkpoint to resume from, as `newest`, and log a line about it."""
    if reader := newest(job_dir, network):
        say(f"Resuming from {reader.path}, step {reader.step}")
        if reader.missing_line:
            say(reader.missing_line)
    return reader


def newest(job_dir: str, network: FunctionalModel) -> CheckpointReader | None:
    """Return the newest readable checkpoint, or None if there is none at all; CheckpointError if none can be read."""
    paths = newest_first(job_dir)
    for path in paths:
        try:
            reader = CheckpointReader(path, network)
            reader.check()
        except CheckpointReadError as error:
            if path == paths[-1]:
                raise
            say(f"{error}; going on from an older one")
        else:
            return reader
    return None


class DataPosition:
    """The global step at which the job's data began, `first_step`; `variables` are saved in checkpoints."""

    def __init__(self, source: BatchSource, reader: CheckpointReader | None) -> None:
        with tf.device("/device:CPU:0"):
            self.first_step, description = tf.Variable(np.int64(0)), tf.Variable(source.description)
        self.variables = {_DATA: self.first_step, _DATA_OF: description}
        if reader and reader.data_of == source.description:
            self.first_step.assign(reader.named(_DATA))
        elif reader:
            say("The data starts from its beginning: it differs from the data of the checkpoint")
            self.first_step.assign(reader.step)


class Saver:
    """Write checkpoints of variables, each on the host that holds it, into a shared directory."""

    def __init__(self, variables: Mapping[str, Any], step: Any, job_dir: str, keep: int) -> None:
        self._step, self._job_dir = step, job_dir
        # TensorFlow traces a save over several hosts again each time, and warns of it.
        tf.get_logger().addFilter(lambda record: "MultiDeviceSaver.save" not in record.getMessage())
        _rebuild_list(job_dir)
        saved = tf.train.Checkpoint(**variables, **{_STEP: step})
        self._manager = tf.train.CheckpointManager(saved, directory(job_dir), max_to_keep=keep, checkpoint_name=_NAME)

    def save(self) -> None:
        """Write a checkpoint and remove the oldest ones; half a checkpoint is never the latest."""
        try:
            self._manager.save(checkpoint_number=int(self._step))
        except tf.errors.OpError as error:
            raise write_error(directory(self._job_dir), error) from error


class TrainingState:
    """The variables on this host, which are evaluated, saved and exported.

    The chief trains them in place, and with `sync` every replica does.

    Attributes:
        tests_ema: True if evaluations are of the optimizer's moving averages of weights.
    """

    tests_ema = False

    def __init__(
        self,
        network: FunctionalModel,
        reader: CheckpointReader | None = None,
        device_of: Callable[[VariableSpec], str] = lambda _: "/device:CPU:0",
    ) -> None:
        """Create the variables as a job begins, or as in a checkpoint, each on its device; memory here has one at a time."""

        def make(spec: VariableSpec) -> Any:
            source = reader.source(spec, network) if reader else None
            value = reader.value(source) if reader and source else network.initial(spec)
            device = device_of(spec)
            with tf.device(device):
                return tf.Variable(send(value, device), name=spec.name)

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
        """Return each variable of the network with the one that holds its value."""
        return zip((*self.network.shared, *self.network.local), (*self.shared, *self.local), strict=True)

    @property
    def is_complete(self) -> bool:
        """True unless the loss of a host broke off `shared_parameters.fill`, which frees values before it assigns new ones."""
        return all(variable.read_value().shape == spec.shape for spec, variable in self.pairs())

    @property
    def constants(self) -> list[Any]:
        return [variable for spec, variable in self.pairs() if spec in self.network.constants]

    def initial_test(self) -> list[Any]:
        return self.network.initial_test(self.shared, self.local)

    def test(self, state: Sequence[Any], batch: Batch) -> tuple[Any, Any, list[Any], Any]:
        """Evaluate a batch by the variables as they are, as `FunctionalModel.test`."""
        return self.network.test(self.ema_shared if self.tests_ema else self.shared, self.local, state, batch)

    @property
    def ema_shared(self) -> list[Any]:
        """The variables of `shared`; those of averages in place of the weights' if the optimizer has any."""
        averages = {id(weight): average for average, weight in self.network.ema_pairs(self.shared, self.local)}
        return [averages.get(id(variable), variable) for variable in self.shared]

    def assign_ema(self) -> None:
        """Give the weights their averages, as `fit` of Keras does at its end; a checkpoint has both."""
        for average, weight in self.network.ema_pairs(self.shared, self.local):
            with tf.device(weight.device):
                weight.assign(average, read_value=False)

    def end_test(self, state: Sequence[Any]) -> None:
        """Keep what an evaluation changed, as Keras does: states of layers and of random generators, and metrics."""
        changed = *self.network.changing(self.shared, self.local), *self.network.metrics
        for variable, value in zip(changed, state, strict=True):
            variable.assign(value)

    def restore(self, reader: CheckpointReader) -> int:
        """Load a checkpoint, one variable at a time, with weights as at the end of training; return its global step."""
        for spec, variable in self.pairs():
            if (source := reader.source(spec, self.network)) is not None:
                variable.assign(reader.value(source))
        self.set_constants()
        self.assign_ema()
        return reader.step

    def set_constants(self) -> None:
        """Set the network's initial values of variables that no step changes to the values here."""
        self.network.set_constants([variable.numpy() for variable in self.constants])
