"""Strategy `sync`: the master and every worker take each step together, their gradients averaged before it.

tf.distribute's MultiWorkerMirroredStrategy carries the all-reduce. Each replica sums the gradients of several batches before
it takes part in one, as each moves all parameters twice through every host: with one batch a step, the network is the limit.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer import checkpoint
from trainer.cluster import Cluster
from trainer.data import replica_seed, train_pipeline
from trainer.descent import Descent, gradients
from trainer.flags import Flags
from trainer.keeper import Keeper, evaluation_data, training_data
from trainer.lines import train_line
from trainer.model import make_model
from trainer.replica import DivergedError
from trainer.runtime import import_tensorflow, prepare_process, say

tf = import_tensorflow()

_ACCUMULATED = 4


@dataclass(frozen=True)
class Update:
    """What one update came to: the global step after it, mean loss in nats and mean accuracy over all replicas, own loss."""

    global_step: int
    loss: float
    accuracy: float
    own_loss: float


class Synchronous:
    """One replica of a job, the chief or a worker; the chief alone evaluates, saves and exports.

    The constructor raises DataError and CheckpointError.
    """

    def __init__(self, flags: Flags, cluster: Cluster) -> None:
        prepare_process()
        self._strategy, self._options = _strategy(cluster, flags.communication)  # before TensorFlow does anything else
        tf.random.set_seed(flags.seed)
        self._flags, self._model = flags, make_model(flags.model, flags.hidden_units, flags.precision)
        self._chief = cluster.task_type == "chief"
        self._index = 0 if self._chief else 1 + cluster.task_index
        self._name = "master/0" if self._chief else f"worker/{cluster.task_index}"
        self._count = 1 + len(cluster.jobs["worker"])
        self._batches = flags.sync_period or _ACCUMULATED
        files, evaluated = training_data(flags), evaluation_data(flags)
        found = checkpoint.latest(flags.job_dir) if self._chief else None
        values, step = checkpoint.read(found, self._model) if found else (self._model.initial(flags.seed), 0)
        if found:
            say(f"Resuming from {found}, step {step}")
        say(f"Started [{self._name}], waits for the others to train with")
        self._copy = checkpoint.LocalCopy(self._model)
        self._copy.assign(values, step)
        self.variables, self.step, self.logits = self._copy.variables, self._copy.step, self._copy.logits
        self._keeper = Keeper(flags, self._model, self, evaluated, step) if self._chief else None
        seed = replica_seed(flags.seed, self._index)
        self._iterator = iter(train_pipeline(files, flags.batch_size, seed, (self._index, self._count)))
        self._velocities = [tf.Variable(tf.zeros(shape)) for shape in self._model.shapes.values()]
        self._update = tf.function(lambda batches: self._strategy.run(self._replica_update, (batches,)), autograph=False)
        self._copy_chief = tf.function(lambda: self._strategy.run(self._take_over), autograph=False)

    def run(self) -> None:
        """Trains to the last step; the chief then exports and evaluates, and the others wait for that.

        Raises DivergedError, PreemptedError, and tf.errors.OpError where another replica is lost.
        """
        self._copy_chief()
        step = last_step = int(self.step)
        start = last = time.monotonic()
        first = True
        while step < self._flags.max_steps:
            batches = min(self._batches, math.ceil((self._flags.max_steps - step) / self._count))
            done = self._one(batches)
            step, now = done.global_step, time.monotonic()
            if first or now - last >= self._flags.log_interval:
                rate = (step - last_step) / max(now - last, 1e-6)
                say(train_line(self._name, step, done.own_loss, done.accuracy, now - start, rate, rate / self._count))
                last, last_step, first = now, step, False
            if self._keeper:
                self._keeper.after(done)
        if self._keeper:
            self._keeper.finish()
        self._copy_chief()  # nobody goes while others may still wait for a message of theirs

    def refresh(self) -> int:
        """The global step; the variables are always up to date. DivergedError where they are no longer numbers."""
        step = int(self.step)
        if not all(np.isfinite(variable.numpy()).all() for variable in self.variables.values()):
            raise DivergedError(f"the parameters of {self._name} are not finite at step {step}; try a lower --learning-rate")
        return step

    def _one(self, batches: int) -> Update:
        step, loss, accuracy, own_loss = self._update(tf.constant(batches)).numpy()
        done = Update(int(step), float(loss), float(accuracy), float(own_loss))
        if not math.isfinite(done.loss):
            whose = self._name if not math.isfinite(done.own_loss) else "another replica"
            raise DivergedError(f"the loss of {whose} is not a number at step {done.global_step}; try a lower --learning-rate")
        return done

    def _replica_update(self, batches: Any) -> Any:
        """Sums the gradients of some batches, averages them over all replicas, and moves the variables: float64 [4]."""
        values = [variable.read_value() for variable in self.variables.values()]

        def body(taken: Any, loss_sum: Any, correct_sum: Any, *sums: Any) -> Any:
            images, labels = self._iterator.get_next()
            changes, loss, correct = gradients(self._model, values, images, labels)
            added = (total + change for total, change in zip(sums, changes, strict=True))
            return (taken + 1, loss_sum + loss, correct_sum + correct, *added)

        zeros = [tf.zeros_like(value) for value in values]
        _, loss_sum, correct_sum, *sums = tf.while_loop(
            lambda taken, *_: taken < batches, body, (0, 0.0, 0.0, *zeros), parallel_iterations=1
        )
        # One message for all: the loss and the accuracy are its last two numbers.
        flat = tf.concat([*(tf.reshape(total, [-1]) for total in sums), tf.stack([loss_sum, correct_sum])], 0)
        mean = self._all_reduce(flat) / tf.cast(batches * self._count, tf.float32)
        changes = self._model.unflatten(mean[:-2]).values()
        step = self.step.read_value()
        together = self._count * self._batches
        descent = Descent(self._flags.learning_rate, self._flags.momentum, self._flags.max_steps, together, together)
        moved, velocities = descent.move(values, [v.read_value() for v in self._velocities], [*changes], descent.rate(step))
        for variable, value in zip([*self.variables.values(), *self._velocities], [*moved, *velocities], strict=True):
            variable.assign(value, read_value=False)
        step = self.step.assign_add(tf.cast(batches * self._count, tf.int64))
        figures = (step, mean[-2], mean[-1], loss_sum / tf.cast(batches, tf.float32))
        return tf.stack([tf.cast(figure, tf.float64) for figure in figures])

    def _take_over(self) -> None:
        """Gives every replica the chief's variables and step."""
        for variable in (*self.variables.values(), self.step):
            value = variable.read_value()
            variable.assign(self._all_reduce(value if self._chief else tf.zeros_like(value)))

    def _all_reduce(self, value: Any) -> Any:
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, value, self._options)


def _strategy(cluster: Cluster, communication: str) -> tuple[Any, Any]:
    """The strategy of this task, and how it communicates: `auto`, `ring`, or `nccl` between GPUs."""
    experimental = tf.distribute.experimental
    chosen = experimental.CommunicationImplementation[communication.upper()]
    options = experimental.CommunicationOptions(implementation=chosen)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({job: list(cluster.jobs[job]) for job in ("chief", "worker")}),
        task_type=cluster.task_type,
        task_id=cluster.task_index,
        rpc_layer="grpc",
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver, communication_options=options)
    return strategy, options
