"""Strategy `model-parallel`: the layers of one model lie on several hosts, for a model that is too large for one.

The master and the workers hold a stage each, consecutive layers with their variables, gradients and velocities; one graph goes
through all of them. A batch goes through it in microbatches, so that a stage works on one while the next has the one before.
Source: Huang et al. 2019, "GPipe: efficient training of giant neural networks using pipeline parallelism".
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from trainer import checkpoint
from trainer.cluster import Cluster, await_peers
from trainer.data import replica_seed, train_pipeline
from trainer.descent import Descent
from trainer.flags import Flags
from trainer.keeper import Keeper, evaluation_data, training_data
from trainer.lines import train_line
from trainer.model import initial_value, make_model
from trainer.replica import DivergedError
from trainer.runtime import import_tensorflow, prepare_process, say
from trainer.stages import Stage, gradient_sums, partition

tf = import_tensorflow()


@dataclass(frozen=True)
class Step:
    """What one step came to: the global step after it, mean loss in nats and mean accuracy of its batch."""

    global_step: int
    loss: float
    accuracy: float


class ModelParallel:
    """One job, from its first step or its last checkpoint to its exported model; the chief runs it.

    The constructor raises DataError and CheckpointError.
    """

    def __init__(self, flags: Flags, cluster: Cluster) -> None:
        prepare_process()
        tf.random.set_seed(flags.seed)
        self._flags, self._model = flags, make_model(flags.model, flags.hidden_units, flags.precision)
        files, evaluated = training_data(flags), evaluation_data(flags)
        found = checkpoint.latest(flags.job_dir)
        reader = checkpoint.Reader(found, self._model) if found else None
        self._stages = self._place(_connect(cluster), reader)
        self.variables = {name: value for stage in self._stages for name, value in stage.variables.items()}
        self.step = tf.Variable(np.int64(reader.step if reader else 0))
        self._keeper = Keeper(flags, self._model, self, evaluated, int(self.step))
        if reader:
            say(f"Resuming from {reader.path}, step {reader.step}")
        for stage in self._stages:
            names = ", ".join(layer.name for layer in stage.layers)
            megabytes = 4e-6 * sum(math.prod(shape) for layer in stage.layers for shape in layer.shapes.values())
            say(f"Placed {names} on {stage.replica}: {megabytes:.1f} MB of parameters")
        seed = replica_seed(flags.seed, 0)
        with tf.device(self._stages[0].device):
            self._iterator = iter(train_pipeline(files, flags.batch_size, seed))
        self._descent = Descent(flags.learning_rate, flags.momentum, flags.max_steps)
        self._finite = tf.function(self._all_finite, autograph=False)
        self._train = tf.function(self._train_step, autograph=False)

    def run(self) -> None:
        """Trains to the last step, evaluates, exports.

        Raises DivergedError, PreemptedError, and tf.errors.OpError where a host is lost.
        """
        start = last = time.monotonic()
        step = last_step = int(self.step)
        while step < self._flags.max_steps:
            reached, loss, accuracy = self._train(self._iterator).numpy()
            done, now = Step(int(reached), float(loss), float(accuracy)), time.monotonic()
            if not math.isfinite(done.loss):
                raise DivergedError(f"the loss is {done.loss} at step {done.global_step}; try a lower --learning-rate")
            if (step == last_step and last == start) or now - last >= self._flags.log_interval:
                rate = (done.global_step - last_step) / max(now - last, 1e-6)
                for stage in self._stages:
                    line = train_line(stage.replica, done.global_step, done.loss, done.accuracy, now - start, rate, rate)
                    with tf.device(stage.device):
                        tf.raw_ops.PrintV2(input=line, output_stream="stdout", end="\n")
                last, last_step = now, done.global_step
            step = done.global_step
            self._keeper.after(done)
        self._keeper.finish()

    def logits(self, images: Any) -> Any:
        """Images, float32 [N, 784], to float32 [N, 10], through all stages."""
        for stage in self._stages:
            with tf.device(stage.device):
                images = stage.forward(tf.identity(images), False)
        return images

    def refresh(self) -> int:
        """The global step; the variables are where they are trained. DivergedError where they are no longer numbers."""
        step = int(self.step)
        if not bool(self._finite()):
            raise DivergedError(f"the parameters are not finite at step {step}; try a lower --learning-rate")
        return step

    def _place(self, hosts: Sequence[tuple[str, str]], reader: checkpoint.Reader | None) -> list[Stage]:
        """The stages on their hosts, their variables one after the other, so that the master never has all of them."""
        random = np.random.default_rng(self._flags.seed)
        stages = []
        cuts = partition([sum(map(math.prod, layer.shapes.values())) for layer in self._model.layers], len(hosts))
        for (replica, device), (start, end) in zip(hosts, pairwise(cuts), strict=False):
            variables, velocities = {}, {}
            for name, shape in (pair for layer in self._model.layers[start:end] for pair in layer.shapes.items()):
                value = reader.value(name) if reader else initial_value(shape, random)
                with tf.device(device):
                    variables[name] = tf.Variable(value, name=name)
                    velocities[name] = tf.Variable(tf.zeros(shape))
            stages.append(Stage(replica, device, self._model.layers[start:end], variables, velocities))
        return stages

    def _train_step(self, iterator: Any) -> Any:
        """One step on the next batch: the global step, the mean loss and the accuracy, float64 [3]."""
        size = self._flags.batch_size
        images, labels = iterator.get_next()
        sums, loss, correct = gradient_sums(self._stages, images, labels, size, min(self._flags.microbatches, size))
        rate = self._descent.rate(self.step.read_value()) / size
        for stage in self._stages:
            with tf.device(stage.device):
                names = list(stage.variables)
                values = [stage.variables[name].read_value() for name in names]
                velocities = [stage.velocities[name].read_value() for name in names]
                moved, velocities = self._descent.move(values, velocities, [sums[name] for name in names], rate)
                for name, value, velocity in zip(names, moved, velocities, strict=True):
                    stage.variables[name].assign(value, read_value=False)
                    stage.velocities[name].assign(velocity, read_value=False)
        figures = (self.step.assign_add(1), loss / size, correct / size)
        return tf.stack([tf.cast(figure, tf.float64) for figure in figures])

    def _all_finite(self) -> Any:
        flags = []
        for stage in self._stages:
            with tf.device(stage.device):
                flags += [tf.reduce_all(tf.math.is_finite(variable)) for variable in stage.variables.values()]
        return tf.reduce_all(tf.stack(flags))


def _connect(cluster: Cluster) -> list[tuple[str, str]]:
    """Connects to the workers; every host that takes a stage, the master first: its replica's name and its device."""
    workers = {f"worker/{index}": address for index, address in enumerate(cluster.jobs["worker"])}
    await_peers(workers, say)
    spec = tf.train.ClusterSpec({job: list(cluster.jobs[job]) for job in ("chief", "worker")})
    tf.config.experimental_connect_to_cluster(spec, job_name="chief", task_index=0, protocol="grpc")
    devices = [f"/job:worker/replica:0/task:{index}/device:CPU:0" for index in range(len(workers))]
    return [("master/0", "/job:chief/replica:0/task:0/device:CPU:0"), *zip(workers, devices, strict=True)]
