"""Strategy `sync`: all replicas take the same number of steps, then average their parameter deltas.

tf.distribute's MultiWorkerMirroredStrategy carries the all-reduce. Each replica takes several steps before it takes part in
one, as each moves all parameters twice through every host: with one step each, the network is the limit. Of several devices of
a host each takes these steps, and their mean takes part, on the first of them. Source: Stich 2019, "Local SGD converges fast
and communicates little".
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from scaletier.checkpoint import CheckpointReader, LocalCopy
from scaletier.flags import Flags
from scaletier.job import Job, JobError
from scaletier.loop import Progress, ReplicaLoop, Round, train
from scaletier.round_graph import LocalResult, State, VariableExchange, initial_local, make_round, run_round
from scaletier.runtime import BEGUN, import_tensorflow, quiet_stderr, say
from scaletier.sync_period import SYNCHRONOUS, SyncPeriod
from scaletier.tf_config import Cluster
from scaletier.training import Training, cluster_resolver

tf = import_tensorflow()

# Elements of the last sums for each host: enough for TensorFlow to divide them into aligned parts. Every host first receives
# one of these parts, so that it detects a lost host at once, and not after ten seconds without heartbeats.
_SUM_ELEMENTS = 64


class AllReduce(VariableExchange):
    """The mean of the deltas of all replicas; `add` sums a value of each."""

    def __init__(self, copy: LocalCopy, local: Sequence[Any], count: int, add: Callable[[Any], Any]) -> None:
        super().__init__(copy, local, count)
        self.add = add

    def end(self, start: State, reached: State, taken: LocalResult) -> tuple[State, Any, Any]:
        """Move the variables by the mean of all deltas; the results are means, too.

        Only the sum is the strategy's. Within its `run` Keras divides each loss by the number of replicas, for sums of
        gradients; here each replica takes its own steps.
        """
        delta = [tf.reshape(after - before, [-1]) for after, before in zip(reached.shared, start.shared, strict=True)]
        # One message for all: the results are its last numbers.
        mean = self.add(tf.concat([*delta, taken.results], 0)) / float(self.count)
        *changes, means = tf.split(mean, [*(one.shape[0] for one in delta), taken.results.shape[0]])
        moved = [before + tf.reshape(one, before.shape) for before, one in zip(start.shared, changes, strict=True)]
        local = self.network.average(moved, reached.local, taken.steps * self.count, taken.position)
        return super().end(start, State(tuple(moved), tuple(local)), taken._replace(results=means))


class Synchronous(Training):
    """One replica of a job, the chief or a worker; the chief alone evaluates, saves and exports."""

    def __init__(self, job: Job, flags: Flags, cluster: Cluster) -> None:
        self.strategy, self.options = _strategy(cluster, flags.communication)
        self.leads, index = cluster.task_type == "chief", cluster.task_index
        self.index, self.name = (0, self.name) if self.leads else (1 + index, f"worker/{index}")
        self.count = 1 + len(cluster.jobs["worker"])
        super().__init__(job, flags, cluster)

    def make_copy(self, reader: CheckpointReader | None) -> LocalCopy:
        say(f"Started [{self.name}], waits for the others to train with")
        return super().make_copy(reader)

    def begin(self, step: int) -> Progress:
        """Give every replica the chief's variables: those of the optimizer too, if the job resumes from a checkpoint."""
        copy, count = self.copy, len(self.devices)
        self.owns = [*copy.local, *(tf.Variable(one) for _ in range(count - 1) for one in copy.local)]
        give = tf.function(self._give, autograph=False)
        give([copy.step, self.position.begin])
        step = int(copy.step)
        give([*copy.shared, *(copy.local if step else copy.fixed)])
        copy.fix()
        values = initial_local(self.network, copy.local, self.index, self.count, count, step)
        for variable, value in zip(self.owns, values, strict=True):
            variable.assign(value)
        self.end_epoch = tf.function(self._take_rates, autograph=False)
        if self.job.callbacks:
            self.end_epoch(tf.constant(0.0))
        self.meet = tf.function(lambda: self.add(tf.ones([_SUM_ELEMENTS * self.count])), autograph=False)
        self.iterator = iter(self.source.training(self.index, self.count, step - int(self.position.begin)))
        exchange = AllReduce(copy, self.owns, self.count, self.add)
        self.graph = make_round(self.network, exchange, self.iterator, self.devices)
        self.every = self.flags.eval_steps or self.flags.max_steps
        self.epoch = step // self.every
        return Progress(step, self.flags.max_steps, every=self.every)

    def rounds(self) -> Iterator[Round]:
        """Yield rounds with the same number of steps on every replica; the global step counts those of all."""
        period = SyncPeriod(self.flags.sync_period or SYNCHRONOUS, True)
        emits, devices = {self.name: say}, len(self.devices) * self.count
        replica = ReplicaLoop(self.name, self._take, period, self.flags.log_interval, emits, True, devices, period.steps)
        return train(replica, State(), self.progress)

    def _take(self, state: State, steps: int, position: int, _live: int) -> tuple[State, Round]:
        steps = math.ceil(steps / self.count)
        return run_round(self.network, self.graph, self.iterator, state, steps, position, self.count)

    def ended(self, taken: Round) -> bool:
        """At the end of an epoch, give every replica what the chief's callbacks have set."""
        self.progress.release()
        epoch, before = taken.global_step // self.every, self.epoch
        self.epoch = epoch
        if not self.job.callbacks or epoch == before:
            return False
        return bool(self.end_epoch(tf.constant(float(super().ended(taken)))))

    def run(self) -> None:
        super().run()
        self.leave()

    def leave(self) -> None:
        """Wait until every other replica can end too: data that a process has not sent is lost when it exits.

        All replicas take part in two sums. In the first one a worker waits for the chief to finish. No replica has the second
        sum before all have the first one, and then it is not needed any more. The job is done when the chief is here: an error
        of another host changes nothing.
        """
        ignored = contextlib.suppress(tf.errors.OpError)
        with quiet_stderr(), ignored if self.leads else contextlib.nullcontext():
            self.meet()
        with quiet_stderr(), ignored:
            self.meet()

    def _give(self, variables: Sequence[Any]) -> None:
        """Give every replica the chief's values of these variables."""
        for variable in variables:
            value = variable.read_value()
            value = value if value.dtype.is_floating else tf.cast(value, tf.int64)
            variable.assign(tf.cast(self._from_chief(value), variable.dtype))

    def _take_rates(self, stopped: Any) -> Any:
        """Give every replica the learning rates that the chief's callbacks have set, and the chief's `stopped`, a number."""
        for at, spec in enumerate(self.network.local):
            if spec in self.network.reset_on_start:
                rate = self._from_chief(self.owns[at].read_value())
                for variable in self.owns[at :: len(self.network.local)]:
                    variable.assign(rate, read_value=False)
        return self._from_chief(stopped)

    def _from_chief(self, value: Any) -> Any:
        return self.add(value if self.leads else tf.zeros_like(value))

    def add(self, value: Any) -> Any:

        def reduced(value: Any) -> Any:
            mine = tf.identity(value)  # on the strategy's device
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, mine, self.options)

        return self.strategy.run(reduced, (value,))


def _strategy(cluster: Cluster, communication: str) -> tuple[Any, Any]:
    """Return the strategy of this task and its communication options; JobError if TensorFlow has computed before."""
    experimental = tf.distribute.experimental
    chosen = experimental.CommunicationImplementation[communication.upper()]
    options = experimental.CommunicationOptions(implementation=chosen)
    # The devices of a host have one delta: its first GPU alone takes part for it.
    gpus = min(1, len(tf.config.list_physical_devices("GPU")))
    resolver = cluster_resolver(cluster, ("chief", "worker"), num_accelerators={"GPU": gpus})
    try:
        strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver, communication_options=options)
    except RuntimeError as error:
        if "program startup" in str(error):
            raise JobError(f"strategy sync cannot begin any more: {BEGUN}") from None
        raise
    return strategy, options
