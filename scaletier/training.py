"""Train a job in one process by the rounds of a strategy, and do the chief's other work."""

from __future__ import annotations

import abc
import contextlib
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from scaletier import checkpoint
from scaletier.data import BatchSource, make_eval_source
from scaletier.evaluation import EvaluationResult, make_evaluate
from scaletier.flags import Flags
from scaletier.functional_model import Batch, FunctionalModel
from scaletier.job import DataError, Job, JobError
from scaletier.loop import DivergedError, EvalInterval, PreemptedError, Round, StepBudget, eval_line, final_line
from scaletier.private import is_lost_host
from scaletier.savedmodel import export, make_serving_module, save_model
from scaletier.summaries import Summaries
from scaletier.tensorflow_setup import (
    StopRequest,
    available_memory,
    give_memory_back,
    import_tensorflow,
    local_devices,
    one_line,
    say,
    say_device,
)
from scaletier.tf_config import Cluster

tf = import_tensorflow()


def cluster_resolver(cluster: Cluster, roles: Iterable[str], **options: Any) -> Any:
    """Return TensorFlow's resolver of a cluster, restricted to these of its roles."""
    spec = tf.train.ClusterSpec({role: list(cluster.jobs[role]) for role in roles})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver
    return resolver(spec, task_type=cluster.task_type, task_id=cluster.task_index, rpc_layer="grpc", **options)


class Training(abc.ABC):
    """Train one job, from its first step or its last checkpoint to its exported model.

    Attributes:
        is_chief: True for the chief, which evaluates, saves, logs and exports.
        host_count: the number of hosts that train, each on its `devices`.
        sends_data: True if other hosts get the data from this one.
        place: a function that returns the context in which the optimizer updates a variable.
    """

    name, is_chief, host_count, sends_data = "master/0", True, 1, False
    place: Callable[[Any], Any] | None = None

    def __init__(self, job: Job, flags: Flags, cluster: Cluster) -> None:
        self.job, self.flags, self.cluster = job, flags, cluster
        say_device(flags.allow_cpu)
        tf.random.set_seed(flags.seed)
        self.devices = local_devices()
        self.source = BatchSource(job.data, serialize=self.sends_data)
        if job.callbacks:
            count = None if self.source.endless or cluster.jobs else self.source.count
            self.flags = flags = job.callbacks.plan(flags, self.source.length, count)
            self.source.stride = job.callbacks.stride
        self.eval_source = (
            make_eval_source(job.eval_data, self.sends_data) if self.is_chief and job.eval_data is not None else None
        )
        spec = self.eval_source.element_spec if self.eval_source else None
        self.network = FunctionalModel(job, self.source.element_spec, flags.seed, self.replicas, self.place, spec)
        self.require_memory()
        if self.is_chief and self.network.model.jit_compile and not self.uses_xla:
            say("XLA compiles no step: that takes one process or --strategy sync, one device a host, and batches of one shape")
        if self.is_chief and self.network.model.run_eagerly:
            say("run_eagerly=True has no effect: a step is a graph, and its Python code runs once")
        self.reader = checkpoint.open_to_resume(flags.job_dir, self.network) if self.is_chief else None
        self.state = self.make_state(self.reader)
        self.data_position = checkpoint.DataPosition(self.source, self.reader)
        self.chief = ChiefTasks(self) if self.is_chief else None
        self.budget = self.begin(int(self.state.step))
        self.all_finite = tf.function(self._all_finite, autograph=False)
        give_memory_back()

    @property
    def replicas(self) -> int:
        return self.host_count * len(self.devices)

    @property
    def uses_xla(self) -> bool:
        """True if XLA compiles a step, as in `fit` of Keras: on a GPU by default, on the CPU if the model sets jit_compile."""
        return self.network.compiles and len(self.devices) == 1

    def require_memory(self) -> None:
        """Raise JobError if the model certainly needs more memory than this host has."""
        needed, memory = self.network.min_memory_bytes("GPU" in self.devices[0]), available_memory()
        if needed > memory:
            line = (
                f"the model {self.network.model.name} is invalid: {self.name} needs at least {needed / 1e6:,.0f} MB of memory"
            )
            line = f"{line} to train it, and its host has {memory / 1e6:,.0f}. Valid: a smaller model, a host with more memory,"
            raise JobError(f"{line} or --strategy model-parallel, with a part of the model on each host")

    def make_state(self, reader: checkpoint.CheckpointReader | None) -> checkpoint.TrainingState:
        """Create the job's variables, with their initial values or those of a checkpoint."""
        return checkpoint.TrainingState(self.network, reader, lambda _: self.devices[0])

    @abc.abstractmethod
    def begin(self, step: int) -> StepBudget:
        """Prepare the rounds from a global step on; return the step budget of the job."""

    @abc.abstractmethod
    def rounds(self) -> Iterator[Round]:
        """Yield the rounds of this process's replica."""

    def run(self) -> None:
        """Train to the last step; the chief then exports and evaluates. After an error the chief saves a checkpoint."""
        loss: float | None = None
        try:
            if self.chief:
                self.chief.end_epochs(int(self.state.step))
            for result in self.rounds():
                if loss is None:
                    give_memory_back()
                loss = result.loss
                self.check()
                if self.chief:
                    self.chief.run_due(result)
                if self.after_round(result):
                    break
            self.budget.stop()
            self.check()
        except (DataError, tf.errors.OpError) as error:
            if self.chief and is_lost_host(error):
                self.rescue()
            elif self.chief:
                self.chief.save_on_error()
            raise
        if self.chief:
            self.chief.finish(loss)

    def check(self) -> None:
        """Raise the error of another replica, if there is one."""
        if self.budget.failure:
            raise self.budget.failure

    def after_round(self, _result: Round) -> bool:
        """Do the strategy's work after a round; return True if a callback has ended training."""
        return bool(self.chief and self.chief.stopped)

    def rescue(self) -> None:
        """Save this host's values after a host is lost, if all are finite; with `async` they are those that it pulled last."""
        if self.chief and self.state.is_complete and bool(self.all_finite()):
            self.chief.rescue()

    def scalars(self) -> dict[str, float]:
        """Return the strategy's own numbers for the summaries."""
        return {}

    def refresh(self) -> int:
        """Update the state, with `async` from the servers; return its step. DivergedError if a parameter is not finite."""
        step = int(self.state.step)
        if not bool(self.all_finite()):
            raise DivergedError(f"the parameters of {self.name} are not finite at step {step}")
        return step

    def _all_finite(self) -> Any:
        finite = []
        for variable in self.state.shared:
            with tf.device(variable.device):
                finite.append(tf.reduce_all(tf.math.is_finite(variable)))
        return tf.reduce_all(tf.stack(finite))


class ChiefTasks:
    """Evaluate, save, log and export the model of a job. DataError if the job's directory cannot be created."""

    def __init__(self, training: Training) -> None:
        self._training, self._flags, self._network, self._state = training, training.flags, training.network, training.state
        job, folder, step = training.job, training.flags.job_dir, int(training.state.step)
        try:
            tf.io.gfile.makedirs(folder)
        except tf.errors.OpError as error:
            raise DataError(f"--job-dir {folder} cannot be created: {one_line(error)}") from None
        inputs = Batch.of(training.source.element_spec).inputs
        self._serving_module = make_serving_module(job, self._network, self._state.shared, self._state.local, inputs)
        variables = {**self._state.variables, **training.data_position.variables}
        if job.callbacks:
            variables[checkpoint.CALLBACKS] = job.callbacks.state
        with tf.device("/device:CPU:0"):
            variables[checkpoint.REPLICAS] = tf.Variable(self._network.replicas)
            if vocabulary_hash := self._network.vocabulary:
                variables[checkpoint.VOCABULARY_HASH] = tf.Variable(vocabulary_hash)
        self._saver = checkpoint.Saver(variables, self._state.step, folder, self._flags.keep_checkpoints)
        self._evaluate = None
        self._state.evaluates_ema = not job.callbacks  # `fit` of Keras evaluates the weights themselves, not their averages
        if training.eval_source:
            self._evaluate = make_evaluate(self._network, self._state, training.eval_source.one_pass(), job.eval_callback)
        self._interval = EvalInterval(self._flags.eval_interval)
        eval_steps = self._flags.eval_steps or 1
        self.next_eval_step = (step // eval_steps + 1) * eval_steps
        self.summaries = Summaries(folder)
        self._last_summary = self._last_save = time.monotonic(), step
        self._callbacks = job.callbacks
        if self._callbacks:
            self._network.attach(self._state.shared, self._state.local)
            self.next_eval_step = self._callbacks.begin(self._network, self._state.local, self._flags, training.reader)
        if self._network.ema_slots and (warning := self._network.ema_warning(self._flags.max_steps)):
            say(warning)
        if step >= self._flags.max_steps:
            say(f"Nothing is left to train: step {step} is not below --max-steps {self._flags.max_steps}")
        self._preempted = StopRequest()
        signal.signal(signal.SIGTERM, self._preempted)

    def run_due(self, result: Round) -> None:
        """Log, evaluate and save after a round, each if it is due. After SIGTERM, save and raise PreemptedError."""
        if self._callbacks:
            self._callbacks.add(result)
        self._end_if_preempted()
        now = time.monotonic()
        since, step = self._last_summary
        if now - since >= self._flags.log_interval:
            rate = (result.global_step - step) / (now - since)
            scalars = {"loss": result.loss, **result.metrics, "steps_per_second": rate, **self._training.scalars()}
            self.summaries.scalars(result.global_step, scalars)
            self._last_summary = (now, result.global_step)
        if self._evaluate or self._callbacks:
            if self._flags.eval_steps:
                self.end_epochs(result.global_step)
            elif result.global_step < self._flags.max_steps and self._interval.is_due(now):
                self._evaluate_now()
                if adjusted := self._interval.record(now, time.monotonic()):
                    say(adjusted)
            self._end_if_preempted()
        saved_at, saved_step = self._last_save
        due = result.global_step - saved_step >= self._flags.checkpoint_steps
        due = due or now - saved_at >= self._flags.checkpoint_seconds
        if due and result.global_step < self._flags.max_steps:  # the last step is saved after the last epoch's callbacks
            self.save()

    def end_epochs(self, global_step: int) -> None:
        """Evaluate at each multiple of --eval-steps up to a global step, also one at which SIGTERM has ended the job before."""
        while self.next_eval_step <= min(global_step, self._flags.max_steps - 1) and not self.stopped:
            step, eval_steps = self._evaluate_now(), self._flags.eval_steps or 1
            self._end_if_preempted()
            if not self._callbacks:
                self.next_eval_step = (step // eval_steps + 1) * eval_steps
            ends = self._callbacks and self._callbacks.stopping
            self._training.budget.allow_until(global_step + 1 if ends else self.next_eval_step)

    def _end_if_preempted(self) -> None:
        if self._preempted.is_set():
            raise PreemptedError(f"Ends by SIGTERM at step {self.save()}; a checkpoint is saved")

    def _evaluate_now(self) -> int:
        step = self._training.refresh()
        if self._callbacks:
            epoch_end, self.next_eval_step = self.next_eval_step, self.next_eval_step + (self._flags.eval_steps or 1)
            if not self._callbacks.pauses_training:
                self._training.budget.allow_until(self.next_eval_step)

        def evaluate() -> EvaluationResult | None:
            if result := self._evaluate_and_report(step, self._preempted.is_set):
                say(eval_line(step, result.loss, result.metrics))
                if self._callbacks and self._network.replicas == 1:
                    self._state.end_test(result.test_state)
            return result

        if self._callbacks:
            before = self._variable_sums()
            self._callbacks.end_epoch(epoch_end, evaluate if self._evaluate else None)
            sums = self._variable_sums()
            if changed := [name for name in sums if not np.array_equal(sums[name], before[name], equal_nan=True)]:
                line = f"a callback has set {changed[0]} at the end of an epoch, which the other replicas do not get. Valid:"
                raise JobError(f"{line} the learning rate, self.model.stop_training, weights in on_train_end")
        else:
            evaluate()
        return step

    def _variable_sums(self) -> dict[str, npt.NDArray[Any]]:
        """Return the row sums of variables that callbacks may not set; none if there is one replica.

        They are the shared variables, and the constants, which no step changes.
        """
        if self._network.replicas == 1:
            return {}
        specs = (*self._network.shared, *self._network.constants)
        sums = dict[str, npt.NDArray[Any]]()
        for spec, variable in zip(specs, (*self._state.shared, *self._state.constants), strict=True):
            value = variable.read_value()
            numbers = value if value.dtype.is_floating else tf.cast(value, tf.float32)
            sums[spec.name] = tf.reduce_sum(numbers, -1 if spec.shape else None).numpy()
        return sums

    @property
    def stopped(self) -> bool:
        return self._callbacks is not None and self._callbacks.stopped

    def finish(self, loss: float | None) -> None:
        """Save, export and evaluate the final model; `loss` is that of the last round, or None."""
        try:
            if self._callbacks and self._callbacks.in_epoch:
                self._evaluate_now()
        finally:
            step = self.save()
        self._state.assign_ema()
        if self._callbacks:
            self._callbacks.end()
        try:
            if self._callbacks:
                save_model(self._network.model, self._flags.job_dir)
            exported = export(self._serving_module, self._flags.job_dir)
            give_memory_back()
            say(f"Exporting prediction graph to {exported}")
        except JobError as error:
            if not self._callbacks:
                raise
            say(f"There is no SavedModel: {error}")  # the program that calls `fit` continues with the model
        finally:  # the metrics are logged even if the export failed
            if result := self._evaluate_and_report(step, last=True):
                say(final_line(step, result.loss, result.metrics))
            elif loss is not None:
                say(final_line(step, loss, {}))

    def save(self) -> int:
        """Write a checkpoint unless the present step has one; return the step."""
        step = self._training.refresh()
        if step != self._last_save[1]:
            self._write()
        self._last_save = (time.monotonic(), step)
        return step

    def _write(self) -> None:
        if self._callbacks:
            self._callbacks.store()
        self._saver.save()

    def save_on_error(self) -> None:
        """Save the trained model before an error ends the job; suppress a second error."""
        with contextlib.suppress(DataError, DivergedError, tf.errors.OpError):
            before = self._last_save[1]
            if (step := self.save()) > before:
                say(f"A checkpoint of step {step} is saved")

    def rescue(self) -> None:
        """Save the chief's values after other hosts are lost, if they are newer than the last checkpoint."""
        step = int(self._state.step)
        if step > self._last_save[1]:
            self._write()
            say(f"A checkpoint of step {step} is saved, with the values of this host")

    def _evaluate_and_report(
        self, step: int, is_stopped: Callable[[], bool] = lambda: False, last: bool = False
    ) -> EvaluationResult | None:
        """Evaluate and write summaries; return None if there is no eval_data, or the evaluation was stopped."""
        if result := self._evaluate(is_stopped) if self._evaluate else None:
            result.report(step, self.summaries, self._flags.job_dir, last)
        return result
