"""A failed round, or a host lost during one: the checkpoint is of one step, and its steps are counted."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from scaletier.asynchronous import Asynchronous
from scaletier.checkpoint import LocalCopy
from scaletier.functional_model import FunctionalModel
from scaletier.job import Job
from scaletier.loop import Progress
from scaletier.round_graph import State, make_round
from scaletier.runtime import import_tensorflow
from scaletier.shared_parameters import SharedParameters
from scaletier.synchronous import AllReduce

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


def test_steps_are_counted_before_their_delta_is_added() -> None:
    specs = [SimpleNamespace(size=6, shape=(6,))]
    parameters = SharedParameters(SimpleNamespace(shared=specs), DEVICES * 3, [np.zeros(6, np.float32)], 7)  # type: ignore[arg-type]
    ends = [tf.TensorSpec([6])], [tf.TensorSpec([6])]
    add = tf.function(
        lambda start, reached: parameters.push_delta(start, reached, 0.5, tf.constant(4, tf.int64)), autograph=False
    )
    assigns = operations(add.get_concrete_function(*ends).graph)
    count = assigns[id(parameters._step.handle)]
    assert len(parameters._pieces) == 3
    assert all(count in predecessors(assigns[id(piece.handle)]) for piece in parameters._pieces)


def test_two_pieces_of_a_device_are_on_their_way_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scaletier.shared_parameters._MOST_ELEMENTS", 2)
    specs = [SimpleNamespace(size=8, shape=(8,))]
    parameters = SharedParameters(SimpleNamespace(shared=specs), DEVICES, [np.zeros(8, np.float32)], 7)  # type: ignore[arg-type]
    vector, one = [tf.TensorSpec([8])], tf.constant(1, tf.int64)
    push = tf.function(lambda start, reached: parameters.push_delta(start, reached, 0.5, one), autograph=False)
    pull = tf.function(parameters.pull_fp16, autograph=False)
    for graph, kind in (
        (push.get_concrete_function(vector, vector).graph, "Assign"),
        (pull.get_concrete_function().graph, "Read"),
    ):
        accesses = [operations(graph, kind)[id(piece.handle)] for piece in parameters._pieces]
        assert len(accesses) == 4
        for later in (2, 3):
            waits_for = predecessors(accesses[later])
            assert accesses[later - 2] in waits_for
            assert accesses[later - 1] not in waits_for


def test_a_synchronous_round_without_a_mean_assigns_nothing() -> None:
    data = job()
    network = FunctionalModel(data, data.data.element_spec, 0)
    copy = LocalCopy(network)
    exchange = AllReduce(copy, copy.local, 2, lambda value: tf.identity(value, name="all_reduce"))
    graph = make_round(network, exchange, iter(data.data), DEVICES).graph
    mean, assigns = graph.get_operation_by_name("all_reduce"), operations(graph)
    assert len(assigns) == len([*copy.shared, *copy.local, copy.step])
    assert all(mean in predecessors(one) for one in assigns.values())


def test_a_rescued_checkpoint_has_the_step_of_its_weights() -> None:
    strategy, data = Asynchronous.__new__(Asynchronous), job()
    strategy.job = data
    strategy.network = network = FunctionalModel(data, data.data.element_spec, 0, 2)
    initial_state = State.initial(network)
    strategy.servers = parameters = SharedParameters(
        network, DEVICES, [np.asarray(value) for value in initial_state.shared], 10
    )
    strategy.copy = copy = LocalCopy(network)
    strategy.count, strategy.chief = 2, MagicMock()
    strategy.flags = SimpleNamespace(sync_period=4, max_steps=100, eval_steps=None, log_interval=1.0)
    iterator = iter(data.data)
    strategy.graphs = {DEVICES: make_round(network, parameters, iterator, DEVICES)}
    strategy.progress = Progress(10, 100, 2)
    replica = strategy._replica("master/0", iterator, DEVICES, print)
    state, _ = replica.take(State((), initial_state.local), 4, 0, 2)
    pulled = [np.asarray(value) for value in parameters.pull_fp16()]
    parameters.push_delta(
        [tf.zeros(one.shape) for one in pulled], [tf.ones(one.shape) for one in pulled], 1.0, tf.constant(5, tf.int64)
    )
    strategy.progress.step = 19
    replica.take(state, 4, 0, 2)
    strategy.progress.step = 50
    strategy.rescue()
    strategy.chief.rescue.assert_called_once_with()
    assert int(copy.step) == 19
    for variable, value in zip(copy.shared, pulled, strict=True):
        np.testing.assert_allclose(variable, value + 1, atol=2e-3)


def test_a_checkpoint_has_the_servers_averages_also_after_a_server_is_lost() -> None:
    data = replace(job(), optimizer=keras.optimizers.SGD(use_ema=True, ema_momentum=0.5))
    strategy = Asynchronous.__new__(Asynchronous)
    strategy.job, strategy.devices, strategy.finite = data, DEVICES, lambda: True
    strategy.network = network = FunctionalModel(data, data.data.element_spec, 0, 2)
    state = State.initial(network)
    values = [np.asarray(value) for value in state.shared]
    strategy.servers = parameters = SharedParameters(network, DEVICES, values, 100, [value + 1 for value in values])
    strategy.copy, strategy.state, strategy.chief = LocalCopy(network), state, MagicMock()
    moved = [value + 8 for value in values]
    parameters.push_delta(values, moved, 1.0, tf.constant(2, tf.int64))
    assert strategy.refresh() == 102
    strategy.state_step = 103
    strategy.rescue()
    assert int(strategy.copy.step) == 103
    for average, variable, value in zip(strategy.copy.averages, strategy.copy.shared, values, strict=True):
        np.testing.assert_allclose(average, value + 4.5, rtol=1e-3)
        np.testing.assert_allclose(variable, value)
