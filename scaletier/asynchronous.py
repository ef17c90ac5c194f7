"""Strategy `async`: parameter servers hold the model; the master and every worker train independently.

tf.distribute's ParameterServerStrategy and ClusterCoordinator carry it: the master sends rounds of steps to the workers, and
trains beside them. Without workers the master is the only replica, and holds the model itself.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from scaletier import checkpoint, data
from scaletier.chief import ChiefTasks
from scaletier.cluster import Cluster, await_peers
from scaletier.flags import Flags
from scaletier.job import Job
from scaletier.local_steps import DivergedError, Round, State, begin_own, numbers
from scaletier.network import Batch, FunctionalModel
from scaletier.period import SyncPeriod
from scaletier.private import Workers, is_lost_host
from scaletier.replica import ReplicaLoop, StepProgress, train
from scaletier.runtime import (
    devices_of,
    here,
    import_tensorflow,
    local_devices,
    one_line,
    prepare_process,
    quiet_stderr,
    say,
    say_device,
)
from scaletier.shared_parameters import SharedParameters, make_round, take_round

tf = import_tensorflow()

_MASTER = "master/0"
_NO_FILE = "No such file"


class Asynchronous:
    """One job, from its first step or its last checkpoint to its exported model; the chief runs it.

    The constructor raises JobError, DataError and CheckpointError, before any other host is waited for.
    """

    def __init__(self, job: Job, flags: Flags, cluster: Cluster) -> None:
        prepare_process()
        say_device(flags.allow_cpu)
        if not tf.config.list_physical_devices("GPU"):
            # On processors no step is quicker for it, and every host on which the graph is new optimizes it anew: that is a
            # quarter of the time from a worker's kill to its next step.
            tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
        self._job, self._flags, self._cluster = job, flags, cluster
        self._workers = len(cluster.jobs.get("worker", ()))
        self._devices = local_devices()
        tf.random.set_seed(flags.seed)
        self._source = data.BatchSource(job.data, portable=self._workers > 0)
        if job.callbacks:
            self._flags = flags = job.callbacks.plan(flags, self._source.length)
        evaluated = data.evaluation(job.eval_data, self._workers > 0) if job.eval_data is not None else None
        self._network = FunctionalModel(
            job,
            self._source.element_spec,
            flags.seed,
            (1 + self._workers) * len(self._devices),
            evaluated=evaluated.element_spec if evaluated else None,
        )
        if self._workers:
            self._network.require_portable()
        reader = checkpoint.find(flags.job_dir, self._network)
        self._coordinator: Any = self._connect() if self._workers else None
        self._copy = checkpoint.LocalCopy(self._network)
        self.variables, self.step = self._copy.variables, self._copy.step
        self.initial_test, self.test = self._copy.initial_test, self._copy.test
        self.shared, self.own = self._copy.shared, self._copy.own
        step = self._begin_at(reader)
        position = checkpoint.DataPosition(self._source, reader)
        self._data_begin = int(position.begin)
        with tf.device(self._devices[0]):
            self._iterator = iter(self._source.training(0, 1 + self._workers, step - self._data_begin))
        inputs = Batch.of(self._source.element_spec).inputs
        self._keeper = ChiefTasks(job, flags, self._network, self, inputs, evaluated, position, step)
        self._centre = self._make_centre(step) if self._workers else None
        of_workers = [devices_of("worker", index) for index in range(self._workers)]
        with tf.device(self._devices[0]):
            metrics = job.callbacks.carry() if job.callbacks and self._network.replicas == 1 else ()
            self._rounds = {
                devices: make_round(self._network, self._centre, self._iterator, devices, metrics)
                for devices in {self._devices, *of_workers}
            }
        self._zeros = tf.function(lambda: [tf.zeros(one.shape, one.dtype) for one in self._network.own], autograph=False)
        if self._workers:
            self._zeros = self._zeros.get_concrete_function()  # here, and not in their threads
        looks = flags.eval_steps if evaluated or job.callbacks else None
        self._progress = StepProgress(step, flags.max_steps, self._workers, looks)
        self._shown = (time.monotonic(), 0)
        self._others: Workers | None = None

    def _begin_at(self, reader: checkpoint.CheckpointReader | None) -> int:
        """Fill the local copy from a checkpoint if there is one; return the global step."""
        self._copy.assign(*State.initial(self._network), 0)
        self._state_step = step = self._copy.restore(reader) if reader else 0
        self._state = State(*(tuple(map(tf.convert_to_tensor, part)) for part in (self.shared, self.own)))
        return step

    def _make_centre(self, step: int) -> SharedParameters:
        devices = [f"/job:ps/replica:0/task:{index}/device:CPU:0" for index in range(len(self._cluster.jobs["ps"]))]
        return SharedParameters(self._network, devices, [variable.numpy() for variable in self.shared], step)

    def _connect(self) -> Any:
        tf.get_logger().addFilter(_on_one_line)
        await_peers(self._cluster.peers(), say)
        # The strategy connects with device filters: parameter servers see the workers and the chief, never each other.
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({job: list(hosts) for job, hosts in self._cluster.jobs.items()}),
            task_type="chief",
            task_id=0,
            rpc_layer="grpc",
        )
        return tf.distribute.coordinator.ClusterCoordinator(tf.distribute.ParameterServerStrategy(resolver))

    def run(self) -> None:
        """Train to the last step, evaluate, export.

        Raises:
            DivergedError: the loss or a parameter is no number.
            PreemptedError: this process is to end.
            DataError: the data cannot be used.
            tf.errors.OpError: a host is lost for good.
        """
        if self._workers:
            self._others = Workers(self._coordinator)
            for _ in range(self._workers):
                self._others.schedule(self._train_worker)
        with tf.device(self._devices[0]):
            self._keeper.summaries.graph(self._rounds[self._devices])
            master, period_line = self._replica(_MASTER, self._iterator, self._devices, say), ""
            loss: float | None = None
            try:
                for round_result in self._train(master):
                    if master.period.told != period_line:
                        period_line = master.period.told
                        say(period_line)
                    loss = round_result.loss
                    self._after(round_result)
                    if self._keeper.stopped:
                        break
            except (data.DataError, tf.errors.OpError) as error:
                if is_lost_host(error):
                    self._rescue()
                else:
                    self._keeper.keep()
                raise
            self._progress.stopped.set()
            self._raise_failure()
            self._keeper.finish(loss)
        if self._others and self._job.callbacks:
            self._others.stop()

    def refresh(self) -> int:
        """Copy the parameters here; return their global step.

        Raises:
            DivergedError: they are no numbers.
        """
        state: State = self._state
        if self._centre:
            shared, step = self._centre.pull()
        else:
            shared, step = [value.numpy() for value in state.shared], self._progress.claims.global_step
        if not all(np.isfinite(value).all() for value in shared):
            raise DivergedError(f"the parameters of {_MASTER} are not finite at step {step}; try a lower learning rate")
        self._copy.assign(shared, state.own, step)
        return step

    def _rescue(self) -> None:
        """Save the parameters that the master read last, once a parameter server is lost."""
        step = self._state_step
        if step > int(self.step) and all(np.isfinite(value.numpy()).all() for value in self._state.shared):
            self._copy.assign(*self._state, step)
            self._keeper.rescue()

    def _replica(self, name: str, iterator: Any, devices: tuple[str, ...], emit: Any) -> ReplicaLoop:
        known: Any = None

        def take(state: State, steps: int, position: int, live: int) -> tuple[State, Round]:
            nonlocal known
            if self._job.callbacks and known is not self._job.callbacks.rates:
                known = self._job.callbacks.rates
                state = State(state.shared, self._with_rates(state.own, known))
            next_state, round_result = take_round(self._network, self._rounds[devices], iterator, state, steps, position, live)
            if name == _MASTER:
                self._state = next_state
                # What the servers gave is of the round's begin.
                self._state_step = round_result.global_step - (
                    round_result.steps + round_result.staleness if self._centre else 0
                )
            return State((), next_state.own) if self._centre else next_state, round_result

        period = SyncPeriod.of(self._flags.sync_period, 1 + self._workers, self._flags.max_steps)
        if period.alone and self._flags.eval_steps:  # a round's end is all that is looked at
            period.most = min(period.most, self._flags.eval_steps)
        return ReplicaLoop(name, name == _MASTER, take, period, self._flags.log_interval, emit, len(devices))

    def _with_rates(self, own: tuple[Any, ...], rates: Mapping[int, Any]) -> tuple[Any, ...]:
        """A replica's own variables with these learning rates, on each of its devices."""
        count = len(self._network.own)
        with here():
            return tuple(tf.constant(rates[at % count]) if at % count in rates else one for at, one in enumerate(own))

    def _train(self, replica: ReplicaLoop, index: int = 0) -> Iterator[Round]:
        start = time.monotonic()
        with quiet_stderr() if replica.leads else contextlib.nullcontext():  # a remark about the processor
            state = self._begin(replica, index)
        self._progress.begin(replica.leads, time.monotonic() - start)
        return train(replica, state, self._progress)

    def _begin(self, replica: ReplicaLoop, index: int) -> State:
        """Return a replica's initial state. A round of no steps sends the graph to its host in advance."""
        if replica.leads:
            own = tuple(map(tf.constant, self._begin_own(index, replica.devices)))
            if not self._workers:
                return State(self._state.shared, own)
        else:
            own = self._own(index, replica.devices)
        state: State = replica.take(State((), own), 0, 0, 1)[0]
        return state

    def _begin_own(self, index: int, devices: int) -> list[Any]:
        """Return a replica's initial `own` values: the optimizer continues as the master's, even in mid-job."""
        values, step = self._state.own[: len(self._network.own)], self._progress.claims.global_step
        return begin_own(self._network, values, numbers(index, 1 + self._workers, devices), step)

    def _own(self, index: int, devices: int) -> tuple[Any, ...]:
        """Return a worker's `own` values, on the worker: only those that are not zero are sent there."""
        values = self._begin_own(index, devices)
        zeros = list(self._zeros()) * devices
        with here():
            pairs = zip(values, zeros, strict=True)
            return tuple(tf.constant(value) if value.any() else zero for value, zero in pairs)

    def _train_worker(self) -> None:
        """Train a worker's share of the job; each worker's thread calls this until the job's last step."""
        index = 1 + tf.DeviceSpec.from_string(tf.timestamp().device).task
        name = f"worker/{index - 1}"
        emit = functools.partial(tf.raw_ops.PrintV2, output_stream="stdout", end="\n")
        try:
            steps_done = self._progress.claims.global_step - self._data_begin
            iterator = iter(self._source.elsewhere(index, 1 + self._workers, steps_done))
            replica = self._replica(name, iterator, devices_of("worker", index - 1), lambda line: emit(input=line))
            for _ in self._train(replica, index):
                pass
        except tf.errors.DataLossError as error:
            self._progress.fail(error)  # the data is to blame, and not the host
        except tf.errors.OutOfRangeError as error:
            explanation = self._job.explain(error) if self._job.explain else None
            self._progress.fail(
                data.DataError(f"{name} finds no batch in the job's data{f': {explanation}' if explanation else ''}")
            )
        except (tf.errors.NotFoundError, tf.errors.PermissionDeniedError) as error:
            if not isinstance(error, tf.errors.PermissionDeniedError) and _NO_FILE not in str(error):
                raise  # what a worker that has started again does not know yet
            self._progress.fail(data.DataError(f"{name} cannot read its data: {one_line(error)}"))
        except tf.errors.OpError:
            raise  # the coordinator knows a lost worker, which comes back, from a lost parameter server, which does not
        except Exception as error:  # noqa: BLE001 - a thread's error is the chief's to raise
            self._progress.fail(error)

    def _after(self, taken: Round) -> None:
        """Do the chief's other work if it is due."""
        self._raise_failure()
        self._keeper.after(taken, self._scalars if self._workers else dict, self._progress.claims.release)

    def _scalars(self) -> dict[str, float]:
        """Return rates, staleness and megabytes a second since the last call."""
        since, rounds = self._shown
        now, latest = time.monotonic(), self._progress.rounds
        scalars: dict[str, float] = {}
        for name, pace in list(self._progress.paces.items()):
            folder = f"replicas/{name.replace('/', '-')}"
            scalars[f"{folder}/steps_per_second"] = pace.local_rate
            scalars[f"{folder}/staleness"] = pace.staleness
        for index, count in enumerate(self._centre.bytes_per_round if self._centre else ()):
            scalars[f"ps/ps-{index}/megabytes_per_second"] = count * (latest - rounds) / max(now - since, 1e-6) / 1e6
        self._shown = (now, latest)
        return scalars

    def _raise_failure(self) -> None:
        """Raise the error that stopped the job, or that a worker's thread could not recover from."""
        if self._progress.failure:
            raise self._progress.failure
        if self._others and (error := self._others.failure):
            raise error


def _on_one_line(record: logging.LogRecord) -> bool:
    """Shorten the coordinator's log of a worker's error, which has pages of the graph's nodes, to a line."""
    if "when processing closure" in (message := record.getMessage()):
        record.msg, record.args = one_line(RuntimeError(message)), ()
    return True
