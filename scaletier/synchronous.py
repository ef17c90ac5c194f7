"""Strategy `sync`: all replicas take the same number of local steps, then average their parameters.

An all-reduce of tf.distribute's MultiWorkerMirroredStrategy sums the parameters. It sends all of them twice through the network
of every host, which would be the bottleneck after every step. If a host has several devices, each takes these steps; the host
averages their parameters, and its first device takes part in the all-reduce. Source: Stich 2019, "Local SGD converges fast and
communicates little".
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from scaletier.checkpoint import CheckpointReader, TrainingState
from scaletier.flags import Flags
from scaletier.functional_model import FunctionalModel
from scaletier.job import Job, JobError
from scaletier.loop import ReplicaLoop, Round, StepBudget, run_rounds
from scaletier.round_graph import Exchange, LocalResult, make_round, replica_variables, run_round
from scaletier.shared_parameters import Range, assign_parts, parts_within, split_evenly
from scaletier.sync_period import DEFAULT_SYNC_PERIOD, SyncPeriod
from scaletier.tensorflow_setup import TOO_LATE_MESSAGE, import_tensorflow, quiet_stderr, say
from scaletier.tf_config import Cluster
from scaletier.training import Training, cluster_resolver
from scaletier.variables import Variables

tf = import_tensorflow()

# The elements for each host in the sum of a barrier: enough for TensorFlow to divide the sum into aligned parts. Then each host
# first receives one part, and so detects a lost host at once, not after ten seconds without heartbeats.
_BARRIER_ELEMENTS = 64
# The maximum of elements in a message of an all-reduce, 16 MB: a host needs this memory beside its variables.
_MAX_ELEMENTS = 4_000_000


class AllReduce(Exchange):
    """Average the parameters of all replicas, which began the round with the same values.

    `all_reduce_sum` returns the sum of a value over all hosts.
    """

    def __init__(self, network: FunctionalModel, host_count: int, all_reduce_sum: Callable[[Any], Any]) -> None:
        super().__init__(network)
        self.host_count, self.all_reduce_sum = host_count, all_reduce_sum

    def end(self, _start: Any, variables: Variables, result: LocalResult) -> tuple[Any, Any]:
        """Average variables and results over all replicas; write the variables once all means are received.

        The strategy is used only for sums. If the steps ran within its `run`, Keras would divide each loss by the number of
        replicas, as for gradients that are summed.
        """
        # The results are the last numbers of the last message.
        ranges, messages, means = _exchange_in_messages(
            variables.shared, lambda values: self.all_reduce_sum(values) / float(self.host_count), [result.results]
        )
        means[-1], results = tf.split(means[-1], [messages[-1][1] - messages[-1][0], result.results.shape[0]])
        written = assign_parts(list(zip(variables.shared, ranges, strict=True)), means, messages, means)
        with tf.control_dependencies(written):
            written = self.update_ema(variables, result.steps * self.host_count, result.global_step)
            counted = variables.step.assign(result.global_step + result.steps * self.host_count)
        with tf.control_dependencies([*written, counted]):
            return variables.step.read_value(), results


class Synchronous(Training):
    """Train one replica of a job, the chief or a worker; only the chief evaluates, saves and exports."""

    def __init__(self, job: Job, flags: Flags, cluster: Cluster) -> None:
        self.strategy, self.options = _make_strategy(cluster, flags.communication)
        self.is_chief, index = cluster.task_type == "chief", cluster.task_index
        self.index, self.name = (0, self.name) if self.is_chief else (1 + index, f"worker/{index}")
        self.host_count = 1 + len(cluster.jobs["worker"])
        super().__init__(job, flags, cluster)

    def make_state(self, reader: CheckpointReader | None) -> TrainingState:
        say(f"Started [{self.name}], waits for the other replicas")
        return super().make_state(reader)

    def begin(self, step: int) -> StepBudget:
        """Give every replica the chief's variables, after a resumption also the optimizer's; return the step budget."""
        state = self.state
        broadcast = tf.function(self._broadcast, autograph=False)
        broadcast([state.step, self.data_position.first_step])
        step = int(state.step)
        broadcast([*state.shared, *(state.local if step else state.constants)])
        state.set_constants()
        self.variables = replica_variables(self.network, state, self.index, self.host_count, self.devices, step)
        self.broadcast_rates = tf.function(self._broadcast_rates, autograph=False)
        if self.job.callbacks:
            self.broadcast_rates(tf.constant(0.0))
        ones = [_BARRIER_ELEMENTS * self.host_count]
        self.barrier = tf.function(lambda: self.all_reduce_sum(tf.ones(ones)), autograph=False)
        self.iterator = iter(
            self.source.training_batches(self.index, self.host_count, step - int(self.data_position.first_step))
        )
        exchange = AllReduce(self.network, self.host_count, self.all_reduce_sum)
        self.graph = make_round(self.network, exchange, self.iterator, self.devices, use_xla=self.uses_xla)
        self.steps_per_epoch = self.flags.eval_steps or self.flags.max_steps
        self.epoch, self.begins_epoch = step // self.steps_per_epoch, True
        return StepBudget(step, self.flags.max_steps, steps_between_evaluations=self.steps_per_epoch)

    def rounds(self) -> Iterator[Round]:
        """Yield rounds with the same number of steps on every replica; the global step counts the steps of all."""
        self.budget.allow_until()  # a callback of the chief may have ended training before the first round
        period = SyncPeriod(self.flags.sync_period or DEFAULT_SYNC_PERIOD, True)
        log_functions, device_count = {self.name: say}, len(self.devices) * self.host_count
        replica = ReplicaLoop(
            self.name, self._run_round, period, self.flags.log_interval, log_functions, True, device_count, period.steps
        )
        return run_rounds(replica, self.budget)

    def _run_round(self, steps: int, _live_hosts: int) -> Round:
        steps = math.ceil(steps / self.host_count)
        return run_round(self.network, self.graph, self.iterator, self.variables, steps, self.host_count)

    def after_round(self, result: Round) -> bool:
        """Broadcast the learning rates that the chief's callbacks set between epochs; return True if they ended training.

        If a callback ends training as an epoch begins, training ends after that epoch's first round; in a job that resumes
        within an epoch, after the job's first round.
        """
        self.budget.allow_until()
        epoch, begins_epoch = result.global_step // self.steps_per_epoch, self.begins_epoch
        self.epoch, self.begins_epoch = epoch, epoch != self.epoch
        if not self.job.callbacks or not (begins_epoch or self.begins_epoch):
            return False
        return bool(self.broadcast_rates(tf.constant(float(super().after_round(result)))))

    def run(self) -> None:
        super().run()
        self.leave()

    def leave(self) -> None:
        """Wait until every other replica can end, too: data that a process has not sent is lost when it exits.

        There are two barriers. In the first one the workers wait for the chief to finish. No replica passes the second one
        before all have passed the first. Then all data is sent, so errors in the second one are ignored. When the chief calls
        this method, the job is done, so the chief ignores errors in both.
        """
        ignored = contextlib.suppress(tf.errors.OpError)
        with quiet_stderr(), ignored if self.is_chief else contextlib.nullcontext():
            self.barrier()
        with quiet_stderr(), ignored:
            self.barrier()

    def _broadcast(self, variables: Sequence[Any]) -> None:
        """Give every replica the chief's values of these variables."""
        floats = [one for one in variables if one.dtype == tf.float32]
        if floats:
            ranges, messages, values = _exchange_in_messages(floats, self._from_chief)
            for variable, variable_range in zip(floats, ranges, strict=True):
                variable.assign(tf.reshape(tf.concat(parts_within(variable_range, messages, values), 0), variable.shape))
        for variable in variables:
            if variable.dtype != tf.float32:
                value = variable.read_value()
                if value.dtype.is_complex:  # all-reduce takes no complex numbers
                    variable.assign(tf.complex(*map(self._from_chief, (tf.math.real(value), tf.math.imag(value)))))
                else:
                    value = value if value.dtype.is_floating else tf.cast(value, tf.int64)
                    variable.assign(tf.cast(self._from_chief(value), variable.dtype))

    def _broadcast_rates(self, stopped: Any) -> Any:
        """Give every replica the chief's learning rates, which callbacks may have set; return the chief's `stopped`, 0 or 1."""
        for at, spec in enumerate(self.network.local):
            if spec in self.network.learning_rates:
                rate = self._from_chief(self.state.local[at].read_value())
                for variables in self.variables:
                    variables.local[at].assign(rate, read_value=False)
        return self._from_chief(stopped)

    def _from_chief(self, value: Any) -> Any:
        return self.all_reduce_sum(value if self.is_chief else tf.zeros_like(value))

    def all_reduce_sum(self, value: Any) -> Any:
        """Return the sum of a value over all hosts."""

        def all_reduce(value: Any) -> Any:
            value = tf.identity(value)  # on the strategy's device
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, value, self.options)

        return self.strategy.run(all_reduce, (value,))


def _exchange_in_messages(
    variables: Sequence[Any], exchange: Callable[[Any], Any], extra: Sequence[Any] = ()
) -> tuple[list[Range], list[Range], list[Any]]:
    """Exchange the values of variables, float32, in messages of equal size, one after another.

    Args:
        variables: tf.Variables or handles.
        exchange: a function that sends a message, and returns what all replicas receive for it.
        extra: tensors to append to the last message.

    Returns:
        The ranges of variables and of messages in the sequence of all elements, and what was received for each message.
    """
    flat = [tf.reshape(one.read_value(), [-1]) for one in variables]
    ranges = list(pairwise(np.cumsum([0, *(one.shape[0] for one in flat)]).tolist()))
    end = ranges[-1][1]
    messages, received = list(pairwise(split_evenly(0, end, math.ceil(end / _MAX_ELEMENTS)))), list[Any]()
    for message in messages:
        with tf.control_dependencies(received[-1:]):
            received.append(exchange(tf.concat(parts_within(message, ranges, flat) + [*extra] * (message is messages[-1]), 0)))
    return ranges, messages, received


def _make_strategy(cluster: Cluster, communication: str) -> tuple[Any, Any]:
    """Return this task's tf.distribute strategy and its communication options; JobError if TensorFlow has computed before."""
    experimental = tf.distribute.experimental
    chosen = experimental.CommunicationImplementation[communication.upper()]
    options = experimental.CommunicationOptions(implementation=chosen)
    # A host averages its devices before the all-reduce, in which only its first GPU takes part.
    gpus = min(1, len(tf.config.list_physical_devices("GPU")))
    resolver = cluster_resolver(cluster, ("chief", "worker"), num_accelerators={"GPU": gpus})
    try:
        strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver, communication_options=options)
    except RuntimeError as error:
        if "program startup" in str(error):
            raise JobError(f"--strategy sync begins too late: {TOO_LATE_MESSAGE}") from None
        raise
    return strategy, options
