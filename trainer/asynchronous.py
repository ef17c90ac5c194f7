"""Strategy `async`: parameter servers hold the model, and the master and every worker train it at their own speed.

tf.distribute's ParameterServerStrategy and ClusterCoordinator carry it: the master sends rounds of steps to the workers, and
trains beside them. Without workers the master is the only replica, and holds the model itself.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from trainer import checkpoint
from trainer.cluster import Cluster, await_peers
from trainer.data import DataError, replica_seed, train_pipeline
from trainer.descent import Descent
from trainer.downpour import Centre, Round, State, make_round
from trainer.flags import Flags
from trainer.keeper import Keeper, evaluation_data, training_data
from trainer.model import make_model
from trainer.period import Period
from trainer.replica import DivergedError, Progress, Replica, prepare, train
from trainer.runtime import import_tensorflow, local_device, one_line, prepare_process, quiet_stderr, say

tf = import_tensorflow()

_MASTER = "master/0"
_NO_FILE = "No such file"


class Asynchronous:
    """One job, from its first step or its last checkpoint to its exported model; the chief runs it.

    The constructor raises DataError and CheckpointError, before any other host is waited for.
    """

    def __init__(self, flags: Flags, cluster: Cluster) -> None:
        prepare_process()
        if not tf.config.list_physical_devices("GPU"):
            # On processors no step is quicker for it, and every host on which the graph is new optimizes it anew: that is a
            # quarter of the time from a worker's kill to its next step.
            tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
        tf.random.set_seed(flags.seed)
        self._flags, self._cluster = flags, cluster
        self._model = make_model(flags.model, flags.hidden_units, flags.precision)
        self._files, evaluated = training_data(flags), evaluation_data(flags)
        found = checkpoint.latest(flags.job_dir)
        values, step = checkpoint.read(found, self._model) if found else (self._model.initial(flags.seed), 0)
        if found:
            say(f"Resuming from {found}, step {step}")
        self._device = local_device()
        self._workers = len(cluster.jobs.get("worker", ()))
        self._coordinator: Any = self._connect() if self._workers else None
        self._copy = checkpoint.LocalCopy(self._model)
        self.variables, self.step, self.logits = self._copy.variables, self._copy.step, self._copy.logits
        self._keeper = Keeper(flags, self._model, self, evaluated, step)
        devices = [f"/job:ps/replica:0/task:{index}/device:CPU:0" for index in range(len(cluster.jobs.get("ps", ())))]
        self._centre = Centre(self._model, devices or [self._device], values, step, bool(devices))
        with tf.device(self._device):
            self._iterator = iter(self._pipeline(0))
        descent = Descent(flags.learning_rate, flags.momentum, flags.max_steps, 1 + self._workers)
        self._round = make_round(self._model, self._centre, descent, self._iterator)
        self._progress = Progress(step, flags.max_steps, self._workers)
        self._shown = (time.monotonic(), 0)

    def _connect(self) -> Any:
        await_peers(self._cluster.peers(), say)
        # The strategy connects with device filters: parameter servers see the workers and the chief, never each other.
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({job: list(hosts) for job, hosts in self._cluster.jobs.items()}),
            task_type="chief",
            task_id=0,
            rpc_layer="grpc",
        )
        return tf.distribute.coordinator.ClusterCoordinator(tf.distribute.ParameterServerStrategy(resolver))

    def _await_no_lost_host(self) -> None:
        """From here on only a worker's own thread waits for its host to answer; it may be gone without a word.

        TensorFlow has every host know every function, and an operation of this process is one too when it is first seen. It
        sends them to all hosts and waits for each to answer, unless they go by a stream, which ParameterServerStrategy turns
        off; the threads of the workers shall not stream, as before, for they need to see what fails. It takes back functions
        that Python's garbage collector finds, from any thread, under a lock that all operations need: little is kept instead.
        And what it sends to free tensors is waited for in an executor that threads share, so that this one gets its own.
        """
        eager = "tensorflow.python.eager."
        new_executor = importlib.import_module(f"{eager}executor").new_executor
        for worker in self._coordinator._cluster.workers:
            worker.executor = new_executor(enable_async=False, enable_streaming_enqueue=False)
        os.environ["TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE"] = "True"
        context = importlib.import_module(f"{eager}context").context()
        context.remove_function = lambda _name: None
        self._executor = new_executor(enable_async=False)  # lives as long as it is known here
        context.executor = self._executor

    def run(self) -> None:
        """Trains to the last step, evaluates, exports.

        Raises DivergedError, PreemptedError, DataError, and tf.errors.OpError where a host is lost for good.
        """
        if self._workers:
            self._await_no_lost_host()
        for _ in range(self._workers):
            # The public schedule() takes a tf.function only, which cannot tell which worker it runs on. A Python function
            # runs in the coordinator's thread of a worker, under that worker's device, and is rescheduled like any other.
            self._coordinator._cluster.schedule(self._train_worker, (), {})
        with tf.device(self._device):
            self._keeper.summaries.graph(self._round)
            master, told = self._replica(_MASTER, self._iterator, say), ""
            for taken in self._train(master):
                if master.period.told != told:
                    told = master.period.told
                    say(told)
                self._after(taken)
            self._progress.stopped.set()
            self._raise_failure()
            self._keeper.finish()

    def refresh(self) -> int:
        """Copies the parameters here; returns their global step. DivergedError where they are no longer numbers."""
        values, step = self._centre.pull()
        if not np.isfinite(values.numpy()).all():
            raise DivergedError(f"the parameters of {_MASTER} are not finite at step {step}; try a lower --learning-rate")
        self._copy.assign(values, step)
        return step

    def _pipeline(self, replica: int) -> Any:
        seed = replica_seed(self._flags.seed, replica)
        return train_pipeline(self._files, self._flags.batch_size, seed, (replica, 1 + self._workers))

    def _replica(self, name: str, iterator: Any, emit: Any) -> Replica:
        period = Period.of(self._flags.sync_period, 1 + self._workers, self._flags.max_steps)
        return Replica(name, name == _MASTER, self._round, iterator, period, self._flags.log_interval, emit)

    def _train(self, replica: Replica) -> Iterator[Round]:
        with quiet_stderr() if replica.leads else contextlib.nullcontext():  # a remark about the processor
            state = self._begin(replica)
        self._progress.begin(replica.leads)
        return train(replica, state, self._progress, lambda: self._begin(replica))

    def _begin(self, replica: Replica) -> State:
        """What a replica begins with. On another host, a first time brings the graph there, which takes a moment."""
        zeros = tuple(tf.zeros(shape) for shape in self._model.shapes.values())
        if self._workers:
            return prepare(replica, zeros)
        return State(tuple(self._model.unflatten(self._centre.pull()[0]).values()), zeros)

    def _train_worker(self) -> None:
        """A worker's share of the job, from whichever worker's thread calls this until the job's last step."""
        index = tf.DeviceSpec.from_string(tf.constant(0).device).task
        emit = functools.partial(tf.raw_ops.PrintV2, output_stream="stdout", end="\n")
        try:
            replica = self._replica(f"worker/{index}", iter(self._pipeline(1 + index)), lambda line: emit(input=line))
            for _ in self._train(replica):
                pass
        except tf.errors.DataLossError as error:
            self._progress.fail(error)  # the data is to blame, and not the host
        except tf.errors.OutOfRangeError:
            self._progress.fail(DataError(f"worker/{index} finds no record in {', '.join(self._flags.train_data)}"))
        except (tf.errors.NotFoundError, tf.errors.PermissionDeniedError) as error:
            if not isinstance(error, tf.errors.PermissionDeniedError) and _NO_FILE not in str(error):
                raise  # what a worker that has started again does not know yet
            self._progress.fail(DataError(f"worker/{index} cannot read its data: {one_line(error)}"))
        except tf.errors.OpError:
            raise  # the coordinator knows a lost worker, which comes back, from a lost parameter server, which does not
        except Exception as error:  # noqa: BLE001 - a thread's error is the chief's to raise
            self._progress.fail(error)

    def _after(self, taken: Round) -> None:
        """What the chief does besides training, whenever it is due."""
        self._raise_failure()
        self._keeper.after(taken, self._scalars if self._workers else dict)

    def _scalars(self) -> dict[str, float]:
        """What the replicas and the parameter servers did since this was last asked: rates, staleness, megabytes a second."""
        since, rounds = self._shown
        now, seen = time.monotonic(), self._progress.rounds
        scalars: dict[str, float] = {}
        for name, pace in list(self._progress.paces.items()):
            folder = f"replicas/{name.replace('/', '-')}"
            scalars[f"{folder}/steps_per_second"] = pace.local_rate
            scalars[f"{folder}/staleness"] = pace.staleness
        for index, count in enumerate(self._centre.bytes_per_round):
            scalars[f"ps/ps-{index}/megabytes_per_second"] = count * (seen - rounds) / max(now - since, 1e-6) / 1e6
        self._shown = (now, seen)
        return scalars

    def _raise_failure(self) -> None:
        """Raises what stopped the job, if it was stopped, or what a worker's thread could not recover from."""
        if self._progress.failure:
            raise self._progress.failure
        if self._coordinator is not None:
            # The public done() raises it too, but only once no worker is in a round; and a lost one may be for long.
            error = self._coordinator._cluster.closure_queue._error
            if error:
                raise error
