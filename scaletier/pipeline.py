"""Strategy `model-parallel`: the layers of one model, too large for one host, lie on several.

The master and the workers hold a stage each, consecutive layers with their variables, gradients and velocities; one graph goes
through all of them. A batch goes through it in microbatches, so that a stage works on one while the next has the one before.
Source: Huang et al. 2019, "GPipe: efficient training of giant neural networks using pipeline parallelism".
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from scaletier import checkpoint, data
from scaletier.chief import ChiefTasks
from scaletier.cluster import Cluster, await_peers
from scaletier.flags import Flags
from scaletier.job import Job, JobError
from scaletier.lines import train_line
from scaletier.local_steps import DivergedError, Round, figures
from scaletier.network import Batch, FunctionalModel, Spec
from scaletier.private import brought, is_lost_host
from scaletier.runtime import (
    devices_of,
    give_memory_back,
    import_tensorflow,
    prepare_process,
    say,
    say_device,
)
from scaletier.stages import Stage, Unit, partition, there_and_back, units

tf = import_tensorflow()

_CHIEF = "/job:chief/replica:0/task:0/device:CPU:0"


class ModelParallel:
    """One job, from its first step or its last checkpoint to its exported model; the chief runs it.

    The constructor raises JobError, DataError and CheckpointError.
    """

    def __init__(self, job: Job, flags: Flags, cluster: Cluster) -> None:
        prepare_process()
        say_device(flags.allow_cpu)
        tf.random.set_seed(flags.seed)
        self._flags, self._devices = flags, dict[int, str]()
        source = data.BatchSource(job.data, portable=True)
        if job.callbacks:
            self._flags = flags = job.callbacks.plan(flags, source.length)
        evaluated = data.evaluation(job.eval_data, portable=True) if job.eval_data is not None else None
        self._size = source.largest()
        source.keep_size(self._size)
        if source.batch_size is None:
            say(f"Trains on batches of {self._size}; smaller ones are left out")
        of_evaluated = evaluated.element_spec if evaluated else None
        self._network = FunctionalModel(job, source.element_spec, flags.seed, place=self._device_of, evaluated=of_evaluated)
        self._network.require_portable()
        self._network.require_parts()
        parts = units(self._network)
        reader = checkpoint.find(flags.job_dir, self._network)
        hosts = _connect(cluster)
        cuts = partition([unit.size for unit in parts], len(hosts))
        if len(cuts) == 2:
            what = f"its layers {parts[0].name} cannot be parted" if len(parts) == 1 else "there is one host"
            raise JobError(f"the model {self._network.model.name} is not laid on several hosts: {what}")
        self._stages = [
            self._place(replica, device, parts[start:end], reader)
            for (replica, device), (start, end) in zip(hosts, pairwise(cuts), strict=False)
        ]
        by_name = {name: value for stage in self._stages for name, value in stage.variables.items()}
        self.shared = [by_name[spec.name] for spec in self._network.shared]
        self.own = [by_name[spec.name] if spec.name in by_name else self._slot(spec, reader) for spec in self._network.own]
        if reader:
            self._network.fix([by_name[spec.name].numpy() for spec in self._network.fixed])
        self.step = tf.Variable(np.int64(reader.step if reader else 0))
        position = checkpoint.DataPosition(source, reader)
        with tf.device(self._stages[0].device):
            self._iterator = iter(source.elsewhere(0, 1, int(self.step) - int(position.begin)))
        chief_arguments = self._network, self, Batch.of(source.element_spec).inputs, evaluated, position, int(self.step)
        self._keeper = ChiefTasks(job, flags, *chief_arguments)
        for stage in self._stages:
            megabytes = 4e-6 * sum(unit.size for unit in stage.units)
            say(f"Placed {', '.join(unit.name for unit in stage.units)} on {stage.replica}: {megabytes:.1f} MB of parameters")
        give_memory_back()
        self._finite = tf.function(self._all_finite, autograph=False)
        self._train = tf.function(self._train_step, autograph=False)

    @property
    def variables(self) -> dict[str, Any]:
        """The variables by their names in checkpoints, each on its host."""
        pairs = zip((*self._network.shared, *self._network.own), (*self.shared, *self.own), strict=True)
        return {checkpoint.key_of(spec): variable for spec, variable in pairs}

    def run(self) -> None:
        """Train to the last step, evaluate, export.

        Raises:
            DivergedError: the loss or a parameter is no number.
            PreemptedError: this process is to end.
            tf.errors.OpError: a host is lost.
        """
        start = last = time.monotonic()
        step = last_step = int(self.step)
        loss: float | None = None
        while step < self._flags.max_steps:
            round_result, now = self._one(), time.monotonic()
            loss = round_result.loss
            if not math.isfinite(round_result.loss):
                raise DivergedError(f"the loss is {loss} at step {round_result.global_step}; try a lower learning rate")
            if (step == last_step and last == start) or now - last >= self._flags.log_interval:
                rate = (round_result.global_step - last_step) / max(now - last, 1e-6)
                for replica, device in {stage.replica: stage.device for stage in reversed(self._stages)}.items():
                    line = train_line(
                        replica, round_result.global_step, round_result.loss, round_result.metrics, now - start, rate, rate
                    )
                    with tf.device(device):
                        tf.raw_ops.PrintV2(input=line, output_stream="stdout", end="\n")
                last, last_step = now, round_result.global_step
            step = round_result.global_step
            self._keeper.after(round_result)
            if self._keeper.stopped:
                break
        self._keeper.finish(loss)

    def _one(self) -> Round:
        """Run a step of all stages."""
        try:
            return Round.of(self._network, self._train(self._iterator).numpy())
        except tf.errors.OpError as error:
            if not is_lost_host(error):
                self._keeper.keep()
            raise

    def initial_test(self) -> list[Any]:
        """Return the state before an evaluation's first batch."""
        return self._network.initial_metrics()

    def test(self, state: Sequence[Any], batch: Batch) -> tuple[Any, Any, list[Any], Any]:
        """Evaluate a batch, through all stages, as `Network.test`."""
        outputs, terms = batch.inputs, list[Any]()
        for stage in self._stages:
            with tf.device(stage.device):
                outputs_here = tf.nest.map_structure(brought, outputs)
                outputs, _, added = stage.forward(stage.variables, outputs_here, False)
                terms += [tf.reduce_sum(tf.cast(term, tf.float32)) for term in added]
        loss, state, results = self._network.measure(state, batch, outputs)
        return tf.add_n([loss, *terms]), outputs, state, results

    def refresh(self) -> int:
        """Return the global step; check the variables if they were trained.

        Raises DivergedError if they are no longer numbers.
        """
        step = int(self.step)
        if not bool(self._finite()):
            raise DivergedError(f"the parameters are not finite at step {step}; try a lower learning rate")
        return step

    def _device_of(self, variable: Any) -> contextlib.AbstractContextManager[Any]:
        return tf.device(self._devices[id(variable)])  # type: ignore[no-any-return]

    def _place(self, replica: str, device: str, parts: Sequence[Unit], reader: checkpoint.CheckpointReader | None) -> Stage:
        """Return a stage on its host; one variable at a time passes through the master's memory."""
        stage = Stage(replica, device, parts)
        for spec in (spec for unit in parts for spec in (*unit.trained, *unit.others)):
            self._devices[id(spec.variable)] = device
            stage.variables[spec.name] = self._variable(spec, device, reader)
        return stage

    def _slot(self, spec: Spec, reader: checkpoint.CheckpointReader | None) -> Any:
        """Return a variable of the optimizer, with its weight."""
        weight = self._network.weight_of(spec)
        return self._variable(spec, self._devices[id(weight.variable)] if weight else _CHIEF, reader)

    def _variable(self, spec: Spec, device: str, reader: checkpoint.CheckpointReader | None) -> Any:
        restored = reader is not None and (spec in self._network.shared or spec in reader.own)
        value = reader.value(spec) if reader and restored else self._network.initial(spec)
        with tf.device(device):  # zeros are made where they are to be
            return tf.Variable(value if value.any() else tf.zeros(spec.shape, spec.dtype), name=spec.name)

    def _train_step(self, iterator: Any) -> Any:
        """Take one step on the next batch; return the figures of Round."""
        network, batch = self._network, Batch.of(iterator.get_next())
        position, counts = self.step.read_value(), len(network.own) - len(network.slots)
        slots = []
        for variable in self.own[counts:]:
            with tf.device(variable.device):
                slots.append(variable.read_value())
        passed = there_and_back(
            network,
            self._stages,
            batch,
            self._size,
            min(self._flags.microbatches, self._size),
            lambda loss: network.scaled(loss, slots),
        )
        trained = []
        for variable in self.shared[: len(network.trained)]:
            with tf.device(variable.device):
                trained.append(variable.read_value())
        moved, slots = network.apply(trained, slots, [passed.changes[spec.name] for spec in network.trained], position)
        after = {spec.name: value for spec, value in zip(network.trained, moved, strict=True)} | passed.others
        after |= {spec.name: value for spec, value in zip(network.slots, slots, strict=True)}
        with tf.control_dependencies([passed.loss]):  # a step without a loss changes nothing
            for spec, variable in zip((*network.shared, *network.own), (*self.shared, *self.own), strict=True):
                with tf.device(variable.device):
                    variable.assign(after[spec.name], read_value=False)
            step = self.step.assign_add(1)
        return figures(1, step, passed.loss, 0, 0.0, tf.concat([[passed.loss], passed.results], 0))

    def _all_finite(self) -> Any:
        flags = []
        for variable in self.shared:
            with tf.device(variable.device):
                flags.append(tf.reduce_all(tf.math.is_finite(variable)))
        return tf.reduce_all(tf.stack(flags))


def _connect(cluster: Cluster) -> list[tuple[str, str]]:
    """Connect to the workers; return the replica and the device of each stage, the master's first."""
    workers = {f"worker/{index}": address for index, address in enumerate(cluster.jobs["worker"])}
    await_peers(workers, say)
    spec = tf.train.ClusterSpec({job: list(cluster.jobs[job]) for job in ("chief", "worker")})
    tf.config.experimental_connect_to_cluster(spec, job_name="chief", task_index=0, protocol="grpc")
    tasks = [("master/0", "chief", 0), *((name, "worker", index) for index, name in enumerate(workers))]
    return [
        (name, f"/job:{job}/replica:0/task:{index}{device}") for name, job, index in tasks for device in devices_of(job, index)
    ]
