"""Strategy `async`: parameter servers hold the model; the master and every worker train independently.

tf.distribute's ParameterServerStrategy and ClusterCoordinator carry it: the master sends rounds of steps to the workers, and
trains beside them. Without workers the master is the only replica, and holds the model itself.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from scaletier.checkpoint import CheckpointReader, LocalCopy
from scaletier.data import DataError
from scaletier.flags import Flags
from scaletier.job import Job
from scaletier.loop import Progress, ReplicaLoop, Round, train
from scaletier.private import CoordinatorWorkers
from scaletier.round_graph import State, initial_local, make_round, run_round
from scaletier.runtime import devices_of, give_memory_back, here, import_tensorflow, one_line, quiet_stderr, say, say_there
from scaletier.shared_parameters import SharedParameters
from scaletier.sync_period import SyncPeriod
from scaletier.tf_config import Cluster, await_peers
from scaletier.training import Training, cluster_resolver

tf = import_tensorflow()

_NO_FILE = "No such file"


class Asynchronous(Training):
    """One job of the chief, which sends the workers theirs."""

    adopted = False  # whether the replica is to continue from `state`

    def __init__(self, job: Job, flags: Flags, cluster: Cluster) -> None:
        if not tf.config.list_physical_devices("GPU"):
            # The optimizer makes no step faster on CPUs. Each new host would run it again, which is a quarter of the time from
            # a worker's kill to its next step.
            tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
        self.workers = len(cluster.jobs.get("worker", ()))
        self.count, self.portable = 1 + self.workers, self.workers > 0
        self.others: CoordinatorWorkers | None = None
        super().__init__(job, flags, cluster)

    def make_copy(self, reader: CheckpointReader | None) -> LocalCopy:
        if self.workers:
            self.network.require_portable()
            self.coordinator = self._connect()
        copy = super().make_copy(reader)
        self.state, self.state_step = State.of(copy.shared, copy.local), int(copy.step)
        return copy

    def _connect(self) -> Any:
        tf.get_logger().addFilter(_shorten_log)
        await_peers(self.cluster.peers("ps", "worker"), say)
        # The strategy connects with device filters: parameter servers see the workers and the chief, never each other.
        strategy = tf.distribute.ParameterServerStrategy(cluster_resolver(self.cluster, self.cluster.jobs))
        return tf.distribute.coordinator.ClusterCoordinator(strategy)

    def begin(self, step: int) -> Progress:
        self.data_begin, self.servers = int(self.position.begin), None
        if self.job.callbacks:
            self.adopt()
        if self.workers:
            devices = [f"/job:ps/replica:0/task:{index}/device:CPU:0" for index in range(len(self.cluster.jobs["ps"]))]
            averages = self.copy.averages if step else self.copy.shared
            self.servers = SharedParameters(self.network, devices, self.copy.shared, step, averages)
        kinds = {self.devices, *(devices_of("worker", index) for index in range(self.workers))}
        with tf.device(self.devices[0]):
            self.iterator = iter(self.source.training(0, self.count, step - self.data_begin))
            metrics = self.job.callbacks.carry() if self.job.callbacks and self.network.replicas == 1 else ()
            self.graphs = {
                devices: make_round(self.network, self.servers, self.iterator, devices, metrics) for devices in kinds
            }
        zeros = tf.function(lambda: [tf.zeros(one.shape, one.dtype) for one in self.network.local], autograph=False)
        self._zeros = zeros.get_concrete_function() if self.workers else zeros  # traced here, and not in a worker's thread
        self._shown = time.monotonic(), 0
        every = self.flags.eval_steps if self.evaluated or self.job.callbacks else None
        return Progress(step, self.flags.max_steps, self.count, every)

    def run(self) -> None:
        if self.workers:
            self.others = CoordinatorWorkers(self.coordinator)
            for _ in range(self.workers):
                self.others.schedule(self._train_worker)
        with tf.device(self.devices[0]):
            assert self.chief
            self.chief.summaries.graph(self.graphs[self.devices])
            super().run()
        if self.others and self.job.callbacks:  # the program continues
            self.others.stop()

    def check(self) -> None:
        super().check()
        if self.others and self.others.failure:
            raise self.others.failure

    def refresh(self) -> int:
        give_memory_back()  # that of rounds, as a pull requests its own
        if self.servers:
            shared, step = self.servers.pull_exact()
            self.copy.assign(shared, self.network.with_averages(self.state.local, self.servers.pull_averages()), step)
        else:
            self.copy.assign(*self.state, self.progress.step)
        return super().refresh()

    def adopt(self) -> None:
        if self.network.replicas == 1:
            self.state, self.adopted = State.of(self.copy.shared, self.copy.local), True

    def rescue(self) -> None:
        """Save the parameters that the master pulled last, once a parameter server is lost."""
        if self.state_step > int(self.copy.step) and all(np.isfinite(value.numpy()).all() for value in self.state.shared):
            averages = [one.numpy() for one in self.copy.averages]
            self.copy.assign(self.state.shared, self.network.with_averages(self.state.local, averages), self.state_step)
            super().rescue()

    def rounds(self) -> Iterator[Round]:
        return self._train(self._replica(self.name, self.iterator, self.devices, say), 0)

    def _replica(self, name: str, iterator: Any, devices: tuple[str, ...], emit: Any) -> ReplicaLoop:
        known: Any = None

        def take(state: State, steps: int, position: int, live: int) -> tuple[State, Round]:
            nonlocal known
            if self.adopted:
                state, self.adopted = self.state, False
            elif self.job.callbacks and known is not self.job.callbacks.rates:
                known = self.job.callbacks.rates
                state = State(state.shared, self._with_rates(state.local, known))
            state, taken = run_round(self.network, self.graphs[devices], iterator, state, steps, position, live)
            if name == self.name:
                # The shared state is that of the round's start.
                began = taken.steps + taken.staleness if self.servers else 0
                self.state, self.state_step = state, taken.global_step - began
            return State((), state.local) if self.servers else state, taken

        period = SyncPeriod.of(self.flags.sync_period, self.count, self.flags.max_steps)
        if period.alone and self.flags.eval_steps:  # evaluations come between two rounds
            period.most = min(period.most, self.flags.eval_steps)
        return ReplicaLoop(name, take, period, self.flags.log_interval, {name: emit}, name == self.name, len(devices))

    def _with_rates(self, local: tuple[Any, ...], rates: Mapping[int, Any]) -> tuple[Any, ...]:
        """Return a replica's local variables with these learning rates, on each of its devices."""
        count = len(self.network.local)
        with here():
            return tuple(tf.constant(rates[at % count]) if at % count in rates else one for at, one in enumerate(local))

    def _train(self, replica: ReplicaLoop, index: int) -> Iterator[Round]:
        start = time.monotonic()
        with quiet_stderr() if replica.leads else contextlib.nullcontext():  # TensorFlow's remark about the CPU
            state = self._initial_state(replica, index)
        self.progress.begin(replica.leads, time.monotonic() - start)
        return train(replica, state, self.progress)

    def _initial_state(self, replica: ReplicaLoop, index: int) -> State:
        """Return a replica's initial state, after a round of no steps: it sends the graph to its host in advance."""
        values = initial_local(
            self.network,
            self.state.local[: len(self.network.local)],
            index,
            self.count,
            replica.devices,
            self.progress.step,
        )
        if replica.leads:
            local = tuple(map(tf.constant, values))
        else:
            zeros = list(self._zeros()) * replica.devices
            with here():
                local = tuple(tf.constant(one) if one.any() else zero for one, zero in zip(values, zeros, strict=True))
        if not self.workers:
            return State(self.state.shared, local)
        state: State = replica.take(State((), local), 0, 0, 1)[0]
        return state

    def _train_worker(self) -> None:
        """Train on a worker until the job's last step; called in the worker's thread."""
        index = 1 + tf.DeviceSpec.from_string(tf.timestamp().device).task
        name = f"worker/{index - 1}"
        try:
            iterator = iter(self.source.training_here(index, self.count, self.progress.step - self.data_begin))
            replica = self._replica(name, iterator, devices_of("worker", index - 1), say_there)
            for _ in self._train(replica, index):
                pass
        except tf.errors.DataLossError as error:
            self.progress.stop(error)  # the data is damaged, the host is not lost
        except tf.errors.OutOfRangeError as error:
            explanation = self.job.explain(error) if self.job.explain else None
            self.progress.stop(DataError(f"{name} finds no batch in the job's data{f': {explanation}' if explanation else ''}"))
        except tf.errors.OpError as error:
            denied = isinstance(error, tf.errors.PermissionDeniedError)
            if not denied and not (isinstance(error, tf.errors.NotFoundError) and _NO_FILE in str(error)):
                raise  # the coordinator handles a lost worker, which returns, and a lost parameter server, which does not
            self.progress.stop(DataError(f"{name} cannot read its data: {one_line(error)}"))
        except Exception as error:  # noqa: BLE001 - the chief raises it
            self.progress.stop(error)

    def scalars(self) -> dict[str, float]:
        """Return each replica's steps/s and staleness, and each server's MB/s, since the last call."""
        if not self.servers:
            return {}
        (since, rounds), now = self._shown, time.monotonic()
        self._shown = now, self.progress.rounds
        scalars: dict[str, float] = {}
        for name, pace in list(self.progress.paces.items()):
            folder = f"replicas/{name.replace('/', '-')}"
            scalars[f"{folder}/steps_per_second"], scalars[f"{folder}/staleness"] = pace.local_rate, pace.staleness
        for index, count in enumerate(self.servers.bytes_per_round):
            rate = count * (self._shown[1] - rounds) / max(now - since, 1e-6)
            scalars[f"ps/ps-{index}/megabytes_per_second"] = rate / 1e6
        return scalars


def _shorten_log(record: logging.LogRecord) -> bool:
    """Shorten the coordinator's log record of a worker's error, pages of graph nodes, to one line."""
    if "when processing closure" in (message := record.getMessage()):
        record.msg, record.args = one_line(RuntimeError(message)), ()
    return True
