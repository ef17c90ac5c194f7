"""Strategy `model-parallel`: several hosts hold the layers of one model, which is too large for one host.

Each GPU of the master and the workers, or a host's CPU if it has none, holds a stage: consecutive layers with their variables,
gradients and optimizer slots. One graph spans all stages. A batch passes in microbatches, so that a stage computes one while
the next stage computes the one before.
Source: Huang et al. 2019, "GPipe: efficient training of giant neural networks using pipeline parallelism".
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from scaletier.checkpoint import CheckpointReader, TrainingState
from scaletier.functional_model import Batch, FunctionalModel
from scaletier.job import JobError
from scaletier.loop import ReplicaLoop, Round, StepBudget, run_rounds
from scaletier.private import copy_to_device
from scaletier.round_graph import list_handles, named_handles, pack_round, unpack_round
from scaletier.stages import Stage, forward_backward, make_layer_groups, partition
from scaletier.sync_period import SyncPeriod
from scaletier.tensorflow_setup import MAX_MESSAGE_BYTES, devices_of, import_tensorflow, say, say_on_device
from scaletier.tf_config import Cluster, await_peers
from scaletier.training import Training
from scaletier.variables import VariableSpec

tf = import_tensorflow()

_CHIEF = "/job:chief/replica:0/task:0/device:CPU:0"


class DistributedState(TrainingState):
    """Hold the variables of all stages, each on its stage's host; variables that belong to no weight are on the master."""

    def __init__(self, network: FunctionalModel, stages: Sequence[Stage], reader: CheckpointReader | None) -> None:
        self.stages = stages
        specs = [(stage, spec) for stage in stages for group in stage.groups for spec in group.specs]
        self.devices = {id(spec.variable): stage.device for stage, spec in specs}

        def device_of(spec: VariableSpec) -> str:
            device = self.devices.get(id((network.weight_of(spec) or spec).variable), _CHIEF)
            if spec.bytes >= MAX_MESSAGE_BYTES and not device.startswith("/job:chief/"):
                line = (
                    f"the variable {spec.name} is invalid on {device}: it has {spec.bytes / 1e9:.1f} GB, and TensorFlow sends"
                )
                raise JobError(f"{line} less than 2.1 at a time. Valid: smaller ones, or --strategy async or sync")
            return device

        super().__init__(network, reader, device_of)
        variables = {spec.name: variable for spec, variable in self.pairs()}
        for stage, spec in specs:
            stage.variables[spec.name] = variables[spec.name]

    def test(self, test_state: Sequence[Any], batch: Batch) -> tuple[Any, Any, list[Any], Any]:
        network, outputs, terms = self.network, batch.inputs, list[Any]()
        changing, weights = network.changing(network.shared, network.local), self.ema_shared if self.evaluates_ema else ()
        values = {spec.name: value for spec, value in zip(network.shared, weights, strict=False)}
        values |= {spec.name: value for spec, value in zip(changing, test_state, strict=False)}
        for stage in self.stages:
            with tf.device(stage.device):
                inputs = tf.nest.map_structure(copy_to_device, outputs)
                outputs, new_values, losses = stage.forward({**stage.variables, **values}, inputs, False)
                terms += [tf.reduce_sum(tf.cast(one, tf.float32)) for one in losses]
            values |= new_values
        _, mean_loss, measured, results = network.measure(test_state[len(changing) :], batch, outputs, terms)
        return mean_loss, outputs, [*(values[spec.name] for spec in changing), *measured], results


class ModelParallel(Training):
    """Run the chief's part of a job: hold the first stage, and run the graph that spans all stages."""

    sends_data, replicas, uses_xla = True, 1, False
    state: DistributedState

    def place(self, variable: Any) -> Any:
        """Return a context on the device of a variable."""
        return tf.device(self.state.devices[id(variable)])

    def require_memory(self) -> None:
        """Check nothing, since no host has the whole model."""

    def make_state(self, reader: CheckpointReader | None) -> TrainingState:
        """Connect to the workers, and create a stage on each device."""
        self.batch_size = self.source.fix_batch_size()
        self.network.require_transferable()
        self.network.require_splittable()
        groups = make_layer_groups(self.network)
        hosts = _connect(self.cluster)
        cuts = partition([group.size for group in groups], len(hosts))
        if len(cuts) == 2:
            what = f"its layers {groups[0].name} cannot be divided" if len(groups) == 1 else "there is one host"
            raise JobError(f"the model {self.network.model.name} is not divided among several hosts: {what}")
        stages = [
            Stage(name, device, groups[start:end]) for (name, device), (start, end) in zip(hosts, pairwise(cuts), strict=False)
        ]
        return DistributedState(self.network, stages, reader)

    def begin(self, step: int) -> StepBudget:
        stages = self.state.stages
        with tf.device(stages[0].device):
            self.iterator = iter(self.source.training_batches_on_device(0, 1, step - int(self.data_position.first_step)))
        for stage in stages:
            megabytes = 4e-6 * sum(group.size for group in stage.groups)
            say(
                f"Placed {', '.join(group.name for group in stage.groups)} on {stage.replica}: {megabytes:.1f} MB of parameters"
            )
        self.graph = tf.function(self._step, autograph=False)
        return StepBudget(step, self.flags.max_steps)

    def rounds(self) -> Iterator[Round]:
        hosts = {stage.replica: stage.device for stage in reversed(self.state.stages)}
        log_functions = {name: functools.partial(_print, device) for name, device in hosts.items()}
        replica = ReplicaLoop(self.name, self._run_round, SyncPeriod(1, True), self.flags.log_interval, log_functions)
        return run_rounds(replica, self.budget)

    def _run_round(self, *_: int) -> Round:
        return unpack_round(self.network, self.graph(self.iterator).numpy())

    def rescue(self) -> None:
        """Save nothing, since the lost host had a part of the model."""

    def _step(self, iterator: Any) -> Any:
        network, stages, batch = self.network, self.state.stages, Batch.of(iterator.get_next())
        variables, count = named_handles(network, list_handles(self.state)), len(network.local) - len(network.slots)
        global_step, slots = variables.step.read_value(), variables.local[count:]
        microbatches = min(self.flags.microbatches, self.batch_size)
        values = [slot.read_value() for slot in slots]
        result = forward_backward(
            network, stages, batch, self.batch_size, microbatches, lambda loss: network.scale_loss(loss, values)
        )
        with tf.device(stages[-1].device):
            results = tf.concat([[result.loss] * 2, result.results], 0)
        ready = [results]
        for stage in stages:
            gradients = [result.gradients[spec.name] for group in stage.groups for spec in group.trained]
            with tf.device(stage.device), tf.control_dependencies(gradients):
                ready.append(tf.no_op())
        with tf.control_dependencies(ready):  # nothing is written before all results and gradients exist
            trained = variables.shared[: len(network.trained)]
            written = network.apply(trained, slots, [result.gradients[spec.name] for spec in network.trained], global_step)
            for one in (*variables.shared[len(trained) :], *variables.local[:count]):
                written.append(one.assign(result.untrained[one.spec.name]))
            written.append(variables.step.assign(global_step + 1))
        with tf.control_dependencies(written):
            return pack_round(1, global_step + 1, results)


def _print(device: str, line: str) -> None:
    with tf.device(device):
        say_on_device(line)


def _connect(cluster: Cluster) -> list[tuple[str, str]]:
    """Connect to the workers; return the replica and the device of each stage, the master's first."""
    workers = cluster.peers("worker")
    await_peers(workers, say)
    spec = tf.train.ClusterSpec({job: list(cluster.jobs[job]) for job in ("chief", "worker")})
    tf.config.experimental_connect_to_cluster(spec, job_name="chief", task_index=0, protocol="grpc")
    tasks = [("master/0", "chief", 0), *((name, "worker", index) for index, name in enumerate(workers))]
    return [
        (name, f"/job:{job}/replica:0/task:{index}{device}") for name, job, index in tasks for device in devices_of(job, index)
    ]
