"""Export a SavedModel for one process, independent of the cluster that trained it."""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable, Sequence
from keyword import iskeyword
from typing import Any

from scaletier import checkpoint
from scaletier.data import BatchSource, with_any_batch_size
from scaletier.functional_model import Batch, FunctionalModel
from scaletier.job import Job, JobError
from scaletier.private import resources
from scaletier.tensorflow_setup import import_tensorflow, one_line, say

tf = import_tensorflow()
import keras  # noqa: E402 - after TensorFlow, whose log messages are held back


def make_serving_module(job: Job, network: FunctionalModel, shared: Sequence[Any], local: Sequence[Any], inputs: Any) -> Any:
    """Return the `tf.Module` to export.

    Its signature `serving_default` is the function that `Job.serving` returns. The default maps the model's inputs by name to
    its outputs; inputs that are not in a dict are `inputs`, `inputs_1`, ….

    Args:
        shared, local: tf.Variables in the network's order.
        inputs: the spec of the model's inputs.

    Raises:
        JobError: `Job.serving` returns no tf.function.
    """
    module = tf.Module()
    module.shared, module.local = list(shared), list(local[: len(local) - len(network.slots)])
    module.resources = resources(network.model)
    module.serve = (job.serving or _default_serving(inputs))(
        lambda inputs: network.predict(module.shared, module.local, inputs)
    )
    if not hasattr(module.serve, "get_concrete_function"):
        line = f"the job's serving returned a {type(module.serve).__name__}; valid is a tf.function with an input_signature"
        raise JobError(line)
    return module


def export(module: Any, job_dir: str) -> str:
    """Write a module of `make_serving_module`; return the path, `<job_dir>/export/Servo/<seconds since 1970>`.

    The folder appears atomically on a file system, and object by object in a bucket (gs://).
    """
    folder = f"{job_dir}/export/Servo"
    timestamp = int(time.time())
    try:
        while tf.io.gfile.exists(f"{folder}/{timestamp}"):
            timestamp += 1
        # Readers of the folder, such as TensorFlow Serving, ignore names that are not numbers.
        temporary = f"{folder}/temp-{timestamp}"
        if tf.io.gfile.exists(temporary):
            tf.io.gfile.rmtree(temporary)
        tf.saved_model.save(module, temporary, signatures=module.serve)
        tf.io.gfile.rename(temporary, f"{folder}/{timestamp}")
    except (AssertionError, ValueError, TypeError) as error:
        raise JobError(f"the model cannot be exported, but its checkpoints are there: {one_line(error)}") from error
    except tf.errors.OpError as error:
        raise checkpoint.write_failure(folder, error) from error
    return f"{folder}/{timestamp}"


def save_model(model: Any, job_dir: str) -> None:
    """Write a Keras model with its optimizer to `<job_dir>/export/model.keras`; log a line if Keras cannot."""
    folder = f"{job_dir}/export"
    try:
        tf.io.gfile.makedirs(folder)
        model.save(f"{folder}/temp.keras")
        tf.io.gfile.rename(f"{folder}/temp.keras", f"{folder}/model.keras", overwrite=True)
    except (OSError, tf.errors.OpError) as error:
        raise checkpoint.write_failure(folder, error) from error
    except (ValueError, TypeError, NotImplementedError) as error:
        say(f"There is no {folder}/model.keras: {one_line(error)}")


def _default_serving(inputs: Any) -> Callable[[Callable[[Any], Any]], Any]:
    """Return the default of `Job.serving`: a function that makes a tf.function from inputs by name to outputs by name."""
    # A ragged or sparse input becomes several tensors, whose names begin with the parameter's name.
    specs = _by_name(inputs, "inputs", _parameter_name)
    if len({name.lower() for name in specs}) < len(specs):  # TensorFlow ignores case
        specs = _by_name(list(specs.values()), "inputs")
    signature = [with_any_batch_size(one, name) for name, one in specs.items()]

    def serving(predict: Callable[[Any], Any]) -> Any:
        def serve(*arguments: Any) -> dict[str, Any]:
            tensors = iter(arguments)
            return _by_name(predict(keras.tree.map_structure(lambda one: one and next(tensors), inputs)), "outputs")

        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in specs]
        vars(serve)["__signature__"] = inspect.Signature(parameters)
        return tf.function(serve, input_signature=signature, autograph=False)

    return serving


def _parameter_name(name: str) -> str:
    """Return a name changed to one that a parameter of a tf.function can have, as TensorFlow changes names of tensors."""
    name = re.sub(r"\W", "_", name, flags=re.ASCII)
    return f"arg_{name}" if not name[:1].isalpha() or iskeyword(name) or name == "self" else name


def _by_name(structure: Any, default: str, to_name: Callable[[str], str] = str) -> dict[str, Any]:
    """Return the tensors of a structure by name, without those that are None.

    In a dict the name is the path, such as `a_price`. Elsewhere, or if two paths have one name, the names are numbered:
    `inputs`, `inputs_1`, ….
    """
    parts = [(path, part) for path, part in keras.tree.flatten_with_path(structure) if part is not None]
    names = [to_name("_".join(map(str, path))) for path, _ in parts]
    if not isinstance(structure, dict) or len(set(names)) < len(names):
        names = [f"{default}_{at}" if at else default for at in range(len(parts))]
    return dict(zip(names, (part for _, part in parts), strict=True))


def export_latest(job: Job, job_dir: str, seed: int) -> str:
    """Export the newest checkpoint of a job that ended before its export; return the path."""
    if checkpoint.latest_path(job_dir) is None:
        raise checkpoint.CheckpointError(f"there is no checkpoint in {checkpoint.directory(job_dir)}")
    spec = BatchSource(job.data).element_spec
    network = FunctionalModel(job, spec, seed)
    reader = checkpoint.open_newest(job_dir, network)
    assert reader
    state = checkpoint.TrainingState(network, reader)
    state.assign_ema()
    return export(make_serving_module(job, network, state.shared, state.local, Batch.of(spec).inputs), job_dir)
