"""Strategy `async`: parameter servers hold the model; the master and every worker train independently.

tf.distribute's ParameterServerStrategy and ClusterCoordinator do it: the master sends rounds of steps to the workers, and
trains beside them. Without workers the master is the only replica, and holds the model itself.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from scaletier.checkpoint import CheckpointReader, TrainingState
from scaletier.data import DataError
from scaletier.exit import exit_process, print_lost_host
from scaletier.flags import Flags
from scaletier.job import Job
from scaletier.loop import ReplicaLoop, Round, StepBudget, train
from scaletier.private import CoordinatorWorkers, is_lost_host
from scaletier.round_graph import (
    handle_specs,
    list_handles,
    make_round,
    named_handles,
    replica_variables,
    run_round,
    set_rates,
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
# A call to a parameter server that is lost during the call may never return, as TensorFlow has no time limit, and a worker's
# thread may wait too. After _LONG_SECONDS the servers are polled; if one is lost, the call has _STUCK_SECONDS more.
_LONG_SECONDS, _STUCK_SECONDS, _POLL_SECONDS = 10.0, 30.0, 1.0


class Asynchronous(Training):
    """The chief's part of a job: it trains, and starts each round of every worker."""

    def __init__(self, job: Job, flags: Flags, cluster: Cluster) -> None:
        if not tf.config.list_physical_devices("GPU"):
            # Grappler, TensorFlow's graph optimizer, makes no step faster on CPUs. Each restarted host would run it again, for
            # a quarter of the time between a worker's kill and its next step.
            tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
        self.workers = len(cluster.jobs.get("worker", ()))
        self.count, self.remote = 1 + self.workers, self.workers > 0
        self.others: CoordinatorWorkers | None = None
        self._call_start: float | None = None
        super().__init__(job, flags, cluster)

    def make_state(self, reader: CheckpointReader | None) -> TrainingState:
        if self.workers:
            self.network.require_remote()
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
        if self.workers:
            server_devices = [f"/job:ps/replica:0/task:{index}/device:CPU:0" for index in range(len(self.cluster.jobs["ps"]))]
            ema = self.state.ema_shared if step else self.state.shared
            self.servers = SharedParameters(self.network, server_devices, self.state.shared, step, ema)
            self.trace_pull(self.servers)
        kinds = {self.devices, *(devices_of("worker", index) for index in range(self.workers))}
        with tf.device(self.devices[0]):
            self.iterator = iter(self.source.training_batches(0, self.count, step - self.data_first_step))
            metrics = self.job.callbacks.restore_metrics() if self.job.callbacks and self.network.replicas == 1 else ()
            self.graphs = {
                devices: make_round(self.network, self.servers, self.iterator, devices, metrics, self.uses_xla)
                for devices in kinds
            }
        self._shown = time.monotonic(), 0
        eval_steps = self.flags.eval_steps if self.eval_source or self.job.callbacks else None
        budget = StepBudget(step, self.flags.max_steps, self.count, eval_steps)
        if self.chief and eval_steps:
            budget.allow_until(self.chief.ends_at)
        return budget

    def trace_pull(self, servers: SharedParameters) -> None:
        """Trace what gives the copy the servers' parameters, once, and not while others train."""
        pull = tf.function(lambda handles: servers.pull_exact(named_handles(self.network, handles)), autograph=False)
        self.pull = pull.get_concrete_function(handle_specs(self.network))

    @property
    def uses_xla(self) -> bool:
        return super().uses_xla and not self.workers  # a worker's host would compile it for its CPU

    def run(self) -> None:
        if self.workers:
            self.others = CoordinatorWorkers(self.coordinator)
            for _ in range(self.workers):
                self.others.schedule(self._train_worker)
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
        if self.others and self.job.callbacks:  # the program continues
            self.others.stop()

    def check(self) -> None:
        super().check()
        if self.others and self.others.failure:
            raise self.others.failure

    def _end_if_stuck(self, servers: SharedParameters, ended: threading.Event) -> None:
        """End the process while training runs, as after a lost host, if a call of a lost parameter server does not return."""
        lost_at: float | None = None
        while not ended.wait(_POLL_SECONDS):
            start, now = self._call_start, time.monotonic()
            error = servers.error() if start is not None and now - start > _LONG_SECONDS else None
            if start is None or error is None or not is_lost_host(error):
                lost_at = None
                continue
            lost_at = max(start, lost_at or now)
            if now - lost_at > _STUCK_SECONDS:
                exit_process(print_lost_host(error))

    @contextlib.contextmanager
    def _calls_servers(self) -> Iterator[None]:
        """Note that the master's thread calls the parameter servers."""
        self._call_start = time.monotonic()
        try:
            yield
        finally:
            self._call_start = None

    def refresh(self) -> int:
        give_memory_back()  # that of rounds, as a pull requests its own
        if self.servers:
            with self._calls_servers():
                self.pull(list_handles(self.state))
        return super().refresh()

    def rounds(self) -> Iterator[Round]:
        return self._train(self.name, 0, self.iterator, self.devices, say)

    def _replica(
        self, name: str, iterator: Any, devices: tuple[str, ...], emit: Any, device_variables: Sequence[Any]
    ) -> ReplicaLoop:
        known: Any = None

        def run_with_rates(steps: int, live_hosts: int) -> Round:
            nonlocal known
            if self.job.callbacks and known is not self.job.callbacks.rates:
                known = self.job.callbacks.rates
                set_rates(device_variables, known)
            with self._calls_servers() if name == self.name else contextlib.nullcontext():
                return run_round(self.network, self.graphs[devices], iterator, device_variables, steps, live_hosts)

        period = SyncPeriod.of(self.flags.sync_period, self.count, self.flags.max_steps)
        return ReplicaLoop(name, run_with_rates, period, self.flags.log_interval, {name: emit}, name == self.name, len(devices))

    def _train(self, name: str, index: int, iterator: Any, devices: tuple[str, ...], emit: Any) -> Iterator[Round]:
        start, is_chief = time.monotonic(), name == self.name
        with quiet_stderr() if is_chief else contextlib.nullcontext():  # TensorFlow's remark about the CPU
            step = self.budget.step
            variables = replica_variables(self.network, self.state, index, self.count, devices, step, is_chief)
            replica = self._replica(name, iterator, devices, emit, variables)
            if self.workers:
                replica.run_round(0, 1)  # it sends the graph to its host in advance
        self.budget.begin(is_chief, time.monotonic() - start)
        return train(replica, self.budget)

    def _train_worker(self) -> None:
        """Train on a worker until the job's last step; called in the worker's thread."""
        index = 1 + tf.DeviceSpec.from_string(tf.timestamp().device).task
        name = f"worker/{index - 1}"
        try:
            iterator = iter(self.source.training_batches_on_device(index, self.count, self.budget.step - self.data_first_step))
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
                raise  # the coordinator handles a lost worker, which returns, and a lost parameter server, which does not
            self.budget.stop(DataError(f"{name} cannot read its data: {one_line(error)}"))
        except Exception as error:  # noqa: BLE001 - the chief raises it
            self.budget.stop(error)

    def scalars(self) -> dict[str, float]:
        """Return each replica's steps/s and staleness, and each server's MB/s, since the last call."""
        if not self.servers:
            return {}
        (since, rounds), now = self._shown, time.monotonic()
        self._shown = now, self.budget.rounds
        scalars: dict[str, float] = {}
        for name, pace in list(self.budget.paces.items()):
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
