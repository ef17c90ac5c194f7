"""Strategy `async`: parameter servers hold the model; the master and every worker train independently.

The master sends rounds of steps to the workers by tf.distribute's ParameterServerStrategy and ClusterCoordinator, and trains
beside them. Without workers the master is the only replica, and holds the model itself.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from scaletier.checkpoint import CheckpointReader, TrainingState
from scaletier.exit import exit_process, print_lost_host
from scaletier.flags import Flags
from scaletier.job import DataError, Job
from scaletier.loop import ReplicaLoop, Round, StepBudget, run_rounds
from scaletier.private import CoordinatorWorkers, is_lost_host
from scaletier.round_graph import (
    handle_specs,
    list_handles,
    make_round,
    named_handles,
    replica_variables,
    run_round,
    set_learning_rates,
)
from scaletier.shared_parameters import SharedParameters
from scaletier.sync_period import SyncPeriod
from scaletier.tensorflow_setup import (
    devices_of,
    give_memory_back,
    import_tensorflow,
    one_line,
    quiet_stderr,
    say,
    say_on_device,
)
from scaletier.tf_config import Cluster, await_peers
from scaletier.training import Training, cluster_resolver

tf = import_tensorflow()

_NO_FILE = "No such file"
# If a parameter server is lost during a call, the call may never return, as TensorFlow has no time limit, and a worker's thread
# may wait, too. After _LONG_SECONDS the servers are polled; if one is lost, the call has _STUCK_SECONDS more.
_LONG_SECONDS, _STUCK_SECONDS, _POLL_SECONDS = 10.0, 30.0, 1.0


class Asynchronous(Training):
    """Run the chief's part of a job: train, and start each round of every worker."""

    def __init__(self, job: Job, flags: Flags, cluster: Cluster) -> None:
        if not tf.config.list_physical_devices("GPU"):
            # Grappler, TensorFlow's graph optimizer, makes no step faster on CPUs. Each restarted host would run it again, for
            # a quarter of the time between a worker's kill and its next step.
            tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
        self.worker_count = len(cluster.jobs.get("worker", ()))
        self.host_count, self.sends_data = 1 + self.worker_count, self.worker_count > 0
        self.workers: CoordinatorWorkers | None = None
        self._call_start: float | None = None
        super().__init__(job, flags, cluster)

    def make_state(self, reader: CheckpointReader | None) -> TrainingState:
        if self.worker_count:
            self.network.require_transferable()
            self.coordinator = self._connect()
        return super().make_state(reader)

    def _connect(self) -> Any:
        tf.get_logger().addFilter(_shorten_log)
        await_peers(self.cluster.peers("ps", "worker"), say)
        # The strategy connects with device filters: parameter servers see the workers and the chief, never each other.
        strategy = tf.distribute.ParameterServerStrategy(cluster_resolver(self.cluster, self.cluster.jobs))
        return tf.distribute.coordinator.ClusterCoordinator(strategy)

    def begin(self, step: int) -> StepBudget:
        self.data_first_step, self.servers = int(self.data_position.first_step), None
        if self.worker_count:
            server_devices = [f"/job:ps/replica:0/task:{index}/device:CPU:0" for index in range(len(self.cluster.jobs["ps"]))]
            ema = self.state.ema_shared if step else self.state.shared
            self.servers = SharedParameters(self.network, server_devices, self.state.shared, step, ema)
            self.trace_pull(self.servers)
        device_sets = {self.devices, *(devices_of("worker", index) for index in range(self.worker_count))}
        with tf.device(self.devices[0]):
            self.iterator = iter(self.source.training_batches(0, self.host_count, step - self.data_first_step))
            metrics = self.job.callbacks.restore_metrics() if self.job.callbacks and self.network.replicas == 1 else ()
            self.graphs = {
                devices: make_round(self.network, self.servers, self.iterator, devices, metrics, self.uses_xla)
                for devices in device_sets
            }
        self._last_scalars = time.monotonic(), 0
        eval_steps = self.flags.eval_steps if self.eval_source or self.job.callbacks else None
        budget = StepBudget(step, self.flags.max_steps, self.host_count, eval_steps)
        if self.chief and eval_steps:
            budget.allow_until(self.chief.next_eval_step)
        return budget

    def trace_pull(self, servers: SharedParameters) -> None:
        """Trace the graph that pulls the servers' parameters into the state, once, before other replicas train."""
        pull = tf.function(lambda handles: servers.pull_exact(named_handles(self.network, handles)), autograph=False)
        self.pull = pull.get_concrete_function(handle_specs(self.network))

    @property
    def uses_xla(self) -> bool:
        return super().uses_xla and not self.worker_count  # a worker would compile the step for its own CPU

    def run(self) -> None:
        if self.worker_count:
            self.workers = CoordinatorWorkers(self.coordinator)
            for _ in range(self.worker_count):
                self.workers.schedule(self._train_worker)
        ended = threading.Event()
        if self.servers:
            threading.Thread(target=self._end_if_stuck, args=(self.servers, ended), daemon=True).start()
        try:
            with tf.device(self.devices[0]):
                assert self.chief
                self.chief.summaries.graph(self.graphs[self.devices])
                super().run()
        finally:
            ended.set()
        if self.workers and self.job.callbacks:  # the program continues after `fit`
            self.workers.stop()

    def check(self) -> None:
        super().check()
        if self.workers and self.workers.failure:
            raise self.workers.failure

    def _end_if_stuck(self, servers: SharedParameters, ended: threading.Event) -> None:
        """End the process, as after a lost host, if a call to a lost parameter server does not return while training runs."""
        lost_at: float | None = None
        while not ended.wait(_POLL_SECONDS):
            start, now = self._call_start, time.monotonic()
            error = servers.find_lost_host() if start is not None and now - start > _LONG_SECONDS else None
            if start is None or error is None or not is_lost_host(error):
                lost_at = None
                continue
            lost_at = max(start, lost_at or now)
            if now - lost_at > _STUCK_SECONDS:
                exit_process(print_lost_host(error))

    @contextlib.contextmanager
    def _calls_servers(self) -> Iterator[None]:
        """Note the time at which the master's thread calls the parameter servers."""
        self._call_start = time.monotonic()
        try:
            yield
        finally:
            self._call_start = None

    def refresh(self) -> int:
        give_memory_back()  # what rounds have freed, before a pull allocates more
        if self.servers:
            with self._calls_servers():
                self.pull(list_handles(self.state))
        return super().refresh()

    def rounds(self) -> Iterator[Round]:
        return self._train(self.name, 0, self.iterator, self.devices, say)

    def _replica(
        self, name: str, iterator: Any, devices: tuple[str, ...], log: Any, device_variables: Sequence[Any]
    ) -> ReplicaLoop:
        learning_rates: Any = None

        def run_with_rates(steps: int, live_hosts: int) -> Round:
            nonlocal learning_rates
            if self.job.callbacks and learning_rates is not self.job.callbacks.learning_rates:
                learning_rates = self.job.callbacks.learning_rates
                set_learning_rates(device_variables, learning_rates)
            with self._calls_servers() if name == self.name else contextlib.nullcontext():
                return run_round(self.network, self.graphs[devices], iterator, device_variables, steps, live_hosts)

        period = SyncPeriod.of(self.flags.sync_period, self.host_count, self.flags.max_steps)
        return ReplicaLoop(name, run_with_rates, period, self.flags.log_interval, {name: log}, name == self.name, len(devices))

    def _train(self, name: str, index: int, iterator: Any, devices: tuple[str, ...], log: Any) -> Iterator[Round]:
        start, is_chief = time.monotonic(), name == self.name
        with quiet_stderr() if is_chief else contextlib.nullcontext():  # TensorFlow prints startup messages
            step = self.budget.step
            variables = replica_variables(self.network, self.state, index, self.host_count, devices, step, is_chief)
            replica = self._replica(name, iterator, devices, log, variables)
            if self.worker_count:
                replica.run_round(0, 1)  # sends the graph to the replica's host in advance
        self.budget.begin(is_chief, time.monotonic() - start)
        return run_rounds(replica, self.budget)

    def _train_worker(self) -> None:
        """Train on a worker until the job's last step; called in the worker's thread."""
        index = 1 + tf.DeviceSpec.from_string(tf.timestamp().device).task
        name = f"worker/{index - 1}"
        try:
            iterator = iter(
                self.source.training_batches_on_device(index, self.host_count, self.budget.step - self.data_first_step)
            )
            for _ in self._train(name, index, iterator, devices_of("worker", index - 1), say_on_device):
                pass
        except tf.errors.DataLossError as error:
            self.budget.stop(error)  # the data is damaged, the host is not lost
        except tf.errors.OutOfRangeError as error:
            explanation = self.job.on_data_error(error) if self.job.on_data_error else None
            self.budget.stop(DataError(f"{name} finds no batch in the job's data{f': {explanation}' if explanation else ''}"))
        except tf.errors.OpError as error:
            denied = isinstance(error, tf.errors.PermissionDeniedError)
            if not denied and not (isinstance(error, tf.errors.NotFoundError) and _NO_FILE in str(error)):
                raise  # the coordinator waits for a lost worker to return, and reports a lost parameter server
            self.budget.stop(DataError(f"{name} cannot read its data: {one_line(error)}"))
        except Exception as error:  # noqa: BLE001 - the chief raises it
            self.budget.stop(error)

    def scalars(self) -> dict[str, float]:
        """Return each replica's steps/s and staleness, and each server's MB/s, since the last call."""
        if not self.servers:
            return {}
        (since, rounds), now = self._last_scalars, time.monotonic()
        self._last_scalars = now, self.budget.rounds
        scalars: dict[str, float] = {}
        for name, rates in list(self.budget.rates.items()):
            tag = f"replicas/{name.replace('/', '-')}"
            scalars[f"{tag}/steps_per_second"], scalars[f"{tag}/staleness"] = rates.local_rate, rates.staleness
        for index, count in enumerate(self.servers.bytes_per_round):
            rate = count * (self._last_scalars[1] - rounds) / max(now - since, 1e-6)
            scalars[f"ps/ps-{index}/megabytes_per_second"] = rate / 1e6
        return scalars


def _shorten_log(record: logging.LogRecord) -> bool:
    """Shorten the coordinator's log record of a worker's error, which has pages of graph nodes, to one line."""
    if "when processing closure" in (message := record.getMessage()):
        record.msg, record.args = one_line(RuntimeError(message)), ()
    return True
