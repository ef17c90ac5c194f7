"""Strategy `sync`: all replicas take the same number of steps, then average their parameter deltas.

tf.distribute's MultiWorkerMirroredStrategy carries the all-reduce. Each replica takes several steps before it takes part in
one, as each moves all parameters twice through every host: with one step each, the network is the limit. Of several devices of
a host each takes these steps, and their mean takes part, on the first of them. Source: Stich 2019, "Local SGD converges fast
and communicates little".
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from scaletier import checkpoint, data
from scaletier.chief import ChiefTasks
from scaletier.cluster import Cluster
from scaletier.flags import Flags
from scaletier.job import Job, JobError
from scaletier.lines import train_line
from scaletier.local_steps import DivergedError, Round, State, begin_own, figures, numbers, run_local_steps
from scaletier.network import Batch, FunctionalModel
from scaletier.private import is_lost_host
from scaletier.runtime import (
    BEGUN,
    import_tensorflow,
    local_devices,
    prepare_process,
    quiet_stderr,
    say,
    say_device,
)

tf = import_tensorflow()

_STEPS = 4
# Elements of the last sums for each host: enough for TensorFlow to divide them into aligned parts. Every host first receives
# one of these parts, so that it sees at once if another host is gone, and not by missing heartbeats, which takes ten seconds.
_SUM_ELEMENTS = 64


class Synchronous:
    """One replica of a job, the chief or a worker; the chief alone evaluates, saves and exports.

    The constructor raises JobError, DataError and CheckpointError.
    """

    def __init__(self, job: Job, flags: Flags, cluster: Cluster) -> None:
        prepare_process()
        self._strategy, self._options = _strategy(cluster, flags.communication)  # before TensorFlow does anything else
        say_device(flags.allow_cpu)
        self._flags, self._chief = flags, cluster.task_type == "chief"
        self._index = 0 if self._chief else 1 + cluster.task_index
        self._name = "master/0" if self._chief else f"worker/{cluster.task_index}"
        self._count = 1 + len(cluster.jobs["worker"])
        self._devices = local_devices()
        self._steps = flags.sync_period or _STEPS
        tf.random.set_seed(flags.seed)
        self._source = data.BatchSource(job.data)
        self._callbacks = job.callbacks
        if job.callbacks:
            self._flags = flags = job.callbacks.plan(flags, self._source.length)
        evaluated = data.evaluation(job.eval_data) if self._chief and job.eval_data is not None else None
        self._network = FunctionalModel(
            job,
            self._source.element_spec,
            flags.seed,
            self._count * len(self._devices),
            evaluated=evaluated.element_spec if evaluated else None,
        )
        reader = checkpoint.find(flags.job_dir, self._network) if self._chief else None
        say(f"Started [{self._name}], waits for the others to train with")
        self._copy = checkpoint.LocalCopy(self._network)
        self.variables, self.step = self._copy.variables, self._copy.step
        self.initial_test, self.test = self._copy.initial_test, self._copy.test
        self.shared, self.own = self._copy.shared, self._copy.own
        start = State.initial(self._network)
        self._copy.assign(*start, 0)
        self._owns = [*self.own, *map(tf.Variable, start.own * (len(self._devices) - 1))]
        step = self._copy.restore(reader) if reader else 0
        position = checkpoint.DataPosition(self._source, reader)
        self._data_begin = position.begin
        chief_arguments = self._network, self, Batch.of(self._source.element_spec).inputs, evaluated, position, step
        self._keeper = ChiefTasks(job, flags, *chief_arguments) if self._chief else None
        self._round = tf.function(self._replica_round, autograph=False)
        self._copy_chief = tf.function(self._take_over, autograph=False)
        self._end_epoch = tf.function(self._take_rates, autograph=False)
        self._meet = tf.function(lambda: self._all_reduce(tf.ones([_SUM_ELEMENTS * self._count])), autograph=False)

    def run(self) -> None:
        """Train to the last step; the chief then exports and evaluates, and the others wait for that.

        Raises:
            DivergedError: the loss or a parameter is no number.
            PreemptedError: this process is to end.
            tf.errors.OpError: another replica is lost.
        """
        try:
            self._train()
        except tf.errors.OpError as error:
            if self._keeper and is_lost_host(error):
                self._keeper.rescue()
            elif self._keeper:
                self._keeper.keep()
            raise

    def _train(self) -> None:
        self._copy_chief([self.step, self._data_begin])
        step = last_step = int(self.step)
        self._copy_chief([*self.shared, *(self.own if step else self._copy.fixed)])
        self._copy.fix()
        self._iterator = iter(self._source.training(self._index, self._count, step - int(self._data_begin)))
        devices = numbers(self._index, self._count, len(self._devices))
        for variable, value in zip(self._owns, begin_own(self._network, self.own, devices, step), strict=True):
            variable.assign(value)
        if self._callbacks:
            self._end_epoch(tf.constant(0.0))
        start = last = time.monotonic()
        first = True
        loss: float | None = None
        while step < self._flags.max_steps:
            every, before = self._flags.eval_steps or self._flags.max_steps, step
            left = min(self._flags.max_steps - step, every - step % every)
            round_result, own_loss = self._one(min(self._steps * len(self._devices), math.ceil(left / self._count)))
            step, now, loss = round_result.global_step, time.monotonic(), round_result.loss
            if first or now - last >= self._flags.log_interval:
                rate = (step - last_step) / max(now - last, 1e-6)
                say(train_line(self._name, step, own_loss, round_result.metrics, now - start, rate, rate / self._count))
                last, last_step, first = now, step, False
            if self._keeper:
                self._keeper.after(round_result)
            if self._callbacks and step // every > before // every:
                stopped = self._keeper is not None and self._keeper.stopped
                if float(self._end_epoch(tf.constant(float(stopped)))):
                    break
        if self._keeper:
            self._keeper.finish(loss)
        self._leave()

    def _leave(self) -> None:
        """End when every other replica can end too: a process that exits takes along what it has not yet sent.

        All replicas take part in two sums. In the first one a worker waits for the chief to finish. No replica has the second
        sum before all have the first one, and then it is not needed any more. The job is done when the chief comes here: no
        error of another host changes that.
        """
        ignored = contextlib.suppress(tf.errors.OpError)
        with quiet_stderr(), ignored if self._chief else contextlib.nullcontext():
            self._meet()
        with quiet_stderr(), ignored:
            self._meet()

    def refresh(self) -> int:
        """Return the global step; the variables are always up to date.

        Raises DivergedError if they are no longer numbers.
        """
        step = int(self.step)
        if not all(np.isfinite(variable.numpy()).all() for variable in self.shared):
            raise DivergedError(f"the parameters of {self._name} are not finite at step {step}; try a lower learning rate")
        return step

    def _one(self, steps: int) -> tuple[Round, float]:
        """Run a round of all replicas, this many steps a host; return it and the loss of own batches."""
        numbers, own_loss = self._round(tf.constant(steps, tf.int64))
        round_result, own_loss = Round.of(self._network, numbers.numpy()), float(own_loss)
        if not math.isfinite(round_result.loss):
            whose = self._name if not math.isfinite(own_loss) else "another replica"
            raise DivergedError(
                f"the loss of {whose} is not a number at step {round_result.global_step}; try a lower learning rate"
            )
        return round_result, own_loss

    def _replica_round(self, steps: Any) -> Any:
        """Take local steps and average all deltas; return the figures of Round and the own loss.

        Loss and metrics of the figures are means. Only the sum is the strategy's. Within its `run` Keras divides each loss by
        the number of replicas, for sums of gradients; here each replica takes its own steps.
        """
        start = State(
            tuple(variable.read_value() for variable in self.shared), tuple(variable.read_value() for variable in self._owns)
        )
        position = self.step.read_value()
        end, loss_sum, metrics = run_local_steps(self._network, self._iterator, start, steps, position, self._devices)
        loss = loss_sum / tf.cast(steps, tf.float32)
        # One message for all: the loss and the metrics are its last numbers.
        results = tf.concat([[loss], metrics], 0)
        delta = [tf.reshape(after - before, [-1]) for after, before in zip(end.shared, start.shared, strict=True)]
        mean = self._all_reduce(tf.concat([*delta, results], 0)) / float(self._count)
        sizes = [*(spec.size for spec in self._network.shared), results.shape[0]]
        *changes, means = tf.split(mean, sizes)
        with tf.control_dependencies([mean]):  # a round without a mean changes nothing
            for variable, before, change in zip(self.shared, start.shared, changes, strict=True):
                variable.assign(before + tf.reshape(change, before.shape), read_value=False)
            for variable, value in zip(self._owns, end.own, strict=True):
                variable.assign(value, read_value=False)
            step = self.step.assign_add(steps * self._count)
        return figures(steps * self._count, step, means[0], 0, 0.0, means[1:]), loss

    def _take_over(self, variables: Sequence[Any]) -> None:
        """Give every replica the chief's values of these variables."""
        for variable in variables:
            value = variable.read_value()
            value = value if value.dtype.is_floating else tf.cast(value, tf.int64)
            variable.assign(tf.cast(self._from_chief(value), variable.dtype))

    def _take_rates(self, stopped: Any) -> Any:
        """Give every replica the learning rates that the chief's callbacks have set, and the chief's `stopped`, a number."""
        for at, spec in enumerate(self._network.own):
            if spec in self._network.reset_on_start:
                rate = self._from_chief(self.own[at].read_value())
                for variable in self._owns[at :: len(self.own)]:
                    variable.assign(rate, read_value=False)
        return self._from_chief(stopped)

    def _from_chief(self, value: Any) -> Any:
        return self._all_reduce(value if self._chief else tf.zeros_like(value))

    def _all_reduce(self, value: Any) -> Any:
        """Return the sum of all replicas' values."""

        def reduced(value: Any) -> Any:
            mine = tf.identity(value)  # on the strategy's device
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, mine, self._options)

        return self._strategy.run(reduced, (value,))


def _strategy(cluster: Cluster, communication: str) -> tuple[Any, Any]:
    """Return the strategy of this task, and how it communicates: `auto`, `ring`, or `nccl` between GPUs.

    Raises JobError if TensorFlow has begun without it.
    """
    experimental = tf.distribute.experimental
    chosen = experimental.CommunicationImplementation[communication.upper()]
    options = experimental.CommunicationOptions(implementation=chosen)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({job: list(cluster.jobs[job]) for job in ("chief", "worker")}),
        task_type=cluster.task_type,
        task_id=cluster.task_index,
        # The devices of a host have one delta: its first GPU alone takes part for it.
        num_accelerators={"GPU": min(1, len(tf.config.list_physical_devices("GPU")))},
        rpc_layer="grpc",
    )
    try:
        strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver, communication_options=options)
    except RuntimeError as error:
        if "program startup" in str(error):
            raise JobError(f"strategy sync cannot begin any more: {BEGUN}") from None
        raise
    return strategy, options
