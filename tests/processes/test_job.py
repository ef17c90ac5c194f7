"""Run a job as a separate program: to its end, ended by a signal, and resumed without a difference."""

from __future__ import annotations

import os
import re
import signal
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import Program
from waiting import limit

from ops.plan import profile
from scaletier.tensorflow_setup import import_tensorflow

tf = import_tensorflow()
ROOT = Path(__file__).resolve().parents[2]


def start(script: str, folder: Path, *flags: str, **environ: str) -> Program:
    (folder / "script.py").write_text(textwrap.dedent(script))
    env = {key: value for key, value in os.environ.items() if key not in ("TF_CONFIG", "JOB_DIR")}
    env |= {"PYTHONPATH": str(ROOT), **environ}
    return Program(str(folder / "script.py"), *flags, env=env, folder=ROOT, log=folder / "log")


def test_a_program_in_tf_estimator_style_runs(tmp_path: Path) -> None:
    script = """
        import keras, numpy, scaletier, tensorflow as tf

        def data():
            x = numpy.ones((8, 3), "float32")
            return tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(4)

        def model():
            made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            made.compile("sgd", "mse", metrics=["mae"])
            return made

        scaletier.train_and_evaluate(model, scaletier.TrainSpec(data, 9), scaletier.EvalSpec(data, throttle_secs=30))
        print("nothing runs behind it")
    """
    process = start(script, tmp_path, JOB_DIR=str(tmp_path / "job"))
    output = process.output(limit())
    assert process.returncode == 0
    assert re.search(r"^Final metrics after 9 steps, loss: \S+, mae: \S+$", output, re.MULTILINE)
    assert "nothing runs behind it" not in output
    assert [*(tmp_path / "job/export/Servo").iterdir()]


STOPPED = """
    import os, keras, numpy, scaletier, signal, sys, tensorflow as tf

    random = numpy.random.default_rng(1)
    inputs, targets = random.normal(size=(100, 6)).astype("float32"), random.integers(0, 3, 100)

    def data():
        return tf.data.Dataset.from_tensor_slices((inputs, targets)).shuffle(100, seed=5).repeat().batch(8)

    def model():
        layers = keras.layers.Dense(16, "relu"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)
        return keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(3)])

    class Ends(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            def end(now):
                if now == int(os.environ.get("END_AT", "-1")):
                    os.kill(os.getpid(), signal.SIGTERM)
                return numpy.float32(0.01)
            return tf.ensure_shape(tf.numpy_function(end, [step], tf.float32), [])

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    job = scaletier.Job(model, data, loss, ["accuracy"], lambda: keras.optimizers.Adam(Ends()))
    scaletier.run(job)
"""


def tensors(folder: Path, step: int) -> dict[str, Any]:
    reader = tf.train.load_checkpoint(str(folder / f"checkpoints/model-{step}"))
    kinds = reader.get_variable_to_dtype_map()
    return {key: reader.get_tensor(key) for key, kind in kinds.items() if kind.is_floating or kind.is_integer}


@pytest.mark.full("test_arithmetic.py[sync, resumed] proves the weights; this one proves all that a checkpoint has")
def test_a_resumed_run_equals_an_unbroken_one(tmp_path: Path) -> None:
    flags = "--max-steps=60", "--seed=3", "--sync-period=8"
    unbroken = start(STOPPED, tmp_path, *flags, JOB_DIR=str(tmp_path / "whole"))
    assert unbroken.wait(limit()) == 0
    terminated = start(STOPPED, tmp_path, *flags, JOB_DIR=str(tmp_path / "ended"), END_AT="29")
    output = terminated.output(limit())
    assert terminated.returncode == -signal.SIGTERM
    stop = re.search(r"^Ends by SIGTERM at step (\d+); a checkpoint is saved$", output, re.MULTILINE)
    assert stop
    assert 30 <= int(stop[1]) < 60
    resumed = start(STOPPED, tmp_path, *flags, JOB_DIR=str(tmp_path / "ended"))
    output = resumed.output(limit())
    assert resumed.returncode == 0
    assert f"Resuming from {tmp_path}/ended/checkpoints/model-{stop[1]}, step {stop[1]}" in output
    assert "from its beginning" not in output
    unbroken_tensors, resumed_tensors = tensors(tmp_path / "whole", 60), tensors(tmp_path / "ended", 60)
    assert unbroken_tensors.keys() == resumed_tensors.keys()
    assert {"global_step", "optimizer:adam:iteration"} < {key.partition("/")[0] for key in unbroken_tensors}
    assert len(unbroken_tensors) >= 20, "weights, moving means, the optimizer's and the generators' variables"
    for key, value in unbroken_tensors.items():
        assert np.array_equal(value, resumed_tensors[key]), key
    layers = 6 * 16 + 16, 4 * 16, 16 * 3 + 3
    assert profile.parameter_bytes(tmp_path / "whole") == 4 * sum(layers)


def test_writing_summaries_does_not_import_tensorboard(tmp_path: Path) -> None:
    script = """
        import sys, tempfile, numpy
        from scaletier.summaries import Summaries
        summaries = Summaries(tempfile.mkdtemp())
        summaries.scalars(1, {"a": 1})
        summaries.images(1, {"b": numpy.zeros((1, 28, 28), "uint8")})
        print([name for name in sys.modules if name.startswith("tensorboard")])
    """
    assert start(script, tmp_path).output(limit()) == "[]\n"
