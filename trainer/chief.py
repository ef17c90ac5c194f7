"""The chief: it owns the job. It places the parameters, sets the workers to work, trains beside them, evaluates, saves."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from trainer import checkpoint
from trainer.cluster import Cluster, await_peers
from trainer.data import check, find_files, train_pipeline
from trainer.elastic import Centre, Descent, Round, make_round
from trainer.evaluation import Metrics, make_evaluate
from trainer.export import export
from trainer.flags import Flags
from trainer.lines import EvalInterval, eval_line, final_line
from trainer.model import MODELS
from trainer.replica import DivergedError, Progress, train
from trainer.runtime import import_tensorflow, say, set_threads
from trainer.summaries import Summaries

tf = import_tensorflow()

_LOCAL_DEVICE = "/device:CPU:0"
_JOIN_SECONDS = 30.0
_SEEDS_PER_JOB = 1000


class PreemptedError(RuntimeError):
    """The chief was told to end before the job's last step."""


class Chief:
    """One job, from its first step or its last checkpoint to its exported model.

    The constructor raises DataError and CheckpointError, before any other host is waited for.
    """

    def __init__(self, flags: Flags, cluster: Cluster) -> None:
        set_threads()
        tf.random.set_seed(flags.seed)
        self._flags, self._cluster, self._model = flags, cluster, MODELS[flags.model]
        self._train_files, eval_files = find_files(flags.train_data, "train"), find_files(flags.eval_data, "test")
        check(self._train_files, flags.batch_size)
        check(eval_files, 1)
        found = checkpoint.latest(flags.job_dir)
        self._saved_step = -1
        values, step = self._model.initial(flags.seed), 0
        if found:
            values, step = checkpoint.read(found, self._model)
            self._saved_step = step
            say(f"Resuming from {found}, step {step}")
        self._preempted = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: self._preempted.set())
        self._coordinator: Any = self._connect() if cluster.distributed else None
        servers = len(cluster.jobs.get("ps", ()))
        devices = [f"/job:ps/replica:0/task:{index}/device:CPU:0" for index in range(servers)]
        self._centre = Centre(devices or [_LOCAL_DEVICE], values, step)
        with tf.device(_LOCAL_DEVICE):
            self._iterator = iter(self._pipeline(0))
        replicas = 1 + len(cluster.jobs.get("worker", ()))
        descent = Descent(flags.learning_rate, flags.sync_period, flags.max_steps, replicas)
        self._round = make_round(self._model, self._centre, descent, self._iterator)
        self._progress = Progress(step, replicas)
        self._copy = checkpoint.LocalCopy(self._model, flags.job_dir, flags.keep_checkpoints)
        self._evaluate = make_evaluate(lambda images: self._model.logits(self._copy.variables, images, False), eval_files)
        self._eval_interval = EvalInterval(flags.eval_interval)
        self._summaries = Summaries(flags.job_dir)
        self._summarized = (time.monotonic(), step)

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

    def run(self) -> None:
        """Trains to the last step, evaluates, exports.

        Raises DivergedError, PreemptedError, and tf.errors.OpError where a host is lost for good.
        """
        for _ in self._cluster.jobs.get("worker", ()):
            # The public schedule() takes a tf.function only, which cannot tell which worker it runs on. A Python function
            # runs in the coordinator's thread of a worker, under that worker's device, and is rescheduled like any other.
            self._coordinator._cluster.schedule(self._train_worker, (), {})
        with tf.device(_LOCAL_DEVICE):
            self._train("master/0", self._iterator, say, self._after_round)
            self._join()
            self._finish()

    def _pipeline(self, replica: int) -> Any:
        return train_pipeline(self._train_files, self._flags.batch_size, self._flags.seed * _SEEDS_PER_JOB + replica)

    def _train(
        self, name: str, iterator: Any, emit: Callable[[str], None], after_round: Callable[[Round], None] | None = None
    ) -> None:
        values, _ = self._centre.pull()
        self._progress.start()
        train(name, self._round, iterator, values, self._progress, self._flags.log_interval, emit, after_round)

    def _train_worker(self) -> None:
        """A worker's share of the job, from whichever worker's thread calls this until the job's last step."""
        index = tf.DeviceSpec.from_string(tf.constant(0).device).task

        def say_there(line: str) -> None:
            tf.raw_ops.PrintV2(input=line, output_stream="stdout", end="\n")

        try:
            self._train(f"worker/{index}", iter(self._pipeline(1 + index)), say_there)
        except tf.errors.OpError:
            raise  # the coordinator knows a lost worker, which comes back, from a lost parameter server, which does not
        except Exception as error:  # noqa: BLE001 - a thread's error is the chief's to raise
            self._progress.fail(error)

    def _after_round(self, taken: Round) -> None:
        """What the chief does besides training, whenever it is due."""
        if self._coordinator is not None:
            self._coordinator.done()  # raises what a worker's thread could not recover from
        if self._preempted.is_set():
            self._save()
            raise PreemptedError(f"told to end at step {taken.global_step}; a checkpoint is saved")
        now = time.monotonic()
        since, step = self._summarized
        if now - since >= self._flags.log_interval:
            rate = (taken.global_step - step) / (now - since)
            self._summaries.scalars(taken.global_step, loss=taken.loss, accuracy=taken.accuracy, steps_per_second=rate)
            self._summarized = (now, taken.global_step)
        if self._eval_interval.due(now) and taken.global_step < self._flags.max_steps:
            step = self._pull()
            metrics = self._evaluate_at(step)
            say(eval_line(step, metrics.loss, metrics.accuracy))
            adjusted = self._eval_interval.record(now, time.monotonic())
            if adjusted:
                say(adjusted)
        if taken.global_step - max(self._saved_step, 0) >= self._flags.checkpoint_steps:
            self._save()

    def _join(self) -> None:
        """Waits for the workers' last rounds; raises what stopped the job, if it was stopped."""
        deadline = time.monotonic() + _JOIN_SECONDS
        while self._coordinator is not None and not self._coordinator.done() and time.monotonic() < deadline:
            time.sleep(0.01)
        if self._progress.failure:
            raise self._progress.failure

    def _finish(self) -> None:
        step = self._save()
        self._summaries.graph(self._round)
        path = export(self._model, self._copy.variables, self._flags.job_dir)
        say(f"Exporting prediction graph to {path}")
        metrics = self._evaluate_at(step)
        say(final_line(step, metrics.loss, metrics.accuracy))

    def _pull(self) -> int:
        """Copies the parameters here; returns their global step. DivergedError where they are no longer numbers."""
        values, step = self._centre.pull()
        if not np.isfinite(values.numpy()).all():
            raise DivergedError(f"the parameters of master/0 are not finite at step {step}; try a lower --learning-rate")
        self._copy.assign(values, step)
        return step

    def _save(self) -> int:
        step = self._pull()
        if step != self._saved_step:
            self._copy.save()
            self._saved_step = step
        return step

    def _evaluate_at(self, step: int) -> Metrics:
        metrics = self._evaluate()
        self._summaries.scalars(step, eval__loss=metrics.loss, eval__accuracy=metrics.accuracy)
        self._summaries.mistakes(step, metrics.mistakes)
        return metrics
