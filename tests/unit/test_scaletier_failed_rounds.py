"""A failed round, or a host lost during one: the checkpoint is of one step, and its steps are counted."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from scaletier.asynchronous import Asynchronous
from scaletier.checkpoint import TrainingState
from scaletier.functional_model import FunctionalModel
from scaletier.job import Job
from scaletier.loop import StepBudget
from scaletier.round_graph import LocalResult, handle_specs, make_round, named_handles, run_round
from scaletier.shared_parameters import SharedParameters
from scaletier.synchronous import AllReduce, Synchronous
from scaletier.tensorflow_setup import import_tensorflow
from scaletier.variables import Handle, VariableSpec

tf = import_tensorflow()
import keras  # noqa: E402 - TensorFlow imports it, without its log messages

DEVICES = ("/device:CPU:0",)


def job() -> Job:
    data = tf.data.Dataset.from_tensors((tf.ones([2, 1]), tf.zeros([2, 1]))).repeat()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
    return Job(model, data, "mse", optimizer=keras.optimizers.SGD(0.1, 0.9))


def predecessors(operation: Any) -> set[Any]:
    """Return the operations that finish before this one starts."""
    operations, pending = set[Any](), [operation]
    while pending:
        current = pending.pop()
        new = {*current.control_inputs, *(tensor.op for tensor in current.inputs)} - operations
        operations |= new
        pending += new
    return operations


def operations(graph: Any, kind: str = "Assign") -> dict[int, Any]:
    """Return the operations that assign variables, or read them, by the ids of the variables' handles."""
    handles = {internal.name: id(external) for external, internal in graph.captures}
    return {
        handles[operation.inputs[0].name]: operation for operation in graph.get_operations() if operation.type.startswith(kind)
    }


def packed_specs(parameters: SharedParameters) -> list[Any]:
    """Return the specs of what a round begins with."""
    return [
        [(tf.TensorSpec([end - begin], tf.float16), tf.TensorSpec([])) for begin, end in ranges]
        for ranges in parameters._slice_ranges
    ]


def push_graph(parameters: SharedParameters, size: int) -> Any:
    """Return the graph of a push of steps on one variable."""
    steps = tf.constant(4, tf.int64)
    push = tf.function(lambda start, reached: parameters.push_delta(start, reached, 0.5, steps), autograph=False)
    return push.get_concrete_function(packed_specs(parameters), [tf.TensorSpec([size])]).graph


def test_steps_are_counted_before_their_delta_is_added() -> None:
    network: Any = SimpleNamespace(shared=[VariableSpec("a", (6,), "float32", None)])
    parameters = SharedParameters(network, DEVICES * 3, [np.zeros(6, np.float32)], 7)
    assigns = operations(push_graph(parameters, 6))
    count = assigns[id(parameters._step.handle)]
    assert len(parameters._pieces) == 3
    assert all(count in predecessors(assigns[id(piece.handle)]) for piece in parameters._pieces)


def test_two_pieces_of_a_device_are_on_their_way_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scaletier.shared_parameters._MIN_ELEMENTS", 2)
    network: Any = SimpleNamespace(shared=[VariableSpec("a", (8,), "float32", None)], local=[])
    parameters = SharedParameters(network, DEVICES, [np.zeros(8, np.float32)], 7)
    pull = tf.function(lambda handles: parameters.begin(named_handles(network, handles))[0], autograph=False)
    for graph, kind in (
        (push_graph(parameters, 8), "Assign"),
        (pull.get_concrete_function(handle_specs(network)).graph, "Read"),
    ):
        accesses = [operations(graph, kind)[id(piece.handle)] for piece in parameters._pieces]
        assert len(accesses) == 4
        for later in (2, 3):
            waits_for = predecessors(accesses[later])
            assert accesses[later - 2] in waits_for
            assert accesses[later - 1] not in waits_for


def test_variables_get_parameters_once_all_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server or a replica that is lost before leaves the values of the steps before."""
    monkeypatch.setattr("scaletier.shared_parameters._MIN_ELEMENTS", 2)
    monkeypatch.setattr("scaletier.synchronous._MAX_ELEMENTS", 2)
    specs = [VariableSpec(name, (4,), "float32", None) for name in "ab"]
    network: Any = SimpleNamespace(shared=specs, local=[], replicas=1, ema_pairs=lambda *_: [])
    parameters = SharedParameters(network, DEVICES, [np.zeros(4, np.float32)] * 2, 7)
    reduce = AllReduce(network, 2, lambda value: tf.identity(value, name="all_reduce"))
    result = LocalResult(*(tf.constant(4, tf.int64) for _ in range(3)), results=tf.zeros([2]))
    for function in (
        lambda variables: parameters.begin(variables)[0],
        parameters.pull_exact,
        lambda variables: reduce.end(None, variables, result)[0],
    ):
        build = tf.function(lambda handles, build=function: build(named_handles(network, handles)), autograph=False)
        graph = build.get_concrete_function(handle_specs(network)).graph
        others = {internal.op for _, internal in graph.captures}
        sources = {
            one
            for one in graph.get_operations()
            if one.name.startswith("all_reduce") or (one.type == "ReadVariableOp" and one.inputs[0].op in others)
        }
        writes = [one for one in graph.get_operations() if one.type == "AssignVariableOp"]
        assert (len(sources) >= 4, len(writes)) == (True, 5)
        assert all(sources <= predecessors(one) for one in writes)


def test_a_failed_round_leaves_the_weights_of_the_steps_that_it_counts() -> None:
    """The third batch of the second round is damaged."""
    ones = tf.ones([6, 2, 1])
    numbers = tf.data.Dataset.range(6).map(lambda at: tf.debugging.check_numerics(tf.where(at == 5, np.nan, 1.0), "damaged"))
    data = tf.data.Dataset.zip((tf.data.Dataset.from_tensor_slices(ones), numbers.map(lambda one: tf.fill([2, 1], one))))
    spec = replace(job(), data=data)
    network = FunctionalModel(spec, data.element_spec, 0)
    states = [TrainingState(network), TrainingState(network)]
    for state, rounds in zip(states, ((3, 4), (3, 2)), strict=True):
        iterator = iter(data)
        graph = make_round(network, None, iterator, DEVICES)
        run_round(network, graph, iterator, [state], rounds[0], 1)
        with pytest.raises(tf.errors.InvalidArgumentError) if rounds[1] == 4 else nullcontext():
            run_round(network, graph, iterator, [state], rounds[1], 1)
        assert int(state.step) == 5
    for failed, whole in zip(states[0].variables.values(), states[1].variables.values(), strict=True):
        np.testing.assert_array_equal(failed, whole)


def test_a_rescued_checkpoint_has_the_step_of_its_weights() -> None:
    strategy, data = Asynchronous.__new__(Asynchronous), job()
    strategy.job, strategy.devices, strategy.worker_count = data, DEVICES, 1
    strategy.network = network = FunctionalModel(data, data.data.element_spec, 0, 2)
    strategy.state = state = TrainingState(network)
    strategy.servers = parameters = SharedParameters(network, DEVICES, state.shared, 10)
    strategy.host_count, strategy.chief = 2, MagicMock()
    strategy.all_finite = tf.function(strategy._all_finite, autograph=False)
    strategy.flags = SimpleNamespace(sync_period=4, max_steps=100, eval_steps=None, log_interval=1.0)
    iterator = iter(data.data)
    strategy.graphs = {DEVICES: make_round(network, parameters, iterator, DEVICES)}
    strategy.budget = StepBudget(10, 100, 2)
    replica = strategy._replica("master/0", iterator, DEVICES, print, [state])
    replica.run_round(4, 2)
    parameters._step.assign_add(5)  # another replica's
    replica.run_round(4, 2)
    strategy.rescue()
    strategy.chief.rescue.assert_called_once_with()
    assert int(state.step) == 10 + 4 + 5 + 4
    state.shared[0].assign([[np.nan]])
    strategy.rescue()
    strategy.chief.rescue.assert_called_once_with()


@pytest.mark.parametrize("kind", [Asynchronous, Synchronous])
def test_values_are_not_saved_if_a_lost_host_broke_off_their_pull(kind: Any) -> None:
    strategy, data = kind.__new__(kind), job()
    network = FunctionalModel(data, data.data.element_spec, 0, 2)
    strategy.state, strategy.chief = state, _ = TrainingState(network), MagicMock()
    strategy.all_finite = tf.function(strategy._all_finite, autograph=False)
    assert state.is_complete
    handle = Handle(state.shared[0].handle, network.shared[0])
    handle.free()
    strategy.rescue()
    strategy.chief.rescue.assert_not_called()
    handle.assign([[1.0]])
    strategy.rescue()
    strategy.chief.rescue.assert_called_once_with()


def test_a_checkpoint_has_the_servers_averages_also_after_a_server_is_lost() -> None:
    data = replace(job(), optimizer=keras.optimizers.SGD(use_ema=True, ema_momentum=0.5))
    strategy = Asynchronous.__new__(Asynchronous)
    strategy.job, strategy.devices, strategy.all_finite = data, DEVICES, lambda: True
    strategy.network = network = FunctionalModel(data, data.data.element_spec, 0, 2)
    strategy.state, strategy.chief = TrainingState(network), MagicMock()
    values = [variable.numpy() for variable in strategy.state.shared]
    strategy.servers = parameters = SharedParameters(network, DEVICES, values, 100, [value + 1 for value in values])
    strategy.trace_pull(parameters)
    for piece in parameters._pieces:
        piece.assign_add(tf.fill(piece.shape, 8.0))
    assert strategy.refresh() == 100
    strategy.rescue()
    for average, variable, value in zip(strategy.state.ema_shared, strategy.state.shared, values, strict=True):
        np.testing.assert_allclose(average, value + 1, rtol=1e-6)
        np.testing.assert_allclose(variable, value + 8, rtol=1e-6)
